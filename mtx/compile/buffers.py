"""The largest buffers of a compiled program, from the text of XLA's buffer assignment.

XLA writes it if it is told to dump (`--xla_dump_to`, with `--xla_dump_hlo_as_text`): the
allocations, and in each the values that live there, with their offsets. Each argument has its own
allocation; all temporaries share one, and many of them share the same bytes at different times. A
**place** is a run of bytes of one allocation; its tenants are the values that lie there in turn.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mtx.compile.hlo import Program
from mtx.compile.hlo_text import Instruction, Shape, read_shape
from mtx.plan.compiled import Buffer

if TYPE_CHECKING:
    from mtx.step.trainer import Trainer

# An array's shape -> what the step knows under that shape, or None.
NameOf = Callable[[Shape], str | None]


class Value(NamedTuple):
    """One array while it lives; its name is that of the instruction that makes it."""

    name: str
    bytes: int
    offset: int
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class Place:
    """Some bytes of an allocation, and the values that fill them, largest first."""

    bytes: int
    parameter: int | None  # of the program, if the allocation is an argument
    tenants: tuple[Value, ...]


_ALLOCATION = re.compile(r"allocation \d+: size (\d+), (.*)")
_PARAMETER = re.compile(r"parameter (\d+)\b")
_VALUE = re.compile(
    r" value: <\d+ (?P<name>[^\s{]+)(?:\{[\d,]*\})?(?: \(phi\))? @\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>[a-z]\w*\[[\d,]*\])"
)


def read_places(text: str) -> list[Place]:
    """Places that do not overlap, largest first: in each allocation the largest value takes its
    bytes, then the next one that finds its own still free, and so on."""
    places = [
        place for parameter, values in _allocations(text) for place in _pack(parameter, values)
    ]
    return sorted(places, key=lambda place: -place.bytes)


def _allocations(text: str) -> Iterator[tuple[int | None, list[Value]]]:
    parameter, values = None, []
    for line in text.splitlines():
        head = _ALLOCATION.match(line)
        if head:
            yield parameter, values
            values = []
            found = _PARAMETER.search(head[2])
            parameter = int(found[1]) if found else None
        elif match := _VALUE.match(line):
            values.append(
                Value(
                    name=match["name"],
                    bytes=int(match["size"]),
                    offset=int(match["offset"]),
                    shape=read_shape(match["shape"]),
                )
            )
    yield parameter, values


def _pack(parameter: int | None, values: list[Value]) -> list[Place]:
    taken: list[tuple[int, int, list[Value]]] = []
    for value in sorted(values, key=lambda value: -value.bytes):
        start, stop = value.offset, value.offset + value.bytes
        over = [place for place in taken if start < place[1] and place[0] < stop]
        if not over:
            taken.append((start, stop, [value]))
        elif len(over) == 1 and over[0][:2] == (start, stop):
            over[0][2].append(value)
    return [
        Place(bytes=stop - start, parameter=parameter, tenants=tuple(tenants))
        for start, stop, tenants in taken
    ]


def largest_buffers(
    text: str, program: Program, name_of: NameOf, *, count: int = 10
) -> tuple[Buffer, ...]:
    """The largest places of a buffer assignment and what they hold.

    program: read from the same compilation's text; name_of: the arrays that the step knows.
    """
    made_by = {
        instruction.name: instruction
        for computation in program.computations.values()
        for instruction in computation.values()
    }
    arguments = program.arguments()
    return tuple(
        _describe(place, made_by, arguments, name_of) for place in read_places(text)[:count]
    )


def _describe(
    place: Place, made_by: dict[str, Instruction], arguments: dict[int, str], name_of: NameOf
) -> Buffer:
    names = Counter(filter(None, (name_of(tenant.shape) for tenant in place.tenants)))
    if place.parameter is not None:
        what = _argument(arguments.get(place.parameter, f"argument {place.parameter}"))
    elif names:
        what = " / ".join(name for name, _ in names.most_common(2))
    else:
        what = _op_of(place, made_by)
    shape = place.tenants[0].shape
    written = f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
    return Buffer(bytes=place.bytes, shape=written, what=what)


def _argument(op_name: str) -> str:
    """state.params['embed']['tokens'] -> argument state.params embed.tokens"""
    head, _, keys = op_name.replace("\\'", "'").partition("[")
    path = ".".join(re.findall(r"\['?([^\]']+)'?\]", f"[{keys}"))
    return f"argument {head} {path}".rstrip()


_SCOPES = re.compile(
    r"/(F|B|W|head|embed|embed_backward|send_x|send_dx|gather_params|pipeline|reduce|clip|update)"
    r"(?=/)"
)


def _op_of(place: Place, made_by: dict[str, Instruction]) -> str:
    """The scope and the primitive that most of a place's values come from."""
    ops = Counter()
    for tenant in place.tenants:
        made = made_by.get(tenant.name)
        if made and made.op_name:
            scopes = _SCOPES.findall(made.op_name)
            ops[f"{scopes[-1] if scopes else 'step'}: {made.op_name.rpartition('/')[2]}"] += 1
    return ops.most_common(1)[0][0] if ops else place.tenants[0].name


