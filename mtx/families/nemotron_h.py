"""Nemotron-H (arXiv 2504.03624) and the Mamba-2-Hybrid that it comes from (Waleffe et al. 2024,
arXiv 2406.07887): each layer is one sublayer, a Mamba-2 mixer, attention without positions, or an
MLP with the square of ReLU."""

from __future__ import annotations

from dataclasses import dataclass

from mtx.errors import UserError, shown
from mtx.families import ModelConfig, check_groups
from mtx.families.llama import preset
from mtx.families.mamba2 import Mamba2, mixer_names
from mtx.huggingface import Fields, HuggingFace, Json, Names, Weight, ffn_field
from mtx.sizes import Width

MIXER, ATTENTION, MLP = "M", "*", "-"


def allocate(layers: int, attention: int, mlp: int) -> str:
    """A pattern of `layers` layers: `attention` layers of attention and `mlp` MLPs among mixers,
    each spread evenly by Megatron-LM's rule for hybrids: attention between mixers, then MLPs in
    place of mixers, the last MLP at the end."""

    def spread(symbols: list[str], symbol: str, between: float) -> None:
        """Replaces mixers by `symbol`, one after every `between` mixers that stay."""
        left = between
        for layer in [layer for layer, found in enumerate(symbols) if found == MIXER]:
            if left < 0.5:
                symbols[layer], left = symbol, left + between
            else:
                left -= 1

    symbols, mixers = [MIXER] * layers, layers - attention
    if attention:
        spread(symbols, ATTENTION, mixers / (attention + 1))
    if mlp:
        spread(symbols, MLP, (mixers - mlp) / mlp)
    return "".join(symbols)


