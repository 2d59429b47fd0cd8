"""Llama (Touvron et al. 2023; Llama 3, 2024): RMSNorm, rotary positions, SwiGLU, fewer heads of
keys and values than of queries, no biases. Families like it derive from its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from mtx.errors import UserError
from mtx.families import ModelConfig, check_groups
from mtx.fields import Between, require_above
from mtx.huggingface import Fields, HuggingFace, Json, Names, Weight, ffn_field
from mtx.sizes import Tokens, Width

RotaryScaling = Literal["none", "linear", "llama3", "yarn", "dynamic"]
_HIGH = {"llama3": 4.0, "yarn": 32.0}


@dataclass(frozen=True, kw_only=True)
class Llama(ModelConfig):
    """Llama 2 and 3."""

    family: str = "llama"
    kv_heads: Width | None = None  # G, heads of keys and values; None: as many as `heads`
    head_dim: Width | None = None  # K, head size; None: hidden / heads
    rotary_base: float = 10000.0  # wavelengths of rotary positions go from 2 pi to 2 pi times this
    # for a model first trained on shorter texts; "dynamic" depends on this run's sequence, even for
    # shorter and generated texts
    rotary_scaling: RotaryScaling = "none"
    rotary_factor: Annotated[float, Between(1, 2**20)] = 1.0  # how much longer texts are now
    rotary_low: float = 1.0  # "llama3", "yarn": scale all wavelengths above rotary_original / this
    # "llama3", "yarn": scale no wavelengths below rotary_original / this; None: 4, with YaRN 32
    rotary_high: float | None = None
    rotary_original: Tokens = 8192  # all but "linear": the sequence length of the first training
    rotary_attention: float | None = None  # "yarn": scale cos, sin; None: 0.1 ln(rotary_factor) + 1
    rotary_truncate: bool = True  # "yarn": round the bounds of partial scaling to whole pairs

    def check(self) -> None:
        self.check_rotary()
        if self.head_dim is None:
            super().check()
        if self.head_size % 2:
            raise UserError(
                f"head_size={self.head_size} must be even, for rotary positions; use another "
                f"hidden={self.hidden} or heads={self.heads}"
            )
        check_groups(self)

    def check_rotary(self) -> None:
        """UserError for values of rotary positions that do not go together."""
        require_above(self, 0, "rotary_base", "rotary_low")
        if self.rotary_high is not None:
            require_above(self, self.rotary_low, "rotary_high")
        if self.rotary_attention is not None:
            require_above(self, 0, "rotary_attention")
        if self.rotary_scaling == "yarn":
            require_above(self, 1, "rotary_base")

    @property
    def head_size(self) -> int:
        return self.head_dim or super().head_size

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    @property
    def sequence_is_fixed(self) -> bool:
        return False

    @property
    def longest(self) -> int:
        if self.rotary_scaling not in ("yarn", "dynamic"):
            return self.sequence
        return max(self.sequence, int(self.rotary_factor * self.rotary_original))

    # -- what it is made of ------------------------------------------------------------------------

    def norm(self):
        from mtx.layers.norm import Norm

        return Norm(kind="rms", epsilon=self.norm_epsilon)

    def rotary(self):
        from mtx.layers.rotary import Rotary

        high = _HIGH.get(self.rotary_scaling, 0.0) if self.rotary_high is None else self.rotary_high
        return Rotary(
            base=self.rotary_base, scaling=self.rotary_scaling, factor=self.rotary_factor,
            low=self.rotary_low, high=high, original=self.rotary_original,
            sequence=self.sequence, truncate=self.rotary_truncate, scale=self.rotary_attention,
        )  # fmt: skip

    def attention(self, **others: Any):
        """The attention; others: further fields of `mtx.layers.attention.Attention`."""
        from mtx.layers.attention import Attention

        return Attention(
            heads=self.heads, groups=self.groups, size=self.head_size, rotary=self.rotary(),
            dropout=self.attention_dropout, **others,
        )  # fmt: skip

    def kind(self, **others: Any):
        """A layer with that attention; others: as for `attention`."""
        from mtx.layers.layer import Kind
        from mtx.layers.mlp import MLP

        mlp = MLP(ffn=self.ffn_hidden, activation="silu", gated=True, bias=False)
        return Kind(
            sublayers=(("attention", self.attention(**others)), ("mlp", mlp)), norm=self.norm(),
            dropout=self.dropout,
        )  # fmt: skip

    def edges(self) -> dict[str, Any]:
        """The embedding and the head."""
        from mtx.layers.embedding import Embedding
        from mtx.layers.head import NextToken

        return {
            "embedding": Embedding(vocab=self.vocab, dropout=self.dropout),
            "head": NextToken(vocab=self.vocab, norm=self.norm(), tied=self.tied),
        }

    def stack(self):
        from mtx.layers.layer import Stack

        return Stack.uniform(self.kind(), self.layers, **self.edges())


CONFIG = Llama

# -- Hugging Face ----------------------------------------------------------------------------------

DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_dropout": 0.0,
    "initializer_range": 0.02, "tie_word_embeddings": False,
}  # fmt: skip


FIELDS = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "sequence": "max_position_embeddings", "vocab": "vocab_size", "tied": "tie_word_embeddings",
    "attention_dropout": "attention_dropout", "init_std": "initializer_range",
    "norm_epsilon": "rms_norm_eps",
}  # fmt: skip


def to_model(fields: Fields) -> Json:
    """The fields that all families like Llama have, except for those of the activation."""
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    size = fields.whole("head_dim") if "head_dim" in fields else None
    groups = fields.whole("num_key_value_heads") if "num_key_value_heads" in fields else heads
    return {
        "head_dim": None if size is not None and size * heads == hidden else size,
        "kv_heads": None if groups == heads else groups,
        **ffn_field(fields, "intermediate_size", "hidden_size"), **rotary_fields(fields),
    }  # fmt: skip


def silu_to_model(fields: Fields) -> Json:
    fields.require("hidden_act", "silu", "swish")
    return to_model(fields)


def rotary_fields(fields: Fields) -> Json:
    """The rotary fields, from transformers 5's rope_parameters or rope_theta and rope_scaling."""
    fields.require("partial_rotary_factor", None, 1.0)
    new = fields.table("rope_parameters")
    scaling = new or fields.table("rope_scaling")
    base = new.number("rope_theta") if new and "rope_theta" in new else fields.number("rope_theta")
    if scaling is None:
        return {"rotary_base": base}
    scaling.require("partial_rotary_factor", None, 1.0)
    name = "type" if "type" in scaling and "rope_type" not in scaling else "rope_type"
    known = {kind: kind for kind in ("linear", "llama3", "yarn", "dynamic")} | {"default": "none"}
    kind = scaling.choice(name, known) if name in scaling else "none"
    if kind == "none":
        return {"rotary_base": base}
    original = longest = fields.whole("max_position_embeddings")
    for table in (scaling, fields) if kind in _HIGH else ():
        if "original_max_position_embeddings" in table:
            original = table.whole("original_max_position_embeddings")
    given = "factor" in scaling or kind != "yarn"
    factor = scaling.number("factor") if given else longest / original
    found: Json = {"rotary_base": base, "rotary_scaling": kind, "rotary_factor": factor}
    if kind != "linear":
        found["rotary_original"] = original
    if kind == "llama3":
        found |= {ours: scaling.number(name) for ours, name in _OF_LLAMA3.items()}
    return found | _yarn(scaling, factor) if kind == "yarn" else found


