"""Qwen3 (arXiv 2505.09388), dense: a Llama whose heads have a size of their own, and whose queries
and keys are normed, each head by itself, before they are turned."""

from __future__ import annotations

from dataclasses import dataclass

from mtx.families.qwen2 import Qwen2, windowed_after


@dataclass(frozen=True, kw_only=True)
class Qwen3(Qwen2):
    """Qwen3, dense."""

    family: str = "qwen3"

    def stack(self):
        return windowed_after(self, self.full_layers, norm=self.norm())


CONFIG = Qwen3
