"""What of a compiled program's time goes into no matmul and no collective: the costliest of it."""

from __future__ import annotations

import re
from collections import defaultdict

from mtx.compile.hlo import COLLECTIVES, Program, TripCounts, Weights
from mtx.compile.hlo_text import Computation, Instruction
from mtx.compile.overlap import Machine
from mtx.plan.compiled import Costly

_SCOPE = re.compile(
    r"/(woven|F|B|W|embed|head|embed_backward|gather_params|reduce|clip|update)(?=/)"
)
_FREE = ("while", "conditional", "call", "parameter", "tuple", "get-tuple-element", "bitcast",
         "constant", "opt-barrier")  # fmt: skip


def costliest(
    program: Program, machine: Machine, branch: Weights, *, trip_counts: TripCounts, most: int = 10
) -> tuple[Costly, ...]:
    """By what is made and in which part of the step, the costliest first; seconds as in
    `mtx.compile.overlap`, whose `branch` and `trip_counts` these are."""
    fused = {
        id(program.computations[each.called])
        for computation in program.computations.values()
        for each in computation.values()
        if each.operation == "fusion"
    }

    def cost(computation: Computation, instruction: Instruction) -> float:
        kind = instruction.operation
        communicates = kind in COLLECTIVES or instruction.opcode.startswith("async")
        if id(computation) in fused or kind in _FREE or communicates:
            return 0.0
        if instruction.opcode.endswith(("-start", "-done")):
            return 0.0
        if machine.matmul_s(program, computation, instruction):
            return 0.0
        return machine.compute_s(program, computation, instruction)

    found: dict[tuple[str, str], float] = defaultdict(float)
    for (name, place), (count, one_s) in program.costs(cost, branch, trip_counts).items():
        instruction = program.computations[name][place]
        scope = _SCOPE.search(instruction.op_name)
        found[_made(instruction), scope[1] if scope else ""] += count * one_s
    rows = [Costly(what=what, part=part, seconds=float(s)) for (what, part), s in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.seconds)[:most])


def _made(instruction: Instruction) -> str:
    """bf16[1,2048,6144] mul: what is made first, and JAX's or XLA's word for how."""
    shape = instruction.shapes[0]
    how = instruction.op_name.rpartition("/")[2] or instruction.operation
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}] {how}"
