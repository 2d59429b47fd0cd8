"""GPT as Megatron-LM trains it, and GPT-2: LayerNorm before attention and MLP, learned positions,
GELU, biases everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mtx.families import ModelConfig
from mtx.fields import require_choice

Gelu = Literal["tanh", "erf"]


@dataclass(frozen=True, kw_only=True)
class GPT(ModelConfig):
    """GPT-2 and Megatron-LM's GPT."""

    family: str = "gpt"
    gelu: Gelu = "tanh"  # its approximation as in GPT-2, or exact as in the first BERT

    def check(self) -> None:
        super().check()
        require_choice(self, "gelu", Gelu)

    def stack(self):
        from mtx.layers.attention import Attention
        from mtx.layers.embedding import Embedding
        from mtx.layers.head import NextToken
        from mtx.layers.layer import Kind, Stack
        from mtx.layers.mlp import MLP
        from mtx.layers.norm import Norm

        norm = Norm(kind="layer", epsilon=self.norm_epsilon)
        attention = Attention(
            heads=self.heads, size=self.head_size, bias=True, output_bias=True,
            dropout=self.attention_dropout,
        )  # fmt: skip
        mlp = MLP(ffn=self.ffn_hidden, activation="gelu_tanh" if self.gelu == "tanh" else "gelu")
        return Stack.uniform(
            Kind(
                sublayers=(("attention", attention), ("mlp", mlp)), norm=norm, dropout=self.dropout
            ),
            self.layers,
            embedding=Embedding(vocab=self.vocab, positions=self.sequence, dropout=self.dropout),
            head=NextToken(vocab=self.vocab, norm=norm, tied=self.tied),
        )


CONFIG = GPT
