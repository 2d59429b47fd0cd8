"""The text of a compiled program as plain data: computations of instructions with shapes.

One reader serves the CPU, GPU and TPU backends of jax 0.10 to 0.12.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

from mtx.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One array, as in `bf16[8,128]`."""

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = False  # in the host's memory; XLA:GPU writes it S(5)

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
    op_name: str  # the JAX scopes and primitive it comes from, "" if unknown

    @property
    def operation(self) -> str:
        """The opcode, without the suffix of an async start."""
        return self.opcode.removesuffix("-start")

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def config(self) -> dict:
        """The backend's configuration; {} if there is none, or if it is not JSON."""
        _, found, text = self.attributes.partition("backend_config=")
        if not found or "{" not in text:
            return {}
        try:
            return json.JSONDecoder().raw_decode(text, text.index("{"))[0]
        except ValueError:
            return {}

    @property
    def target(self) -> str:
        """The target of a custom call; "" for other instructions."""
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def called(self) -> str:
        """The computation that a fusion, a call or an async wrapper runs once; "" for others."""
        if self.opcode.endswith(("-done", "-update")):
            return ""  # its start ran it
        called = self.computation("calls")
        return called or (self.computation("to_apply") if self.operation == "call" else "")

    @property
    def branches(self) -> tuple[str, ...]:
        """Computations of a conditional, in the order of its index (a predicate's: true, false)."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if listed:
            return tuple(re.findall(r"%?([^\s,%]+)", listed[1]))
        found = (self.computation(kind) for kind in ("true_computation", "false_computation"))
        return tuple(name for name in found if name)

    def computation(self, kind: str) -> str:
        """The name in the attribute of that kind, as in body=%name; "" if there is none."""
        match = re.search(rf"\b{kind}=%?([^\s,{{}}]+)", self.attributes)
        return match[1] if match else ""

    def number(self, kind: str) -> int:
        """The number in an attribute such as index=3, or a parameter's number."""
        return int(_found(rf"\b{kind}=(\d+)", self.attributes)[1])


Computation = dict[str, Instruction]  # by name, in program order; the last one is its result


def read_computations(text: str) -> tuple[dict[str, Computation], str, int]:
    """(computations, name of the entry, devices) of `compiled.as_text()`. Raises UserError if the
    text is not an HLO module."""
    computations: dict[str, Computation] = {}
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
    return computations, entry, math.prod(int(size) for size in sizes)


_HEAD = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) \(.*\) -> .*\{")
_LINE = re.compile(r"\s+(?:ROOT )?%?(?P<name>\S+) = (?P<rest>.*)")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\bS\(5\)[^{}]*\})?")
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
    """The shape in a text such as "bf16[8,128]"."""
    return _shape(*_found(_SHAPE, text).groups())


def _shape(dtype: str, dims: str, on_host: str | None) -> Shape:
    sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
    return Shape(dtype=dtype, dims=sizes, on_host=bool(on_host))


def _closing(text: str, start: int) -> int:
    """The position after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.end()
    raise UserError(f"unbalanced parentheses in {text[:80]!r}; pass compiled.as_text() unchanged")


def _element_bits(dtype: str) -> int:
    """Bits of an element: the digits of its name, except for pred, token and opaque."""
    if dtype in ("pred", "token", "opaque"):
        return 8 if dtype == "pred" else 0
    return int(_found(r"\d+", dtype)[0])


def _found(pattern: str | re.Pattern[str], text: str) -> re.Match[str]:
    match = re.search(pattern, text)
    if match is None:
        raise UserError(f"{text[:80]!r} is not as XLA writes it; pass compiled.as_text() unchanged")
    return match
