"""Models there and back: the same bits, the same logits, and refusals with the names."""

from __future__ import annotations

import json
from dataclasses import replace

import hugging
import jax
import numpy as np
import pytest
import tokenizers
from hugging import LLAMA3, bert, gpt2, llama

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.conversion import convert, names
from mtx.conversion.check import compare
from mtx.conversion.checkpoint import SavedParameters, canonical_shapes
from mtx.conversion.configs import KINDS, Fields, config_of, model_of
from mtx.conversion.convert import to_checkpoint, to_huggingface
from mtx.conversion.forward import FORWARDS
from mtx.conversion.huggingface import HuggingFaceModel
from mtx.conversion.names import Weight
from mtx.conversion.safetensors import DTYPES, SafetensorsFile
from mtx.conversion.tokenizer import write_tokenizer
from mtx.data.tokenizer import ByteTokenizer, train_bpe
from mtx.data.tokenizer_files import load_tokenizer
from mtx.errors import UserError
from mtx.step.trainer import Trainer

MODELS = {
    "gpt2": gpt2(),
    "gpt2 untied": gpt2(tie_word_embeddings=False, activation_function="gelu"),
    "llama": llama(),
    "llama tied, linear": llama(
        tie_word_embeddings=True, rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=1e5
    ),
    "llama 3, all heads": llama(num_key_value_heads=4, rope_parameters=LLAMA3),
    "bert": bert(),
    "bert masked alone": bert(
        heads=("predictions",), hidden_act="gelu_new", architectures=["BertForMaskedLM"]
    ),
    "bert without heads": bert(heads=("pooler",), architectures=["BertModel"]),
    "megatron-bert": bert(
        model_type="megatron-bert", architectures=["MegatronBertForPreTraining"]
    ),
}  # fmt: skip


