"""`jax.custom_vjp` with types: a decorated function keeps its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class CustomVJP(Protocol[P, R]):
    """A function whose backward pass is given by `defvjp`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def defvjp(self, fwd: Callable, bwd: Callable) -> None: ...


def custom_vjp(*static: int) -> Callable[[Callable[P, R]], CustomVJP[P, R]]:
    """A decorator. static: the positions of arguments that are not arrays."""
    decorator: Any = partial(jax.custom_vjp, nondiff_argnums=static)
    return decorator
