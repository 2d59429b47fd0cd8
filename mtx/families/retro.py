"""RETRO (Borgeaud et al. 2022): a decoder, some of whose layers attend, chunk by chunk, to texts
that were found for the chunk and read by a small encoder (`mtx.layers.retrieval`). RMSNorm, GELU,
no biases; positions are rotary, while the paper's are Transformer-XL's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from mtx.errors import UserError, nearest_multiples
from mtx.families import ModelConfig
from mtx.families.llama import preset
from mtx.fields import Between, require_above
from mtx.sizes import Ffn, Layers, Tokens, Width


@dataclass(frozen=True, kw_only=True)
class Retro(ModelConfig):
    """RETRO. `layers` counts both sides: the decoder's layers and the encoder's."""

    family: str = "retro"
    tied: bool = True
    head_dim: Width | None = None  # K, head size; None: hidden / heads
    rotary_base: float = 10000.0  # wavelengths of rotary positions go from 2 pi to 2 pi times this
    chunk: Tokens = 64  # M, tokens of a chunk, for which neighbours are found
    neighbours: Annotated[int, Between(1, 2**10)] = 2  # k, neighbours of each chunk
    retrieved: Tokens = 128  # R, tokens of a neighbour: a similar chunk, and the text after it
    # the first decoder layer that reads neighbours, from 1; None: the sixth, or the last
    retrieval_first: Layers | None = None
    retrieval_every: Layers = 3  # from the first on, one in this many layers reads neighbours
    encoder_layers: Layers = 2  # of the encoder; they run before the first one reads neighbours
    encoder_hidden: Width | None = None  # E, its size; None: the decoder's, as for the three below
    encoder_heads: Width | None = None  # of the encoder's attention; None: heads
    encoder_head_dim: Width | None = None  # its head size; None: encoder_hidden / encoder_heads
    encoder_ffn: Ffn | None = None  # its F; None: ffn_multiple * encoder_hidden, or the decoder's

    def check(self) -> None:
        if self.head_dim is None:
            super().check()
        require_above(self, 0, "rotary_base")
        if not 1 <= self.first_read <= self.decoders:
            raise UserError(
                f"retrieval_first={self.retrieval_first} must be one of the decoder's "
                f"layers-encoder_layers={self.layers}-{self.encoder_layers}={self.decoders}; use "
                f"layers={max(1, self.first_read) + self.encoder_layers} or more"
            )
        if self.sequence % self.chunk:
            raise UserError(
                f"sequence={self.sequence} must be a multiple of chunk={self.chunk}; use sequence="
                f"{nearest_multiples(self.sequence, self.chunk)}"
            )
        width, heads = self.encoder_width, self.encoder_heads or self.heads
        if self._encoder_head_size is None:
            raise UserError(
                f"encoder_hidden={width} must be a multiple of encoder_heads={heads}; use "
                f"encoder_head_dim, or encoder_hidden={nearest_multiples(width, heads)}"
            )
        for name, size in (
            ("head_size", self.head_size), ("encoder_head_size", self._encoder_head_size)
        ):  # fmt: skip
            if size % 2:
                raise UserError(f"{name}={size} must be even, for rotary positions; use another")
        for name, none in (("lora_rank", 0), ("fp8", "off")):
            if (value := getattr(self, name)) != none:
                raise UserError(
                    f"{name}={value!r} is not made for family='retro'; use {name}={none!r}"
                )

    @property
    def objective(self):
        return "retrieval"

    @property
    def head_size(self) -> int:
        return self.head_dim or super().head_size

    @property
    def encoder_width(self) -> int:
        """E"""
        return self.encoder_hidden or self.hidden

    @property
    def _encoder_head_size(self) -> int | None:
        """K of the encoder; None if its heads do not divide its hidden size."""
        if self.encoder_head_dim is not None:
            return self.encoder_head_dim
        if self.encoder_hidden is None and self.encoder_heads is None:
            return self.head_size
        size, rest = divmod(self.encoder_width, self.encoder_heads or self.heads)
        return None if rest else size

    @property
    def _encoder_ffn(self) -> int:
        if self.encoder_ffn is None and self.encoder_hidden is None:
            return self.ffn_hidden
        return self.encoder_ffn or self.ffn_multiple * self.encoder_width

    @property
    def sequence_is_fixed(self) -> bool:
        return False

    @property
    def sequences(self) -> dict[str, int]:
        name = "sequence/chunk*neighbours*retrieved"
        return super().sequences | {name: self.retrieved_tokens}

    @property
    def retrieved_tokens(self) -> int:
        """N, tokens of all neighbours of a sample."""
        return self.sequence // self.chunk * self.neighbours * self.retrieved

    @property
    def split_widths(self) -> dict[str, int]:
        encoder = {"encoder_heads": self.encoder_heads or self.heads}
        return super().split_widths | encoder | {"encoder_ffn": self._encoder_ffn}

    # -- what it is made of ------------------------------------------------------------------------

    @property
    def decoders(self) -> int:
        """Layers of the decoder."""
        return self.layers - self.encoder_layers

    @property
    def first_read(self) -> int:
        """The first of `reads`."""
        return min(6, self.decoders) if self.retrieval_first is None else self.retrieval_first

    @property
    def reads(self) -> tuple[int, ...]:
        """The decoder's layers that read neighbours, from 1: P in the paper."""
        return tuple(range(self.first_read, self.decoders + 1, self.retrieval_every))

    @property
    def _pattern(self) -> tuple[str, ...]:
        """The kind of each layer. The first one that reads neighbours is split: its attention comes
        before the encoder, which reads its output ("state"), and the rest after ("joins")."""
        first = self.first_read
        after = (
            "reads" if n in self.reads else "block" for n in range(first + 1, self.decoders + 1)
        )
        encoder = ("state", *("encoder",) * (self.encoder_layers - 2), "end")[: self.encoder_layers]
        return *("block",) * (first - 1), *encoder, "joins", *after

    def stack(self):
        from mtx.layers.attention import Attention
        from mtx.layers.layer import Stack
        from mtx.layers.mlp import MLP
        from mtx.layers.norm import Norm
        from mtx.layers.retrieval import (
            ChunkedCrossAttention,
            Chunks,
            EncoderKind,
            NeighbourAttention,
            RetroEmbedding,
            RetroHead,
            RetroKind,
            StateAttention,
        )
        from mtx.layers.rotary import Rotary

        chunks = Chunks(chunk=self.chunk, neighbours=self.neighbours, retrieved=self.retrieved)
        norm, rotary = Norm(kind="rms", epsilon=self.norm_epsilon), Rotary(base=self.rotary_base)
        common: dict[str, Any] = {"norm": norm, "dropout": self.dropout}
        around: Any = {"rotary": rotary, "dropout": self.attention_dropout}
        own: Any = around | {"heads": self.heads, "size": self.head_size}
        theirs: Any = around | {
            "chunks": chunks, "heads": self.encoder_heads or self.heads,
            "size": self._encoder_head_size,
        }  # fmt: skip
        attention = "attention", Attention(groups=self.heads, **own)
        cross = (
            "cross",
            ChunkedCrossAttention(chunks=chunks, encoder_hidden=self.encoder_width, **own),
        )
        mlp = "mlp", MLP(ffn=self.ffn_hidden, bias=False)
        itself = "attention", NeighbourAttention(**theirs)
        state = "state", StateAttention(hidden=self.hidden, **theirs)
        further = "mlp", MLP(ffn=self._encoder_ffn, bias=False)

        def encoder(*sublayers, last: bool):
            return EncoderKind(sublayers=sublayers, hidden=self.encoder_width, last=last, **common)

        middle, end = (encoder(itself, further, last=last) for last in (False, True))
        kinds = {
            "block": RetroKind(sublayers=(attention, mlp), **common),
            "state": RetroKind(
                sublayers=(attention,), **common,
                encoder=encoder(itself, state, further, last=self.encoder_layers == 1),
            ),
            "encoder": RetroKind(sublayers=(), **common, encoder=middle),
            "end": RetroKind(sublayers=(), **common, encoder=end),
            "joins": RetroKind(sublayers=(cross, mlp), **common),
            "reads": RetroKind(sublayers=(attention, cross, mlp), **common),
        }  # fmt: skip
        return Stack(
            kinds={name: kind for name, kind in kinds.items() if name in self._pattern},
            pattern=self._pattern,
            embedding=RetroEmbedding(
                vocab=self.vocab, dropout=self.dropout, encoder_hidden=self.encoder_width
            ),
            head=RetroHead(vocab=self.vocab, norm=norm, tied=self.tied, chunks=chunks),
        )


