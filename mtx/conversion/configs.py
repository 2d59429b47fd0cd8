"""Hugging Face's config.json to our ModelConfig and back.

What a config asks for and our models do not have is refused by the name that it has there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mtx.config import ModelConfig
from mtx.conversion.names import BERT, GPT2, LLAMA, MEGATRON_BERT, Names
from mtx.errors import UserError, shown, unknown_name
from mtx.fields import checked
from mtx.sizes import Step

Json = dict[str, Any]
_GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh", "gelu": "erf"}
_MISSING = object()


class Fields:
    """The values of a config.json, with the defaults of transformers, which does not write them."""

    def __init__(self, values: Json, defaults: Json, where: str):
        self._values = defaults | values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def whole(self, name: str) -> int:
        """A whole number of at least 1."""
        return checked(f"{self.where}: {name}", self._values.get(name), Step)

    def number(self, name: str) -> float:
        return float(checked(f"{self.where}: {name}", self._values.get(name), float))

    def require(self, name: str, *allowed: Any) -> None:
        """UserError where it has another value; one that is not there is none."""
        value = self._values.get(name, _MISSING)
        if value is not _MISSING and value not in allowed:
            raise UserError(
                f"{self.where}: {name}={shown(value)} is not in our models; "
                f"{'it has' if len(allowed) == 1 else 'one of them has'} "
                f"to be {' or '.join(map(repr, allowed))}"
            )

    def choice(self, name: str, choices: Mapping[str, str]) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or value not in choices:
            raise UserError(
                f"{self.where}: {name}={shown(value)} is not in our models; they have "
                f"{', '.join(choices)}"
            )
        return choices[value]

    def table(self, name: str) -> Fields | None:
        """A table within it."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise UserError(f"{self.where}: {name}={shown(value)} must be a table")
        return Fields(value, {}, f"{self.where}: {name}")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What transformers calls a model type."""

    names: Names
    defaults: Json
    to_model: Callable[[Fields], Json]  # fields of ModelConfig
    to_config: Callable[[ModelConfig], Json]
    architecture: str  # of a whole model


def model_of(config: Json, where: str) -> ModelConfig:
    """The model that a config.json describes, for float32; UserError for one that is not ours.
    `where` begins the errors."""
    kind = kind_of(config, where)
    fields = Fields(config, kind.defaults, where)
    fields.require("quantization_config", None)
    fields.require("add_cross_attention", False)
    fields.require("is_decoder", False) if kind.names in (BERT, MEGATRON_BERT) else None
    values = kind.to_model(fields)
    try:
        return ModelConfig(compute_dtype="float32", **values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def kind_of(config: Json, where: str) -> Kind:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in KINDS:
        raise UserError(f"{where}: {unknown_name('model_type', str(model_type), KINDS)}")
    return KINDS[model_type]


def model_type_of(model: ModelConfig) -> str:
    """The model type of one of ours."""
    if model.family == "bert":
        return "bert" if model.norm_placement == "post" else "megatron-bert"
    return {"gpt": "gpt2", "llama": "llama"}[model.family]


def config_of(model: ModelConfig) -> Json:
    """The config.json of a whole model, without its dtype."""
    model_type = model_type_of(model)
    kind = KINDS[model_type]
    return {
        "model_type": model_type, "architectures": [kind.architecture],
        "vocab_size": model.vocab, "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied, **kind.to_config(model),
    }  # fmt: skip


def _ffn(fields: Fields, name: str, hidden: int) -> Json:
    """A size of the MLP, as a multiple of the hidden size where it is one."""
    size = fields.whole(name)
    if size % hidden:
        return {"ffn": size}
    return {"ffn_multiple": size // hidden}


# --- GPT-2 ----------------------------------------------------------------------------------------

_GPT2_DEFAULTS = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_inner": None, "activation_function": "gelu_new", "resid_pdrop": 0.1, "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True,
}  # fmt: skip


def _gpt2_model(fields: Fields) -> Json:
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    hidden = fields.whole("n_embd")
    return {
        "family": "gpt", "layers": fields.whole("n_layer"), "hidden": hidden,
        "heads": fields.whole("n_head"), "sequence": fields.whole("n_positions"),
        "vocab": fields.whole("vocab_size"),
        **(_ffn(fields, "n_inner", hidden) if "n_inner" in fields else {}),
        "tied": bool(fields.get("tie_word_embeddings")),
        "dropout": fields.number("resid_pdrop"), "attention_dropout": fields.number("attn_pdrop"),
        "init_std": fields.number("initializer_range"),
        "norm_epsilon": fields.number("layer_norm_epsilon"),
        "gelu": fields.choice("activation_function", _GELU),
    }  # fmt: skip


def _gpt2_config(model: ModelConfig) -> Json:
    return {
        "n_layer": model.layers, "n_embd": model.hidden, "n_head": model.heads,
        "n_positions": model.sequence, "n_ctx": model.sequence,
        "n_inner": None if model.ffn_hidden == 4 * model.hidden else model.ffn_hidden,
        "activation_function": "gelu_new" if model.gelu == "tanh" else "gelu",
        "resid_pdrop": model.dropout, "embd_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout, "layer_norm_epsilon": model.norm_epsilon,
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    }  # fmt: skip


# --- Llama ----------------------------------------------------------------------------------------

_LLAMA_DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_dropout": 0.0,
    "initializer_range": 0.02, "tie_word_embeddings": False,
}  # fmt: skip


def _llama_model(fields: Fields) -> Json:
    fields.require("hidden_act", "silu", "swish")
    for name in ("attention_bias", "mlp_bias"):
        fields.require(name, False, None)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if "head_dim" in fields and fields.get("head_dim") * heads != hidden:
        raise UserError(
            f"{fields.where}: head_dim={fields.get('head_dim')} is not in our models; it has to be "
            f"hidden_size / num_attention_heads = {hidden} / {heads}"
        )
    groups = fields.whole("num_key_value_heads") if "num_key_value_heads" in fields else heads
    return {
        "family": "llama", "layers": fields.whole("num_hidden_layers"), "hidden": hidden,
        "heads": heads, "kv_heads": None if groups == heads else groups,
        "sequence": fields.whole("max_position_embeddings"), "vocab": fields.whole("vocab_size"),
        **_ffn(fields, "intermediate_size", hidden),
        "tied": bool(fields.get("tie_word_embeddings")),
        "attention_dropout": fields.number("attention_dropout"),
        "init_std": fields.number("initializer_range"),
        "norm_epsilon": fields.number("rms_norm_eps"), **_rotary(fields),
    }  # fmt: skip


def _rotary(fields: Fields) -> Json:
    """rope_parameters, as transformers 5 has it, or rope_theta and rope_scaling."""
    fields.require("partial_rotary_factor", None, 1.0)
    new = fields.table("rope_parameters")
    scaling = new or fields.table("rope_scaling")
    base = new.number("rope_theta") if new and "rope_theta" in new else fields.number("rope_theta")
    if scaling is None:
        return {"rotary_base": base}
    scaling.require("partial_rotary_factor", None, 1.0)
    name = "type" if "type" in scaling and "rope_type" not in scaling else "rope_type"
    known = {"default": "none", "linear": "linear", "llama3": "llama3"}
    kind = scaling.choice(name, known) if name in scaling else "none"
    if kind == "none":
        return {"rotary_base": base}
    found = {
        "rotary_base": base, "rotary_scaling": kind, "rotary_factor": scaling.number("factor")
    }  # fmt: skip
    if kind == "linear":
        return found
    return found | {
        "rotary_low": scaling.number("low_freq_factor"),
        "rotary_high": scaling.number("high_freq_factor"),
        "rotary_original": scaling.whole("original_max_position_embeddings"),
    }


def _llama_config(model: ModelConfig) -> Json:
    rotary: Json = {"rope_type": "default"}
    if model.rotary_scaling != "none":
        rotary = {"rope_type": model.rotary_scaling, "factor": model.rotary_factor}
    if model.rotary_scaling == "llama3":
        rotary |= {
            "low_freq_factor": model.rotary_low, "high_freq_factor": model.rotary_high,
            "original_max_position_embeddings": model.rotary_original,
        }  # fmt: skip
    return {
        "num_hidden_layers": model.layers, "hidden_size": model.hidden,
        "num_attention_heads": model.heads, "num_key_value_heads": model.groups,
        "head_dim": model.head_size, "intermediate_size": model.ffn_hidden,
        "max_position_embeddings": model.sequence, "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon, "attention_dropout": model.attention_dropout,
        "attention_bias": False, "mlp_bias": False, "rope_theta": model.rotary_base,
        "rope_scaling": None if model.rotary_scaling == "none" else rotary,
        "rope_parameters": {"rope_theta": model.rotary_base, **rotary},
    }  # fmt: skip


# --- BERT -----------------------------------------------------------------------------------------

_BERT_DEFAULTS = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 512, "type_vocab_size": 2,
    "initializer_range": 0.02, "layer_norm_eps": 1e-12,
}  # fmt: skip
_MEGATRON_BERT_DEFAULTS = _BERT_DEFAULTS | {
    "vocab_size": 29056, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096,
}  # fmt: skip


def _bert_model(fields: Fields) -> Json:
    fields.require("position_embedding_type", "absolute")
    fields.require("type_vocab_size", 2)
    fields.require("tie_word_embeddings", True)
    hidden = fields.whole("hidden_size")
    return {
        "family": "bert", "layers": fields.whole("num_hidden_layers"), "hidden": hidden,
        "heads": fields.whole("num_attention_heads"),
        "sequence": fields.whole("max_position_embeddings"), "vocab": fields.whole("vocab_size"),
        **_ffn(fields, "intermediate_size", hidden),
        "dropout": fields.number("hidden_dropout_prob"),
        "attention_dropout": fields.number("attention_probs_dropout_prob"),
        "init_std": fields.number("initializer_range"),
        "norm_epsilon": fields.number("layer_norm_eps"),
        "norm_placement": "post" if fields.get("model_type") == "bert" else "pre",
        "gelu": fields.choice("hidden_act", _GELU),
    }  # fmt: skip


def _bert_config(model: ModelConfig) -> Json:
    return {
        "num_hidden_layers": model.layers, "hidden_size": model.hidden,
        "num_attention_heads": model.heads, "intermediate_size": model.ffn_hidden,
        "max_position_embeddings": model.sequence, "type_vocab_size": 2,
        "hidden_act": "gelu_new" if model.gelu == "tanh" else "gelu",
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "layer_norm_eps": model.norm_epsilon, "position_embedding_type": "absolute",
    }  # fmt: skip


KINDS: dict[str, Kind] = {
    "gpt2": Kind(
        names=GPT2, defaults=_GPT2_DEFAULTS, to_model=_gpt2_model, to_config=_gpt2_config,
        architecture="GPT2LMHeadModel",
    ),
    "llama": Kind(
        names=LLAMA, defaults=_LLAMA_DEFAULTS, to_model=_llama_model, to_config=_llama_config,
        architecture="LlamaForCausalLM",
    ),
    "bert": Kind(
        names=BERT, defaults=_BERT_DEFAULTS, to_model=_bert_model, to_config=_bert_config,
        architecture="BertForPreTraining",
    ),
    "megatron-bert": Kind(
        names=MEGATRON_BERT, defaults=_MEGATRON_BERT_DEFAULTS, to_model=_bert_model,
        to_config=_bert_config, architecture="MegatronBertForPreTraining",
    ),
}  # fmt: skip
