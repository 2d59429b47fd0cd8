"""Configs: what is refused and how, conversion to JSON and back, and presets against the paper."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.config import (
    DataConfig,
    Layout,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    from_dict,
    to_dict,
)
from mtx.errors import UserError
from mtx.families.gpt import TABLE1
from mtx.presets import NAMES, preset

quick = settings(max_examples=80, deadline=None)


def message(make, *args, **values) -> str:
    """The one line that the user sees."""
    with pytest.raises(UserError) as caught:
        make(*args, **values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- errors ---------------------------------------------------------------------------------------


def refused(make, *args, named=(), **values) -> str:
    """The error's line, which names all of these."""
    text = message(make, *args, **values)
    assert [value for value in map(str, named) if value not in text] == [], text
    return text


POSITIVE = {
    ModelConfig: "layers hidden heads sequence vocab ffn_multiple vocab_multiple",
    Layout: "data pipe tensor virtual microbatch",
    RunConfig: "global_batch steps eval_batches",
}


@pytest.mark.parametrize(
    "kind, name", [(kind, name) for kind, names in POSITIVE.items() for name in names.split()]
)
def test_counts_must_be_positive(kind, name):
    for value in (0, -3):
        refused(kind, named=[f"{name}={value}", "1"], **{name: value})


@pytest.mark.parametrize("seed", [-1, 2**31])
def test_a_seed_fits_31_bits(seed):
    refused(RunConfig, named=[f"seed={seed}"], seed=seed)


@pytest.mark.parametrize(
    "kind, name, value, nearest",
    [
        (ModelConfig, "compute_dtype", "bfloat", "bfloat16"),
        (ModelConfig, "family", "lama", "llama"),
        (Layout, "schedule", "1f1b1", "1f1b"),
        (Layout, "idle", "phase", "phases"),
        (Layout, "stash", "residual", "residuals"),
        (Layout, "recompute", "selectiv", "selective"),
        (Layout, "stage_layers", "balance", "balanced"),
        (OptimizerConfig, "rate", "cosin", "cosine"),
    ],
)
def test_unknown_choices_name_the_nearest(kind, name, value, nearest):
    refused(kind, named=[name, f"'{value}'", f"'{nearest}'"], **{name: value})


def test_a_choice_like_nothing_known_is_listed_without_a_guess():
    assert "mean" not in refused(Layout, idle="xyz", named=["'xyz'", "phases", "skip"])
    assert "mean" not in refused(Layout, zero=11, named=["zero", "'11'", "1, 3"])


@pytest.mark.parametrize(
    "kind, values, bounds",
    [
        (ModelConfig, {"dropout": 1.0}, ["[0, 1)"]),
        (ModelConfig, {"attention_dropout": -0.1}, ["[0, 1)"]),
        (OptimizerConfig, {"lr": 0.0}, ["above 0"]),
        (OptimizerConfig, {"lr": float("nan")}, ["finite"]),
        (OptimizerConfig, {"min_lr": 0.1, "lr": 1e-3}, ["[0, lr=0.001]", "optimizer.min_lr"]),
        (OptimizerConfig, {"min_lr": -1.0}, ["[0, lr=0.00015]"]),
        (OptimizerConfig, {"warmup_steps": -1}, ["0"]),
        (OptimizerConfig, {"warmup_steps": 10, "decay_steps": 10}, ["decay_steps=10"]),
        (OptimizerConfig, {"clip": -1.0}, ["0"]),
        (OptimizerConfig, {"b1": 1.0}, ["[0, 1)"]),
        (OptimizerConfig, {"b2": -0.5}, ["[0, 1)"]),
        (DataConfig, {"eval_fraction": 0.0}, ["0 and 1"]),
        (DataConfig, {"eval_fraction": 1.0}, ["0 and 1"]),
        (DataConfig, {"bpe_vocab": 256}, ["257"]),
        (RunConfig, {"eval_every": -1}, ["0"]),
        (RunConfig, {"save_every": -2}, ["0"]),
    ],
)
def test_values_out_of_range_are_named_with_the_range(kind, values, bounds):
    name, value = next(iter(values.items()))
    refused(kind, named=[f"{name}={value}", *bounds], **values)


def test_recomputing_twice_is_refused_with_both_ways_out():
    ways = ["stash='inputs'", "recompute='full'", "recompute='none'", "stash='residuals'"]
    refused(Layout, stash="inputs", recompute="full", named=ways)
    assert Layout(stash="inputs", recompute="none").stash == "inputs"


@pytest.mark.parametrize("unit", ["layer", "chunk"])
def test_a_unit_of_gathering_needs_what_is_gathered(unit):
    refused(Layout, zero_unit=unit, named=[f"zero_unit={unit!r}", "zero=1", "zero=3", "'auto'"])
    assert Layout(zero=3, zero_unit=unit).zero_unit == unit


