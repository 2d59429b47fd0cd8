"""DeepSeek-V3 (arXiv 2412.19437): latent attention, first layers with a dense MLP, and one more
layer at the end from which the token after the next is predicted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

from mtx.errors import UserError
from mtx.families.llama import DEFAULTS, FIELDS, Llama, names, rotary_fields, rotary_parameters
from mtx.fields import Between
from mtx.huggingface import Fields, HuggingFace, Json, Weight, ffn_field
from mtx.sizes import NotNegative, Width

_LATENT_EPSILON = 1e-6  # of norms of latents, whatever norm_epsilon is


@dataclass(frozen=True, kw_only=True)
class DeepseekV3(Llama):
    """DeepSeek-V3 and R1. `layers` counts the one that predicts a second token."""

    family: str = "deepseek_v3"
    norm_epsilon: float = 1e-6
    tied: bool = False
    latent: Width = 512  # of keys and values
    query_latent: Width | None = 1536  # None: queries are projected at once
    plain_size: Width = 128  # of a head's queries and keys, what positions do not turn
    turned_size: Width = 64  # and what they turn
    value_dim: Width = 128  # of a head's values
    rotary_neighbours: bool = True  # pairs are neighbours, or else lie half of them apart
    # "yarn": scores are multiplied by (0.1 rotary_scores ln(rotary_factor) + 1)^2
    rotary_scores: NotNegative = 0.0
    second_token: bool = False  # trained on the token after the next, too
    second_weight: Annotated[float, Between(0, 1)] = 0.3  # of that loss

    def check(self) -> None:
        for name in ("kv_heads", "head_dim"):
            if (value := getattr(self, name)) is not None:
                raise UserError(
                    f"{name}={value} must be left out of family={self.family!r}, whose heads are "
                    "made of latents; use plain_size, turned_size and value_dim"
                )
        if self.turned_size % 2:
            raise UserError(f"turned_size={self.turned_size} must be even, for rotary positions")
        if self.second_token and self.layers < 2:
            raise UserError(
                f"layers={self.layers} must be at least 2 with second_token=True, which is one of "
                "them"
            )
        self.check_rotary()

    @property
    def head_size(self) -> int:
        return self.plain_size + self.turned_size

    @property
    def value_size(self) -> int:
        return self.value_dim

    # -- what it is made of ------------------------------------------------------------------------

    def rotary(self):
        return replace(super().rotary(), neighbours=self.rotary_neighbours)

    @property
    def score_scale(self) -> float:
        """Of products of queries and keys."""
        longer = math.log(self.rotary_factor) if self.rotary_scaling == "yarn" else 0.0
        return (0.1 * self.rotary_scores * longer + 1) ** 2 / math.sqrt(self.head_size)

    def attention(self, **others: Any):
        from mtx.layers.attend import Scores
        from mtx.layers.latent import Latent

        return Latent(
            heads=self.heads, latent=self.latent, query_latent=self.query_latent,
            size=self.plain_size, turned=self.turned_size, value_size=self.value_dim,
            norm=replace(self.norm(), epsilon=_LATENT_EPSILON), rotary=self.rotary(),
            scores=Scores(scale=self.score_scale), dropout=self.attention_dropout,
        )  # fmt: skip

    def stack(self):
        from mtx.layers.layer import Stack
        from mtx.layers.multi_token import MultiToken

        kinds, edges = {"dense": self.kind()}, self.edges()
        pattern = ["dense"] * (self.layers - self.second_token)
        if self.second_token:
            kinds["second"] = MultiToken(
                sublayers=kinds["dense"].sublayers, norm=self.norm(), dropout=self.dropout
            )
            pattern.append("second")
            edges["head"] = replace(edges["head"], norm=None, second_weight=self.second_weight)
        return Stack(kinds=kinds, pattern=tuple(pattern), **edges)


CONFIG = DeepseekV3

# -- Hugging Face ----------------------------------------------------------------------------------

_SIZES = {
    "latent": "kv_lora_rank", "plain_size": "qk_nope_head_dim", "turned_size": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}  # fmt: skip


def _to_model(fields: Fields) -> Json:
    fields.require("hidden_act", "silu", "swish")
    if "num_key_value_heads" in fields:
        fields.require("num_key_value_heads", fields.whole("num_attention_heads"))
    model = ffn_field(fields, "intermediate_size", "hidden_size") | rotary_fields(fields)
    scaling = fields.table("rope_parameters") or fields.table("rope_scaling")
    if scaling is not None and "mscale_all_dim" in scaling:
        model["rotary_scores"] = scaling.number("mscale_all_dim")
    further = fields.whole("num_nextn_predict_layers", least=0)
    fields.require("num_nextn_predict_layers", 0, 1)
    latent = fields.whole("q_lora_rank") if "q_lora_rank" in fields else None
    return model | {ours: fields.whole(theirs) for ours, theirs in _SIZES.items()} | {
        "layers": fields.whole("num_hidden_layers") + further, "second_token": bool(further),
        "query_latent": latent, "rotary_neighbours": bool(fields.get("rope_interleave")),
    }  # fmt: skip


def _to_config(model: DeepseekV3) -> Json:
    rotary = rotary_parameters(model)
    for table in (rotary["rope_parameters"], rotary["rope_scaling"]):
        if table is not None and model.rotary_scores:
            table["mscale_all_dim"] = model.rotary_scores
    return rotary | {theirs: getattr(model, ours) for ours, theirs in _SIZES.items()} | {
        "num_hidden_layers": model.layers - model.second_token,
        "num_nextn_predict_layers": int(model.second_token),
        "num_key_value_heads": model.heads, "head_dim": model.turned_size,
        "qk_head_dim": model.head_size, "q_lora_rank": model.query_latent,
        "rope_interleave": model.rotary_neighbours, "intermediate_size": model.ffn_hidden,
        "hidden_act": "silu",
    }  # fmt: skip


def _as_there(model: DeepseekV3, tensors: Any) -> DeepseekV3:
    """transformers writes no second token's layer, whatever its config.json says."""
    last = model.layers - 1
    if not model.second_token or f"layers.{last}.eh_proj.weight" in tensors:
        return model
    return replace(model, second_token=False, layers=last)


