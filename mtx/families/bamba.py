"""Bamba (IBM, Princeton, CMU and UIUC 2024): each layer is a Mamba-2 mixer, or attention with
rotary positions on the first half of each head, followed by a gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

from mtx.errors import UserError
from mtx.families.llama import preset
from mtx.families.mamba2 import NO_LIMIT, least_step, mixer_names
from mtx.families.nemotron_h import ATTENTION, MIXER, NemotronH
from mtx.fields import require_above
from mtx.huggingface import Fields, HuggingFace, Json, Names, Weight, ffn_field

_TURNED = 0.5  # the part of a head that rotary positions turn


@dataclass(frozen=True, kw_only=True)
class Bamba(NemotronH):
    """Bamba."""

    family: str = "bamba"
    pattern: str = "MM*M"  # as for Nemotron-H, but with M and * only
    rotary_base: float = 10000.0  # wavelengths of rotary positions go from 2 pi to 2 pi times this

    def check(self) -> None:
        super().check()
        require_above(self, 0, "rotary_base")
        if self.head_size % 4:
            raise UserError(
                f"head_size={self.head_size} must be a multiple of 4, for rotary positions; use "
                f"another hidden={self.hidden} or heads={self.heads}, or head_dim"
            )

    @property
    def symbols(self) -> str:
        return MIXER + ATTENTION

    def kinds(self) -> Json:
        from mtx.layers.attention import Attention
        from mtx.layers.mlp import MLP
        from mtx.layers.rotary import Rotary

        attention = Attention(
            heads=self.heads, groups=self.groups, size=self.head_size,
            rotary=Rotary(base=self.rotary_base, part=_TURNED), dropout=self.attention_dropout,
        )  # fmt: skip
        mlp = MLP(ffn=self.ffn_hidden, activation="silu", gated=True, bias=False)
        return {
            MIXER: ("mamba", self.kind(mamba=self.mixer(), mlp=mlp)),
            ATTENTION: ("attention", self.kind(attention=attention, mlp=mlp)),
        }


CONFIG = Bamba

# -- Hugging Face ----------------------------------------------------------------------------------


MIXER_DEFAULTS: Json = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 256,
}  # fmt: skip
MIXER_FIELDS = {
    "ssm_heads": "mamba_n_heads", "ssm_state": "mamba_d_state", "ssm_groups": "mamba_n_groups",
    "ssm_chunk": "mamba_chunk_size", "conv_width": "mamba_d_conv",
}  # fmt: skip


def mixer_to_model(fields: Fields) -> Json:
    """The fields of a mixer besides MIXER_FIELDS."""
    size = fields.get("mamba_d_head", "auto")
    if size == "auto":
        inner = fields.whole("mamba_expand") * fields.whole("hidden_size")
        size = inner // fields.whole("mamba_n_heads")
    return {"ssm_head_dim": size, "least_dt": least_step(fields)}


def mixer_to_config(model: NemotronH) -> Json:
    """The values that `mixer_to_model` reads."""
    return {
        "mamba_d_head": model.ssm_head_dim,
        "mamba_expand": model.ssm_heads * model.ssm_head_dim // model.hidden,
        "time_step_limit": [model.least_dt, NO_LIMIT],
    }  # fmt: skip


def has_config(model: NemotronH) -> bool:
    """Whether config.json can say the sizes of the model's heads."""
    expands = model.ssm_heads * model.ssm_head_dim % model.hidden == 0
    return expands and model.head_dim in (None, model.hidden // model.heads)


def _to_model(fields: Fields) -> Json:
    fields.require("hidden_act", "silu", "swish")
    rotary = fields.table("rope_parameters") or fields
    rotary.require("rope_type", "default")
    rotary.require("partial_rotary_factor", None, _TURNED)
    layers = fields.whole("num_hidden_layers")
    attention = set(fields.get("attn_layer_indices") or ())
    return {
        "pattern": "".join(ATTENTION if n in attention else MIXER for n in range(layers)),
        "kv_heads": fields.whole("num_key_value_heads"),
        "rotary_base": rotary.number("rope_theta"), **mixer_to_model(fields),
        **ffn_field(fields, "intermediate_size", "hidden_size"),
    }  # fmt: skip


def _to_config(model: Bamba) -> Json:
    attention = [n for n, symbol in enumerate(model.layer_symbols) if symbol == ATTENTION]
    rotary = {"rope_theta": model.rotary_base, "partial_rotary_factor": _TURNED}
    return {
        "attn_layer_indices": attention, "num_key_value_heads": model.groups,
        "intermediate_size": model.ffn_hidden, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", **rotary}, **rotary,
        **mixer_to_config(model),
    }  # fmt: skip


HUGGING_FACE = (
    HuggingFace(
        model_type="bamba",
        architecture="BambaForCausalLM",
        defaults=MIXER_DEFAULTS | {
            "vocab_size": 128000, "tie_word_embeddings": False, "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "hidden_act": "silu", "initializer_range": 0.02,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "attention_dropout": 0.0,
            "rope_theta": 10000.0,
        },
        fixed={
            "attention_bias": False, "mlp_bias": False, "mamba_conv_bias": True,
            "mamba_proj_bias": False, "z_loss_coefficient": 0.0,
        },
        fields=MIXER_FIELDS | {
            "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
            "sequence": "max_position_embeddings", "vocab": "vocab_size",
            "tied": "tie_word_embeddings", "attention_dropout": "attention_dropout",
            "init_std": "initializer_range", "norm_epsilon": "rms_norm_eps",
        },
        to_model=_to_model,
        to_config=_to_config,
        names=Names(
            prefix="model.",
            layer="layers.{}.",
            heads=("lm_head.",),
            shared=(
                Weight("embed.tokens", ("embed_tokens.weight",), "table"),
                Weight("head.norm.scale", ("final_layernorm.weight",)),
                Weight("head.output", ("lm_head.weight",), "table"),
            ),
            layers=(
                Weight("mamba_norm.scale", ("input_layernorm.weight",)),
                Weight("attention_norm.scale", ("input_layernorm.weight",)),
                Weight("mlp_norm.scale", ("pre_ff_layernorm.weight",)),
                *mixer_names("mamba"),
                Weight("attention.qkv.q", ("self_attn.q_proj.weight",), "linear"),
                Weight(
                    "attention.qkv.kv", ("self_attn.k_proj.weight", "self_attn.v_proj.weight"),
                    "linear", stack=1,
                ),
                Weight("attention.out.w", ("self_attn.o_proj.weight",), "linear", inputs=2),
                Weight(
                    "mlp.up.w", ("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
                    "linear", stack=1,
                ),
                Weight("mlp.down.w", ("feed_forward.down_proj.weight",), "linear"),
            ),
            twins={"lm_head.weight": "embed_tokens.weight"},
        ),
        has=has_config,
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

# Sizes from the config.json of huggingface.co/ibm-ai-platform/Bamba-9B-v1, with the sequence that
# it was trained on; the layout is ours.
PRESETS = {
    "bamba-9b": preset(
        {"layers": 32, "pattern": f"{'M' * 9}*{'M' * 8}*{'M' * 8}*{'M' * 4}", "hidden": 4096,
         "heads": 32, "kv_heads": 8, "ffn": 14336, "ssm_heads": 128, "vocab": 128256,
         "sequence": 4096, "tied": False},
        lr=3e-4, global_batch=1024, data=32, pipe=1, tensor=4, virtual=1,
    ),
}  # fmt: skip
