"""DeepSeek-V3 (arXiv 2412.19437): latent attention; a few dense layers, then mixtures of experts in
groups, with an expert that all tokens share, balanced by a bias; and one more layer at the end,
which predicts the token after the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

from mtx.errors import UserError, nearest_divisors
from mtx.families.llama import DEFAULTS, FIELDS, preset, rotary_fields, rotary_parameters
from mtx.families.mixtral import AuxLoss, Mixtral, expert_names
from mtx.fields import Between
from mtx.huggingface import Fields, HuggingFace, Json, Weight, ffn_field
from mtx.sizes import Choices, Ffn, NotNegative, Width

_LATENT_EPSILON = 1e-6  # of norms of latents, whatever norm_epsilon is


@dataclass(frozen=True, kw_only=True)
class DeepseekV3(Mixtral):
    """DeepSeek-V3 and R1. `layers` includes the one that predicts a second token."""

    family: str = "deepseek_v3"
    norm_epsilon: float = 1e-6
    tied: bool = False
    latent: Width = 512  # size of the latent of keys and values
    query_latent: Width | None = 1536  # size of the latent of queries; None: no latent
    plain_size: Width = 128  # part of a head's queries and keys without rotary positions
    turned_size: Width = 64  # part of a head's queries and keys with rotary positions
    value_dim: Width = 128  # size of a head's values
    rotary_neighbours: bool = True  # rotary pairs are neighbours, or else turned_size / 2 apart
    # "yarn": scores are multiplied by (0.1 rotary_scores ln(rotary_factor) + 1)^2
    rotary_scores: NotNegative = 0.0
    dense_layers: Annotated[int, Between(0, 2**14)] = 3  # first layers, which have an MLP of `ffn`
    experts: Width = 256  # E, experts of a layer
    choices: Choices = 8  # k, experts of a token
    expert_ffn: Ffn = 2048  # F of an expert
    shared_experts: Annotated[int, Between(0, 2**10)] = 1  # as one MLP, this many times expert_ffn
    groups_of_experts: Width = 8  # groups with equally many experts each
    top_groups: Width = 4  # groups that a token's experts may be in
    normalised: bool = True  # the gates of a token's experts add up to gate_scale
    gate_scale: float = 2.5  # scale of the gates
    balance_rate: NotNegative = 0.001  # how far a step moves each expert's balance bias
    aux: AuxLoss = "sequence"  # loss that keeps experts evenly loaded: see `mtx.layers.router`
    aux_weight: float = 0.0001  # weight of the `aux` loss
    second_token: bool = False  # also train on the token after the next
    second_weight: Annotated[float, Between(0, 1)] = 0.3  # weight of that token's loss

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
        groups = self.groups_of_experts
        if self.experts % groups:
            raise UserError(
                f"experts={self.experts} must be a multiple of groups_of_experts={groups}; use "
                f"groups_of_experts={nearest_divisors(self.experts, groups)}"
            )
        most = self.top_groups * (self.experts // groups)
        if self.top_groups > groups or self.choices > most:
            raise UserError(
                f"top_groups={self.top_groups} of groups_of_experts={groups} must have "
                f"choices={self.choices} experts, and have {most} of experts={self.experts}; use "
                f"top_groups={groups}"
            )
        self.check_rotary()
        self.check_experts()

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
        """The scale of products of queries and keys."""
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

    def router(self, **others: Any):
        return super().router(
            score="sigmoid", normalised=self.normalised, scale=self.gate_scale,
            groups=self.groups_of_experts, top_groups=self.top_groups,
            balance_rate=self.balance_rate, **others,
        )  # fmt: skip

    def mixture(self, **others: Any):
        shared = None
        if self.shared_experts:
            shared = self._mlp(self.shared_experts * self.expert_width)
        return super().mixture(shared=shared, **others)

    def _mlp(self, ffn: int):
        from mtx.layers.mlp import MLP

        return MLP(ffn=ffn, activation="silu", gated=True, bias=False)

    def stack(self):
        from mtx.layers.layer import Stack
        from mtx.layers.multi_token import MultiToken

        mixture, edges = self.kind(), self.edges()
        dense = replace(
            mixture, sublayers=(mixture.sublayers[0], ("mlp", self._mlp(self.ffn_hidden)))
        )
        main = self.layers - self.second_token
        first = min(self.dense_layers, main)
        pattern = ["dense"] * first + ["experts"] * (main - first)
        if self.second_token:
            pattern.append("second")
            edges["head"] = replace(edges["head"], norm=None, second_weight=self.second_weight)
        second = MultiToken(sublayers=mixture.sublayers, norm=self.norm(), dropout=self.dropout)
        kinds = {"dense": dense, "experts": mixture, "second": second}
        kinds = {name: kind for name, kind in kinds.items() if name in pattern}
        return Stack(kinds=kinds, pattern=tuple(pattern), **edges)


CONFIG = DeepseekV3

# -- Hugging Face ----------------------------------------------------------------------------------

_SIZES = {
    "latent": "kv_lora_rank", "plain_size": "qk_nope_head_dim", "turned_size": "qk_rope_head_dim",
    "value_dim": "v_head_dim", "experts": "n_routed_experts", "choices": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size", "groups_of_experts": "n_group",
    "top_groups": "topk_group",
}  # fmt: skip
_COUNTS = {"dense_layers": "first_k_dense_replace", "shared_experts": "n_shared_experts"}


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
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    fields.require("moe_layer_freq", 1)
    model |= {ours: fields.whole(theirs, least=0) for ours, theirs in _COUNTS.items()}
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
    own = (_SIZES | _COUNTS).items()
    return rotary | {theirs: getattr(model, ours) for ours, theirs in own} | {
        "num_hidden_layers": model.layers - model.second_token,
        "num_nextn_predict_layers": int(model.second_token),
        "num_key_value_heads": model.heads, "head_dim": model.turned_size,
        "qk_head_dim": model.head_size, "q_lora_rank": model.query_latent,
        "rope_interleave": model.rotary_neighbours, "intermediate_size": model.ffn_hidden,
        "hidden_act": "silu",
    }  # fmt: skip


def _as_there(model: DeepseekV3, tensors: Any) -> DeepseekV3:
    """The model without the second token's layer, if its tensors are not there: transformers writes
    none, whatever its config.json says."""
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
_EXPERTS = (
    Weight("mlp.router.balance", ("mlp.gate.e_score_correction_bias",), float32=True),
    Weight(
        "mlp.shared.up.w",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"), "linear",
        stack=1,
    ),
    Weight("mlp.shared.down.w", ("mlp.shared_experts.down_proj.weight",), "linear"),
)  # fmt: skip
_NAMES = expert_names(
    *_OURS, *_EXPERTS, router="mlp.gate", experts="mlp.experts", gated=("gate_proj", "up_proj"),
    down="down_proj", float32=True,
)  # fmt: skip
HUGGING_FACE = (
    HuggingFace(
        model_type="deepseek_v3", architecture="DeepseekV3ForCausalLM",
        defaults=DEFAULTS | {
            "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
            "num_hidden_layers": 61, "num_attention_heads": 128, "max_position_embeddings": 4096,
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "qk_nope_head_dim": 128, "rope_interleave": True, "num_nextn_predict_layers": 1,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
            "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
        },
        fields={ours: theirs for ours, theirs in FIELDS.items() if ours != "layers"} | {
            "normalised": "norm_topk_prob", "gate_scale": "routed_scaling_factor",
        },
        to_model=_to_model, to_config=_to_config, fixed={"attention_bias": False},
        # the tables of the second token's layer are those of the model
        names=replace(_NAMES, ignored=_NAMES.ignored
            + r"|layers\.\d+\.(embed_tokens|shared_head\.head)\.weight"),
        as_there=_as_there,
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

# Sizes, rate, batch, stages and devices from the paper, sections 3.2 and 4.2; the last layer is the
# second token's. With expert 64, as in the paper, each token is sent over the network to all nodes
# that hold its experts; the paper does so in FP8, with its own kernels. With expert 16, as here,
# half of what a token sends stays in its node, which by the plan is 8 s a step faster. Woven ticks
# take the place of DualPipe.
PRESETS = {
    "deepseek-v3": preset(
        {"layers": 62, "hidden": 7168, "heads": 128, "ffn": 18432, "vocab": 129280,
         "sequence": 4096, "second_token": True},
        lr=2.2e-4, global_batch=15360, data=8, pipe=16, tensor=1, virtual=1, expert=16,
        stage_layers=(3, *(4,) * 14, 3), recompute="full", weave="on", idle="phases",
    ),
}  # fmt: skip
