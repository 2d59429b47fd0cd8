"""Small models as Hugging Face stores them: values of config.json and names of tensors, by hand."""

import json

import numpy as np
from safetensors.numpy import save_file

from mtx.conversion.safetensors import DTYPES

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


def llama(model_type="llama", *, biases=False, head_norms=False, four_norms=False, **changes):
    """Llama and models that are built like it."""
    config = {
        "model_type": model_type, "architectures": [f"{model_type.title()}ForCausalLM"],
        "num_hidden_layers": L, "hidden_size": D, "num_attention_heads": H,
        "num_key_value_heads": 2, "intermediate_size": F, "max_position_embeddings": S,
        "vocab_size": V, **changes,
    }  # fmt: skip
    size = config.get("head_dim") or D // H
    width, groups = H * size, config["num_key_value_heads"] * size
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if four_norms else []
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}.weight": (D,) for name in norms}
        for name, outputs in (("q", width), ("k", groups), ("v", groups)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (outputs, D)
            shapes |= {f"{at}.self_attn.{name}_proj.bias": (outputs,)} if biases else {}
        shapes |= {
            f"{at}.self_attn.o_proj.weight": (D, width), f"{at}.mlp.gate_proj.weight": (F, D),
            f"{at}.mlp.up_proj.weight": (F, D), f"{at}.mlp.down_proj.weight": (D, F),
        }  # fmt: skip
        if head_norms:
            shapes |= {f"{at}.self_attn.{name}_norm.weight": (size,) for name in ("q", "k")}
    if not changes.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (V, D)
    return config, shapes


def mistral(**changes):
    return llama("mistral", **{"sliding_window": 7, **changes})


def qwen2(**changes):
    return llama("qwen2", biases=True, **changes)


def qwen3(**changes):
    return llama("qwen3", head_norms=True, **{"head_dim": 6, **changes})


FACTORS = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22,
    "logits_scaling": 1.7,
}  # fmt: skip


def granite(**changes):
    return llama("granite", **{"tie_word_embeddings": True} | FACTORS | changes)


def gemma2(**changes):
    settings = {
        "num_hidden_layers": 3, "head_dim": 6, "sliding_window": 7, "query_pre_attn_scalar": 5,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return llama("gemma2", four_norms=True, **settings | changes)


E, FE = 3, 6  # experts, and their feed-forward


def _of_experts(shapes, start, gated, down):
    for layer in range(L):
        at = f"model.layers.{layer}.{start}"
        shapes[f"{at}.gate.weight"] = (E, D)
        for expert in range(E):
            shapes |= {f"{at}.experts.{expert}.{name}.weight": (FE, D) for name in gated}
            shapes[f"{at}.experts.{expert}.{down}.weight"] = (D, FE)
    return shapes


def _mixture(model_type, architecture, **values):
    config, shapes = llama(model_type, **values)
    config |= {"architectures": [architecture]}
    return config, {name: shape for name, shape in shapes.items() if ".mlp." not in name}


def mixtral():
    config, shapes = _mixture(
        "mixtral", "MixtralForCausalLM", num_local_experts=E, intermediate_size=FE
    )
    return config, _of_experts(shapes, "block_sparse_moe", ("w1", "w3"), "w2")


def qwen3_moe():
    config, shapes = _mixture(
        "qwen3_moe", "Qwen3MoeForCausalLM", head_norms=True, head_dim=6, num_experts=E,
        num_experts_per_tok=2, moe_intermediate_size=FE, norm_topk_prob=True,
    )  # fmt: skip
    return config, _of_experts(shapes, "mlp", ("gate_proj", "up_proj"), "down_proj")


def deepseek_v3():
    """A dense layer, then two with experts, of which the last predicts a second token."""
    config, shapes = _mixture(
        "deepseek_v3", "DeepseekV3ForCausalLM", num_key_value_heads=H, num_hidden_layers=L,
        n_routed_experts=E, num_experts_per_tok=2, moe_intermediate_size=FE, n_group=1,
        topk_group=1, n_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=5, q_lora_rank=7,
        qk_rope_head_dim=4, qk_nope_head_dim=3, v_head_dim=6, num_nextn_predict_layers=1,
    )  # fmt: skip
    shapes = {name: shape for name, shape in shapes.items() if ".layers." not in name}
    for layer in range(L + 1):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (D,),
            f"{at}.post_attention_layernorm.weight": (D,),
            f"{at}.self_attn.q_a_proj.weight": (7, D),
            f"{at}.self_attn.q_a_layernorm.weight": (7,),
            f"{at}.self_attn.q_b_proj.weight": (H * 7, 7),
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": (9, D),
            f"{at}.self_attn.kv_a_layernorm.weight": (5,),
            f"{at}.self_attn.kv_b_proj.weight": (H * 9, 5),
            f"{at}.self_attn.o_proj.weight": (D, H * 6),
        }
        starts = [("mlp", F)]
        if layer:
            starts = [("mlp.shared_experts", FE), *((f"mlp.experts.{e}", FE) for e in range(E))]
            shapes |= {f"{at}.mlp.gate.weight": (E, D)}
            shapes |= {f"{at}.mlp.gate.e_score_correction_bias": (E,)}
        for start, ffn in starts:
            shapes |= {f"{at}.{start}.{name}_proj.weight": (ffn, D) for name in ("gate", "up")}
            shapes |= {f"{at}.{start}.down_proj.weight": (D, ffn)}
    norms = {f"{at}.{name}.weight": (D,) for name in ("enorm", "hnorm", "shared_head.norm")}
    return config, shapes | norms | {f"{at}.eh_proj.weight": (D, 2 * D)}


