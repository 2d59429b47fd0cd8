"""Models converted there and back: the same bits, the same logits, and refusals with the names.

tests/peers/test_convert_transformers.py compares them with transformers.
"""

from __future__ import annotations

import json
from dataclasses import replace

import hugging
import jax
import numpy as np
import pytest
import tokenizers
from errors import names
from hugging import LLAMA3, YARN, bert, gemma2, gpt2, granite, llama, mistral, qwen2, qwen3
from parameters import params_of

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.conversion import convert
from mtx.conversion.check import compare, our_outputs
from mtx.conversion.checkpoint import SavedParameters, canonical_shapes
from mtx.conversion.configs import KINDS, config_of, read_config
from mtx.conversion.convert import to_checkpoint, to_huggingface
from mtx.conversion.huggingface import HuggingFaceModel
from mtx.conversion.safetensors import DTYPES, SafetensorsFile
from mtx.conversion.tokenizer import write_tokenizer
from mtx.data.tokenizer import ByteTokenizer, train_bpe
from mtx.data.tokenizer_files import load_tokenizer
from mtx.errors import UserError
from mtx.huggingface import is_of_layers
from mtx.step.trainer import Trainer

MIXTURES = (
    hugging.mixtral, hugging.qwen3_moe, hugging.deepseek_v3, hugging.gpt_oss,
    hugging.granitemoehybrid,
)  # fmt: skip
MODELS = {
    "gpt2": gpt2(),
    "gpt2 untied": gpt2(tie_word_embeddings=False, activation_function="gelu"),
    "llama": llama(),
    "llama tied, linear": llama(
        tie_word_embeddings=True, rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=1e5
    ),
    "llama, yarn": llama(
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6},
    ),
    "llama, yarn with all its values": llama(
        rope_parameters=YARN | {"rope_theta": 5e5, "truncate": False, "attention_factor": 1.5},
    ),
    "llama, dynamic": llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
    "qwen3, yarn": qwen3(rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}),
    "llama 3, all heads": llama(num_key_value_heads=4, rope_parameters=LLAMA3),
    "bert": bert(),
    "bert masked alone": bert(
        heads=("predictions",), hidden_act="gelu_new", architectures=["BertForMaskedLM"]
    ),
    "bert without heads": bert(heads=("pooler",), architectures=["BertModel"]),
    "megatron-bert": bert(
        model_type="megatron-bert", architectures=["MegatronBertForPreTraining"]
    ),
    "llama, heads of their own size": llama(head_dim=6),
    "mistral": mistral(),
    "mistral without a window": mistral(sliding_window=None, tie_word_embeddings=True),
    "qwen2": qwen2(),
    "qwen2 tied, window after the first layer": qwen2(
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1,
        num_hidden_layers=3, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "qwen3": qwen3(num_key_value_heads=4),
    "qwen3 windows alone": qwen3(
        use_sliding_window=True, sliding_window=5, layer_types=["sliding_attention"] * 2
    ),
    "gemma2": gemma2(),
    "gemma2 without caps": gemma2(
        attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False,
        num_hidden_layers=1,
    ),
    "granite": granite(),
    "granite hybrid without experts, with rotary positions": hugging.granitemoehybrid(
        experts=0, position_embedding_type="rope", rope_theta=5e5
    ),
    "granite untied, with the defaults of transformers": llama("granite"),
    **{make.__name__: make() for make in MIXTURES},
}  # fmt: skip


def tensors_of(directory) -> dict[str, tuple[str, np.ndarray]]:
    """{name: (dtype, values)} of every tensor."""
    found = {}
    for path in directory.glob("*.safetensors"):
        file = SafetensorsFile(path)
        found |= {name: (dtype, file.read(name)) for name, (dtype, _) in file.tensors.items()}
    return found


def assert_same_tensors(one, other):
    one, other = tensors_of(one), tensors_of(other)
    assert one.keys() == other.keys()
    for name, (dtype, values) in one.items():
        assert other[name][0] == dtype, name
        np.testing.assert_array_equal(other[name][1], values, err_msg=name)


