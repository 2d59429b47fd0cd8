"""GPT as Megatron-LM trains it, and GPT-2: LayerNorm before attention and MLP, learned positions,
GELU, biases everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mtx.families import ModelConfig
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
from mtx.sizes import Tokens

Gelu = Literal["tanh", "erf"]
NormPlacement = Literal["pre", "post"]


@dataclass(frozen=True, kw_only=True)
class GPT(ModelConfig):
    """GPT-2 and Megatron-LM's GPT."""

    family: str = "gpt"
    gelu: Gelu = "tanh"  # GELU's approximation as in GPT-2, or exact as in the first BERT
    # attention and MLP in parallel, after one norm (MegaScale, arXiv 2402.15627, 3.1)
    parallel_block: bool = False
    window: Tokens | None = None  # positions that a position sees, itself included; None: all

    @property
    def activation(self) -> Literal["gelu_tanh", "gelu"]:
        return "gelu_tanh" if self.gelu == "tanh" else "gelu"

    def kind(self, *, causal: bool = True, norm_placement: NormPlacement = "pre"):
        """A layer: attention and MLP, with biases."""
        from mtx.layers.attend import Scores
        from mtx.layers.attention import Attention
        from mtx.layers.layer import Kind
        from mtx.layers.mlp import MLP
        from mtx.layers.norm import Norm

        attention = Attention(
            heads=self.heads, size=self.head_size, bias=True, output_bias=True,
            scores=Scores(causal=causal, window=self.window), dropout=self.attention_dropout,
        )  # fmt: skip
        mlp = MLP(ffn=self.ffn_hidden, activation=self.activation)
        return Kind(
            sublayers=(("attention", attention), ("mlp", mlp)),
            norm=Norm(kind="layer", epsilon=self.norm_epsilon), norm_placement=norm_placement,
            dropout=self.dropout, parallel=self.parallel_block,
        )  # fmt: skip

    def stack(self):
        from mtx.layers.embedding import Embedding
        from mtx.layers.head import NextToken
        from mtx.layers.layer import Stack

        kind = self.kind()
        return Stack.uniform(
            kind,
            self.layers,
            embedding=Embedding(vocab=self.vocab, positions=self.sequence, dropout=self.dropout),
            head=NextToken(vocab=self.vocab, norm=kind.norm, tied=self.tied),
        )


CONFIG = GPT

# -- Hugging Face ----------------------------------------------------------------------------------

GELU_NAMES = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh", "gelu": "erf"}


def _to_model(fields: Fields) -> Json:
    dropout = fields.number("resid_pdrop")
    if (embedding := fields.get("embd_pdrop", dropout)) != dropout:
        fields.notes.append(
            f"embd_pdrop={embedding} is not kept: dropout={dropout}, which is its resid_pdrop, "
            "holds for the embedding too"
        )
    ffn = ffn_field(fields, "n_inner", "n_embd") if "n_inner" in fields else {}
    return {"gelu": fields.choice("activation_function", GELU_NAMES), **ffn}


def _to_config(model: GPT) -> Json:
    return {
        "n_ctx": model.sequence, "embd_pdrop": model.dropout,
        "n_inner": None if model.ffn_hidden == 4 * model.hidden else model.ffn_hidden,
        "activation_function": "gelu_new" if model.gelu == "tanh" else "gelu",
    }  # fmt: skip


