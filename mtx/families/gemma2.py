"""Gemma 2 (arXiv 2408.00118): layers that see a window and layers that see everything in turn,
norms before and after each sublayer, GELU in a gated MLP, soft caps on scores and logits, heads of
a size of their own, and an embedding scaled by the square root of the hidden size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mtx.families.llama import Llama
from mtx.fields import require_above
from mtx.sizes import Tokens, Width


@dataclass(frozen=True, kw_only=True)
class Gemma2(Llama):
    """Gemma 2."""

    family: str = "gemma2"
    norm_epsilon: float = 1e-6
    head_dim: Width | None = 256
    window: Tokens = 4096  # of every other layer, the first included: what a position sees
    score_scale: float = 256.0  # scores are products of queries and keys over its square root
    score_cap: float | None = 50.0  # scores are cap tanh(score / cap); None: as they are
    logit_cap: float | None = 30.0  # logits likewise

    def check(self) -> None:
        super().check()
        require_above(self, 0, "score_scale")
        for name in ("score_cap", "logit_cap"):
            if getattr(self, name) is not None:
                require_above(self, 0, name)

    def norm(self):
        return replace(super().norm(), offset=1.0)

    def stack(self):
        from mtx.layers.attend import Scores
        from mtx.layers.layer import Stack
        from mtx.layers.mlp import MLP

        mlp = MLP(ffn=self.ffn_hidden, activation="gelu_tanh", gated=True, bias=False)

        def kind(window: int | None):
            scale = 1 / math.sqrt(self.score_scale)
            scores = Scores(window=window, scale=scale, softcap=self.score_cap)
            return replace(
                self.kind(),
                sublayers=(("attention", self.attention(scores=scores)), ("mlp", mlp)),
                norm_placement="both",
            )

        edges = self.edges()
        edges["embedding"] = replace(edges["embedding"], scale=math.sqrt(self.hidden))
        edges["head"] = replace(edges["head"], softcap=self.logit_cap)
        kinds = {"window": kind(self.window), "full": kind(None)}
        pattern = tuple("full" if layer % 2 else "window" for layer in range(self.layers))
        if self.layers == 1:
            del kinds["full"]
        return Stack(kinds=kinds, pattern=pattern, **edges)


CONFIG = Gemma2