# -- whole ones ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_bit_for_bit_the_same(tmp_path, name):
    config, shapes = MODELS[name]
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes), dtype="F16", files=3)
    there = to_checkpoint(tmp_path / "in", tmp_path / "run", check="ours")
    assert 0 == there.comparison.largest_difference < 1e-5 < there.comparison.largest_logit
    back = to_huggingface(tmp_path / "run", tmp_path / "out", most_file_gb=1e-5, check="ours")
    assert back.comparison.largest_difference == 0
    assert_same_tensors(tmp_path / "in", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == config["architectures"]
    assert written["torch_dtype"] == "float16"
    again = replace(read_config(written, "out")[0], compute_dtype="float16")
    assert again == there.model == Checkpoints(tmp_path / "run").run().model
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "run"]
    to_checkpoint(tmp_path / "out", tmp_path / "run2", check="none")
    to_huggingface(tmp_path / "run2", tmp_path / "out2", most_file_gb=1e-5, check="none")
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "out2" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("size", [0, -1.0, float("nan"), float("inf")])
def test_a_file_has_some_size(tmp_path, size):
    with pytest.raises(UserError) as error:
        to_huggingface(tmp_path / "run", tmp_path / "out", most_file_gb=size)
    names(error, f"most_file_gb={size}", "above 0")


def test_a_prefix_that_is_left_out_and_older_spellings(tmp_path):
    config, shapes = bert(heads=("pooler",))
    tensors = hugging.random_tensors(shapes)
    old = {
        name.removeprefix("bert.")
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    hugging.write(tmp_path / "in", config, old)
    to_checkpoint(tmp_path / "in", tmp_path / "run")
    to_huggingface(tmp_path / "run", tmp_path / "out")
    found = {name: values for name, (_, values) in tensors_of(tmp_path / "out").items()}
    assert found.keys() == {name.removeprefix("bert.") for name in tensors}
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name.removeprefix("bert.")], value)


def test_masks_and_twins_are_no_parameters(tmp_path):
    config, shapes = gpt2()
    tensors = hugging.random_tensors(shapes | {"transformer.h.0.attn.bias": (1, 1, 8, 8)})
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    hugging.write(tmp_path / "in", config, tensors)
    to_checkpoint(tmp_path / "in", tmp_path / "run")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    hugging.write(tmp_path / "other", config, tensors)
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path / "other", tmp_path / "none")
    assert names(error, "lm_head.weight", "wte.weight", "tie_word_embeddings")


