"""Known mistakes, put into the step on purpose: whatever a certificate rests on has to catch each.

They are those of NVIDIA/Megatron-LM issue 7452 (silent numerical errors of composed parallelism)
and its neighbours, as far as this project has the parts for them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from mtx.certify.cases import Case
from mtx.certify.compare import compare, reference_of
from mtx.certify.small import small_model, small_run
from mtx.certify.step import walk_run
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.layers import attention, bert, context
from mtx.pipeline.program import Pipeline
from mtx.pipeline.run import Run
from mtx.schedules.schedule import IDLE
from mtx.sharding import linear, optimizer, vocab
from mtx.sharding.axes import BATCH, axes_of
from mtx.sharding.optimizer import DataShard
from mtx.step import step

Tree = Any
Change = contextlib.AbstractContextManager


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A mistake, and a run that has what it spoils."""

    name: str
    what: str
    change: Callable[[], Change]
    run: RunConfig


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Whether a mutant was caught, and by what."""

    mutant: Mutant
    by: Literal["walker", "run", ""]
    said: str  # of the first that was found

    @property
    def caught(self) -> bool:
        return bool(self.by)


def try_mutants(report: Callable = lambda *_: None) -> list[Tried]:
    """All of them: those that the walker does not see are run."""
    tried = []
    for number, mutant in enumerate(MUTANTS):
        report(number, len(MUTANTS), mutant.name)
        tried.append(try_mutant(mutant))
    return tried


def try_mutant(mutant: Mutant) -> Tried:
    with mutant.change():
        findings = walk_run(mutant.run).findings
    if findings:
        return Tried(mutant=mutant, by="walker", said=str(findings[0]))
    reference_of(mutant.run)  # of the step as it is
    with mutant.change():
        found = compare(Case(number=0, run=mutant.run, why=mutant.name))
    by = "run" if found.beyond and not found.error else ""
    return Tried(mutant=mutant, by=by, said=found.said)


# -- the runs that they spoil ----------------------------------------------------------------------


def _run(family: str = "gpt", model: dict[str, Any] | None = None, **layout: Any) -> RunConfig:
    layout = {"data": 2, "pipe": 2, "tensor": 2} | layout
    small = small_model(ModelConfig(family=family), layers=4, **(model or {}))
    return small_run(RunConfig(), small, Layout(**layout, attention="blocked"), 8)


# -- sums of the step ------------------------------------------------------------------------------


def _loss_times_replicas() -> Change:
    real = Pipeline.gradients

    def gradients(self, params, batch, samples_MB, rng, loss_weight):
        return real(self, params, batch, samples_MB, rng, loss_weight * lax.axis_size(BATCH))

    return mock.patch.object(Pipeline, "gradients", gradients)


def _first_sum(mistaken: Callable) -> Change:
    """The step's first sum over replicas, that of the tokens, made another way."""
    calls = iter(())

    def start(real):
        def microbatches(self, batch):
            nonlocal calls
            calls = iter([mistaken])
            return real(self, batch)

        return microbatches

    real_sum = step.sum_over_replicas
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(step.Step, "microbatches", start(step.Step.microbatches)))
    stack.enter_context(
        mock.patch.object(step, "sum_over_replicas", lambda values: next(calls, real_sum)(values))
    )
    return stack


def _tokens_of_own_replica() -> Change:
    return _first_sum(lambda tokens: tokens * lax.axis_size(BATCH))


def _tokens_over_other_axes() -> Change:
    return _first_sum(lambda tokens: lax.psum(tokens, "tensor"))


def _loss_of_own_replica() -> Change:
    real = step.Step.loss_and_gradients

    def loss_and_gradients(self, masters, batch, number, scale):
        batch = self.microbatches(batch)  # of which the real one makes no more
        with mock.patch.object(step.Step, "microbatches", lambda self, batch: batch):
            tokens = step.sum_over_replicas(batch["weights"].sum())
            calls = iter([lambda values: tokens])
            with mock.patch.object(
                step, "sum_over_replicas", lambda v: next(calls, lambda same: same)(v)
            ):
                return real(self, masters, batch, number, scale)

    return mock.patch.object(step.Step, "loss_and_gradients", loss_and_gradients)


def _sums(mistaken: Callable) -> Change:
    return mock.patch.object(step, "sum_axes", mistaken)


def _no_sum_of_replicated() -> Change:
    return _sums(lambda spec, *, sequence_parallel: BATCH)


def _sum_of_whole_gradients() -> Change:
    real = step.sum_axes
    return _sums(lambda spec, *, sequence_parallel: real(spec, sequence_parallel=True))


def _sum_of_shards() -> Change:
    return _sums(lambda spec, *, sequence_parallel: (*BATCH, "tensor"))


# -- norm ------------------------------------------------------------------------------------------


