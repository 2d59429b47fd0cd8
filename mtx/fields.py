"""The types and bounds of a config's fields, for values that come from a file or a notebook."""

from __future__ import annotations

import functools
import os
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from mtx.errors import UserError, shown, unknown_name


@dataclass(frozen=True)
class Between:
    """The least and the most that a number may be: Annotated[int, Between(1, 8)]."""

    least: float
    most: float

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most  # False for NaN


_BOUNDS = {int: Between(-(2**63), 2**63 - 1), float: Between(-(2.0**127), 2.0**127)}  # default


def resolve_types(config: Any, *, prefix: str = "") -> None:
    """Raises UserError if a field of a frozen dataclass does not have its declared type, or is out
    of bounds. Equivalent values are converted in place: a list or a single text to a tuple, NumPy's
    numbers to Python's, a path to text. `prefix` is put in front of the names in errors."""
    for name, (kind, resolved_types, bounds) in _kinds(type(config)).items():
        value = getattr(config, name)
        if type(value) in resolved_types and (bounds is None or value is None or value in bounds):
            continue  # a search over layouts makes thousands of configs
        if isinstance(value, (str, int, float)) and _is_right(type(value), value, kind):
            continue
        resolved = checked(prefix + name, value, kind)
        if resolved is not value:
            object.__setattr__(config, name, resolved)


@functools.lru_cache(maxsize=1024)
def _is_right(_: type, value: str | int | float, kind: Any) -> bool:
    """Whether `value` is of `kind` without conversion."""
    try:
        return _resolve("", value, kind) is value
    except (TypeError, UserError):
        return False


def checked(name: str, value: Any, kind: Any) -> Any:
    """The value of a field or argument declared as `kind`, converted; UserError as above."""
    try:
        return _resolve(name, value, kind)
    except TypeError:
        raise UserError(f"{name}={shown(value)} must be {_describe(kind)}") from None


def require_above(config: Any, least: float, *names: str) -> None:
    """UserError if one of these fields is not above `least`."""
    for name in names:
        if not (value := getattr(config, name)) > least:
            raise UserError(f"{name}={value} must be above {least}")


@functools.cache
def _kinds(config: type) -> dict[str, tuple[Any, frozenset[type], Between | tuple | None]]:
    """For each field: its declared type, the types that need no conversion, and its bounds."""
    hints = typing.get_type_hints(config, include_extras=True)
    return {
        name: (kind, frozenset(_resolved_types(kind)), _bounds(kind))
        for name, kind in hints.items()
    }


def _resolved_types(kind: Any) -> list[type]:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        found = [_resolved_types(part) for part in parts]
        bounded = sum(_bounds(part) is not None for part in parts)
        return sum(found, []) if all(found) and bounded < 2 else []
    if origin is Annotated:
        return _resolved_types(parts[0])
    if origin is Literal:
        return [type(parts[0])]
    return [] if origin is tuple else [kind]


def _bounds(kind: Any) -> Between | tuple | None:
    """The bounds of a number, or of one that may be None; the choices of a Literal."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return next(filter(None, map(_bounds, parts)), None)
    if origin is Annotated:
        said = [part for part in parts[1:] if isinstance(part, Between)]
        return said[0] if said else _bounds(parts[0])
    return parts if origin is Literal else _BOUNDS.get(kind)


def _resolve(name: str, value: Any, kind: Any, bounds: Between | tuple | None = None) -> Any:
    """The value, or its equivalent; TypeError if it is not of that kind."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        for part in parts:
            try:
                return _resolve(name, value, part, bounds)
            except TypeError:
                continue
        raise TypeError
    if origin is Annotated:
        return _resolve(name, value, parts[0], _bounds(kind))
    if origin is Literal:
        return _within(name, _resolve(name, value, type(parts[0])), parts)
    if origin is tuple:
        values = (value,) if isinstance(value, str) else value
        if not isinstance(values, (tuple, list)):
            raise TypeError
        each = parts[:1] * len(values) if parts[-1] is Ellipsis else parts
        if len(each) != len(values):
            raise TypeError
        return tuple(_resolve(name, *pair) for pair in zip(values, each, strict=True))
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        value = value.item()
    right = (float, int) if kind is float else kind
    if not isinstance(value, right) or (kind in _BOUNDS and isinstance(value, bool)):
        raise TypeError
    value = _within(name, value, _BOUNDS[float]) if kind is float else value
    return _within(name, value, bounds or _BOUNDS.get(kind))


def _within(name: str, value: Any, bounds: Between | tuple | None) -> Any:
    if bounds is None or value is None or value in bounds:
        return value
    if isinstance(bounds, tuple):
        raise unknown_name(name, str(value), map(str, bounds))
    if bounds is _BOUNDS[float]:
        raise UserError(f"{name}={shown(value)} must be finite, in float32 as well")
    bound = f"at most {bounds.most:,}" if value > bounds.most else f"at least {bounds.least:,}"
    raise UserError(f"{name}={shown(value)} must be {bound}")


def _describe(kind: Any) -> str:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(map(_describe, parts)))
    if origin is Annotated:
        return _describe(parts[0])
    if origin is Literal:
        return " or ".join(map(str, parts)) if isinstance(parts[0], str) else _describe(int)
    if origin is tuple:
        number = "" if parts[-1] is Ellipsis else f"{len(parts)} "
        return f"a list of {number}values, each {_describe(parts[0])}"
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
    return words.get(kind, "None" if kind is types.NoneType else f"a {kind.__name__}")
