"""Woven ticks compute the same values, in an order in which collectives lie beside matmuls."""

from __future__ import annotations

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import reference
from errors import names
from test_step_in_place import GPT, LLAMA, SIZES, InPlace, found_by, on_one_device

import mtx
from mtx.compile.compiler import find_compiler
from mtx.compile.step import compile_plan
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.errors import UserError
from mtx.pipeline import shares
from mtx.pipeline.anneal import Streams
from mtx.pipeline.blocks import Blocks, MemoryOp, Step, Turn, blocks
from mtx.pipeline.order import Order, order
from mtx.pipeline.turns import Turns
from mtx.pipeline.weave import Braid
from mtx.plan.memory import predict_memory
from mtx.schedules.makers import make
from mtx.schedules.schedule import IDLE
from mtx.step import xla
from mtx.strand import Strand

DEEPSEEK = ModelConfig(
    family="deepseek_v3", layers=6, hidden=32, heads=4, ffn=48, sequence=16, vocab=61, latent=16,
    query_latent=24, plain_size=8, turned_size=4, value_dim=8, dense_layers=1, experts=8,
    choices=2, expert_ffn=16, groups_of_experts=4, top_groups=2, second_token=True,
    compute_dtype="float32", vocab_multiple=8,
)  # fmt: skip
MIXTRAL = ModelConfig(
    family="mixtral", kv_heads=2, experts=4, choices=2, **SIZES | {"vocab_multiple": 4}
)
GPT_OSS = ModelConfig(
    family="gpt_oss", kv_heads=2, head_dim=4, experts=4, choices=2, expert_ffn=12,
    **SIZES | {"vocab_multiple": 4}
)  # fmt: skip
GEMMA = ModelConfig(family="gemma2", kv_heads=2, **SIZES | {"vocab_multiple": 4})


@pytest.mark.parametrize(
    ("trainer", "model", "layout"),
    [
        (mtx.Trainer, GPT, Layout(pipe=2, tensor=4)),
        (InPlace, GPT, Layout(data=2, pipe=2, tensor=2, virtual=2, recompute="selective")),
        (InPlace, LLAMA, Layout(pipe=2, tensor=2, virtual=4, recompute="full")),
        (mtx.Trainer, LLAMA, Layout(data=2, pipe=2, tensor=2, virtual=2, zero=3)),
        (mtx.Trainer, LLAMA, Layout(data=3, pipe=2, virtual=4)),
        (InPlace, GPT, Layout(data=2, pipe=2, tensor=2, virtual=2, schedule="zb_v")),
        (mtx.Trainer, GEMMA, Layout(data=4, pipe=2, virtual=2, schedule="breadth_first")),
        (InPlace, LLAMA, Layout(data=4, pipe=2, virtual=2, zero=3, zero_unit="layer")),
        (mtx.Trainer, GPT, Layout(data=8, zero=3, zero_unit="layer", recompute="selective")),
        (mtx.Trainer, GEMMA, Layout(data=4, tensor=2, zero=3, zero_unit="layer")),
        # passes that only one matmul needs, and passes that several need
        (InPlace, LLAMA, Layout(
            data=4, tensor=2, zero=3, microbatch=2, recompute="around_attention"
        )),
        (mtx.Trainer, LLAMA, Layout(data=4, tensor=2, sequence_parallel=False)),
        (InPlace, GPT, Layout(pipe=4, tensor=2, virtual=2, schedule="zb_v")),
        (mtx.Trainer, GEMMA, Layout(pipe=2, tensor=2, virtual=2, schedule="deferred_zb")),
        (mtx.Trainer, GPT, Layout(pipe=4, virtual=2, schedule="breadth_first")),
        # loops in the weight gradients that do run: experts have no more room than their share
        (InPlace, replace(MIXTRAL, layers=4), Layout(
            pipe=2, expert=2, tensor=2, virtual=2, expert_room=1.0
        )),
        (InPlace, MIXTRAL, Layout(
            tensor=2, sequence_parallel=False, recompute="around_attention", expert_room=1.0
        )),
        # and passes after the sums that those loops add to
        (InPlace, GPT_OSS, Layout(pipe=2, tensor=2, virtual=2, expert_room=1.0)),
        # chunks that differ in length and in kind
        (mtx.Trainer, GPT, Layout(data=2, pipe=2, tensor=2, virtual=2, stage_layers=(1, 3, 2, 2))),
        (InPlace, DEEPSEEK, Layout(pipe=4, expert=2, stage_layers=(1, 2, 2, 1))),
        (InPlace, DEEPSEEK, Layout(
            data=2, pipe=2, virtual=2, expert=2, schedule="zb_v", stage_layers=(1, 2, 2, 1)
        )),
    ],
)  # fmt: skip
def test_losses_and_gradients_stay(trainer, model, layout, monkeypatch, quick_orders):
    for least in ("_SHORT", "_BRIEF"):  # even ops on the tests' small arrays are placed
        monkeypatch.setattr(f"mtx.pipeline.nodes.{least}", 0.0)
    rows = 4 * layout.data if layout.data == 3 else 8
    woven = replace(layout, weave="on", idle="phases")
    reference.assert_same(found_by(trainer, model, woven, rows), on_one_device(model, rows))


