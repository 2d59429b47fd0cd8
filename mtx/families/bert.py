"""BERT as in Megatron-LM (Shoeybi et al. 2019, section 3 and figure 7): bidirectional attention,
token types, a head for masked tokens and a binary one for the order of two texts.

norm_placement="pre" is the paper's rearranged layer: no norm lies on the residual stream, and one
norm follows the last layer. "post" is the first BERT's (Devlin et al. 2019): a norm follows each
residual addition, and one the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtx.errors import UserError
from mtx.families.gpt import GELU_NAMES, GPT, NormPlacement
from mtx.huggingface import (
    Fields,
    HuggingFace,
    Json,
    Names,
    Weight,
    ffn_field,
    layer_of,
    norm_of,
)


@dataclass(frozen=True, kw_only=True)
class Bert(GPT):
    """Megatron-LM's BERT, and the original one."""

    family: str = "bert"
    norm_placement: NormPlacement = "pre"  # norms before attention and MLP, or after additions

    def check(self) -> None:
        super().check()
        if self.parallel_block or self.window:
            raise UserError(
                f"parallel_block={self.parallel_block} and window={self.window} must be left out "
                "of family='bert'; use family='gpt'"
            )
        if not self.tied:
            raise UserError("tied=False must be True of family='bert': its head is the embedding's")

    @property
    def objective(self):
        return "masked tokens"

    def stack(self):
        from mtx.layers.bert import Pretraining
        from mtx.layers.embedding import Embedding
        from mtx.layers.layer import Stack

        kind = self.kind(causal=False, norm_placement=self.norm_placement)
        post = self.norm_placement == "post"
        return Stack.uniform(
            kind,
            self.layers,
            embedding=Embedding(
                vocab=self.vocab, positions=self.sequence, types=2,
                norm=kind.norm if post else None, dropout=self.dropout,
            ),
            head=Pretraining(
                vocab=self.vocab, norm=kind.norm, final_norm=not post, activation=self.activation
            ),
        )  # fmt: skip


CONFIG = Bert

# -- Hugging Face ----------------------------------------------------------------------------------


def _to_model(fields: Fields) -> Json:
    fields.require("is_decoder", False)
    return {
        **ffn_field(fields, "intermediate_size", "hidden_size"),
        "norm_placement": "post" if fields.get("model_type") == "bert" else "pre",
        "gelu": fields.choice("hidden_act", GELU_NAMES),
    }  # fmt: skip


def _to_config(model: Bert) -> Json:
    act = "gelu_new" if model.gelu == "tanh" else "gelu"
    return {"intermediate_size": model.ffn_hidden, "hidden_act": act}


