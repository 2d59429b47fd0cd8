"""A woven tick as XLA's GPU compiler compiles it, read by `steady`, instruction by instruction.

Its collectives are asynchronous and beside matmuls, except the one that the losses need.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import replace

import pytest
from steady import SteadyTick, Window, matrices

from mtx.compile import step
from mtx.compile.compiler import find_compiler
from mtx.compile.hlo import read_program
from mtx.compile.hlo_work import matmul_flops
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.plan.compiled import Tick
from mtx.sharding.experts import LATER_ROUNDS
from mtx.step import xla
from mtx.step.trainer import Trainer

MODEL = ModelConfig(layers=8, hidden=4096, heads=32, sequence=2048, vocab=51200)
_WITHOUT = "--xla_gpu_enable_dynamic_slice_fusion=false"
OUTSIDE = ("embed", "head", "embed_backward")

pytestmark = pytest.mark.skipif(
    xla.version() < xla.IN_PLACE or find_compiler("h100", 8).backend != "gpu",
    reason="pip install 'mtx[aot]' with jax 0.12 compiles for GPUs",
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    @functools.cache
    def compile_once(virtual: int, weave: str, in_place: bool = True, attention: str = "auto"):
        layout = Layout(
            pipe=2, tensor=4, virtual=virtual, weave=weave, idle="phases", recompute="selective",
            attention=attention,
        )  # fmt: skip
        model = replace(MODEL, layers=8 * virtual)
        run = RunConfig(model=model, layout=layout, global_batch=16)
        path = tmp_path_factory.mktemp("program") / "step.txt"
        with pytest.MonkeyPatch.context() as patch:
            if not in_place:
                patch.setattr(step, "find_compiler", _without)
            found = step.compile_plan(run, target="h100", program=path)
        assert found.timeline and found.timeline.tick
        shapes = matrices(Trainer(replace(run, layout=replace(layout, attention="blocked"))))
        tick = SteadyTick(read_program(path.read_text()), layout.sizes)
        return tick, found.timeline.tick, shapes

    return compile_once


def _without(*arguments, **options):
    compiler = find_compiler(*arguments, **options)
    return replace(compiler, flags=(*compiler.flags, _WITHOUT))


def scope(window: Window) -> str:
    """The part of the step that has the collective, or its branch of woven layers."""
    parts = window.op_name.split("/")
    outside = [part for part in parts if part in OUTSIDE]
    branch = [part for part in parts if part.startswith("branch_")] or ["branch"]
    return outside[-1] if outside else branch[0]


@pytest.mark.parametrize("virtual", [1, 2])
def test_collectives_of_layers_and_sends_are_beside_matmuls(compiled, virtual):
    windows = compiled(virtual, "on")[0].windows()
    sends = [one for one in windows if one.kind == "collective-permute"]
    # Between two stages x and dx go in the same direction, and XLA may send them together. If v >
    # 1, ticks without a microbatch at the head have their own branch.
    assert len(sends) in (virtual, 2 * virtual) and not any(one.synchronous for one in sends)
    assert all(one.flops > 1e9 for one in sends), "nothing beside a send"
    layers = [one for one in windows if one.axes == ("tensor",) and scope(one) not in OUTSIDE]
    assert len(layers) >= 10 * virtual**2 and not any(one.synchronous for one in layers)
    alone = [(scope(one), one.kind) for one in layers if one.exposed_bytes]
    # The last scatter of a tick's layers has the smallest weight gradient beside it, which is too
    # short in a model of this size: the others lie beside the sends that follow.
    assert len(alone) == len(set(alone)) <= virtual**2, alone
    assert {kind for _, kind in alone} <= {"reduce-scatter"}


def test_no_collective_waits_for_attention_in_blocks(compiled):
    """XLA estimates its float32 products as much longer than they are, and would begin collectives
    right before the last: 4 % of the tick would be exposed."""
    _, tick, _ = compiled(1, "on", attention="blocked")
    exposed_s = sum(one.seconds for one in tick.spent if one.what == "exposed over tensor")
    assert exposed_s < 0.005 * tick.seconds


@pytest.mark.parametrize("virtual", [1, 2])
def test_what_is_kept_of_a_layer_is_written_beside_collectives(compiled, virtual):
    """In the loop over layers, the inputs of attention and of the MLP, the two largest values, are
    written there once for each pair of chunks."""
    windows = compiled(virtual, "on")[0].windows()
    in_loops = [one for one in windows if one.op_name.count("/while/") > 1]
    assert sum(one.writes for one in in_loops) >= 2 * virtual**2


def beside(tick: Tick) -> float:
    """The share of the time of a full tick's passes during which a collective runs."""
    passes = [(one.start_s, one.start_s + one.seconds) for one in tick.spans if one.row == "other"]
    links = [
        (one.start_s, one.start_s + one.seconds) for one in tick.spans
        if one.row not in ("matmul", "attention", "other") and not one.exposed
    ]  # fmt: skip
    times = sorted({time for span in (*passes, *links) for time in span})

    def within(spans: list, begin: float, end: float) -> bool:
        return any(first <= begin and end <= last for first, last in spans)

    pieces = [(a, b) for a, b in itertools.pairwise(times) if within(passes, a, b)]
    return sum(b - a for a, b in pieces if within(links, a, b)) / sum(b - a for a, b in pieces)