def test_some_rows_of_a_gradient_lie_beside_what_is_scattered_last(monkeypatch, quick_orders):
    """The division is chosen here regardless of the costs."""
    chosen = shares._Choice(parts=(0, 2, 1, 3), units=2, other=3)
    monkeypatch.setattr(shares, "_best", lambda *_: chosen)
    monkeypatch.setattr("mtx.pipeline.nodes._SHORT", 0.0)
    woven = Layout(data=2, pipe=2, tensor=2, virtual=2, weave="on", idle="phases")
    reference.assert_same(found_by(InPlace, GPT, woven), on_one_device(GPT))


@pytest.mark.parametrize(
    ("name", "stages", "virtual"),
    [("1f1b", 4, 1), ("1f1b", 4, 3), ("zb_h1", 4, 1), ("zb_v", 3, 2), ("gpipe", 2, 1)],
)
def test_the_head_runs_a_tick_before_its_backward(name, stages, virtual):
    table = make(name, microbatches=6, stages=stages, virtual=virtual)
    woven = table.woven
    chunk, last = woven.last_virtual_stage
    backward, forward = (
        each[:, chunk, last] for each in (woven.backward_ticks, woven.forward_ticks)
    )
    for item in range(6):
        (head,) = [tick for tick, each in enumerate(woven.head) if each == item]
        assert forward[item] <= head == backward[item] - 1
    assert woven.enters(2).tolist() == [*woven.embed[2:], IDLE, IDLE]
    assert woven.left(2).tolist() == [IDLE, IDLE, *woven.embed_backward[:-2]]
    late = woven.ticks - table.ticks
    assert 0 <= late <= 1 and (woven.backward_ticks == table.backward_ticks + late).all()
    assert woven.slots <= table.slots + 1


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (dict(slices=2, schedule="terapipe"), ("slices=2", "slices=1")),
        (dict(stash="inputs"), ("stash='inputs'", "stash='residuals'")),
        (dict(idle="skip"), ("idle='skip'", "idle='phases'")),
    ],
)
def test_what_is_not_made_is_refused(options, values):
    with pytest.raises(UserError) as error:
        Layout(**dict(pipe=2, weave="on", idle="phases") | options)
    names(error, "weave='on'", *values)


def test_a_table_of_ones_own_is_woven_where_the_layout_is():
    table, layout = make("1f1b", microbatches=8, stages=2), Layout(pipe=2, idle="phases")
    run = RunConfig(model=GPT, layout=replace(layout, weave="on"), global_batch=8)
    named, *given = (mtx.Trainer(run, schedule=own).schedule for own in (None, table, table.woven))
    for one in given:
        assert one.head_ahead == named.head_ahead == 1
        assert (one.backward_ticks == named.backward_ticks).all()
    assert mtx.Trainer(replace(run, layout=layout), schedule=table).schedule is table
    with pytest.raises(UserError) as error:
        mtx.Trainer(replace(run, layout=layout), schedule=table.woven)
    names(error, "weave='auto'", "weave='on'", "1f1b")


