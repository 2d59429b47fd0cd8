"""The search: nothing better exists, the paper's advice results, and mistakes are explained."""

from __future__ import annotations

import functools
import itertools
from dataclasses import fields, replace

import pytest
from errors import names

from mtx.config import Layout, ModelConfig
from mtx.errors import UserError
from mtx.families.gpt import TABLE1
from mtx.plan.candidates import RECOMPUTE, Fixed, divisors
from mtx.plan.compare import changes, part_name, reasons
from mtx.plan.hardware import hardware
from mtx.plan.memory import predict_memory
from mtx.plan.search import fewest_gpus, search
from mtx.plan.time import StepTime, predict_step
from mtx.presets import preset

A100 = hardware("a100-80gb")
SMALL = ModelConfig(layers=4, hidden=1024, heads=8, sequence=512, vocab=4096)
CASES = {  # model, GPUs, global batch, share of meshes with a layout that fits, devices per node
    "roomy": (SMALL, 8, 16, 1.0, 8),
    "tight": (SMALL, 8, 16, 0.6, 4),
    "tighter": (SMALL, 8, 32, 0.3, 2),
    "odd": (replace(SMALL, layers=6, heads=12, hidden=1536), 12, 24, 0.5, 4),
    "sequence cannot be cut": (replace(SMALL, sequence=500), 16, 16, 0.4, 8),
}


def device(gib: float, node: int):
    return replace(A100, memory_gib=gib, node_devices=node)


@functools.cache
def device_of(case: str):
    """A device with memory for the leanest layout of that share of meshes; roomy: for any."""
    model, gpus, batch, share, node = CASES[case]
    needs = []
    for data, pipe, tensor in itertools.product(divisors(gpus), repeat=3):
        parallel = model.sequence % tensor == 0
        layout = Layout(
            data=data, pipe=pipe, tensor=tensor, recompute="full", idle="phases",
            sequence_parallel=parallel,
        )  # fmt: skip
        try:
            layout.check(model)
            if layout.devices == gpus:
                needs.append(predict_memory(model, layout, batch).total_bytes / 2**30 / 0.9)
        except UserError:
            continue
    return device(sorted(needs)[int(share * len(needs)) - 1] * 1.05 if share < 1 else 80, node)


@functools.cache
def enumerated(case: str) -> dict[tuple[int, int, int], dict[int, float]]:
    """{mesh: {zero: seconds of the fastest layout that fits}}, without pruning."""
    model, gpus, batch, *_ = CASES[case]
    target = device_of(case)
    best: dict[tuple[int, int, int], dict[int, float]] = {}
    for data, pipe, tensor in itertools.product(divisors(gpus), repeat=3):
        if data * pipe * tensor != gpus:
            continue
        for microbatch, virtual, schedule, recompute, parallel, zero in itertools.product(
            divisors(batch), divisors(model.layers), ("1f1b", "gpipe"),
            RECOMPUTE, (True, False), (0, 1, 3) if data > 1 else (1,),
        ):  # fmt: skip
            layout = Layout(
                data=data, pipe=pipe, tensor=tensor, microbatch=microbatch, virtual=virtual,
                schedule=schedule, recompute=recompute, sequence_parallel=parallel, idle="phases",
            )  # fmt: skip
            try:
                layout.check(model)
                memory = predict_memory(model, layout, batch, zero=zero)
                time = predict_step(model, layout, batch, target, zero=zero)
            except UserError:
                continue
            if memory.total_bytes <= 0.9 * target.memory_bytes:
                mine = best.setdefault((data, pipe, tensor), {})
                mine[zero] = min(mine.get(zero, float("inf")), time.step_s)
    return best


def found_in(case: str, **options):
    model, gpus, batch, *_ = CASES[case]
    return search(model, gpus=gpus, global_batch=batch, hardware=device_of(case), **options)


@pytest.mark.parametrize("case", CASES)
def test_plain_enumeration_finds_nothing_better(case):
    best = {mesh: min(seconds.values()) for mesh, seconds in enumerated(case).items()}
    found = found_in(case, fixed=Fixed(schedule="1f1b"), top=100)
    assert {mesh_of(one): one.time.step_s for one in found.ranked} == pytest.approx(best)
    assert found.best.time.step_s == pytest.approx(min(best.values()))
    times = [one.time.step_s for one in found.ranked]
    assert times == sorted(times)
    assert all(one.runs for one in found.ranked)