def test_another_dtype_on_the_way_out(tmp_path):
    config, shapes = llama()
    tensors = hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    to_checkpoint(tmp_path / "in", tmp_path / "run")
    done = to_huggingface(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    assert done.comparison.largest_difference < 1e-5  # with parameters rounded on both sides
    assert done.comparison.largest_logit > 0
    for name, (dtype, values) in tensors_of(tmp_path / "out").items():
        assert dtype == "BF16"
        np.testing.assert_array_equal(values, tensors[name].astype(DTYPES["BF16"]))


def test_float16_refuses_what_it_cannot_hold(tmp_path):
    config, shapes = gpt2()
    tensors = hugging.random_tensors(shapes)
    tensors["transformer.ln_f.weight"][3] = 7e4
    hugging.write(tmp_path / "in", config, tensors)
    to_checkpoint(tmp_path / "in", tmp_path / "run")
    with pytest.raises(UserError) as error:
        to_huggingface(tmp_path / "run", tmp_path / "out", dtype="float16")
    assert names(error, "ln_f.weight", "70000", "float16", "bfloat16")
    assert not (tmp_path / "out").exists()


def test_a_layout_reads_it_and_gives_their_losses(tmp_path):
    config, shapes = llama()
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    to_checkpoint(tmp_path / "in", tmp_path / "run", check="none")
    run = replace(
        Checkpoints(tmp_path / "run").run(), layout=Layout(pipe=2, tensor=4), global_batch=2
    )
    trainer = Trainer(run)
    state = Checkpoints(tmp_path / "run").restore(trainer)
    size = run.model.sequence
    tokens_GS = np.random.default_rng(0).integers(0, hugging.V, (2, size), dtype=np.int32)
    places_GS = np.tile(np.arange(size, dtype=np.int32), (2, 1))
    batch = {"tokens": tokens_GS, "targets": tokens_GS, "weights": np.ones((2, size), np.float32)}
    losses_GS, _ = trainer.score(state, trainer.place(batch))
    theirs = HuggingFaceModel(tmp_path / "in")
    theirs.expect(canonical_shapes(run.model))
    logits = our_outputs(run.model, theirs, tokens_GS, places_GS).logits.astype(np.float64)
    want = np.log(np.exp(logits).sum(-1))
    want -= np.take_along_axis(logits, tokens_GS[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(jax.device_get(losses_GS), want, rtol=1e-5, atol=1e-5)


def test_what_was_begun_here_leaves_as_well(tmp_path):
    model = ModelConfig(
        family="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=40, sequence=16, vocab=61,
        tied=False, compute_dtype="float32",
    )  # fmt: skip
    trainer = Trainer(RunConfig(model=model, global_batch=1))
    state = trainer.state_from(params_of(model))
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(trainer, state, tokenizer=ByteTokenizer())
    to_huggingface(tmp_path / "run", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == config | config_of(model) and config["torch_dtype"] == "float32"
    params = trainer.to_canonical(jax.device_get(state.params))
    found = tensors_of(tmp_path / "out")
    np.testing.assert_array_equal(
        found["model.layers.1.self_attn.v_proj.weight"][1].T.reshape(16, 2, 4),
        params["layers"]["block"]["attention"]["qkv"]["kv"][1, :, 1],
    )
    np.testing.assert_array_equal(found["lm_head.weight"][1], params["head"]["output"])


_SIZES: dict = {"hidden": 32, "heads": 4, "sequence": 16, "vocab": 61}
OTHERS = {
    "mamba2": ModelConfig(family="mamba2", layers=2, **_SIZES),
    "bamba": ModelConfig(family="bamba", layers=4, **_SIZES),
    "nemotron_h": ModelConfig(family="nemotron_h", layers=4, pattern="M-*-", **_SIZES),
    "llava": ModelConfig(
        family="llava", layers=6, vision_layers=3, image_size=6, patch_size=2, **_SIZES
    ),
    "t5": ModelConfig(family="t5", layers=4, tied=False, feed_forward="gated-gelu", **_SIZES),
}

# -- the tables ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", KINDS)
def test_every_array_has_its_tensors_and_comes_back(model_type):
    table, model = KINDS[model_type].names, OTHERS.get(model_type)
    if model is None:
        config, shapes = MODELS[model_type]
        model = read_config(config, "config")[0]
    arrays, pattern = canonical_shapes(model), model.stack().pattern
    tensors = table.tensors(arrays, pattern)
    if model_type in MODELS:  # for the others tests/peers uses transformers
        assert {table.full(name): shape for name, shape in tensors.items()} == shapes
    stream = np.random.default_rng(0)
    for path, weight, _ in table.arrays(arrays, pattern):
        shape = arrays[path][1:] if is_of_layers(path) else arrays[path]
        array = stream.standard_normal(shape).astype(np.float32)
        tensors = weight.to_tensors(array)
        assert [tensor.shape for tensor in tensors] == [weight.tensor_shape(shape)] * len(tensors)
        there = array if weight.names else np.zeros_like(array)  # there is no such tensor
        np.testing.assert_array_equal(weight.to_ours(tensors, shape), there)


def test_a_value_that_changes_on_the_way_is_found(tmp_path, monkeypatch):
    config, shapes = gemma2()
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    whole = SavedParameters.read

    def another(self, path, rows):
        wrong = path == "layers.full.mlp_post_norm.scale"
        return whole(self, path, rows) * (0.9 if wrong else 1)

    monkeypatch.setattr(SavedParameters, "read", another)
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path / "in", tmp_path / "run", check="ours")
    assert names(error, "differ", "largest difference")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_value_that_is_no_number_is_a_difference(tmp_path):
    config, shapes = gpt2()
    tensors = hugging.random_tensors(shapes)
    tensors["transformer.h.1.ln_2.bias"][0] = np.nan
    hugging.write(tmp_path / "in", config, tensors)
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path / "in", tmp_path / "run", check="ours")
    assert names(error, "largest difference inf")


# -- what is refused -------------------------------------------------------------------------------


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path):
    config, shapes = gpt2()
    del shapes["transformer.h.1.mlp.c_fc.bias"]
    shapes["transformer.h.2.ln_1.weight"] = (16,)
    shapes["transformer.wte.weight"] = (60, 16)
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path / "in", tmp_path / "run")
    assert names(
        error, "config.json (gpt2, 2 layers)", "missing: h.1.mlp.c_fc.bias",
        "unexpected: h.2.ln_1.weight", "wte.weight [60, 16]", "[61, 16]",
    )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_an_array_without_a_row_of_names_is_named(tmp_path, monkeypatch):
    config, shapes = gpt2()
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    to_checkpoint(tmp_path / "in", tmp_path / "run")
    kind = KINDS["gpt2"]
    rows = tuple(row for row in kind.names.layers if row.leaf != "mlp.up.b")
    short = replace(kind, names=replace(kind.names, layers=rows))
    monkeypatch.setattr("mtx.conversion.huggingface.kind_of", lambda *_: short)
    monkeypatch.setattr("mtx.conversion.writing.kind_of_model", lambda _: short)
    for move, source in ((to_checkpoint, "in"), (to_huggingface, "run")):
        with pytest.raises(UserError) as error:
            move(tmp_path / source, tmp_path / "new")
        assert names(error, "'gpt2'", "layers.block.mlp.up.b")
        assert not (tmp_path / "new").exists()


