"""A case, run on its layout and compared with one device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from mtx.certify.cases import Case
from mtx.certify.reference import Reference, Trained, batches_of, by_field
from mtx.certify.step import walk_run
from mtx.certify.walk import Finding
from mtx.config import RunConfig
from mtx.errors import UserError
from mtx.step.optimizer import state_arrays
from mtx.step.state import Metrics
from mtx.step.trainer import Trainer

Tree = Any

# Largest relative differences allowed; float32. For losses and norms, in any of the steps; for
# gradients (of the first step), parameters and moments (after the last), of any element, relative
# to its leaf's largest.
TOLERANCES = {"loss": 1e-6, "gradients": 1e-5, "norm": 1e-5, "params": 1e-5, "moments": 1e-5}
# A difference beyond its tolerance decides nothing if it is at most this many times that of one
# device from itself when its first parameters move to neighbouring numbers.
ROUNDINGS = 2.0
_MOST_BY_ROUNDING = 1e-3  # larger differences are never taken for rounding
# A leaf that is zero except for rounding is compared with this share of the largest of all leaves.
FLOOR = 1e-6


@dataclass(kw_only=True)
class Compared:
    """A case's differences: quantity -> the largest, and the leaf that has it."""

    case: Case
    differences: dict[str, tuple[float, str]] = field(default_factory=dict)
    # how far rounding moves one device's own; measured only if a difference is beyond its tolerance
    rounding: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)  # of the walker, on its equations
    error: str = ""  # what the case raised
    refused: bool = False  # by the step itself: not a case

    @property
    def beyond(self) -> list[str]:
        """Quantities that differ by more than their tolerance, or not by a finite number."""
        return [
            name for name, (value, _) in self.differences.items()
            if not value <= TOLERANCES[name]
        ]  # fmt: skip

    @property
    def undecided(self) -> bool:
        """Whether rounding alone would do as much as what is beyond a tolerance: such a case shows
        neither that layouts agree nor that they differ."""
        return bool(self.beyond) and all(
            self.differences[name][0] <= ROUNDINGS * self.rounding.get(name, 0.0)
            for name in self.beyond
        )

    @property
    def differs(self) -> bool:
        return bool(self.error or self.findings or (self.beyond and not self.undecided))

    @property
    def holds(self) -> bool:
        return not (self.beyond or self.findings or self.error)

    @property
    def said(self) -> str:
        """What is wrong, in words."""
        parts = [self.error] if self.error else []
        for name in self.beyond:
            value, leaf = self.differences[name]
            of = f" of {leaf}" if leaf else ""
            parts.append(f"{name}{of} by {value:.1e}, {TOLERANCES[name]:.0e} is allowed")
        return "; ".join([*parts, *map(str, self.findings)])


def compare(case: Case) -> Compared:
    found = Compared(case=case)
    try:
        # If there are experts, one device says which batches can be compared.
        draw = reference_of(case.run).draw if case.run.model.routed_experts else 0
        got = train(case.run, found, draw)
    except UserError as error:
        return replace(found, error=str(error), refused=True)
    except Exception as error:  # a case that cannot be compared is a failure, not the end
        first = str(error).splitlines()[:1]
        found.error = ": ".join([type(error).__name__, *first])
        return found
    if got is not None:
        found.differences = differences(got, reference_of(case.run))
        if found.beyond and all(found.differences[n][0] < _MOST_BY_ROUNDING for n in found.beyond):
            found.rounding = _rounding(Unlaid(case.run))
    return found


def reference_of(run: RunConfig) -> Trained:
    """The result of a run on one device."""
    return _reference(Unlaid(run))[1]


class Unlaid:
    """A run without its layout: cases that differ in nothing else share a reference."""

    def __init__(self, run: RunConfig):
        self.run = run
        self._key = run.model, run.optimizer, run.global_batch, run.seed

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unlaid) and self._key == other._key


@lru_cache(maxsize=16)
def _reference(unlaid: Unlaid) -> tuple[Reference, Trained]:
    reference = Reference(run=unlaid.run)
    return reference, reference.train()