def test_the_plan_keeps_a_slot_more():
    """A slot of the stash, since B is a tick later, and what a woven tick holds at once."""
    layout = Layout(pipe=4, tensor=2, virtual=2, idle="phases")
    plain, woven = (predict_memory(GPT, replace(layout, weave=weave), 8) for weave in ("off", "on"))
    table = make("1f1b", microbatches=8, stages=4, virtual=2)
    slots = table.slots, table.woven.slots
    assert woven.stash_bytes * slots[0] == plain.stash_bytes * slots[1] and slots[0] < slots[1]
    assert woven.activations_bytes > plain.activations_bytes
    assert woven.parameters_bytes == plain.parameters_bytes


def _chain(side: str, seconds: list[tuple[bool, float]], first: int) -> list[Step]:
    steps = []
    for place, (communicates, s) in enumerate(seconds, start=first):
        before = frozenset({place - 1}) if place > first else frozenset()
        steps.append(Step(s, communicates, False, side, before))
    return steps


def _check(found: Order, steps: tuple[Step, ...], memory: tuple[MemoryOp, ...] = ()) -> None:
    """Check that each step comes once, after the steps it waits for, whose collectives are done,
    and that each collective is done once. Memory ops have turns only beside collectives, once,
    after everything they wait for and before everything that waits for them."""
    begun, done, flying = set(), set(), set()
    moved: set[int] = set()
    placed = {number for what, number in found.turns if what == "move"}

    def is_there(number: int) -> bool:
        """Whether its result is there: without a turn, once everything it waits for is there."""
        return number in moved if number in placed else all(map(is_there, memory[number].after))

    for what, number in found.turns:
        if what == "done":
            flying.remove(number)
            done.add(number)
        elif what == "move":
            op = memory[number]
            assert flying and number not in moved
            assert op.before <= done and not op.until & begun and all(map(is_there, op.after))
            moved.add(number)
        else:
            assert steps[number].before <= done and number not in begun
            assert steps[number].communicates == (what == "start")
            begun.add(number)
            (flying if what == "start" else done).add(number)
    assert done == set(range(len(steps))) and not flying and moved == placed


def _waited_s(found: Order, steps: tuple[Step, ...]) -> float:
    """Seconds of waiting for collectives, if each begins at its turn."""
    clock = free = waited_s = 0.0
    until: dict[int, float] = {}
    for what, number in found.turns:
        if what == "start":
            free = until[number] = max(free, clock) + steps[number].seconds
        elif what == "done":
            waited_s += max(0.0, until[number] - clock)
            clock = max(clock, until[number])
        elif what == "compute":
            clock += steps[number].seconds
    return waited_s


