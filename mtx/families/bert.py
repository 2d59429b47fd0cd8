"""BERT as in Megatron-LM (Shoeybi et al. 2019, section 3 and figure 7): attention both ways, token
types, a head for masked tokens and a binary one for the order of two texts.

norm_placement="pre" is the paper's rearranged layer, whose residual stream no norm touches, with
one norm after the last; "post" is the first BERT's (Devlin et al. 2019), each norm after a
residual addition, and one after the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mtx.errors import UserError
from mtx.families import ModelConfig
from mtx.families.gpt import Gelu
from mtx.fields import require_choice

NormPlacement = Literal["pre", "post"]


@dataclass(frozen=True, kw_only=True)
class Bert(ModelConfig):
    """Megatron-LM's BERT, and the first one."""

    family: str = "bert"
    gelu: Gelu = "tanh"  # its approximation as in GPT-2, or exact as in the first BERT
    norm_placement: NormPlacement = "pre"  # before attention and MLP, or after the additions

    def check(self) -> None:
        super().check()
        require_choice(self, "gelu", Gelu)
        require_choice(self, "norm_placement", NormPlacement)
        if not self.tied:
            raise UserError("tied=False must be True of family='bert': its head is the embedding's")

    @property
    def objective(self):
        return "masked tokens"

    def stack(self):
        from mtx.layers.attend import Scores
        from mtx.layers.attention import Attention
        from mtx.layers.bert import Pretraining
        from mtx.layers.embedding import Embedding
        from mtx.layers.layer import Kind, Stack
        from mtx.layers.mlp import MLP
        from mtx.layers.norm import Norm

        norm, post = Norm(kind="layer", epsilon=self.norm_epsilon), self.norm_placement == "post"
        activation = "gelu_tanh" if self.gelu == "tanh" else "gelu"
        attention = Attention(
            heads=self.heads, size=self.head_size, bias=True, output_bias=True,
            scores=Scores(causal=False), dropout=self.attention_dropout,
        )  # fmt: skip
        mlp = MLP(ffn=self.ffn_hidden, activation=activation)
        return Stack.uniform(
            Kind(
                sublayers=(("attention", attention), ("mlp", mlp)), norm=norm,
                norm_placement=self.norm_placement, dropout=self.dropout,
            ),
            self.layers,
            embedding=Embedding(
                vocab=self.vocab, positions=self.sequence, types=2, norm=norm if post else None,
                dropout=self.dropout,
            ),
            head=Pretraining(
                vocab=self.vocab, norm=norm, final_norm=not post, activation=activation
            ),
        )  # fmt: skip


CONFIG = Bert
