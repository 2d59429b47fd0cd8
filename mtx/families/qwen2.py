"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): a Llama with biases on queries, keys and
values. Layers from `full_layers` on may see only a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from mtx.families.llama import DEFAULTS, FIELDS, Llama, names, presets, silu_to_model, to_config
from mtx.fields import Between
from mtx.huggingface import Fields, HuggingFace, Json, Weight
from mtx.sizes import Tokens


@dataclass(frozen=True, kw_only=True)
class Qwen2(Llama):
    """Qwen2 and Qwen2.5, dense."""

    family: str = "qwen2"
    window: Tokens | None = None  # positions that a position sees, itself included; None: all
    full_layers: Annotated[int, Between(0, 2**14)] = 0  # with a window: first layers without it

    def stack(self):
        return self.windowed(bias=True)

    def windowed(self, **attention: Any):
        """The stack whose layers after the first `full_layers` have the window, if there is one.
        attention: as for `attention`."""
        from mtx.layers.attend import Scores
        from mtx.layers.layer import Stack

        full = self.kind(**attention)
        window = self.kind(scores=Scores(window=self.window), **attention)
        count = 0 if self.window is None else max(0, self.layers - self.full_layers)
        if count in (0, self.layers):
            return Stack.uniform(window if count else full, self.layers, **self.edges())
        return Stack(
            kinds={"full": full, "window": window},
            pattern=("full",) * (self.layers - count) + ("window",) * count,
            **self.edges(),
        )


CONFIG = Qwen2

# -- Hugging Face ----------------------------------------------------------------------------------

QWEN_DEFAULTS = DEFAULTS | {
    "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip


def windowed_to_model(fields: Fields) -> Json:
    """The fields of a Qwen2 or Qwen3. Its layers have a window from max_window_layers on, unless
    layer_types says which do."""
    model = silu_to_model(fields)
    window = None
    if fields.get("use_sliding_window") and "sliding_window" in fields:
        window = fields.whole("sliding_window")
    full = layers = fields.whole("num_hidden_layers")
    if window is not None:
        full = min(full, fields.whole("max_window_layers", least=0))
    types = fields.get("layer_types")
    if types is not None:
        if window is not None and isinstance(types, list):
            full = types.count("full_attention")
        if types != _layer_types(layers, full):
            raise fields.refused(
                "layer_types", f"{full} of 'full_attention' and then those with a window"
            )
    return model if full == layers else model | {"window": window, "full_layers": full}


def _layer_types(layers: int, full: int) -> list[str]:
    return ["full_attention"] * full + ["sliding_attention"] * (layers - full)


def windowed_to_config(model: Qwen2) -> Json:
    full = model.layers if model.window is None else min(model.full_layers, model.layers)
    return to_config(model) | {
        "use_sliding_window": full < model.layers, "sliding_window": model.window,
        "max_window_layers": full, "layer_types": _layer_types(model.layers, full),
    }  # fmt: skip


_BIASES = (
    Weight("attention.qkv.q_bias", ("self_attn.q_proj.bias",)),
    Weight("attention.qkv.kv_bias", ("self_attn.k_proj.bias", "self_attn.v_proj.bias"), stack=0),
)
HUGGING_FACE = (
    HuggingFace(
        model_type="qwen2", architecture="Qwen2ForCausalLM",
        defaults=QWEN_DEFAULTS | {"num_key_value_heads": 32}, fields=FIELDS,
        to_model=windowed_to_model, to_config=windowed_to_config, names=names(*_BIASES),
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

# Sizes from the Qwen2.5 report (arXiv 2412.15115, table 1) and the config.json of
# huggingface.co/Qwen/Qwen2.5-7B and -72B; the sequence is that of its first phase of training; rate
# and layout are ours, as for Llama 2 and 3.
PRESETS = presets(
    {
        "qwen2.5-7b": (28, 3584, 28, 4, 18944, 3e-4, 1024, 16, 1, 4, 1),
        "qwen2.5-72b": (80, 8192, 64, 8, 29568, 1.5e-4, 1024, 16, 4, 8, 4),
    },
    vocab=152064, sequence=4096, rotary_base=1e6, norm_epsilon=1e-6, tied=False,
)  # fmt: skip
