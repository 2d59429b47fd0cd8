"""Reads a compiled program: how many matmul FLOPs it executes, and which collectives it runs.

XLA's own `cost_analysis` counts each loop body once and is missing for absent GPUs, so this walks
the optimised HLO text (`compiled.as_text()`) from its entry: fusions, calls and async wrappers
once, loop bodies `known_trip_count` times, conditionals as the caller says. One walk serves the CPU
and GPU backends of jax 0.10 to 0.12, whose texts differ most in `replica_groups`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mtx.errors import UserError
from mtx.plan.convolution import convolution_flops
from mtx.plan.groups import Groups, axis_of, join_pairs, read_groups, read_pairs

COLLECTIVES = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "collective-permute",
    "all-to-all",
    "collective-broadcast",
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One array, as in `bf16[8,128]`."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return math.ceil(self.elements * _element_bits(self.dtype) / 8)


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of the result, tuples flattened
    operands: tuple[str, ...]  # names of instructions in the same computation
    attributes: str  # what follows the operands, without the metadata
    op_name: str  # the JAX scopes and primitive it comes from, "" where unknown

    @property
    def operation(self) -> str:
        """The opcode, without the suffix of an async start."""
        return self.opcode.removesuffix("-start")

    @property
    def branches(self) -> tuple[str, ...]:
        """Computations of a conditional, in the order of its index (a predicate's: true, false)."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if listed:
            return tuple(re.findall(r"%?([^\s,%]+)", listed[1]))
        found = (_computation(self, kind) for kind in ("true_computation", "false_computation"))
        return tuple(name for name in found if name)


Branch = Literal["max", "sum"] | Callable[[Instruction], Sequence[float]]
TripCounts = float | Mapping[str, float] | None
_Computation = dict[str, Instruction]  # by name, in program order


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective and how often one run of the program executes it, per device."""

    kind: str  # one of COLLECTIVES; an async pair is one
    groups: Groups  # positions in the mesh, row-major; of a permute its (source, target) pairs
    dtype: str  # as the backend runs it: CPU promotes 16-bit reductions to f32
    operand_bytes: int  # on one device, for one execution
    result_bytes: int
    count: float  # executions; whole unless the caller's branch weights are fractions
    overlapped: bool  # the schedule runs other work between its start and its done
    name: str
    op_name: str

    @property
    def group(self) -> int:
        """Devices of a group; of a permute, those of the longest ring or line of its pairs."""
        permute = self.kind == "collective-permute"
        return max(map(len, join_pairs(self.groups) if permute else self.groups), default=1)

    @property
    def sent_bytes(self) -> float:
        """What one device sends in one execution, by ring algorithms: of a whole array of n bytes
        in a group of g, n(g-1)/g, twice that for an all-reduce, and n for a permute."""
        if self.kind == "collective-permute":
            return float(self.operand_bytes)
        share = (self.group - 1) / self.group
        whole = max(self.operand_bytes, self.result_bytes)
        return (2 if self.kind == "all-reduce" else 1) * whole * share

    def axes(self, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
        """The mesh axes it runs over; see `axis_of`."""
        return axis_of(self.groups, mesh_shape, pairs=self.kind == "collective-permute")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program as its computations; made by `read_program`."""

    computations: Mapping[str, _Computation] = field(repr=False)
    entry: str
    devices: int

    def matmul_flops(self, branch: Branch = "max", *, trip_counts: TripCounts = None) -> float:
        """FLOPs of all matmuls that one device executes in one run: 2 M N K each, times its batch.

        Counted are `dot`s wherever they stand, cuBLAS and oneDNN calls, and cuDNN's attention as
        the full square (2 matmuls forward, 5 backward), whatever its mask lets it skip. Kernels of
        other kinds (Pallas, Triton by hand) are not: see `custom_calls`.

        branch: what a conditional costs. "max": its costliest branch, an upper bound; "sum": all of
        them; or a function from its instruction to one weight per branch, such as the share of the
        ticks in which each is taken.
        trip_counts: of loops that do not say theirs, by the name of the `while`, or one for all.

        Raises UserError at a loop without a count, and at a matmul that it cannot read.
        """
        counts = self._count(_matmul_flops, branch, trip_counts)
        return float(sum(count * flops for count, flops in counts.values()))

    def collectives(
        self, branch: Branch = "max", *, trip_counts: TripCounts = None
    ) -> list[Collective]:
        """All collectives that one run executes, in the order of the text.

        Options and errors as for `matmul_flops`; here the costliest branch is the one whose
        operands have the most bytes.
        """
        counts = self._count(_collective_bytes, branch, trip_counts)
        return [
            self._collective(computation, instruction, counts[place][0])
            for place, computation, instruction in self._instructions()
            if place in counts
        ]

    def custom_calls(self) -> dict[str, int]:
        """Targets of custom calls and in how many places the text calls them."""
        targets: dict[str, int] = {}
        for _, _, instruction in self._instructions():
            if instruction.operation == "custom-call":
                targets[_target(instruction)] = targets.get(_target(instruction), 0) + 1
        return targets

    def arguments(self) -> dict[int, str]:
        """What the caller's tree calls each parameter of the program, by its number."""
        named = {}
        for instruction in self.computations[self.entry].values():
            if instruction.opcode == "parameter":
                number = re.match(r"number=(\d+)", instruction.attributes)[1]
                named[int(number)] = instruction.op_name
        return named

    def _instructions(self) -> Iterator[tuple[tuple[str, str], _Computation, Instruction]]:
        for name, computation in self.computations.items():
            for instruction in computation.values():
                yield (name, instruction.name), computation, instruction

    def _collective(self, computation: _Computation, instruction: Instruction, count: float):
        kind, shapes = instruction.operation, instruction.shapes
        operands = _operand_shapes(computation, instruction)
        # An async start's result is the operands, the results and the backend's contexts; older
        # all-reduces, and what is not async, have the results alone.
        if kind != instruction.opcode and len(shapes) >= 2 * len(operands):
            shapes = shapes[len(operands) : 2 * len(operands)]
        if kind == "collective-permute":
            groups = read_pairs(instruction.attributes)
        else:
            groups = read_groups(instruction.attributes, devices=self.devices)
        return Collective(
            kind=kind,
            groups=groups,
            dtype="+".join(sorted({shape.dtype for shape in operands})),
            operand_bytes=sum(shape.bytes for shape in operands),
            result_bytes=sum(shape.bytes for shape in shapes),
            count=count,
            overlapped=_overlapped(computation, instruction),
            name=instruction.name,
            op_name=instruction.op_name,
        )

    def _count(self, cost, branch: Branch, trip_counts: TripCounts):
        """{(computation, instruction): (executions, cost of one)} of all that cost anything."""
        known: dict[str, dict[tuple[str, str], tuple[float, float]]] = {}

        def count(name: str):
            if name not in known:
                known[name] = {}  # HLO has no recursion
                for instruction in self.computations[name].values():
                    one = cost(self.computations[name], instruction)
                    if one:
                        known[name][name, instruction.name] = (1, one)
                    for called, times in self._called(instruction, count, branch, trip_counts):
                        _add(known[name], count(called), times)
            return known[name]

        return count(self.entry)

    def _called(self, instruction: Instruction, count, branch: Branch, trip_counts: TripCounts):
        """(computation, executions) of what `instruction` runs."""
        if instruction.opcode == "while":
            body = _computation(instruction, "body")
            test = _computation(instruction, "condition")
            if not count(body) and not count(test):
                return []
            trips = _trips(instruction, self.computations[test], trip_counts)
            return [(body, trips), (test, trips + 1)]
        if instruction.opcode == "conditional":
            branches = instruction.branches
            if callable(branch):
                return list(zip(branches, branch(instruction), strict=True))
            if branch == "sum":
                return [(name, 1) for name in branches]
            totals = [sum(n * one for n, one in count(name).values()) for name in branches]
            return [(branches[totals.index(max(totals))], 1)]
        if instruction.opcode.endswith(("-done", "-update")):
            return []  # its start was counted
        called = _computation(instruction, "calls")
        if instruction.operation == "call" and not called:
            called = _computation(instruction, "to_apply")
        return [(called, 1)] if called else []


def read_program(text: str) -> Program:
    """The program in `compiled.as_text()`. Raises UserError where the text is no HLO module."""
    computations: dict[str, _Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            head = _HEAD.match(line)
            if head:
                current = computations.setdefault(head["name"], {})
                entry = head["name"] if head["entry"] else entry
        elif line.startswith("}"):
            current = None
        else:
            instruction = _read_instruction(line)
            if instruction:
                current[instruction.name] = instruction
    if not entry:
        raise UserError("this text has no ENTRY computation; pass compiled.as_text()")
    sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
    return Program(
        computations=computations, entry=entry, devices=math.prod(int(size) for size in sizes)
    )


_HEAD = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) \(.*\) -> .*\{")
_LINE = re.compile(r"\s+(?:ROOT )?%?(?P<name>\S+) = (?P<rest>.*)")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_METADATA = re.compile(r',? ?metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*"|\{[^{}]*\})*\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


def _read_instruction(line: str) -> Instruction | None:
    match = _LINE.match(line)
    if not match:
        return None
    rest = match["rest"]
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    opcode, _, after = rest[end:].lstrip().partition("(")
    if opcode == "constant":  # its value may hold any characters; whole numbers are kept
        operands, attributes = "", (re.match(r"-?\d+(?=\))", after) or [""])[0]
    else:
        close = _closing("(" + after, 0) - 1
        operands, attributes = after[: close - 1], after[close:]
        if opcode == "parameter":
            operands, attributes = "", f"number={operands}{attributes}"
    op_name = _OP_NAME.search(attributes)
    return Instruction(
        name=match["name"],
        opcode=opcode,
        shapes=tuple(_shape(*found) for found in _SHAPE.findall(rest[:end])),
        operands=tuple(re.findall(r"%([^\s,()]+)", operands)),
        attributes=_METADATA.sub("", attributes).replace('\\"', '"'),
        op_name=op_name[1] if op_name else "",
    )


def read_shape(text: str) -> Shape:
    """The shape that is written so: "bf16[8,128]"."""
    return _shape(*_SHAPE.match(text).groups())


def _shape(dtype: str, dims: str) -> Shape:
    return Shape(dtype=dtype, dims=tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))


def _closing(text: str, start: int) -> int:
    """The position after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.end()
    raise UserError(f"unbalanced parentheses in {text[:80]!r}; pass compiled.as_text() unchanged")


def _add(counts: dict, more: dict, times: float) -> None:
    for place, (count, one) in more.items():
        before = counts[place][0] if place in counts else 0
        counts[place] = (before + count * times, one)


def _computation(instruction: Instruction, kind: str) -> str | None:
    match = re.search(rf"\b{kind}=%?([^\s,{{}}]+)", instruction.attributes)
    return match[1] if match else None


def _trips(instruction: Instruction, test: _Computation, trip_counts: TripCounts) -> float:
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
    if known:
        return int(known[1])
    if (bound := _bound(test)) is not None:
        return bound
    if isinstance(trip_counts, int | float):
        return trip_counts
    if trip_counts and instruction.name in trip_counts:
        return trip_counts[instruction.name]
    raise UserError(
        f"the loop {instruction.name!r} ({instruction.op_name or 'without a name'}) has no "
        f"known_trip_count; pass trip_counts={{{instruction.name!r}: n}}, or trip_counts=n for all "
        "such loops"
    )


def _bound(test: _Computation) -> int | None:
    """N of a loop whose whole test is counter < N: JAX counts from 0 by 1. TPUs' texts say no more
    than that."""
    last = list(test.values())[-1]
    bound = test.get(last.operands[-1]) if last.opcode == "compare" else None
    is_count = bound and bound.opcode == "constant" and "direction=LT" in last.attributes
    return int(bound.attributes) if is_count and bound.attributes else None


def _operand_shapes(computation: _Computation, instruction: Instruction) -> tuple[Shape, ...]:
    return tuple(shape for name in instruction.operands for shape in computation[name].shapes)


def _collective_bytes(computation: _Computation, instruction: Instruction) -> float:
    if instruction.operation not in COLLECTIVES:
        return 0
    return sum(shape.bytes for shape in _operand_shapes(computation, instruction))


# What stands between a start and its done without being work: names, waits, other transfers.
_NO_WORK = re.compile(
    r"(bitcast|get-tuple-element|tuple|parameter|constant|after-all|opt-barrier|domain)$"
    r"|.*-(start|done|update)$|(send|recv)$"
)


def _overlapped(computation: _Computation, instruction: Instruction) -> bool:
    """Whether a collective leaves the program free to work: it is asynchronous, and the schedule
    (the order of the text) has work between its start and its done.

    GPU marks a pair that it runs in one go as `is_sync`, and one whose done is in the loop's next
    iteration as `is_pipelined`.
    """
    if '"is_pipelined":true' in instruction.attributes:
        return True
    if not instruction.opcode.endswith("-start") or '"is_sync":true' in instruction.attributes:
        return False
    started = False
    for other in computation.values():
        if other.name == instruction.name:
            started = True
        elif started and other.opcode.endswith("-done") and instruction.name in other.operands:
            return False
        elif started and not _NO_WORK.match(other.opcode):
            return True
    return False


def _matmul_flops(computation: _Computation, instruction: Instruction) -> float:
    opcode = instruction.operation
    if opcode in ("dot", "scaled-dot"):
        return _dot_flops(computation, instruction, r"lhs_contracting_dims=\{([\d,]*)\}")
    if opcode == "custom-call":
        return _library_flops(computation, instruction, _target(instruction))
    if opcode == "convolution":
        left, right = (computation[name].shapes[0].dims for name in instruction.operands)
        return convolution_flops(left, right, instruction.shapes[0].dims, instruction.attributes)
    if opcode == "ragged-dot":
        raise UserError(
            f"{instruction.name!r} is a {opcode}, which is not counted; count a program without it"
        )
    return 0


def _dot_flops(computation: _Computation, instruction: Instruction, contracting: str) -> float:
    """2 x elements of the result x the contracted size, which is 2 M N K times the batch."""
    dims = re.search(contracting, instruction.attributes)
    left = computation[instruction.operands[0]].shapes[0]
    contracted = [left.dims[int(dim)] for dim in re.findall(r"\d+", dims[1])] if dims else []
    return 2.0 * instruction.shapes[0].elements * math.prod(contracted)


def _library_flops(computation: _Computation, instruction: Instruction, target: str) -> float:
    if target in ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"):
        return _dot_flops(computation, instruction, r'"lhs_contracting_dimensions":\[([\d",]*)\]')
    left = computation[instruction.operands[0]].shapes[0] if instruction.operands else None
    result = instruction.shapes[0]
    if target == "__onednn$matmul":  # [..., M, N]; the left operand has K times the M rows
        return 2.0 * result.elements * left.elements / math.prod(result.dims[:-1])
    if target.startswith("__cudnn$fmha"):  # left is q, [B, S, H, K] or [B, H, S, K]
        scores = re.search(
            r'"intermediate_tensor_shape":.*?"dimensions":\[([\d",]*)\]', instruction.attributes
        )
        matmuls = 5 if "Backward" in target else 2
        elements = math.prod(int(dim) for dim in re.findall(r"\d+", scores[1]))
        return 2.0 * matmuls * elements * left.dims[-1]
    if re.search(r"gemm|matmul|dot|conv(?!ert)|fmha|attention", target, re.IGNORECASE):
        raise UserError(
            f"{instruction.name!r} calls {target!r}, whose FLOPs are not known here; count a "
            "program without it"
        )
    return 0


def _target(instruction: Instruction) -> str:
    match = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return match[1] if match else ""


def _element_bits(dtype: str) -> int:
    """Bits of an element: the digits of its name, except for pred, token and opaque."""
    if dtype in ("pred", "token", "opaque"):
        return 8 if dtype == "pred" else 0
    return int(re.search(r"\d+", dtype)[0])