def _norm(axes: Callable, *, shares: bool) -> Change:
    def global_norm(gradients, specs, sizes):
        def square(gradient, spec):
            others = [size for axis, size in sizes.items() if axis not in axes_of(spec)]
            return jnp.square(gradient).sum() / (math.prod(others) if shares else 1)

        squares = jax.tree.leaves(jax.tree.map(square, gradients, specs))
        return jnp.sqrt(lax.psum(sum(squares), axes(sizes)))

    return mock.patch.object(step, "global_norm", global_norm)


def _norm_counts_replicas() -> Change:
    return _norm(tuple, shares=False)


def _norm_of_own_shards() -> Change:
    return _norm(lambda sizes: BATCH, shares=True)


# -- ZeRO ------------------------------------------------------------------------------------------


def _gathered_over_tensor() -> Change:
    return mock.patch.object(optimizer, "lax", _With(
        all_gather=lambda x, axes, **how: lax.all_gather(x, ("tensor",), **how)
    ))  # fmt: skip


def _gathered_backwards() -> Change:
    def all_gather(x, axes, *, axis, tiled):
        parts = lax.all_gather(x, axes, axis=axis)
        parts = jnp.flip(parts, axis)
        return parts.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    return mock.patch.object(optimizer, "lax", _With(all_gather=all_gather))


def _own_part_of_own_gradient() -> Change:
    def reduce_scatter(self, gradient, *, stacked=True):
        if self.dim is None:
            return lax.psum(gradient, BATCH) if self.replicas else gradient
        gradient = self.pad(gradient)
        size = gradient.shape[self.dim] // lax.axis_size(BATCH)
        return lax.dynamic_slice_in_dim(gradient, lax.axis_index(BATCH) * size, size, self.dim)

    return mock.patch.object(DataShard, "reduce_scatter", reduce_scatter)


def _mean_over_replicas() -> Change:
    real = DataShard.reduce_scatter

    def reduce_scatter(self, gradient, *, stacked=True):
        return real(self, gradient, stacked=stacked) / lax.axis_size(BATCH)

    return mock.patch.object(DataShard, "reduce_scatter", reduce_scatter)


# -- layers ----------------------------------------------------------------------------------------


class _With:
    """jax.lax with some functions replaced."""

    def __init__(self, **replaced: Callable):
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(lax, name)


def _no_sum_of_head_norms() -> Change:
    return mock.patch.object(attention, "used_by_heads", lambda w, axes: w)


def _no_sum_after_row_layers() -> Change:
    def summed(partial_BSD, axes):
        if not axes.sequence_parallel:
            return partial_BSD
        size = partial_BSD.shape[1] // axes.tensor_shards
        first = lax.axis_index(axes.tensor) * size
        return lax.dynamic_slice_in_dim(partial_BSD, first, size, 1)

    return mock.patch.object(linear, "_summed", summed)


def _no_sum_of_repeated_heads() -> Change:
    def psum(x, axes):
        return x if x.ndim == 4 else lax.psum(x, axes)  # a weight's gradient has four dims

    return mock.patch.object(linear, "lax", _With(psum=psum))


def _largest_of_own_vocabulary() -> Change:
    return mock.patch.object(vocab, "lax", _With(pmax=lambda x, axes: x))


def _no_sum_over_vocabulary() -> Change:
    return mock.patch.object(vocab, "lax", _With(psum=lambda x, axes: x))


def _second_loss_by_own_count() -> Change:
    real = bert.Pretraining.weigh

    def weigh(self, batch, total):
        return real(
            self, batch, lambda values: values if values.dtype == jnp.int32 else total(values)
        )

    return mock.patch.object(bert.Pretraining, "weigh", weigh)


def _second_loss_times_replicas() -> Change:
    real = bert.Pretraining.weigh

    def weigh(self, batch, total):
        batch = real(self, batch, total)
        return batch | {"order_weights": batch["order_weights"] * lax.axis_size(BATCH)}

    return mock.patch.object(bert.Pretraining, "weigh", weigh)


def _labels_shifted_after_cutting() -> Change:
    real = Run.batch_of

    def batch_of(self, item):
        rows = real(self, item)
        last = rows["tokens"][:, :1] * 0  # of the row's end there is no next token here
        shifted = jnp.concatenate([rows["tokens"][:, 1:], last], axis=1)
        return rows | {"targets": shifted}

    return mock.patch.object(Run, "batch_of", batch_of)


# -- random numbers --------------------------------------------------------------------------------


def _masks_by_local_position() -> Change:
    def first_position(x_BsD, axes, place):
        return 0 if place is None else place.part * x_BsD.shape[1]

    return mock.patch.object(context, "first_position", first_position)


def _masks_by_device() -> Change:
    def first_position(x_BsD, axes, place):
        return lax.axis_index("tensor") * x_BsD.shape[1]

    return mock.patch.object(context, "first_position", first_position)


