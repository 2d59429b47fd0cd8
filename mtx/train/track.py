"""TensorBoard and Weights & Biases, which get what the log gets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from mtx.config import RunConfig, to_dict
from mtx.config.run import Track
from mtx.errors import UserError, reason

_AXIS = ("kind", "step", "t_s")  # fields of a record that are not curves; its other numbers are


class Tracker(Protocol):
    """Gets every record of the log."""

    def write(self, kind: str, record: Mapping) -> None: ...

    def close(self) -> None: ...


def make_trackers(run: RunConfig) -> list[Tracker]:
    """The trackers that `run.track` names. UserError if one is not installed or does not start."""
    makers = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    return [makers[name](run) for name in run.track]


class TensorBoard:
    """Curves in `out`/tensorboard."""

    def __init__(self, run: RunConfig):
        try:
            # From mtx[track], which need not be installed where pyright runs.
            from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise _missing("tensorboard", "tensorboardX") from None
        self._writer = SummaryWriter(str(Path(run.out) / "tensorboard"))

    def write(self, kind: str, record: Mapping) -> None:
        for name, value in curves(kind, record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run in project "mtx", resumed when the training run is; wandb's own settings say where
    it goes."""

    def __init__(self, run: RunConfig):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise _missing("wandb", "wandb") from None
        directory = Path(run.out).absolute()
        try:
            self._run = wandb.init(
                project="mtx", name=directory.name, dir=str(directory), config=to_dict(run),
                id="-".join(directory.parts[-2:]).replace("/", "-"), resume="allow",
            )  # fmt: skip
        except Exception as error:  # it raises errors of many kinds, for a login or a network
            raise UserError(
                f"track='wandb' did not start ({reason(error)}); log in, set "
                "WANDB_MODE=offline, or leave it out"
            ) from error

    def write(self, kind: str, record: Mapping) -> None:
        if found := curves(kind, record):
            self._run.log(found, step=record["step"])

    def close(self) -> None:
        self._run.finish()


def curves(kind: str, record: Mapping) -> dict[str, float]:
    """The numbers of a record that are worth a curve, by name: "step/loss", "eval/loss"."""
    if kind not in ("step", "eval"):
        return {}
    return {
        f"{kind}/{name}": float(value)
        for name, value in record.items()
        if name not in _AXIS and isinstance(value, int | float)
    }


def _missing(track: Track, package: str) -> UserError:
    return UserError(
        f"track={track!r} needs {package}, which is not installed: pip install 'mtx[track]'"
    )
