"""A run on one device, by the model alone: no pipeline, no table of ticks, no mesh. Gradients come
from autodiff of one function of all parameters, and the optimizer updates whole arrays. Every
expert has room for all tokens, so that none waits.

Trees are in model order: {"embed", "head", "layers": {kind: [L, ...]}}.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mtx.certify.ties import watched_choices
from mtx.config import RunConfig
from mtx.errors import UserError
from mtx.layers.model import Model
from mtx.schedules.schedule import IDLE
from mtx.sharding.mesh import Axes
from mtx.sharding.parameter import chosen, with_chosen
from mtx.sharding.random import fold, key_data
from mtx.step.optimizer import make_optimizer, state_arrays
from mtx.step.step import DROPOUT_STREAM, by_rule

Tree = Any
STEPS = 5
_DRAWS = 40
_ROOM = 64.0  # of an expert, in even shares: at least as many as a small model has experts


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The result of a run that is compared."""

    losses: dict[str, list[float]]  # of each step: "loss", the head's, and those added to it
    norms: list[float]  # of the gradients, before they are clipped
    gradients: Tree  # of the first step, before they are clipped
    params: Tree  # after the last
    moments: dict[str, Tree]  # by name: "mu", "nu"
    draw: int = 0  # of the batches


def batches_of(run: RunConfig, draw: int = 0) -> list[dict[str, np.ndarray]]:
    """Random batches. In each row another share of positions, up to about 70 %, counts for nothing;
    the last row counts for nothing at all. draw: another number makes other batches."""
    model = Model(run.model)
    random = np.random.default_rng((run.seed, draw))
    return [_batch(model, run, random) for _ in range(STEPS)]