@dataclass(frozen=True, kw_only=True)
class NemotronH(Mamba2):
    """Nemotron-H. `heads` are those of attention."""

    family: str = "nemotron_h"
    # the layers: M a mixer, * attention, - an MLP; repeated if there are more layers
    pattern: str = "M-M*-M-"
    kv_heads: Width | None = None  # G, heads of keys and values; None: as many as `heads`
    head_dim: Width | None = None  # K of attention; None: hidden / heads
    ssm_heads: Width = 8  # heads of a mixer; hidden * 2 / ssm_head_dim as published

    def check(self) -> None:
        super().check()
        if not self.pattern or not set(self.pattern) <= set(self.symbols):
            raise UserError(
                f"pattern={shown(self.pattern)} must be made of {' '.join(self.symbols)}, a layer "
                f"each; use pattern={type(self).pattern!r}"
            )
        if len(self.pattern) > self.layers:
            raise UserError(
                f"pattern={shown(self.pattern)} has {len(self.pattern)} layers, and layers="
                f"{self.layers}; use layers={len(self.pattern)}, or a shorter pattern"
            )
        if self.head_dim is None:
            ModelConfig.check(self)
        check_groups(self)

    @property
    def symbols(self) -> str:
        """The symbols that a pattern may have."""
        return MIXER + ATTENTION + MLP

    @property
    def mixer_heads(self) -> int:
        return self.ssm_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or super().head_size

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    @property
    def split_widths(self) -> dict[str, int]:
        return super().split_widths | {"ffn_hidden": self.ffn_hidden, "ssm_heads": self.ssm_heads}

    @property
    def repeated_widths(self) -> dict[str, int]:
        return super().repeated_widths | {"kv_heads": self.groups}

    # -- what it is made of ------------------------------------------------------------------------

    @property
    def layer_symbols(self) -> str:
        """The symbol of each layer."""
        return (self.pattern * -(-self.layers // len(self.pattern)))[: self.layers]

    def kinds(self) -> Json:
        """For each symbol, the name and the kind of its layers."""
        from mtx.layers.attention import Attention
        from mtx.layers.mlp import MLP as Mlp

        attention = Attention(
            heads=self.heads, groups=self.groups, size=self.head_size,
            dropout=self.attention_dropout,
        )  # fmt: skip
        mlp = Mlp(ffn=self.ffn_hidden, activation="relu2", bias=False)
        return {
            MIXER: ("mamba", self.kind(mamba=self.mixer())),
            ATTENTION: ("attention", self.kind(attention=attention)),
            MLP: ("mlp", self.kind(mlp=mlp)),
        }

    def stack(self):
        from mtx.layers.layer import Stack

        kinds, symbols = self.kinds(), self.layer_symbols
        return Stack(
            kinds={name: kind for symbol, (name, kind) in kinds.items() if symbol in symbols},
            pattern=tuple(kinds[symbol][0] for symbol in symbols), **self.edges(),
        )  # fmt: skip


CONFIG = NemotronH

# -- Hugging Face ----------------------------------------------------------------------------------

_TYPES = {MIXER: "linear_attention", ATTENTION: "full_attention", MLP: "mlp"}
_SYMBOLS = {name: symbol for symbol, name in _TYPES.items()} | {"mamba": MIXER, "attention": "*"}


def _pattern(fields: Fields) -> Json:
    """The pattern in layers_block_type or, in older files, hybrid_override_pattern."""
    name = "layers_block_type" if "layers_block_type" in fields else "hybrid_override_pattern"
    found = fields.get(name) or ()
    symbols = [_SYMBOLS.get(each, str(each)) for each in found]
    if not symbols or not set(symbols) <= set(_TYPES):
        raise fields.refused(name, f"of {', '.join(_TYPES.values())}")
    return {"pattern": "".join(symbols), "layers": len(symbols)}


def _to_model(fields: Fields) -> Json:
    fields.require("mamba_hidden_act", "silu", "swish")
    fields.require("mlp_hidden_act", "relu2")
    return {
        **_pattern(fields), "least_dt": fields.number("time_step_min"),
        **ffn_field(fields, "intermediate_size", "hidden_size"),
    }  # fmt: skip


def _to_config(model: NemotronH) -> Json:
    return {
        "layers_block_type": [_TYPES[symbol] for symbol in model.layer_symbols],
        "num_key_value_heads": model.groups, "head_dim": model.head_size,
        "intermediate_size": model.ffn_hidden, "time_step_min": model.least_dt,
        "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2",
    }  # fmt: skip


HUGGING_FACE = (
    HuggingFace(
        model_type="nemotron_h",
        architecture="NemotronHForCausalLM",
        defaults={
            "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 4096, "attention_dropout": 0.0, "mlp_hidden_act": "relu2",
            "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
            "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001,
            "chunk_size": 128, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False, "hidden_dropout": 0.0,
        },
        fixed={
            "attention_bias": False, "mlp_bias": False, "use_bias": False,
            "mamba_proj_bias": False, "use_conv_bias": True, "num_nextn_predict_layers": 0,
            "sliding_window": None,
        },
        fields={
            "hidden": "hidden_size", "heads": "num_attention_heads",
            "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
            "sequence": "max_position_embeddings", "vocab": "vocab_size",
            "tied": "tie_word_embeddings", "dropout": "hidden_dropout",
            "attention_dropout": "attention_dropout", "init_std": "initializer_range",
            "norm_epsilon": "layer_norm_epsilon", "ssm_heads": "mamba_num_heads",
            "ssm_head_dim": "mamba_head_dim", "ssm_state": "ssm_state_size",
            "ssm_groups": "n_groups", "ssm_chunk": "chunk_size", "conv_width": "conv_kernel",
        },
        to_model=_to_model,
        to_config=_to_config,
        names=Names(
            prefix="backbone.",
            layer="layers.{}.",
            heads=("lm_head.",),
            shared=(
                Weight("embed.tokens", ("embeddings.weight",), "table"),
                Weight("head.norm.scale", ("norm_f.weight",)),
                Weight("head.output", ("lm_head.weight",), "table"),
            ),
            layers=(
                *(Weight(f"{name}_norm.scale", ("norm.weight",))
                  for name in ("mamba", "attention", "mlp")),
                *mixer_names("mixer"),
                Weight("attention.qkv.q", ("mixer.q_proj.weight",), "linear"),
                Weight(
                    "attention.qkv.kv", ("mixer.k_proj.weight", "mixer.v_proj.weight"), "linear",
                    stack=1,
                ),
                Weight("attention.out.w", ("mixer.o_proj.weight",), "linear", inputs=2),
                Weight("mlp.up.w", ("mixer.up_proj.weight",), "linear"),
                Weight("mlp.down.w", ("mixer.down_proj.weight",), "linear"),
            ),
        ),
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

# Sizes from Waleffe et al. 2024 (24 mixers, 4 layers of attention, 28 MLPs; the examples/mamba of
# Megatron-LM) and, with the pattern, from the config.json of huggingface.co/nvidia/
# Nemotron-H-8B-Base-8K; the layouts are ours, as is the squared ReLU of the former's MLPs.
PRESETS = {
    "mamba2-hybrid-8b": preset(
        {"layers": 56, "pattern": allocate(56, 4, 28), "hidden": 4096, "heads": 32, "kv_heads": 8,
         "ssm_heads": 128, "ssm_groups": 8, "vocab": 256000, "sequence": 4096, "tied": False},
        lr=2.5e-4, global_batch=1024, data=32, pipe=1, tensor=4, virtual=1,
    ),
    "nemotron-h-8b": preset(
        {"layers": 52, "pattern": f"{'M-' * 3}M*-{'M-' * 4}M*-{'M-' * 4}M*-{'M-' * 4}M*-{'M-' * 5}",
         "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 21504, "ssm_heads": 128,
         "ssm_groups": 8, "ssm_chunk": 128, "least_dt": 0.001, "vocab": 131072, "sequence": 8192,
         "tied": False},
        lr=8e-4, global_batch=768, data=32, pipe=1, tensor=8, virtual=1,
    ),
}  # fmt: skip
