"""Costs read off traces, against the models' parameters, published counts, and counts by hand."""

import dataclasses
import math
import os
import subprocess
import sys
from collections import Counter

import jax
import pytest

from mtx.config import Layout, ModelConfig, RunConfig
from mtx.costs import ask, equations, trace
from mtx.costs.ask import layer_cost, model_parameters
from mtx.costs.cost import EMBED, HEAD, PARAMETERS, Question, Size
from mtx.families.llama import Llama
from mtx.plan.flops import (
    forward_flops,
    model_flops,
    parameters,
    parameters_by_part,
    sc21_flops,
)
from mtx.plan.held import parameters_per_device
from mtx.presets import NAMES, preset
from mtx.step.trainer import Trainer

LLAMA = dict(family="llama", kv_heads=2, ffn=48, tied=False)
BERT = dict(family="bert")
POST = BERT | dict(norm_placement="post")


def small(**changes):
    base = dict(layers=4, hidden=32, heads=4, sequence=16, vocab=128, vocab_multiple=8)
    return ModelConfig(**(base | changes))


# -- published counts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
    ],
)
def test_llamas_have_as_many_parameters_as_their_checkpoints(name, count):
    assert parameters(preset(name).model) == count


def test_bert_large_has_as_many_parameters_as_its_checkpoint():
    """Hugging Face's bert-large-uncased: embeddings, blocks and pooler, without the heads."""
    model = ModelConfig(
        family="bert", layers=24, hidden=1024, heads=16, sequence=512, vocab=30522,
        norm_placement="post",
    )  # fmt: skip
    parts = parameters_by_part(model)
    transform, norm, bias = 1024**2 + 1024, 2 * 1024, 30522
    assert parts["binary head"] == 2 * 1024 + 2
    assert parts["masked head"] == transform + norm + bias
    assert sum(parts.values()) - parts["masked head"] - parts["binary head"] == 335_141_888


@pytest.mark.parametrize(("name", "billions"), [("336m", 0.336), ("1.3b", 1.3), ("3.9b", 3.9)])
def test_berts_of_the_2019_paper_have_its_sizes(name, billions):
    """Shoeybi et al. 2019, table 4."""
    count = parameters(preset(f"bert-{name}").model) / 1e9
    assert round(count, 3 if name == "336m" else 1) == billions


# -- parameters of the models ----------------------------------------------------------------------


def held_by_a_device(trainer: Trainer) -> int:
    """Parameters of a device by their shapes and specs: layers include padding of uneven stages."""
    shapes, specs = (
        jax.tree.leaves(tree) for tree in (trainer.states.param_shapes, trainer.states.param_specs)
    )
    return sum(
        leaf.size // _parts(spec, trainer.run.layout.sizes) for leaf, spec in zip(shapes, specs)
    )


def _parts(spec, sizes) -> int:
    names = [(entry,) if isinstance(entry, str) else entry for entry in spec if entry]
    return math.prod(sizes[axis] for entry in names for axis in entry)


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, dict(data=2, pipe=2, tensor=2)),
        ({"tied": False, "ffn": 96}, dict(tensor=4)),
        (LLAMA, dict()),
        (LLAMA, dict(data=2, pipe=2, tensor=2)),  # each device has a head of keys and values
        (LLAMA, dict(pipe=2, tensor=4)),  # whole on every device
        (LLAMA | dict(kv_heads=None, tied=True), dict(tensor=4)),
        (LLAMA | dict(kv_heads=1), dict(tensor=2, pipe=2, virtual=2)),
        (BERT, dict(pipe=2, tensor=2)),
        (POST, dict(data=2, tensor=4)),
        (POST, dict(pipe=3, stage_layers="balanced")),
    ],
)
def test_parameters_are_those_of_the_models(changes, layout):
    model = small(**changes)
    layout = Layout(**layout)
    trainer = Trainer(RunConfig(model=model, layout=layout, global_batch=8))
    assert parameters_per_device(model, layout) == held_by_a_device(trainer)
    if trainer.placement.even:
        exact = dataclasses.replace(model, vocab=model.padded_vocab(layout.vocab_shards))
        assert parameters(exact) == sum(
            a.size for a in jax.tree.leaves(trainer.states.param_shapes)
        )


@pytest.mark.parametrize("name", NAMES)
def test_parts_and_devices_add_up(name):
    model = preset(name).model
    assert sum(parameters_by_part(model).values()) == parameters(model)
    alone = dataclasses.replace(model, vocab_multiple=1)
    assert parameters_per_device(alone, Layout()) == parameters(model)


# -- a layer, read off its trace -------------------------------------------------------------------