def test_what_cannot_be_divided_is_refused_with_the_nearest_legal_values():
    model = ModelConfig(heads=6, hidden=96, sequence=100)
    refused(ModelConfig, hidden=100, heads=8, named=["hidden=100", "heads=8", "hidden=96 or 104"])
    refused(ModelConfig, hidden=5, heads=8, named=["use hidden=8"])
    refused(Layout(tensor=4).check, model, named=["heads=6", "tensor=4", "tensor=3 or 6"])
    ways = ["sequence=100", "tensor=3", "sequence=99 or 102", "sequence_parallel=False"]
    refused(Layout(tensor=3).check, model, named=ways)
    sizes = ["global_batch=16", "data*microbatch=2*3", "global_batch=12 or 18"]
    refused(Layout(data=2, microbatch=3).microbatches, 16, named=sizes)


def test_a_run_refuses_a_layout_that_does_not_fit():
    refused(RunConfig, layout=Layout(tensor=3), named=["heads=8", "tensor=3"])
    sizes = ["data*microbatch=32*1", "global_batch=32"]
    refused(RunConfig, layout=Layout(data=32), global_batch=16, named=sizes)


def test_fields_belong_to_families():
    assert ModelConfig(family="llama", kv_heads=2).groups == 2
    refused(ModelConfig, kv_heads=2, named=["kv_heads=2", "'gpt'", "llama", "qwen3"])
    refused(ModelConfig, family="llama", gelu="tanh", named=["gelu='tanh'", "'llama'", "bert"])
    llama = ModelConfig(layers=3, hidden=96, heads=6).of_family("llama", kv_heads=3)
    assert (type(llama).__name__, llama.layers, llama.hidden, llama.groups) == ("Llama", 3, 96, 3)


def offered(text: str, name: str) -> list[int]:
    """The values of `name` that the error's remedy offers."""
    remedy = re.search(rf"use {name}=(\d+)(?: or (\d+))?", text)
    return [int(value) for value in remedy.groups() if value]


counts = st.integers(1, 200)


@quick
@given(counts, st.integers(1, 24))
def test_offered_hidden_sizes_are_legal(hidden, heads):
    if hidden % heads == 0:
        assert ModelConfig(hidden=hidden, heads=heads).head_size * heads == hidden
        return
    for value in offered(message(ModelConfig, hidden=hidden, heads=heads), "hidden"):
        assert ModelConfig(hidden=value, heads=heads).hidden == value


@quick
@given(counts, st.integers(1, 6), st.integers(1, 6))
def test_offered_batches_are_legal(global_batch, data, microbatch):
    layout = Layout(data=data, microbatch=microbatch)
    if global_batch % (data * microbatch) == 0:
        assert layout.microbatches(global_batch) * data * microbatch == global_batch
        return
    for value in offered(message(layout.microbatches, global_batch), "global_batch"):
        assert layout.microbatches(value) * data * microbatch == value


@quick
@given(st.integers(1, 48), st.integers(2, 48), st.booleans())
def test_offered_tensor_sizes_and_sequences_are_legal(heads, tensor, fits):
    model = ModelConfig(heads=heads, hidden=heads * 4, sequence=tensor * 3 if fits else tensor + 1)
    layout = Layout(tensor=tensor)
    if heads % tensor:
        for value in offered(message(layout.check, model), "tensor"):
            assert model.heads % value == 0
    elif not fits:
        text = message(layout.check, model)
        for value in offered(text, "sequence"):
            layout.check(replace(model, sequence=value))
        assert text.endswith("sequence_parallel=False")
        replace(layout, sequence_parallel=False).check(model)
    else:
        layout.check(model)


# --- derived numbers ------------------------------------------------------------------------------


def test_derived_sizes():
    model = ModelConfig(hidden=96, heads=6, ffn_multiple=4, vocab=50257, vocab_multiple=128)
    assert (model.head_size, model.ffn_hidden) == (16, 384)
    assert model.padded_vocab(1) == 50304  # Megatron-LM's own padding of GPT-2's vocabulary
    assert model.padded_vocab(8) == 51200  # 50 x 128 x 8, the V of SC'21
    layout = Layout(data=2, pipe=3, tensor=4)
    assert (layout.devices, layout.vocab_shards) == (24, 12)
    assert RunConfig(layout=Layout(data=2, microbatch=4), global_batch=32).microbatches == 4


@quick
@given(st.integers(1, 100_000), st.integers(1, 64), st.sampled_from([1, 8, 128]))
def test_padded_vocab_is_the_least_that_divides(vocab, shards, multiple):
    padded = ModelConfig(vocab=vocab, vocab_multiple=multiple).padded_vocab(shards)
    assert padded % (multiple * shards) == 0
    assert 0 <= padded - vocab < multiple * shards


# --- to JSON and back -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_presets_survive_json(name):
    run = preset(name)
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(run)))) == run


def test_tuples_survive_json():
    run = RunConfig(
        layout=Layout(pipe=2, stage_layers=(3, 5)), data=DataConfig(path=("a.txt", "b.txt"))
    )
    again = from_dict(RunConfig, json.loads(json.dumps(to_dict(run))))
    assert again == run and again.layout.stage_layers == (3, 5)


