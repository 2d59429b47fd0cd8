"""How much of a compiled program's communication its computation hides: an estimate, in seconds.

The program is replayed in the order of its schedule. A device computes one instruction at a time,
each as long as its matmuls take at the machine's rate, or its bytes. An asynchronous collective
runs from its start on its own, on the links of the node or on the network, each of which serves one
collective at a time; so an instruction hides a collective on each of the two at most. What a done
then still waits for is **exposed**, and a synchronous collective is wholly.

A loop's first two iterations are replayed, and the second stands for all that follow: so what
starts at an iteration's end is found by the done in the next one. A conditional takes the mean of
its branches. Rates are the planner's (`mtx.plan.calibration`), times of collectives too
(`mtx.plan.network`); starting a kernel counts as nothing, lest bookkeeping pass for work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mtx.compile.groups import Groups
from mtx.compile.hlo import COLLECTIVES, Collective, Program, TripCounts, Weights
from mtx.compile.hlo_text import Computation, Instruction
from mtx.compile.hlo_work import matmul_flops, moved_bytes, operand_shapes
from mtx.plan.calibration import Calibration, calibration_of
from mtx.plan.compiled import Exposure
from mtx.plan.hardware import Hardware
from mtx.plan.network import Group, all_reduce_s, gather_s, message_s

_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_SAME_VALUE = ("bitcast", "copy", "opt-barrier", "async-update")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds of computation and of collectives, on the devices of a mesh."""

    hardware: Hardware
    calibration: Calibration
    mesh_shape: Mapping[str, int]  # in the mesh's order; devices fill nodes row-major

    @classmethod
    def of(cls, hardware: Hardware, *, mesh_shape: Mapping[str, int]) -> Machine:
        """With the planner's constants of this program on that hardware."""
        calibration = calibration_of(hardware, "mtx")
        return cls(hardware=hardware, calibration=calibration, mesh_shape=mesh_shape)

    def compute_s(
        self, program: Program, computation: Computation, instruction: Instruction
    ) -> float:
        """The longer of its matmuls, those inside of a fusion too, and of its bytes."""
        moved = moved_bytes(program.computations, computation, instruction)
        rate = self.hardware.memory_gb_s * 1e9 * self.calibration.memory_share
        return max(moved / rate, self.matmul_s(program, computation, instruction))

    def matmul_s(
        self, program: Program, computation: Computation, instruction: Instruction
    ) -> float:
        """Of its matmuls, those inside of a fusion too."""
        if instruction.operation == "fusion":
            inside = program.computations[instruction.called]
            return sum(self.matmul_s(program, inside, each) for each in inside.values())
        flops = matmul_flops(computation, instruction)
        if not flops:
            return 0.0
        share = self.calibration.matmul_share
        if instruction.target.startswith("__cudnn$fmha"):
            share = self.calibration.attention_share
            mask = instruction.config["cudnn_fmha_backend_config"].get("mask_type", "")
            flops /= 2 if "CAUSAL" in mask else 1  # what the mask hides is skipped
        left = operand_shapes(computation, instruction)[0].dtype
        dtype = "float8" if left.startswith("f8") else _DTYPES.get(left, "bfloat16")
        return flops / (self.hardware.peak_flops(dtype) * share)

    def collective_s(self, collective: Collective) -> float:
        if collective.kind == "collective-permute":
            return message_s(
                collective.operand_bytes, crosses=self.crosses(collective),
                hardware=self.hardware, calibration=self.calibration,
            )  # fmt: skip
        group = _Placed.of(collective.groups)
        whole = max(collective.operand_bytes, collective.result_bytes)
        takes = all_reduce_s if collective.kind == "all-reduce" else gather_s
        return takes(whole, group, hardware=self.hardware, calibration=self.calibration)

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
        """Of the first group: all lie alike."""
        nodes = [device // hardware.node_devices for device in self.groups[0]]
        return max(nodes.count(node) for node in set(nodes))

    def crosses(self, hardware: Hardware) -> bool:
        return any(
            len({device // hardware.node_devices for device in group}) > 1 for group in self.groups
        )


class Timeline(NamedTuple):
    """One run of a program on one device."""

    step_s: float  # what is computed and, in turn with it, what is exposed
    exposures: tuple[Exposure, ...]  # the most exposed first


def timeline(
    program: Program, machine: Machine, branch: Weights, *, trip_counts: TripCounts = None
) -> Timeline:
    """The program in the order of its schedule, with computations on one stream and collectives on
    another for each kind of link: its seconds, those of collectives by the mesh axes that they run
    over, and how many of them are exposed.

    branch, trip_counts: as in `Program.matmul_flops`.
    """
    replay = _Replay(program=program, machine=machine, branch=branch, trip_counts=trip_counts)
    replay.run(program.entry, {}, share=1.0)
    step_s = replay.clock
    for flight, share in tuple(replay.open.items()):  # none is known to lack a done
        replay.clock = flight.begun
        replay._wait(flight, share)
    rows = [
        Exposure(axes=axes, seconds=seconds, exposed_s=replay.exposed_s.get(axes, 0.0))
        for axes, seconds in replay.seconds.items()
    ]
    return Timeline(step_s, tuple(sorted(rows, key=lambda row: -row.exposed_s)))


@dataclass(eq=False)
class _Flight:
    """A collective between its start and its done."""

    axes: tuple[str, ...]
    begun: float  # on the clock
    until: float
    takes_s: float
    before: _Flight | None  # which its links were still busy with


_Flights = dict[tuple[int, ...], _Flight]  # where in a value, a tuple of tuples, they are carried
_Measured = tuple[tuple[str, ...], float, bool]  # axes, seconds, and whether it needs the network


@dataclass
class _Replay:
    """The clock of one device, and what was counted on the way.

    share: how often that which is run now is run, on average, in one run of the program.
    """

    program: Program
    machine: Machine
    branch: Weights
    trip_counts: TripCounts
    clock: float = 0.0
    free: dict[bool, float] = field(default_factory=dict)  # when the node's links and the network's
    last: dict[bool, _Flight] = field(default_factory=dict)  # what was sent last over each of them
    known: dict[Instruction, _Measured] = field(default_factory=dict)
    seconds: dict[tuple[str, ...], float] = field(default_factory=dict)
    exposed_s: dict[tuple[str, ...], float] = field(default_factory=dict)
    open: dict[_Flight, float] = field(default_factory=dict)  # those without a done yet: shares
    quiet: dict[str, float | None] = field(default_factory=dict)  # as `_quiet_s` found them

    def run(self, name: str, arguments: dict[int, _Flights], share: float) -> _Flights:
        """Replays a computation; the flights in its result, its arguments' or its own."""
        held: dict[str, _Flights] = {}
        computation = self.program.computations[name]
        for instruction in computation.values():
            given = [held.get(operand, {}) for operand in instruction.operands]
            if instruction.opcode == "parameter":
                held[instruction.name] = arguments.get(instruction.number("number"), {})
            else:
                held[instruction.name] = self._step(computation, instruction, given, share)
        return held[instruction.name]

    def _step(
        self, computation: Computation, instruction: Instruction, given: list[_Flights],
        share: float,
    ) -> _Flights:  # fmt: skip
        """The flights in the value that the instruction makes, after it has run."""
        opcode = instruction.opcode
        if opcode == "tuple":
            return {
                (place, *path): flight
                for place, flights in enumerate(given)
                for path, flight in flights.items()
            }
        if opcode == "get-tuple-element":
            place = instruction.number("index")
            return {path[1:]: flight for path, flight in given[0].items() if path[:1] == (place,)}
        if opcode in _SAME_VALUE and given[0]:
            return given[0]
        seconds = self._seconds(computation, instruction)
        if seconds is not None:
            self.clock += seconds
            return given[0] if opcode == "while" else {}
        if opcode == "while":
            return self._loop(instruction, given[0], share)
        if opcode == "conditional":
            return self._choose(instruction, given, share)
        if instruction.operation in COLLECTIVES:
            return self._communicate(computation, instruction, share, opcode.endswith("-start"))
        if opcode == "async-start":  # of a computation that holds the collectives
            inside = self.program.computations[instruction.called]
            held = [each for each in inside.values() if each.operation in COLLECTIVES]
            return {
                (place, *path): flight
                for place, each in enumerate(held)
                for path, flight in self._communicate(inside, each, share, True).items()
            }
        if instruction.called:
            return self.run(instruction.called, dict(enumerate(given)), share)
        for flight in given[0].values():
            self._wait(flight, share)
        return {}

    def _communicate(
        self, computation: Computation, instruction: Instruction, share: float, started: bool
    ) -> _Flights:
        if instruction not in self.known:
            self.known[instruction] = self._measure(computation, instruction)
        axes, takes_s, links = self.known[instruction]
        if not axes:
            return {}  # of one device
        before = self.last.get(links) if self.free.get(links, 0.0) > self.clock else None
        self.free[links] = max(self.clock, self.free.get(links, 0.0)) + takes_s
        self.seconds[axes] = self.seconds.get(axes, 0.0) + share * takes_s
        flight = _Flight(
            axes=axes, begun=self.clock, until=self.free[links], takes_s=takes_s, before=before
        )
        self.last[links] = flight
        self.open[flight] = share
        config = instruction.config
        if started and not config.get("collective_backend_config", config).get("is_sync"):
            return {(): flight}
        self._wait(flight, share)
        return {}

    def _measure(self, computation: Computation, instruction: Instruction) -> _Measured:
        collective, machine = self.program.collective(computation, instruction), self.machine
        axes = collective.axes(machine.mesh_shape)
        return axes, machine.collective_s(collective), machine.crosses(collective)

    def _wait(self, flight: _Flight, share: float) -> None:
        waited_s = max(0.0, flight.until - self.clock)
        self.clock += waited_s
        self.open.pop(flight, None)
        waiting: _Flight | None = flight  # for it, and for those that its links had to send before
        while waiting is not None and waited_s > 0:
            own_s = min(waited_s, waiting.takes_s) if waiting.before else waited_s
            self.exposed_s[waiting.axes] = self.exposed_s.get(waiting.axes, 0.0) + share * own_s
            waited_s, waiting = waited_s - own_s, waiting.before

    def _loop(self, loop: Instruction, flights: _Flights, share: float) -> _Flights:
        body, begun = loop.computation("body"), self.clock
        trips = self.program.trips(loop, self.trip_counts)
        flights = self.run(body, {0: flights}, share * min(trips, 1.0))
        if trips <= 1:
            self.clock = begun + trips * (self.clock - begun)
            return flights
        begun, busy = self.clock, dict(self.free)
        flights = self.run(body, {0: flights}, share * (trips - 1))
        skipped_s = (trips - 2) * (self.clock - begun)  # the iterations after the second
        self.clock += skipped_s
        for flight in {each for each in flights.values() if each.begun >= begun}:
            flight.begun += skipped_s  # it is the last iteration's
            flight.until += skipped_s
            self.open[flight] = share
        self.free = {  # of what the iteration has sent, later by those that are skipped
            links: until + (skipped_s if until != busy.get(links) else 0.0)
            for links, until in self.free.items()
        }
        return flights

    def _choose(self, conditional: Instruction, given: list[_Flights], share: float) -> _Flights:
        begun, free, carried = self.clock, self.free, {}
        ends, frees = [], []
        weights = self.branch(conditional)
        for place, (name, weight) in enumerate(zip(conditional.branches, weights, strict=True)):
            self.clock, self.free = begun, dict(free)
            carried |= self.run(name, {0: given[place + 1]}, share * weight)
            ends.append(weight * self.clock)
            frees.append({links: weight * until for links, until in self.free.items()})
        self.clock = sum(ends)
        self.free = {
            links: sum(each.get(links, 0.0) for each in frees) for links in set().union(*frees)
        }
        return carried

    # -- what no collective is in ------------------------------------------------------------------

    def _seconds(self, computation: Computation, instruction: Instruction) -> float | None:
        """Of an instruction with all that it runs; None where there is a collective in that."""
        opcode = instruction.opcode
        if opcode.removesuffix("-start").removesuffix("-done") in (*COLLECTIVES, "async"):
            return self._quiet_s(instruction.called) if opcode == "async-start" else None
        if opcode == "while":
            body_s = self._quiet_s(instruction.computation("body"))
            return body_s and body_s * self.program.trips(instruction, self.trip_counts)
        if opcode == "conditional":
            each_s = [self._quiet_s(name) for name in instruction.branches]
            weighted = zip(self.branch(instruction), each_s, strict=True)
            return _sum([one_s and weight * one_s for weight, one_s in weighted])
        if instruction.called:
            inside_s = self._quiet_s(instruction.called)
            if inside_s is None or instruction.operation != "fusion":
                return inside_s
        return self.machine.compute_s(self.program, computation, instruction)

    def _quiet_s(self, name: str) -> float | None:
        if name not in self.quiet:
            computation = self.program.computations[name]
            self.quiet[name] = _sum([self._seconds(computation, i) for i in computation.values()])
        return self.quiet[name]


def _sum(each_s: list[float | None]) -> float | None:
    """None where one is None."""
    known_s = [one_s for one_s in each_s if one_s is not None]
    return sum(known_s) if len(known_s) == len(each_s) else None
