"""Exploring layouts: what devices hold, what the page says, and the sliders above it."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from errors import names
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from matplotlib.text import Text

from mtx.certify.small import small_model
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.errors import UserError
from mtx.families import NAMES as FAMILIES
from mtx.plan.compare import seconds
from mtx.plan.held import parameters_per_device
from mtx.plan.plan import make_plan
from mtx.presets import NAMES, preset
from mtx.schedules.partition import place_layers
from mtx.step.trainer import Trainer
from mtx.view.explore import CHOICES, choices_of, look
from mtx.view.explore_array import show_array
from mtx.view.explore_device import Holdings, numbers_text
from mtx.view.explore_page import page_html
from mtx.view.explore_tensor import show_tensor_groups, tensor_plans
from mtx.view.mesh import Device
from mtx.view.notebook import explore

MINIATURE = preset("miniature")
LLAMA = RunConfig(
    model=ModelConfig(
        family="llama", layers=6, hidden=48, heads=4, kv_heads=2, sequence=64, vocab=100, tied=False
    ),
    layout=Layout(data=2, pipe=2, tensor=2, zero=3),
)


def without_ids(html: str) -> str:
    """The HTML without names of clip paths, which matplotlib makes from memory addresses."""
    return re.sub(r"\bp[0-9a-f]{10}\b", "", html)


def laid(run: RunConfig, **layout) -> RunConfig:
    changed = replace(run.layout, **layout)
    return replace(run, layout=changed, global_batch=24 * changed.data * changed.microbatch)


# --- a device -------------------------------------------------------------------------------------


def holdings_of(run: RunConfig) -> list[list]:
    """The holdings of each device."""
    holdings, layout = Holdings(run), run.layout
    return [holdings.of(Device(layout=layout, rank=rank)) for rank in range(layout.devices)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.data())
def test_a_device_and_its_groups_are_those_of_the_mesh(pipe, data, tensor, draw):
    layout = Layout(pipe=pipe, data=data, tensor=tensor)
    rank = draw.draw(st.integers(0, layout.devices - 1))
    device = Device(layout=layout, rank=rank)
    grid, axes = np.arange(layout.devices).reshape(pipe, data, tensor), tuple(layout.shown)
    assert Device.at_place(layout, device.at) == device
    assert device.rank == rank == grid[tuple(device.at[axis] for axis in axes)]
    for dim, axis in enumerate(axes):
        place = [device.at[other] for other in axes]
        place[dim] = slice(None)
        assert list(device.group(axis)) == grid[tuple(place)].tolist()


@pytest.mark.parametrize(
    "run",
    [
        MINIATURE,
        laid(MINIATURE, data=1, pipe=4, virtual=1),
        laid(MINIATURE, data=3, pipe=2, tensor=1),  # masters are padded
        laid(MINIATURE, data=8, pipe=1, tensor=1, virtual=1),
        LLAMA,
        laid(LLAMA, data=1, pipe=4, tensor=2, stage_layers=(2, 1, 1, 2)),
        laid(LLAMA, data=1, pipe=1, tensor=4),  # more shards than heads of keys and values
        preset("miniature-bert"),
    ],
    ids=lambda run: f"{run.model.family}-{run.layout.pipe}-{run.layout.data}-{run.layout.tensor}",
)
def test_what_devices_hold_is_what_jax_places_on_them(run):
    trainer = Trainer(run)
    held = holdings_of(run)
    for shapes, specs, name in (
        (trainer.states.param_shapes, trainer.states.param_specs, "part"),
        (trainer.states.shapes.params, trainer.states.specs.params, "master"),
    ):
        leaves, specs = jax.tree.leaves_with_path(shapes), jax.tree.leaves(specs)
        for n, ((path, leaf), spec) in enumerate(zip(leaves, specs, strict=True)):
            places = NamedSharding(trainer.mesh, spec).devices_indices_map(leaf.shape)
            for rank, device in enumerate(trainer.mesh.devices.flat):
                one = held[rank][n]
                wanted = [
                    index.indices(size)[:2] for index, size in zip(places[device], leaf.shape)
                ]
                assert [(index.start, index.stop) for index in getattr(one, name)] == wanted
                assert one.name.split(".")[-1] == path[-1].key


@pytest.mark.parametrize("name", ["miniature", "gpt-1t", "gpt-530b", "llama-3-405b", "bert-3.9b"])
def test_all_parts_of_a_device_together_are_its_parameters(name):
    run = preset(name)
    last = Device(layout=run.layout, rank=run.layout.devices - 1)
    held = Holdings(run).of(last)
    assert sum(one.elements for one in held) == parameters_per_device(run.model, run.layout)
    placed = place_layers(
        run.model.layers, pipe=run.layout.pipe, virtual=run.layout.virtual,
        stage_layers=run.layout.stage_layers,
    ).layer[-1]  # fmt: skip
    layers = tuple(placed[placed >= 0].tolist())
    assert {one.layers for one in held} == {layers, None}


def test_parts_are_said_in_words():
    run = preset("gpt-1t")
    held = {one.name: one for one in Holdings(run).of(Device(layout=run.layout, rank=3071))}
    up, tokens = held["layers.block.mlp.up.w"], held["embed.tokens"]
    assert up.layers == (126, 127)
    assert up.part_text == "columns 89,600-102,399 of 102,400"
    assert up.master_text == "hidden 21,335-25,599 of 25,600 and 2 of padding"
    assert tokens.part_text == "vocabulary 65,408-65,535 of 65,536"
    assert held["layers.block.attention.out.b"].part_text == "all"
    last = {
        one.name: one for one in Holdings(MINIATURE).of(Device(layout=MINIATURE.layout, rank=7))
    }
    assert last["layers.block.mlp.up.w"].layers == (1, 3)
    assert last["layers.block.mlp.up.w"].master_text == "layers 3"  # chunks are cut over `data`


@pytest.mark.parametrize(
    "options",
    [*({"family": family} for family in FAMILIES), {"lora_rank": 2},
     {"fp8": "hybrid", "fp8_recipe": "delayed"}],
)  # fmt: skip
def test_every_dim_has_a_name(options):
    model = replace(small_model(ModelConfig(**options)), **options)
    run = RunConfig(model=model, layout=Layout(data=2))
    for one in Holdings(run).of(Device(layout=run.layout, rank=0)):
        assert len(one.dims) == len(one.shape)
        assert not any(dim.startswith("dim ") for dim in one.dims), one.name


@pytest.mark.parametrize(
    "numbers, text",
    [((), "none"), ((3,), "3"), (range(8, 16), "8-15"), ((0, 2, 4), "0, 2, 4"),
     (range(0, 3072, 48), "0, 48, … 3,024"), ((4, 5), "4, 5")],
)  # fmt: skip
def test_numbers_are_said_in_short(numbers, text):
    assert numbers_text(numbers) == text


# --- what is shown --------------------------------------------------------------------------------


def test_choices_change_the_plan_and_nothing_else():
    seen = look(MINIATURE, target="h100", pipe=4, virtual=1, global_batch=32, device=9)
    wanted = make_plan(
        replace(MINIATURE, layout=replace(MINIATURE.layout, pipe=4, virtual=1), global_batch=32),
        target="h100",
    )
    assert seen.plan == wanted and seen.device.rank == 9
    assert seen.sent_s == {
        "pipe": wanted.time.pipeline_comm_s,
        "data": wanted.time.data_comm_s,
        "tensor": wanted.time.tensor_comm_s,
    }


def test_a_device_beyond_the_mesh_is_the_last_one():
    assert look(MINIATURE, device=100).device.rank == 7
    assert look(MINIATURE, device={"pipe": 9, "data": 0, "tensor": 1}).device.rank == 5


def test_choices_that_do_not_go_together():
    with pytest.raises(UserError) as error:
        look(MINIATURE, pipe=4)
    names(error, "layers=4", "pipe*virtual=4*2")


def test_layers_placed_by_hand_are_balanced_on_other_chunks():
    run = preset("llama-3-405b")
    assert look(run).layout == replace(run.layout, weave="on")  # as is predicted to be faster
    assert look(run, virtual=7).layout.stage_layers == "balanced"


@pytest.mark.parametrize("name", NAMES)
def test_sliders_have_what_a_preset_has(name):
    run = preset(name)
    for choice, options in choices_of(run).items():
        source = run if choice == "global_batch" else run.layout
        assert getattr(source, choice) in options
        assert list(options) == sorted(set(options)) and len(options) <= 64


def cells_of(html: str) -> list[int]:
    return [int(rank) for rank in re.findall(r'data-device="(\d+)"', html)]


def test_the_page_says_what_the_plan_says():
    seen = look(MINIATURE, device=5)
    html, plan = page_html(seen), seen.plan
    for text in (
        f"<b>{seconds(plan.time.step_s)}</b> a step",
        f"bubble <b>{plan.bubble_over_ideal:.2%}</b>",
        f"MFU <b>{plan.mfu:.1%}</b>",
        "collectives over tensor",
        f" {seconds(plan.time.tensor_comm_s)}, ",
        f"{plan.memory.total_bytes / 2**20:,.2f} MiB",
        "device 5: p1 d0 t1, in node 0",
    ):
        assert text in html, text
    assert cells_of(html) == list(range(8))
    title = re.search(r'data-device="5"><title>([^<]*)', html)[1].split("\n")
    assert title[:5] == [
        "device 5: p1 d0 t1, node 0", "pipe group: 1, 5", "data group: 5, 7", "tensor group: 4, 5",
        "layers 1, 3",
    ]  # fmt: skip
    assert "vocabulary 192-255 of 256" in title and "heads 2, 3 of 4" in title


def test_three_thousand_devices_are_cells_of_nodes_with_one_node_beside():
    seen = look(preset("gpt-1t"), device=1234)
    html = page_html(seen)
    node = range(1232, 1240)
    assert cells_of(html) == [*range(0, 3072, 8), *node]
    assert html.count('class="pipe"') == 64 and html.count('class="data"') == 6
    assert html.count('class="tensor"') == 1 and html.count('class="own"') == 2
    assert len(html) < 400_000


def test_what_does_not_fit_is_said():
    assert "does not fit" in page_html(look(preset("gpt-1t"), pipe=4, data=96))


def texts(picture) -> list[str]:
    return [text.get_text() for text in picture.figure.findobj(Text)]


def test_an_array_is_drawn_as_its_devices_hold_it():
    trainer = Trainer(MINIATURE)
    spec = trainer.states.specs.params["layers"]["block"]["mlp"]["up"]["w"]
    shape = trainer.states.shapes.params["layers"]["block"]["mlp"]["up"]["w"].shape
    array = jax.device_put(np.zeros(shape, np.float32), NamedSharding(trainer.mesh, spec))
    said = texts(show_array(array, "up", ("stage", "chunk", "layer", "hidden", "columns")))
    assert [text for text in said if text.startswith("device")] == [
        f"device {rank}" for rank in range(8)
    ]
    assert {"stage 0 of 2", "stage 1 of 2", "chunk", "columns"} <= set(said)
    rows = trainer.place(
        {name: np.zeros((16, 128), np.int32) for name in ("tokens", "targets", "weights")}
    )
    said = texts(show_array(rows["tokens"]))
    assert "device 0, 1, 4, 5" in said and "device 2, 3, 6, 7" in said


def test_tensor_groups_across_nodes_and_what_they_cost():
    plan = make_plan(preset("gpt-1t"))
    plans = tensor_plans(plan)
    assert [one.run.layout.tensor for one in plans] == [4, 8, 16, 32]
    assert all(one.gpus == 3072 for one in plans) and plans[1] == plan
    said = texts(show_tensor_groups(plan))
    wide = plans[2].time
    cost = f" {seconds(wide.step_s)}, {seconds(wide.tensor_comm_s)} over tensor"
    assert cost in said and {"p0\nd0\nt7", "p0\nd0\nt15", "node 1"} <= set(said)
    assert any("inside and between, over 2 nodes" in text and "25 GB/s" in text for text in said)
    with pytest.raises(UserError) as error:
        show_tensor_groups(make_plan(preset("gpt-1t"), target="gb200"))
    names(error, "node_devices=72", "gb200", 16)


# --- widgets --------------------------------------------------------------------------------------


@pytest.fixture
def explorer():
    pytest.importorskip("ipywidgets", reason="sliders need ipywidgets: pip install mtx[notebook]")
    pytest.importorskip("anywidget", reason="clicks need anywidget: pip install mtx[notebook]")
    return explore("miniature")


def test_sliders_redraw_everything_together(explorer):
    for name, value in (("microbatch", 1), ("tensor", 4), ("data", 4)):
        before = explorer.page.html
        explorer.sliders[name].value = value
        assert explorer.page.html != before and explorer.message.value == ""
    explorer.target.value = "h100"
    layout = replace(MINIATURE.layout, microbatch=1, tensor=4, data=4)
    plan = make_plan(replace(MINIATURE, layout=layout), target="h100")
    assert explorer.look.plan == plan
    assert without_ids(explorer.page.html) == without_ids(page_html(look(plan.run, target="h100")))
    assert f"<b>{seconds(plan.time.step_s)}</b> a step" in explorer.page.html
    assert cells_of(explorer.page.html) == list(range(32))


def test_choices_that_do_not_go_say_so_and_can_be_taken_back(explorer):
    before = explorer.page.html
    explorer.sliders["pipe"].value = 4
    assert "layers=4 cannot be divided over pipe*virtual=4*2" in explorer.message.value
    assert "Traceback" not in explorer.message.value and explorer.message.value.count("\n") == 0
    assert explorer.page.html == before and explorer.look.layout.pipe == 2
    explorer.sliders["virtual"].value = 1
    assert explorer.message.value == "" and explorer.look.layout.pipe == 4
    assert without_ids(explorer.page.html) == without_ids(
        page_html(look(MINIATURE, pipe=4, virtual=1))
    )


def test_a_device_is_chosen_by_click_and_by_coordinates(explorer):
    explorer.page._handle_custom_msg({"device": 6}, [])
    assert explorer.look.device.at == {"pipe": 1, "data": 1, "tensor": 0}
    assert {axis: picker.value for axis, picker in explorer.device.items() if picker.value} == {
        "pipe": 1, "data": 1
    }  # fmt: skip
    assert "device 6: p1 d1 t0, in node 0" in explorer.page.html
    explorer.device["tensor"].value = 1
    assert explorer.look.device.rank == 7
    explorer.sliders["data"].value = 1  # there is no second replica anymore
    assert explorer.look.device.at == {"pipe": 1, "data": 0, "tensor": 1}
    assert explorer.device["data"].max == 0


def test_sequences_and_experts_have_sliders_where_there_is_a_choice(explorer):
    sliders, page = explorer.sliders, explorer.page
    assert sliders["expert"].layout.display == explorer.device["context"].layout.display == "none"
    sliders["context"].value = 4
    assert explorer.message.value == "" and explorer.look.layout.context == 4
    assert explorer.device["context"].layout.display is None
    page._handle_custom_msg({"device": 5}, [])
    assert explorer.look.device.at == {"pipe": 0, "data": 0, "context": 2, "tensor": 1}
    assert "positions 32-47 and 80-95" in page.html and page.html.count('class="context"') == 4
    explorer.model.value = "mixtral-8x7b"
    woven = replace(preset("mixtral-8x7b").layout, weave="on")  # as is predicted to be faster
    assert explorer.look.layout == woven and explorer.message.value == ""
    assert sliders["expert"].layout.display is None and max(sliders["expert"].options)[1] == 8
    sliders["expert"].value = 4
    time = explorer.look.plan.time
    assert explorer.look.sent_s["expert"] == time.expert_comm_s > 0
    assert explorer.look.sent_s["data"] == time.data_comm_s > 0
    assert "experts 0, 1 of 8" in page.html and "tokens to experts and back" in page.html


def test_another_model_brings_its_own_layout(explorer):
    explorer.model.value = "gpt-1t"
    assert explorer.look.layout == preset("gpt-1t").layout and explorer.message.value == ""
    assert explorer.sliders["pipe"].value == 64 and explorer.sliders["pipe"].label == "64"
    assert set(explorer.sliders) == {*CHOICES, "global_batch"}


def test_a_run_of_ones_own(explorer):
    own = explore(replace(MINIATURE, global_batch=48), target="h100")
    own.model.value = "bench-s"
    own.model.value = "this run"
    assert own.look.plan.run.global_batch == 48 and own.target.value == "h100"
    with pytest.raises(UserError) as error:
        explore("gpt-2t")
    names(error, "gpt-2t")


def test_without_a_kernel_a_picture_stays(explorer):
    data, metadata = explorer._repr_mimebundle_()
    assert data["image/png"].startswith(b"\x89PNG") and metadata["image/png"]["width"] > 0
    assert "application/vnd.jupyter.widget-view+json" in data
    assert "8 x a100-80gb" in data["text/plain"]


@pytest.mark.parametrize("missing", ["ipywidgets", "anywidget"])
def test_without_widgets_one_line_says_what_to_install(missing, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "mtx.view.explore_widgets", raising=False)
    shown = explore("miniature")
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and missing in said and "mtx[notebook]" in said
    png, metadata = shown._repr_png_()
    assert png.startswith(b"\x89PNG") and shown.plan == make_plan(MINIATURE)
