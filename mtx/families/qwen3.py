"""Qwen3 (arXiv 2505.09388), dense: a Llama whose heads have a size of their own, and whose queries
and keys are normed, each head by itself, before they are turned."""

from __future__ import annotations

from dataclasses import dataclass

from mtx.families.llama import FIELDS, names, preset
from mtx.families.qwen2 import (
    QWEN_DEFAULTS,
    Qwen2,
    windowed_after,
    windowed_to_config,
    windowed_to_model,
)
from mtx.huggingface import HuggingFace, Weight


@dataclass(frozen=True, kw_only=True)
class Qwen3(Qwen2):
    """Qwen3, dense."""

    family: str = "qwen3"

    def stack(self):
        return windowed_after(self, self.full_layers, norm=self.norm())


CONFIG = Qwen3

# -- Hugging Face ----------------------------------------------------------------------------------

_NORMS = (
    Weight("attention.q_norm.scale", ("self_attn.q_norm.weight",)),
    Weight("attention.k_norm.scale", ("self_attn.k_norm.weight",)),
)
HUGGING_FACE = (
    HuggingFace(
        model_type="qwen3", architecture="Qwen3ForCausalLM",
        defaults=QWEN_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128}, fields=FIELDS,
        to_model=windowed_to_model, to_config=windowed_to_config, names=names(*_NORMS),
        fixed={"attention_bias": False},
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

# Sizes from the Qwen3 report (arXiv 2505.09388, table 1) and the config.json of
# huggingface.co/Qwen/Qwen3-8B and -32B; the sequence is that of its first stages of training, rate
# and layout are ours, as of Llama 2 and 3.
_QWEN3 = {
    "head_dim": 128, "vocab": 151936, "sequence": 4096, "rotary_base": 1e6, "norm_epsilon": 1e-6,
    "tied": False,
}  # fmt: skip
PRESETS = {
    "qwen3-8b": preset(
        {"layers": 36, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 12288, **_QWEN3},
        lr=3e-4, global_batch=1024, data=16, pipe=1, tensor=4, virtual=1,
    ),
    "qwen3-32b": preset(
        {"layers": 64, "hidden": 5120, "heads": 64, "kv_heads": 8, "ffn": 25600, **_QWEN3},
        lr=1.5e-4, global_batch=1024, data=16, pipe=4, tensor=8, virtual=4,
    ),
}  # fmt: skip