@pytest.mark.parametrize("virtual", [1, 2])
def test_activations_and_norms_are_beside_collectives(compiled, virtual):
    """Most of them are; passes between two collectives of the same function cannot be."""
    assert beside(compiled(virtual, "on")[1]) > 0.5
    assert beside(compiled(virtual, "off")[1]) < 0.4


@pytest.mark.parametrize("attention", ["auto", "blocked"])
def test_no_stash_is_copied(compiled, attention):
    """F writes to the stash that B reads; attention in blocks reads parts of its keys late."""
    tick, _, shapes = compiled(1, "on", attention=attention)
    largest = MODEL.layers // 2 * max(math.prod(shape) for shape in shapes)  # stack of weights
    assert tick.copies(largest + 1) == []


@pytest.mark.parametrize("virtual", [1, 2])
def test_collectives_of_the_embedding_and_of_the_head_are_beside_matmuls(compiled, virtual):
    every = compiled(virtual, "on")[0].windows()
    of_losses = [one for one in every if one.axes == ("pipe", "tensor")]  # has nothing beside it
    windows = [one for one in every if one not in of_losses]
    assert {one.kind for one in of_losses} == {"all-gather"}
    assert all(scope(one) == "head" and one.sent_bytes < 2e5 for one in of_losses)
    assert not any(one.synchronous for one in windows)
    # The last output is sent to all stages and gathered there; its gradient is summed.
    for name, kinds in {
        "broadcast": {("all-reduce", ("pipe",)), ("all-gather", ("tensor",))},
        "head": {("reduce-scatter", ("tensor",)), ("all-reduce", ("pipe",))},
    }.items():
        beside = [one for one in windows if f"/{name}/" in one.op_name and not one.synchronous]
        assert {(one.kind, one.axes) for one in beside} >= kinds
        assert all(one.flops > 1e9 for one in beside), [one.op_name for one in beside]


@pytest.mark.parametrize("virtual", [1, 2])
def test_weights_are_read_and_gradients_added_where_they_lie(compiled, virtual):
    tick, _, shapes = compiled(virtual, "on")
    assert len(shapes) == 4
    assert tick.made("bf16", shapes) == [], "copies of weights"
    assert tick.made("f32", shapes) == [], "gradients added in a pass of their own"


@pytest.mark.parametrize("virtual", [1, 2])
def test_what_norms_sum_over_rows_is_not_written(compiled, virtual):
    """No float32 array as large as the stream, 512 rows per device, is written for them. (The
    embedding's gradient, which is looked up, is.)"""
    tick, _, _ = compiled(virtual, "on")
    rows = MODEL.sequence // 4
    written = tick.made("f32", [(rows, MODEL.hidden)])
    assert [one.name for one in written if "embed" not in one.op_name] == []


