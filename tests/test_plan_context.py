"""Plans with sequences split over `context`."""

from dataclasses import replace

import pytest
from errors import names

from mtx.cli.plan import plan_command
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.costs.ask import layer_cost
from mtx.errors import UserError
from mtx.plan.calibration import calibration_for
from mtx.plan.candidates import CONTEXT_WAYS, MEMORY_AT_MOST, Fixed
from mtx.plan.choose import resolve
from mtx.plan.fit import fit_layout
from mtx.plan.hardware import hardware
from mtx.plan.memory import predict_memory
from mtx.plan.network import Group, all_to_all_s, data_group, pipe_group
from mtx.plan.plan import make_plan
from mtx.plan.search import search
from mtx.plan.time import predict_step
from mtx.presets import preset

H100 = hardware("h100")
LLAMA = replace(preset("llama-3-8b").model, sequence=131072)
SMALL = ModelConfig(
    family="llama", layers=4, hidden=1024, heads=16, kv_heads=4, sequence=65536, vocab=4096
)


def plan_of(model=LLAMA, batch=8, **layout):
    layout = Layout(**({"zero": 3, "recompute": "around_attention"} | layout))
    return make_plan(RunConfig(model=model, layout=layout, global_batch=batch), target="h100")


def test_groups_are_those_of_the_mesh():
    layout = Layout(pipe=2, data=3, context=4, tensor=2)
    assert data_group(layout) == Group(size=12, stride=2)
    assert pipe_group(layout) == Group(size=2, stride=24)


def test_an_all_to_all_sends_to_other_nodes_over_a_device_s_own_card():
    machine = dict(hardware=H100, calibration=calibration_for(Layout(), LLAMA, H100))
    inside = all_to_all_s(8e9, Group(size=8, stride=1), **machine)
    across = all_to_all_s(8e9, Group(size=16, stride=1), **machine)
    link = H100.link_gb_s * machine["calibration"].link_share
    card = H100.network_gb_s * machine["calibration"].network_share
    assert inside == pytest.approx(7 / link, rel=1e-3)
    assert across == pytest.approx(4 / card, rel=1e-3)  # half of them


def test_attention_is_shared_out_evenly_and_only_its_ring_s_sends_may_hide():
    """Attention is divided by the number of devices; the sends take the time of the closed form, in
    a layout where nothing can hide them: one device per node, and little attention."""
    far = replace(H100, node_devices=1, network_gb_s=1e-3)
    layout = Layout(context=4, context_attention="ring")
    model = replace(SMALL, sequence=8192)
    calibration = replace(calibration_for(layout, model, H100), kernel_s=0.0)
    time, alone = (
        predict_step(model, each, 1, far, calibration=calibration) for each in (layout, Layout())
    )
    assert time.attention_s == pytest.approx(alone.attention_s / 4, rel=1e-9)
    once = 2 * 2048 * 256 * 2 * 3  # k and v of 2,048 positions, three times
    card = 1e-3 * 1e9 * calibration.send_share
    assert time.context_comm_s == pytest.approx(4 * 4 * once / card, rel=1e-2)  # F, B and its sums
    assert predict_step(SMALL, layout, 1, H100).context_comm_s == 0


def test_the_way_is_that_of_the_step_and_each_is_priced():
    plan = plan_of(data=8, context=8)
    assert list(plan.context_ways) == list(CONTEXT_WAYS)
    assert plan.context_ways[plan.run.layout.context_attention] == plan.time
    assert "ulysses" not in plan_of(context=16, data=4).context_ways  # 8 heads of keys


@pytest.mark.parametrize("layout", [
    {"data": 8, "context": 8}, {"context": 16, "data": 4}, {"context": 16, "tensor": 4},
    {"context": 8, "tensor": 8},
])  # fmt: skip
@pytest.mark.parametrize("sequence", [16384, 131072])
def test_by_itself_attention_goes_the_fastest_way(layout, sequence):
    model = replace(LLAMA, sequence=sequence)
    plan = plan_of(model, **layout)
    times = {way: time.step_s for way, time in plan.context_ways.items()}
    assert plan.time.step_s == pytest.approx(min(times.values()), rel=1e-12)
    alone = Layout(recompute="around_attention", zero=3, **layout)
    for_default = make_plan(RunConfig(model=model, layout=alone, global_batch=8))
    assert resolve(alone, model, 8)[0] == for_default.run.layout  # as training has it


def test_the_fastest_way_that_does_not_fit_is_not_taken():
    plan = plan_of(data=8, context=8)
    fastest, *others = sorted(plan.context_ways, key=lambda way: plan.context_ways[way].step_s)
    with_way = {
        way: plan_of(data=8, context=8, context_attention=way).memory.total_bytes
        for way in plan.context_ways
    }
    leaner = next(way for way in others if with_way[way] < with_way[fastest])
    room = (with_way[leaner] + with_way[fastest]) / 2 / MEMORY_AT_MOST / 2**30
    run = RunConfig(
        model=LLAMA, layout=replace(plan.run.layout, context_attention="auto"), global_batch=8
    )
    small = make_plan(run, target=replace(H100, memory_gib=room))
    assert small.run.layout.context_attention == leaner


