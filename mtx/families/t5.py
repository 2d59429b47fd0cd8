"""T5 (Raffel et al. 2020): an encoder that sees all of a text with spans left out, and a decoder
that writes them. RMSNorm, no biases except those of distances between positions, unscaled scores;
1.1 has gated MLPs and a head of its own."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from mtx.errors import UserError
from mtx.families import ModelConfig
from mtx.families.llama import preset
from mtx.fields import Between
from mtx.huggingface import Fields, HuggingFace, Json, Names, Weight, ffn_field
from mtx.sizes import Layers, Tokens, Width

FeedForward = Literal["relu", "gated-gelu"]


@dataclass(frozen=True, kw_only=True)
class T5(ModelConfig):
    """T5 and T5 1.1. `layers` counts both sides; `sequence` is the decoder's."""

    family: str = "t5"
    norm_epsilon: float = 1e-6
    encoder_layers: Layers | None = None  # the encoder's, the first of all; None: half of them
    encoder_sequence: Tokens = 512  # tokens that the encoder reads
    head_dim: Width | None = None  # K, head size; None: hidden / heads
    feed_forward: FeedForward = "relu"  # in 1.1 gated-gelu, with GELU's approximation
    buckets: Annotated[int, Between(4, 2**10)] = 32  # buckets of distances on each side
    farthest: Annotated[int, Between(2, 2**20)] = 128  # distances from this on share a bucket

    def check(self) -> None:
        if self.head_dim is None:
            super().check()
        if not 1 <= self.encoders < self.layers:
            raise UserError(
                f"encoder_layers={self.encoders} must leave some of layers={self.layers} to the "
                f"decoder; use encoder_layers={max(1, self.layers // 2)}, and layers=2 or more"
            )
        if self.buckets % 4 or self.farthest <= self.buckets // 2:
            raise UserError(
                f"buckets={self.buckets} must be a multiple of 4 and below 2*farthest="
                f"{2 * self.farthest}; use buckets=32 and farthest=128"
            )

    @property
    def encoders(self) -> int:
        """Layers of the encoder."""
        return self.layers // 2 if self.encoder_layers is None else self.encoder_layers

    @property
    def objective(self):
        return "spans"

    @property
    def head_size(self) -> int:
        return self.head_dim or super().head_size

    @property
    def sequence_is_fixed(self) -> bool:
        return False

    @property
    def longest(self) -> int:
        return max(self.sequence, self.encoder_sequence)

    @property
    def sequences(self) -> dict[str, int]:
        return super().sequences | {"encoder_sequence": self.encoder_sequence}

    # -- what it is made of ------------------------------------------------------------------------

    def _attention(self, *, causal: bool, crosses: bool = False):
        from mtx.layers.encoder_decoder import RelativeAttention
        from mtx.layers.relative import Relative

        buckets = None if crosses else self.buckets
        return RelativeAttention(
            heads=self.heads, size=self.head_size, dropout=self.attention_dropout,
            rules=Relative(causal=causal, buckets=buckets, farthest=self.farthest),
            crosses=crosses,
        )  # fmt: skip

    def stack(self):
        from mtx.layers.encoder_decoder import (
            DecoderHead,
            DecoderKind,
            EncoderDecoderEmbedding,
            EncoderKind,
        )
        from mtx.layers.layer import Stack
        from mtx.layers.mlp import MLP
        from mtx.layers.norm import Norm

        gated = self.feed_forward == "gated-gelu"
        activation = "gelu_tanh" if gated else "relu"
        mlp = MLP(ffn=self.ffn_hidden, activation=activation, gated=gated, bias=False)
        common: Json = {
            "norm": Norm(kind="rms", epsilon=self.norm_epsilon), "dropout": self.dropout,
        }  # fmt: skip
        further = "gated" if gated else "mlp", mlp
        around = ("attention", self._attention(causal=False)), further
        before = (
            ("attention", self._attention(causal=True)),
            ("cross", self._attention(causal=False, crosses=True)), further,
        )  # fmt: skip
        kinds = {
            "encoder": EncoderKind(sublayers=around, **common),
            "end": EncoderKind(sublayers=around, last=True, **common),
            "decoder": DecoderKind(sublayers=before, cross_size=self.encoder_sequence, **common),
        }
        pattern = (
            *("encoder",) * (self.encoders - 1), "end",
            *("decoder",) * (self.layers - self.encoders),
        )  # fmt: skip
        return Stack(
            kinds={name: kind for name, kind in kinds.items() if name in pattern},
            pattern=pattern,
            embedding=EncoderDecoderEmbedding(
                vocab=self.vocab, dropout=self.dropout, buckets=self.buckets, heads=self.heads
            ),
            head=DecoderHead(
                vocab=self.vocab, norm=common["norm"], tied=self.tied,
                encoder_sequence=self.encoder_sequence,
                scale=self.hidden**-0.5 if self.tied else 1.0,
            ),
        )  # fmt: skip


