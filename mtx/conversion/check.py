"""Whether a converted model computes what its source does: logits of random tokens.

Our model runs with the parameters of our checkpoint, one layer in memory at a time. It is compared
with transformers, which reads the other side by itself, or with our model again, with its
parameters read from the other side: this finds what was written or read wrongly, but not a mistake
in a family's table of names. All in float32.

Legend: B rows · S sequence · D hidden · V vocabulary
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from mtx.config import ModelConfig
from mtx.conversion.huggingface import Canonical, HuggingFaceModel
from mtx.data.images import patch_places
from mtx.errors import UserError, reason
from mtx.families.llava import Llava
from mtx.layers.model import Model
from mtx.layers.norm import layer_norm
from mtx.layers.vision import normed_pixels

Check = Literal["auto", "transformers", "ours", "none"]
_ROWS, _MOST_POSITIONS = 2, 32
_TOLERANCE = 1e-3  # of the largest logit; float32 rounding is a hundredth of that


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Logits of both sides."""

    positions: int  # compared, each over the whole vocabulary
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


class Outputs(NamedTuple):
    """A model's outputs for some tokens."""

    logits: np.ndarray  # [B, S, V]; [B, S, D] for a model without a head
    order_B2: np.ndarray | None = None  # logits of BERT's binary head, if it has one


def compare(
    model: ModelConfig, ours: Canonical, theirs: HuggingFaceModel, *, check: Check = "auto"
) -> Comparison:
    """Runs the same random tokens through our model and through theirs.

    check: "transformers", or "ours", our model with the parameters of `theirs`; "auto": the former
    if it is installed and memory has room for the whole model. The first row's positions are
    consecutive; those of the second are spread from the first of the sequence to the last, from
    which transformers takes the base of "dynamic" rotary positions. UserError for
    check="transformers" if that is not installed.
    """
    stream = np.random.default_rng(0)
    size = min(_MOST_POSITIONS, model.sequence)
    tokens_BS = stream.integers(0, model.vocab, (_ROWS, size), dtype=np.int32)
    spread_S = np.arange(size) * (model.sequence - 1) // max(1, size - 1)
    positions_BS = np.stack([np.arange(size), spread_S]).astype(np.int32)
    pixels = None
    if isinstance(model, Llava):
        tokens_BS, positions_BS, pixels = _with_images(model, tokens_BS, stream)
    has_head = "head.masked" not in theirs.absent
    own = our_outputs(model, ours, tokens_BS, positions_BS, pixels, has_head=has_head)
    if check == "transformers" or (check == "auto" and _transformers_can(theirs)):
        other, what = _transformers_outputs(theirs, tokens_BS, positions_BS, pixels)
    else:
        other = our_outputs(model, theirs, tokens_BS, positions_BS, pixels, has_head=has_head)
        what = "our model with the other side's parameters"
    largest_difference = _largest(own.logits - other.logits)
    has_order = not {"head.pooler", "head.binary"} & set(theirs.absent)
    if has_order and own.order_B2 is not None and other.order_B2 is not None:
        one, another = np.diff(own.order_B2), np.diff(other.order_B2)
        largest_difference = max(largest_difference, _largest(one - another))
    return Comparison(
        positions=tokens_BS.size, largest_difference=largest_difference,
        largest_logit=_largest(other.logits), other=what,
    )  # fmt: skip


