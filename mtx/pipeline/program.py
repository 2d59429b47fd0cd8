"""The pipeline: one scan over the ticks of a schedule's table, on every stage at once.

It runs inside the step's `shard_map`. A tick is: receive, embed, F, send x, head and loss, B,
gradient of the embedding, and W if the table splits it from B; dx is sent at the start of the next
tick. So the send of a tick's F can overlap with its B, and that of its B with W and the next F;
XLA:GPU keeps them there with the options of `mtx.step.xla`. A tick is written out in `run`, what F,
B and W do with a stage's layers in `stage`. With weave="on" a tick is that of `woven`. Nothing here
grows with the number of microbatches.

`model` has all that it knows about a model. Embedding and head are sharded over `pipe`, so all
stages run them together, in the ticks that the table names; their collectives span `pipe` and must
not be in a branch that only some stages take.

Legend: M microbatches · B rows · S sequence (s: shard) · C chunks · N layers of a kind in a chunk ·
T ticks
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtx.pipeline.parts import Parts
from mtx.pipeline.run import Run
from mtx.pipeline.slots import write
from mtx.pipeline.woven import WovenRun
from mtx.schedules.schedule import IDLE, Phase, by_tick
from mtx.schedules.windows import cut

Tree = Any


class Pipeline(Parts):
    """Runs a table over a model."""

    def gradients(self, params: Tree, batch: Tree, samples_MB, rng, loss_weight):
        """(sums of losses by name, gradients) over all microbatches of this replica.

        params: {"embed": ..., "head": ..., "layers": {kind: leaves [C, N, ...]}}, the local shards;
        batch: leaves [M, B, S]; samples_MB: int32, rows of the global batch; rng: uint32 [2];
        loss_weight: float32 [], the gradient of the scalar that is minimised with respect to the
        sum of losses. Gradients are float32 and still to be summed over `sum_axes`. With zero=3 or
        `chunk_shards` those of the layers are already summed over the replicas, and sharded like
        the parameters.
        """
        kind = WovenRun if self.layout.weave == "on" else Run
        run = kind(self, params, batch, samples_MB, rng, loss_weight)
        carry, ticks = run.start(), run.ticks()
        for phase in self.phases:
            rows = jax.tree.map(lambda a, p=phase: a[p.start : p.stop], ticks)
            carry = run.scan(carry, rows, phase)
        carry = run.finish(carry)
        return carry.losses, carry.gradients.shared | {"layers": run.of_layers(carry)}

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The ticks of each scan, and what all stages do in them."""
        if self.chunk_shards is not None:
            return cut(self.schedule.phases, self.windows)
        if self.layout.idle == "phases":
            return self.schedule.phases
        return (Phase(0, self.schedule.ticks, True, True, True),)

    def forward(self, params: Tree, batch: Tree, output: Callable, past=None) -> Tree:
        """`output(shared, stream, batch)` of every microbatch, stacked [M, ...]; no gradients, no
        dropout, whole sequences. `output` is called on all stages together. Other arguments as in
        `gradients`.

        past: for texts that are continued, see `Stage.extend`; the result is then (outputs, past).
        batch["positions"], int32 [M, B, 1], is the position of each row's next token; without it,
        the tokens are the first ones.
        """
        run = Run(self, params, batch)
        last_tick = int(self.schedule.forward_ticks.max())
        leaves_in = self.schedule.forward_ticks[:, *self.schedule.last_virtual_stage]
        leaving = jnp.asarray(by_tick(leaves_in, last_tick + 1))
        ticks = jax.tree.map(lambda a: a[: last_tick + 1], run.ticks())
        example = jax.eval_shape(output, run.shared, run.stream, run.batch_of(0))
        outputs = jax.tree.map(
            lambda a: jnp.zeros((self.schedule.microbatches, *a.shape), a.dtype), example
        )

        def compute(op, weights, stream, past):
            if past is None:
                return run.stage.forward_only(op, weights, stream)
            positions = run.batch_of(op.item).get("positions")
            slots_B = None if positions is None else positions[:, 0]
            return run.stage.extend(op, weights, stream, past, slots_B, self.axes)

        def tick(carry, row):
            arrived, receives, weights, past, outputs = carry
            op, microbatch = row
            weights = run.weights.all_gather(weights, op.gather, op.forward.chunk)
            receives = run.deliver(receives, arrived, op.receives)
            stream = run.input(op.forward, run.embed(op), receives, arrived, op.receives)
            stream, past = lax.cond(
                op.forward.busy,
                compute,
                lambda op, weights, *kept: kept,
                op.forward,
                run.weights.gathered(weights),
                stream,
                past,
            )

            def leave(outputs, stream):
                value = output(run.shared, run.last_output(stream), run.batch_of(microbatch))
                return write(outputs, value, microbatch)

            outputs = lax.cond(microbatch != IDLE, leave, lambda a, _: a, outputs, stream)
            arrived = run.send(stream, self.schedule.receives)
            return (arrived, receives, weights, past, outputs), None

        rings = run.rings(self.schedule.receives)
        start = run.no_arrivals(), rings, run.weights.start(), past, outputs
        (*_, past, outputs), _ = lax.scan(tick, start, (ticks, leaving))
        return outputs if past is None else (outputs, past)

    def empty_past(self, rows: int, length: int) -> Tree:
        """{kind: leaves [C, N, n, rows, h, length, K], or a `State`}: what this stage's layers keep
        of `rows` texts of up to `length` positions, still empty."""

        def empty(kind: str) -> Tree:
            stack = self.placement.slots_of(kind).shape[1:]
            past = jax.eval_shape(lambda: self.model.empty_past(kind, rows, length))
            return jax.tree.map(lambda a: jnp.zeros((*stack, *a.shape), a.dtype), past)

        return {kind: empty(kind) for kind in self.placement.kinds}
