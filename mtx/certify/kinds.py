"""What is known of a value along an axis of the mesh.

    zero       0 everywhere: any of the others
    same       the same on all devices along the axis
    different  another on each: a shard of dims of an array, where that is known
    partial    each device has a term of a sum that is still to be made
    mixed      a buffer of parts of several kinds (`Value.parts`)

A dim may be split in two by a reshape, and two axes of data may meet in an outer product: so a
shard has a set of dims. Adding up over the last of them leaves a partial value. Of a dim that a
reshape has made of several it is remembered which part is sharded, for when it is split again. In
which order the shards lie is not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Name = Literal["zero", "same", "different", "partial", "mixed"]


class Kind(NamedTuple):
    name: Name
    dims: frozenset[int] = frozenset()  # different: those of which it is a shard
    # (dim, low, high): of its elements, those from stride `low` up to `high` apart are sharded
    within: frozenset[tuple[int, int, int]] = frozenset()

    def __str__(self) -> str:
        dims = ", ".join(map(str, sorted(self.dims)))
        return f"{self.name} (a shard of dim {dims})" if dims else self.name

    @property
    def is_same(self) -> bool:
        return self.name in ("zero", "same")

    def moved(self, place: dict[int, tuple[int, ...]]) -> Kind:
        """With each dim where `place` says that it is now; what it does not name is gone."""
        if not self.dims:
            return self
        alone = {dim: new[0] for dim, new in place.items() if len(new) == 1}
        within = ((alone[dim], *strides) for dim, *strides in self.within if dim in alone)
        return different((new for dim in self.dims for new in place.get(dim, ())), within)


ZERO, SAME, PARTIAL, MIXED = Kind("zero"), Kind("same"), Kind("partial"), Kind("mixed")


def different(dims: Iterable[int] = (), within: Iterable = ()) -> Kind:
    return Kind("different", frozenset(dims), frozenset(within))


DIFFERENT = different()


class Part(NamedTuple):
    """Of a buffer in which arrays lie end to end."""

    start: int
    stop: int
    kinds: tuple[Kind, ...]


class Value(NamedTuple):
    """A value of the program."""

    kinds: tuple[Kind, ...]  # along each axis
    constant: float | None = None  # all elements, where the program says so
    divisor: float = 1.0  # the constants by which it has been divided
    random: bool = False  # random bits, and what follows from them alone
    parts: tuple[Part, ...] = ()

    @property
    def is_zero(self) -> bool:
        return bool(self.kinds) and all(kind.name == "zero" for kind in self.kinds)

    def plain(self) -> Value:
        """What is left of it behind an operation that is not linear."""
        return Value(self.kinds)


def either(one: Kind, other: Kind) -> Kind:
    """Of a value that is the one or the other: a branch's, or a loop's."""
    if one == other or other.name == "zero":
        return one
    if one.name == "zero":
        return other
    if "mixed" in (one.name, other.name):
        return MIXED
    if "partial" in (one.name, other.name):
        return DIFFERENT
    if one.is_same or other.is_same:
        return other if one.is_same else one
    return different(one.dims & other.dims, one.within & other.within)


def either_value(one: Value, other: Value) -> Value:
    kinds = tuple(map(either, one.kinds, other.kinds))
    return Value(
        kinds,
        constant=one.constant if one.constant == other.constant else None,
        divisor=one.divisor if one.divisor == other.divisor else 1.0,
        random=one.random and other.random,
        parts=one.parts or other.parts,
    )


def together(kinds: Iterable[Kind]) -> Kind:
    """Of elements that each follow from one of each value; none is partial."""
    kinds = list(kinds)
    if any(not kind.is_same for kind in kinds):
        within = {
            each for kind in kinds for each in kind.within
            if all(each in other.within or each[0] not in other.dims for other in kinds)
        }  # fmt: skip
        return different(frozenset().union(*(kind.dims for kind in kinds)), within)
    return ZERO if all(kind.name == "zero" for kind in kinds) else SAME
