"""Llama (Touvron et al. 2023; Llama 3, 2024): RMSNorm, rotary positions, SwiGLU, fewer heads of
keys and values than of queries, no biases. Families that are built like it derive from its config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from mtx.errors import UserError
from mtx.families import ModelConfig, check_groups
from mtx.fields import Between, require_above, require_choice
from mtx.sizes import Tokens, Width

RotaryScaling = Literal["none", "linear", "llama3"]


@dataclass(frozen=True, kw_only=True)
class Llama(ModelConfig):
    """Llama 2 and 3."""

    family: str = "llama"
    kv_heads: Width | None = None  # G, heads of keys and values; None: as many as heads
    head_dim: Width | None = None  # K; None: hidden / heads
    rotary_base: float = 10000.0  # wavelengths of positions go from 2 pi to 2 pi times this
    rotary_scaling: RotaryScaling = "none"  # of a model that was first trained on shorter texts
    rotary_factor: Annotated[float, Between(1, 2**20)] = 1.0  # how much longer they are now
    rotary_low: float = 1.0  # "llama3": wavelengths above rotary_original / this are all scaled,
    rotary_high: float = 4.0  # those below rotary_original / this not at all
    rotary_original: Tokens = 8192  # "llama3": the sequence of the first training

    def check(self) -> None:
        require_choice(self, "rotary_scaling", RotaryScaling)
        require_above(self, 0, "rotary_base", "rotary_low")
        require_above(self, self.rotary_low, "rotary_high")
        if self.head_dim is None:
            super().check()
        if self.head_size % 2:
            raise UserError(
                f"head_size={self.head_size} must be even, for rotary positions; use another "
                f"hidden={self.hidden} or heads={self.heads}"
            )
        check_groups(self)

    @property
    def head_size(self) -> int:
        return self.head_dim or super().head_size

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    @property
    def sequence_is_fixed(self) -> bool:
        return False

    # -- what it is made of ------------------------------------------------------------------------

    def norm(self):
        from mtx.layers.norm import Norm

        return Norm(kind="rms", epsilon=self.norm_epsilon)

    def attention(self, **others: Any):
        """others: fields of `mtx.layers.attention.Attention` that a family sets."""
        from mtx.layers.attention import Attention
        from mtx.layers.rotary import Rotary

        rotary = Rotary(
            base=self.rotary_base, scaling=self.rotary_scaling, factor=self.rotary_factor,
            low=self.rotary_low, high=self.rotary_high, original=self.rotary_original,
        )  # fmt: skip
        return Attention(
            heads=self.heads, groups=self.groups, size=self.head_size, rotary=rotary,
            dropout=self.attention_dropout, **others,
        )  # fmt: skip

    def kind(self, **others: Any):
        """A layer with that attention; others: as for `attention`."""
        from mtx.layers.layer import Kind
        from mtx.layers.mlp import MLP

        mlp = MLP(ffn=self.ffn_hidden, activation="silu", gated=True, bias=False)
        return Kind(
            sublayers=(("attention", self.attention(**others)), ("mlp", mlp)), norm=self.norm(),
            dropout=self.dropout,
        )  # fmt: skip

    def edges(self) -> dict[str, Any]:
        """Embedding and head."""
        from mtx.layers.embedding import Embedding
        from mtx.layers.head import NextToken

        return {
            "embedding": Embedding(vocab=self.vocab, dropout=self.dropout),
            "head": NextToken(vocab=self.vocab, norm=self.norm(), tied=self.tied),
        }

    def stack(self):
        from mtx.layers.layer import Stack

        return Stack.uniform(self.kind(), self.layers, **self.edges())


CONFIG = Llama
