"""Whether a converted model computes what its source does: logits of random tokens.

Our model runs with the parameters that were written and are read back, a layer at a time; Hugging
Face's by the formulas of `mtx.conversion.forward`, or by transformers itself. All in float32.

Legend: B rows · S sequence · D hidden · V vocabulary
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtx.config import ModelConfig
from mtx.conversion.configs import Fields
from mtx.conversion.forward import FORWARDS, Outputs
from mtx.conversion.huggingface import CONFIG, Canonical, HuggingFaceModel, Shape, parts
from mtx.conversion.safetensors import DTYPES
from mtx.errors import UserError
from mtx.layers.model import Model
from mtx.layers.norm import layer_norm

Leaves = Iterator[tuple[str, np.ndarray]]  # each with its path
Check = Literal["formulas", "transformers", "none"]
_ROWS, _MOST_POSITIONS = 2, 32
_TOLERANCE = 1e-3  # of the largest logit; float32 rounding is a hundredth of that


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Logits of both sides."""

    positions: int  # compared, each with all of the vocabulary
    largest_difference: float
    largest_logit: float  # in absolute value
    other: str  # what ours was compared with

    @property
    def agrees(self) -> bool:
        largest = max(1.0, self.largest_logit)
        return math.isfinite(largest) and self.largest_difference <= _TOLERANCE * largest

    def __str__(self) -> str:
        return (
            f"largest difference {self.largest_difference:.2e} in logits of up to "
            f"{self.largest_logit:.4g}, at {self.positions} random tokens, from {self.other}"
        )


class Rounded:
    """Canonical arrays as they are in another dtype."""

    def __init__(self, source: Canonical, dtype: str):
        self._source, self._dtype = source, DTYPES[dtype]
        self.shapes: Mapping[str, Shape] = source.shapes

    def read(self, path: str, rows: slice) -> np.ndarray:
        return self._source.read(path, rows).astype(self._dtype).astype(np.float32)