def uncovered(tick: Tick) -> float:
    """The share of a tick that is not in matmuls, attention or covered collectives."""
    covered_s = sum(one.seconds for one in tick.spent if one.what in ("matmul", "attention"))
    return 1 - covered_s / tick.seconds


@pytest.mark.parametrize(("virtual", "most"), [(1, 0.25), (2, 0.25)])
def test_most_of_a_tick_is_matmuls_and_attention(compiled, virtual, most):
    """The rest is not yet the 5 % that we aim at: XLA's elementwise kernels remain, and the
    collectives of embedding and head, whose share is larger with these few layers."""
    assert uncovered(compiled(virtual, "on")[1]) < most


def test_tokens_on_their_way_to_experts_and_sends_are_beside_matmuls(tmp_path):
    """For a mixture in chunks, with a layer's experts within a node. Loops of later rounds, which
    hardly ever run, cover nothing. Nor do they keep matmuls from adding experts' gradients in
    place, except those of a tick's last layer."""
    model = ModelConfig(
        family="mixtral", layers=8, hidden=4096, heads=32, kv_heads=8, ffn=14336, sequence=4096,
        vocab=32000,
    )  # fmt: skip
    layout = Layout(pipe=2, expert=8, virtual=2, weave="on", idle="phases", recompute="selective")
    run, path = RunConfig(model=model, layout=layout, global_batch=128), tmp_path / "step.txt"
    found = step.compile_plan(run, target="h100", program=path)
    assert found.timeline and found.timeline.tick
    tick = found.timeline.tick
    added = SteadyTick(read_program(path.read_text()), layout.sizes).made(
        "f32", [(4096, 2, 14336), (14336, 4096)]
    )
    apart = ("/W/", LATER_ROUNDS)
    assert not [one.name for one in added if not any(part in one.op_name for part in apart)]
    exposed = dict.fromkeys(("exposed over expert", "exposed over pipe"), 0.0)
    for one in tick.spent:
        if one.what in exposed:
            exposed[one.what] += one.seconds / tick.seconds
    to_experts, sends = exposed.values()
    assert to_experts < 1e-3 and sends < 0.02, exposed


