"""The work of one instruction of a compiled program: its matmul FLOPs and the bytes it moves."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from mtx.compile.convolution import convolution_flops
from mtx.compile.hlo_text import Computation, Instruction, Shape
from mtx.errors import UserError


def operand_shapes(computation: Computation, instruction: Instruction) -> tuple[Shape, ...]:
    return tuple(shape for name in instruction.operands for shape in computation[name].shapes)


# -- FLOPs -----------------------------------------------------------------------------------------


def matmul_flops(computation: Computation, instruction: Instruction) -> float:
    """2 M N K, times the batch, if the instruction itself is a matmul; 0 for all others.

    UserError for a matmul that cannot be read.
    """
    opcode = instruction.operation
    if opcode in ("dot", "scaled-dot"):
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        return _dot_flops(computation, instruction, re.findall(r"\d+", dims[1]) if dims else ())
    if opcode == "custom-call":
        return _library_flops(computation, instruction)
    if opcode == "convolution":
        left, right = (computation[name].shapes[0].dims for name in instruction.operands)
        return convolution_flops(left, right, instruction.shapes[0].dims, instruction.attributes)
    if opcode == "ragged-dot":
        raise UserError(
            f"{instruction.name!r} is a {opcode}, which is not counted; count a program without it"
        )
    return 0


def _dot_flops(computation: Computation, instruction: Instruction, contracting) -> float:
    """2 x elements of the result x the contracted size, which is 2 M N K times the batch."""
    left = computation[instruction.operands[0]].shapes[0]
    contracted = math.prod(left.dims[int(dim)] for dim in contracting)
    return 2.0 * instruction.shapes[0].elements * contracted


def _library_flops(computation: Computation, instruction: Instruction) -> float:
    target, config = instruction.target, instruction.config
    operands, result = operand_shapes(computation, instruction), instruction.shapes[0]
    try:
        if target in ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"):
            dims = config["gemm_backend_config"]["dot_dimension_numbers"]
            return _dot_flops(computation, instruction, dims["lhs_contracting_dimensions"])
        if target.startswith("__cudnn$fmha"):  # of q, k, v, [B, S, H, K] or [B, H, S, K]
            scores = config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]["dimensions"]
            of_keys, of_values = operands[0].dims[-1], operands[2].dims[-1]
            backward = "Backward" in target
            sizes = 3 * of_keys + 2 * of_values if backward else of_keys + of_values
            return 2.0 * math.prod(int(dim) for dim in scores) * sizes
    except KeyError as error:
        raise UserError(
            f"{instruction.name!r} calls {target!r} without {error} in its configuration; count a "
            "program without it"
        ) from None
    if target == "__onednn$matmul":  # [..., M, N]; the left operand has K times the M rows
        return 2.0 * result.elements * operands[0].elements / math.prod(result.dims[:-1])
    if re.search(r"gemm|matmul|dot|conv(?!ert)|fmha|attention", target, re.IGNORECASE):
        raise UserError(
            f"{instruction.name!r} calls {target!r}, whose FLOPs are not known here; count a "
            "program without it"
        )
    return 0


# -- bytes -----------------------------------------------------------------------------------------

_MOVES_NOTHING = re.compile(
    r"(bitcast|get-tuple-element|tuple|parameter|constant|after-all|opt-barrier|domain|while"
    r"|conditional|call|async-start|copy-start|send|recv)$|.*-(done|update)$"
)
_NOTHING_RUNS = "AllocateBuffer"  # a custom call for which XLA:GPU starts no kernel
_PARTS = ("dynamic-slice", "slice", "gather")  # of the first operand they read only the result
_IN_PLACE = ("dynamic-update-slice", "scatter")  # into their first operand


def moved_bytes(
    computations: Mapping[str, Computation], computation: Computation, instruction: Instruction
) -> float:
    """Bytes that an instruction reads and writes, each operand once.

    Of a sliced operand only the slice counts, and of one that is updated in place only the update,
    inside fusions too. Instructions that run other computations move nothing themselves.
    """
    if instruction.operation == "fusion":
        return _fusion_bytes(computations, computations[instruction.called])
    if _MOVES_NOTHING.match(instruction.opcode) or instruction.target == _NOTHING_RUNS:
        return 0
    read = sum(
        _read_bytes(computations, computation, name, (instruction,))
        for name in set(instruction.operands)
    )
    return read + _written_bytes(computation, instruction)


_HOST_COPIES = ("dynamic-slice", "dynamic-update-slice", "copy")


def host_copy(
    computations: Mapping[str, Computation], computation: Computation, instruction: Instruction
) -> tuple[float, bool] | None:
    """(bytes, whether they go out) of a copy to the host's memory or back, which may be inside a
    fusion, an async start or both; None for other instructions."""
    while instruction.operation in ("fusion", "async"):
        computation = computations[instruction.called]
        *_, instruction = computation.values()
    if instruction.operation not in _HOST_COPIES:
        return None
    out = instruction.shapes[0].on_host
    if out or operand_shapes(computation, instruction)[0].on_host:
        first = instruction.shapes[0].bytes  # of a start the result, the operand and a context
        updated = instruction.opcode in _IN_PLACE
        return _written_bytes(computation, instruction) if updated else first, out
    return None


def _fusion_bytes(computations: Mapping[str, Computation], inside: Computation) -> float:
    instructions = tuple(inside.values())
    read = sum(
        _read_bytes(computations, inside, each.name, instructions)
        for each in instructions
        if each.opcode == "parameter"
    )
    return read + _written_bytes(inside, instructions[-1])


def _read_bytes(
    computations: Mapping[str, Computation],
    computation: Computation,
    name: str,
    users: tuple[Instruction, ...],
) -> float:
    """Bytes that `users`, of the same computation, read of the value of that name."""
    whole, read = computation[name].bytes, 0
    for user in users:
        if name not in user.operands:
            continue
        first_only = name == user.operands[0] and name not in user.operands[1:]
        if user.opcode == "bitcast":
            read += _read_bytes(computations, computation, user.name, users)
        elif user.opcode in _PARTS and first_only:
            read += user.bytes
        elif user.operation == "fusion":
            inside = computations[user.called]
            instructions = tuple(inside.values())
            read += sum(
                _read_bytes(computations, inside, each.name, instructions)
                for each in instructions
                if each.opcode == "parameter" and user.operands[each.number("number")] == name
            )
        elif not (user.opcode in _IN_PLACE and first_only):
            return whole
    return min(whole, read)


def _written_bytes(computation: Computation, instruction: Instruction) -> float:
    if instruction.opcode == "bitcast":
        return _written_bytes(computation, computation[instruction.operands[0]])
    if instruction.opcode == "tuple":
        return sum(_written_bytes(computation, computation[name]) for name in instruction.operands)
    if instruction.opcode in _IN_PLACE:
        return computation[instruction.operands[1 if "update" in instruction.opcode else -1]].bytes
    return instruction.bytes
