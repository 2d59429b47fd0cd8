"""Converted models against transformers in torch: logits, losses, gradients, greedy texts, loading.

The tests use small models. `python -m tests.peers.test_convert_transformers [NAME]` uses GPT-2,
Llama 2 7B, Llama 3 8B and BERT-base with their real widths and few layers, and prints the largest
differences.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from errors import names

torch = pytest.importorskip("torch", reason="torch is absent: conversions are not compared with it")
transformers = pytest.importorskip(
    "transformers", reason="transformers is absent: conversions are not compared with it"
)
from mtx.checkpoint.checkpoints import Checkpoints  # noqa: E402
from mtx.config import Layout  # noqa: E402
from mtx.conversion import configs  # noqa: E402
from mtx.conversion.checkpoint import canonical_shapes  # noqa: E402
from mtx.conversion.convert import to_checkpoint, to_huggingface  # noqa: E402
from mtx.conversion.huggingface import HuggingFaceModel  # noqa: E402
from mtx.errors import UserError  # noqa: E402
from mtx.evaluation.generate import Generator  # noqa: E402
from mtx.evaluation.sampling import Sampling  # noqa: E402
from mtx.step.trainer import Trainer  # noqa: E402

V, S, G = 96, 24, 4
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0,
    "original_max_position_embeddings": S // 4,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def gpt2(layers=2, hidden=32, heads=4, sequence=S, vocab=V, **others):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, n_positions=sequence, vocab_size=vocab,
        bos_token_id=0, eos_token_id=0, **others,
    ))  # fmt: skip


def llama(layers=2, hidden=32, heads=4, groups=2, ffn=88, sequence=S, vocab=V, **others):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        num_key_value_heads=groups, intermediate_size=ffn, max_position_embeddings=sequence,
        vocab_size=vocab, **others,
    ))  # fmt: skip


def bert(layers=2, hidden=32, heads=4, ffn=64, sequence=S, vocab=V, kind="Bert", **others):
    config = getattr(transformers, f"{kind}Config")(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        intermediate_size=ffn, max_position_embeddings=sequence, vocab_size=vocab, **others,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForPreTraining")(config)


def windowed(kind, vocab=97, **others):
    """A model built like Llama, at odd sizes: a separate head size, windows shorter than the
    sequence."""
    sizes = dict(
        vocab_size=vocab, hidden_size=36, num_hidden_layers=5, num_attention_heads=12,
        num_key_value_heads=2, head_dim=6, intermediate_size=44, max_position_embeddings=S,
        sliding_window=7, pad_token_id=None, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes | others)
    return getattr(transformers, f"{kind}ForCausalLM")._from_config(
        config, attn_implementation="eager"
    )


def hybrid(kind, vocab=97, **others):
    """A model with Mamba-2 mixers, at odd sizes, with chunks that do not divide the sequence."""
    sizes = dict(
        vocab_size=vocab, max_position_embeddings=S, pad_token_id=None, bos_token_id=None,
        eos_token_id=0,
    )  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes | others)
    return getattr(transformers, f"{kind}ForCausalLM")._from_config(
        config, attn_implementation="eager"
    )


def mamba2(**others):
    return hybrid("Mamba2", **dict(
        hidden_size=36, num_hidden_layers=5, num_heads=12, head_dim=6, state_size=5, n_groups=2,
        chunk_size=7, conv_kernel=3,
    ) | others)  # fmt: skip


def nemotron_h(**others):
    layers = ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]
    return hybrid("NemotronH", **dict(
        layers_block_type=layers, hidden_size=36, num_attention_heads=12, num_key_value_heads=2,
        head_dim=4, intermediate_size=44, mamba_num_heads=12, mamba_head_dim=5, ssm_state_size=7,
        n_groups=2, chunk_size=8, time_step_min=1e-6,
    ) | others)  # fmt: skip


def bamba(**others):
    return hybrid("Bamba", **dict(
        hidden_size=48, num_hidden_layers=5, attn_layer_indices=[1, 4], num_attention_heads=12,
        num_key_value_heads=2, intermediate_size=44, mamba_n_heads=12, mamba_d_state=5,
        mamba_n_groups=1, mamba_chunk_size=6,
    ) | others)  # fmt: skip


def granite_hybrid(**others):
    """With six experts or, where told so, none."""
    layers = ["mamba", "attention", "mamba", "mamba", "attention"]
    return hybrid("GraniteMoeHybrid", **dict(
        layer_types=layers, hidden_size=48, num_hidden_layers=5, num_attention_heads=12,
        num_key_value_heads=2, intermediate_size=20, shared_intermediate_size=44,
        num_local_experts=6, num_experts_per_tok=3, mamba_n_heads=12, mamba_d_state=5,
        mamba_chunk_size=6, **FACTORS,
    ) | others)  # fmt: skip


FACTORS = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.6,
    "logits_scaling": 1.7, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA2 = {"query_pre_attn_scalar": 17, "attn_logit_softcapping": 0.7}
WINDOWED = {
    "mistral": lambda **c: windowed("Mistral", **c),
    "qwen2": lambda **c: windowed(
        "Qwen2", use_sliding_window=True, max_window_layers=2, tie_word_embeddings=True, **c
    ),
    "qwen3": lambda **c: windowed("Qwen3", use_sliding_window=True, max_window_layers=3, **c),
    "gemma2": lambda **c: windowed("Gemma2", final_logit_softcapping=0.9, **GEMMA2, **c),
    "granite": lambda **c: windowed("Granite", sliding_window=None, **FACTORS, **c),
    "mamba2": mamba2, "nemotron_h": nemotron_h, "bamba": bamba,
    "granite_hybrid": granite_hybrid,
}  # fmt: skip
SMALL = {
    "gpt2": gpt2,
    "gpt2, untied, erf": lambda: gpt2(tie_word_embeddings=False, activation_function="gelu"),
    "llama": llama,
    "llama 3, tied": lambda: llama(rope_parameters=LLAMA3, tie_word_embeddings=True),
    "llama, yarn": lambda: llama(rope_parameters=YARN),
    "llama, yarn of all values": lambda: llama(rope_parameters=YARN | {
        "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False,
    }),
    "llama, dynamic": lambda: llama(rope_parameters=DYNAMIC),
    "qwen3, yarn": lambda: windowed("Qwen3", rope_parameters=YARN | {"attention_factor": 1.3}),
    "bert": bert,
    "megatron-bert": lambda: bert(kind="MegatronBert", hidden_act="gelu_new"),
    "mistral, no window": lambda: windowed(
        "Mistral", sliding_window=None, num_attention_heads=6, head_dim=None
    ),
    "qwen2, no window": lambda: windowed("Qwen2", num_key_value_heads=12),
    "qwen3, windows alone": lambda: windowed("Qwen3", use_sliding_window=True, max_window_layers=0),
    "gemma2, no caps": lambda: windowed(
        "Gemma2", attn_logit_softcapping=None, final_logit_softcapping=None,
        tie_word_embeddings=False,
    ),
    "mamba2, tied, steps of some length": lambda: mamba2(
        tie_word_embeddings=True, time_step_limit=(0.05, float("inf"))
    ),
    "nemotron_h, steps of some length": lambda: nemotron_h(time_step_min=0.05),
    "granite_hybrid, no experts, rotary": lambda: granite_hybrid(
        num_local_experts=0, position_embedding_type="rope", tie_word_embeddings=False
    ),
    **WINDOWED,
}  # fmt: skip
REAL = {
    "gpt2": lambda: gpt2(4, 768, 12, 128, 8192),
    "llama 2 7b": lambda: llama(2, 4096, 32, 32, 11008, 4096, 512),
    "llama 3 8b": lambda: llama(
        2, 4096, 32, 8, 14336, 8192, 512, rms_norm_eps=1e-5, rope_parameters=LLAMA3
    ),
    "bert-base": lambda: bert(4, 768, 12, 3072, 128, 8192),
}
LAYOUTS = [Layout(), Layout(data=2, pipe=2, tensor=2), Layout(pipe=2, tensor=4)]
OF_FIVE_LAYERS = [
    Layout(), Layout(pipe=2, virtual=2, tensor=2, stage_layers=(1, 2, 1, 1)),
    Layout(tensor=4),  # with two heads of keys and values
    Layout(pipe=2, context=2, stage_layers=(2, 3)),
]  # fmt: skip


def random_model(make, *, scale=1):
    """In float32 for evaluation, with biases and norms moved away from 0 and 1; scale: of the
    layers' matrices."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.05 * torch.randn_like(parameter)
            elif ".layers." in name:
                parameter *= scale
    return model