def test_weight_gradients_of_a_gated_layer_are_beside_what_a_tick_sends(tmp_path):
    """For Llama 2 70B's layers: enough of them lie beside the last scatter, for which the smallest
    is too short, and gate and up are split into two parts by rows, added in place like the others.
    Queries have matmuls separate from those of keys and values: if both were in one, XLA would copy
    the weights and add the gradients in a pass."""
    model = ModelConfig(
        family="llama", layers=16, hidden=8192, heads=64, kv_heads=8, ffn=28672, sequence=4096,
        vocab=32000,
    )  # fmt: skip
    layout = Layout(pipe=2, tensor=8, virtual=2, weave="on", idle="phases", recompute="selective")
    run, path = RunConfig(model=model, layout=layout, global_batch=8), tmp_path / "step.txt"
    found = step.compile_plan(run, target="h100", program=path)
    assert found.timeline and found.timeline.tick
    tick = found.timeline.tick
    exposed_s = sum(one.seconds for one in tick.spans if one.exposed and one.row == "tensor")
    assert exposed_s < 5e-4 * tick.drawn_s  # 0.6 % if all of them were whole
    shapes = matrices(Trainer(replace(run, layout=replace(layout, attention="blocked"))))
    program = read_program(path.read_text())
    assert SteadyTick(program, layout.sizes).made("f32", shapes) == []
    made = {
        dim
        for body in program.computations.values()
        for one in body.values()
        if matmul_flops(body, one)
        for dim in one.shapes[0].dims
    }
    columns = [heads * 128 // layout.tensor for heads in (64, 2 * 8)]  # of q, and of k and v
    assert made.issuperset(columns) and sum(columns) not in made


def test_passes_of_fsdp_are_beside_gathers_and_scatters():
    """For Llama 3 8B's layers over 64 devices, with a microbatch of 8,192 tokens, at most 5 % of a
    layer's B is not in matmuls, attention or covered collectives, as passes alone lie beside
    collectives; SwiGLU's backward pass is one kernel, not two."""
    model = ModelConfig(
        family="llama", layers=4, hidden=4096, heads=32, kv_heads=8, ffn=14336, sequence=8192,
        vocab=32000,
    )  # fmt: skip
    layout = Layout(data=64, zero=3, weave="on", idle="phases", recompute="none")
    found = step.compile_plan(RunConfig(model=model, layout=layout, global_batch=64), target="h100")
    assert found.timeline and found.timeline.tick
    tick = found.timeline.tick
    passes_s = sum(one.seconds for one in tick.spans if one.row == "other")
    exposed_s = sum(one.seconds for one in tick.spans if one.exposed)
    assert (1 - beside(tick)) * passes_s + exposed_s < 0.05 * tick.drawn_s
    assert passes_s < 0.1 * tick.drawn_s and exposed_s < 0.005 * tick.drawn_s


def test_layers_of_two_kinds_in_turn_copy_no_stash(tmp_path):
    """As in Gemma 2, where F's kind in a pair differs from B's: F writes to a kind's slot in the
    pair after the one in which B has read it."""
    model = ModelConfig(
        family="gemma2", layers=8, hidden=2048, heads=8, kv_heads=8, head_dim=256, sequence=2048,
        window=1024, vocab=32000,
    )  # fmt: skip
    layout = Layout(tensor=8, weave="on", idle="phases", recompute="selective")
    run, path = RunConfig(model=model, layout=layout, global_batch=8), tmp_path / "step.txt"
    step.compile_plan(run, target="h100", program=path)
    slots = r" = bf16\[2,4,1,[\d,]*\]\S* "  # two, of four layers of each kind
    assert len(re.findall(slots + "get-tuple-element", path.read_text())) > 8
    assert not re.findall(slots + r"copy\(", path.read_text())


def test_nor_gradients_that_loops_of_experts_add_to(tmp_path):
    """As in gpt-oss."""
    model = ModelConfig(
        family="gpt_oss", layers=8, hidden=1024, heads=16, kv_heads=8, head_dim=64, sequence=2048,
        window=128, vocab=32000, experts=16, choices=2, expert_ffn=1024,
    )  # fmt: skip
    layout = Layout(expert=8, weave="on", idle="phases", recompute="selective")
    run, path = RunConfig(model=model, layout=layout, global_batch=64), tmp_path / "step.txt"
    step.compile_plan(run, target="h100", program=path)
    tick = SteadyTick(read_program(path.read_text()), layout.sizes)
    assert tick.copies(4 * 2 * 1024 * 1024) == []  # four layers of each kind, two experts


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_residuals_of_one_stage_are_not_copied(recompute, tmp_path):
    """Besides matmuls, GELU and its backward pass make one array of the MLP's width each; so
    does recomputation, together with the latter. Only q, k and v's gradient has their width."""
    model, path = replace(MODEL, hidden=2048, heads=16), tmp_path / "step.txt"
    layout = Layout(microbatch=4, idle="phases", recompute=recompute)  # beyond the second cache
    run = RunConfig(model=model, layout=layout, global_batch=32)
    step.compile_plan(run, target="h100", program=path)
    tick = SteadyTick(read_program(path.read_text()), layout.sizes)
    assert len(tick.made("bf16", [(4, 2048, 8192), (4 * 2048, 8192)])) == 2
    assert len(tick.made("bf16", [(4, 2048, 3, 16, 128)])) == 1


def test_all_of_this_is_seen_where_it_is_not_so(compiled):
    """The checks fail without weaving and without XLA's fusions of slices."""
    tick, times, shapes = compiled(2, "off", in_place=False)
    layers = [one for one in tick.windows() if scope(one) not in OUTSIDE]
    assert any(one.synchronous for one in layers)
    assert tick.made("bf16", shapes) and tick.made("f32", shapes)
    assert uncovered(times) > uncovered(compiled(2, "on")[1]) + 0.05
