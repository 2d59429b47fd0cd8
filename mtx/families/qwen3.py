"""Qwen3 (arXiv 2505.09388), dense: a Llama with a head size of its own, whose queries and keys are
normed, head by head, before rotary positions turn them."""

from __future__ import annotations

from dataclasses import dataclass

from mtx.families.llama import FIELDS, names, presets
from mtx.families.qwen2 import QWEN_DEFAULTS, Qwen2, windowed_to_config, windowed_to_model
from mtx.huggingface import HuggingFace, Weight


@dataclass(frozen=True, kw_only=True)
class Qwen3(Qwen2):
    """Qwen3, dense."""

    family: str = "qwen3"

    def stack(self):
        return self.windowed(norm=self.norm())


CONFIG = Qwen3

# -- Hugging Face ----------------------------------------------------------------------------------

HEAD_NORMS = (
    Weight("attention.q_norm.scale", ("self_attn.q_norm.weight",)),
    Weight("attention.k_norm.scale", ("self_attn.k_norm.weight",)),
)
HUGGING_FACE = (
    HuggingFace(
        model_type="qwen3", architecture="Qwen3ForCausalLM",
        defaults=QWEN_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128}, fields=FIELDS,
        to_model=windowed_to_model, to_config=windowed_to_config, names=names(*HEAD_NORMS),
        fixed={"attention_bias": False},
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

# Sizes from the Qwen3 report (arXiv 2505.09388, table 1) and the config.json of
# huggingface.co/Qwen/Qwen3-8B and -32B; the sequence is that of its first stages of training;
# rate and layout are ours, as for Llama 2 and 3.
PRESETS = presets(
    {
        "qwen3-8b": (36, 4096, 32, 8, 12288, 3e-4, 1024, 16, 1, 4, 1),
        "qwen3-32b": (64, 5120, 64, 8, 25600, 1.5e-4, 1024, 16, 4, 8, 4),
    },
    head_dim=128, vocab=151936, sequence=4096, rotary_base=1e6, norm_epsilon=1e-6, tied=False,
)  # fmt: skip