@lru_cache(maxsize=16)
def _rounding(unlaid: Unlaid) -> dict[str, float]:
    """How far rounding moves each quantity on one device, as far as that is finite."""
    reference, trained = _reference(unlaid)
    moved = differences(reference.moved(trained.draw), trained)
    return {name: value for name, (value, _) in moved.items() if math.isfinite(value)}


def train(run: RunConfig, found: Compared, draw: int = 0) -> Trained | None:
    """The result of the run's own step after the first steps. found: receives what the walker finds
    in its equations; if they would hang, nothing runs."""
    trainer = Trainer(run)
    state, batches = trainer.init(), batches_of(run, draw)
    found.findings = walk_run(run).findings
    if any(finding.hangs for finding in found.findings):
        return None
    reports, norms, means = [], [], None
    for batch in batches:
        state, metrics = trainer.train_step(state, trainer.place(batch))
        reports.append(metrics)
        norms.append(float(metrics.gradient_norm))
        if means is None:
            means = _moments(trainer, state)["mu"]
    return Trained(
        losses=_losses(reports), norms=norms, gradients=_gradients(run, means, norms[0]),
        params=_canonical(trainer, state.params), moments=_moments(trainer, state),
    )  # fmt: skip


def _losses(reports: list[Metrics]) -> dict[str, list[float]]:
    names = {"loss": "loss", "aux": "aux_loss", "second": "second_loss"}
    return {
        name: [float(getattr(each, field)) for each in reports]
        for name, field in names.items()
        if getattr(reports[0], field) is not None
    }


def _gradients(run: RunConfig, means: Tree, norm: float) -> Tree:
    """The gradients of the first step, from AdamW's mean, which has them clipped, times 1 - b1."""
    config = run.optimizer
    factor = min(1.0, config.clip / (norm + 1e-6)) if config.clip else 1.0
    share = factor * (1 - config.hyperparameters("adamw")["b1"])
    return jax.tree.map(lambda a: a / share, means)


def _moments(trainer: Trainer, state: Any) -> dict[str, Tree]:
    arrays = state_arrays(state.moments)
    masters = by_field(arrays, trainer.states.of_trained(state.params))
    return {name: _canonical(trainer, tree) for name, tree in masters.items()}


def _canonical(trainer: Trainer, tree: Tree) -> Tree:
    return jax.tree.map(np.asarray, trainer.to_canonical(jax.device_get(tree)))


def differences(got: Trained, want: Trained) -> dict[str, tuple[float, str]]:
    """The largest relative difference of each quantity, with the leaf that has it."""
    moments = [_of_leaves(got.moments[name], tree) for name, tree in want.moments.items()]
    return {
        "loss": _largest(list(_of_losses(got.losses, want.losses))),
        "gradients": _of_leaves(got.gradients, want.gradients),
        "norm": (_of_numbers(got.norms, want.norms, want.norms), ""),
        "params": _of_leaves(got.params, want.params),
        "moments": _largest(moments),
    }


def _largest(found: list[tuple[float, str]]) -> tuple[float, str]:
    """The largest difference; one that is not finite is larger than all others."""
    return max(found, key=lambda each: each[0] if math.isfinite(each[0]) else math.inf)


def _of_losses(got: dict, want: dict) -> Iterator[tuple[float, str]]:
    """The difference of each loss; for one added to the head's, relative to the sum of all losses,
    which is minimised."""
    sums = np.sum(list(want.values()), axis=0)
    for name, values in want.items():
        head = name == "loss"
        of = values if head else sums
        yield _of_numbers(got[name], values, of), "" if head else name


def _of_numbers(got: list[float], want: list[float], of: Any) -> float:
    return float(np.max(np.abs(np.subtract(got, want)) / np.abs(of)))


def _of_leaves(got: Tree, want: Tree) -> tuple[float, str]:
    leaves = jax.tree.leaves_with_path(want)
    floor = FLOOR * max(float(np.abs(leaf).max()) for _, leaf in leaves)
    worst = (0.0, "")
    for (path, leaf), other in zip(leaves, jax.tree.leaves(got), strict=True):
        scale = max(float(np.abs(leaf).max()), floor)
        difference = float(np.abs(other - leaf).max()) / scale
        if not difference <= worst[0]:
            worst = difference, jax.tree_util.keystr(path, simple=True, separator=".")
    return worst
