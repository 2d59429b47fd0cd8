"""Reads a compiled program: how many matmul FLOPs it executes, and which collectives it runs.

XLA's own `cost_analysis` counts each loop body once and is missing for absent GPUs, so this walks
the optimised HLO text (`compiled.as_text()`) from its entry: fusions, calls and async wrappers
once, loop bodies `known_trip_count` times, conditionals as the caller says. One walk serves the CPU
and GPU backends of jax 0.10 to 0.12, whose texts differ most in `replica_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mtx.compile.groups import Groups, axis_of, join_pairs, read_groups, read_pairs
from mtx.compile.hlo_text import Computation, Instruction, read_computations
from mtx.compile.hlo_work import matmul_flops, operand_shapes
from mtx.errors import UserError

COLLECTIVES = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "collective-permute",
    "all-to-all",
    "collective-broadcast",
)

# A conditional -> a weight per branch; (): the longest branch, if time is what is asked for
Weights = Callable[[Instruction], Sequence[float]]
Branch = Literal["max", "sum"] | Weights
TripCounts = float | Mapping[str, float] | Callable[[Instruction], float] | None


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective and how often one run of the program executes it, per device."""

    kind: str  # one of COLLECTIVES; an async pair counts as one
    groups: Groups  # positions in the mesh, row-major; for a permute its (source, target) pairs
    dtype: str  # as the backend runs it: CPU promotes 16-bit reductions to f32
    operand_bytes: int  # on one device, for one execution
    result_bytes: int
    count: float  # executions; whole unless the caller's branch weights are fractions
    name: str
    op_name: str

    @property
    def group(self) -> int:
        """Devices in a group; for a permute, in the longest ring or line that its pairs make."""
        permute = self.kind == "collective-permute"
        return max(map(len, join_pairs(self.groups) if permute else self.groups), default=1)

    @property
    def sent_bytes(self) -> float:
        """What one device sends in one execution, by ring algorithms: for a whole array of n bytes
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

    computations: Mapping[str, Computation] = field(repr=False)
    entry: str
    devices: int

    def matmul_flops(self, branch: Branch = "max", *, trip_counts: TripCounts = None) -> float:
        """FLOPs of all matmuls that one device executes in one run: 2 M N K each, times its batch.

        It counts `dot`s wherever they are, cuBLAS and oneDNN calls, and cuDNN's attention as the
        full square (2 matmuls forward, 5 backward), whatever its mask lets it skip. Kernels of
        other kinds (Pallas, Triton by hand) are not counted: see `custom_calls`.

        branch: what a conditional costs. "max": its costliest branch, an upper bound; "sum": all of
        them; or a function from its instruction to one weight per branch, such as the share of the
        ticks in which each is taken.
        trip_counts: for loops that do not say theirs: by the name of the `while`, one for all, or a
        function of the `while`.

        Raises UserError for a loop without a count, and for a matmul that it cannot read.
        """
        counts = self.costs(matmul_flops, branch, trip_counts)
        return float(sum(count * flops for count, flops in counts.values()))

    def collectives(
        self, branch: Branch = "max", *, trip_counts: TripCounts = None
    ) -> list[Collective]:
        """All collectives that one run executes, in the order of the text.

        Options and errors as for `matmul_flops`; here the costliest branch is the one whose
        operands have the most bytes.
        """
        counts = self.costs(_collective_bytes, branch, trip_counts)
        return [
            self.collective(computation, instruction, counts[place][0])
            for place, computation, instruction in self._instructions()
            if place in counts
        ]

    def custom_calls(self) -> dict[str, int]:
        """The targets of custom calls, and in how many places the text calls each."""
        targets: dict[str, int] = {}
        for _, _, instruction in self._instructions():
            if instruction.operation == "custom-call":
                targets[instruction.target] = targets.get(instruction.target, 0) + 1
        return targets

    def arguments(self) -> dict[int, str]:
        """The name in the caller's tree of each parameter of the program, by its number."""
        named = {}
        for instruction in self.computations[self.entry].values():
            if instruction.opcode == "parameter":
                named[instruction.number("number")] = instruction.op_name
        return named

    def _instructions(self) -> Iterator[tuple[tuple[str, str], Computation, Instruction]]:
        for name, computation in self.computations.items():
            for instruction in computation.values():
                yield (name, instruction.name), computation, instruction

    def collective(
        self, computation: Computation, instruction: Instruction, count: float = 1
    ) -> Collective:
        """The collective that an instruction is, or starts."""
        kind, shapes = instruction.operation, instruction.shapes
        operands = operand_shapes(computation, instruction)
        # An async start's result is the operands, the results and the backend's contexts; older
        # all-reduces, and instructions that are not async, have only the results.
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
            name=instruction.name,
            op_name=instruction.op_name,
        )

    def costs(self, cost, branch: Branch, trip_counts: TripCounts):
        """{(computation, instruction): (executions, cost of one)} for all that cost anything."""
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
        """[(computation, executions)] of the computations that `instruction` runs."""
        if instruction.opcode == "while":
            body = instruction.computation("body")
            test = instruction.computation("condition")
            if not count(body) and not count(test):
                return []
            trips = self.trips(instruction, trip_counts)
            return [(body, trips), (test, trips + 1)]
        if instruction.opcode == "conditional":
            branches = instruction.branches
            if callable(branch):
                return list(zip(branches, branch(instruction), strict=True))
            if branch == "sum":
                return [(name, 1) for name in branches]
            totals = [sum(n * one for n, one in count(name).values()) for name in branches]
            return [(branches[totals.index(max(totals))], 1)]
        return [(instruction.called, 1)] if instruction.called else []

    def trips(self, loop: Instruction, trip_counts: TripCounts = None) -> float:
        """How often the body of a `while` runs; `trip_counts` and errors as for `matmul_flops`."""
        known = loop.config.get("known_trip_count")
        if known:
            return int(known["n"])
        if (bound := _bound(self.computations[loop.computation("condition")])) is not None:
            return bound
        if isinstance(trip_counts, int | float):
            return trip_counts
        if callable(trip_counts):
            return trip_counts(loop)
        if trip_counts and loop.name in trip_counts:
            return trip_counts[loop.name]
        raise UserError(
            f"the loop {loop.name!r} ({loop.op_name or 'without a name'}) has no known_trip_count; "
            f"pass trip_counts={{{loop.name!r}: n}}, or trip_counts=n for all such loops"
        )


def read_program(text: str) -> Program:
    """The program in `compiled.as_text()`. Raises UserError if the text is not an HLO module."""
    computations, entry, devices = read_computations(text)
    return Program(computations=computations, entry=entry, devices=devices)


def _add(counts: dict, more: dict, times: float) -> None:
    for place, (count, one) in more.items():
        before = counts[place][0] if place in counts else 0
        counts[place] = (before + count * times, one)


def _bound(test: Computation) -> int | None:
    """N, if a loop's whole test is counter < N: JAX counts from 0 by 1. TPUs' texts say no more
    than that."""
    last = list(test.values())[-1]
    is_less = last.opcode == "compare" and "direction=LT" in last.attributes
    bound = test.get(last.operands[-1]) if is_less else None
    value = bound.attributes if bound and bound.opcode == "constant" else ""
    return int(value) if value else None


def _collective_bytes(computation: Computation, instruction: Instruction) -> float:
    if instruction.operation not in COLLECTIVES:
        return 0
    return sum(shape.bytes for shape in operand_shapes(computation, instruction))