def test_the_products_of_a_llamas_layer():
    """With fewer heads of keys and values than devices, each device computes the head it needs, and
    holds the weights of both."""

    def products(tensor):
        cost = layer_cost(small(**LLAMA), kind="block", tensor=tensor, sequence_parallel=True)
        assert all(each.m == Size(16, rows=1) for each in cost.weights)
        return [(each.weight, each.k.number, each.n.number) for each in cost.weights]

    assert products(4) == [
        ("attention.qkv.q", 32, 8), ("attention.qkv.kv", 32, 2 * 8), ("attention.out.w", 8, 32),
        ("mlp.up.w", 32, 2 * 12), ("mlp.down.w", 12, 32),
    ]  # fmt: skip
    assert products(1)[1] == ("attention.qkv.kv", 32, 2 * 2 * 8)
    assert products(2)[1] == ("attention.qkv.kv", 32, 2 * 8)
    sharded = [
        {
            each.path: each.axes
            for each in model_parameters(small(**LLAMA), tensor=tensor).layers["block"]
        }
        for tensor in (2, 4)
    ]
    assert [each["attention.qkv.kv"] for each in sharded] == [("tensor",), ()]


def test_every_size_says_how_it_grows(monkeypatch):
    """Whatever numbers a trace uses to find that out."""
    model = small(**BERT | dict(dropout=0.1, attention_dropout=0.1, vocab=100))
    asked = [
        Question(model=model, part=part, tensor=2, sequence_parallel=True, recompute="selective")
        for part in ("block", EMBED, HEAD, PARAMETERS)
    ]
    before = list(map(trace.trace, asked))
    for module in (trace, equations):
        monkeypatch.setattr(module, "ROWS", 99_991)
        monkeypatch.setattr(module, "VOCAB", 7_919)
    trace._traced.cache_clear()
    assert list(map(trace.trace, asked)) == before
    trace._traced.cache_clear()


EXPERTS = dict(family="mixtral", kv_heads=2, ffn=48)


@pytest.mark.parametrize("recompute", ["selective", "around_attention", "full"])
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (small(), {}), (small(**LLAMA), {}), (small(**LLAMA), dict(kernel="blocked")),
        (small(**LLAMA), dict(tensor=1, sequence_parallel=False, slices=2)),
        (small(fp8="hybrid"), {}), (small(lora_rank=4, **LLAMA), {}), (small(**EXPERTS), {}),
        (small(parallel_block=True), {}),
        (preset("miniature-llava").model, {}), (preset("t5-small").model, {}),
        (preset("mamba2-hybrid-8b").model, {}), (preset("retro-172m").model, {}),
        (preset("gemma-2-9b").model, {}),
    ],
)  # fmt: skip
def test_what_is_computed_again_is_what_a_checkpoint_computes(
    monkeypatch, model, changes, recompute
):
    """Costs of layers with recomputation are derived from a trace without it: they equal those of
    the layer inside `jax.checkpoint`."""
    # A checkpoint adds a reduce_precision, to the same precision, to kept values: XLA removes it.
    monkeypatch.setattr(equations, "_ALIASES", {"name", "reduce_precision"})
    asked = dict(tensor=2, sequence_parallel=True, kernel="cudnn", recompute=recompute) | changes
    kinds = ask.pattern_of(model)
    derived = [trace.trace(Question(model=model, part=kind, **asked)) for kind in set(kinds)]
    trace._traced.cache_clear()
    for kind, found in zip(set(kinds), derived):
        asked_of = Question(model=model, part=kind, **asked)
        of_checkpoint = trace._Traced(asked_of).cost("none")
        for field in found._fields:
            got, want = getattr(found, field), getattr(of_checkpoint, field)
            if field in ("matmuls", "collectives", "cuts"):
                got, want = Counter(got), Counter(want)
            assert got == want, (kind, field)
    trace._traced.cache_clear()


def test_w_makes_a_gradient_of_each_matrix_and_b_one_of_each_input():
    cost = layer_cost(small(), kind="block", kernel="cudnn")
    weights = sorted(each.weight for each in cost.weights)
    assert len(weights) == 4
    for during in "BW":
        assert sorted(e.weight for e in cost.matmuls if e.during == during and e.weight) == weights
    assert {cost.flops(during, 3) for during in "W"} == {sum(e.flops(3) for e in cost.weights)}
    fused = [each for each in cost.matmuls if each.fused]
    assert [each.during for each in fused] == ["F"] * 2 + ["B"] * 5
    assert all(each.seen == 0.5 and not each.weight for each in fused)
    assert {each.flops(1) for each in fused} == {2 * 4 * 16 * 16 * 8}
    assert cost.scores.number == 0, "no score leaves the kernel"


@pytest.mark.parametrize(("sequence_parallel", "forward"), [(True, 4), (False, 2)])
def test_collectives_of_a_layer(sequence_parallel, forward):
    """Forward all-gathers and reduce-scatters, or all-reduces; backward their duals, and with
    sequence parallelism the inputs are gathered once more."""
    cost = layer_cost(small(), kind="block", tensor=2, sequence_parallel=sequence_parallel)
    counts = Counter((each.during, each.kind) for each in cost.collectives)
    if sequence_parallel:
        assert counts == {
            ("F", "all_gather"): 2, ("F", "reduce_scatter"): 2, ("B", "all_gather"): 2,
            ("B", "reduce_scatter"): 2, ("W", "all_gather"): 2,
        }  # fmt: skip
    else:
        assert counts == {("F", "psum"): 2, ("B", "psum"): 2}
    whole = Size(16 * 32 * 2, rows=1)
    assert all((each.axes, each.bytes) == (("tensor",), whole) for each in cost.collectives)
    assert layer_cost(small(), kind="block").collectives == ()