def tensors_of(directory) -> dict[str, tuple[str, np.ndarray]]:
    """dtype and values of every tensor."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with SafetensorsFile(path) as file:
            found |= {name: (file.tensors[name].dtype, file.read(name)) for name in file.tensors}
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
    there = to_checkpoint(tmp_path / "in", tmp_path / "run")
    assert 0 < there.comparison.largest_difference < 1e-5 < there.comparison.largest_logit
    back = to_huggingface(tmp_path / "run", tmp_path / "out", most_file_gb=1e-5)
    assert back.comparison.largest_difference < 1e-5
    assert_same_tensors(tmp_path / "in", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == config["architectures"]
    assert written["torch_dtype"] == "float16"
    again = replace(model_of(written, "out"), compute_dtype="float16")
    assert again == there.model == Checkpoints(tmp_path / "run").run().model
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "run"]


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
    with pytest.raises(UserError, match="lm_head.weight and wte.weight differ, and with tied"):
        to_checkpoint(tmp_path / "other", tmp_path / "none")


def test_another_dtype_on_the_way_out(tmp_path):
    config, shapes = llama()
    tensors = hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    to_checkpoint(tmp_path / "in", tmp_path / "run")
    done = to_huggingface(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    assert done.comparison.largest_difference < 1e-5  # with parameters rounded on both sides
    for name, (dtype, values) in tensors_of(tmp_path / "out").items():
        assert dtype == "BF16"
        np.testing.assert_array_equal(values, tensors[name].astype(DTYPES["BF16"]))


def test_float16_refuses_what_it_cannot_hold(tmp_path):
    config, shapes = gpt2()
    tensors = hugging.random_tensors(shapes)
    tensors["transformer.ln_f.weight"][3] = 7e4
    hugging.write(tmp_path / "in", config, tensors)
    to_checkpoint(tmp_path / "in", tmp_path / "run")
    with pytest.raises(UserError, match="ln_f.weight has 70000, more than float16 holds"):
        to_huggingface(tmp_path / "run", tmp_path / "out", dtype="float16")
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
    with HuggingFaceModel(tmp_path / "in") as theirs:
        theirs.expect(canonical_shapes(run.model))
        fields = Fields(theirs.config, theirs.kind.defaults, "config.json")
        outputs = FORWARDS["llama"](theirs, fields, tokens_GS, places_GS)
        logits = outputs.logits(slice(0, hugging.V)).astype(np.float64)
    want = np.log(np.exp(logits).sum(-1))
    want -= np.take_along_axis(logits, tokens_GS[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(jax.device_get(losses_GS), want, rtol=1e-5, atol=1e-5)


def test_what_was_begun_here_leaves_as_well(tmp_path):
    model = ModelConfig(
        family="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=40, sequence=16, vocab=61,
        tied=False, compute_dtype="float32",
    )  # fmt: skip
    trainer = Trainer(RunConfig(model=model, global_batch=1))
    state = trainer.init()
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(trainer, state, tokenizer=ByteTokenizer())
    to_huggingface(tmp_path / "run", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == config | config_of(model) and config["torch_dtype"] == "float32"
    params = jax.device_get(jax.jit(trainer.to_canonical)(state.params))
    found = tensors_of(tmp_path / "out")
    np.testing.assert_array_equal(
        found["model.layers.1.self_attn.v_proj.weight"][1].T.reshape(16, 2, 4),
        params["block"]["attention"]["qkv"]["kv"][1, :, 1],
    )
    np.testing.assert_array_equal(found["lm_head.weight"][1], params["ends"]["output"])


# -- the tables ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", KINDS)
def test_every_array_has_its_tensors_and_comes_back(model_type):
    config, shapes = {
        "gpt2": gpt2, "llama": llama, "bert": bert,
        "megatron-bert": lambda: bert(model_type="megatron-bert"),
    }[model_type]()  # fmt: skip
    table, arrays = KINDS[model_type].names, canonical_shapes(model_of(config, "config"))
    assert {table.full(name): shape for name, shape in table.tensors(arrays).items()} == shapes
    stream = np.random.default_rng(0)
    for path, weight, _ in table.arrays(arrays):
        shape = arrays[path][1:] if path.startswith("block.") else arrays[path]
        array = stream.standard_normal(shape).astype(np.float32)
        tensors = weight.to_tensors(array)
        assert [tensor.shape for tensor in tensors] == [weight.tensor_shape(shape)] * len(tensors)
        np.testing.assert_array_equal(weight.to_ours(tensors, shape), array)


def test_a_mistake_in_a_table_is_found_by_the_logits(tmp_path, monkeypatch):
    config, shapes = llama(num_key_value_heads=4)
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    q, k = "self_attn.q_proj.weight", "self_attn.k_proj.weight"
    swapped = tuple(
        replace(w, names=tuple({q: k, k: q}.get(name, name) for name in w.names))
        for w in names.LLAMA.block
    )
    assert swapped != names.LLAMA.block and isinstance(swapped[0], Weight)
    kind = replace(KINDS["llama"], names=replace(names.LLAMA, block=swapped))
    monkeypatch.setitem(KINDS, "llama", kind)
    with pytest.raises(UserError, match="and its conversion differ: largest difference"):
        to_checkpoint(tmp_path / "in", tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_value_that_is_no_number_is_a_difference(tmp_path):
    config, shapes = gpt2()
    tensors = hugging.random_tensors(shapes)
    tensors["transformer.h.1.ln_2.bias"][0] = np.nan
    hugging.write(tmp_path / "in", config, tensors)
    with pytest.raises(UserError, match="largest difference inf"):
        to_checkpoint(tmp_path / "in", tmp_path / "run")


# -- what is refused -------------------------------------------------------------------------------


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path):
    config, shapes = gpt2()
    del shapes["transformer.h.1.mlp.c_fc.bias"]
    shapes["transformer.h.2.ln_1.weight"] = (16,)
    shapes["transformer.wte.weight"] = (60, 16)
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path / "in", tmp_path / "run")
    assert str(error.value).endswith(
        "the tensors are not those of its config.json (gpt2, 2 layers); missing: "
        "h.1.mlp.c_fc.bias; unexpected: h.2.ln_1.weight; of another shape: wte.weight [60, 16] "
        "instead of [61, 16]"
    )
    assert not (tmp_path / "run").exists()


def test_a_head_of_which_a_part_is_missing(tmp_path):
    config, shapes = bert()
    del shapes["bert.pooler.dense.bias"]
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    with pytest.raises(UserError, match="missing: pooler.dense.bias$"):
        to_checkpoint(tmp_path / "in", tmp_path / "run")


@pytest.mark.parametrize(
    ("make", "changes", "what"),
    [
        (gpt2, {"activation_function": "relu"}, "activation_function='relu' is not in our models"),
        (gpt2, {"scale_attn_weights": False}, "scale_attn_weights=False .* has to be True"),
        (gpt2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        (gpt2, {"add_cross_attention": True}, "add_cross_attention=True"),
        (gpt2, {"n_layer": "12"}, "n_layer='12' must be a whole number"),
        (gpt2, {"n_layer": 10**9}, "layers=1000000000 must be at most 16,384"),
        (gpt2, {"vocab_size": 10**18}, "vocab_size=1000000000000000000 must be at most"),
        (gpt2, {"resid_pdrop": float("nan")}, "resid_pdrop=nan must be finite"),
        (gpt2, {"activation_function": ["gelu"]}, "activation_function=.* is not in our models"),
        (gpt2, {"n_head": 3}, "hidden=16 cannot be divided over heads=3"),
        (gpt2, {"layer_norm_epsilon": None}, "layer_norm_epsilon=None must be a number"),
        (gpt2, {"model_type": "gpt_neox"}, "unknown model_type 'gpt_neox'"),
        (gpt2, {"model_type": None}, "unknown model_type 'None'"),
        (llama, {"attention_bias": True}, "attention_bias=True is not in our models"),
        (llama, {"mlp_bias": True}, "mlp_bias=True"),
        (llama, {"head_dim": 8}, "head_dim=8 is not in our models; .* = 16 / 4"),
        (llama, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (llama, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        (llama, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type='dynamic'"),
        (llama, {"rope_scaling": 3}, "rope_scaling=3 must be a table"),
        (llama, {"rope_parameters": {"rope_type": "llama3"}}, "factor=None must be a number"),
        (llama, {"quantization_config": {"bits": 4}}, "quantization_config="),
        (llama, {"num_key_value_heads": 3}, "heads=4 cannot be divided over kv_heads=3"),
        (bert, {"position_embedding_type": "relative_key"}, "position_embedding_type="),
        (bert, {"type_vocab_size": 3}, "type_vocab_size=3"),
        (bert, {"is_decoder": True}, "is_decoder=True"),
    ],
)
def test_configs_of_other_models(tmp_path, make, changes, what):
    config, shapes = make()
    hugging.write(tmp_path / "in", config | changes, hugging.random_tensors(shapes))
    with pytest.raises(UserError, match=f"config.json: .*{what}"):
        to_checkpoint(tmp_path / "in", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_pickles_are_refused_with_the_remedy(tmp_path):
    config, _ = gpt2()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="neither model.safetensors nor model.safetensors.index"):
        to_checkpoint(tmp_path, tmp_path / "run")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="pytorch_model.bin and no safetensors: a pickle can run"):
        to_checkpoint(tmp_path, tmp_path / "run")


@pytest.mark.parametrize(
    ("index", "what"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no table but a list"),
        ('{"weight_map": 1}', "must name files of the same directory, not None"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "not '../../etc/passwd'"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "is without gone.safetensors, which"),
    ],
)
def test_broken_indices(tmp_path, index, what):
    config, _ = gpt2()
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=what):
        to_checkpoint(tmp_path, tmp_path / "run")


def test_targets_that_are_there_and_those_that_cannot_be(tmp_path):
    config, shapes = gpt2()
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="in is there already; name another, or remove it"):
        to_checkpoint(tmp_path / "in", tmp_path / "in")
    with pytest.raises(UserError, match="run cannot be written: Not a directory"):
        to_checkpoint(tmp_path / "in", tmp_path / "file" / "run")
    (tmp_path / "empty").mkdir()
    to_checkpoint(tmp_path / "in", tmp_path / "empty", check="none")
    assert Checkpoints(tmp_path / "empty").steps() == [0]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    config, shapes = gpt2()
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "write_checkpoint", full)
    with pytest.raises(UserError, match="run cannot be written: No space left on device"):
        to_checkpoint(tmp_path / "in", tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_damaged_checkpoint_is_not_converted(tmp_path):
    config, shapes = gpt2()
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    to_checkpoint(tmp_path / "in", tmp_path / "run", check="none")
    path = tmp_path / "run" / "checkpoints" / "0" / "arrays.1.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)
    with pytest.raises(UserError, match="checkpoint .*/0 is damaged: array params.block"):
        to_huggingface(tmp_path / "run", tmp_path / "out")
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
        with HuggingFaceModel(tmp_path / "in") as theirs:
            theirs.expect(ours.shapes)
            assert compare(theirs.model, ours, theirs).agrees
    assert checkpoints.extra()["converted"]["dtype"] == "F32"


# -- tokenizers ------------------------------------------------------------------------------------


def test_without_a_tokenizer_the_run_has_none_and_says_so(tmp_path):
    config, shapes = gpt2()
    hugging.write(tmp_path / "in", config, hugging.random_tensors(shapes))
    done = to_checkpoint(tmp_path / "in", tmp_path / "run", check="none")
    assert "has no tokenizer, so the run has none either" in done.notes[0]
    with pytest.raises(UserError):
        Checkpoints(tmp_path / "run").tokenizer()
    with pytest.raises(UserError, match="bytes has 256 tokens, more than the model's 61"):
        to_checkpoint(tmp_path / "in", tmp_path / "other", tokenizer="bytes")


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
