"""The one exception for a user's mistake: a single line with the values and the remedy."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user asked for. Faces print it as one line and exit with status 2."""


def shown(value: object) -> str:
    """`value` as Python writes it, shortened to a part of a line whatever it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    try:
        return short.repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not known: says which known one is nearest."""
    known = sorted(known)
    begins = [other for other in known if name and other.startswith(name)]
    near = difflib.get_close_matches(name, begins, n=1, cutoff=0.0)
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {shown(name)}: {hint}known are {', '.join(known)}")
