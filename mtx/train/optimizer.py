"""AdamW through optax, its learning rates, and the dynamic loss scale of float16."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from mtx.config import OptimizerConfig

_NOT_DECAYED = {"b", "bias", "scale"}  # biases and norms, as in Megatron-LM


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """step, counted from 0 -> rate: a linear warm-up from lr / warmup_steps in step 0 to lr in step
    warmup_steps - 1, and from lr in step warmup_steps the decay to `min_lr` in step `decay_steps`.

    After the warm-up that is Megatron-LM's OptimizerParamScheduler, but that a "wsd" decay longer
    than what the warm-up leaves is shortened to it: there it would begin below lr. Megatron's
    warm-up is a step behind ours: its step 0 has the rate 0.
    """
    end = config.decay_steps or steps
    warmup, after = config.warmup_steps, max(end - config.warmup_steps, 1)
    floor = config.min_lr / config.lr
    if config.rate == "cosine":
        decay = optax.cosine_decay_schedule(config.lr, after, alpha=floor)
    elif config.rate == "linear":
        decay = optax.linear_schedule(config.lr, config.min_lr, after)
    elif config.rate == "wsd":
        decaying = min(max(round(config.wsd_decay_fraction * end), 1), after)
        decay = optax.linear_schedule(config.lr, config.min_lr, decaying, after - decaying)
    else:
        decay = optax.constant_schedule(config.lr)
    if not warmup:
        return decay
    rise = optax.linear_schedule(config.lr / warmup, config.lr, max(warmup - 1, 1))
    return optax.join_schedules([rise, decay], [warmup])


def adamw(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW; weight decay on matrices and embeddings, not on biases and norms."""
    return optax.adamw(
        learning_rate(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=_decayed,
    )


def _decayed(params):
    return jax.tree.map_with_path(lambda path, _: path[-1].key not in _NOT_DECAYED, params)


class LossScale(NamedTuple):
    """The factor on the loss that keeps float16 gradients in range; 1 in other types."""

    scale: jax.Array  # float32 []
    good_steps: jax.Array  # int32 [], finite steps since the scale last changed

    @classmethod
    def start(cls, config: OptimizerConfig, compute_dtype: str):
        """The first scale: `config.loss_scale` in float16, 1 in other types."""
        scale = config.loss_scale if compute_dtype == "float16" else 1.0
        return cls(jnp.float32(scale), jnp.int32(0))

    def after(self, finite, config: OptimizerConfig, compute_dtype: str):
        """Halved after a step that was not finite, doubled after a window of finite ones."""
        if compute_dtype != "float16":
            return self
        good_steps = jnp.where(finite, self.good_steps + 1, 0)
        grow = good_steps >= config.loss_scale_window
        factor = jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5)
        scale = jnp.maximum(self.scale * factor, 1.0)
        return LossScale(scale, jnp.where(grow, 0, good_steps))