def random_batch(model, rows=G, size=None):
    """A batch of ours; for BERT with padding, types, masked tokens and orders, one unknown."""
    config, stream = model.config, np.random.default_rng(0)
    size = size or config.max_position_embeddings
    # Not 0: that is BERT's padding, whose row of the table has no gradient in torch.
    tokens, targets = stream.integers(1, config.vocab_size, (2, rows, size), dtype=np.int32)
    batch = {"tokens": tokens, "targets": targets, "weights": np.ones((rows, size), np.float32)}
    if "bert" not in config.model_type:
        return batch | {"targets": np.roll(tokens, -1, axis=1)}
    batch["weights"] = (stream.random((rows, size)) < 0.3).astype(np.float32)
    batch["segments"] = np.ones((rows, size), np.int32)
    batch["segments"][1, size // 2 :] = 0
    batch["weights"] *= batch["segments"]
    types = np.repeat([[0], [1]], [size // 3, size - size // 3], axis=0).T
    order = np.arange(rows, dtype=np.int32) % 3 - 1
    return batch | {"types": np.repeat(types, rows, axis=0).astype(np.int32), "order": order}


def torch_results(model, batch):
    """(logits [G, S, V], loss); the model then holds its gradients"""
    at = {name: torch.tensor(values).long() for name, values in batch.items()}
    if "types" not in batch:
        logits = model(input_ids=at["tokens"]).logits
    else:
        out = model(
            input_ids=at["tokens"], token_type_ids=at["types"], attention_mask=at["segments"]
        )
        logits = out.prediction_logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), at["targets"].flatten(), reduction="none"
    )
    weights = torch.tensor(batch["weights"]).flatten()
    loss = (losses * weights).sum() / weights.sum()
    if "order" in batch:
        loss = loss + torch.nn.functional.cross_entropy(
            out.seq_relationship_logits, at["order"], ignore_index=-1
        )
    model.zero_grad()
    loss.backward()
    return logits.detach().numpy(), float(loss.detach())


def torch_gradients(model, directory):
    """Canonical gradients by path, converted through the parameters' names on disk."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    buffers = dict(model.named_buffers())
    kept = {name: a for name, a in model.state_dict().items() if name in buffers}
    gradients |= {name: torch.zeros_like(a) for name, a in kept.items()}
    model.save_pretrained(directory, state_dict=gradients)
    theirs = HuggingFaceModel(directory)
    theirs.expect(canonical_shapes(theirs.model))
    return {path: theirs.read(path, (slice(None),)) for path in theirs.shapes}


def our_results(directory, batch, layout):
    """(logits [G, positions, V] at three positions, the positions, loss, gradients by path)"""
    run = Checkpoints(directory).run()
    rows, size = batch["tokens"].shape
    off = dict.fromkeys(("dropout", "attention_dropout"), 0.0)
    off |= {"aux_weight": 0.0} if run.model.routed_experts else {}
    run = replace(run, layout=layout, global_batch=rows, model=replace(run.model, **off))
    trainer = Trainer(run)
    state = Checkpoints(directory).restore(trainer)
    places = np.array([0, size // 2, size - 1])
    logits = []
    for place in places:
        asked = {name: batch[name] for name in ("tokens", "types", "segments") if name in batch}
        asked["last"] = np.full(rows, place, np.int32)
        placed = trainer.place(asked)
        logits.append(np.asarray(trainer.predict(state, placed))[:, : run.model.vocab])
    loss, gradients = trainer.loss_and_gradients(state, batch)
    return np.stack(logits, axis=1), places, float(loss), flat(gradients)


def flat(tree, start=""):
    if not isinstance(tree, dict):
        return {start[:-1]: np.asarray(tree)}
    found = {}
    for name, value in tree.items():
        found |= flat(value, f"{start}{name}.")
    return found


def without_states(arrays):
    """The arrays that have gradients."""
    return {n: a for n, a in arrays.items() if not n.endswith((".load", ".balance"))}


def norm_of(arrays) -> float:
    return float(np.sqrt(sum(np.square(a, dtype=np.float64).sum() for a in arrays)))


def differences(make, directory: Path, layouts, *, rows=G, size=None):
    """For each layout: differences of logits (absolute), and of the loss, the gradients' norm and
    the worst array's gradient (relative)."""
    model = random_model(make)
    model.save_pretrained(directory / "in")
    done = to_checkpoint(directory / "in", directory / "run", sequence=size)
    print(done.comparison)
    batch = random_batch(model, rows, size)
    is_text = batch.get("segments", np.ones_like(batch["tokens"])) > 0  # what padding sees differs
    want, want_loss = torch_results(model, batch)
    theirs = torch_gradients(model, directory / "gradients")
    for layout in layouts:
        logits, places, loss, ours = our_results(directory / "run", batch, layout)
        assert ours.keys() == theirs.keys()
        ours = without_states(ours)
        size_of = norm_of(without_states(theirs).values())
        yield (
            layout,
            {
                "logits": float(np.abs(logits - want[:, places])[is_text[:, places]].max()),
                "loss": abs(loss - want_loss) / want_loss,
                "norm": abs(norm_of(ours.values()) - size_of) / size_of,
                "gradient": max(
                    float(np.linalg.norm(ours[path] - theirs[path]))
                    / max(float(np.linalg.norm(theirs[path])), 1e-3 * size_of)
                    for path in ours
                ),
            },
        )


# -- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_logits_loss_and_gradients(tmp_path, name):
    layouts = LAYOUTS[:1] if "," in name else LAYOUTS[:2]
    layouts = OF_FIVE_LAYERS if name in WINDOWED else layouts
    for layout, found in differences(SMALL[name], tmp_path, layouts):
        assert found["logits"] < 1e-5, layout
        assert found["loss"] < 1e-6, layout
        assert found["norm"] < 1e-5, layout
        assert found["gradient"] < 1e-4, layout


def test_dynamic_scaling_of_a_longer_sequence(tmp_path):
    """transformers derives the base from a batch's longest text, we from the run's sequence."""
    make = lambda: llama(rope_parameters=DYNAMIC)  # noqa: E731
    [(_, found)] = differences(make, tmp_path, LAYOUTS[:1], size=2 * S)
    assert found["logits"] < 1e-5 and found["loss"] < 1e-6 and found["gradient"] < 1e-4


ROTARY = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    LLAMA3 | {"original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "truncate": False},
    {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 0.707,
        "mscale_all_dim": 1.0, "beta_fast": 24, "beta_slow": 2,
    },
    {"rope_type": "yarn", "rope_theta": 5e5, "factor": 1.0, "attention_factor": 0.9},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
]  # fmt: skip


@pytest.mark.parametrize("values", ROTARY)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("longer", [1, 3])
def test_rotary_frequencies_are_those_of_transformers(values, size, longer):
    if values["rope_type"] == "yarn" and longer > 1:
        values = values | {"original_max_position_embeddings": 2048}
    config = transformers.LlamaConfig(
        hidden_size=4 * size, num_attention_heads=4, max_position_embeddings=4096,
        rope_parameters=dict(values),
    )  # fmt: skip
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    last = longer * 4096 - 1
    module(torch.zeros(1), torch.tensor([[last]]))
    model, _ = configs.read_config(config.to_dict(), "config.json")
    rotary = replace(model, sequence=last + 1).rotary()
    np.testing.assert_allclose(rotary.frequencies(size), module.inv_freq, rtol=1e-6, atol=1e-9)
    assert rotary.amplitude == pytest.approx(module.attention_scaling, rel=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_what_we_write_loads_without_a_word(tmp_path, name, caplog):
    model = random_model(SMALL[name])
    model.save_pretrained(tmp_path / "in")
    to_checkpoint(tmp_path / "in", tmp_path / "run", check="none")
    extra = tmp_path / "run" / "checkpoints" / "0" / "extra.json"
    assert json.loads(extra.read_text())["converted"]["architecture"] == type(model).__name__
    done = to_huggingface(tmp_path / "run", tmp_path / "out", check="transformers")
    assert done.comparison.largest_difference < 1e-5
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        read, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert not any(info.values()), info
    assert [record.getMessage() for record in caplog.records if record.levelno > 20] == []
    for key, value in model.state_dict().items():
        assert torch.equal(read.state_dict()[key], value), key


@pytest.mark.parametrize("name", WINDOWED)
def test_greedy_texts_are_the_same(tmp_path, name):
    """With the files that we write, longer than the windows; on two layouts."""
    model = random_model(lambda: WINDOWED[name](vocab=256), scale=12)
    model.save_pretrained(tmp_path / "in")
    to_checkpoint(tmp_path / "in", tmp_path / "run", tokenizer="bytes", check="none")
    to_huggingface(tmp_path / "run", tmp_path / "out", check="none")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    prompts = ["To be", "or not "]
    want = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt.encode())])
        written = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=15,
            pad_token_id=0,
        )  # fmt: skip
        want.append(written[0, ids.shape[1] :].tolist())
    assert len(set(want[0])) > 3, "a text that says something"
    checkpoints = Checkpoints(tmp_path / "run")
    for layout in (Layout(context=2, tensor=2), OF_FIVE_LAYERS[1]):
        trainer = Trainer(replace(checkpoints.run(), layout=layout, global_batch=2))
        generator = Generator(trainer, checkpoints.restore(trainer), checkpoints.tokenizer())
        found = generator.complete(prompts, tokens=15, sampling=Sampling(temperature=0))
        assert [completion.tokens for completion in found] == want, layout
        jax.clear_caches()


