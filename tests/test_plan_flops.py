"""Closed forms for FLOPs and parameters, against the paper's numbers."""

import dataclasses

import pytest

from mtx.config import Layout, ModelConfig
from mtx.plan.attention import kernel_of
from mtx.plan.flops import (
    forward_flops,
    hardware_matmul_flops,
    model_flops,
    parameters,
    sc21_flops,
    sc21_parameters,
    training_time_s,
)
from mtx.plan.published import TABLE_1
from mtx.presets import preset

GPT3 = preset("gpt-175b").model
DAY_S = 86400


def test_gpt3_in_both_conventions():
    assert sc21_flops(GPT3, 1536) == pytest.approx(4.510971e18, rel=1e-6)
    assert model_flops(GPT3, 1536) == pytest.approx(3.340598e18, rel=1e-6)


@pytest.mark.parametrize("name", ["gpt-1.7b", "gpt-175b", "gpt-1t"])
def test_conventions_are_the_papers_formulas(name):
    model, batch = preset(name).model, 96
    s, h, layers, vocab = model.sequence, model.hidden, model.layers, model.vocab
    unit = batch * s * layers * h**2
    paper = 96 * unit * (1 + s / (6 * h) + vocab / (16 * layers * h))
    today = 72 * unit * (1 + s / (12 * h) + vocab / (12 * layers * h))
    assert sc21_flops(model, batch) == pytest.approx(paper, rel=1e-12)
    assert model_flops(model, batch) == pytest.approx(today, rel=1e-12)


def test_forward_by_part():
    model = ModelConfig(layers=3, hidden=8, heads=2, sequence=16, vocab=100, ffn_multiple=2)
    parts = forward_flops(model, 5, causal=False)
    tokens = 5 * 16
    assert parts.layers["attention"] == 3 * 2 * tokens * 8 * (3 * 8 + 8)
    assert parts.scores == 3 * 2 * (2 * tokens * 16 * 8)
    assert parts.layers["mlp"] == 3 * 2 * (2 * tokens * 8 * 16)
    assert parts.head == 2 * tokens * 8 * 100
    assert parts.total == parts.blocks + parts.head
    causal = forward_flops(model, 5, causal=True)
    assert causal.scores == parts.scores / 2
    assert causal.layers == parts.layers


@pytest.mark.parametrize("row", TABLE_1, ids=lambda row: row.preset)
def test_parameters_of_table_1(row):
    model = preset(row.preset).model
    assert round(sc21_parameters(model) / 1e9, 1) == row.parameters_billion
    # The exact count also has the final norm.
    assert parameters(model) - sc21_parameters(model) == pytest.approx(2 * model.hidden, abs=0.5)


def test_parameters_of_other_shapes():
    model = ModelConfig(layers=2, hidden=6, heads=2, sequence=5, vocab=7, ffn_multiple=3)
    qkv, out, up, down = 6 * 18 + 18, 36 + 6, 6 * 18 + 18, 18 * 6 + 6
    assert parameters(model) == 2 * (qkv + out + up + down + 4 * 6) + (7 + 5 + 2) * 6
    untied = dataclasses.replace(model, tied=False)
    assert parameters(untied) == parameters(model) + 7 * 6


@pytest.mark.parametrize(
    ("count", "tokens", "devices", "tflops", "days"),
    [(175e9, 300e9, 1024, 140, 34), (1008e9, 450e9, 3072, 163, 84)],
)
def test_training_times_of_the_paper(count, tokens, devices, tflops, days):
    seconds = training_time_s(
        parameters=count, tokens=tokens, devices=devices, flops_per_device=tflops * 1e12
    )
    assert round(seconds / DAY_S) == days


def gpt(**changes):
    base = dict(layers=8, hidden=64, heads=4, sequence=32, vocab=128, vocab_multiple=16)
    return ModelConfig(**(base | changes))


def hardware(model, *, backend="xla", global_batch=8, **layout):
    return hardware_matmul_flops(
        model, Layout(**(dict(pipe=2) | layout)), global_batch, backend=backend
    )


def test_hardware_flops_without_recomputation_are_three_forwards_and_the_scores_again():
    parts = forward_flops(gpt(), 8, causal=False)
    for changes in ({}, {"attention_dropout": 0.1}):
        assert hardware(gpt(**changes)) == 3 * parts.total + parts.scores / 2


