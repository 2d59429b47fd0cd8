"""Granite 4 (IBM 2025): each layer is a Mamba-2 mixer, or attention, followed by a gated MLP that
all tokens go through and, in some models, a mixture of experts beside it; with Granite's factors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from mtx.families.bamba import (
    MIXER_DEFAULTS,
    MIXER_FIELDS,
    has_config,
    mixer_to_config,
    mixer_to_model,
)
from mtx.families.granite import FACTORS, Granite, factors_to_config, factors_to_model
from mtx.families.llama import DEFAULTS, FIELDS, Llama, names, preset, rotary_fields
from mtx.families.llama import to_config as llama_to_config
from mtx.families.mamba2 import mixer_names
from mtx.families.mixtral import Mixtral
from mtx.families.nemotron_h import ATTENTION, MIXER, NemotronH
from mtx.fields import Between
from mtx.huggingface import Fields, Form, HuggingFace, Json, Weight, ffn_field

Positions = Literal["none", "rotary"]


@dataclass(frozen=True, kw_only=True)
class GraniteHybrid(Granite, NemotronH, Mixtral):
    """Granite 4. `ffn` is of the MLP that all tokens go through, `expert_ffn` of an expert."""

    family: str = "granite_hybrid"
    pattern: str = "MM*M"  # as for Nemotron-H, but with M and * only
    positions: Positions = "none"  # of attention
    experts: Annotated[int, Between(0, 2**20)] = 0  # E, experts of a layer; 0: none

    def check(self) -> None:
        super().check()
        if self.positions == "rotary":
            Llama.check(self)
        if self.experts:
            self.check_experts()

    @property
    def symbols(self) -> str:
        return MIXER + ATTENTION

    @property
    def split_widths(self) -> dict[str, int]:
        of_experts = {"expert_ffn": self.expert_width} if self.experts else {}
        return super().split_widths | of_experts

    def rotary(self):
        return super().rotary() if self.positions == "rotary" else None

    def kinds(self) -> Json:
        from mtx.layers.mlp import MLP

        mlp = MLP(ffn=self.ffn_hidden, activation="silu", gated=True, bias=False)
        after = self.mixture(shared=mlp) if self.experts else mlp
        return {
            MIXER: ("mamba", self.kind(mamba=self.mixer(), mlp=after)),
            ATTENTION: ("attention", self.kind(attention=self.attention(), mlp=after)),
        }


CONFIG = GraniteHybrid

# -- Hugging Face ----------------------------------------------------------------------------------

# As published, and as transformers 5 has it.
_TYPES = {
    "mamba": MIXER, "attention": ATTENTION,
    "linear_attention": MIXER, "full_attention": ATTENTION,
}  # fmt: skip
_POSITIONS = {"none": "nope", "rotary": "rope"}


def _pattern(fields: Fields) -> str:
    name = "layer_types" if "layer_types" in fields else "layers_block_type"
    layers = fields.whole("num_hidden_layers")
    found = fields.get(name) or ["mamba"] * layers
    named = isinstance(found, list) and set(map(str, found)) <= set(_TYPES)
    if not named or len(found) != layers:
        raise fields.refused(name, f"one of {', '.join(_TYPES)} for each of {layers} layers")
    return "".join(_TYPES[each] for each in found)


def _to_model(fields: Fields) -> Json:
    fields.require("hidden_act", "silu", "swish")
    fields.require("position_embedding_type", None, *_POSITIONS.values())
    positions = "rotary" if fields.get("position_embedding_type") == "rope" else "none"
    given = "num_key_value_heads" in fields
    groups = fields.whole("num_key_value_heads" if given else "num_attention_heads")
    experts = fields.whole("num_local_experts", least=0) if "num_local_experts" in fields else 0
    of_experts = {
        "experts": experts, "choices": fields.whole("num_experts_per_tok"),
        "expert_ffn": fields.whole("intermediate_size"),
        "aux_weight": fields.number("router_aux_loss_coef"),
    }  # fmt: skip
    return {
        "pattern": _pattern(fields), "positions": positions, "kv_heads": groups,
        **mixer_to_model(fields), **ffn_field(fields, "shared_intermediate_size", "hidden_size"),
        **(of_experts if experts else {}), **factors_to_model(fields),
        **(rotary_fields(fields) if positions == "rotary" else {}),
    }  # fmt: skip


def _to_config(model: GraniteHybrid) -> Json:
    kinds = {symbol: name for name, symbol in reversed(_TYPES.items())}
    rotary = llama_to_config(model) if model.positions == "rotary" else {}
    return rotary | factors_to_config(model) | {
        "layer_types": [kinds[symbol] for symbol in model.layer_symbols],
        "position_embedding_type": _POSITIONS[model.positions],
        "num_key_value_heads": model.groups, "hidden_act": "silu",
        "num_local_experts": model.experts, "num_experts_per_tok": model.choices,
        "router_aux_loss_coef": model.aux_weight, "intermediate_size": model.expert_width,
        "shared_intermediate_size": model.ffn_hidden, **mixer_to_config(model),
    }  # fmt: skip


def _linear(leaf: str, name: str, form: Form = "linear") -> Weight:
    return Weight(leaf, (f"{name}.weight",), form)


_LLAMA = names()
_NAMES = replace(
    _LLAMA,
    layers=(
        *(weight for weight in _LLAMA.layers if weight.leaf not in ("mlp.up.w", "mlp.down.w")),
        Weight("mamba_norm.scale", ("input_layernorm.weight",)),
        *mixer_names("mamba"),
        _linear("mlp.router.w", "block_sparse_moe.router.layer"),
        Weight("mlp.router.load", ()),
        _linear("mlp.up", "block_sparse_moe.input_linear", "linears"),
        _linear("mlp.down", "block_sparse_moe.output_linear", "linears"),
        *(
            _linear(f"{leaf}.{part}.w", f"shared_mlp.{name}_linear")
            for leaf in ("mlp", "mlp.shared")
            for part, name in (("up", "input"), ("down", "output"))
        ),
    ),
)
HUGGING_FACE = (
    HuggingFace(
        model_type="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        defaults=DEFAULTS | MIXER_DEFAULTS | dict.fromkeys(FACTORS.values(), 1.0) | {
            "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
            "shared_intermediate_size": 1024,
        },
        fixed={"attention_bias": False, "mamba_conv_bias": True, "mamba_proj_bias": False},
        fields=FIELDS | MIXER_FIELDS,
        to_model=_to_model,
        to_config=_to_config,
        names=_NAMES,
        has=has_config,
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

# Sizes and factors from the config.json of huggingface.co/ibm-granite/granite-4.0-h-tiny-base and
# -h-small-base; rate and layout are ours, with a layer's experts in one node. Plain: compiled for
# H100s by jax 0.12, a step of the small one takes 9.2 s and 51 GiB, woven 9.7 s and 58 GiB.
_4 = {
    "layers": 40, "pattern": f"{'M' * 5}*{'M' * 9}*{'M' * 9}*{'M' * 9}*{'M' * 4}", "vocab": 100352,
    "sequence": 4096, "tied": True, "embedding_scale": 12.0, "attention_scale": 1 / 128,
    "residual_scale": 0.22,
}  # fmt: skip
PRESETS = {
    "granite-4-tiny": preset(
        _4 | {"hidden": 1536, "heads": 12, "kv_heads": 4, "ffn": 1024, "ssm_heads": 48,
              "experts": 64, "choices": 6, "expert_ffn": 512, "logit_divisor": 6.0},
        lr=3e-4, global_batch=1024, data=8, pipe=1, tensor=1, virtual=1, expert=8, weave="off",
    ),
    "granite-4-small": preset(
        _4 | {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 1536, "ssm_heads": 128,
              "experts": 72, "choices": 10, "expert_ffn": 768, "logit_divisor": 16.0},
        lr=3e-4, global_batch=1024, data=8, pipe=2, tensor=1, virtual=2, expert=8, weave="off",
    ),
}  # fmt: skip