def _check_blocks(
    found: Blocks, steps: tuple[Step, ...], memory: tuple[MemoryOp, ...] = ()
) -> None:  # fmt: skip
    """Check that each step comes once, after the steps it waits for, and that the exposed time is
    the time not covered. Memory ops come first beside a collective, together with a matmul, take no
    longer than the collective, and lie after everything they wait for and before everything that
    waits for them. Or they alone cover a collective that leaves the node."""
    done, exposed_s = set(), 0.0
    moved: set[int] = set()
    placed = {n for numbers in found.beside.values() for n in numbers}

    def is_there(number: int) -> bool:
        """Whether its result is there: if not placed, once everything it waits for is there."""
        return number in moved if number in placed else all(map(is_there, memory[number].after))

    def alone_s(place: int) -> float:
        return sum(memory[n].seconds for n in found.beside.get(place, ()))

    def move(place: int, beside: list) -> None:
        numbers = found.beside.get(place, ())
        if steps[place].network and not beside:
            assert not numbers or alone_s(place) >= 0.8 * steps[place].seconds
        else:
            assert not numbers or any(isinstance(each, int) for each in beside)
            assert sum(memory[n].seconds for n in numbers) <= steps[place].seconds
        for n in numbers:
            assert memory[n].before <= done and not memory[n].until & (done | {place})
            assert all(map(is_there, memory[n].after))
            assert n not in moved
            moved.add(n)

    def check(block) -> float:
        """Check a block; returns its seconds."""
        nonlocal exposed_s
        first, *beside = block
        assert steps[first].before <= done
        move(first, beside)
        covered_s = alone_s(first) if not beside else 0.0
        for each in beside:
            if isinstance(each, tuple):
                assert steps[first].network and not steps[each[0]].network
                covered_s += check(each)
                continue
            assert not steps[each].communicates and not steps[each].later
            assert steps[each].before <= done
            covered_s += steps[each].seconds
            done.add(each)
        done.add(first)
        if steps[first].communicates:
            exposed_s += max(0.0, steps[first].seconds - covered_s)
        else:
            assert not beside
        return max(steps[first].seconds, covered_s)

    for block in found.blocks:
        check(block)
    assert done == set(range(len(steps))) and exposed_s == pytest.approx(found.exposed_s)
    assert moved == placed


def _beside(found: Order) -> dict[int, list[int]]:
    """The memory ops beside each collective."""
    beside: dict[int, list[int]] = {}
    flying: list[int] = []
    for what, number in found.turns:
        if what == "start":
            flying.append(number)
        elif what == "done":
            flying.remove(number)
        elif what == "move":
            for link in flying:
                beside.setdefault(link, []).append(number)
    return beside


def _turns(text: str) -> tuple[Turn, ...]:
    """Turns from a text: "L0 p1 2 D0" is a collective's start, a memory op, a matmul, the done."""
    kinds = {"L": "start", "D": "done", "p": "move"}
    return tuple(Turn(kinds.get(w[0], "compute"), int(w.lstrip("LDp"))) for w in text.split())


def test_two_chains_cover_each_other():
    link, work = (True, 1.0), (False, 1.2)
    layer = [link, work, work, link, link, work, work]
    f = _chain("F", layer[1:], 0)
    steps = (*f, *_chain("B", layer, len(f)))
    found = order(steps)
    _check(found, steps)
    assert found.waited_s == 0.0
    alone = order(tuple(f))
    _check(alone, tuple(f))
    assert alone.waited_s == pytest.approx(2.0)


def test_what_leaves_the_node_has_collectives_of_the_node_beside_it():
    """Beside an all-to-all of 3: work of 1, and a gather of 1 with work of 1.5 beside it."""
    far = Step(3.0, True, False, "B", network=True)
    near = Step(1.0, True, False, "F", frozenset({1}))
    work = Step(1.0, False, False, "F"), Step(1.5, False, False, "B")
    steps = (far, work[0], near, work[1])
    found = order(steps)
    _check(found, steps)
    assert found.waited_s == pytest.approx(0.5)  # 2.5 beside 3
    assert found.turns == _turns("L0 1 L2 3 D2 D0")
    apart = blocks((far._replace(network=False), *steps[1:]), ())
    assert apart.waited_s > found.waited_s


def test_what_moves_memory_lies_beside_collectives():
    """F's norm, between a scatter and a gather, lies beside B's gather, with F's matmul."""
    link, work = Step(20e-6, True, False, "F"), Step(40e-6, False, False, "F")

    def after(step: Step, place: int, side: str = "F") -> Step:
        return step._replace(before=frozenset({place}), side=side)

    of_f = work, after(link, 0), after(link, 1), after(work, 2)
    steps = (*of_f, work._replace(side="B"), after(link, 4, "B"), after(work, 5, "B"))
    norm = MemoryOp(20e-6, frozenset({1}), frozenset({2}))
    found = order(steps, (norm,))
    _check(found, steps, (norm,))
    assert found.waited_s == pytest.approx(0.0, abs=1e-9) and _beside(found) == {5: [0]}
    assert blocks(steps, (norm,)).beside == {}  # there is no matmul with it


