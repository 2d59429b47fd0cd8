"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): a Llama with biases on queries, keys and
values. Some of their layers may see a window only: those from `full_layers` on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mtx.families.llama import Llama
from mtx.fields import Between
from mtx.sizes import Tokens


@dataclass(frozen=True, kw_only=True)
class Qwen2(Llama):
    """Qwen2 and Qwen2.5, dense."""

    family: str = "qwen2"
    window: Tokens | None = None  # positions that a position sees, itself included; None: all
    full_layers: Annotated[int, Between(0, 2**14)] = 0  # with a window: the first, without one

    def stack(self):
        return windowed_after(self, self.full_layers, bias=True)


def windowed_after(model: Qwen2, full: int, **attention):
    """The stack whose layers after the first `full` ones have the model's window, if any."""
    from mtx.layers.attend import Scores
    from mtx.layers.layer import Stack

    windowed = 0 if model.window is None else max(0, model.layers - full)
    if windowed in (0, model.layers):
        scores = Scores(window=model.window if windowed else None)
        kind = model.kind(scores=scores, **attention)
        return Stack.uniform(kind, model.layers, **model.edges())
    return Stack(
        kinds={
            "full": model.kind(**attention),
            "window": model.kind(scores=Scores(window=model.window), **attention),
        },
        pattern=("full",) * (model.layers - windowed) + ("window",) * windowed,
        **model.edges(),
    )


CONFIG = Qwen2
