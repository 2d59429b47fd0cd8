"""The one exception for a user's mistakes: a single line with the values and the remedy."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the user's request. Commands print it as one line and exit with status 2."""


def shown(value: object) -> str:
    """`value` as Python writes it, shortened to fit in a line."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    try:
        return short.repr(value)
    except ValueError:  # Python refuses to write numbers of more than 4,300 digits
        return "a number of thousands of digits"


def reason(error: BaseException) -> str:
    """The message of a library's error, shortened to fit in a line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def require_kind(name: str, value: object, kinds: type | tuple[type, ...], use: str) -> None:
    """UserError if the argument `name` of a public function is of none of the types `kinds`. use:
    what to give instead."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise UserError(f"{name}={shown(value)} is of type {type(value).__name__}; use {use}")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for an unknown name; it lists the known names, and suggests the nearest if any."""
    known = sorted(known)
    near = nearest(name, known)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return UserError(f"unknown {kind} {shown(name)}: {hint}known are {', '.join(known)}")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The names of `known` that `name` was likely meant to be, at most three: those that differ in
    capitals or hyphens; else those that begin with it; else the one that is a slip away, or two
    slips for a name of ten letters, and so on."""
    plain = {other: _plain(other) for other in known}
    name = _plain(name)
    same = [other for other, letters in plain.items() if letters == name]
    begun = [other for other, letters in plain.items() if letters.startswith(name)]
    if same or (begun and len(begun) <= 3 and len(name) > 1):
        return same or begun
    most = max(1, len(name) // 5) if len(name) > 2 else 0
    slips = {
        other: count
        for other, letters in plain.items()
        if abs(len(letters) - len(name)) <= most and (count := _slips(name, letters)) <= most
    }
    return [min(slips, key=slips.__getitem__)] if slips else []


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _slips(given: str, meant: str) -> int:
    """The edit distance: letters that are wrong, missing, extra, or swapped with the next one."""
    before, row = [], list(range(len(meant) + 1))
    for i, one in enumerate(given):
        older, before, row = before, row, [i + 1]
        for j, other in enumerate(meant):
            count = min(row[j] + 1, before[j + 1] + 1, before[j] + (one != other))
            if i and j and (one, given[i - 1]) == (meant[j - 1], other):
                count = min(count, older[j - 1] + 1)
            row.append(count)
    return row[-1]


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` below and above: "8 or 16"."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else f"{above}"


def nearest_divisors(value: int, wanted: int) -> str:
    """The divisors of `value` nearest to `wanted`, which is not one: "2 or 4"."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    divisors = {1, *small, *(value // n for n in small)}
    below = max((n for n in divisors if n < wanted), default=1)
    above = min((n for n in divisors if n > wanted), default=None)
    return f"{below} or {above}" if above else f"{below}"
