"""Directories that `mtx train` can start from: a run, or a Hugging Face model.

Either gives a run whose fields options then change, checks the resulting run, and finally puts a
checkpoint where the run looks for one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import jax

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.checkpoint.manifest import MANIFEST
from mtx.checkpoint.store import Damaged
from mtx.config import DataConfig, RunConfig, from_dict
from mtx.config.run import RUN_FILE
from mtx.conversion.convert import (
    COMPANIONS,
    CONVERTED,
    model_to_train,
    new_directory,
    run_to_train,
    to_checkpoint,
)
from mtx.conversion.huggingface import CONFIG, HuggingFaceModel, Report, read_json, write_json
from mtx.conversion.tokenizer import own_tokenizer
from mtx.data.corpus import run_tokenizer
from mtx.errors import UserError
from mtx.plan.fit import refuse_if_too_large, spread_layout
from mtx.sharding.agree import agree
from mtx.train.loop import check_run

START_FILE = "start.json"  # in `out`: the directory that its first checkpoint was made from
_TIMEOUT_S = 6 * 3600  # of a conversion, or a copy, by process 0
_FREE = (
    "sequence", "dropout", "attention_dropout", "vocab_multiple", "compute_dtype", "fp8",
    "fp8_recipe", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin", "images",
    "projector_only",
)  # fmt: skip


class Start(Protocol):
    """A directory to start from."""

    run: RunConfig  # with the fields that it has unless options change them

    def complete(self, run: RunConfig, given: Collection[str]) -> RunConfig:
        """`run`, completed with the fields that follow from others and are not among the options
        `given`. Raises UserError if the run does not match this start."""
        ...

    def prepare(self, run: RunConfig, given: Collection[str], *, report: Report) -> RunConfig:
        """Puts a checkpoint into the `out` of `run`, if needed; returns it laid out over the
        devices. To be called by all processes."""
        ...


def find_start(directory: str) -> Start:
    """Finds a run of mtx or a Hugging Face model. UserError for a directory that is neither."""
    path = Path(os.path.expanduser(directory))
    if os.path.isfile(path / CONFIG):
        return FromModel(path)
    if os.path.isfile(path / MANIFEST):
        raise UserError(f"{path} is one checkpoint; name the run that it is of: {path.parents[1]}")
    if path.name == "checkpoints" and os.path.isfile(path.parent / RUN_FILE):
        path = path.parent
    if os.path.isfile(path / RUN_FILE) or Checkpoints(path).steps():
        return FromRun(path)
    raise UserError(
        f"{path} is neither a run ({RUN_FILE}, checkpoints) nor a Hugging Face directory "
        f"({CONFIG}); text to train on is named by --data.path"
    )


def _read_run(path: Path, checkpoints: Checkpoints) -> RunConfig:
    try:
        values = read_json(path)
    except UserError as error:
        away = "move it away: the newest checkpoint has another" if checkpoints.steps() else ""
        raise UserError(f"{error}; {away or 'put a copy back'}") from None
    try:
        return from_dict(RunConfig, values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


class FromRun:
    """Continues a run in its own directory, or in another one from its newest checkpoint."""

    def __init__(self, directory: Path):
        self._checkpoints = Checkpoints(directory)
        self._done = self._checkpoints.latest() or 0
        written = directory / RUN_FILE
        there = os.path.isfile(written)
        run = _read_run(written, self._checkpoints) if there else self._checkpoints.run()
        self._own, data = str(directory), run.data
        if Path(data.tokenizer) == Path(run.out, COMPANIONS):  # wherever the run has moved
            data = replace(data, tokenizer=str(directory / COMPANIONS))
        self.run = replace(run, data=data, out=self._own, resume=True)
        extra = self._extra()
        if {"labels", "options"} <= extra.keys():
            raise UserError(
                f"{directory} holds a model with a head of mtx finetune, which is not trained on; "
                "name the run that it was made from"
            )
        self._untrained = CONVERTED in extra and not run.data.path

    def _extra(self) -> dict:
        try:
            return self._checkpoints.extra() if self._checkpoints.steps() else {}
        except Damaged:  # the run will look for an older one, and say so
            return {}

    def complete(self, run: RunConfig, given: Collection[str]) -> RunConfig:
        if run.steps < self._done:
            raise UserError(
                f"steps={run.steps} is fewer than the {self._done} that {self._own} has done; use "
                "more, to go on from there"
            )
        return _completed(run, given, self._own) if self._untrained else run

    def prepare(self, run: RunConfig, given: Collection[str], *, report: Report) -> RunConfig:
        run = _laid_out(run, given) if self._untrained else run
        if Path(run.out).resolve() == Path(self._own).resolve():
            return run
        _put_checkpoint(run, self._own, partial(self._copy, run))
        return replace(run, resume=True)

    def _copy(self, run: RunConfig, out: Path) -> None:
        step = self._newest_sound(out)
        check_run(run, self._checkpoints, step)
        print(f"start      copies {self._checkpoints.directory / str(step)}", flush=True)
        with new_directory(out) as place:
            source = self._checkpoints.directory / str(step)
            shutil.copytree(source, place / "checkpoints" / str(step))
            companions = Path(self._own) / COMPANIONS
            if companions.is_dir():
                shutil.copytree(companions, place / COMPANIONS)

    def _newest_sound(self, out: Path) -> int:
        """The step to continue from; damaged checkpoints are reported, and left where they are."""
        if not self._checkpoints.steps():
            raise UserError(f"{self._own} has no checkpoint to go on from in {out}")
        step, lines = self._checkpoints.search(
            self._checkpoints.verify, lambda _: "it is left as it is"
        )
        for line in lines:
            print(f"DAMAGED    {line}", flush=True)
        if step is None:
            raise UserError(
                f"no checkpoint in {self._checkpoints.directory} is sound; put a copy back, or go "
                "on from another run"
            )
        return step


class FromModel:
    """Starts a new run from a model that others have trained, converted into the run's `out`."""

    def __init__(self, source: Path):
        self._source = source
        theirs = HuggingFaceModel(source)
        self._model = theirs.model
        tokenizer, eod = own_tokenizer(theirs)
        model = model_to_train(theirs)
        if not model.sequence_is_fixed:
            model = replace(model, sequence=min(model.sequence, 2048))
        self._has_tokenizer = tokenizer is not None
        out = f"runs/{source.resolve().name}"
        self.run = run_to_train(model, str(source) if self._has_tokenizer else None, eod, out=out)

    def complete(self, run: RunConfig, given: Collection[str]) -> RunConfig:
        self._check_model(run)
        if not self._has_tokenizer and "--data.tokenizer" not in given:
            raise UserError(f"{self._source} has no tokenizer; name the model's --data.tokenizer")
        if Path(run.out).resolve() == self._source.resolve():
            raise UserError(f"out={run.out} is the model that the run goes on from; use another")
        if "--data.tokenizer" in given and "--data.eod" not in given:  # the other's own
            run = replace(run, data=replace(run.data, eod=DataConfig.eod))
        return _completed(run, given, str(self._source))

    def _check_model(self, run: RunConfig) -> None:
        """UserError if the run's model is not that of the directory."""
        ours, theirs = run.model, self._model
        free = {name: getattr(ours, name) for name in _FREE if hasattr(ours, name)}
        if ours.sequence > theirs.sequence or theirs.sequence_is_fixed:
            free["sequence"] = theirs.sequence
        for name, value in vars(replace(theirs, **free)).items():
            if getattr(ours, name) != value:
                least = "at most " if name == "sequence" and not theirs.sequence_is_fixed else ""
                adapters = (
                    "; adapters of a trained model are for mtx finetune --task chat"
                    if name.startswith("lora") else ""
                )  # fmt: skip
                raise UserError(
                    f"model.{name}={getattr(ours, name)} must be {least}{value}, as "
                    f"{self._source / CONFIG} has it{adapters}"
                )

    def prepare(self, run: RunConfig, given: Collection[str], *, report: Report) -> RunConfig:
        asked, source = _laid_out(run, given), str(self._source)
        data = asked.data
        if data.tokenizer == source:  # a run must need nothing outside its directory
            data = replace(data, tokenizer=str(Path(run.out, COMPANIONS)))
        run = replace(asked, data=data, resume=True)

        def convert(out: Path) -> None:
            check_run(asked, Checkpoints(out), None)
            tokenizer = run_tokenizer(asked)
            print(f"start      converts {source}", flush=True)
            to_checkpoint(source, out, run=run, tokenizer=tokenizer, report=report)

        _put_checkpoint(asked, source, convert)
        return run


