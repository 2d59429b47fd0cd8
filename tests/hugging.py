"""Small models as Hugging Face has them: config.json's values and names of tensors, by hand."""

import json

import numpy as np

from mtx.conversion.safetensors import SafetensorsWriter

V, D, H, F, S, L = 61, 16, 4, 40, 24, 2


def _norm(name):
    return {f"{name}.weight": (D,), f"{name}.bias": (D,)}


def _linear(name, inputs, outputs):
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _conv1d(name, inputs, outputs):
    return {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}


def gpt2(**changes):
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": L, "n_embd": D,
        "n_head": H, "n_inner": F, "n_positions": S, "vocab_size": V, **changes,
    }  # fmt: skip
    shapes = {"transformer.wte.weight": (V, D), "transformer.wpe.weight": (S, D)}
    for layer in range(L):
        at = f"transformer.h.{layer}"
        shapes |= _norm(f"{at}.ln_1") | _norm(f"{at}.ln_2")
        shapes |= _conv1d(f"{at}.attn.c_attn", D, 3 * D) | _conv1d(f"{at}.attn.c_proj", D, D)
        shapes |= _conv1d(f"{at}.mlp.c_fc", D, F) | _conv1d(f"{at}.mlp.c_proj", F, D)
    shapes |= _norm("transformer.ln_f")
    if changes.get("tie_word_embeddings") is False:
        shapes["lm_head.weight"] = (V, D)
    return config, shapes


def llama(**changes):
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": L,
        "hidden_size": D, "num_attention_heads": H, "num_key_value_heads": 2,
        "intermediate_size": F, "max_position_embeddings": S, "vocab_size": V, **changes,
    }  # fmt: skip
    groups = config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for layer in range(L):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (D,), f"{at}.post_attention_layernorm.weight": (D,),
            f"{at}.self_attn.q_proj.weight": (D, D),
            f"{at}.self_attn.k_proj.weight": (groups * D // H, D),
            f"{at}.self_attn.v_proj.weight": (groups * D // H, D),
            f"{at}.self_attn.o_proj.weight": (D, D),
            f"{at}.mlp.gate_proj.weight": (F, D), f"{at}.mlp.up_proj.weight": (F, D),
            f"{at}.mlp.down_proj.weight": (D, F),
        }  # fmt: skip
    if not changes.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (V, D)
    return config, shapes


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip


def bert(*, heads=("predictions", "pooler", "seq_relationship"), **changes):
    config = {
        "model_type": "bert", "architectures": ["BertForPreTraining"], "num_hidden_layers": L,
        "hidden_size": D, "num_attention_heads": H, "intermediate_size": F,
        "max_position_embeddings": S, "vocab_size": V, **changes,
    }  # fmt: skip
    post = config["model_type"] == "bert"
    shapes = {
        "bert.embeddings.word_embeddings.weight": (V, D),
        "bert.embeddings.position_embeddings.weight": (S, D),
        "bert.embeddings.token_type_embeddings.weight": (2, D),
        **_norm("bert.embeddings.LayerNorm" if post else "bert.encoder.ln"),
    }
    for layer in range(L):
        at = f"bert.encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            shapes |= _linear(f"{at}.attention.self.{name}", D, D)
        shapes |= _linear(f"{at}.attention.output.dense", D, D)
        shapes |= _linear(f"{at}.intermediate.dense", D, F) | _linear(f"{at}.output.dense", F, D)
        shapes |= _norm(f"{at}.attention.output.LayerNorm" if post else f"{at}.attention.ln")
        shapes |= _norm(f"{at}.output.LayerNorm" if post else f"{at}.ln")
    if "predictions" in heads:
        shapes |= _linear("cls.predictions.transform.dense", D, D)
        shapes |= _norm("cls.predictions.transform.LayerNorm") | {"cls.predictions.bias": (V,)}
    if "pooler" in heads:
        shapes |= _linear("bert.pooler.dense", D, D)
    if "seq_relationship" in heads:
        shapes |= _linear("cls.seq_relationship", D, 2)
    return config, shapes


def random_tensors(shapes, *, seed=0):
    """float32 tensors of these shapes, norms' weights about 1."""
    stream = np.random.default_rng(seed)
    return {
        name: (0.1 * stream.standard_normal(shape) + name.endswith(("norm.weight", "ln.weight")))
        .astype(np.float32)
        for name, shape in shapes.items()
    }  # fmt: skip


def write(directory, config, tensors, *, dtype="F32", files=1):
    """A directory with config.json and these tensors, in one file or several; `tensors`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    names = ["model.safetensors"] if files == 1 else names
    places = {name: names[i % files] for i, name in enumerate(tensors)}
    for file in names:
        shapes = {name: tensors[name].shape for name in tensors if places[name] == file}
        with SafetensorsWriter(directory / file, shapes, dtype=dtype) as writer:
            for name in shapes:
                writer.write(name, tensors[name])
    if files > 1:
        index = {"metadata": {}, "weight_map": places}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors
