"""Checks of a batch of host arrays, made before it is given to devices, where an id outside the
vocabulary would be taken for another."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mtx.config import ModelConfig
from mtx.errors import UserError

_OF_TOKENS = ("tokens", "targets", "inputs", "neighbours")  # the arrays of ids


def check_tokens(batch: Mapping[str, np.ndarray], model: ModelConfig) -> None:
    """Raise UserError for sequences longer than the model's and for ids outside its vocabulary.
    Arrays that are already on devices are not checked."""
    for name in _OF_TOKENS:
        ids = batch.get(name)
        if not isinstance(ids, np.ndarray) or not ids.size:
            continue
        if name == "tokens" and ids.shape[-1] > model.sequence:
            raise UserError(
                f"a batch of {' x '.join(map(str, ids.shape))} tokens for sequence="
                f"{model.sequence}; cut it, or set model.sequence"
            )
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= model.vocab:
            raise UserError(
                f"batch {name} from {least} to {most} must lie below vocab={model.vocab}, from 0 "
                "on; use the tokenizer of the model, or a larger model.vocab"
            )