@pytest.mark.parametrize("case", CASES)
def test_other_schedules_take_the_place_of_1f1b_where_they_are_faster_and_fit(case):
    plain = found_in(case, fixed=Fixed(schedule="1f1b"), top=100)
    found = found_in(case, top=100)
    before = {mesh_of(one): one for one in plain.ranked}
    assert before.keys() == {mesh_of(one) for one in found.ranked}
    for one in found.ranked:
        old = before[mesh_of(one)]
        assert one == old if one.layout.schedule == "1f1b" else one.time.step_s < old.time.step_s
        assert one.memory.total_bytes <= 0.9 * device_of(case).memory_bytes
    times = [one.time.step_s for one in found.ranked]
    assert times == sorted(times) and found.best.time.step_s <= plain.best.time.step_s


def test_zero_bubble_is_found_where_the_bubble_is_large():
    fixed = Fixed(data=1, pipe=4, tensor=1, microbatch=4)
    found = search(SMALL, gpus=4, global_batch=16, hardware=A100, fixed=fixed)
    assert found.best.layout.schedule not in ("1f1b", "gpipe")
    plain = search(
        SMALL, gpus=4, global_batch=16, hardware=A100, fixed=replace(fixed, schedule="1f1b")
    )
    assert found.best.time.bubble_s < plain.best.time.bubble_s
    assert reasons(found.best, plain.best, A100).startswith("bubble ")


def test_a_simulated_schedule_can_be_asked_for():
    found = found_in("roomy", fixed=Fixed(schedule="zb_v"))
    assert {one.layout.schedule for one in found.ranked} == {"zb_v"}
    assert {one.layout.virtual for one in found.ranked} == {2}
    assert all(one.layout.pipe > 1 for one in found.ranked)
    auto, open_ = (found_in("tight", fixed=Fixed(schedule=name)) for name in ("auto", None))
    assert auto == open_


@pytest.mark.parametrize(
    "fixed, named",
    [
        (Fixed(schedule="zb_v", virtual=3), ("'zb_v'", "virtual=2", "virtual=3")),
        (Fixed(schedule="zb"), ("'zb'", "zb_v")),
        (Fixed(schedule="mine.csv"), ("'mine.csv'", "--data, --pipe, --tensor")),
        (Fixed(schedule="zb_h1", pipe=1), ("'zb_h1'", "4 best meshes", "8 x")),
    ],
)
def test_schedules_that_cannot_be_searched(fixed, named):
    with pytest.raises(UserError) as error:
        found_in("roomy", fixed=fixed)
    names(error, *named)


def mesh_of(one) -> tuple[int, int, int]:
    return one.layout.data, one.layout.pipe, one.layout.tensor


def test_the_cases_are_not_all_alike():
    """Otherwise the enumeration would prove little: some must not fit, some must recompute."""
    ways = {one.layout.recompute for case in CASES for one in found_in(case, top=100).ranked}
    assert ways == set(RECOMPUTE)
    fits = [sum(1 in seconds for seconds in enumerated(c).values()) for c in ("tighter", "roomy")]
    assert 0 < fits[0] < fits[1]
    zeros = {one.zero for case in CASES for one in found_in(case, top=100).ranked}
    assert zeros == {1, 3}


@pytest.mark.parametrize("zero", [0, 3])
def test_an_optimizer_sharding_can_be_asked_for(zero):
    best = enumerated("roomy")
    found = found_in("roomy", fixed=Fixed(zero=zero, schedule="1f1b"))
    assert found.best.zero == zero and found.best.runs == (zero != 0)
    wanted = min(seconds[zero] for seconds in best.values() if zero in seconds)
    assert found.best.time.step_s == pytest.approx(wanted)


def test_what_is_fixed_stays():
    fixed = Fixed(tensor=2, virtual=2, schedule="gpipe", recompute="full", sequence_parallel=False)
    found = found_in("roomy", fixed=fixed, top=100)
    assert {one.layout.pipe for one in found.ranked} == {1, 2}
    for one in found.ranked:
        for name in ("tensor", "virtual", "schedule", "recompute", "sequence_parallel"):
            assert getattr(one.layout, name) == getattr(fixed, name)


