"""Gemma 2 (arXiv 2408.00118): layers that see a window alternate with layers that see everything;
norms before and after each sublayer, GELU in a gated MLP, soft caps on scores and logits, a head
size of its own, and an embedding scaled by the square root of the hidden size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mtx.families.llama import DEFAULTS, FIELDS, Llama, names, preset, to_config, to_model
from mtx.fields import require_above
from mtx.huggingface import Fields, HuggingFace, Json
from mtx.sizes import NotNegative, Tokens, Width


@dataclass(frozen=True, kw_only=True)
class Gemma2(Llama):
    """Gemma 2."""

    family: str = "gemma2"
    norm_epsilon: float = 1e-6
    head_dim: Width = 256
    window: Tokens = 4096  # positions that a position sees in every other layer, from the first
    score_scale: float = 256.0  # products of queries and keys are divided by the root of this
    score_cap: NotNegative = 50.0  # scores become cap tanh(score / cap); 0: no cap
    logit_cap: NotNegative = 30.0  # the same for logits

    def check(self) -> None:
        super().check()
        require_above(self, 0, "score_scale")

    def norm(self):
        return replace(super().norm(), offset=1.0)

    def stack(self):
        from mtx.layers.attend import Scores
        from mtx.layers.layer import Stack
        from mtx.layers.mlp import MLP

        mlp = MLP(ffn=self.ffn_hidden, activation="gelu_tanh", gated=True, bias=False)

        def kind(window: int | None):
            scale = 1 / math.sqrt(self.score_scale)
            scores = Scores(window=window, scale=scale, softcap=self.score_cap or None)
            return replace(
                self.kind(),
                sublayers=(("attention", self.attention(scores=scores)), ("mlp", mlp)),
                norm_placement="both",
            )

        edges = self.edges()
        edges["embedding"] = replace(edges["embedding"], scale=math.sqrt(self.hidden))
        edges["head"] = replace(edges["head"], softcap=self.logit_cap or None)
        kinds = {"window": kind(self.window), "full": kind(None)}
        pattern = tuple("full" if layer % 2 else "window" for layer in range(self.layers))
        return Stack(kinds=kinds, pattern=pattern, **edges)


CONFIG = Gemma2

# -- Hugging Face ----------------------------------------------------------------------------------

_NORMS = {
    "attention_norm.scale": "input_layernorm.weight",
    "attention_post_norm.scale": "post_attention_layernorm.weight",
    "mlp_norm.scale": "pre_feedforward_layernorm.weight",
    "mlp_post_norm.scale": "post_feedforward_layernorm.weight",
}
_CAPS = {"score_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}


def _to_model(fields: Fields) -> Json:
    fields.require("hidden_activation", "gelu_pytorch_tanh", "gelu_new")
    fields.require("use_bidirectional_attention", None, False)
    model = to_model(fields)
    fields.require("layer_types", None, _layer_types(fields.whole("num_hidden_layers")))
    for ours, theirs in _CAPS.items():
        model[ours] = fields.number(theirs) if theirs in fields else 0.0
        if theirs in fields and not model[ours] > 0:
            raise fields.refused(theirs, "above 0, or null for none")
    return model | {
        "head_dim": fields.whole("head_dim"), "window": fields.whole("sliding_window"),
        "score_scale": fields.number("query_pre_attn_scalar"),
    }  # fmt: skip


def _layer_types(layers: int) -> list[str]:
    names = "sliding_attention", "full_attention"
    return [names[layer % 2] for layer in range(layers)]


def _to_config(model: Gemma2) -> Json:
    scale = model.score_scale  # in config.json, a whole number
    return to_config(model) | {
        "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": model.window, "layer_types": _layer_types(model.layers),
        "query_pre_attn_scalar": int(scale) if scale == int(scale) else scale,
        **{theirs: getattr(model, ours) or None for ours, theirs in _CAPS.items()},
    }  # fmt: skip


HUGGING_FACE = (
    HuggingFace(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        defaults=DEFAULTS | {
            "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
            "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
            "sliding_window": 4096, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
        },
        fixed={"attention_bias": False},
        fields=FIELDS,
        to_model=_to_model,
        to_config=_to_config,
        names=names(norms=_NORMS),
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

# Sizes from the Gemma 2 report (arXiv 2408.00118, table 1) and the config.json of
# huggingface.co/google/gemma-2-9b and -27b; rate and layout are ours, as for Llama 3.
PRESETS = {
    "gemma-2-9b": preset(
        {"layers": 42, "hidden": 3584, "heads": 16, "kv_heads": 8, "head_dim": 256, "ffn": 14336,
         "vocab": 256000, "sequence": 8192},
        lr=3e-4, global_batch=512, data=16, pipe=1, tensor=8, virtual=1,
    ),
    "gemma-2-27b": preset(
        {"layers": 46, "hidden": 4608, "heads": 32, "kv_heads": 16, "head_dim": 128, "ffn": 36864,
         "vocab": 256000, "sequence": 8192, "score_scale": 144.0},
        lr=1.5e-4, global_batch=512, data=16, pipe=2, tensor=8, virtual=1,
    ),
}  # fmt: skip
