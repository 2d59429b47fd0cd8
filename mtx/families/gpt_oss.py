"""gpt-oss (arXiv 2508.10925): mixtures of experts; attention with sinks, and a window in every
other layer; biases everywhere; clamped gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtx.families.llama import DEFAULTS, FIELDS, names, preset, to_config, to_model
from mtx.families.mixtral import Mixtral
from mtx.huggingface import Fields, HuggingFace, Json, Weight
from mtx.layers.kernels import CLAMP_LIMIT, CLAMP_SLOPE
from mtx.sizes import Choices, Tokens, Width


@dataclass(frozen=True, kw_only=True)
class GptOss(Mixtral):
    """gpt-oss."""

    family: str = "gpt_oss"
    head_dim: Width = 64  # K, head size
    experts: Width = 32  # E, experts of a layer
    choices: Choices = 4  # k, experts of a token
    window: Tokens = 128  # positions that a position sees in every other layer, from the first

    def router(self, **others: Any):
        return super().router(bias=True, **others)

    def mixture(self, **others: Any):
        return super().mixture(activation="clamped", bias=True, **others)

    def stack(self):
        from mtx.layers.attend import Scores
        from mtx.layers.layer import Stack

        def kind(window: int | None):
            scores = Scores(window=window)
            return self.kind(scores=scores, sinks=True, bias=True, output_bias=True)

        kinds = {"window": kind(self.window), "full": kind(None)}
        pattern = tuple("full" if layer % 2 else "window" for layer in range(self.layers))
        return Stack(kinds=kinds, pattern=pattern, **self.edges())


CONFIG = GptOss

# -- Hugging Face ----------------------------------------------------------------------------------


def _to_model(fields: Fields) -> Json:
    fields.require("hidden_act", "silu", "swish")
    fields.require("attention_bias", True)
    fields.require("swiglu_limit", CLAMP_LIMIT)
    fields.require("swiglu_alpha", CLAMP_SLOPE)
    fields.require("layer_types", None, _layer_types(fields.whole("num_hidden_layers")))
    return to_model(fields) | {
        "head_dim": fields.whole("head_dim"), "window": fields.whole("sliding_window")
    }  # fmt: skip


def _layer_types(layers: int) -> list[str]:
    kinds = "sliding_attention", "full_attention"
    return [kinds[layer % 2] for layer in range(layers)]


def _to_config(model: GptOss) -> Json:
    return to_config(model) | {
        "sliding_window": model.window, "layer_types": _layer_types(model.layers),
        "attention_bias": True, "swiglu_limit": CLAMP_LIMIT, "swiglu_alpha": CLAMP_SLOPE,
        "experts_per_token": model.choices,
    }  # fmt: skip


_BIASES = (
    Weight("attention.qkv.q_bias", ("self_attn.q_proj.bias",)),
    Weight("attention.qkv.kv_bias", ("self_attn.k_proj.bias", "self_attn.v_proj.bias"), stack=0),
    Weight("attention.out.b", ("self_attn.o_proj.bias",)),
    Weight("attention.sinks", ("self_attn.sinks",)),
)
_EXPERTS = (
    Weight("mlp.router.w", ("mlp.router.weight",), "linear"),
    Weight("mlp.router.bias", ("mlp.router.bias",)),
    Weight("mlp.router.load", ()),
    Weight("mlp.up", ("mlp.experts.gate_up_proj",), "neighbours"),
    Weight("mlp.up_bias", ("mlp.experts.gate_up_proj_bias",), "neighbours"),
    Weight("mlp.down", ("mlp.experts.down_proj",), "table"),
    Weight("mlp.down_bias", ("mlp.experts.down_proj_bias",), "table"),
)
HUGGING_FACE = (
    HuggingFace(
        model_type="gpt_oss", architecture="GptOssForCausalLM",
        defaults=DEFAULTS | {
            "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
            "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
            "max_position_embeddings": 131072, "num_local_experts": 128, "num_experts_per_tok": 4,
            "router_aux_loss_coef": 0.001, "attention_bias": True, "swiglu_limit": CLAMP_LIMIT,
            "swiglu_alpha": CLAMP_SLOPE,
        },
        fields=FIELDS | {
            "experts": "num_local_experts", "choices": "num_experts_per_tok",
            "aux_weight": "router_aux_loss_coef",
        },
        to_model=_to_model, to_config=_to_config, names=names(*_BIASES, *_EXPERTS),
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

# Sizes from the model card (arXiv 2508.10925, table 1) and the config.json of
# huggingface.co/openai/gpt-oss-20b and -120b; the sequence is that before YaRN; rate and layout are
# ours, with a layer's experts in one node.
PRESETS = {
    name: preset(
        {"layers": layers, "hidden": 2880, "heads": 64, "kv_heads": 8, "ffn": 2880,
         "experts": experts, "vocab": 201088, "sequence": 4096, "rotary_base": 1.5e5,
         "tied": False},
        lr=3e-4, global_batch=1024, data=data, pipe=pipe, tensor=1, virtual=virtual, expert=8,
    )
    for name, layers, experts, data, pipe, virtual in (
        ("gpt-oss-20b", 24, 32, 16, 1, 1),
        ("gpt-oss-120b", 36, 128, 8, 4, 3),
    )
}  # fmt: skip