def test_what_the_kernels_of_a_layer_read_and_write():
    """In passes over x. F: two norms 2, two additions 3, and the activation 2 of four times the
    width. B: two norms 4 with the sum of two gradients, 2 for their weights' gradients; joining q,
    k and v 6; the activation 3 of four times the width; gradients of biases 1 + 3 + 4 + 1."""
    cost = layer_cost(small(hidden=256), kind="block", kernel="cudnn")
    once, deviations = 16 * 256 * 2, 2 * 2 * 16 * 4  # float32, with the means, of two norms
    found = {
        each.during: (each.kernels, sum(size.number for size in each.bytes if size.rows))
        for each in cost.moved
    }
    assert found["F"] == (5, once * (2 * 2 + 2 * 3 + 2 * 4) + deviations)
    assert found["B"] == (10, once * (2 * 4 + 2 * 2 + 6 + 3 * 4 + 9) + 2 * deviations)
    assert found["W"] == (0, 0)


# -- the cache on disk -----------------------------------------------------------------------------

PLANS_TWICE = """
import sys
from mtx.plan.plan import make_plan
from mtx.presets import preset
make_plan(preset("bert-336m")).to_dict()
if "jax" in sys.modules:
    from jax._src import xla_bridge
    assert not xla_bridge.backends_are_initialized(), "a plan asks for no device"
print("jax" in sys.modules)
"""


def plans(folder) -> str:
    environment = os.environ | {"XDG_CACHE_HOME": str(folder)}
    run = [sys.executable, "-c", PLANS_TWICE]
    done = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_who_plans_a_model_again_needs_no_jax(tmp_path):
    assert [plans(tmp_path), plans(tmp_path)] == ["True", "False"]


def test_a_cache_that_cannot_be_read_or_written_is_passed_over(tmp_path, monkeypatch):
    def cost():
        ask._answer.cache_clear()
        return layer_cost(small(hidden=64), kind="block")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = cost()
    (path,) = tmp_path.rglob("*.json")
    whole = path.read_text()
    assert cost() == first
    for damaged in (whole[: len(whole) // 2], "[]", "3", '"text"', "[" + whole, "null"):
        path.write_text(damaged)
        assert cost() == first
        assert path.read_text() == whole, "it is mended"
    assert list(tmp_path.rglob("*.part")) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cost() == first


# -- FLOPs by hand ---------------------------------------------------------------------------------


def test_a_class_of_ones_own_shares_no_file_with_its_family(tmp_path, monkeypatch):
    class Wider(Llama):
        ffn_hidden = 192

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = dict(layers=1, hidden=72, heads=4, sequence=16, vocab=64)
    of_family, of_class = (layer_cost(kind(**sizes), kind="block") for kind in (Llama, Wider))
    assert of_family.flops("F", 1) != of_class.flops("F", 1)
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_forward_of_llama_by_hand():
    parts = forward_flops(small(**LLAMA), 5, causal=True)
    tokens = 5 * 16
    assert parts.layers["attention"] == 4 * 2 * tokens * 32 * (32 + 2 * 2 * 8 + 32)
    assert parts.scores == 4 * 2 * (2 * tokens * 16 * 32) / 2
    assert parts.layers["mlp"] == 4 * 2 * tokens * 32 * 3 * 48
    assert parts.head == 2 * tokens * 32 * 128


def test_forward_of_bert_by_hand():
    """Attention is bidirectional: there is nothing to halve."""
    model = small(**BERT)
    parts = forward_flops(model, 5, causal=True)
    tokens = 5 * 16
    assert parts == forward_flops(model, 5, causal=False)
    assert parts.scores == 4 * 2 * (2 * tokens * 16 * 32)
    head, binary = 2 * tokens * 32 * (128 + 32), 2 * 5 * 32 * (32 + 2)
    assert parts.head == head + binary
    assert model_flops(model, 5) == 3 * parts.total
    assert sc21_flops(model, 5) == 4 * parts.blocks + 3 * parts.head


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-405b"])
def test_a_llama_computes_six_flops_a_parameter_and_token(name):
    """Except for the embedding's parameters, which are looked up; scores are added to this."""
    model = preset(name).model
    forward = forward_flops(model, 1, causal=True)
    matrices = parameters(model) - model.vocab * model.hidden
    rest = 3 * (forward.total - forward.scores)
    assert rest == pytest.approx(6 * matrices * model.sequence, rel=1e-4)  # norms have no matmul
