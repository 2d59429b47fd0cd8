"""Presets of published models: the published number of parameters, and their config.json."""

import math

import pytest

from mtx.conversion.checkpoint import canonical_shapes
from mtx.conversion.configs import config_of, read_config
from mtx.families import hugging_face_of
from mtx.presets import NAMES, preset

# As the models' pages on huggingface.co count them: tensors in the files, tied ones once.
PARAMETERS = {
    "llama-2-7b": 6_738_415_616, "llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360, "qwen3-32b": 32_762_123_264,
    "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320,
    "granite-3-2b": 2_533_531_648, "granite-3-8b": 8_170_848_256,
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_630_071_296,
    "granite-4-tiny": 6_939_037_248, "granite-4-small": 32_207_337_984,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
    "llava-1.5-7b": 7_063_427_072, "llava-1.5-13b": 13_351_494_656,
    "t5-small": 60_506_624, "t5-11b": 11_307_321_344,
    "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_as_many_as_published(name):
    shapes = canonical_shapes(preset(name).model)
    trained = [shape for path, shape in shapes.items() if not path.endswith(".load")]
    assert sum(map(math.prod, trained)) == PARAMETERS[name]


# Borgeaud et al. 2022, table 2: without embeddings, in millions.
RETRO = {"retro-172m": 172, "retro-425m": 425, "retro-1.5b": 1451, "retro-7.5b": 7532}


@pytest.mark.parametrize("name", RETRO)
def test_a_retros_parameters_are_as_many_as_published_but_for_positions(name):
    """Theirs have another matrix in each attention, for its relative positions."""
    model = preset(name).model
    shapes = canonical_shapes(model).items()
    ours = sum(math.prod(shape) for path, shape in shapes if not path.startswith("embed."))
    decoders = model.decoders
    ours += (decoders + len(model.reads)) * model.hidden * model.heads * model.head_size
    encoder = model.encoder_hidden * model.encoder_heads * model.encoder_head_dim
    ours += (model.encoder_layers + 1) * encoder
    assert round(ours / 1e6) in (RETRO[name], RETRO[name] + 1)


@pytest.mark.parametrize("name", [n for n in NAMES if hugging_face_of(preset(n).model.family)])
def test_a_preset_has_a_config_of_hugging_face(name):
    model = preset(name).model
    config = config_of(model)
    again, notes = read_config(config, "config.json")
    assert config_of(again) == config and not notes
    assert canonical_shapes(again) == canonical_shapes(model)