# -- names of the step's arrays --------------------------------------------------------------------


def names_of_arrays(trainer: Trainer) -> NameOf:
    """A function from an array's shape on one device to what the step holds under that shape.
    Shapes are compared without dims of 1 and in any order, since XLA transposes at will."""
    run, slots = trainer.run, trainer.schedule.slots
    places = trainer.placement.layer.shape[-1]
    known: dict[tuple, tuple[str, list[str]]] = {}
    for path, whole, padded in _parameters(trainer):
        layer = whole[3:] if path.startswith("layers.") else ()
        for dims, in_float32, in_compute_type in (
            (whole, "gradient of {}", "{} in the compute type"),
            (padded, "gradient of {}, padded", "{}, gathered"),
            (layer, "gradient of a layer's {}", "a layer's {}, or its gradient"),
        ):
            _add_name(known, "float32", dims, in_float32, path)
            _add_name(known, run.model.compute_dtype, dims, in_compute_type, path)
    batch, sequence = run.layout.microbatch, run.model.sequence
    rows = trainer.model.vocab_rows // run.layout.vocab_shards
    _add_name(known, "float32", (batch, sequence, rows), "logits")
    _add_name(known, run.model.compute_dtype, (batch, sequence, rows), "gradient of the logits")

    def name_of(shape: Shape) -> str | None:
        if found := known.get(_key(shape.dtype, shape.dims)):
            return found[0].format(" or ".join(found[1]))
        leading = (slots,) if run.layout.stash == "inputs" else (slots, places)
        if shape.dims[: len(leading)] == leading and len(shape.dims) > 2:
            return f"stash of {slots} microbatches' {run.layout.stash}"
        return None

    return name_of


def _parameters(trainer: Trainer) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(name, shape on one device, shape with the padding of its master) of every parameter."""
    import jax
    from jax.tree_util import keystr, tree_leaves_with_path

    masters = jax.tree.leaves(trainer.states.shapes.params)
    specs = jax.tree.leaves(trainer.states.param_specs)
    for (path, leaf), master, spec in zip(
        tree_leaves_with_path(trainer.states.param_shapes), masters, specs, strict=True
    ):
        entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]
        entries += [()] * (leaf.ndim - len(entries))
        parts = [math.prod(trainer.run.layout.sizes[axis] for axis in entry) for entry in entries]
        whole, padded = (
            tuple(size // part for size, part in zip(each.shape, parts, strict=True))
            for each in (leaf, master)
        )
        yield keystr(path, simple=True, separator="."), whole, padded


_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def _key(dtype: str, dims: tuple[int, ...]) -> tuple:
    return _SHORT.get(dtype, dtype), *sorted(dim for dim in dims if dim > 1)


def _add_name(known: dict, dtype: str, dims: tuple[int, ...], name: str, path: str = "") -> None:
    """Add a name for a shape, except for small arrays: many have the same shape."""
    if math.prod(dims) >= 4096:
        first, paths = known.setdefault(_key(dtype, dims), (name, []))
        if first == name and path not in paths:
            paths.append(path)