HUGGING_FACE = (
    HuggingFace(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        defaults={
            "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
            "n_inner": None, "activation_function": "gelu_new", "resid_pdrop": 0.1,
            "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
            "tie_word_embeddings": True,
        },
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        fields={
            "layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "sequence": "n_positions",
            "vocab": "vocab_size", "tied": "tie_word_embeddings", "dropout": "resid_pdrop",
            "attention_dropout": "attn_pdrop", "init_std": "initializer_range",
            "norm_epsilon": "layer_norm_epsilon",
        },
        to_model=_to_model,
        to_config=_to_config,
        names=Names(
            prefix="transformer.",
            layer="h.{}.",
            heads=("lm_head.",),
            shared=(
                Weight("embed.tokens", ("wte.weight",), "table"),
                Weight("embed.positions", ("wpe.weight",), "table"),
                *norm_of("head.norm", "ln_f"),
                Weight("head.output", ("lm_head.weight",), "table"),
            ),
            layers=(
                *norm_of("attention_norm", "ln_1"),
                *layer_of("attention.qkv", "attn.c_attn", "conv1d"),
                *layer_of("attention.out", "attn.c_proj", "conv1d", inputs=2),
                *norm_of("mlp_norm", "ln_2"),
                *layer_of("mlp.up", "mlp.c_fc", "conv1d"),
                *layer_of("mlp.down", "mlp.c_proj", "conv1d"),
            ),
            twins={"lm_head.weight": "wte.weight"},
            ignored=r"h\.\d+\.attn\.(masked_)?bias",  # masks
        ),
        has=lambda model: not model.parallel_block and model.window is None,
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

_SC21 = {  # name: heads, hidden, layers, tensor, pipe, GPUs, global batch, microbatch, virtual
    "gpt-1.7b": (24, 2304, 24, 1, 1, 32, 512, 16, 1),
    "gpt-3.6b": (32, 3072, 30, 2, 1, 64, 512, 16, 1),
    "gpt-7.5b": (32, 4096, 36, 4, 1, 128, 512, 16, 1),
    "gpt-18b": (48, 6144, 40, 8, 1, 256, 1024, 8, 1),
    "gpt-39b": (64, 8192, 48, 8, 2, 512, 1536, 4, 1),
    "gpt-76b": (80, 10240, 60, 8, 4, 1024, 1792, 2, 3),
    "gpt-145b": (96, 12288, 80, 8, 8, 1536, 2304, 2, 2),
    "gpt-310b": (128, 16384, 96, 8, 16, 1920, 2160, 1, 2),
    "gpt-530b": (128, 20480, 105, 8, 35, 2520, 2520, 1, 3),
    "gpt-1t": (160, 25600, 128, 8, 64, 3072, 3072, 1, 1),
}
TABLE1 = tuple(_SC21)


def _published(model: Json, layout: Json, *, steps: int = 100_000, lr: float = 1.5e-4, **run: Any):
    return {
        "model": {"sequence": 2048, "vocab": 51200} | model, "layout": {"idle": "phases"} | layout,
        "optimizer": {"lr": lr, "warmup_steps": min(3000, steps // 10)}, "steps": steps,
        "eval_every": 1000, "save_every": 1000, **run,
    }  # fmt: skip


# Table 1 of Narayanan et al., SC'21 (arXiv 2104.04473v5), every block recomputed as published;
# microbatch sizes and virtual stages from the run scripts its authors published.
PRESETS = {
    name: _published(
        {"layers": layers, "hidden": hidden, "heads": heads},
        {"data": gpus // (tensor * pipe), "pipe": pipe, "tensor": tensor, "virtual": virtual,
         "microbatch": microbatch, "recompute": "full"},
        global_batch=batch,
    )
    for name, (heads, hidden, layers, tensor, pipe, gpus, batch, microbatch, virtual)
    in _SC21.items()
}  # fmt: skip
PRESETS |= {
    # GPT-2 345M as in Shoeybi et al. 2019 (arXiv 1909.08053), section 4.2 and appendix A.
    "gpt-2-345m": _published(
        {"layers": 24, "hidden": 1024, "heads": 16, "sequence": 1024, "vocab": 50257,
         "dropout": 0.1, "attention_dropout": 0.1},
        {"data": 8, "microbatch": 8, "recompute": "selective"}, global_batch=512, steps=300_000,
    ),
    # GPT-3's 175B on 96 GPUs, one replica, laid out as in SC'21's figure 12 (v = 4).
    "gpt-175b": _published(
        {"layers": 96, "hidden": 12288, "heads": 96},
        {"pipe": 12, "tensor": 8, "virtual": 4, "recompute": "selective"}, global_batch=60, lr=6e-5,
    ),
    # The 1T model's shape at laptop size: eight virtual devices as data 2 x pipe 2 x tensor 2.
    # init_std=0.02 is for a hidden size in the thousands; with 96 it learns half as fast.
    "miniature": {
        "model": {"layers": 4, "hidden": 96, "heads": 4, "sequence": 128, "vocab": 256,
                  "vocab_multiple": 64, "init_std": 0.08, "compute_dtype": "float32"},
        "layout": {"data": 2, "pipe": 2, "tensor": 2, "virtual": 2, "microbatch": 2},
        "optimizer": {"lr": 3e-3, "min_lr": 2e-4, "warmup_steps": 40},
        "global_batch": 16, "steps": 500, "eval_every": 100, "eval_batches": 8,
    },
    # The model on which this project and its peers are timed: four stages, m = 8.
    "bench-s": {
        "model": {"layers": 8, "hidden": 256, "heads": 8, "sequence": 256, "vocab": 8192,
                  "compute_dtype": "float32"},
        "layout": {"pipe": 4, "microbatch": 2},
        "global_batch": 16, "steps": 12, "eval_every": 0,
    },
}  # fmt: skip
