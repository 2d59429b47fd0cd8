"""Mistral (Jiang et al. 2023, arXiv 2310.06825): a Llama whose attention sees a window of the last
positions."""

from __future__ import annotations

from dataclasses import dataclass

from mtx.families.llama import Llama
from mtx.sizes import Tokens


@dataclass(frozen=True, kw_only=True)
class Mistral(Llama):
    """Mistral 7B and its kin."""

    family: str = "mistral"
    window: Tokens | None = 4096  # positions that a position sees, itself included; None: all

    def stack(self):
        from mtx.layers.attend import Scores
        from mtx.layers.layer import Stack

        kind = self.kind(scores=Scores(window=self.window))
        return Stack.uniform(kind, self.layers, **self.edges())


CONFIG = Mistral
