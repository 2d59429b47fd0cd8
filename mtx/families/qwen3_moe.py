"""Qwen3 (arXiv 2505.09388), mixtures: a Qwen3 whose MLP is a mixture of many small experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtx.families.llama import DEFAULTS, FIELDS, preset, silu_to_model, to_config
from mtx.families.mixtral import Mixtral, expert_names
from mtx.families.qwen3 import HEAD_NORMS
from mtx.huggingface import Fields, HuggingFace, Json
from mtx.sizes import Choices, Width


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(Mixtral):
    """Qwen3, mixtures of experts."""

    family: str = "qwen3_moe"
    experts: Width = 128  # E, experts of a layer
    choices: Choices = 8  # k, experts of a token
    normalised: bool = True  # the gates of a token's experts add up to 1

    def router(self, **others: Any):
        return super().router(normalised=self.normalised, **others)

    def attention(self, **others: Any):
        return super().attention(norm=self.norm(), **others)


CONFIG = Qwen3Moe

# -- Hugging Face ----------------------------------------------------------------------------------


def _to_model(fields: Fields) -> Json:
    fields.require("use_sliding_window", None, False)
    fields.require("decoder_sparse_step", 1)
    fields.require("mlp_only_layers", None, [])
    model = silu_to_model(fields) | {"expert_ffn": fields.whole("moe_intermediate_size")}
    if "num_local_experts" in fields:  # transformers 5's name for num_experts
        model["experts"] = fields.whole("num_local_experts")
    return model


def _to_config(model: Qwen3Moe) -> Json:
    return to_config(model) | {
        "moe_intermediate_size": model.expert_width, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "use_sliding_window": False, "num_local_experts": model.experts,
    }  # fmt: skip


HUGGING_FACE = (
    HuggingFace(
        model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM",
        defaults=DEFAULTS | {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
            "max_position_embeddings": 32768, "decoder_sparse_step": 1, "num_experts": 128,
            "moe_intermediate_size": 768, "num_experts_per_tok": 8, "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
        },
        fields=FIELDS | {
            "experts": "num_experts", "choices": "num_experts_per_tok",
            "normalised": "norm_topk_prob", "aux_weight": "router_aux_loss_coef",
        },
        to_model=_to_model, to_config=_to_config, fixed={"attention_bias": False},
        names=expert_names(
            *HEAD_NORMS, router="mlp.gate", experts="mlp.experts", gated=("gate_proj", "up_proj"),
            down="down_proj",
        ),
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

# Sizes from the Qwen3 report (arXiv 2505.09388, table 2) and the config.json of
# huggingface.co/Qwen/Qwen3-30B-A3B and -235B-A22B; the sequence is that of the first stages of
# training; rate and layout are ours, with a layer's experts in one node.
PRESETS = {
    name: preset(
        {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 4, "head_dim": 128,
         "ffn": ffn, "expert_ffn": expert_ffn, "vocab": 151936, "sequence": 4096,
         "rotary_base": 1e6, "norm_epsilon": 1e-6, "tied": False},
        lr=lr, global_batch=1024, data=16, pipe=pipe, tensor=1, virtual=virtual, expert=8,
        stage_layers=stages,
    )
    for name, layers, hidden, heads, ffn, expert_ffn, lr, pipe, virtual, stages in (
        ("qwen3-30b-a3b", 48, 2048, 32, 6144, 768, 3e-4, 1, 1, "even"),
        ("qwen3-235b-a22b", 94, 4096, 64, 12288, 1536, 1.5e-4, 8, 4, "balanced"),
    )
}  # fmt: skip
