"""Schedules whose virtual stages go up the stages and down again, as a V: two chunks a stage.

The last stage turns a microbatch round without a send, and the first stage, which holds embedding
and head, sees its loss. The stashes of a stage's two chunks then add up to the same on every stage,
and how long they are kept can be chosen: ZB-V keeps as much as 1F1B and idles least, V-Half keeps
half of that and V-Min a third. B and W are split in all of them.

A schedule is a **block**, the ops of one microbatch, repeated every PERIOD slots. A slot is the
time of an op of one chunk if F = B = W; four of the six slots take F and B of the two chunks, and
two are left for W.

Legend: m microbatches · p stages · F, B, W times of a whole stage
Kinds of op are numbered 2 * kind + chunk: F of chunk 1 is F1 = 1, W of chunk 0 is W0 = 4.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from mtx.schedules.orders import B, F, Orders, W
from mtx.schedules.schedule import Schedule, vee_placement
from mtx.schedules.shape import Maker, Shape, Times

PERIOD = 6
F0, F1, B0, B1, W0, W1 = range(6)
NEVER = float("inf")


def zb_v(shape: Shape) -> Schedule:
    """ZB-V (Qi et al., ICLR'24, arXiv 2401.10241, section 6): no bubble within 1F1B's memory.

    If F = B = W and sends take no time, the orders are those of torch.distributed.pipelining's
    ScheduleZBVZeroBubble. No stage keeps more than p microbatches, from F to W. Asynchronous: from
    m = 2p - 1 on, no stage waits between its first op and its last, but stages begin one after
    another: p - 1 of 6m slots of F/2 are idle; with fewer microbatches 4(p-1) - 2(m-1), if that is
    more.

    With other times, ops are moved into the gaps that these leave, within the same memory. The
    bubble is then not zero: its rate is 7.3 % with the times that the paper measures for its 1.5B
    model (p=8, m=24), while 1F1B has 24 %.
    """
    orders = _zb_v_orders(shape.microbatches, shape.stages)
    if not is_even(shape.times):
        orders = _fill_gaps(orders, 2 * shape.stages, shape.times)
    return Schedule.from_orders("zb_v", orders, virtual_stages=vee_placement(shape.stages))


def v_half(shape: Shape) -> Schedule:
    """V-Half (Qi et al., NeurIPS'24, arXiv 2405.15362): half of 1F1B's memory.

    No stage keeps more than (p+2) // 2 microbatches, from F to W, as published. Asynchronous, with
    F = B = W and m >= 2p > 4: of 6m slots of F/2, 3p - 4 are idle for an odd p, 3p - 7 for an even
    one; published: about 3p, a bubble of p / (2m).
    """
    return _from_block("v_half", _half_block(shape.stages), half_memory(shape.stages), shape)


def v_min(shape: Shape) -> Schedule:
    """V-Min (Qi et al., NeurIPS'24, arXiv 2405.15362): a third of 1F1B's memory.

    No stage keeps more than (p+4) // 3 microbatches, from F to W, as published. Asynchronous, with
    F = B = W and m >= 2p > 4: of 6m slots of F/2, 4p - 5 are idle, 4p - 7 if 3 divides p;
    published: about 4p, a bubble of 2p / (3m). A microbatch returns to each stage as soon as it
    can, so that unequal times, or sends, leave gaps in every period; V-Half has slack for them.
    """
    return _from_block("v_min", _min_block(shape.stages), min_memory(shape.stages), shape)


def half_memory(stages: int) -> int:
    """Microbatches that V-Half keeps on a stage."""
    return (stages + 2) // 2


def min_memory(stages: int) -> int:
    """Microbatches that V-Min keeps on a stage."""
    return (stages + 4) // 3


def is_even(times: Times) -> bool:
    """Whether every op takes one slot, as in the papers' pictures."""
    return times.forward == times.backward == times.weight and times.only_ops


def _half_block(stages: int) -> np.ndarray:
    """int [4, P]: the slots of F0, F1, B1, B0. F0 and B1 move on every second slot, F1 and B0 every
    slot; the shift keeps the four apart, modulo PERIOD, on every stage.
    """
    stage, shift = np.arange(stages), 0 if stages % 2 else 3
    f0, b1 = 2 * stage, 3 * stages - 1 + shift + 2 * stage
    return np.stack([f0, 3 * stages - 2 - stage, b1, 6 * stages - 2 + shift - stage])


def _min_block(stages: int) -> np.ndarray:
    """int [4, P]: the slots of F0, F1, B1, B0, which all move on every slot; shift as above."""
    stage, shift = np.arange(stages), 0 if stages % 3 else 2
    f0, b1 = stage, 2 * stages + shift + stage
    return np.stack([f0, 2 * stages - 1 - stage, b1, 4 * stages - 1 + shift - stage])


def _from_block(name: str, block_4P: np.ndarray, memory: int, shape: Shape) -> Schedule:
    orders = _fill_gaps(_repeat(block_4P, shape.microbatches), 2 * memory, shape.times)
    return Schedule.from_orders(name, orders, virtual_stages=vee_placement(shape.stages))


def _repeat(block_4P: np.ndarray, microbatches: int) -> Orders:
    """The block once every PERIOD, and every W in the first slot that is free after its B."""
    item = np.tile(np.arange(microbatches), 4)
    kind, chunk = (np.repeat(column, microbatches) for column in ([F, F, B, B], [0, 1, 1, 0]))
    lists = []
    for block in block_4P.T:
        slot = np.repeat(block, microbatches) + PERIOD * item
        order = slot.argsort()
        b_order = order[kind[order] == B]
        free = np.ones(int(slot.max()) + 1 + 2 * microbatches, bool)
        free[slot] = False
        # W number n takes the first free slot that is later than its B and than W n - 1. Its rank
        # among free slots is the largest of (free slots before B number k) + n - k, over k up to n.
        n = np.arange(2 * microbatches)
        rank = np.maximum.accumulate(free.cumsum()[slot[b_order]] - n) + n
        w_slot = np.flatnonzero(free)[rank]
        order = np.concatenate([slot, w_slot]).argsort()
        ops = np.stack([kind, item, chunk], axis=1)
        w_ops = np.stack([np.full(len(n), W), item[b_order], chunk[b_order]], axis=1)
        lists.append(np.concatenate([ops, w_ops])[order].tolist())
    return Orders.from_lists(lists)


def _zb_v_orders(microbatches: int, stages: int) -> Orders:
    """ZB-V by hand. Fewer than 2p - 1 microbatches run the table of 2p - 1 without the others: what
    remains of an order that can run can run as well."""
    items = max(microbatches, 2 * stages - 1)
    lists = []
    for stage in range(stages):
        warm_up = [F0] * (2 * (stages - stage) - 1) + [F1, F0] * stage
        warm_up += [F1, B1, W1] * (stages - stage)
        fed = items - warm_up.count(F0)
        steady = [F0, B0, W0, F1, B1, W1] * fed
        steady += [B0, W0, F1, B1, W1] * (items - fed - warm_up.count(F1))
        cool_down = [B0, B1] * stage + [B0, W0] * (stages - stage) + [W1] * stage + [W0] * stage
        lists.append(warm_up + steady + cool_down)
    return Orders.from_kinds(lists, microbatches, chunks=2)


def _fill_gaps(orders: Orders, limit: int, times: Times) -> Orders:
    """The same ops in an order that idles less, with at most `limit` stashes a stage, from F to W.

    If times differ, an op may fit no gap exactly. So the better of two ways is taken: never be late
    for the next op of the list, or be late by up to half of the op that runs before it.
    """
    patience = (0.0,) if is_even(times) else (0.0, 0.5)
    runs = [_run(orders, limit, times, late) for late in patience]
    best = min(runs, key=lambda stages: max(stage.clock - stage.begin for stage in stages))
    return Orders.from_kinds([stage.ops for stage in best], best[0].items, chunks=2)


def _run(orders: Orders, limit: int, times: Times, late: float) -> list[_Stage]:
    """The stages after they have run, each taking an op from further down its list when it would
    otherwise wait: see `_Stage.choose`.

    No stage waits for ever: of the remaining ops of orders that can run, the one that comes first
    is ready, and it is the head of its list.
    """
    last = len(orders.kind) - 1
    factors = times.stage_factors or (1.0,) * (last + 1)
    stages = [
        _Stage(orders, stage, limit, times, factor, late) for stage, factor in enumerate(factors)
    ]
    receivers = [[_receiver(kind, stage, last) for kind in range(6)] for stage in range(last + 1)]
    events = [(0.0, stage) for stage in range(last + 1)]
    while events:
        now, at = heapq.heappop(events)
        stage = stages[at]
        if now < stage.clock:
            continue
        stage.clock = now
        kind = stage.choose()
        while kind >= 0:
            item, end = stage.take(kind)
            to, output = receivers[at][kind]
            if output >= 0:
                arrives = end if to == at else end + times.comm
                stages[to].inputs[output][item] = arrives
                if stages[to].waits:
                    heapq.heappush(events, (arrives, to))
            kind = stage.head_if_ready()
        if stage.wake < NEVER:
            heapq.heappush(events, (stage.wake, at))
    return stages


def _receiver(kind: int, stage: int, last: int) -> tuple[int, int]:
    """(Stage, kind) of the op that waits for this one's output; kind -1 if none does."""
    if kind == F0:
        return (stage + 1, F0) if stage < last else (stage, F1)
    if kind == F1:
        return (stage - 1, F1) if stage > 0 else (stage, B1)
    if kind == B1:
        return (stage + 1, B1) if stage < last else (stage, B0)
    return (stage - 1, B0) if kind == B0 and stage > 0 else (stage, -1)


class _Stage:
    """One stage as it runs: the list of its ops, and which of them it has taken so far."""

    def __init__(
        self, orders: Orders, stage: int, limit: int, times: Times, factor: float, late: float
    ):
        kind, item, chunk = (array[stage] for array in (orders.kind, orders.item, orders.chunk))
        self.items = items = len(kind) // 6
        # After the last op comes one that is never ready.
        self.kinds, self.item_at = [*(2 * kind + chunk).tolist(), F0], [*item.tolist(), items]
        self.places = np.argsort(2 * kind + chunk, kind="stable").reshape(6, items).tolist()
        self.head = 0  # the place of the first op not taken yet
        self.inputs = [[NEVER] * (items + 1) for _ in range(6)]  # when each op's input arrives
        if stage == 0:
            self.inputs[F0][:items] = [0.0] * items
        self.lasts = [
            time * factor / 2
            for time in (times.forward, times.backward, times.weight)
            for _ in "01"
        ]
        self.taken = [0] * 6  # of each kind
        self.kept = 0  # stashes, now
        self.stashes = np.array([1, 0, -1])[kind].cumsum()  # after each op, as the list is now
        self.limit, self.late = limit, late
        self.begin, self.clock = 0.0, 0.0
        self.wake = 0.0  # when there may be another op to choose
        self.waits = False  # for an input, so that its arrival is an event
        self.ops: list[int] = []  # the kinds of those taken

    def head_if_ready(self) -> int:
        """The kind of the list's head if that is the choice whatever arrives later, else -1."""
        first = self.kinds[self.head]
        if first >= W0:
            kind, arrives = self._before_weight()
            return kind if arrives < NEVER else -1
        return first if self.inputs[first][self.taken[first]] <= self.clock else -1

    def choose(self) -> int:
        """The kind of op to take, by default that of the list's head; -1: wait.

        A W lets the next F or B of the list go first if that is ready. If the head has to wait, the
        first ready op is taken that delays the head by no more than the share `late` of its own
        time. No F is taken early if the list has no room for it.
        """
        now, taken = self.clock, self.taken
        first = self.kinds[self.head]
        due = self.inputs[first][taken[first]]
        ready, self.wake = [], NEVER
        for kind in range(6):
            arrives = self.inputs[kind][taken[kind]]
            if arrives <= now:
                ready.append((self.places[kind][taken[kind]], kind))
            elif arrives < self.wake:
                self.wake = arrives
        ready.sort()
        self.waits = False
        if due <= now:
            return self._before_weight()[0] if first >= W0 else first
        latest = due + 1e-9 * now  # times add up to a rounding error
        for place, kind in ready:
            early = now + (1 - self.late) * self.lasts[kind] <= latest
            if early and (kind > F1 or self._fits(place)):
                return kind
        self.waits = True
        return -1

    def _before_weight(self) -> tuple[int, float]:
        """The kind of the next F or B of the list if it is ready and fits, else that of the W at
        the head; and when the input of that F or B arrives, as far as known."""
        kinds, item_at, taken = self.kinds, self.item_at, self.taken
        place = self.head + 1
        while (kind := kinds[place]) >= W0 or item_at[place] < taken[kind]:
            place += 1
        arrives = self.inputs[kind][item_at[place]]
        if arrives <= self.clock and (kind > F1 or self._fits(place)):
            return kind, arrives
        return kinds[self.head], arrives

    def _fits(self, place: int) -> bool:
        """Whether one more stash fits from now until the list reaches this place."""
        return max(self.kept, int(self.stashes[self.head : place].max())) < self.limit

    def take(self, kind: int) -> tuple[int, float]:
        """Runs the next op of this kind; returns its item, and when it ends."""
        taken, head = self.taken, self.head
        item = taken[kind]
        taken[kind] = item + 1
        place = self.places[kind][item]
        if kind < B0 or kind > B1:
            change = 1 if kind < B0 else -1
            self.kept += change
            if place > head:
                self.stashes[head:place] += change
        while self.item_at[head] < taken[self.kinds[head]]:
            head += 1
        self.head = head
        if not self.ops:
            self.begin = self.clock
        self.ops.append(kind)
        self.clock = self.wake = end = self.clock + self.lasts[kind]
        if B0 <= kind <= B1:
            self.inputs[kind + 2][item] = end
        return item, end


def vee_maker(
    make: Callable[[Shape], Schedule],
    source: str,
    *,
    idle: Callable[[int, int], int],
    in_flight: Callable[[int, int], np.ndarray | None],
    least: Callable[[int], int] = lambda p: 1,
    times_matter: bool = True,
) -> Maker:
    """A maker for two chunks a stage, with closed forms in (p, m) for ops that all take one slot.
    idle: slots, from `least(p)` microbatches on. times_matter: whether times change its order."""

    def bubble_over_ideal(shape: Shape) -> float | None:
        if not is_even(shape.times) or shape.microbatches < least(shape.stages):
            return None
        return idle(shape.stages, shape.microbatches) / (PERIOD * shape.microbatches)

    def known_in_flight(shape: Shape) -> np.ndarray | None:
        if times_matter and not is_even(shape.times):
            return None
        return in_flight(shape.stages, shape.microbatches)

    return Maker(
        make=make, source=source, lockstep=False, virtual=2, default_virtual=2,
        bubble_over_ideal=bubble_over_ideal, in_flight=known_in_flight,
    )  # fmt: skip


def _full(memory: Callable[[int], int]) -> Callable[[int, int], np.ndarray | None]:
    """As many chunks in flight as memory allows, if there are enough microbatches for that."""
    return lambda p, m: np.full(p, 2 * memory(p)) if m >= 2 * memory(p) - 1 else None


_QI_MEMORY = "Qi et al., NeurIPS'24 (arXiv 2405.15362)"
MAKERS: dict[str, Maker] = {
    "zb_v": vee_maker(
        zb_v,
        "Qi et al., ICLR'24 (arXiv 2401.10241), section 6",
        idle=lambda p, m: max(p - 1, 4 * (p - 1) - 2 * (m - 1)),
        in_flight=lambda p, m: np.minimum(min(2 * p, 2 * m), m + 1 + np.arange(p)),
    ),
    "v_half": vee_maker(
        v_half,
        _QI_MEMORY,
        least=lambda p: 2 * p,
        idle=lambda p, m: max(3 * p - 4 if p % 2 else 3 * p - 7, min(p - 1, 1)),
        in_flight=_full(half_memory),
    ),
    "v_min": vee_maker(
        v_min,
        _QI_MEMORY,
        least=lambda p: 2 * p,
        idle=lambda p, m: {1: 0, 2: 1}.get(p, 4 * p - 5 if p % 3 else 4 * p - 7),
        in_flight=_full(min_memory),
    ),
}
