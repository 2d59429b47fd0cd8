"""What is known about a value along an axis of the mesh.

    zero       0 everywhere: can be any of the others
    same       the same on all devices along the axis
    different  different on each device: a shard of an array's dims, if these are known
    partial    each device has a term of a sum that is still to be made
    mixed      a buffer of parts of several kinds (`Value.parts`)

A reshape may split a dim in two, and two axes of data may meet in an outer product, so a shard has
a set of dims. Summing over the last of them leaves a partial value. If a reshape merges several
dims into one, we remember which part of it is sharded, in case it is split again. The order of the
shards is not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Name = Literal["zero", "same", "different", "partial", "mixed"]


class Kind(NamedTuple):
    name: Name
    dims: frozenset[int] = frozenset()  # of a different one: those of which it is a shard
    # (dim, low, high): in this dim, the elements at strides from `low` up to `high` are sharded
    within: frozenset[tuple[int, int, int]] = frozenset()

    def __str__(self) -> str:
        dims = ", ".join(map(str, sorted(self.dims)))
        return f"{self.name} (a shard of dim {dims})" if dims else self.name

    @property
    def is_same(self) -> bool:
        return self.name in ("zero", "same")

    def moved(self, place: dict[int, tuple[int, ...]]) -> Kind:
        """The kind with each dim where `place` puts it; dims that it does not name are gone."""
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
    """A part of a buffer in which arrays lie end to end."""

    start: int
    stop: int
    kinds: tuple[Kind, ...]


class Value(NamedTuple):
    """A value of the program."""

    kinds: tuple[Kind, ...]  # along each axis
    constant: float | None = None  # of all elements, if the program says so
    divisor: float = 1.0  # the constants by which it has been divided
    random: bool = False  # random bits, and what follows from them alone
    parts: tuple[Part, ...] = ()

    @property
    def is_zero(self) -> bool:
        return bool(self.kinds) and all(kind.name == "zero" for kind in self.kinds)

    def plain(self) -> Value:
        """What is still known of it after an operation that is not linear."""
        return Value(self.kinds)


def either(one: Kind, other: Kind) -> Kind:
    """The kind of a value that is either one or the other, as after a branch or a loop."""
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
    """The kind of a value whose elements each depend on one of each operand; none is partial."""
    kinds = list(kinds)
    if any(not kind.is_same for kind in kinds):
        within = {
            each for kind in kinds for each in kind.within
            if all(each in other.within or each[0] not in other.dims for other in kinds)
        }  # fmt: skip
        return different(frozenset().union(*(kind.dims for kind in kinds)), within)
    return ZERO if all(kind.name == "zero" for kind in kinds) else SAME
