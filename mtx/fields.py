"""The types of a config's fields, for values that come from a file or a notebook."""

from __future__ import annotations

import functools
import os
import types
import typing
from typing import Any, Literal

import numpy as np

from mtx.errors import UserError


def settle_types(config: Any) -> None:
    """Raises UserError where a field of a frozen dataclass has not the type that it says. What
    means the same is put in its place: a tuple for a list or for one text alone, Python's numbers
    for NumPy's, text for a path. Choices (Literal) only have to be of the type of one."""
    for name, (kind, settled_types) in _kinds(type(config)).items():
        value = getattr(config, name)
        if type(value) in settled_types:  # a search over layouts makes thousands of configs
            continue
        try:
            settled = _settle(value, kind)
        except TypeError:
            raise UserError(f"{name}={value!r} must be {_describe(kind)}") from None
        if settled is not value:
            object.__setattr__(config, name, settled)


@functools.cache
def _kinds(config: type) -> dict[str, tuple[Any, frozenset[type]]]:
    """By field: what it says, and the types whose values are that as they are."""
    hints = typing.get_type_hints(config)
    return {name: (kind, frozenset(_settled_types(kind))) for name, kind in hints.items()}


def _settled_types(kind: Any) -> list[type]:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        found = [_settled_types(part) for part in parts]
        return sum(found, []) if all(found) else []
    if origin is Literal:
        return [type(parts[0])]
    return [] if origin is tuple else [kind]


def _settle(value: Any, kind: Any) -> Any:
    """The value, or what means the same; TypeError where it is not of that kind."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        for part in parts:
            try:
                return _settle(value, part)
            except TypeError:
                continue
        raise TypeError
    if origin is Literal:
        return _settle(value, type(parts[0]))
    if origin is tuple:
        values = (value,) if isinstance(value, str) else value
        if not isinstance(values, (tuple, list)):
            raise TypeError
        each = parts[:1] * len(values) if parts[-1] is Ellipsis else parts
        if len(each) != len(values):
            raise TypeError
        return tuple(_settle(*pair) for pair in zip(values, each, strict=True))
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        value = value.item()
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError
    return value


def _describe(kind: Any) -> str:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(map(_describe, parts)))
    if origin is Literal:
        return " or ".join(map(str, parts)) if isinstance(parts[0], str) else _describe(int)
    if origin is tuple:
        number = "" if parts[-1] is Ellipsis else f"{len(parts)} "
        return f"a list of {number}values, each {_describe(parts[0])}"
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
    return words.get(kind, "None" if kind is types.NoneType else f"a {kind.__name__}")