def test_memory_is_what_the_layers_of_a_part_keep():
    """By hand: around_attention keeps the layer's input and attention's output, in 16 bits, and one
    float32 per query; masters and moments are sharded over data x context."""
    cost = layer_cost(
        LLAMA, kind="block", kernel="cudnn", context=8, context_attention="ring",
        recompute="around_attention",
    )  # fmt: skip
    assert sum(size.at(1) for size in cost.kept) == pytest.approx(
        131072 // 8 * (2 * 4096 * 2 + 32 * 4), rel=1e-3
    )
    sharded, whole = (
        predict_memory(
            LLAMA, Layout(data=2, context=n, tensor=2, zero=3, context_attention="ring"), 8
        )
        for n in (8, 1)
    )
    assert sharded.optimizer_bytes * 8 == pytest.approx(whole.optimizer_bytes, rel=1e-6)
    assert sharded.stash_bytes * 7.9 < whole.stash_bytes


# GiB per device, by XLA for absent devices, jax 0.12.0.1, cuDNN's attention; all with zero=3 and
# around_attention, the first with 8 layers.
COMPILED_GIB = [
    ("llama-2-7b", 2**20, {"context": 8, "context_attention": "ring"}, 50.47),
    ("llama-2-7b", 2**20, {"context": 8, "context_attention": "ulysses"}, 44.39),
    ("llama-3-8b", 2**20, {"context": 8, "context_attention": "ring"}, 51.96),
    ("llama-3-8b", 2**20, {"context": 8, "context_attention": "gather"}, 58.28),
    ("llama-3-8b", 2**17, {"data": 8, "context": 8, "context_attention": "gather"}, 8.92),
]
WHOLE_GIB = [
    ("llama-2-7b", 2**20, {"context": 8, "context_attention": "ring"}, 108.70),
    ("llama-3-8b", 2**17, {"data": 8, "context": 8, "context_attention": "ring"}, 16.00),
    ("llama-3-8b", 2**17, {"data": 8, "context": 8, "context_attention": "ulysses"}, 15.99),
]


@pytest.mark.parametrize(
    ("name", "sequence", "layout", "gib", "layers"),
    [(*one, 8) for one in COMPILED_GIB] + [(*one, 32) for one in WHOLE_GIB],
)
def test_memory_is_near_what_the_compiler_assigns(name, sequence, layout, gib, layers):
    model = replace(preset(name).model, sequence=sequence, layers=layers)
    run = Layout(zero=3, recompute="around_attention", **layout)
    memory = predict_memory(model, run, run.replicas)
    assert memory.total_bytes / 2**30 == pytest.approx(gib, rel=0.03)


@pytest.mark.parametrize("way", ["gather", "ring", "ulysses", "usp"])
def test_attention_in_blocks_has_its_memory_too(way):
    """As on CPUs, where `mtx train` asks for it; it has scores besides the fused one's values."""
    layout = Layout(context=4, context_attention=way)
    fused, blocks = (
        predict_memory(SMALL, layout, layout.replicas, backend=backend)
        for backend in ("cuda", "xla")
    )
    assert blocks.activations_bytes > fused.activations_bytes


def test_a_long_sequence_is_cut_and_a_short_one_is_not():
    one_shard = Fixed(tensor=1, zero=3)
    found = search(SMALL, gpus=8, global_batch=2, hardware=H100, fixed=one_shard)
    assert any(one.layout.context > 1 for one in found.ranked)
    assert all(
        one.layout.context_attention != "auto" for one in found.ranked if one.layout.context > 1
    )
    brief = replace(SMALL, sequence=8192)
    short = search(brief, gpus=8, global_batch=16, hardware=H100, fixed=one_shard)
    assert all(one.layout.context == 1 for one in short.ranked)
    fixed = replace(one_shard, context=4, context_attention="gather")
    given = search(SMALL, gpus=8, global_batch=2, hardware=H100, fixed=fixed).ranked
    assert {(one.layout.context, one.layout.context_attention) for one in given} == {(4, "gather")}


def test_what_a_user_types(capsys):
    plan_command("llama3-8b --sequence 65536 --data 2 --context 4 --tensor 1 --zero 3".split())
    said = capsys.readouterr().out
    assert "data x pipe x context x tensor    2 x 1 x 4 x 1 = 8 devices" in said
    assert "attention over context: ring" in said and "zero=3" in said


def test_parts_of_sequences_stay_divisors_where_devices_are_fewer():
    layout = fit_layout(Layout(data=2, context=8, tensor=2), 4)
    assert (layout.data, layout.context, layout.tensor) == (1, 2, 2)


def test_what_does_not_divide_is_refused():
    with pytest.raises(UserError) as error:
        plan_of(replace(LLAMA, sequence=131080), context=8)
    assert names(error, "sequence=131080", "context=8")