def _completed(run: RunConfig, given: Collection[str], source: str) -> RunConfig:
    """Limits the warm-up of the first run on a trained model to a tenth of its steps, unless
    given."""
    if not run.data.path:
        raise UserError(
            f"--data.path is missing: it names the text or the datasets that {source} is to be "
            "trained on"
        )
    if "--optimizer.warmup-steps" in given:
        return run
    warmup = min(run.optimizer.warmup_steps, run.steps // 10)
    return replace(run, optimizer=replace(run.optimizer, warmup_steps=warmup))


def _laid_out(run: RunConfig, given: Collection[str]) -> RunConfig:
    """Spreads `run` over all devices, keeping the axes given; UserError if they cannot hold it."""
    kept = [axis for axis in ("data", "pipe", "tensor") if f"--layout.{axis}" in given]
    run = replace(run, layout=spread_layout(run, jax.devices(), kept=kept))
    refuse_if_too_large(run, jax.devices())
    return run


def _put_checkpoint(run: RunConfig, source: str, put: Callable[[Path], object]) -> None:
    """Has process 0 `put` a first checkpoint into `run.out`, unless it has one."""
    out = Path(run.out)

    def decide(_) -> str:
        try:
            there = bool(Checkpoints(out / "checkpoints").steps())
        except OSError as error:
            raise UserError(f"out={out} cannot be read: {error.strerror}; use another") from None
        if there and not run.resume:
            raise UserError(f"out={out} has a checkpoint, and resume=False; use another out")
        if there:
            _refuse_another_start(out, source)
            print(f"start      goes on in {out}, and not from {source} again", flush=True)
        else:
            put(out)
            write_json(out / START_FILE, {"source": str(Path(source).resolve())})
        return ""

    agree("first_checkpoint", "", decide, timeout_s=_TIMEOUT_S)


def _refuse_another_start(out: Path, source: str) -> None:
    """UserError if the run in `out` did not begin from `source`."""
    known = read_json(out / START_FILE).get("source") if (out / START_FILE).is_file() else None
    if known != str(Path(source).resolve()):
        began = f"began from {known}" if known else "began anew"
        raise UserError(
            f"out={out} holds a run that {began}, not from {source}; use another out, or go on "
            f"with it: mtx train {out}"
        )