def compare(
    model: ModelConfig, ours: Canonical, theirs: HuggingFaceModel, *, check: Check = "formulas"
) -> Comparison:
    """The same random tokens through our model and through theirs.

    The first row's positions follow each other, those of the second are spread over the whole
    sequence. UserError for check="transformers" where that is not installed.
    """
    stream = np.random.default_rng(0)
    size = min(_MOST_POSITIONS, model.sequence)
    tokens_BS = stream.integers(0, model.vocab, (_ROWS, size), dtype=np.int32)
    positions_BS = np.arange(size, dtype=np.int32) * np.array([[1], [model.sequence // size]])
    positions_BS = positions_BS.astype(np.int32)
    if check == "transformers":
        other, what = _transformers_outputs(theirs, tokens_BS, positions_BS)
    else:
        fields = Fields(theirs.config, theirs.kind.defaults, str(theirs.directory / CONFIG))
        forward = FORWARDS[theirs.config["model_type"]]
        other, what = forward(theirs, fields, tokens_BS, positions_BS), "their formulas in NumPy"
    own = _our_outputs(model, ours, tokens_BS, positions_BS, has_head="head" not in theirs.absent)
    width = model.hidden if "head" in theirs.absent else model.vocab
    largest_difference = largest_logit = 0.0
    for rows in parts("ends.tokens", (width, model.hidden)):
        one, another = own.logits(rows), other.logits(rows)
        largest_difference = max(largest_difference, _largest(one - another))
        largest_logit = max(largest_logit, _largest(another))
    if own.order_B2 is not None and other.order_B2 is not None:
        one, another = (np.diff(logits.order_B2) for logits in (own, other))
        largest_difference = max(largest_difference, _largest(one - another))
    return Comparison(
        positions=tokens_BS.size, largest_difference=largest_difference,
        largest_logit=largest_logit, other=what,
    )  # fmt: skip


def _largest(array: np.ndarray) -> float:
    """In absolute value; infinite where there is one that is no number."""
    largest = float(np.abs(array).max(initial=0.0))
    return largest if math.isfinite(largest) else math.inf


# --- ours -----------------------------------------------------------------------------------------


def _our_outputs(
    config: ModelConfig, source: Canonical, tokens_BS, positions_BS, *, has_head: bool
) -> Outputs:
    """Of our own modules, whose tables hold only the rows of the vocabulary at hand."""

    def ends(rows: slice) -> Leaves:
        for path in source.shapes:
            if path.startswith("ends."):
                yield path.removeprefix("ends."), source.read(path, _vocab_rows(path, rows))

    ids = np.unique(tokens_BS)
    embedding = _tree(ends(slice(0, 1)))
    rows = [source.read("ends.tokens", slice(token, token + 1)) for token in ids.tolist()]
    embedding["tokens"] = jnp.concatenate(rows)
    batch = {"tokens": np.searchsorted(ids, tokens_BS).astype(np.int32), "positions": positions_BS}
    batch |= {"types": np.zeros_like(tokens_BS)} if config.family == "bert" else {}
    model = _model(config, len(ids))
    x_BSD = model.embed(embedding, batch)
    place = model.place(batch)
    for layer in range(config.layers):  # one in memory at a time
        x_BSD = jax.block_until_ready(model.block(_tree(_block(source, layer)), x_BSD, place))
    x_BSD = jax.device_get(x_BSD)

    def logits(rows: slice) -> np.ndarray:
        if not has_head:
            return _normed(config, dict(ends(slice(0, 1))), x_BSD)[..., rows]
        each = x_BSD.reshape(-1, 1, config.hidden)  # every position a row of its own
        head = _model(config, rows.stop - rows.start).head
        flat = head(_tree(ends(rows)), each, np.zeros(len(each), np.int32))
        return np.asarray(flat).reshape(*x_BSD.shape[:2], -1)

    order_B2 = _order(config, _tree(ends(slice(0, 1))), x_BSD) if config.family == "bert" else None
    return Outputs(logits, order_B2)


def _block(source: Canonical, layer: int) -> Leaves:
    """The parameters of one layer, one after the other."""
    for path in source.shapes:
        if path.startswith("block."):
            yield path.removeprefix("block."), source.read(path, slice(layer, layer + 1))[0]


def _vocab_rows(path: str, rows: slice) -> slice:
    return rows if path in ("ends.tokens", "ends.output", "ends.head.bias") else slice(None)


class _Compiled(NamedTuple):
    """Functions of a model of ours."""

    embed: Callable
    place: Callable
    block: Callable
    head: Callable
    loss: Callable


@functools.lru_cache(maxsize=4)
def _model(config: ModelConfig, vocab: int) -> _Compiled:
    """Of ours, for a vocabulary of that many tokens, in float32 and without dropout."""
    config = replace(
        config, vocab=vocab, vocab_multiple=1, dropout=0.0, attention_dropout=0.0,
        compute_dtype="float32",
    )  # fmt: skip
    model = Model(config)

    def exactly(function: Callable) -> Callable:
        def run(*arguments):
            with jax.default_matmul_precision("highest"):
                return function(*arguments)

        return jax.jit(run)

    return _Compiled(
        embed=exactly(model.embed), place=lambda batch: model.place(0, batch, None, None),
        block=exactly(model.block), head=exactly(model.next_logits), loss=exactly(model.loss),
    )  # fmt: skip


def _tree(leaves: Leaves) -> dict[str, Any]:
    """("a.b", leaf), ... as nested dicts."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves:
        *names, last = path.split(".")
        node = tree
        for name in names:
            node = node.setdefault(name, {})
        node[last] = jnp.asarray(leaf)
    return tree


def _normed(config: ModelConfig, ends: Mapping[str, np.ndarray], x_BSD: np.ndarray) -> np.ndarray:
    """BERT's last layer as Hugging Face has it: after the last norm, where there is one."""
    if config.norm_placement == "post":
        return x_BSD
    scale, bias = ends["norm.scale"], ends["norm.bias"]
    return np.asarray(layer_norm(x_BSD, scale, bias, config.norm_epsilon))


def _order(config: ModelConfig, ends: dict[str, Any], x_BSD: np.ndarray) -> np.ndarray:
    """[B, 2]: log-probabilities of the binary head, from its loss for each label."""
    loss, nothing_1S = _model(config, 1).loss, np.zeros((1, x_BSD.shape[1]), np.int32)
    batch = {"targets": nothing_1S, "weights": nothing_1S.astype(np.float32)}
    found_B2 = np.empty((len(x_BSD), 2), np.float32)
    for row, label in np.ndindex(found_B2.shape):
        order = {"order": np.int32([label]), "order_weights": np.float32([1])}
        found_B2[row, label] = -loss(ends, x_BSD[row : row + 1], batch | order)
    return found_B2


# --- theirs ---------------------------------------------------------------------------------------


def _transformers_outputs(theirs: HuggingFaceModel, tokens_BS, positions_BS) -> tuple[Outputs, str]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UserError(
            f"check='transformers' needs {error.name}: pip install 'mtx[peers]', or use "
            "check='formulas'"
        ) from error
    # Not what `architectures` says: a GPT2Model is saved without the head that it shares.
    name = "AutoModelForMaskedLM" if theirs.absent else theirs.kind.architecture
    kind = getattr(transformers, "AutoModel" if "head" in theirs.absent else name)
    model = kind.from_pretrained(theirs.directory, dtype=torch.float32).eval()
    with torch.no_grad():
        ids, places = (torch.tensor(a).long() for a in (tokens_BS, positions_BS))
        out = model(input_ids=ids, position_ids=places, attention_mask=torch.ones_like(ids))
    order = getattr(out, "seq_relationship_logits", None)
    found = (getattr(out, field, None) for field in ("logits", "prediction_logits"))
    logits = next((a for a in found if a is not None), None)
    logits = (out.last_hidden_state if logits is None else logits).numpy()
    outputs = Outputs(lambda rows: logits[..., rows], None if order is None else order.numpy())
    return outputs, f"transformers {transformers.__version__}"