# --- SC'21 ----------------------------------------------------------------------------------------


@functools.cache
def best_of(name: str):
    run = preset(name)
    return search(
        run.model, gpus=run.layout.devices, global_batch=run.global_batch, hardware=A100, top=1
    ).best


@pytest.mark.parametrize("name", TABLE1)
def test_the_best_is_at_least_as_fast_as_the_papers_layout(name):
    run, best = preset(name), best_of(name)
    paper = predict_step(run.model, run.layout, run.global_batch, A100)
    assert best.time.step_s <= paper.step_s
    assert best.layout.devices == run.layout.devices
    assert best.memory.total_bytes <= 0.9 * A100.memory_bytes


@pytest.mark.parametrize("node", [2, 4, 8])
def test_takeaway_1_tensor_groups_stay_inside_a_node(node):
    """For any size of a node; the model could use larger groups."""
    run = preset("gpt-39b")
    found = search(
        run.model, gpus=64, global_batch=512, hardware=replace(A100, node_devices=node), top=1
    )
    assert 1 < found.best.layout.tensor <= node


def test_takeaway_2_data_parallelism_for_the_rest():
    """More GPUs with the same model: the new ones become replicas, not stages or shards."""
    run = preset("gpt-18b")
    sizes = []
    for gpus in (64, 256):
        best = search(run.model, gpus=gpus, global_batch=8 * gpus, hardware=A100, top=1).best.layout
        sizes.append((best.pipe * best.tensor, best.data))
    assert sizes[1][0] <= sizes[0][0] and sizes[1][1] >= 4 * sizes[0][1]


def test_takeaway_3_the_best_microbatch_depends_on_the_batch():
    """SC'21, figure 8: larger microbatches are more efficient, but make a larger bubble."""
    model = replace(preset("gpt-7.5b").model, layers=32)
    best = []
    for batch in (64, 1024):
        fixed = Fixed(data=1, pipe=8, tensor=8, virtual=1)
        found = search(model, gpus=64, global_batch=batch, hardware=A100, fixed=fixed)
        best.append(found.best.layout.microbatch)
    assert best[0] < best[1] < 1024


# --- reasons --------------------------------------------------------------------------------------


def test_reasons_name_the_parts_that_differ_most():
    found = found_in("roomy", top=100)
    for better, worse in itertools.pairwise(found.ranked):
        text = reasons(better, worse, device(80, 8))
        gains = {
            each.name: getattr(worse.time, each.name) - getattr(better.time, each.name)
            for each in fields(StepTime)
        }
        most = max(gains, key=gains.get)
        if better.time.step_s < worse.time.step_s and most != "bubble_s":
            assert part_name(most) in text
        if most == "bubble_s":
            assert text.startswith("bubble ") and "% of ideal time instead of" in text


def test_a_tensor_group_that_leaves_the_node_is_said():
    fixed = Fixed(data=1, pipe=1)
    inside, across = (
        search(SMALL, gpus=8, global_batch=16, hardware=device(80, node), fixed=fixed).best
        for node in (8, 4)
    )
    wide = replace(across, layout=replace(across.layout, tensor=8))
    narrow = replace(inside, layout=replace(inside.layout, tensor=4))
    text = reasons(narrow, wide, device(80, 4))
    assert "collectives over tensor inside a node" in text


def test_changes_of_the_best_are_slower_or_do_not_fit():
    model, _, batch, *_ = CASES["tight"]
    best = found_in("tight", fixed=Fixed(schedule="1f1b", pipe=2)).best
    target = device_of("tight")
    listed = changes(best, model, global_batch=batch, hardware=target)
    assert {"microbatch", "recompute", "schedule"} <= {change.name for change in listed}
    for change in listed:
        one = change.candidate
        assert (one.layout, one.zero) != (best.layout, best.zero)
        if change.fits and one.runs:
            assert one.time.step_s >= best.time.step_s
        assert change.fits == (one.memory.total_bytes <= 0.9 * target.memory_bytes)


# --- nothing found --------------------------------------------------------------------------------