_OF_LLAMA3 = {"rotary_low": "low_freq_factor", "rotary_high": "high_freq_factor"}
_OF_YARN = {
    "rotary_low": "beta_slow", "rotary_high": "beta_fast", "rotary_attention": "attention_factor"
}  # fmt: skip


def _yarn(scaling: Fields, factor: float) -> Json:
    from mtx.layers.rotary import yarn_scale

    found: Json = {
        "rotary_low": 1.0, "rotary_high": _HIGH["yarn"],
        "rotary_truncate": bool(scaling.get("truncate", True)),
    }  # fmt: skip
    found |= {ours: scaling.number(name) for ours, name in _OF_YARN.items() if name in scaling}
    weights = [scaling.number(name) for name in ("mscale", "mscale_all_dim") if name in scaling]
    if "rotary_attention" not in found and len(weights) == 2 and all(weights):
        found["rotary_attention"] = yarn_scale(factor, weights[0]) / yarn_scale(factor, weights[1])
    return found


def to_config(model: Llama) -> Json:
    """The values that `to_model` reads, for all families like Llama."""
    return rotary_parameters(model) | {
        "num_key_value_heads": model.groups, "head_dim": model.head_size,
        "intermediate_size": model.ffn_hidden, "hidden_act": "silu",
    }  # fmt: skip


def rotary_parameters(model: Llama) -> Json:
    """The values that `rotary_fields` reads."""
    rotary: Json = {"rope_type": "default"}
    if model.rotary_scaling != "none":
        rotary = {"rope_type": model.rotary_scaling, "factor": model.rotary_factor}
    if model.rotary_scaling in _HIGH:
        rotary["original_max_position_embeddings"] = model.rotary_original
        named = _OF_YARN if model.rotary_scaling == "yarn" else _OF_LLAMA3
        values = {name: getattr(model, ours) for ours, name in named.items()}
        values[named["rotary_high"]] = model.rotary().high
        rotary |= {name: value for name, value in values.items() if value is not None}
    if model.rotary_scaling == "yarn":
        rotary["truncate"] = model.rotary_truncate
    longest = model.rotary_original if model.rotary_scaling == "dynamic" else model.sequence
    return {
        "max_position_embeddings": longest,  # with "dynamic", the original's only place
        "rope_theta": model.rotary_base,
        "rope_scaling": None if model.rotary_scaling == "none" else dict(rotary),
        "rope_parameters": {"rope_theta": model.rotary_base, **rotary},
    }  # fmt: skip