CONFIG = T5

# -- Hugging Face ----------------------------------------------------------------------------------

_FEED_FORWARD = {"relu": "relu", "gated-gelu": "gated-gelu"}


def _to_model(fields: Fields) -> Json:
    encoders = fields.whole("num_layers")
    decoders = fields.whole("num_decoder_layers") if "num_decoder_layers" in fields else encoders
    # In transformers 5 only the scale says that a model is not tied.
    tied = fields.get("tie_word_embeddings") and fields.get("scale_decoder_outputs") is not False
    return {
        **ffn_field(fields, "d_ff", "d_model"), "tied": bool(tied),
        "layers": encoders + decoders, "encoder_layers": encoders, "sequence": 128,
        "encoder_sequence": fields.whole("n_positions"),
        "attention_dropout": fields.number("dropout_rate"),
        "feed_forward": fields.choice("feed_forward_proj", _FEED_FORWARD),
    }  # fmt: skip


def _to_config(model: T5) -> Json:
    return {
        "num_layers": model.encoders, "num_decoder_layers": model.layers - model.encoders,
        "d_kv": model.head_size, "d_ff": model.ffn_hidden, "n_positions": model.encoder_sequence,
        "feed_forward_proj": model.feed_forward, "tie_word_embeddings": model.tied,
        "is_gated_act": model.feed_forward == "gated-gelu",
        "dense_act_fn": "gelu_new" if model.feed_forward == "gated-gelu" else "relu",
    }  # fmt: skip


_ENCODER, _DECODER = ("encoder", "end"), ("decoder",)


def _attention_names(leaf: str, name: str, **of: Any) -> tuple[Weight, ...]:
    """The output of attention, and its norm."""
    norm, _, _ = name.rpartition(".")
    return (
        Weight(f"{leaf}_norm.scale", (f"{norm}.layer_norm.weight",), **of),
        Weight(f"{leaf}.out.w", (f"{name}.o.weight",), "linear", inputs=2, **of),
    )


def _mlp_names(number: int, kinds: tuple[str, ...]) -> tuple[Weight, ...]:
    """The weights of the MLP, which is the sublayer of that number, gated or not."""
    start, name = f"layer.{number}", f"layer.{number}.DenseReluDense"
    gated = (f"{name}.wi_0.weight", f"{name}.wi_1.weight")
    return (
        Weight("mlp.up.w", (f"{name}.wi.weight",), "linear", kinds=kinds),
        Weight("gated.up.w", gated, "linear", stack=1, kinds=kinds),
        *(Weight(f"{leaf}.down.w", (f"{name}.wo.weight",), "linear", kinds=kinds)
          for leaf in ("mlp", "gated")),
        *(Weight(f"{leaf}_norm.scale", (f"{start}.layer_norm.weight",), kinds=kinds)
          for leaf in ("mlp", "gated")),
    )  # fmt: skip