def gpt_oss():
    config, shapes = _mixture(
        "gpt_oss", "GptOssForCausalLM", biases=True, head_dim=6, num_local_experts=E,
        num_experts_per_tok=2, intermediate_size=FE, sliding_window=7,
    )  # fmt: skip
    for layer in range(L):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.o_proj.bias": (D,), f"{at}.self_attn.sinks": (H,),
            f"{at}.mlp.router.weight": (E, D), f"{at}.mlp.router.bias": (E,),
            f"{at}.mlp.experts.gate_up_proj": (E, D, 2 * FE),
            f"{at}.mlp.experts.gate_up_proj_bias": (E, 2 * FE),
            f"{at}.mlp.experts.down_proj": (E, FE, D), f"{at}.mlp.experts.down_proj_bias": (E, D),
        }  # fmt: skip
    return config, shapes


def granitemoehybrid(experts=E, **changes):
    """A mixer, attention and a mixer; in each layer experts, if any, and an MLP for all tokens."""
    inner, state, heads = 2 * D, 5, 8
    config, shapes = _mixture(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        intermediate_size=FE, shared_intermediate_size=F, num_local_experts=experts,
        num_experts_per_tok=2, mamba_n_heads=heads, mamba_d_head=inner // heads,
        mamba_d_state=state, mamba_chunk_size=7, tie_word_embeddings=True,
        **FACTORS | {"position_embedding_type": "nope"} | changes,
    )  # fmt: skip
    for layer in range(3):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.shared_mlp.input_linear.weight": (2 * F, D),
            f"{at}.shared_mlp.output_linear.weight": (D, F),
        }
        if experts:
            shapes |= {
                f"{at}.block_sparse_moe.router.layer.weight": (experts, D),
                f"{at}.block_sparse_moe.input_linear.weight": (experts, 2 * FE, D),
                f"{at}.block_sparse_moe.output_linear.weight": (experts, D, FE),
            }
        if layer == 1:
            continue
        shapes = {name: shape for name, shape in shapes.items() if f"{at}.self_attn" not in name}
        shapes |= {
            f"{at}.mamba.in_proj.weight": (2 * inner + 2 * state + heads, D),
            f"{at}.mamba.conv1d.weight": (inner + 2 * state, 1, 4),
            f"{at}.mamba.conv1d.bias": (inner + 2 * state,),
            **{f"{at}.mamba.{name}": (heads,) for name in ("A_log", "D", "dt_bias")},
            f"{at}.mamba.norm.weight": (inner,), f"{at}.mamba.out_proj.weight": (D, inner),
        }  # fmt: skip
    return config, shapes


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0,
    "original_max_position_embeddings": 6,
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
    """Write a directory of config.json and these tensors, in `files` files; returns `tensors`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    names = ["model.safetensors"] if files == 1 else names
    places = {name: names[i % files] for i, name in enumerate(tensors)}
    for file in names:
        inside = {name: tensors[name] for name in tensors if places[name] == file}
        cast = {name: np.array(values, DTYPES[dtype]) for name, values in inside.items()}
        save_file(cast, directory / file, {"format": "pt"})
    if files > 1:
        index = {"metadata": {}, "weight_map": places}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors
