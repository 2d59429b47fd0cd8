"""The VJP of one layer as plain arrays, so that it can wait in a ring between F and B.

`jax.vjp` returns a pytree whose leaves are what the backward pass needs. Weights and the numbers
that say where a layer stands are taken out before it waits and given back before it is called;
what is left are the activations that the model's own recomputation policy keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

Arrays = tuple[jax.Array, ...]
_PARAMS, _PLACE = 0, 2  # positions among the arguments of a block


class LayerVJP:
    """`block(params, x_BsD, place)` and its VJP, cut at what waits in between."""

    def __init__(self, block: Callable, params, x_BsD, place):
        """The arguments are examples: only their shapes and dtypes count."""
        self._block = block
        self._structure: Any = None

        def trace(*args):
            _, vjp = jax.vjp(block, *args)
            leaves, self._structure = jax.tree.flatten(_without_given(vjp))
            return tuple(leaves)

        self.residuals = jax.eval_shape(trace, params, x_BsD, place)

    def forward(self, params, x_BsD, place) -> tuple[jax.Array, Arrays]:
        """(y_BsD, residuals)"""
        y_BsD, vjp = jax.vjp(self._block, params, x_BsD, place)
        return y_BsD, tuple(jax.tree.leaves(_without_given(vjp)))

    def backward(self, residuals: Arrays, params, place, dy_BsD):
        """(dparams, dx_BsD)"""
        vjp = jax.tree.unflatten(self._structure, residuals)
        vjp.args_res[_PARAMS], vjp.args_res[_PLACE] = params, place
        dparams, dx_BsD, _ = vjp(dy_BsD)
        return dparams, dx_BsD


def _without_given(vjp):
    vjp.args_res[_PARAMS] = vjp.args_res[_PLACE] = None
    return vjp