def test_hardware_flops_of_blocked_attention():
    """Four blocks of queries see 1/4, 2/4, 3/4 and all keys: 10/16 of the square."""
    parts = forward_flops(gpt(sequence=128), 8, causal=False)
    rest = parts.total - parts.scores
    assert hardware(gpt(sequence=128)) == 3 * rest + 3.5 * 10 / 16 * parts.scores


def test_full_recomputation_is_four_forwards_less_the_last_matmul():
    model = gpt()
    parts = forward_flops(model, 8, causal=False)
    # In blocks, XLA computes the scores of the forward and the backward pass once.
    expected = 4 * parts.blocks + 3 * parts.head - parts.layers["mlp"] / 2
    assert hardware(model, recompute="full") == expected
    apart = parts.layers["mlp"] / 2 + parts.scores / 2  # F and B of a chunk are two loops
    assert hardware(model, stash="inputs") == expected + apart
    one_layer_chunks = hardware(model, stash="inputs", pipe=4, virtual=2)
    assert one_layer_chunks == expected


def test_selective_recomputation_repeats_attention_where_its_output_is_not_kept():
    whole = forward_flops(gpt(), 8, causal=False).scores
    for model, backend, again in (
        (gpt(), "xla", 0),
        (gpt(attention_dropout=0.1), "xla", 0),
        (gpt(compute_dtype="bfloat16"), "cuda", whole),
    ):
        none = hardware(model, backend=backend)
        assert hardware(model, backend=backend, recompute="selective") - none == again


@pytest.mark.parametrize("backend", ["xla", "cuda"])
@pytest.mark.parametrize("changes", [{}, {"sequence": 128}, {"family": "llama", "kv_heads": 2}])
def test_recomputation_around_attention_is_full_less_attention(changes, backend):
    model = gpt(**changes, compute_dtype="bfloat16")
    full, around = (
        hardware(model, backend=backend, recompute=way) for way in ("full", "around_attention")
    )
    forward = forward_flops(model, 8, causal=False).scores
    blocks = 10 / 16 if backend == "xla" and model.sequence == 128 else 1
    # In blocks, XLA computes the scores of the forward and the backward pass once.
    assert full - around == blocks * (forward / 2 if backend == "xla" else forward)


@pytest.mark.parametrize(("idle", "halves"), [("skip", (8, 8)), ("phases", (9, 9))])
def test_idle_half_ticks_count_where_they_compute(idle, halves):
    model = gpt()
    parts = forward_flops(model, 8, causal=False)
    backward = 2 * parts.blocks + parts.scores / 2
    executed = (halves[0] * parts.blocks + halves[1] * backward) / 8 + 3 * parts.head
    assert hardware(model, idle=idle) == pytest.approx(executed, rel=1e-12)


def test_hardware_flops_of_a_cluster_do_not_depend_on_how_it_is_cut():
    model = gpt(sequence=64)
    one = hardware(model, pipe=1)
    assert hardware(model, pipe=4, tensor=2, data=2, microbatch=2) == one
    assert hardware(model, pipe=3, stage_layers="balanced", virtual=2) > one  # padded vocabulary
    padded = gpt(sequence=64, vocab=128 * 3)
    assert hardware(padded, pipe=3, stage_layers="balanced") == hardware(padded, pipe=1)


@pytest.mark.parametrize(
    ("changes", "backend", "name"),
    [
        ({"compute_dtype": "bfloat16"}, "cuda", "cudnn"),
        ({"compute_dtype": "bfloat16"}, "xla", "blocked"),
        ({"compute_dtype": "float32"}, "cuda", "blocked"),
        ({"compute_dtype": "float16", "hidden": 640}, "cuda", "blocked"),  # heads of 160
        ({"compute_dtype": "bfloat16", "hidden": 240}, "cuda", "blocked"),  # heads of 60
        ({"compute_dtype": "bfloat16", "sequence": 65}, "cuda", "blocked"),  # masks in pairs
        ({"compute_dtype": "bfloat16", "attention_dropout": 0.1}, "cuda", "blocked"),
    ],
)
def test_which_attention_runs(changes, backend, name):
    assert kernel_of(gpt(**changes), backend) == name