def test_collectives_in_flight_together_begin_together():
    """XLA begins the first with the second if the first is still in flight. The plan models the
    same: the matmul then covers both, and nothing covers the pass before the second."""
    streams = Streams(
        [1.0, 0.5, 1.0, 3.0], [frozenset(), frozenset(), frozenset({1}), frozenset()],
        links=frozenset({0, 2}), moves=frozenset({1}), loose=frozenset(),
    )  # fmt: skip
    timed = streams.timed((0, 1, 2, 3))
    assert timed.begun_s == [0.5, 0.0, 0.5, 0.5] and timed.until_s == [2.5, 0.5, 2.5, 3.5]
    assert timed.alone_s == 0.5 and timed.waited_s == 0.0
    longer = Streams(
        [1.0, 1.5, 1.0, 3.0], streams.before,
        links=streams.links, moves=streams.moves, loose=streams.loose,
    ).timed((0, 1, 2, 3))  # fmt: skip
    assert longer.begun_s[0] == 0.0 and longer.alone_s == 0.5  # the first is done before the second
    loose = Streams(
        [2.0, 1.0], [frozenset()] * 2, links=frozenset({1}), moves=frozenset(),
        loose=frozenset({0}),
    )  # fmt: skip
    assert loose.timed((0, 1)).begun_s == [0.0, 0.0]  # not delayed by a weight gradient


@pytest.mark.parametrize(
    "forward", ["aab", "abab", "aabaaba", "babababa", "aababaababaab", "a", ""]
)
@pytest.mark.parametrize("backward", ["aab", "abab", "ababababa", "aababaababaab", "bb"])
def test_each_layer_has_its_turn(forward, backward):
    """F's layers from the first on, B's from the last, each with its index among its kind."""
    turns = Turns(tuple(forward), tuple(backward))
    seen: list[tuple] = []

    def pair(turn, f, b, carry):
        for kinds, side, at, after, step in (
            (forward, turn.forward, f, turn.following, 1),
            (backward, turn.backward, b, turn.preceding, -1),
        ):
            if side is None:
                assert after is None
                continue
            seen.append((step, int(at.layer)))
            assert kinds[at.layer] == side
            assert at.index == kinds[: at.layer].count(side)
            beyond = at.layer + step
            assert after == (kinds[beyond] if 0 <= beyond < len(kinds) else None)
            if after is not None:
                assert at.next == kinds[:beyond].count(after)
        return carry, (turn.backward, turn.place)

    with jax.disable_jit():
        _, waits = turns.run(pair, ())
    assert [n for step, n in seen if step == 1] == list(range(len(forward)))
    assert [n for step, n in seen if step == -1] == list(range(len(backward)))[::-1]
    assert waits[0] == backward[0]


@pytest.mark.parametrize(
    ("kinds", "written_out"),
    [
        ("aaaaaaaa", 2), ("abababab", 4), ("ababababa", 3), ("aabab", 5),
        ("mmmmmmmmmammmmmmmmammmmmmmmammmm", 20),
    ],
)  # fmt: skip
def test_what_repeats_is_written_out_once(kinds, written_out):
    """And the last pair, which nothing follows, separately."""
    pairs = 0

    def pair(*args):
        nonlocal pairs
        pairs += 1
        return args[-1], ()

    jax.eval_shape(lambda: Turns(tuple(kinds), tuple(kinds)).run(pair, 0.0)[0])
    assert pairs == written_out


