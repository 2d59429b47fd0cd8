"""Mistral (Jiang et al. 2023, arXiv 2310.06825): a Llama whose attention sees a window of the last
positions."""

from __future__ import annotations

from dataclasses import dataclass

from mtx.families.llama import DEFAULTS, FIELDS, Llama, names, preset, silu_to_model, to_config
from mtx.huggingface import Fields, HuggingFace, Json
from mtx.sizes import Tokens


@dataclass(frozen=True, kw_only=True)
class Mistral(Llama):
    """Mistral 7B and its kin."""

    family: str = "mistral"
    window: Tokens | None = None  # positions that a position sees, itself included; None: all

    def stack(self):
        from mtx.layers.attend import Scores
        from mtx.layers.layer import Stack

        kind = self.kind(scores=Scores(window=self.window))
        return Stack.uniform(kind, self.layers, **self.edges())


CONFIG = Mistral

# -- Hugging Face ----------------------------------------------------------------------------------


def _to_model(fields: Fields) -> Json:
    fields.require("layer_types", None)
    window = fields.whole("sliding_window") if "sliding_window" in fields else None
    return silu_to_model(fields) | {"window": window}


HUGGING_FACE = (
    HuggingFace(
        model_type="mistral",
        architecture="MistralForCausalLM",
        defaults=DEFAULTS | {
            "intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096,
            "max_position_embeddings": 4096 * 32,
        },
        fields=FIELDS,
        to_model=_to_model,
        to_config=lambda model: to_config(model) | {"sliding_window": model.window},
        names=names(),
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

_7B = {
    "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "tied": False
}  # fmt: skip
_HOW = {
    "lr": 3e-4, "global_batch": 512, "data": 16, "pipe": 1, "tensor": 4, "virtual": 1
}  # fmt: skip
# Sizes from Jiang et al. 2023, table 1, and from the config.json of
# huggingface.co/mistralai/Mistral-7B-v0.3; how it was trained is not published: rate and layout
# are ours, as for llama-3-8b.
PRESETS = {
    "mistral-7b-v0.1": preset(_7B | {"vocab": 32000, "sequence": 8192, "window": 4096}, **_HOW),
    "mistral-7b-v0.3": preset(
        _7B | {"vocab": 32768, "sequence": 8192, "rotary_base": 1e6}, **_HOW
    ),
}  # fmt: skip