def _with_images(
    model: Llava, tokens_BS: np.ndarray, stream: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, the first of each row standing for an image; their positions; pixels)"""
    seen = np.full((len(tokens_BS), model.patches), model.placeholder, np.int32)
    text_BS = np.where(tokens_BS == model.placeholder, 0, tokens_BS)
    tokens_BS = np.concatenate([seen, text_BS], axis=1)[:, : model.sequence]
    shape = len(tokens_BS), model.images, model.image_size, model.image_size, 3
    places_BS = np.broadcast_to(np.arange(tokens_BS.shape[1], dtype=np.int32), tokens_BS.shape)
    return tokens_BS, places_BS, stream.integers(0, 256, shape, dtype=np.uint8)


def _largest(array: np.ndarray) -> float:
    """The largest absolute value; infinity if one of them is not a number."""
    largest = float(np.abs(array).max(initial=0.0))
    return largest if math.isfinite(largest) else math.inf


# --- ours -----------------------------------------------------------------------------------------


def our_outputs(
    config: ModelConfig, source: Canonical, tokens_BS, positions_BS, pixels=None, *,
    has_head: bool = True,
) -> Outputs:  # fmt: skip
    """The outputs of our own modules, with embedding, head and one layer at a time in memory."""
    model = _model(config)

    def read(start: str, layer: int | None = None) -> dict[str, Any]:
        arrays, rows = {}, slice(None) if layer is None else slice(layer, layer + 1)
        for path in (path for path in source.shapes if path.startswith(start)):
            array = source.read(path, (rows,))
            arrays[path.removeprefix(start)] = jnp.asarray(array if layer is None else array[0])
        return unflatten_dict(arrays, sep=".")

    shared = {"embed": read("embed."), "head": read("head.")}
    batch = {"tokens": tokens_BS, "positions": positions_BS, "types": np.zeros_like(tokens_BS)}
    if config.objective == "spans":
        batch["inputs"] = tokens_BS
    if isinstance(config, Llava):
        batch |= {"pixels": pixels, "patches": patch_places(tokens_BS, config.placeholder)}
    stream, context = model.embed(shared, batch), model.context(0, batch, None, None)
    for place, kind in enumerate(model.pattern):
        layer = model.pattern[:place].count(kind)
        params = read(f"layers.{kind}.", layer)
        stream = jax.block_until_ready(model.layer(kind, params, stream, context))
    x_BSD = stream["x"]
    order_B2 = _order(model, shared, x_BSD) if "binary" in shared["head"] else None
    if not has_head:  # BERT's last layer as Hugging Face has it: after the last norm, if any
        norm = shared["head"].get("norm")
        if norm is not None:
            x_BSD = layer_norm(x_BSD, norm["scale"], norm["bias"], config.norm_epsilon)
        return Outputs(np.asarray(x_BSD), order_B2)
    every = x_BSD.reshape(-1, 1, config.hidden)  # each position in a row of its own
    logits = model.next_logits(shared, {"x": every}, np.zeros(len(every), np.int32))
    return Outputs(np.asarray(logits).reshape(*tokens_BS.shape, -1), order_B2)


@functools.lru_cache(maxsize=2)
def _model(config: ModelConfig) -> Model:
    """Our model in float32, without dropout and padding; compiled once for both sides."""
    model = Model(
        replace(
            config, vocab_multiple=1, dropout=0.0, attention_dropout=0.0, compute_dtype="float32"
        )
    )  # fmt: skip

    def exactly(function: Callable, **static: Any) -> Callable:
        return jax.jit(jax.default_matmul_precision("highest")(function), **static)

    model.embed, model.loss = exactly(model.embed), exactly(model.loss)
    model.layer = exactly(model.layer, static_argnums=0)
    model.next_logits = exactly(model.next_logits)
    return model


def _order(model: Model, shared: dict[str, Any], x_BSD: jax.Array) -> np.ndarray:
    """[B, 2]: log-probabilities of the binary head, from its loss for each label."""
    nothing_1S = np.zeros((1, x_BSD.shape[1]), np.int32)
    batch = {"targets": nothing_1S, "weights": nothing_1S.astype(np.float32)}
    found_B2 = np.empty((len(x_BSD), 2), np.float32)
    for row, label in np.ndindex(found_B2.shape):
        order = {"order": np.array([label], np.int32), "order_weights": np.ones(1, np.float32)}
        found_B2[row, label] = -model.loss(shared, {"x": x_BSD[row : row + 1]}, batch | order)
    return found_B2


# --- theirs ---------------------------------------------------------------------------------------


def _transformers_can(theirs: HuggingFaceModel) -> bool:
    """Whether transformers is installed and memory has room for the whole model, in float32."""
    if not (importlib.util.find_spec("transformers") and importlib.util.find_spec("torch")):
        return False
    needed = 2 * 4 * sum(math.prod(shape) for shape in theirs.shapes.values())
    try:
        return needed < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not Linux: only a model that any machine has room for
        return needed < 2 << 30


def _require_sizes(theirs: HuggingFaceModel, others: Iterable[tuple]) -> None:
    """others: (tensor, its shape in the file, its shape in the model of config.json)"""
    for name, written, asked in others:
        raise UserError(
            f"{theirs.directory}: {name} is {list(written)}, and {list(asked)} in the model of its "
            "config.json; correct that, or what the family's to_config writes of it"
        )


def _transformers_outputs(
    theirs: HuggingFaceModel, tokens_BS, positions_BS, pixels=None
) -> tuple[Outputs, str]:
    try:
        # From mtx[peers], which pyright's machine need not have: they would take half of its time.
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise UserError(
            f"check='transformers' needs {error.name}: pip install 'mtx[peers]', or use "
            "check='ours'"
        ) from error
    # Not what `architectures` says: a GPT2Model is saved without the head that it shares.
    name = "AutoModelForMaskedLM" if theirs.absent else theirs.kind.architecture
    kind = getattr(transformers, "AutoModel" if "head.masked" in theirs.absent else name)
    logging = transformers.utils.logging
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        model, loaded = kind.from_pretrained(
            theirs.directory, dtype=torch.float32, attn_implementation="eager",
            ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
        _require_sizes(theirs, loaded["mismatched_keys"])
        model.eval()
        with torch.no_grad():
            ids, places = (torch.tensor(a).long() for a in (tokens_BS, positions_BS))
            spans = theirs.model.objective == "spans"
            further = {"decoder_input_ids": ids} if spans else {"position_ids": places}
            if pixels is not None:  # of each row's first image, which all its places are for
                first = normed_pixels(pixels[:, 0])
                further["pixel_values"] = torch.tensor(np.asarray(first)).permute(0, 3, 1, 2)
            out = model(input_ids=ids, attention_mask=torch.ones_like(ids), **further)
    except UserError:
        raise
    except Exception as error:  # a config.json may make it raise anything
        raise UserError(
            f"transformers cannot run {theirs.directory}: {reason(error)}; use check='ours'"
        ) from error
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    order = getattr(out, "seq_relationship_logits", None)
    found = (getattr(out, field, None) for field in ("logits", "prediction_logits"))
    logits = next((a for a in found if a is not None), None)
    logits = (out.last_hidden_state if logits is None else logits).numpy()
    outputs = Outputs(logits, None if order is None else order.numpy())
    return outputs, f"transformers {transformers.__version__}"
