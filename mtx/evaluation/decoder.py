"""A trained model ready to generate text: parameters in the compute type, keys and values kept.

A batch of texts begins with one pass over all of their positions, which keeps the keys and values
of every layer; then each token is a pass over one position per text. Both run the forward table of
the trainer's own pipeline, so they work on any layout: kept keys and values are sharded by layers
over `pipe`, by heads over `tensor`, by texts over `data` and by positions over `context`, and stay
there. A layer's state, which has the same size for any length of text, is kept with them, whole on
each device of `context`. A first pass is cut over `context` as in training; for a single position,
all devices of `context` compute the same.

Legend: G rows of a batch, one per text · T positions of a first pass · t of any pass · S positions
kept · K head size · n = 2 for keys, values · k candidates · V vocabulary (v: shard) · B rows of a
microbatch · P stages · C chunks · N layers a chunk
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from mtx.config import ModelConfig
from mtx.data.images import patch_places
from mtx.errors import UserError
from mtx.pipeline.program import Pipeline
from mtx.schedules.makers import forward_table
from mtx.sharding.axes import BATCH, SEQUENCE
from mtx.sharding.candidates import candidates
from mtx.sharding.mesh import Axes
from mtx.sharding.sequence import is_state
from mtx.sizes import MOST_TOKENS
from mtx.step.state import TrainState
from mtx.step.step import batch_spec
from mtx.step.trainer import Trainer

Tree = Any
_ROWS = P(BATCH)
_STATE = P("pipe", None, None, None, BATCH, "tensor")  # [P, C, N, n, G, heads, ...]
_PAST = P(*_STATE, SEQUENCE)  # [P, C, N, n, G, heads, S, K]
_FEWEST = 16  # positions of a first pass, and kept: few sizes need few programs
# Rows of a microbatch of single tokens. A stage reads its weights once for each microbatch, and up
# to about this many rows that takes longer than the matmuls (an H100 does 990e12 / 3.35e12 = 296
# operations per byte of bfloat16 weights): fewer microbatches are faster, though stages idle.
_ROWS_A_READ = 256


class Choices(NamedTuple):
    """The choices for the next token of a text, on the host."""

    ids: np.ndarray | None  # int32 [k], ascending; None: all ids of the vocabulary
    logits: np.ndarray  # float32 [k] or [V]


class Decoder:
    """Continues texts with the parameters that `state` has now.

    Each function returns the `count` likeliest next tokens of every text; 0: the logits of all. No
    token has an id of `vocab` or above. Raises UserError for a model that does not predict the next
    token.
    """

    def __init__(self, trainer: Trainer, state: TrainState, *, vocab: int):
        model = trainer.run.model
        check_generates(model)
        # An encoder's decoder has no positions of its own that could run out.
        self.sequence = model.sequence if model.causal else MOST_TOKENS
        self._model = model
        self._vocab = np.int32(min(vocab, model.vocab))
        self.encoder_sequence = model.sequences.get("encoder_sequence", 0)
        self._programs = programs_of(trainer)
        self._params = self._programs.gather(state.params)
        self._past = None

    # -- requests ---------------------------------------------------------------------------------

    def begin(
        self, texts: Sequence[Sequence[int]], room: int, *, count: int = 0,
        inputs: Sequence[Sequence[int]] = (), pixels: Sequence[np.ndarray] = (),
    ) -> list[Choices]:  # fmt: skip
        """The choices after each text, of which the model sees the last `sequence` tokens; keeps
        their keys and values, with room for texts of `room` tokens. inputs: what an encoder, if
        there is one, reads for each; pixels: the images of each, uint8 [n, side, side, 3]."""
        self.forget()  # makes room for the new texts
        windows = [text[-self.sequence :] for text in texts]
        kept = self._size(max(room, *map(len, windows)))
        padded = self._padded(windows)
        batch = self._placed(padded | self._encoded(inputs) | self._seen(padded["tokens"], pixels))
        chosen, self._past = self._programs.begin(count, kept, self._params, batch, self._vocab)
        return self._choices(chosen, len(texts))

    def extend(
        self, tokens: Sequence[int], positions: Sequence[int], *, count: int = 0
    ) -> list[Choices]:
        """The choices after each text with one more token: that token and its position, which
        counts from 0 and is below the room that there is."""
        batch = self._placed({
            "tokens": np.array(tokens, np.int32)[:, None],
            "positions": np.array(positions, np.int32)[:, None],
            "last": np.zeros(len(tokens), np.int32),
        })  # fmt: skip
        chosen, self._past = self._programs.extend(
            count, self._params, batch, self._vocab, self._past
        )
        return self._choices(chosen, len(tokens))

    def read(self, texts: Sequence[Sequence[int]], *, count: int = 0) -> list[Choices]:
        """Like `begin`, but keeps nothing, and leaves what is kept as it is."""
        windows = [text[-self.sequence :] for text in texts]
        batch = self._placed(self._padded(windows))
        chosen = self._programs.read(count, self._params, batch, self._vocab)
        return self._choices(chosen, len(texts))

    def forget(self) -> None:
        """Frees the memory of what is kept."""
        self._past = None

    @property
    def kept_bytes(self) -> int:
        """The size of kept keys and values, on all devices together."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._past))

    # -- to the devices and back ------------------------------------------------------------------

    def _size(self, positions: int) -> int:
        """The power of two that holds `positions`, rounded up until each of the 2c chunks of
        `context` has a multiple of c, see `kept_of_parts`; at most the model's sequence."""
        size, unit = max(_FEWEST, _power_of_two_from(positions)), 2 * self._programs.shards**2
        return min(self.sequence, -(-size // unit) * unit)

    def _padded(self, windows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        """{"tokens": [G, T], "last": [G], the place of each text's last token}"""
        tokens_GT = np.zeros((len(windows), self._size(max(map(len, windows)))), np.int32)
        for row, window in enumerate(windows):
            tokens_GT[row, : len(window)] = window
        last_G = np.array([len(window) - 1 for window in windows], np.int32)
        return {"tokens": tokens_GT, "last": last_G}

    def _encoded(self, inputs: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        """{"inputs": [G, E], "segments": [G, E], 1 for text and 0 for padding}; {} without any"""
        if not inputs:
            return {}
        shape = len(inputs), self.encoder_sequence
        found = {name: np.zeros(shape, np.int32) for name in ("inputs", "segments")}
        for row, text in enumerate(inputs):
            found["inputs"][row, : len(text)], found["segments"][row, : len(text)] = text, 1
        return found

    def _seen(self, tokens_GT: np.ndarray, pixels: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """{"pixels": [G, I, side, side, 3], "patches": [G, T]}; {} without any"""
        if not any(map(len, pixels)):
            return {}
        model: Any = self._model
        side = model.image_size
        found = np.zeros((len(pixels), model.images, side, side, 3), np.uint8)
        for row, images in enumerate(pixels):
            found[row, : len(images)] = images
        return {"pixels": found, "patches": patch_places(tokens_GT, model.placeholder)}

    def _placed(self, batch: dict[str, np.ndarray]) -> Tree:
        """Places a batch on the devices, filled by its first rows to a power of two per replica."""
        data = self._programs.data
        rows = data * _power_of_two_from(-(-len(batch["tokens"]) // data))
        filled = {name: np.resize(a, (rows, *a.shape[1:])) for name, a in batch.items()}
        return self._programs.place(filled)

    def _choices(self, chosen, rows: int) -> list[Choices]:
        if not jax.tree.leaves(chosen)[0].is_fully_addressable:
            chosen = multihost_utils.process_allgather(chosen, tiled=True)
        ids, logits = jax.device_get(chosen)
        if ids is None:
            return [Choices(None, logits_V[: self._vocab]) for logits_V in logits[:rows]]
        orders = np.argsort(ids, axis=1)
        return [Choices(ids[row, orders[row]], logits[row, orders[row]]) for row in range(rows)]


def check_generates(model: ModelConfig) -> None:
    """Raises UserError for a model that does not predict the next token of a text alone."""
    if model.objective == "retrieval":
        raise UserError(
            f"family={model.family!r} reads the neighbours of each chunk, which nothing looks for "
            "while a text is written: it cannot generate; use another family"
        )
    if model.objective == "masked tokens":
        raise UserError(
            f"family={model.family!r} does not predict the next token of a text, so it cannot "
            "generate; use a model that does, as of family='gpt' or 'llama'"
        )


class _Whole(Trainer):
    """A trainer whose devices along `context` all have whole sequences, of one position or more."""

    @cached_property
    def axes(self) -> Axes:
        return replace(super().axes, context=None)


class Programs:
    """What runs on the devices: pure functions, compiled for each power of two of texts, of first
    positions and of kept positions that occurs, and for each number of candidates."""

    def __init__(self, trainer: Trainer):
        # A single position cannot be divided: neither slices nor sequence parallelism.
        layout = replace(trainer.run.layout, slices=1, sequence_parallel=False)
        run = replace(trainer.run, layout=layout, global_batch=layout.replicas * layout.microbatch)
        table = forward_table(trainer.schedule.virtual_stages, 1)
        self._whole = _Whole(run, mesh=trainer.mesh, schedule=table)
        self._cut = self._whole
        if layout.context > 1:
            self._cut = Trainer(run, mesh=trainer.mesh, schedule=table)
        self._microbatch = layout.microbatch
        self.data = layout.replicas
        self.shards = layout.context  # of a text, and of what is kept of it

    def place(self, batch: dict[str, np.ndarray]) -> Tree:
        return self._trainer_of(batch).place(batch)

    def _trainer_of(self, batch: Tree) -> Trainer:
        """The trainer for a single position per text, or for several."""
        return self._whole if batch["tokens"].shape[1] == 1 else self._cut

    @cached_property
    def gather(self):
        """masters -> parameters in the compute type; with zero=3 those of blocks stay shards."""

        def gather(masters):
            params = self._whole.step.gather(masters, float8=False)
            return params | {"layers": jax.tree.map(lambda a: a[None], params["layers"])}

        masters = self._whole.states.specs.params
        return jax.jit(self._whole.shard_map(gather, (masters,), self._specs))

    @cached_property
    def begin(self):
        """(count, room, params, batch, vocab) -> ((ids, logits), past)"""

        def begin(count, room, params, batch, vocab):
            pipeline = self._pipeline(batch, self._microbatch)
            past = pipeline.empty_past(len(batch["tokens"]), room // self.shards)
            chosen, past = self._forward(pipeline, params, batch, vocab, count, past)
            return chosen, _stacked(past)

        return self._compiled(begin, static=2, keeps=True)

    @cached_property
    def extend(self):
        """(count, params, batch, vocab, past) -> ((ids, logits), past); the past is donated"""

        def extend(count, params, batch, vocab, past):
            pipeline, past = self._pipeline(batch, _ROWS_A_READ), jax.tree.map(lambda a: a[0], past)
            chosen, past = self._forward(pipeline, params, batch, vocab, count, past)
            return chosen, _stacked(past)

        return self._compiled(extend, static=1, keeps=True, donate_argnums=4)

    @cached_property
    def read(self):
        """(count, params, batch, vocab) -> (ids, logits)"""

        def read(count, params, batch, vocab):
            pipeline = self._pipeline(batch, self._microbatch)
            return self._forward(pipeline, params, batch, vocab, count)

        return self._compiled(read, static=1, keeps=False)

    def _compiled(self, local, *, static: int, keeps: bool, **options):
        """Compiles `local`, a function of `static` static arguments, the first of them `count`, and
        then of local shards. keeps: whether it returns a past."""

        def run(*arguments):
            count, arrays = arguments[0], arguments[static:]
            axes = self._trainer_of(arrays[1]).axes
            of_batch = jax.tree.map(lambda a: batch_spec(a, axes), arrays[1])
            chosen = (_ROWS, _ROWS) if count else (None, P(BATCH, axes.vocab or None))
            specs = (self._specs, of_batch, P(), self._past_specs)[: len(arrays)]
            mapped = self._whole.shard_map(
                partial(local, *arguments[:static]), specs,
                (chosen, self._past_specs) if keeps else chosen,
            )  # fmt: skip
            return mapped(*arrays)

        return jax.jit(run, static_argnums=tuple(range(static)), **options)

    @cached_property
    def _specs(self) -> Tree:
        """The specs of gathered parameters."""
        states = self._whole.states
        return jax.tree.map(
            lambda by_pipeline, master, whole: master if by_pipeline else whole,
            states.by_pipeline, states.specs.params, states.param_specs,
        )  # fmt: skip

    @cached_property
    def _past_specs(self) -> Tree:
        """The specs of what is kept, one entry per sublayer of a kind."""
        model = self._whole.model

        def specs(kind: str) -> Tree:
            past = jax.eval_shape(lambda: model.empty_past(kind, 1, self.shards))
            return jax.tree.map(
                lambda entry: _STATE if is_state(entry) else _PAST, past, is_leaf=is_state
            )

        return {kind: specs(kind) for kind in dict.fromkeys(model.pattern)}

    def _pipeline(self, batch: Tree, most: int) -> Pipeline:
        """The pipeline for the rows of this replica, in microbatches of at most `most`."""
        rows = len(batch["tokens"])
        size = min(rows, 1 << (most.bit_length() - 1))  # a power of two, as the rows are
        trainer = self._trainer_of(batch)
        table = forward_table(trainer.schedule.virtual_stages, rows // size)
        return replace(trainer.pipeline, schedule=table)

    def _forward(self, pipeline: Pipeline, params, batch, vocab, count: int, past=None):
        """Runs the pipeline inside `shard_map`."""
        params = params | {"layers": jax.tree.map(lambda a: a[0], params["layers"])}
        microbatches = pipeline.schedule.microbatches
        batch = jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), batch)

        def output(shared, stream, batch):
            logits_Bv = pipeline.model.next_logits(shared, stream, batch["last"])
            return (
                candidates(logits_Bv, count, vocab, pipeline.axes) if count else (None, logits_Bv)
            )

        result = pipeline.forward(params, batch, output, past)
        chosen, *past = (result,) if past is None else result
        chosen = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), chosen)
        return (chosen, *past) if past else chosen


programs_of = lru_cache(maxsize=2)(Programs)  # generating again compiles nothing


def _stacked(past):
    """[1, C, N, ...]: adds a dim for this stage."""
    return jax.tree.map(lambda a: a[None], past)


def _power_of_two_from(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()