NORMS = {
    "attention_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
}


def names(*others: Weight, norms: Mapping[str, str] = MappingProxyType(NORMS)) -> Names:
    """The table of names of a family like Llama. others: what its layers have besides Llama's."""
    return Names(
        prefix="model.",
        layer="layers.{}.",
        heads=("lm_head.",),
        shared=(
            Weight("embed.tokens", ("embed_tokens.weight",), "table"),
            Weight("head.norm.scale", ("norm.weight",)),
            Weight("head.output", ("lm_head.weight",), "table"),
        ),
        layers=(
            *(Weight(leaf, (name,)) for leaf, name in norms.items()),
            Weight("attention.qkv.q", ("self_attn.q_proj.weight",), "linear"),
            Weight(
                "attention.qkv.kv", ("self_attn.k_proj.weight", "self_attn.v_proj.weight"),
                "linear", stack=1,
            ),
            *others,
            Weight("attention.out.w", ("self_attn.o_proj.weight",), "linear", inputs=2),
            Weight("mlp.up.w", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "linear", stack=1),
            Weight("mlp.down.w", ("mlp.down_proj.weight",), "linear"),
        ),
        twins={"lm_head.weight": "embed_tokens.weight"},
        ignored=r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    )  # fmt: skip


HUGGING_FACE = (
    HuggingFace(
        model_type="llama", architecture="LlamaForCausalLM", defaults=DEFAULTS, fields=FIELDS,
        to_model=silu_to_model, to_config=to_config, names=names(),
        fixed={"attention_bias": False, "mlp_bias": False},
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------


def preset(
    model: Json, *, lr: float, global_batch: int, data: int, pipe: int, tensor: int, virtual: int,
    **layout: Any,
) -> Json:  # fmt: skip
    """A preset of a large model that recomputes attention's scores: it then fits 80 GiB everywhere,
    and saves a fifth of a step compared with recomputing all. layout: further fields of it."""
    layers = model["layers"]
    missing = -layers % (pipe * virtual) // 2  # at each end, where the embedding and the head are
    stages = (0,) * missing + (1,) * layers + (0,) * missing if missing else "even"
    return {
        "model": model,
        "layout": {
            "data": data, "pipe": pipe, "tensor": tensor, "virtual": virtual, "idle": "phases",
            "recompute": "selective", "stage_layers": stages, **layout,
        },
        "optimizer": {"lr": lr, "min_lr": lr / 10, "warmup_steps": 2000},
        "global_batch": global_batch, "steps": 500_000, "eval_every": 1000, "save_every": 1000,
    }  # fmt: skip


def presets(rows: Mapping[str, tuple], **model: Any) -> Json:
    """Presets of models of one kind, by name. rows: layers, hidden, heads, heads of keys and
    values, F, learning rate, sequences a step, data, pipe, tensor, virtual."""
    return {
        name: preset(
            {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": groups, "ffn": ffn}
            | model,
            lr=lr, global_batch=batch, data=data, pipe=pipe, tensor=tensor, virtual=virtual,
        )
        for name, (layers, hidden, heads, groups, ffn, lr, batch, data, pipe, tensor, virtual)
        in rows.items()
    }  # fmt: skip


# Sizes and rates from Touvron et al. 2023 (arXiv 2307.09288) and the Llama 3 paper (arXiv
# 2407.21783, tables 3 and 4); the layout of the 405B too; the others are ours.
PRESETS = presets(
    {
        "llama-2-7b": (32, 4096, 32, 32, 11008, 3e-4, 1024, 16, 1, 4, 1),
        "llama-2-13b": (40, 5120, 40, 40, 13824, 3e-4, 1024, 16, 1, 8, 1),
        "llama-2-70b": (80, 8192, 64, 8, 28672, 1.5e-4, 1024, 16, 4, 8, 4),
    },
    vocab=32000, sequence=4096, tied=False,
) | presets(
    {
        "llama-3-8b": (32, 4096, 32, 8, 14336, 3e-4, 512, 16, 1, 4, 1),
        "llama-3-70b": (80, 8192, 64, 8, 28672, 1.5e-4, 1024, 16, 4, 8, 4),
        "llama-3-405b": (126, 16384, 128, 8, 53248, 8e-5, 2048, 128, 16, 8, 8),
    },
    vocab=128256, sequence=8192, rotary_base=5e5, tied=False,
)  # fmt: skip