_OURS = (
    Weight("attention.q.w", ("self_attn.q_proj.weight",), "linear"),
    Weight("attention.q_down.w", ("self_attn.q_a_proj.weight",), "linear"),
    Weight("attention.q_norm.scale", ("self_attn.q_a_layernorm.weight",)),
    Weight("attention.q_up.w", ("self_attn.q_b_proj.weight",), "linear"),
    Weight("attention.kv_down.w", ("self_attn.kv_a_proj_with_mqa.weight",), "linear"),
    Weight("attention.kv_norm.scale", ("self_attn.kv_a_layernorm.weight",)),
    Weight("attention.kv_up.w", ("self_attn.kv_b_proj.weight",), "linear"),
    Weight("last_norm.scale", ("norm.weight",), of_layer=False),
    Weight("token_norm.scale", ("enorm.weight",)),
    Weight("stream_norm.scale", ("hnorm.weight",)),
    Weight("join.w", ("eh_proj.weight",), "linear"),
    Weight("output_norm.scale", ("shared_head.norm.weight",)),
)
_NAMES = names(*_OURS)
HUGGING_FACE = (
    HuggingFace(
        model_type="deepseek_v3", architecture="DeepseekV3ForCausalLM",
        defaults=DEFAULTS | {
            "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
            "num_hidden_layers": 61, "num_attention_heads": 128, "max_position_embeddings": 4096,
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "qk_nope_head_dim": 128, "rope_interleave": True, "num_nextn_predict_layers": 1,
        },
        fields={ours: theirs for ours, theirs in FIELDS.items() if ours != "layers"},
        to_model=_to_model, to_config=_to_config, fixed={"attention_bias": False},
        # the tables of the second token's layer are those of the model
        names=replace(_NAMES, ignored=_NAMES.ignored
            + r"|layers\.\d+\.(embed_tokens|shared_head\.head)\.weight"),
        as_there=_as_there,
    ),
)  # fmt: skip