def test_too_small_devices_are_said_with_what_is_missing():
    with pytest.raises(UserError) as error:
        search(SMALL, gpus=8, global_batch=16, hardware=device(0.1, 8))
    names(error, "8 x a100-80gb", "0.1 GiB", "data=1 pipe=")


@pytest.mark.parametrize(
    "gpus, fixed, named",
    [
        (7, {}, ("gpus=7", "layers=4", "heads=8", "global_batch=16", "gpus=4", "global_batch=21")),
        (8, {"pipe": 3}, ("gpus=8", "leave pipe=3")),
        (9, {"pipe": 4}, ("gpus=9", "pipe=4", "gpus=8")),
        (8, {"tensor": 2, "pipe": 8}, ("gpus=8", "pipe=8 * tensor=2", "leave")),
        (8, {"pipe": 8}, ("gpus=8", "leave pipe=8", "layers=4")),
        (5, {"tensor": 5, "pipe": 1}, ("gpus=5", "leave", "pipe=1", "tensor=5", "gpus=4")),
    ],
)
def test_no_layout_is_said_with_the_remedy(gpus, fixed, named):
    with pytest.raises(UserError) as error:
        search(SMALL, gpus=gpus, global_batch=16, hardware=A100, fixed=Fixed(**fixed))
    names(error, *named)


def test_the_remedy_for_no_layout_is_one_that_fits():
    """The next smaller number of GPUs has layouts, but is too small."""
    run = preset("gpt-175b")
    with pytest.raises(UserError) as error:
        search(run.model, gpus=7, global_batch=60, hardware=A100)
    names(error, "gpus=7", "use gpus=64")
    search(run.model, gpus=64, global_batch=60, hardware=A100, top=1)


def test_the_next_higher_number_of_gpus_is_named_where_no_lower_one_is_near():
    with pytest.raises(UserError) as error:
        search(preset("gpt-1t").model, gpus=3071, global_batch=3072, hardware=A100)
    names(error, "gpus=3071", "use gpus=3072")


def test_more_devices_than_stages_may_be():
    """Sizes above an axis's bound are not candidates."""
    fixed = Fixed(data=2**13, microbatch=1, schedule="1f1b", recompute="none")
    found = search(SMALL, gpus=2**15, global_batch=2**15, hardware=A100, fixed=fixed)
    assert {one.layout.devices for one in found.ranked} == {2**15}
    assert {one.layout.pipe for one in found.ranked} == {1, 2, 4}
    huge = replace(SMALL, layers=2**14, hidden=2**18, heads=2**10)
    with pytest.raises(UserError) as error:
        fewest_gpus(huge, hardware=A100, batch_of=lambda gpus: 1)
    names(error, f"layers={2**14}", f"hidden={2**18}", f"{2**20:,}")


def test_the_fewest_gpus_hold_the_model_and_half_of_them_do_not():
    model = preset("gpt-18b").model
    gpus = fewest_gpus(model, hardware=A100, batch_of=lambda gpus: 8 * gpus)
    assert gpus > 1
    search(model, gpus=gpus, global_batch=8 * gpus, hardware=A100, top=1)
    with pytest.raises(UserError) as error:
        search(model, gpus=gpus // 2, global_batch=4 * gpus, hardware=A100, top=1)
    names(error, f"{gpus // 2} x a100-80gb", "GiB")


def test_weaving_is_chosen_where_it_hides_something():
    """On an H100, where our program is priced; not if it is fixed, or without `tensor`."""
    model = ModelConfig(layers=32, hidden=8192, heads=64, sequence=2048, vocab=51200)
    options = dict(gpus=64, global_batch=256, top=3)
    fixed = dict(tensor=4, pipe=4, schedule="1f1b")
    best = {
        weave: search(
            model, hardware=hardware("h100"), fixed=Fixed(**fixed, weave=weave), **options
        ).best
        for weave in (None, "on", "off")
    }
    assert best[None] == best["on"] != best["off"]
    assert best["on"].layout.weave == "on" and best["on"].time.step_s < best["off"].time.step_s
    alone = Fixed(tensor=1, pipe=8, schedule="1f1b")
    for machine, given in (("h100", alone), ("a100-80gb", Fixed(**fixed))):
        found = search(model, hardware=hardware(machine), fixed=given, **options)
        assert {one.layout.weave for one in found.ranked} == {"off"}