def test_missing_fields_take_their_defaults():
    assert from_dict(RunConfig, {"model": {"layers": 2}}) == RunConfig(model=ModelConfig(layers=2))


@pytest.mark.parametrize(
    "kind, values, named",
    [
        (ModelConfig, {"layer": 3}, ["'layer'", "'layers'"]),
        (RunConfig, {"layout": {"pip": 2}}, ["Layout", "'pip'", "'pipe'"]),
        (RunConfig, {"modle": {}}, ["RunConfig", "'modle'", "'model'"]),
    ],
)
def test_unknown_fields_name_the_nearest(kind, values, named):
    refused(from_dict, kind, values, named=named)


def test_values_read_back_are_validated():
    refused(from_dict, RunConfig, {"model": {"layers": 0}}, named=["layers=0", "1"])


# --- presets --------------------------------------------------------------------------------------

# Narayanan et al., SC'21, table 1: parameters (billions), heads, hidden, layers, tensor, pipeline,
# GPUs, global batch.
SC21_TABLE1 = {
    "gpt-1.7b": (1.7, 24, 2304, 24, 1, 1, 32, 512),
    "gpt-3.6b": (3.6, 32, 3072, 30, 2, 1, 64, 512),
    "gpt-7.5b": (7.5, 32, 4096, 36, 4, 1, 128, 512),
    "gpt-18b": (18.4, 48, 6144, 40, 8, 1, 256, 1024),
    "gpt-39b": (39.1, 64, 8192, 48, 8, 2, 512, 1536),
    "gpt-76b": (76.1, 80, 10240, 60, 8, 4, 1024, 1792),
    "gpt-145b": (145.6, 96, 12288, 80, 8, 8, 1536, 2304),
    "gpt-310b": (310.1, 128, 16384, 96, 8, 16, 1920, 2160),
    "gpt-530b": (529.6, 128, 20480, 105, 8, 35, 2520, 2520),
    "gpt-1t": (1008.0, 160, 25600, 128, 8, 64, 3072, 3072),
}


def test_table_1_is_complete():
    assert TABLE1 == tuple(SC21_TABLE1)


@pytest.mark.parametrize("name", SC21_TABLE1)
def test_presets_are_table_1(name):
    billions, heads, hidden, layers, tensor, pipe, gpus, global_batch = SC21_TABLE1[name]
    run = preset(name)
    assert (run.model.heads, run.model.hidden, run.model.layers) == (heads, hidden, layers)
    assert (run.layout.tensor, run.layout.pipe) == (tensor, pipe)
    assert (run.layout.devices, run.global_batch) == (gpus, global_batch)
    assert (run.model.vocab, run.model.sequence) == (51200, 2048)
    # equation 2 of the paper, from the preset's own numbers
    h, vocab, sequence = run.model.hidden, run.model.vocab, run.model.sequence
    blocks = 12 * run.model.layers * h**2
    parameters = blocks * (1 + 13 / (12 * h) + (vocab + sequence) * h / blocks)
    assert parameters / 1e9 == pytest.approx(billions, abs=0.06)


def test_interleaved_presets_are_those_of_the_published_scripts():
    virtual = {name: preset(name).layout.virtual for name in TABLE1}
    assert {name: v for name, v in virtual.items() if v > 1} == {
        "gpt-76b": 3, "gpt-145b": 2, "gpt-310b": 2, "gpt-530b": 3,
    }  # fmt: skip
    for name in TABLE1:
        run = preset(name)
        assert run.layout.virtual == 1 or run.microbatches % run.layout.pipe == 0


def test_other_presets():
    gpt_2 = preset("gpt-2-345m").model  # Shoeybi et al. 2019, table 1: 355M with h=1024, 24 layers
    assert (gpt_2.hidden, gpt_2.layers, gpt_2.head_size) == (1024, 24, 64)
    gpt_3 = preset("gpt-175b")  # SC'21, section 5.3
    assert (gpt_3.model.hidden, gpt_3.model.layers, gpt_3.model.heads) == (12288, 96, 96)
    assert gpt_3.layout.devices == 96 and gpt_3.microbatches == 60
    assert "gpt-175b" in NAMES and "gpt-3-175b" not in NAMES
    miniature = preset("miniature").layout
    assert (miniature.data, miniature.pipe, miniature.tensor, miniature.virtual) == (2, 2, 2, 2)
    assert preset("bench-s").microbatches == 8


def test_only_table_1_recomputes_every_block():
    """As it was published; the others fit with less, except the largest mixture."""
    full = [name for name in NAMES if preset(name).layout.recompute == "full"]
    assert [name for name in full if name != "deepseek-v3"] == list(TABLE1)


def test_an_unknown_preset_names_the_nearest():
    refused(preset, "gpt-1tt", named=["'gpt-1tt'", "'gpt-1t'", "bench-s"])