def _names(shared: tuple[Weight, ...], layers: tuple[Weight, ...], **others: Any) -> Names:
    """The table of names of a BERT with these norms."""
    qkv = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
    return Names(
        prefix="bert.", layer="encoder.layer.{}.", heads=("cls.",),
        shared=(
            Weight("embed.tokens", ("embeddings.word_embeddings.weight",), "table"),
            Weight("embed.positions", ("embeddings.position_embeddings.weight",), "table"),
            Weight("embed.types", ("embeddings.token_type_embeddings.weight",), "table"),
            *shared,
            *layer_of("head.masked", "cls.predictions.transform.dense", "linear"),
            *norm_of("head.masked.norm", "cls.predictions.transform.LayerNorm"),
            Weight("head.masked.bias", ("cls.predictions.bias",)),
            *layer_of("head.pooler", "pooler.dense", "linear"),
            *layer_of("head.binary", "cls.seq_relationship", "linear"),
        ),
        layers=(
            *layers,
            Weight("attention.qkv.w", tuple(f"{each}.weight" for each in qkv), "linear", stack=1),
            Weight("attention.qkv.b", tuple(f"{each}.bias" for each in qkv), stack=0),
            *layer_of("attention.out", "attention.output.dense", "linear", inputs=2),
            *layer_of("mlp.up", "intermediate.dense", "linear"),
            *layer_of("mlp.down", "output.dense", "linear"),
        ),
        twins={
            "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        ignored=r"embeddings\.position_ids",
        optional=("head.masked", "head.pooler", "head.binary"),
        **others,
    )  # fmt: skip


_DEFAULTS = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 512, "type_vocab_size": 2,
    "initializer_range": 0.02, "layer_norm_eps": 1e-12,
}  # fmt: skip
_FIXED = {
    "type_vocab_size": 2, "position_embedding_type": "absolute", "tie_word_embeddings": True
}  # fmt: skip
_FIELDS = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "sequence": "max_position_embeddings", "vocab": "vocab_size", "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob", "init_std": "initializer_range",
    "norm_epsilon": "layer_norm_eps",
}  # fmt: skip
HUGGING_FACE = (
    HuggingFace(
        model_type="bert", architecture="BertForPreTraining", defaults=_DEFAULTS, fixed=_FIXED,
        fields=_FIELDS, to_model=_to_model, to_config=_to_config,
        has=lambda model: model.norm_placement == "post",
        names=_names(
            norm_of("embed.norm", "embeddings.LayerNorm"),
            norm_of("attention_norm", "attention.output.LayerNorm")
            + norm_of("mlp_norm", "output.LayerNorm"),
            spellings={".gamma": ".weight", ".beta": ".bias"},
        ),
    ),
    # As Megatron-LM rearranges it: norms before attention and MLP, and one after the last layer.
    HuggingFace(
        model_type="megatron-bert", architecture="MegatronBertForPreTraining",
        defaults=_DEFAULTS | {
            "vocab_size": 29056, "hidden_size": 1024, "num_hidden_layers": 24,
            "num_attention_heads": 16, "intermediate_size": 4096,
        },
        fixed=_FIXED,
        fields=_FIELDS, to_model=_to_model, to_config=_to_config,
        has=lambda model: model.norm_placement == "pre",
        names=_names(
            norm_of("head.norm", "encoder.ln"),
            norm_of("attention_norm", "attention.ln") + norm_of("mlp_norm", "ln"),
        ),
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

_SIZES = {  # name: layers, hidden, heads, tensor
    "bert-336m": (24, 1024, 16, 1),
    "bert-1.3b": (24, 2048, 32, 2),
    "bert-3.9b": (48, 2560, 40, 4),
}
# Shoeybi et al. 2019 (arXiv 1909.08053), section 5.
PRESETS = {
    name: {
        "model": {"layers": layers, "hidden": hidden, "heads": heads, "sequence": 512,
                  "vocab": 30522, "dropout": 0.1, "attention_dropout": 0.1},
        "layout": {"data": 128, "tensor": tensor, "microbatch": 8, "idle": "phases"},
        "optimizer": {"lr": 1e-4, "min_lr": 0.0, "rate": "linear", "warmup_steps": 10_000,
                      "b2": 0.999, "weight_decay": 0.01},
        "global_batch": 1024, "steps": 2_000_000, "eval_every": 1000, "save_every": 1000,
    }
    for name, (layers, hidden, heads, tensor) in _SIZES.items()
}  # fmt: skip
# SOBert (arXiv 2306.03268, abstract): 109 and 762 million parameters, 2,048 tokens, batches of half
# a million, 27 billion in all. Layers, hidden and a vocabulary of 50,000 are chosen to match such
# counts: 126 and 765 million here, and 125 and 762 in the version at FORGE 2025. Rates and layouts
# are ours.
_SOBERT = {"sobert-base": (12, 768, 12), "sobert-large": (24, 1536, 24)}
PRESETS |= {
    name: {
        "model": {"layers": layers, "hidden": hidden, "heads": heads, "sequence": 2048,
                  "vocab": 50000, "dropout": 0.1, "attention_dropout": 0.0},
        "layout": {"data": 8, "microbatch": 8, "idle": "phases"},
        "optimizer": {"lr": 1e-4, "min_lr": 0.0, "rate": "linear", "warmup_steps": 1000,
                      "b2": 0.999, "weight_decay": 0.01},
        "global_batch": 256, "steps": 51_500, "eval_every": 1000, "save_every": 1000,
    }
    for name, (layers, hidden, heads) in _SOBERT.items()
}  # fmt: skip
# At laptop size, on the miniature's devices, with a WordPiece trained on its own text.
PRESETS["miniature-bert"] = {
    "model": {"layers": 4, "hidden": 96, "heads": 4, "sequence": 128, "vocab": 1024,
              "vocab_multiple": 64, "init_std": 0.08, "compute_dtype": "float32"},
    "layout": {"data": 2, "pipe": 2, "tensor": 2, "virtual": 2, "microbatch": 4},
    "optimizer": {"lr": 3e-3, "min_lr": 2e-4, "warmup_steps": 40, "b2": 0.999},
    "data": {"tokenizer": "wordpiece", "bpe_vocab": 1024},
    "global_batch": 32, "steps": 500, "eval_every": 100, "eval_batches": 2,
}  # fmt: skip