CONFIG = Retro

# -- presets ---------------------------------------------------------------------------------------

# Sizes from Borgeaud et al. 2022 (arXiv 2112.04426, table 2): sequences of 2,048 tokens, chunks of
# 64, two neighbours of 128 tokens, an encoder of two layers of 896, every third layer from the
# sixth on. So parameters are as many as theirs, except those of positions, which are rotary here.
# The vocabulary of 128,000 is theirs. Layouts, batches and rates are ours.
_SIZES = {  # name: layers of the decoder, hidden, heads, K, F, tensor, sequences a step
    "retro-172m": (12, 896, 16, 64, 3584, 1, 256), "retro-425m": (12, 1536, 12, 128, 6144, 1, 256),
    "retro-1.5b": (24, 2048, 16, 128, 8192, 2, 512),
    "retro-7.5b": (32, 4096, 32, 128, 16384, 8, 1024),
}  # fmt: skip
PRESETS = {
    name: preset(
        {"layers": layers + 2, "hidden": hidden, "heads": heads, "head_dim": size, "ffn": ffn,
         "vocab": 128000, "sequence": 2048, "encoder_layers": 2, "encoder_hidden": 896,
         "encoder_heads": 16, "encoder_head_dim": 64, "encoder_ffn": 3584},
        lr=2e-4, global_batch=batch, data=8, pipe=1, tensor=tensor, virtual=1, microbatch=1,
    )
    for name, (layers, hidden, heads, size, ffn, tensor, batch) in _SIZES.items()
}  # fmt: skip