def test_a_mistake_in_a_table_is_found_by_the_logits(tmp_path, monkeypatch):
    random_model(lambda: llama(groups=4)).save_pretrained(tmp_path / "in")
    kind = configs.KINDS["llama"]
    q, k = "self_attn.q_proj.weight", "self_attn.k_proj.weight"
    swapped = tuple(
        replace(w, names=tuple({q: k, k: q}.get(name, name) for name in w.names))
        for w in kind.names.layers
    )
    kind = replace(kind, names=replace(kind.names, layers=swapped))
    monkeypatch.setitem(configs.KINDS, "llama", kind)
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path / "in", tmp_path / "run", check="transformers")
    assert names(error, "differ", "largest difference")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_config_that_leaves_a_size_out_is_found_by_the_tensors(tmp_path, monkeypatch):
    random_model(llama).save_pretrained(tmp_path / "in")
    to_checkpoint(tmp_path / "in", tmp_path / "run", check="none")
    kind = configs.KINDS["llama"]

    def without(model):
        return kind.to_config(model) | {"intermediate_size": 64}

    short = replace(kind, to_config=without)
    monkeypatch.setattr("mtx.conversion.configs.hugging_face_of", lambda family: (short,))
    with pytest.raises(UserError) as error:
        to_huggingface(tmp_path / "run", tmp_path / "out", check="transformers")
    assert names(error, "mlp.", "88", "64", "config.json")
    assert not (tmp_path / "out").exists()


