"""The steady tick of a compiled step, read off its instructions without timing anything: what lies
beside its collectives, which weights it copies, which gradients it adds in separate passes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mtx.compile.hlo import COLLECTIVES, Program
from mtx.compile.hlo_text import Computation, Instruction
from mtx.compile.hlo_work import matmul_flops

# Rates of an H100's matmuls and links, in FLOP/s and bytes/s; independent of the planner's.
_FLOPS, _BYTES = 0.7 * 989.4e12, {False: 0.78 * 450e9, True: 0.57 * 50e9}


@dataclass(frozen=True, kw_only=True)
class Window:
    """A collective of the steady tick, and the matmuls from its start to its done."""

    name: str
    op_name: str
    kind: str
    axes: tuple[str, ...]
    sent_bytes: float
    synchronous: bool
    flops: float  # inside the window
    writes: int  # of bfloat16 to a stack, inside the window: what F keeps for B
    network: bool  # whether it leaves its node of 8 devices

    @property
    def exposed_bytes(self) -> float:
        """Bytes that the window's matmuls, if they were this collective's alone, do not cover."""
        covered = 0.0 if self.synchronous else self.flops / _FLOPS * _BYTES[self.network]
        return max(0.0, self.sent_bytes - covered)


class SteadyTick:
    """One iteration of the longest loop over ticks: all branches of its conditionals."""

    def __init__(self, program: Program, mesh: dict[str, int]):
        self.program, self.mesh = program, mesh
        loops = [
            each for computation in program.computations.values() for each in computation.values()
            if each.opcode == "while" and each.op_name.endswith("/pipeline/while")
        ]  # fmt: skip
        loop = max(loops, key=program.trips)
        self.names = list(dict.fromkeys(self._reached(loop.computation("body"))))

    def _reached(self, name: str) -> Iterator[str]:
        yield name
        for each in self.program.computations[name].values():
            if each.operation != "fusion":
                for called in self._called(each):
                    yield from self._reached(called)

    @staticmethod
    def _called(each: Instruction) -> list[str]:
        body = [each.computation("body")] if each.opcode == "while" else []
        return [name for name in (*body, *each.branches, each.called) if name]

    def flops(self, computation: Computation, each: Instruction) -> float:
        """FLOPs of the matmuls that an instruction runs. A conditional counts its smallest branch,
        but one of weight gradients or the head its largest: only idle stages skip those."""
        if each.opcode in ("while", "conditional") or each.called:
            inside = [self._flops_of(name) for name in self._called(each)]
            trips = self.program.trips(each, 1.0) if each.opcode == "while" else 1
            skipped = each.op_name.endswith(("/W/cond", "/head/cond"))
            skips = each.opcode == "conditional" and skipped
            return trips * (max(inside) if skips else min(inside))
        return matmul_flops(computation, each)

    def _flops_of(self, name: str) -> float:
        computation = self.program.computations[name]
        return sum(self.flops(computation, each) for each in computation.values())

    # -- collectives -------------------------------------------------------------------------------

    def windows(self) -> list[Window]:
        return [
            window
            for name in self.names
            for window in self._windows(self.program.computations[name])
            if window.axes
        ]

    def _windows(self, computation: Computation) -> Iterator[Window]:
        lines = list(computation.values())
        for place, each in enumerate(lines):
            inside, collectives = computation, [each]
            if each.opcode == "async-start":
                inside = self.program.computations[each.called]
                collectives = list(inside.values())
            for one in collectives:
                if one.operation in COLLECTIVES:
                    beside = self._beside(lines, place)
                    yield self._window(inside, one, computation, beside)

    @staticmethod
    def _beside(lines: list[Instruction], start: int) -> list[Instruction] | None:
        """Instructions from a start to its done. If it is carried to the next iteration: those to
        the end, and from the beginning to the done of the carried one. None if it is synchronous.
        """
        each = lines[start]
        config = each.config
        if not each.opcode.endswith("-start"):
            return None
        if config.get("collective_backend_config", config).get("is_sync"):
            return None
        dones = [place for place, one in enumerate(lines) if one.opcode.endswith("-done")]
        own = [place for place in dones if each.name in lines[place].operands]
        if own:
            return lines[start + 1 : own[0]]
        names = {one.name: one for one in lines}
        carried = [
            place for place in dones if names[lines[place].operands[0]].opcode != each.opcode
            and lines[place].opcode == each.opcode.replace("-start", "-done")
        ]  # fmt: skip
        return [*lines[start + 1 :], *lines[: min(carried, default=0)]]

    def _window(
        self, inside: Computation, one: Instruction, computation: Computation,
        beside: list[Instruction] | None,
    ) -> Window:  # fmt: skip
        collective = self.program.collective(inside, one)
        written = [
            each for each in beside or ()
            if each.op_name.endswith("/dynamic_update_slice") and each.shapes[0].dtype == "bf16"
        ]  # fmt: skip
        return Window(
            name=one.name, op_name=one.op_name, kind=collective.kind,
            axes=collective.axes(self.mesh), sent_bytes=collective.sent_bytes,
            synchronous=beside is None, flops=sum(self.flops(computation, each) for each in
                                                  beside or ()), writes=len(written),
            network=any(len({device // 8 for device in group}) > 1 for group in collective.groups),
        )  # fmt: skip

    # -- weights, gradients and deferred values ----------------------------------------------------

    def copies(self, least: int) -> list[Instruction]:
        """Copies of arrays with at least `least` elements."""
        return [
            each
            for name in self.names
            for each in self.program.computations[name].values()
            if each.opcode == "copy" and math.prod(each.shapes[0].dims) >= least
        ]

    def made(self, dtype: str, shapes: Collection[tuple[int, ...]]) -> list[Instruction]:
        """Instructions without a matmul that write an array of this type and one of these shapes,
        whole or into a stack. Dims of size 1 and the order of dims are ignored."""
        wanted = {_key(shape) for shape in shapes}
        return [
            each
            for name in self.names
            for each in self.program.computations[name].values()
            if each.operation in ("fusion", "copy", "transpose", "dynamic-slice", "add", "convert")
            and not self.flops(self.program.computations[name], each)
            and any(shape == dtype and _key(dims) in wanted for shape, dims in self._writes(each))
        ]

    def _writes(self, each: Instruction) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(type, dims) of each array it writes; for an in-place update, of the update alone."""
        inside = self.program.computations[each.called] if each.called else {}
        updates = [one for one in inside.values() if one.opcode == "dynamic-update-slice"]
        for one in updates:
            shape = inside[one.operands[1]].shapes[0]
            yield shape.dtype, shape.dims
        for shape in () if updates else each.shapes:
            yield shape.dtype, shape.dims


def _key(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in dims if dim > 1))


def matrices(trainer) -> list[tuple[int, ...]]:
    """Shapes of a layer's matrices on one device."""
    import jax

    specs = jax.tree.leaves(trainer.states.param_specs["layers"])
    found = []
    for leaf, spec in zip(
        jax.tree.leaves(trainer.states.param_shapes["layers"]), specs, strict=True
    ):
        entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]
        entries += [()] * (leaf.ndim - len(entries))
        parts = [math.prod(trainer.run.layout.sizes[axis] for axis in entry) for entry in entries]
        dims = [size // part for size, part in zip(leaf.shape, parts, strict=True)][3:]
        if math.prod(dims) > 2**20:
            found.append(tuple(dims))
    return found
