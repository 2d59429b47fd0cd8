"""Seconds of single instructions of a compiled program, by the planner's models of the machine.

Matrix products take the time that `mtx.plan.gemm` gives for their sizes, collectives the time that
`mtx.plan.network` gives for their groups, and all else the time to read and write its bytes.
Starting a kernel counts as nothing, so that bookkeeping does not pass for work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mtx.compile.groups import Groups
from mtx.compile.hlo import Collective, Program
from mtx.compile.hlo_text import Computation, Instruction
from mtx.compile.hlo_work import matmul_flops, moved_bytes, operand_shapes
from mtx.plan.calibration import Calibration, calibration_of
from mtx.plan.compiled import Kind
from mtx.plan.gemm import matmul_s
from mtx.plan.hardware import Hardware
from mtx.plan.network import Group, all_reduce_s, all_to_all_s, gather_s, message_s
from mtx.sharding.experts import PRODUCTS

_TAKES = {"all-reduce": all_reduce_s, "all-to-all": all_to_all_s}
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds of computation and of collectives, on the devices of a mesh."""

    hardware: Hardware
    calibration: Calibration
    mesh_shape: Mapping[str, int]  # in the mesh's order; devices fill nodes row-major

    @classmethod
    def of(cls, hardware: Hardware, *, mesh_shape: Mapping[str, int]) -> Machine:
        """The machine with the planner's constants for this program on that hardware."""
        calibration = replace(calibration_of(hardware, "mtx"), kernel_s=0.0)
        return cls(hardware=hardware, calibration=calibration, mesh_shape=mesh_shape)

    def compute(
        self, program: Program, computation: Computation, instruction: Instruction
    ) -> tuple[Kind, float]:
        """The kind of an instruction, and its seconds: the longer of the time for its matmuls,
        including those inside a fusion, and the time for its bytes."""
        products = list(self._products(program, computation, instruction))
        moved = moved_bytes(program.computations, computation, instruction)
        rate = self.hardware.memory_gb_s * 1e9 * self.calibration.memory_share
        seconds = max(moved / rate, sum(each_s for _, each_s in products))
        return products[0][0] if products else "other", seconds

    def _products(
        self, program: Program, computation: Computation, instruction: Instruction
    ) -> Iterator[tuple[Kind, float]]:
        if instruction.operation == "fusion":
            inside = program.computations[instruction.called]
            for each in inside.values():
                yield from self._products(program, inside, each)
        elif flops := matmul_flops(computation, instruction):
            yield self._product(computation, instruction, flops)

    def _product(
        self, computation: Computation, instruction: Instruction, flops: float
    ) -> tuple[Kind, float]:
        """The kind and the seconds of a matmul. Batched ones are attention, except experts', and
        so is cuDNN's kernel."""
        left, right = operand_shapes(computation, instruction)[:2]
        dtype = "float8" if left.dtype.startswith("f8") else _DTYPES.get(left.dtype, "bfloat16")
        if instruction.target.startswith("__cudnn$fmha"):
            mask = instruction.config["cudnn_fmha_backend_config"].get("mask_type", "")
            flops /= 2 if "CAUSAL" in mask else 1  # what the mask hides is skipped
            rate = self.hardware.peak_flops(dtype) * self.calibration.attention_share
            return "attention", flops / rate
        result = instruction.shapes[0].elements  # batch m n; the operands' are batch m k, batch k n
        k = flops / (2 * result)
        batch = left.elements * right.elements / (k * k * result)
        seconds = matmul_s(
            round(left.elements / (k * batch)), round(right.elements / (k * batch)), round(k),
            batch=round(batch), hardware=self.hardware, calibration=self.calibration, dtype=dtype,
            item_bytes=left.bytes // left.elements,
        )  # fmt: skip
        scores = round(batch) > 1 and PRODUCTS not in instruction.op_name
        return "attention" if scores else "matmul", seconds

    def collective_s(self, collective: Collective) -> float:
        if collective.kind == "collective-permute":
            return message_s(
                collective.operand_bytes, crosses=self.crosses(collective),
                hardware=self.hardware, calibration=self.calibration,
            )  # fmt: skip
        group = _Placed.of(collective.groups)
        whole = max(collective.operand_bytes, collective.result_bytes)
        takes = _TAKES.get(collective.kind, gather_s)
        return takes(whole, group, hardware=self.hardware, calibration=self.calibration)

    def copy_s(self, moved_bytes: float) -> float:
        """Seconds to copy that many bytes to the host's memory, or back."""
        return moved_bytes / (self.hardware.host_gb_s * 1e9 * self.calibration.host_share)

    def crosses(self, collective: Collective) -> bool:
        """Whether it needs the network: whether some group has members in two nodes."""
        return _Placed.of(collective.groups).crosses(self.hardware)


@dataclass(frozen=True, kw_only=True)
class _Placed(Group):
    """Groups of devices at known places, so that the stride does not matter."""

    groups: Groups

    @classmethod
    def of(cls, groups: Groups) -> _Placed:
        return cls(size=max(map(len, groups), default=1), stride=1, groups=groups)

    def members_in_node(self, hardware: Hardware) -> int:
        """Members of the first group in one node; all groups lie alike."""
        nodes = [device // hardware.node_devices for device in self.groups[0]]
        return max(nodes.count(node) for node in set(nodes))

    def crosses(self, hardware: Hardware) -> bool:
        return any(
            len({device // hardware.node_devices for device in group}) > 1 for group in self.groups
        )