def _masks_by_local_sample() -> Change:
    def samples(batch):
        shape = batch["tokens"].shape[:2]
        return jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)

    return mock.patch.object(step, "_samples", samples)


# -- stages ----------------------------------------------------------------------------------------


def _head_of_own_stage() -> Change:
    return mock.patch.object(Run, "last_output", lambda self, y: y)


def _embedding_of_own_stage() -> Change:
    return mock.patch.object(Run, "dx_of_first", lambda self, dx: dx)


def _head_of_another_stage() -> Change:
    real = Run.last_output

    def last_output(self, y):
        holds, self.holds_last = self.holds_last, self.holds_first
        y = real(self, y)
        self.holds_last = holds
        return y

    return mock.patch.object(Run, "last_output", last_output)


def _head_where_it_is_held() -> Change:
    real = Run.head

    def head(self, carry, op, y, *, sent=False):
        return real(
            self, carry, op._replace(head=jnp.where(self.holds_last, op.head, IDLE)), y, sent=sent
        )

    return mock.patch.object(Run, "head", head)


def _mutants() -> Iterator[Mutant]:
    sequence, whole = _run(), _run(sequence_parallel=False)
    dropping = {"dropout": 0.1}
    few_heads = {"kv_heads": 2}
    rows = (
        ("loss scaled", "the loss times the replicas", _loss_times_replicas, sequence),
        ("local token count", "a mean of the replicas' means", _tokens_of_own_replica, sequence),
        ("wrong group", "weights of the loss summed over tensor, not over the replicas",
         _tokens_over_other_axes, sequence),
        ("loss of one replica", "the reported loss is each replica's own",
         _loss_of_own_replica, sequence),
        ("labels after cutting", "labels are shifted in a slice, of which the last has none",
         _labels_shifted_after_cutting, _run(schedule="seq1f1b", slices=2)),
        ("second loss, local count", "BERT's order loss by each replica's count",
         _second_loss_by_own_count, _run("bert")),
        ("second loss scaled", "BERT's order loss times the replicas",
         _second_loss_times_replicas, _run("bert")),
        ("norm counts replicas", "replicated parameters counted on each device",
         _norm_counts_replicas, sequence),
        ("norm of own shards", "the norm is not summed over what shards parameters",
         _norm_of_own_shards, sequence),
        ("replicated, not summed", "gradients of norms and biases not summed over tensor",
         _no_sum_of_replicated, sequence),
        ("whole, summed", "whole gradients summed over tensor once more",
         _sum_of_whole_gradients, whole),
        ("sharded, summed", "gradients summed over the axis that shards them",
         _sum_of_shards, sequence),
        ("norms of heads", "their gradients not summed over tensor",
         _no_sum_of_head_norms, _run("qwen3", sequence_parallel=False)),
        ("repeated heads", "gradients of repeated keys and values not summed over tensor",
         _no_sum_of_repeated_heads,
         _run("llama", few_heads, data=1, tensor=4, sequence_parallel=False)),
        ("row layers", "their output is not summed", _no_sum_after_row_layers, whole),
        ("row layers, cut", "their output is cut, and not summed",
         _no_sum_after_row_layers, sequence),
        ("vocabulary, sum", "the losses' sums over the vocabulary are each device's own",
         _no_sum_over_vocabulary, sequence),
        ("vocabulary, maximum", "logits are shifted by each device's own maximum",
         _largest_of_own_vocabulary, sequence),
        ("shards of another axis", "ZeRO's shards are gathered over tensor",
         _gathered_over_tensor, sequence),
        ("shards backwards", "ZeRO's shards are gathered in another order",
         _gathered_backwards, sequence),
        ("shard of own gradient", "each replica updates by its part of its own gradient",
         _own_part_of_own_gradient, sequence),
        ("mean of sums", "gradients divided by the replicas once more",
         _mean_over_replicas, _run(zero=3, zero_unit="layer")),
        ("same masks, other tokens", "dropout by the position in a shard of the sequence",
         _masks_by_local_position, _run(model=dropping)),
        ("other masks, same tokens", "dropout that differs where activations are whole",
         _masks_by_device, _run(model=dropping, sequence_parallel=False)),
        ("same masks, other rows", "dropout by the row in a replica",
         _masks_by_local_sample, _run(model=dropping)),
        ("head of own stage", "each stage's head takes its own output", _head_of_own_stage,
         sequence),
        ("embedding of own stage", "each stage's embedding takes its own gradient",
         _embedding_of_own_stage, sequence),
        ("head of the first stage", "all heads take the first stage's output",
         _head_of_another_stage, sequence),
        ("branch of one stage", "the head, with its collectives, on the last stage alone",
         _head_where_it_is_held, sequence),
    )  # fmt: skip
    for name, what, change, run in rows:
        yield Mutant(name=name, what=what, change=change, run=run)


MUTANTS = tuple(_mutants())
