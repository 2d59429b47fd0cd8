"""One training step, top to bottom: the file to read first.

It is a pure function of (state, batch), runs inside one `shard_map` over the whole mesh, and never
asks which devices there are:

1. gather the parameters in the compute type from the masters, which are sharded over replicas;
2. run the pipeline: losses, and gradients in float32;
3. sum partial gradients over the axes along which devices have seen other parts of the batch;
4. clip by the norm over all axes; skip the update if it is not finite;
5. update each device's shard of the masters with the optimizer of each role (`mtx.optimizers`), and
   states, such as a router's balance bias, by their own rules from what was counted.

Legend: G global batch · S sequence · M microbatches · B rows of one · C chunks ·
N layers of a kind in a chunk
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from mtx.config import RunConfig
from mtx.errors import UserError
from mtx.pipeline.program import Pipeline
from mtx.sharding.axes import AXES, BATCH, TOKENS, axes_of, replica_axes, sum_axes
from mtx.sharding.checksum import checksum, on_each_device
from mtx.sharding.fp8 import AMAX, Quantised, history_of, weight
from mtx.sharding.mesh import Axes
from mtx.sharding.optimizer import global_norm
from mtx.sharding.parameter import FLOAT32, QUANTISED, with_chosen
from mtx.sharding.random import fold, key_data
from mtx.step.optimizer import learning_rate
from mtx.step.state import Metrics, States, TrainState, is_of_layers

Tree = Any
DROPOUT_STREAM = 2**31 - 1  # folded into the seed's key; initial values fold in layer + 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A run's step, on local shards."""

    run: RunConfig
    axes: Axes
    states: States
    pipeline: Pipeline

    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        """(the next state, metrics). batch: this device's part, arrays [G/d, S/c]."""
        config, dtype, states = self.run.optimizer, self.run.model.compute_dtype, self.states
        scale = state.loss_scale.scale
        losses, gradients = self.losses_and_gradients(state.params, batch, state.step, scale)

        with jax.named_scope("clip"):
            gradients, counted = self._apart(gradients)
            gradients = jax.tree.map(lambda g: g / scale, gradients)
            specs = states.of_trained(states.specs.params)
            norm = global_norm(gradients, specs, self.run.layout.sizes)
            finite = jnp.isfinite(norm)
            factor = jnp.minimum(1.0, config.clip / (norm + 1e-6)) if config.clip else 1.0
            gradients = jax.tree.map(lambda g: g * factor, gradients)

        with jax.named_scope("update"):
            masters = states.of_trained(state.params)
            updates, moments = states.optimizer.update(gradients, state.moments, masters)
            params = self._with_states(optax.apply_updates(masters, updates), masters, counted)
            params, moments = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old),
                (params, moments),
                (masters, state.moments),
            )
            params = with_chosen(state.params, params)
        loss_scale = state.loss_scale.after(finite, config, dtype)
        rate = learning_rate(config, self.run.steps)(state.step - state.skipped)
        finite = finite.astype(jnp.float32)
        metrics = Metrics(
            losses["loss"], norm, jnp.float32(rate), scale, finite, self._corrupt(state),
            losses.get("aux"), self._of_all_stages(counted), losses.get("second"),
        )  # fmt: skip
        skipped = state.skipped + (1 - finite).astype(jnp.int32)
        new = TrainState(state.step + 1, params, moments, loss_scale, skipped)
        return self.with_checksums(new), metrics

    def losses_and_gradients(self, masters: Tree, batch: Tree, step, scale):
        """(mean losses by name, gradients of scale * their sum). Gradients are summed and sharded
        like the trained masters; for states they are what was counted."""
        with jax.named_scope("gather_params"):
            params = self.gather(masters, whole=self.pipeline.chunk_shards is None)
        with jax.named_scope("pipeline"):
            batch = self.microbatches(batch)
            tokens = sum_over_tokens(batch["weights"].sum())
            rng = fold(key_data(self.run.seed), DROPOUT_STREAM, step)
            losses, gradients = self.pipeline.gradients(
                params, batch, _samples(batch), rng, scale / tokens
            )
            gradients["layers"] = jax.tree.map(lambda a: a[None], gradients["layers"])
        with jax.named_scope("reduce"):
            states, summed = self.states, self.states.by_pipeline
            if self.pipeline.chunk_shards is not None:
                summed = summed | {"layers": jax.tree.map(lambda _: True, summed["layers"])}
            trees = states.param_specs, states.shards, summed
            gradients = jax.tree.map(self._reduce, gradients, *map(states.of_trained, trees))
        return jax.tree.map(lambda sum: sum_over_tokens(sum) / tokens, losses), gradients

    # -- states, which no optimizer updates -------------------------------------------------------

    def _apart(self, gradients: Tree) -> tuple[Tree, Tree]:
        """(gradients, with zeros for states; what was counted for states, None for all others)"""
        rules = self._rules
        zeroed = by_rule(lambda rule, g: jnp.zeros_like(g) if rule else g, rules, gradients)
        return zeroed, by_rule(lambda rule, g: g if rule else None, rules, gradients)

    def _with_states(self, params: Tree, masters: Tree, counted: Tree) -> Tree:
        def moved(rule, new, old, sums):
            return rule(old, sums) if rule else new

        return by_rule(moved, self._rules, params, masters, counted)

    @property
    def _rules(self) -> Tree:
        return self.states.of_trained(self.states.model.rules)

    def _of_all_stages(self, counted: Tree) -> Tree:
        """{kind: {path: [P, C, N, ...]}} on every device, without float8's histories; None if there
        are no states."""
        found = {
            kind: {
                keystr(path, simple=True, separator="."): lax.all_gather(
                    a, "pipe", axis=0, tiled=True
                )
                for path, a in jax.tree.leaves_with_path(leaves)
                if path[0].key != AMAX
            }
            for kind, leaves in counted["layers"].items()
        }
        found = {kind: leaves for kind, leaves in found.items() if leaves}
        return found or None

    def gather(self, masters: Tree, *, whole: bool = True, float8: bool = True) -> Tree:
        """This stage's parameters in the compute type: those of the embedding and head, and those
        of its layers, {kind: [C, N, ...]}, of which with zero=3 or whole=False each device has only
        its shard. float8: the parameters that `fp8` chooses are quantised."""
        dtype, model = jnp.dtype(self.run.model.compute_dtype), self.states.model
        quantises = float8 and self.run.model.fp8 != "off"

        def gather(path, master, shard, by_pipeline, role, inputs):
            late = by_pipeline or (is_of_layers(path) and not whole)
            kept = jnp.dtype("float32") if role in FLOAT32 else dtype
            if quantises and is_of_layers(path) and role in QUANTISED:
                history = history_of(masters, path)
                w = self._quantised(master[0], history, shard.below(1), late)
                return w if late else w.with_transposed(inputs, stacked=2)
            if late:
                return master[0].astype(kept)
            if is_of_layers(path):
                return shard.below(1).gather(master[0], kept)
            return shard.gather(master, kept)

        states = self.states
        return jax.tree.map_with_path(
            gather, masters, states.shards, states.by_pipeline, model.roles, model.inputs
        )

    def _quantised(self, master, history, shard, late: bool) -> Quantised:
        """A stage's weights [C, N, ...], where each layer's is a tensor of its own. history: of the
        weights, [1, C, N, ...], or None. late: the weights are gathered later; otherwise they are
        gathered here, at one byte per element."""
        model, over = self.run.model, axes_of(shard.spec[2:])
        by_layers = shard.dim is not None and shard.dim < 2
        if history is not None:
            history = shard.own(history[0]) if by_layers else history[0]
        w = weight(
            master, fp8=model.fp8, dtype=model.compute_dtype, axes=over, stacked=2,
            history=history, margin=model.fp8_margin,
        )  # fmt: skip

        def of_layers(a, *dims: int):
            if a is None:
                return None
            a = shard.gather(a, a.dtype) if by_layers else a
            return a.reshape(*a.shape[:2], *dims)

        if not late:
            w = w.apply(lambda values: shard.gather(values, values.dtype))
        return replace(
            w, unit=of_layers(w.unit), seen=of_layers(w.seen), scales=of_layers(w.scales, 3, 2)
        )

    def _reduce(self, gradient, spec, shard, summed):
        """This device's shard of a gradient's sum over `sum_axes`. summed: whether the pipeline
        has summed it over the replicas."""
        over = sum_axes(spec, sequence_parallel=self.axes.sequence_parallel)
        beside_replicas = tuple(axis for axis in over if axis not in replica_axes(spec))
        if beside_replicas:
            gradient = lax.psum(gradient, beside_replicas)
        return gradient if summed else shard.reduce_scatter(gradient)

    def microbatches(self, batch: Tree) -> Tree:
        """This device's part [G/d, S/c] as microbatches [M, B, S/c], weighed. Raises UserError if
        the parts do not make a global batch."""
        size = self.run.layout.microbatch
        rows = self.run.layout.replicas * len(batch["tokens"])
        if rows != self.run.global_batch:
            raise UserError(
                f"a batch of {rows} rows for a schedule of global_batch={self.run.global_batch}; "
                "give it as many, or make a trainer with another global_batch"
            )
        if "weights" in batch:
            batch = self.states.model.weigh(batch, self._total)
        return jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), batch)

    def _total(self, array):
        """The sum of an array of the batch, [B] or [B, S], over all devices' parts."""
        return lax.psum(array.sum(), axes_of(batch_spec(array, self.axes)))

    # -- whether memory has changed by itself -----------------------------------------------------

    def with_checksums(self, state: TrainState) -> TrainState:
        """The state with the checksum of what this device holds, if checksums are wanted."""
        if not self.run.guard.checksums:
            return state
        own = checksum((state.params, state.moments))
        return state._replace(checksums=own.reshape((1,) * len(AXES)))

    def _corrupt(self, state: TrainState):
        """`Metrics.corrupt`."""
        if state.checksums is None:
            return jnp.float32(0)
        changed = self.with_checksums(state).checksums != state.checksums
        sizes = tuple(self.run.layout.sizes.values())
        return on_each_device(changed.astype(jnp.float32).reshape(()), sizes)


def by_rule(function, rules: Tree, *trees: Tree) -> Tree:
    """A tree of function(rule, leaf of each tree); rules and leaves may be None."""
    is_leaf = lambda rule: rule is None or callable(rule)  # noqa: E731
    return jax.tree.map(function, rules, *trees, is_leaf=is_leaf)


def sum_over_tokens(values):
    """The sum over devices of values that each has from its part of the batch."""
    return lax.psum(values, TOKENS)


def batch_spec(array, axes: Axes) -> P:
    """The PartitionSpec of an array of a batch: [G, S] in the devices' order of a sequence
    (`mtx.sharding.sequence`), or [G], or an array of more dims, such as pixels."""
    return P(BATCH, axes.context) if array.ndim == 2 else P(BATCH)


def _samples(batch: Tree):
    """int32 [M, B]: the indices of this replica's rows in the global batch."""
    shape = batch["tokens"].shape[:2]
    first = lax.axis_index(BATCH) * shape[0] * shape[1]
    return first + jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)