def test_any_order_is_right():
    rng, put = random.Random(1), 0
    for _ in range(50):
        steps = []
        for place in range(rng.randrange(1, 30)):
            kind = rng.random()
            places = (p for p in range(place) if kind > 0.8 or not steps[p].later)
            before = frozenset(p for p in places if rng.random() < 0.2)
            step = Step(rng.uniform(0.1, 2), kind < 0.4, kind > 0.8, rng.choice("FB"), before)
            steps.append(step._replace(summed=0.7 < kind < 0.8))
        _check(found := order(tuple(steps)), tuple(steps))
        assert not found.is_timed or _waited_s(found, tuple(steps)) <= found.waited_s + 1e-9
        memory = _memory(rng, steps)
        _check(found := order(tuple(steps), memory), tuple(steps), memory)
        put += sum(what == "move" for what, _ in found.turns)
        _check_blocks(without := blocks(steps, ()), tuple(steps))
        _check_blocks(found := blocks(steps, memory), tuple(steps), memory)
        assert found == without._replace(beside=found.beside)
    assert put > 20


def _memory(rng: random.Random, steps: list[Step]) -> tuple[MemoryOp, ...]:
    """Random memory ops: after some steps, before some of the steps that wait for those."""
    memory: list[MemoryOp] = []
    waits: list[frozenset[int]] = []  # steps that each waits for, directly or not
    for number in range(rng.randrange(6)):
        before = frozenset(p for p in range(len(steps)) if rng.random() < 0.1)
        after = frozenset(n for n in range(number) if rng.random() < 0.3)
        waits.append(before.union(*(waits[n] for n in after)))
        behind = range(max(waits[-1], default=-1) + 1, len(steps))
        late = any(steps[p].later for p in waits[-1])  # then only late steps may wait for it
        until = frozenset(p for p in behind if rng.random() < 0.1 and late <= steps[p].later)
        memory.append(MemoryOp(rng.uniform(0.1, 1), before, until, after))
    return tuple(memory)


def test_xla_takes_products_to_need_no_time():
    """Otherwise it delays collectives by the time that it expects a product to take."""
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    strand = Strand.of(lambda x, w: jnp.exp(x @ w), x, w)

    def compute(x, w):
        braid = Braid()
        made = braid.add(strand, braid.given([x, w]), side="F")
        braid.run()
        return braid.read(made)

    lines = jax.jit(compute).lower(x, w).as_text().splitlines()
    (line,) = (line for line in lines if "latency_metadata" in line)
    assert "dot_general" in line


def test_what_moves_memory_lies_where_blocks_have_room():
    """Where its inputs are ready and nothing that waits for it has run: soon, or late if something
    waits for it. Ops that nothing waits for stay out where collectives are alone."""
    first, matmul = Step(1.0, True, False, "B"), Step(2.0, False, False, "F")
    second, third = (Step(1.0, True, False, "B", frozenset({place})) for place in (1, 3))
    weights = Step(5.0, False, True, "B")
    last = matmul._replace(before=frozenset({2}))
    steps = (first, matmul, second, last._replace(before=frozenset()), third, last, weights)

    def beside(*memory: MemoryOp) -> dict:
        _check_blocks(found := blocks(steps, memory), steps, memory)
        return found.beside

    assert blocks(steps, ()).blocks == ((0, 1), (2, 3), (4, 5), (6,))
    op = MemoryOp(0.4, frozenset())
    assert beside(op, op, op) == {0: (0, 1), 2: (2,)}  # 1.2 would take longer
    assert beside(op._replace(before=frozenset({1})), op) == {2: (0,), 0: (1,)}
    assert beside(op._replace(until=frozenset({5}))) == {4: (0,)}
    assert beside(op._replace(until=frozenset({4}))) == {2: (0,)}
    assert beside(op._replace(before=frozenset({3}), until=frozenset({4}))) == {}
    waits = op._replace(until=frozenset({5}))
    assert beside(waits, op._replace(after=frozenset({0}))) == {4: (0, 1)}
    assert beside(op._replace(seconds=1.1)) == {}

    alone = steps[:5]  # no matmul is left for the last
    assert blocks(alone, (op,) * 4).beside == {0: (3,)}
    assert blocks(alone, (op._replace(until=frozenset({4})),)).beside == {2: (0,)}


