"""The pipelines that other JAX trainers run, for comparison: autodiff through the forward scan.

Microbatches go through the stages as in our F halves, one scan with a `ppermute` a tick, and
`jax.grad` runs the scan backwards: GPipe where virtual = 1, the circular order where it is more
(praxis, MaxText and axlearn run these). Idle ticks are computed and thrown away, as they do. What
autodiff keeps is one set of residuals a tick, so memory grows with the microbatches.

`AutodiffPipeline` takes the place of `mtx.pipeline.program.Pipeline` in a `Trainer`: same model,
same collectives, same step around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtx.config import Layout
from mtx.schedules.partition import Placement
from mtx.schedules.schedule import IDLE, Schedule, by_tick
from mtx.sharding.collectives import copy_to, reduce_from, shift
from mtx.sharding.mesh import Axes

Tree = Any


@dataclass(frozen=True, kw_only=True)
class AutodiffPipeline:
    """The forward half of a schedule's table, differentiated. For even placements."""

    model: Any
    schedule: Schedule
    placement: Placement
    layout: Layout
    axes: Axes
    chunk_shards = None  # the step gathers all parameters, and scatters all gradients

    def gradients(self, params: Tree, batch: Tree, samples_MB, key, loss_weight):
        """(sums of losses by name, gradients), as `Pipeline.gradients`."""

        def scaled(params):
            loss = self._loss(params, batch, samples_MB, key)
            return loss * loss_weight, loss

        gradients, loss = jax.grad(scaled, has_aux=True)(params)
        return {"loss": loss}, jax.tree.map(lambda g: g.astype(jnp.float32), gradients)

    def _loss(self, params, batch, samples_MB, key):
        pipe = self.axes.pipe
        stage = lax.axis_index(pipe) if pipe else 0
        last_tick = int(self.schedule.forward_ticks.max()) + 1
        rows = (
            jnp.asarray(self.schedule.forward.item)[:last_tick, stage],
            jnp.asarray(self.schedule.forward.chunk)[:last_tick, stage],
            jnp.asarray(self.schedule.embed)[:last_tick],
            jnp.asarray(by_tick(self.schedule.forward_ticks[:, -1, -1], last_tick)),
        )
        layer_CN = jnp.asarray(self.placement.layer)[stage]
        shared = {part: params[part] for part in ("embed", "head")}

        def at(microbatch):
            return jax.tree.map(lambda a: a[microbatch], batch)

        def context(layer, microbatch):
            return self.model.context(layer, at(microbatch), samples_MB[microbatch], key, 0)

        def embed(microbatch):
            stream = self.model.embed(shared, at(microbatch), context(IDLE, microbatch))
            return copy_to(stream["x"], pipe)

        def head(y_BsD, microbatch):
            y_BsD = reduce_from(y_BsD * (stage == self.schedule.stages - 1), pipe)
            return self.model.loss(shared, {"x": y_BsD}, at(microbatch))

        def tick(carry, row):
            x_BsD, total = carry
            microbatch, chunk, entering, leaving = row
            entered = lax.cond(entering != IDLE, embed, lambda _: jnp.zeros_like(x_BsD), entering)
            x_BsD = jnp.where((stage == 0) & (chunk == 0), entered, x_BsD)

            def layer(x_BsD, n):
                weights = jax.tree.map(lambda a: a[chunk, n], params["layers"]["block"])
                here = context(layer_CN[chunk, n], microbatch)
                return self.model.layer("block", weights, {"x": x_BsD}, here)["x"], None

            y_BsD, _ = lax.scan(layer, x_BsD, jnp.arange(self.placement.layer.shape[-1]))
            total += lax.cond(
                leaving != IDLE, head, lambda y, m: jnp.zeros((), jnp.float32), y_BsD, leaving
            )
            return (shift(y_BsD, pipe, by=1), total), None

        x_shape = jax.eval_shape(embed, 0)
        start = jnp.zeros(x_shape.shape, x_shape.dtype), jnp.zeros((), jnp.float32)
        (_, total), _ = lax.scan(tick, start, rows)
        return total