def _batch(model: Model, run: RunConfig, random: np.random.Generator) -> dict[str, np.ndarray]:
    rows, batch = run.global_batch, {}
    share = random.uniform(0.3, 1.0, (rows, 1))
    for name, field in model.batch_fields(rows).items():
        if name == "weights":
            batch[name] = (random.random(field.shape) < share).astype(np.float32)
            batch[name][-1] = 0
        elif name == "pixels":
            batch[name] = random.integers(0, 256, field.shape, dtype=np.uint8)
        elif name == "patches":  # of all images of the row; -1: a token
            images: Any = run.model
            patches = random.integers(0, images.images * images.patches, field.shape)
            batch[name] = np.where(random.random(field.shape) < 0.6, -1, patches).astype(np.int32)
        elif name == "segments":  # text, then padding
            length = random.integers(1, field.shape[1] + 1, (rows, 1))
            batch[name] = (np.arange(field.shape[1]) < length).astype(np.int32)
        else:
            low, high = {"types": (0, 2), "order": (-1, 2)}.get(name, (0, run.model.vocab))
            batch[name] = random.integers(low, high, field.shape, dtype=np.int32)
    batch["targets"][:, :-1] = batch["tokens"][:, 1:]
    return batch


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """The run of a model on a global batch; its layout is not used."""

    run: RunConfig

    @cached_property
    def model(self) -> Model:
        return Model(replace(self.run.model, vocab_multiple=1), axes=Axes(expert_room=_ROOM))

    def first(self) -> Tree:
        """The parameters that training starts from."""
        model, seed = self.model, self.run.seed
        layers: dict[str, list] = {}
        for number, kind in enumerate(model.pattern):
            layers.setdefault(kind, []).append(model.init_layer(kind, seed, number))
        stacked = {k: jax.tree.map(lambda *a: jnp.stack(a), *each) for k, each in layers.items()}
        return model.init_shared(seed) | {"layers": stacked}

    def losses(self, params: Tree, batch: Tree, step: Any) -> tuple[jax.Array, Tree]:
        """(what is minimised, its parts by name), means over the global batch's tokens."""
        model, batch = self.model, self.model.weigh(batch, lambda values: values.sum())
        samples_B = jnp.arange(self.run.global_batch, dtype=jnp.int32)
        rng = fold(key_data(self.run.seed), DROPOUT_STREAM, step)

        def context(layer: Any):
            return model.context(layer, batch, samples_B, rng)

        seen, number = dict.fromkeys(model.pattern, 0), 0
        stream: Any = model.embed(params, batch, context(IDLE))
        for kind, alike in itertools.groupby(model.pattern):
            count = len(list(alike))
            which = slice(seen[kind], seen[kind] + count)
            own = jax.tree.map(lambda a, which=which: a[which], params["layers"][kind])

            def layer(stream, each, kind=kind):
                return model.layer(kind, each[0], stream, context(each[1])), None

            numbers = jnp.arange(number, number + count)
            stream, _ = jax.lax.scan(layer, stream, (own, numbers))
            seen[kind], number = which.stop, number + count
        tokens = batch["weights"].sum()
        losses = jax.tree.map(lambda a: a / tokens, model.losses(params, stream, batch))
        return jnp.asarray(sum(losses.values())), losses

    def train(self) -> Trained:
        """Train on the first batches in which rounding decides no choice of an expert."""
        with watched_choices() as ties:
            for draw in range(_DRAWS):
                ties.clear()
                trained = self._trained(draw)
                jax.effects_barrier()
                if not any(ties):
                    return trained
        raise UserError(
            f"seed={self.run.seed}: in each of {_DRAWS} batches two scores of experts are equal "
            "but for rounding, by which no layouts can be compared; use another seed"
        )

    def moved(self, draw: int) -> Trained:
        """The result on the same batches, with every first parameter moved to a neighbouring
        number, up or down at random: as far as rounding alone moves what is compared."""
        params, moments = self._start()
        random = np.random.default_rng(self.run.seed)

        def neighbour(a):
            up = random.random(a.shape) < 0.5
            return np.nextafter(a, np.where(up, np.inf, -np.inf).astype(a.dtype))

        return self._trained(draw, jax.tree.map(neighbour, jax.device_get(params)), moments)

    def _trained(self, draw: int, params: Tree = None, moments: Tree = None) -> Trained:
        if params is None:
            params, moments = self._start()
        losses, norms, first = [], [], None
        for step, batch in enumerate(batches_of(self.run, draw)):
            params, moments, *made = self._update(params, moments, batch, jnp.int32(step))
            loss, norm, gradients = jax.device_get(made)
            losses.append(loss)
            norms.append(float(norm))
            first = gradients if first is None else first
        params = jax.device_get(params)
        found = by_field(jax.device_get(state_arrays(moments)), self._of_trained(params))
        return Trained(
            losses={name: [float(each[name]) for each in losses] for name in losses[0]},
            norms=norms, gradients=first, params=params, moments=found, draw=draw,
        )  # fmt: skip

    @cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        roles = self._of_trained(self.model.roles)
        return make_optimizer(self.run.optimizer, self.run.steps, roles)

    def _of_trained(self, tree: Tree) -> Tree:
        return chosen(tree, self.model.trained)

    @cached_property
    def _start(self) -> Callable:
        def start():
            params = self.first()
            return params, self._optimizer.init(self._of_trained(params))

        return jax.jit(start)

    @cached_property
    def _update(self) -> Callable:
        config, rules = self.run.optimizer, self._of_trained(self.model.rules)

        def update(params, moments, batch, step):
            trained = self._of_trained(params)
            of_losses = jax.value_and_grad(
                lambda trained: self.losses(with_chosen(params, trained), batch, step), has_aux=True
            )
            (_, losses), gradients = of_losses(trained)
            moved = by_rule(lambda rule, g: jnp.zeros_like(g) if rule else g, rules, gradients)
            norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(moved)))
            factor = jnp.minimum(1.0, config.clip / (norm + 1e-6)) if config.clip else 1.0
            clipped = jax.tree.map(lambda g: g * factor, moved)
            updates, moments = self._optimizer.update(clipped, moments, trained)
            new = by_rule(
                lambda rule, new, old, sums: rule(old, sums) if rule else new,
                rules, optax.apply_updates(trained, updates), trained, gradients,
            )  # fmt: skip
            return with_chosen(params, new), moments, losses, norm, moved

        return jax.jit(update)


def by_field(arrays: dict[str, Any], like: Tree) -> dict[str, Tree]:
    """An optimizer's arrays by name ("mu.embed.tokens") as a tree like the parameters per field."""
    fields = dict.fromkeys(name.partition(".")[0] for name in arrays)

    def of(field: str) -> Tree:
        def read(path, _):
            return arrays[".".join((field, *(key.key for key in path)))]

        return jax.tree.map_with_path(read, like)

    return {field: of(field) for field in fields}