def test_what_leaves_the_node_has_what_moves_memory_alone_beside_it():
    """A layer's B with gathers and a scatter over the network, each shorter than any matmul. Memory
    ops lie beside a collective without matmuls if they take as long as the collective."""
    far = Step(1.0, True, False, "B", network=True)
    matmul = Step(3.0, False, False, "B")
    steps = (
        far, matmul, far, matmul._replace(before=frozenset({1, 2})), far,
        matmul._replace(before=frozenset({3})), far._replace(before=frozenset({3})),
    )  # fmt: skip
    op = MemoryOp(1.1, frozenset({1}), frozenset({3}))
    last = op._replace(before=frozenset({5}), until=frozenset())
    found = order(steps, memory := (op, last))
    _check(found, steps, memory)
    assert found.waited_s == 0.0
    lies = _beside(found)
    assert sorted(number for numbers in lies.values() for number in numbers) == [0, 1]
    for place, numbers in lies.items():
        at = found.turns.index(Turn("start", place))
        alone = found.turns[at + 1 : found.turns.index(Turn("done", place))]
        assert alone == tuple(Turn("move", number) for number in numbers)
    near = tuple(step._replace(network=False) for step in steps)
    assert blocks(near, memory).beside == {}  # they take longer than any
    small = op._replace(seconds=0.5), last._replace(seconds=0.5)
    assert order(steps, small).waited_s == order(steps).waited_s == 1.0  # too little for one


def test_any_order_over_the_network_is_right():
    rng, alone = random.Random(2), 0
    for _ in range(20):
        steps = []
        for place in range(rng.randrange(1, 20)):
            before = frozenset(p for p in range(place) if rng.random() < 0.2)
            seconds, communicates = rng.uniform(0.1, 2), rng.random() < 0.4
            network = communicates and rng.random() < 0.7
            steps.append(Step(seconds, communicates, False, rng.choice("FB"), before, network))
        memory: list[MemoryOp] = []
        for number in range(rng.randrange(6)):
            before = frozenset(p for p in range(len(steps)) if rng.random() < 0.1)
            behind = {p for p, step in enumerate(steps) if before & step.before}
            until = frozenset(p for p in behind - before if rng.random() < 0.5)
            after = frozenset(n for n in range(number) if rng.random() < 0.3)
            memory.append(MemoryOp(rng.uniform(0.1, 2), before, until, after))
        found = blocks(steps, memory)
        _check_blocks(found, tuple(steps), tuple(memory))
        alone += sum((place,) in found.blocks for place in found.beside)
        if any(step.network for step in steps):
            assert order(tuple(steps), tuple(memory)).turns == tuple(found.turns(steps))
            _check(order(tuple(steps), tuple(memory)), tuple(steps), tuple(memory))
    assert alone > 5


@pytest.mark.skipif(
    find_compiler("h100", 8).backend != "gpu" or xla.version() < xla.IN_PLACE,
    reason="pip install 'mtx[aot]' on Python 3.12 compiles for GPUs with an XLA that weaves",
)
def test_compiled_for_gpus_layers_hide_their_collectives():
    """Exposed over `tensor` remain the first gather of a tick, collectives beside attention in
    blocks, and ticks with F or B alone. Of the formula's FLOPs, a woven step skips the deferred
    weight gradients of q, k, v and of the MLP of a chunk's last B, in a stage's idle tick."""
    model = ModelConfig(layers=8, hidden=8192, heads=64, sequence=2048, vocab=51200)
    exposed_s = {}
    for weave in ("off", "on"):
        layout = Layout(pipe=2, tensor=4, weave=weave, idle="phases", attention="blocked")
        run = RunConfig(model=model, layout=layout, global_batch=16)
        compiled = compile_plan(run, target="h100")
        (over_tensor,) = [e for e in compiled.timeline.exposures if e.axes == ("tensor",)]
        exposed_s[weave] = over_tensor.exposed_s
        skipped = 2 * 2048 * 11 * 8192**2 * 2 if weave == "on" else 0  # of two stages
        expected = compiled.formula_flops - skipped
        assert compiled.matmul_flops == pytest.approx(expected, rel=1e-9)
    assert exposed_s["on"] < 0.6 * exposed_s["off"]
