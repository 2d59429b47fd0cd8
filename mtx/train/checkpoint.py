"""Checkpoints that know no layout: what one (data, pipe, tensor, virtual) saves, any other reads.

On disk, under the number of finished steps: `state`, every array in its global shape, unpadded, and
its layers as [L, ...] in model order; `run`, the config as JSON; `tokenizer`; `extra`. Orbax writes
in the background and renames what is complete, so a checkpoint is there whole or not at all.

Going to and from that form moves nothing but padding where virtual = 1. Interleaved stages hold
layers that are far apart, and then each array is gathered over `pipe` while it is converted.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtx.config import ModelConfig, RunConfig, from_dict, to_dict
from mtx.data import Tokenizer, tokenizer_from_dict
from mtx.errors import UserError
from mtx.sharding.optimizer import axes_of
from mtx.train.optimizer import LossScale
from mtx.train.step import Trainer, TrainState

Tree = Any

_ITEMS = ("state", "run", "tokenizer", "extra")
_SHAPE_FIELDS = ("layers", "hidden", "heads", "sequence", "vocab", "ffn_multiple", "tied")
_DISCARDED = "discarded"  # old checkpoints move here first: a rename is atomic, a deletion is not


class Checkpoints:
    """The checkpoints of one run, in a directory of their own.

    `directory` may also be the run's own, which holds one named "checkpoints". It is created by
    the first `save`. The newest `keep` are kept. Use it as a context, or call `wait` at the end.
    """

    def __init__(self, directory: str | Path, *, keep: int = 2):
        directory = Path(directory).absolute()
        inner = directory / "checkpoints"
        self.directory = inner if inner.is_dir() else directory
        self._keep = keep
        self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._saving = False
        self._form: _DiskForm | None = None  # of the trainer last seen

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception) -> None:
        self.wait()

    # -- writing ----------------------------------------------------------------------------------

    def save(
        self,
        trainer: Trainer,
        state: TrainState,
        *,
        tokenizer: Tokenizer,
        extra: dict | None = None,
    ) -> Path:
        """Starts to save `state` under its number of steps; the directory that will hold it.

        Returns when the state has been copied, so that the next step may donate it; the writing
        goes on in the background. `extra` is anything that JSON can hold. Raises UserError where
        this save or the one before it cannot be written.
        """
        self.wait()
        path = self._path(int(state.step))
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(self._form_of(trainer).from_state(state)),
            run=ocp.args.JsonSave(to_dict(trainer.run)),
            tokenizer=ocp.args.JsonSave(tokenizer.to_dict()),
            extra=ocp.args.JsonSave(extra or {}),
        )
        with self._writing():
            self.directory.mkdir(parents=True, exist_ok=True)  # Orbax would retry for minutes
            # By force: over what a deletion that was cut short has left there.
            self._checkpointer.save(path, items, force=True)
        self._saving = True
        return path

    def wait(self) -> None:
        """Returns when what is being saved is complete, and what is too old is gone. Raises
        UserError where it cannot be written; what was there before is left as it was."""
        saving, self._saving = self._saving, False
        with self._writing():
            self._checkpointer.wait_until_finished()
            if saving and jax.process_index() == 0:
                self._tidy()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # TensorStore says ValueError for a full disk, too
            raise UserError(
                f"no checkpoint can be written in {self.directory} ({_reason(error)}); the ones "
                "saved before are whole"
            ) from error

    def _tidy(self) -> None:
        """Deletes old checkpoints, and what interrupted saves and deletions have left."""
        discarded = self.directory / _DISCARDED
        shutil.rmtree(discarded, ignore_errors=True)
        discarded.mkdir()
        for path in [
            *(self._path(step) for step in self.steps()[: -self._keep]),
            *self.directory.glob("*.orbax-checkpoint-tmp*"),
        ]:
            path.rename(discarded / path.name)
        shutil.rmtree(discarded)

    # -- reading ----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, oldest first."""
        if self.directory.exists() and not self.directory.is_dir():
            raise UserError(f"{self.directory} is a file, and checkpoints lie in a directory")
        try:
            names = [path.name for path in self.directory.iterdir() if path.name.isdecimal()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"{self.directory} cannot be read: {error.strerror}") from error
        return sorted(step for step in map(int, names) if self._complete(step))

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None where there is none."""
        return max(self.steps(), default=None)

    def restore(self, trainer: Trainer, step: int | None = None) -> TrainState:
        """The state of a checkpoint, on the layout of `trainer`. `step` is the newest by default.

        Raises UserError for a checkpoint of another model, or one that cannot be read.
        """
        step = self._existing(step)
        saved = self.run(step)
        _check_model(self._path(step), saved.model, trainer.run.model)
        form = self._form_of(trainer)
        disk = self._read(step, state=ocp.args.StandardRestore(form.target))["state"]
        state = form.to_state(disk)
        if saved.model.compute_dtype == trainer.run.model.compute_dtype:
            return state
        scale = LossScale.start(trainer.run.optimizer, trainer.run.model.compute_dtype)
        shardings = trainer.shardings(trainer.state_specs.loss_scale)
        return state._replace(loss_scale=jax.device_put(scale, shardings))

    def run(self, step: int | None = None) -> RunConfig:
        """The config of the run that wrote a checkpoint."""
        return from_dict(RunConfig, self._json(step, "run"))

    def tokenizer(self, step: int | None = None) -> Tokenizer:
        """The tokenizer that its model was trained with."""
        return tokenizer_from_dict(self._json(step, "tokenizer"))

    def extra(self, step: int | None = None) -> dict:
        """What `save` was given as `extra`."""
        return self._json(step, "extra")

    def check(self, model: ModelConfig, tokenizer: Tokenizer, step: int | None = None) -> None:
        """Raises UserError where a checkpoint is of another model or another tokenizer."""
        step = self._existing(step)
        path = self._path(step)
        _check_model(path, self.run(step).model, model)
        saved = self.tokenizer(step)
        if saved.to_dict() == tokenizer.to_dict():
            return
        there, here = f"{saved.kind} of {saved.vocab}", f"{tokenizer.kind} of {tokenizer.vocab}"
        what = f"({there} tokens there, {here} here)"
        if there == here:
            what = f"({here} tokens on both sides, trained on other text)"
        raise UserError(
            f"checkpoint {path} was written with another tokenizer {what}; use its text and "
            "tokenizer, or another out"
        )

    def _form_of(self, trainer: Trainer) -> _DiskForm:
        if self._form is None or self._form.trainer is not trainer:
            self._form = _DiskForm(trainer)
        return self._form

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def _complete(self, step: int) -> bool:
        path = self._path(step)
        return (path / "_CHECKPOINT_METADATA").is_file() and all(
            (path / item).is_dir() for item in _ITEMS
        )

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if step is None and steps:
            return steps[-1]
        if step in steps:
            return step
        if steps:
            there = ", ".join(map(str, steps))
            raise UserError(f"{self.directory} has no checkpoint of step {step}; it has {there}")
        what = "holds no complete checkpoint" if self.directory.is_dir() else "does not exist"
        raise UserError(f"{self.directory} {what}; name the `out` of a training run that has saved")

    def _json(self, step: int | None, item: str) -> dict:
        return self._read(self._existing(step), **{item: ocp.args.JsonRestore()})[item]

    def _read(self, step: int, **items) -> Any:
        try:
            return self._checkpointer.restore(self._path(step), ocp.args.Composite(**items))
        except Exception as error:  # Orbax and TensorStore raise whatever they meet
            raise UserError(
                f"checkpoint {self._path(step)} cannot be read ({_reason(error)}); remove it to "
                "fall back on the one before it"
            ) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: " + str(error).strip().partition("\n")[0]


def _check_model(path: Path, saved: ModelConfig, model: ModelConfig) -> None:
    differences = [
        f"{name}={getattr(saved, name)} there and {getattr(model, name)} here"
        for name in _SHAPE_FIELDS
        if getattr(saved, name) != getattr(model, name)
    ]
    if differences:
        raise UserError(
            f"checkpoint {path} is of another model: {', '.join(differences)}; use its values, or "
            "another out"
        )


class _DiskForm:
    """A trainer's state as it is on disk, and the way there and back.

    {"step", "skipped", "loss_scale": {"scale", "good_steps"}, "params", "mu", "nu"}; the last three
    are trees {"ends": ..., "block": leaves [L, ...]}. The optimizer's counts follow from the rest.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        shapes = jax.eval_shape(trainer.to_canonical, trainer.state_shapes.params)
        specs = jax.tree.map_with_path(self._spec, shapes, trainer.state_specs.params)
        shardings = trainer.shardings(specs)
        self._params = jax.tree.map(_abstract, shapes, shardings)
        # A copy, where the conversion has nothing to do: the next step donates the state.
        self._to_disk = jax.jit(
            lambda tree: jax.tree.map(jnp.copy, trainer.to_canonical(tree)), out_shardings=shardings
        )
        self._from_disk = jax.jit(
            trainer.from_canonical, out_shardings=trainer.shardings(trainer.state_specs.params)
        )

    def _spec(self, path: tuple, shape: jax.ShapeDtypeStruct, spec: P) -> P:
        """The master's spec without the axes that do not divide the shape on disk."""
        dims = [axes_of(P(entry)) for entry in spec]
        if path[0].key == "block":
            dims = [sum(dims[:3], ()), *dims[3:]]  # [P, C, N, ...] -> [L, ...]
        return P(*(self._dividing(axes, size) for axes, size in zip(dims, shape.shape)))

    def _dividing(self, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        kept: tuple[str, ...] = ()
        for axis in axes:
            if size % math.prod(self.trainer.sizes[name] for name in (*kept, axis)) == 0:
                kept += (axis,)
        return kept

    @property
    def target(self) -> Tree:
        """Shapes, dtypes and shardings of what is to be read."""
        replicated = NamedSharding(self.trainer.mesh, P())
        scalars = _scalars(self.trainer.state_shapes)
        scalars = jax.tree.map(lambda a: _abstract(a, replicated), scalars)
        return scalars | dict.fromkeys(("params", "mu", "nu"), self._params)

    def from_state(self, state: TrainState) -> Tree:
        moments = {name: optax.tree_utils.tree_get(state.moments, name) for name in ("mu", "nu")}
        trees = {"params": state.params} | moments
        return jax.device_get(_scalars(state)) | {
            name: self._to_disk(tree) for name, tree in trees.items()
        }

    def to_state(self, disk: Tree) -> TrainState:
        """Empties `disk` on the way: at most one of its trees exists twice."""
        params, mu, nu = (self._from_disk(disk.pop(name)) for name in ("params", "mu", "nu"))
        updates = np.int32(disk["step"]) - np.int32(disk["skipped"])
        replicated = NamedSharding(self.trainer.mesh, P())

        def count(leaf):
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            if leaf.shape or leaf.dtype != jnp.int32:
                raise TypeError(f"the optimizer's state has a leaf that is not saved: {leaf}")
            return jax.make_array_from_callback((), replicated, lambda _: updates)

        moments = optax.tree_utils.tree_set(self.trainer.state_shapes.moments, mu=mu, nu=nu)
        return TrainState(
            step=disk["step"],
            params=params,
            moments=jax.tree.map(count, moments),
            loss_scale=LossScale(**disk["loss_scale"]),
            skipped=disk["skipped"],
        )


def _scalars(state: TrainState) -> dict:
    loss_scale = state.loss_scale._asdict()
    return {"step": state.step, "skipped": state.skipped, "loss_scale": loss_scale}


def _abstract(a: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