def _names() -> Names:
    own, cross = "layer.0.SelfAttention", "layer.1.EncDecAttention"
    qkv = tuple(f"{own}.{each}.weight" for each in "qkv")
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return Names(
        prefix="", layer="decoder.block.{}.", heads=("lm_head.",),
        stacks=MappingProxyType(dict.fromkeys(_ENCODER, "encoder.block.{}.")),
        shared=(
            Weight("embed.tokens", ("shared.weight",), "table"),
            Weight("embed.encoder_bias", (f"encoder.{bias}",), "table"),
            Weight("embed.decoder_bias", (f"decoder.{bias}",), "table"),
            Weight("head.norm.scale", ("decoder.final_layer_norm.weight",)),
            Weight("head.output", ("lm_head.weight",), "table"),
        ),
        layers=(
            Weight("attention.qkv.w", qkv, "linear", stack=1),
            *_attention_names("attention", own),
            Weight("cross.q.w", (f"{cross}.q.weight",), "linear", kinds=_DECODER),
            Weight(
                "cross.kv.w", (f"{cross}.k.weight", f"{cross}.v.weight"), "linear", stack=1,
                kinds=_DECODER,
            ),
            *_attention_names("cross", cross, kinds=_DECODER),
            *_mlp_names(1, _ENCODER), *_mlp_names(2, _DECODER),
            Weight(
                "end_norm.scale", ("encoder.final_layer_norm.weight",), of_layer=False,
                kinds=("end",),
            ),
        ),
        twins={
            "lm_head.weight": "shared.weight", "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
        },
        # A table of the first T5s that nothing reads.
        ignored=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    )  # fmt: skip


HUGGING_FACE = (
    HuggingFace(
        model_type="t5", architecture="T5ForConditionalGeneration",
        defaults={
            "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6,
            "num_decoder_layers": None, "num_heads": 8, "n_positions": 512,
            "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
            "dropout_rate": 0.1, "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu",
            "tie_word_embeddings": True,
        },
        fixed={"is_encoder_decoder": True},
        fields={
            "hidden": "d_model", "heads": "num_heads", "head_dim": "d_kv", "vocab": "vocab_size",
            "buckets": "relative_attention_num_buckets",
            "farthest": "relative_attention_max_distance", "dropout": "dropout_rate",
            "norm_epsilon": "layer_norm_epsilon",
        },
        to_model=_to_model, to_config=_to_config, names=_names(),
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

# Sizes from Raffel et al. 2020 (arXiv 1910.10683, table 14 and section 3.7) and, for 1.1, from the
# config.json of huggingface.co/google/t5-v1_1-*; their 128 texts of 512 tokens a step. Targets take
# 114 places of 128. Layouts and rates (of AdamW; theirs are Adafactor's) are ours.
_SIZES = {  # name: layers of each side, hidden, heads, K, F, tensor
    "t5-small": (6, 512, 8, 64, 2048, 1), "t5-base": (12, 768, 12, 64, 3072, 1),
    "t5-large": (24, 1024, 16, 64, 4096, 1), "t5-3b": (24, 1024, 32, 128, 16384, 4),
    "t5-11b": (24, 1024, 128, 128, 65536, 8),
    "t5-1.1-small": (8, 512, 6, 64, 1024, 1), "t5-1.1-base": (12, 768, 12, 64, 2048, 1),
    "t5-1.1-large": (24, 1024, 16, 64, 2816, 1), "t5-1.1-xl": (24, 2048, 32, 64, 5120, 4),
    "t5-1.1-xxl": (24, 4096, 64, 64, 10240, 8),
}  # fmt: skip
PRESETS = {
    name: preset(
        {"layers": 2 * layers, "hidden": hidden, "heads": heads, "head_dim": size, "ffn": ffn,
         "vocab": 32128, "sequence": 128, "encoder_sequence": 512}
        | ({"feed_forward": "gated-gelu", "tied": False} if "1.1" in name else {}),
        lr=1e-4, global_batch=128, data=8, pipe=1, tensor=tensor, virtual=1, microbatch=4,
    )
    for name, (layers, hidden, heads, size, ffn, tensor) in _SIZES.items()
}  # fmt: skip
