"""The devices of a collective: XLA's four ways to write `replica_groups`, and their mesh axes.

Numbers are positions in the program's mesh, row-major, whatever the ids of the devices there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from mtx.errors import UserError
from mtx.sharding.axes import SEQUENCE

Groups = tuple[tuple[int, ...], ...]


def read_groups(attributes: str, *, devices: int) -> Groups:
    """The groups in an instruction's attributes; `devices` is the program's number of devices.

    explicit  replica_groups={{0,1},{2,3}}             jax 0.10
    empty     replica_groups={}                        one group of all
    iota      replica_groups=[4,2]<=[2,4]T(1,0)        reshape of the transpose of a range
    mesh      replica_groups=mesh['a'=2,'b'=4] {'b'}   jax 0.12; also parts of an axis, 'b':(2)2
    """
    text = attributes.partition("replica_groups=")[2]
    if match := re.match(r"\{(\{[\d,{} ]*\})?\}", text):
        return _read_lists(match[0]) or (tuple(range(devices)),)
    if match := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, source = _numbers(match[1]), _numbers(match[2])
        order = _numbers(match[3]) if match[3] else range(len(source))
        ids = np.arange(np.prod(source)).reshape(source).transpose(order).reshape(shape)
        return _as_groups(ids.reshape(shape[0], -1))
    if match := re.match(r"mesh\[([^]]*)\] \{([^}]*)\}", text):
        return _read_mesh(match[1], match[2])
    raise UserError(f"replica_groups={text[:60]!r} is written in a way that is not known here")


def read_pairs(attributes: str) -> Groups:
    """The (source, target) pairs of a collective-permute."""
    match = re.search(r"source_target_pairs=(\{[\d,{} ]*\})", attributes)
    return _read_lists(match[1]) if match else ()


def join_pairs(pairs: Groups) -> Groups:
    """The devices of each ring or line that (source, target) pairs make."""
    rings: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = rings.get(source, {source}) | rings.get(target, {target})
        for device in joined:
            rings[device] = joined
    return tuple({id(ring): tuple(sorted(ring)) for ring in rings.values()}.values())


def axis_of(
    groups: Groups, mesh_shape: Mapping[str, int], *, pairs: bool = False
) -> tuple[str, ...]:
    """The mesh axes that `groups` span, in the order of `mesh_shape`; () for groups of one.

    mesh_shape: {axis: size} in the mesh's order, which numbers the devices row-major.
    pairs: the groups are a permute's (source, target) pairs, which need not cover their axes.
    Raises UserError if the groups are neither a product of whole axes nor equal parts of an axis
    that splits sequences, on which attention may run among some neighbours.
    """
    names, sizes = tuple(mesh_shape), tuple(mesh_shape.values())
    if any(device >= np.prod(sizes) for group in groups for device in group):
        raise UserError(f"groups {groups} name devices outside of the mesh {dict(mesh_shape)}")
    spanned = np.zeros(len(names), bool)
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.array(group), sizes), axis=1)
        spanned |= (coordinates != coordinates[0]).any(axis=0)
    inside = [axis for axis in range(len(names)) if spanned[axis]]
    outside = [axis for axis in range(len(names)) if not spanned[axis]]
    in_parts = {names[axis] for axis in inside} <= set(SEQUENCE) and _are_parts(groups, sizes)
    if not pairs and not in_parts:
        whole = np.arange(np.prod(sizes)).reshape(sizes).transpose(outside + inside)
        wanted = whole.reshape(-1, int(np.prod([sizes[axis] for axis in inside], dtype=int)))
        if {frozenset(group) for group in groups} != {frozenset(row) for row in wanted.tolist()}:
            raise UserError(f"groups {groups} are not whole axes of the mesh {dict(mesh_shape)}")
    return tuple(names[axis] for axis in inside)


def _are_parts(groups: Groups, sizes: tuple[int, ...]) -> bool:
    """Whether each device is in one group, and all groups have the same size."""
    devices = sorted(device for group in groups for device in group)
    return devices == list(range(int(np.prod(sizes)))) and len(set(map(len, groups))) == 1


def _read_mesh(axes: str, grouped: str) -> Groups:
    """Groups over the `grouped` axes of a mesh, each of which may be a part 'name':(before)size."""
    sizes = {name: int(size) for name, size in re.findall(r"([^,=]+)=(\d+)", axes)}
    dims: list[int] = []
    parts: dict[tuple[str, int], int] = {}  # (axis, size of what comes before) -> dim
    wanted = [
        (name, int(before or 1), int(size) if size else sizes[name])
        for name, before, size in re.findall(r"([^,:]+)(?::\((\d+)\)(\d+))?", grouped)
    ]
    for name, size in sizes.items():
        edges = {1, size}
        for other, before, part in wanted:
            if other == name:
                edges |= {before, before * part}
        cuts = sorted(edges)
        for low, high in zip(cuts[:-1], cuts[1:], strict=True):
            parts[name, low] = len(dims)
            dims.append(high // low)
    inside = [
        dim
        for name, before, size in wanted
        for (axis, low), dim in parts.items()
        if axis == name and before <= low < before * size
    ]
    outside = [dim for dim in range(len(dims)) if dim not in inside]
    ids = np.arange(np.prod(dims, dtype=int)).reshape(dims).transpose(outside + inside)
    return _as_groups(ids.reshape(-1, int(np.prod([dims[dim] for dim in inside], dtype=int))))


def _read_lists(text: str) -> Groups:
    return tuple(_numbers(inner) for inner in re.findall(r"\{([\d, ]+)\}", text))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _as_groups(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(device) for device in group) for group in ids)