def test_what_transformers_cannot_run_is_one_line(tmp_path):
    random_model(llama).save_pretrained(tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    config["use_cache"] = "perhaps"
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        to_checkpoint(tmp_path / "in", tmp_path / "run", check="transformers")
    assert names(error, tmp_path / "in", "check='ours'")


PARTS = {  # the part of a whole model that is saved
    "gpt2": lambda whole: whole.transformer,
    "llama 3, tied": lambda whole: whole.model,
    "bert": lambda whole: whole.bert,
    "bert, masked": lambda whole: transformers.BertForMaskedLM(whole.config),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("said", ["its class", None, [], ["GPTJModel"]])
def test_a_part_of_a_model_is_compared_whatever_class_its_config_names(tmp_path, name, said):
    """Without a head, or without the head for the order of texts."""
    part = PARTS[name](random_model(SMALL[name.partition(", masked")[0]])).eval()
    part.save_pretrained(tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    if said != "its class":
        config.pop("architectures", None)
        config |= {} if said is None else {"architectures": said}
        (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    done = to_checkpoint(tmp_path / "in", tmp_path / "run", check="transformers")
    assert done.comparison.largest_difference < 1e-5 and done.comparison.largest_logit > 0


def main(names: list[str]) -> None:
    for name in names or REAL:
        with tempfile.TemporaryDirectory() as directory:
            size = 64 if "llama" in name else None
            for layout, found in differences(REAL[name], Path(directory), LAYOUTS, size=size):
                sizes = {key: getattr(layout, key) for key in ("data", "pipe", "tensor")}
                print(name, sizes, {key: f"{value:.1e}" for key, value in found.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
