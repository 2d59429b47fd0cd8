"""Granite 3 (IBM 2024): a Llama with constant factors, as in muP (Yang et al. 2022), on embeddings,
attention scores, what each sublayer adds, and logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mtx.families.llama import DEFAULTS, FIELDS, Llama, names, preset, silu_to_model, to_config
from mtx.fields import require_above
from mtx.huggingface import Fields, HuggingFace, Json


@dataclass(frozen=True, kw_only=True)
class Granite(Llama):
    """Granite 3."""

    family: str = "granite"
    embedding_scale: float = 1.0  # multiplies the tokens' embeddings
    attention_scale: float | None = None  # multiplies products of queries and keys; None: 1/sqrt(K)
    residual_scale: float = 1.0  # multiplies what attention and MLP add to the residual stream
    logit_divisor: float = 1.0  # divides the logits

    def check(self) -> None:
        super().check()
        require_above(self, 0, "embedding_scale", "residual_scale", "logit_divisor")
        if self.attention_scale is not None:
            require_above(self, 0, "attention_scale")

    def attention(self, **others: Any):
        from mtx.layers.attend import Scores

        return super().attention(scores=Scores(scale=self.attention_scale), **others)

    def kind(self, **others: Any):
        return replace(super().kind(**others), residual_scale=self.residual_scale)

    def edges(self) -> dict[str, Any]:
        edges = super().edges()
        return {
            "embedding": replace(edges["embedding"], scale=self.embedding_scale),
            "head": replace(edges["head"], scale=1 / self.logit_divisor),
        }


CONFIG = Granite

# -- Hugging Face ----------------------------------------------------------------------------------

FACTORS = {
    "embedding_scale": "embedding_multiplier", "attention_scale": "attention_multiplier",
    "residual_scale": "residual_multiplier", "logit_divisor": "logits_scaling",
}  # fmt: skip


def factors_to_model(fields: Fields) -> Json:
    return {ours: fields.number(theirs) for ours, theirs in FACTORS.items()}


def factors_to_config(model: Granite) -> Json:
    factors = {theirs: getattr(model, ours) for ours, theirs in FACTORS.items()}
    if model.attention_scale is None:
        factors["attention_multiplier"] = model.head_size**-0.5
    return factors


HUGGING_FACE = (
    HuggingFace(
        model_type="granite",
        architecture="GraniteForCausalLM",
        defaults=DEFAULTS | dict.fromkeys(FACTORS.values(), 1.0),
        fixed={"attention_bias": False, "mlp_bias": False},
        fields=FIELDS,
        to_model=lambda fields: silu_to_model(fields) | factors_to_model(fields),
        to_config=lambda model: to_config(model) | factors_to_config(model),
        names=names(),
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

# Sizes and factors from the config.json of huggingface.co/ibm-granite/granite-3.0-2b-base and
# -8b-base; how long they warmed up is not published: rate and layout are ours, as for llama-3-8b.
_3 = {
    "layers": 40, "heads": 32, "kv_heads": 8, "vocab": 49155, "sequence": 4096, "tied": True,
    "embedding_scale": 12.0, "residual_scale": 0.22,
}  # fmt: skip
_HOW = {"lr": 3e-4, "global_batch": 1024, "data": 16, "pipe": 1, "virtual": 1}
PRESETS = {
    "granite-3-2b": preset(
        _3 | {"hidden": 2048, "ffn": 8192, "attention_scale": 1 / 64, "logit_divisor": 8.0},
        tensor=2, **_HOW,
    ),
    "granite-3-8b": preset(
        _3 | {"hidden": 4096, "ffn": 12800, "attention_scale": 1 / 128, "logit_divisor": 16.0},
        tensor=4, **_HOW,
    ),
}  # fmt: skip