def test_a_head_of_which_a_part_is_missing(tmp_path):
    config, shapes = bert()
    del shapes["bert.pooler.dense.bias"]
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path / "in", tmp_path / "run")
    assert names(error, "missing: pooler.dense.bias")


def mamba2():
    return {"model_type": "mamba2"}, {}


FULL, SLIDING = "full_attention", "sliding_attention"
REFUSED = [  # what the error names; by default the field that is changed
    (gpt2, {"activation_function": "relu"}, ["gelu_new"]),
    (gpt2, {"scale_attn_weights": False}, [True]),
    (gpt2, {"scale_attn_weights": None}, [True]),
    (gpt2, {"scale_attn_by_inverse_layer_idx": True}, []),
    (gpt2, {"add_cross_attention": True}, []),
    (gpt2, {"n_layer": "12"}, []),
    (gpt2, {"n_layer": 10**9}, ["16,384"]),
    (gpt2, {"vocab_size": 10**18}, []),
    (gpt2, {"resid_pdrop": float("nan")}, []),
    (gpt2, {"activation_function": ["gelu"]}, []),
    (gpt2, {"n_head": 3}, ["hidden=16", "heads=3"]),
    (gpt2, {"layer_norm_epsilon": None}, []),
    (gpt2, {"model_type": "gpt_neox"}, ["gpt2"]),
    (gpt2, {"model_type": None}, []),
    (llama, {"attention_bias": True}, [False]),
    (llama, {"mlp_bias": True}, [False]),
    (llama, {"head_dim": 7}, ["even"]),
    (llama, {"head_dim": "4"}, []),
    (llama, {"hidden_act": "gelu"}, ["silu"]),
    (llama, {"partial_rotary_factor": 0.5}, [1.0]),
    (llama, {"rope_parameters": {"partial_rotary_factor": 0.5}}, [1.0]),
    (llama, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["llama3", "yarn"]),
    (llama, {"rope_scaling": {"type": "proportional", "factor": 2.0}}, ["dynamic"]),
    (llama, {"rope_scaling": {"type": "dynamic"}}, ["factor=None"]),
    (llama, {"rope_scaling": YARN | {"factor": "4"}}, ["factor"]),
    (llama, {"rope_scaling": YARN | {"beta_fast": 0.5}}, ["rotary_high=0.5"]),
    (llama, {"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, []),
    (llama, {"rope_scaling": 3}, []),
    (llama, {"rope_parameters": {"rope_type": "llama3"}}, ["factor=None"]),
    (llama, {"quantization_config": {"bits": 4}}, []),
    (llama, {"num_key_value_heads": 3}, ["heads=4", "kv_heads=3"]),
    (bert, {"position_embedding_type": "relative_key"}, ["absolute"]),
    (bert, {"type_vocab_size": 3}, [2]),
    (bert, {"is_decoder": True}, [False]),
    (mistral, {"hidden_act": "gelu"}, ["silu"]),
    (mistral, {"sliding_window": 0}, []),
    (mistral, {"layer_types": [FULL, SLIDING]}, []),
    (mistral, {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, []),
    (qwen2, {"hidden_act": "relu"}, ["silu"]),
    (qwen2, {"use_sliding_window": True, "layer_types": [SLIDING, FULL]}, [FULL]),
    (qwen2, {"layer_types": [FULL, SLIDING]}, [FULL]),  # and no window
    (qwen2, {"layer_types": [FULL]}, [FULL]),
    (qwen2, {"use_sliding_window": True, "max_window_layers": -1}, []),
    (qwen2, {"use_sliding_window": True, "sliding_window": 2.5}, []),
    (qwen3, {"attention_bias": True}, [False]),
    (qwen3, {"use_sliding_window": True, "layer_types": "sliding_attention"}, [FULL]),
    (gemma2, {"hidden_activation": "gelu"}, ["gelu_pytorch_tanh"]),
    (gemma2, {"attention_bias": True}, [False]),
    (gemma2, {"use_bidirectional_attention": True}, [False]),
    (gemma2, {"sliding_window": None}, []),
    (gemma2, {"layer_types": [FULL, SLIDING, FULL]}, [SLIDING]),
    (gemma2, {"query_pre_attn_scalar": None}, []),
    (gemma2, {"attn_logit_softcapping": "50"}, []),
    (gemma2, {"final_logit_softcapping": 0.0}, []),
    (gemma2, {"head_dim": None}, []),
    (hugging.granitemoehybrid, {"layer_types": ["mamba", "attention"]}, ["attention"]),
    (hugging.granitemoehybrid, {"layer_types": ["mamba", "mlp", "mamba"]}, ["attention"]),
    (hugging.granitemoehybrid, {"layer_types": 3}, ["attention"]),
    (hugging.granitemoehybrid, {"mamba_d_head": "large"}, ["ssm_head_dim"]),
    (hugging.granitemoehybrid, {"position_embedding_type": "alibi"}, ["rope"]),
    (hugging.granitemoehybrid, {"num_local_experts": -1}, []),
    (hugging.granitemoehybrid, {"mamba_proj_bias": True}, [False]),
    (granite, {"mlp_bias": True}, [False]),
    (granite, {"residual_multiplier": 0.0}, ["residual_scale=0.0"]),
    (granite, {"logits_scaling": None}, []),
    (granite, {"attention_multiplier": "1"}, []),
    (mamba2, {"time_step_limit": 7}, []),
    (mamba2, {"time_step_limit": ["x", float("inf")]}, []),
    (mamba2, {"time_step_limit": [0.0, 0.1]}, ["without a limit"]),
]


@pytest.mark.parametrize(("make", "changes", "others"), REFUSED)
def test_configs_of_other_models(tmp_path, make, changes, others):
    config, shapes = make()
    hugging.write(tmp_path / "in", config | changes, hugging.random_tensors(shapes))
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path / "in", tmp_path / "run")
    assert names(error, "config.json: ", *others)
    said = str(error.value)
    assert others or list(changes)[-1] in said, "neither a field of theirs nor one of ours"
    assert not (tmp_path / "run").exists()


def test_pickles_are_refused_with_the_remedy(tmp_path):
    config, _ = gpt2()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path, tmp_path / "run")
    assert names(error, "model.safetensors", "model.safetensors.index.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path, tmp_path / "run")
    assert names(error, "pytorch_model.bin", "safe_serialization=True")


@pytest.mark.parametrize(
    ("index", "what"),
    [
        ("{", "JSON"),
        ("[]", "list"),
        ('{"weight_map": 1}', "weight_map"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "'../../etc/passwd'"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors"),
    ],
)
def test_broken_indices(tmp_path, index, what):
    config, _ = gpt2()
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path, tmp_path / "run")
    assert names(error, "model.safetensors.index.json", what)


def test_targets_that_are_there_and_those_that_cannot_be(tmp_path):
    config, shapes = gpt2()
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path / "in", tmp_path / "in")
    assert names(error, tmp_path / "in", "is there already")
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path / "in", tmp_path / "file" / "run")
    assert names(error, tmp_path / "file" / "run", "Not a directory")
    (tmp_path / "empty").mkdir()
    to_checkpoint(tmp_path / "in", tmp_path / "empty", check="none")
    assert Checkpoints(tmp_path / "empty").steps() == [0]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    config, shapes = gpt2()
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "write_checkpoint", full)
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path / "in", tmp_path / "run")
    assert names(error, tmp_path / "run", "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_damaged_checkpoint_is_not_converted(tmp_path):
    config, shapes = gpt2()
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    to_checkpoint(tmp_path / "in", tmp_path / "run", check="none")
    path = tmp_path / "run" / "checkpoints" / "0" / "arrays.0.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)
    with pytest.raises(UserError) as error:
        to_huggingface(tmp_path / "run", tmp_path / "out")
    assert names(error, path.parent, "array params.embed.positions")
    assert not (tmp_path / "out").exists()


def test_the_moments_are_zero_and_cost_next_to_nothing(tmp_path):
    config, shapes = gpt2()
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    to_checkpoint(tmp_path / "in", tmp_path / "run", check="none")
    checkpoints = Checkpoints(tmp_path / "run")
    with checkpoints.open(0) as store:
        ours = SavedParameters(store)
        for tree in ("mu", "nu"):
            for path, shape in ours.shapes.items():
                values = store.read(f"{tree}.{path}")
                assert values.shape == shape and not values.any()
        theirs = HuggingFaceModel(tmp_path / "in")
        theirs.expect(ours.shapes)
        assert compare(theirs.model, ours, theirs).agrees
    assert checkpoints.extra()["converted"]["dtype"] == "F32"


# -- tokenizers ------------------------------------------------------------------------------------


def test_without_a_tokenizer_the_run_has_none_and_says_so(tmp_path):
    config, shapes = gpt2()
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    done = to_checkpoint(tmp_path / "in", tmp_path / "run", check="none")
    assert "--data.tokenizer" in done.notes[0]
    with pytest.raises(UserError):
        Checkpoints(tmp_path / "run").tokenizer()
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path / "in", tmp_path / "other", tokenizer="bytes")
    assert names(error, "bytes", "256", "61", "--data.tokenizer")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_tokenizer_made_here_leaves_as_tokenizer_json(tmp_path, tokenizer):
    text = "To be, or not to be:\n\u00e9t\u00e9 \u4e00 \U0001f600"
    ours = ByteTokenizer() if tokenizer == "bytes" else train_bpe([text] * 9, vocab=280)
    end = write_tokenizer(tmp_path, ours.to_dict())
    assert end == ours.eod
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ids == ours.encode(text).tolist() and theirs.decode(ids) == text
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert theirs.token_to_id(config["eos_token"]) == end
    assert load_tokenizer(str(tmp_path)).vocab == ours.vocab


def test_a_tokenizer_of_the_directory_comes_along(tmp_path):
    config, shapes = gpt2(vocab_size=300)
    shapes["transformer.wte.weight"] = (300, hugging.D)
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    bpe = train_bpe(["to be or not to be"] * 9, vocab=270)
    write_tokenizer(tmp_path / "in", bpe.to_dict())
    to_checkpoint(tmp_path / "in", tmp_path / "run", check="none")
    there = Checkpoints(tmp_path / "run").tokenizer()
    assert there.encode("not to be").tolist() == bpe.encode("not to be").tolist()
    assert there.eod == bpe.eod
    to_huggingface(tmp_path / "run", tmp_path / "out", check="none")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
