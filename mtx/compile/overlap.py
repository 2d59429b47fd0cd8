"""The time of a compiled program: its computation, and how much communication that hides.

The program is replayed in the order of its schedule. A device computes one instruction at a time,
in the seconds that `mtx.compile.machine` gives. An asynchronous collective runs by itself from its
start, on the links of the node or on the network; each of these serves one collective at a time, so
an instruction hides at most one collective on each of the two. The time that a done still waits is
**exposed**, and so is all of a synchronous collective. Copies to the host's memory and back are
like collectives, with a link of their own in each direction.

The first two iterations of a loop are replayed, and the second stands for all that follow, so that
a collective that starts at the end of one iteration meets its done in the next. A conditional takes
the mean of its branches, or the longest if each stage has its own and all wait for the slowest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mtx.compile.hlo import COLLECTIVES, Program, TripCounts, Weights
from mtx.compile.hlo_text import Computation, Instruction
from mtx.compile.hlo_work import host_copy
from mtx.compile.machine import Machine
from mtx.plan.compiled import HOST, Exposure, Span, Spent, Tick, Timeline

_SAME_VALUE = ("bitcast", "copy", "opt-barrier", "async-update")
_NOTHING = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "opt-barrier")
_PARTS = re.compile(
    r"/(woven|F|B|W|head|embed|embed_backward|send_x|send_dx|gather_params|reduce|clip|update)"
    r"(?=/)"
)
_MOST_COSTLY = 10


def _sums() -> defaultdict[Any, float]:
    return defaultdict(float)


def timeline(
    program: Program, machine: Machine, branch: Weights, *, trip_counts: TripCounts = None,
) -> Timeline:  # fmt: skip
    """Replay the program in the order of its schedule, with computations on one stream and
    collectives on one stream for each kind of link.

    branch, trip_counts: as in `Program.matmul_flops`.
    """
    replay = _Replay(program=program, machine=machine, branch=branch, trip_counts=trip_counts)
    replay.run(program.entry, {}, share=1.0)
    step_s = replay.clock
    for flight, share in tuple(replay.open.items()):  # though none is known to lack a done
        replay.clock = flight.begun
        replay._wait(flight, share)
    exposed_s: dict[tuple[str, ...], float] = _sums()
    for (axes, _), seconds in replay.exposed_s.items():
        exposed_s[axes] += seconds
    exposures = [Exposure(axes, seconds, exposed_s[axes]) for axes, seconds in
                 replay.seconds.items()]  # fmt: skip
    others = [Spent(what, part, seconds) for (what, part), seconds in replay.others_s.items()]
    return Timeline(
        step_s=step_s,
        exposures=tuple(sorted(exposures, key=lambda row: -row.exposed_s)),
        spent=replay.spent(),
        costliest=tuple(sorted(others, key=lambda row: -row.seconds)[:_MOST_COSTLY]),
        tick=replay.tick(),
    )


@dataclass(eq=False)
class _Flight:
    """A collective, or a copy, between its start and its done."""

    axes: tuple[str, ...]
    part: str
    begun: float  # on the clock
    until: float
    takes_s: float
    before: _Flight | None  # the one that its links were still busy with


_Flights = dict[tuple[int, ...], _Flight]  # by the path at which a value, nested tuples, has them
_Links = Literal["node", "network", "to the host", "from the host"]
_Measured = tuple[tuple[str, ...], float, _Links]  # axes, seconds, and where it runs


@dataclass(kw_only=True)
class _Replay:
    """The clock of one device, and what was counted on the way.

    share: how often, on average, one run of the program runs what is being run now.
    """

    program: Program
    machine: Machine
    branch: Weights
    trip_counts: TripCounts
    clock: float = 0.0
    free: dict[_Links, float] = field(default_factory=dict)  # when each becomes free
    last: dict[_Links, _Flight] = field(default_factory=dict)  # what was sent last over each
    known: dict[Instruction, _Measured] = field(default_factory=dict)
    computed_s: dict[tuple[str, str], float] = field(default_factory=_sums)  # by kind and part
    others_s: dict[tuple[str, str], float] = field(default_factory=_sums)  # by what is made, part
    seconds: dict[tuple[str, ...], float] = field(default_factory=_sums)  # of collectives, by axes
    exposed_s: dict[tuple[tuple[str, ...], str], float] = field(default_factory=_sums)  # and part
    open: dict[_Flight, float] = field(default_factory=dict)  # without a done yet: its share
    depth: int = 0  # loops around what is being run
    longest: tuple[float, Instruction, int, tuple[Spent, ...]] | None = None  # loop, as `Tick` says
    spans: list[Span] | None = None  # what is drawn; None: loops are not run to their end

    def spent(self) -> tuple[Spent, ...]:
        exposed = {(f"exposed over {' x '.join(axes)}", part): seconds
                   for (axes, part), seconds in self.exposed_s.items()}  # fmt: skip
        rows = (self.computed_s | exposed).items()
        return tuple(Spent(what, part, seconds) for (what, part), seconds in rows if seconds)

    def run(self, name: str, arguments: dict[int, _Flights], share: float) -> _Flights:
        """Replay a computation; returns the flights in its result, its arguments' or its own."""
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
        """Run the instruction; returns the flights in the value that it makes."""
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
        if opcode == "while":
            return self._loop(instruction, given[0], share)
        if opcode == "conditional":
            return self._choose(instruction, given, share)
        if opcode == "async-start":  # of a computation, with collectives or without
            inside = self.program.computations[instruction.called]
            held = [each for each in inside.values() if each.operation in COLLECTIVES]
            if held:
                return {
                    (place, *path): flight
                    for place, each in enumerate(held)
                    for path, flight in self._communicate(inside, each, share, True).items()
                }
        elif instruction.operation in COLLECTIVES:
            return self._communicate(computation, instruction, share, opcode.endswith("-start"))
        if copy := host_copy(self.program.computations, computation, instruction):
            moved, out = copy
            links: _Links = "to the host" if out else "from the host"
            self.known[instruction] = (HOST,), self.machine.copy_s(moved), links
            return self._communicate(computation, instruction, share, opcode.endswith("-start"))
        if instruction.called and instruction.operation != "fusion":
            return self.run(instruction.called, dict(enumerate(given)), share)
        if opcode.endswith("-done"):
            for flight in given[0].values():
                self._wait(flight, share)
        elif opcode not in _NOTHING:
            self._compute(computation, instruction, share)
        return {}

    def _compute(self, computation: Computation, instruction: Instruction, share: float) -> None:
        kind, seconds = self.machine.compute(self.program, computation, instruction)
        if not seconds:
            return
        part = self._part(instruction)
        self._draw(kind, part, self.clock, seconds)
        self.clock += seconds
        self.computed_s[kind, part] += share * seconds
        if kind == "other":
            self.others_s[_made(instruction), part] += share * seconds

    def _communicate(
        self, computation: Computation, instruction: Instruction, share: float, started: bool
    ) -> _Flights:
        if instruction not in self.known:
            self.known[instruction] = self._measure(computation, instruction)
        axes, takes_s, links = self.known[instruction]
        if not axes:
            return {}  # of one device
        before = self.last.get(links) if self.free.get(links, 0.0) > self.clock else None
        until = self.free[links] = max(self.clock, self.free.get(links, 0.0)) + takes_s
        self.seconds[axes] += share * takes_s
        flight = _Flight(axes, self._part(instruction), self.clock, until, takes_s, before)
        self._draw(" x ".join(axes), flight.part, until - takes_s, takes_s)
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
        links: _Links = "network" if machine.crosses(collective) else "node"
        return axes, machine.collective_s(collective), links

    def _wait(self, flight: _Flight, share: float) -> None:
        waited_s = max(0.0, flight.until - self.clock)
        self.clock += waited_s
        self.open.pop(flight, None)
        waiting: _Flight | None = flight  # for it, and for those its links had to send first
        until = self.clock
        while waiting is not None and waited_s > 0:
            own_s = min(waited_s, waiting.takes_s) if waiting.before else waited_s
            self.exposed_s[waiting.axes, waiting.part] += share * own_s
            self._draw(" x ".join(waiting.axes), waiting.part, until - own_s, own_s, True)
            until, waited_s, waiting = until - own_s, waited_s - own_s, waiting.before

    def _loop(self, loop: Instruction, flights: _Flights, share: float) -> _Flights:
        body, begun = loop.computation("body"), self.clock
        trips = self.program.trips(loop, self.trip_counts)
        if self.spans is not None:
            for _ in range(round(trips)):
                flights = self.run(body, {0: flights}, share)
            return flights
        if not trips:  # its collectives keep no link busy
            return flights
        self.depth += 1
        flights = self.run(body, {0: flights}, share * min(trips, 1.0))
        if trips <= 1:
            self.depth -= 1
            self.clock = begun + trips * (self.clock - begun)
            return flights
        begun, busy, before = self.clock, dict(self.free), self.spent()
        flights = self.run(body, {0: flights}, share * (trips - 1))
        self.depth -= 1
        one_s = self.clock - begun
        if not self.depth and (not self.longest or trips * one_s > self.longest[0]):
            rows = (Spent(row.what, row.part, row.seconds / (share * (trips - 1)))
                    for row in _less(self.spent(), before))  # fmt: skip
            self.longest = trips * one_s, loop, round(trips), tuple(rows)
        skipped_s = (trips - 2) * one_s  # the iterations after the second
        self.clock += skipped_s
        for flight in {each for each in flights.values() if each.begun >= begun}:
            flight.begun += skipped_s  # it is the last iteration's
            flight.until += skipped_s
            self.open[flight] = share
        self.free = {  # of what this iteration has sent, later by the iterations that are skipped
            links: until + (skipped_s if until != busy.get(links) else 0.0)
            for links, until in self.free.items()
        }
        return flights

    def _choose(self, conditional: Instruction, given: list[_Flights], share: float) -> _Flights:
        weights = self.branch(conditional) or self._longest(conditional, given)
        begun, free, carried = self.clock, self.free, {}
        ends, frees = [], []
        for place, (name, weight) in enumerate(zip(conditional.branches, weights, strict=True)):
            if not weight:
                continue
            self.clock, self.free = begun, dict(free)
            carried |= self.run(name, {0: given[place + 1]}, share * weight)
            ends.append(weight * self.clock)
            frees.append({links: weight * until for links, until in self.free.items()})
        self.clock = sum(ends)
        self.free = {
            links: sum(each.get(links, 0.0) for each in frees) for links in set().union(*frees)
        }
        return carried

    def _longest(self, conditional: Instruction, given: list[_Flights]) -> list[float]:
        """Weight 1 for the branch that takes longest, else 0: each is tried, without counting."""
        begun, free, last, flights, ends = self.clock, self.free, self.last, self.open, []
        for place, name in enumerate(conditional.branches):
            self.free, self.last, self.open = dict(free), dict(last), dict(flights)
            self.run(name, {0: given[place + 1]}, 0.0)
            ends.append(self.clock)
            self.clock = begun
        self.free, self.last, self.open = free, last, flights
        return [float(place == ends.index(max(ends))) for place in range(len(ends))]

    def _part(self, instruction: Instruction) -> str:
        """The part of the step that an instruction belongs to. XLA leaves some fusions without a
        name: then the instructions inside them say it."""
        named = [instruction]
        if instruction.operation == "fusion":
            named += reversed(self.program.computations[instruction.called].values())
        found = (_PARTS.findall(each.op_name) for each in named)
        return next((scopes[-1] for scopes in found if scopes), "")

    # -- a tick ------------------------------------------------------------------------------------

    def _draw(
        self, row: str, part: str, start_s: float, seconds: float, exposed: bool = False
    ) -> None:
        if self.spans is not None:
            self.spans.append(Span(row, part, start_s, seconds, exposed))

    def tick(self) -> Tick | None:
        """One iteration of the longest loop, in which each conditional takes its longest branch:
        one with the head. It is the second iteration, so that what the first one has sent is on its
        way."""
        if self.longest is None:
            return None
        whole_s, loop, count, spent = self.longest
        body, drawn = loop.computation("body"), _Replay(
            program=self.program, machine=self.machine, branch=self._fullest,
            trip_counts=self.trip_counts, known=self.known, spans=[],
        )  # fmt: skip
        flights = drawn.run(body, {}, 1.0)
        begun, drawn.spans = drawn.clock, [one for one in drawn.spans or ()
                                           if one.start_s + one.seconds > drawn.clock]  # fmt: skip
        drawn.run(body, {0: flights}, 1.0)
        spans = tuple(replace(one, start_s=one.start_s - begun) for one in _joined(drawn.spans))
        return Tick(
            seconds=whole_s / count, count=count, spent=spent, drawn_s=drawn.clock - begun,
            spans=spans,
        )  # fmt: skip

    def _fullest(self, conditional: Instruction) -> list[float]:
        """Weight 1 for the longest of the branches that are taken at all, else 0."""
        weights = self.branch(conditional) or (1.0,) * len(conditional.branches)
        sizes = [len(self.program.computations[name]) * (weight > 0) for name, weight in
                 zip(conditional.branches, weights, strict=True)]  # fmt: skip
        return [float(place == sizes.index(max(sizes))) for place in range(len(sizes))]


def _less(rows: tuple[Spent, ...], before: tuple[Spent, ...]) -> Iterator[Spent]:
    """What was spent since `before`."""
    known = {(row.what, row.part): row.seconds for row in before}
    for row in rows:
        seconds = row.seconds - known.get((row.what, row.part), 0.0)
        if seconds > 1e-9 * row.seconds:
            yield replace(row, seconds=seconds)


def _joined(spans: list[Span]) -> list[Span]:
    """The spans, with those of one row and part that follow each other joined into one."""
    joined: dict[tuple[str, str, bool], list[Span]] = {}
    for span in spans:
        row = joined.setdefault((span.row, span.part, span.exposed), [])
        if row and abs(row[-1].start_s + row[-1].seconds - span.start_s) < 1e-9:
            row[-1] = replace(row[-1], seconds=row[-1].seconds + span.seconds)
        else:
            row.append(span)
    return [span for row in joined.values() for span in row]


def _made(instruction: Instruction) -> str:
    """The first array that is made, and JAX's or XLA's word for how: bf16[1,2048,6144] mul."""
    shape = instruction.shapes[0]
    how = instruction.op_name.rpartition("/")[2] or instruction.operation
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}] {how}"
