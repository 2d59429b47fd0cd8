"""What families are made of: against the models' parameters, published counts, and by hand."""

import dataclasses
import math

import jax
import pytest

from mtx.config import Layout, ModelConfig, RunConfig
from mtx.plan.flops import (
    forward_flops,
    model_flops,
    parameters,
    parameters_by_part,
    sc21_flops,
)
from mtx.plan.memory import parameters_per_device
from mtx.presets import NAMES, preset
from mtx.step.trainer import Trainer

LLAMA = dict(family="llama", kv_heads=2, ffn=48, tied=False)
BERT = dict(family="bert")
POST = BERT | dict(norm_placement="post")


def small(**changes):
    base = dict(layers=4, hidden=32, heads=4, sequence=16, vocab=128, vocab_multiple=8)
    return ModelConfig(**(base | changes))


# -- counts that were published --------------------------------------------------------------------


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
    transform, norm, bias, binary = 1024**2 + 1024, 2 * 1024, 30522, 2 * 1024 + 2
    assert parts["head"] == transform + norm + bias
    assert sum(parts.values()) - parts["head"] - binary == 335_141_888


@pytest.mark.parametrize(("name", "billions"), [("336m", 0.336), ("1.3b", 1.3), ("3.9b", 3.9)])
def test_berts_of_the_2019_paper_have_its_sizes(name, billions):
    """Shoeybi et al. 2019, table 4."""
    count = parameters(preset(f"bert-{name}").model) / 1e9
    assert round(count, 3 if name == "336m" else 1) == billions


# -- parameters of the models ----------------------------------------------------------------------


def held_by_a_device(trainer: Trainer) -> int:
    """From the shapes and specs of the parameters: layers with the padding of uneven stages."""
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
        (LLAMA, dict(data=2, pipe=2, tensor=2)),  # a head of keys and values each
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


# -- FLOPs by hand ---------------------------------------------------------------------------------


def test_forward_of_llama_by_hand():
    parts = forward_flops(small(**LLAMA), 5, causal=True)
    tokens = 5 * 16
    assert parts.layers["attention"] == 4 * 2 * tokens * 32 * (32 + 2 * 2 * 8 + 32)
    assert parts.scores == 4 * 2 * (2 * tokens * 16 * 32) / 2
    assert parts.layers["mlp"] == 4 * 2 * tokens * 32 * 3 * 48
    assert parts.head == 2 * tokens * 32 * 128


def test_forward_of_bert_by_hand():
    """Attention both ways: there is nothing to halve."""
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
    """Less the embedding's, which is looked up; the scores come on top."""
    model = preset(name).model
    forward = forward_flops(model, 1, causal=True)
    matrices = parameters(model) - model.vocab * model.hidden
    rest = 3 * (forward.total - forward.scores)
    assert rest == pytest.approx(6 * matrices * model.sequence, rel=1e-4)  # norms have no matmul
