"""The optimizer of a run. No JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mtx import optimizers
from mtx.errors import UserError, unknown_name
from mtx.fields import Between, require_above, resolve_types
from mtx.sizes import Interval, NotNegative, Step

Rates = Literal["cosine", "linear", "wsd", "constant"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer (`mtx.optimizers`) with warm-up, decay and clipping by the global norm.

    In float16 it has a dynamic loss scale as well.
    """

    name: str = "adamw"  # adamw, lion or another file of mtx/optimizers
    # optimizer of embeddings, head, norms and biases, with its own b1, b2, epsilon; None: `name`
    rest: str | None = None
    lr: float = 1.5e-4  # peak learning rate, after the warm-up
    rest_lr: float | None = None  # peak rate of `rest`, which follows the same schedule; None: lr
    min_lr: float = 1e-5  # learning rate at the end of the decay
    rate: Rates = "cosine"  # how the rate decays; wsd: warm up, stay, decay
    warmup_steps: Interval = 0  # steps in which the learning rate rises linearly
    decay_steps: Step | None = None  # the step at which min_lr is reached; None: the run's steps
    wsd_decay_fraction: float = 0.1  # rate="wsd": share of decay_steps spent decaying, at its end
    b1: float | None = None  # decay of the mean gradient; None: the optimizer's own, for AdamW 0.9
    b2: float | None = None  # decay of the mean square; None: the optimizer's own, for AdamW 0.95
    epsilon: float | None = None  # added to the root of the mean square; None: AdamW's 1e-8
    weight_decay: NotNegative = 0.1  # not applied to biases and norms
    clip: NotNegative = 1.0  # largest global norm of gradients; 0: no clipping
    loss_scale: Annotated[float, Between(1, 2.0**127)] = 2.0**16  # float16 only: the first scale
    loss_scale_window: Step = 1000  # float16 only: finite steps before the scale doubles

    def __post_init__(self):
        resolve_types(self)
        self._check_optimizers()
        require_above(self, 0, "lr")
        if self.decay_steps is not None and self.rate != "constant":
            if self.warmup_steps >= self.decay_steps:
                raise UserError(
                    f"warmup_steps={self.warmup_steps} leave nothing of decay_steps="
                    f"{self.decay_steps} to decay in; use fewer, or a larger decay_steps"
                )
        if not 0.0 <= self.min_lr <= self.lr:
            raise UserError(
                f"min_lr={self.min_lr} must lie in [0, lr={self.lr}]; set optimizer.min_lr as "
                f"well, perhaps to {self.lr / 10:.3g}"
            )
        if not 0.0 < self.wsd_decay_fraction <= 1.0:
            raise UserError(f"wsd_decay_fraction={self.wsd_decay_fraction} must lie in (0, 1]")
        for name in ("b1", "b2"):
            if getattr(self, name) is not None and not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"{name}={getattr(self, name)} must lie in [0, 1)")

    def _check_optimizers(self) -> None:
        for name, value in (("optimizer.name", self.name), ("optimizer.rest", self.rest)):
            if value is not None and value not in optimizers.NAMES:
                raise unknown_name(name, value, optimizers.NAMES)
        for name in ("rest_lr", "epsilon"):
            if getattr(self, name) is not None:
                require_above(self, 0, name)
        if self.rest is None and self.rest_lr is not None:
            raise UserError(f"rest_lr={self.rest_lr} is the rate of rest=None; name one, or use lr")
        defaults = optimizers.optimizer_module(self.name).DEFAULTS
        for name in ("b1", "b2", "epsilon"):
            if getattr(self, name) is not None and name not in defaults:
                raise UserError(
                    f"{name}={getattr(self, name)} is not of optimizer.name={self.name!r}, which "
                    f"has {', '.join(defaults) or 'none of them'}; leave it out"
                )

    def hyperparameters(self, name: str) -> dict[str, float]:
        """The hyperparameters of an optimizer: this config's if it is `self.name`, else its own."""
        defaults = optimizers.optimizer_module(name).DEFAULTS
        given = {key: getattr(self, key) for key in defaults} if name == self.name else {}
        return defaults | {key: value for key, value in given.items() if value is not None}
