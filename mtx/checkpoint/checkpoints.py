"""Layout-independent checkpoints: what one (data, pipe, tensor, virtual) saves, any other reads.

On disk, under the number of finished steps: `checkpoint.json`, the manifest with a checksum of
everything else; `arrays.<process>.bin`, every array in its global shape, unpadded, and each kind's
layers as [L, ...] in model order, in blocks; `run.json`, the config; `tokenizer.json`;
`extra.json`. A checkpoint is written in the background and renamed when it is complete, so it is
there whole or not at all. Everything is checked when it is read: either it is what was written, or
an error names what is not.

Read the modules in this order: catalog (which arrays there are), store (arrays in files), snapshot
(a state as arrays), manifest, formats, folder, commit.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from mtx.checkpoint.commit import DISCARDED, Contents, Writer, discard
from mtx.checkpoint.folder import TIMEOUT_S, Folder
from mtx.checkpoint.manifest import is_ours
from mtx.checkpoint.snapshot import Snapshot
from mtx.checkpoint.store import Damaged
from mtx.config import ModelConfig, OptimizerConfig, to_dict
from mtx.data import Tokenizer
from mtx.data.indexed import sync_folder
from mtx.errors import UserError
from mtx.sharding.agree import agree
from mtx.step.optimizer import LossScale
from mtx.step.state import TrainState
from mtx.step.trainer import Trainer

_SHAPE_FIELDS = (
    "family", "layers", "hidden", "heads", "groups", "sequence", "vocab", "ffn_hidden", "tied",
    "norm_placement", "lora_rank", "lora_alpha", "lora_on", "vision_layers", "unread_layers",
    "vision_hidden", "vision_heads", "image_size", "patch_size", "projector", "projector_only",
)  # fmt: skip
_DAMAGED, _UNREADABLE = "damaged:", "unreadable:"
_TEMPORARY = "*.orbax-checkpoint-tmp*"


class Checkpoints(Folder):
    """The checkpoints of one run, in a directory of their own, which the first `save` creates.

    The newest `keep` are kept, and those whose step is a multiple of `keep_every`; if an older
    one cannot be deleted, `say` gets a line about it, and the next save tries again. Use it as a
    context, or call `wait` at the end.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int = 2,
        keep_every: int = 0,
        say: Callable[[str], None] = print,
    ):
        super().__init__(directory)
        self._keep, self._keep_every, self._say = keep, keep_every, say
        self._preparing: threading.Thread | None = None
        self._thread = ThreadPoolExecutor(1, "mtx_finish")  # starts when it is first used
        self._finishing: Future | None = None  # a save, and the deletions after it
        self._snapshot: Snapshot | None = None  # of the trainer last seen
        self._writer: ocp.AsyncCheckpointer | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, *exception) -> None:
        told = contextlib.nullcontext() if kind is None else contextlib.suppress(UserError)
        with told:  # the first error is the one to report
            self.wait()

    # -- writing ----------------------------------------------------------------------------------

    def prepare(self, trainer: Trainer) -> None:
        """Allocates the host memory that the first `save` would otherwise wait for, while programs
        compile."""
        snapshot = self._snapshot_of(trainer)
        _ = snapshot.leaves  # traced here, since two threads must not trace at once
        self._preparing = threading.Thread(target=snapshot.prepare, daemon=True)
        self._preparing.start()

    def save(
        self,
        trainer: Trainer,
        state: TrainState,
        *,
        tokenizer: Tokenizer,
        extra: dict | None = None,
    ) -> Path:
        """Starts to save `state` under its number of steps; returns the directory for it.

        Returns when the state has been copied to the host, so that the next step may donate it; the
        writing goes on in the background. `extra` is anything that JSON can hold. Raises UserError
        if this save or the one before it cannot be written.
        """
        self.wait()
        if self._preparing is not None:
            self._preparing.join()
        step = int(state.step)
        self._make_way(step)
        snapshot = self._snapshot_of(trainer)
        contents = Contents(
            step=step,
            arrays={name: (leaf.shape, leaf.dtype) for name, leaf in snapshot.leaves.items()},
            parts=snapshot.take(state),
            documents={
                "run": to_dict(trainer.run),
                "tokenizer": tokenizer.to_dict(),
                "extra": extra or {},
            },
        )
        with self._writing():
            self._checkpointer.save(self._path(step), contents)
        self._finishing = self._thread.submit(self._finish)
        return self._path(step)

    def poll(self) -> None:
        """Raises UserError if a save has failed since the last call. Does not wait: to be called
        between steps."""
        if self._finishing is not None and self._finishing.done():
            self.wait()

    def wait(self) -> None:
        """Returns when the running save is complete, and the checkpoints that are too old are
        deleted, if they can be. Raises UserError if the save cannot be written; earlier checkpoints
        are left as they were."""
        finishing, self._finishing = self._finishing, None
        if finishing is None:
            return
        with self._writing():
            undeleted = finishing.result()
        if undeleted:
            self._say(undeleted)

    @property
    def _checkpointer(self) -> ocp.AsyncCheckpointer:
        if self._writer is None:
            logging.getLogger("absl").addFilter(_no_traceback)
            self._writer = ocp.AsyncCheckpointer(
                Writer(timeout_s=TIMEOUT_S),
                async_options=ocp.AsyncOptions(
                    timeout_secs=TIMEOUT_S, create_directories_asynchronously=False
                ),
                file_options=ocp.options.FileOptions(skip_sync_file_validations=True),
            )
        return self._writer

    def _make_way(self, step: int) -> None:
        """Raises UserError, on all processes, if process 0 cannot write the checkpoint."""

        def prepare(_) -> str:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._discard_unfinished()
                path = self._path(step)
                if path.exists() and not is_ours(path):
                    return f"{path} must be a checkpoint, and holds other files; use another out"
                probe = self.directory / f"{step}.orbax-checkpoint-tmp-probe"
                probe.mkdir()
                probe.rmdir()
            except OSError as error:
                return f"no checkpoint can be written in {self.directory} ({_reason(error)})"
            return ""

        refused = agree("make_way", "", prepare, timeout_s=TIMEOUT_S)
        if refused:
            raise UserError(refused)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, TimeoutError) as error:
            if jax.process_index() == 0:
                with contextlib.suppress(OSError):
                    self._discard_unfinished()
            raise UserError(
                f"no checkpoint can be written in {self.directory} ({_reason(error)}); the ones "
                "saved before are whole"
            ) from error

    def _finish(self) -> str:
        """Waits for the save, in the background, and deletes checkpoints that are too old. Returns
        a line if they cannot be deleted: the save is whole all the same."""
        self._checkpointer.wait_until_finished()
        if jax.process_index():
            return ""
        sync_folder(self.directory)  # the rename
        try:
            for step in self.steps()[: -self._keep]:
                if not (self._keep_every and step % self._keep_every == 0):
                    discard(self._path(step))
        except OSError as error:
            return (
                f"checkpoints beyond keep={self._keep} cannot be deleted in {self.directory} "
                f"({_reason(error)}); the next save tries again"
            )
        shutil.rmtree(self.directory / DISCARDED, ignore_errors=True)
        return ""

    def _discard_unfinished(self) -> None:
        """Deletes what interrupted saves and deletions have left behind."""
        for path in self.directory.glob(_TEMPORARY):
            discard(path)
        shutil.rmtree(self.directory / DISCARDED, ignore_errors=True)

    # -- reading ----------------------------------------------------------------------------------

    def restore(self, trainer: Trainer, step: int | None = None) -> TrainState:
        """The state of a checkpoint, on the layout of `trainer`. `step` is the newest by default.
        Raises Damaged, on all processes, if what is read is not what was written; UserError for
        a checkpoint of another model."""
        self.wait()
        step = self._existing(step)
        saved = self.run(step)
        _check_model(self._path(step), saved.model, trainer.run.model)
        said, state = "", None
        try:
            with self.open(step) as store:
                state = self._snapshot_of(trainer).load(store)
            if int(state.step) != step:
                raise Damaged(self._path(step), f"array step is {int(state.step):,}")
        except Damaged as error:
            said = _DAMAGED + error.what
        except UserError as error:
            said = _UNREADABLE + str(error)
        what = agree("restore", said, max, timeout_s=TIMEOUT_S)
        if what.startswith(_DAMAGED):
            raise Damaged(self._path(step), what.removeprefix(_DAMAGED))
        if what or state is None:
            raise UserError(what.removeprefix(_UNREADABLE))
        if saved.model.compute_dtype == trainer.run.model.compute_dtype:
            return state
        scale = LossScale.start(trainer.run.optimizer, trainer.run.model.compute_dtype)
        shardings = trainer.shardings(trainer.states.specs.loss_scale)
        return state._replace(loss_scale=jax.device_put(scale, shardings))

    def check(self, trainer: Trainer, tokenizer: Tokenizer, step: int | None = None) -> None:
        """Raises UserError if a checkpoint is of another model, optimizer or tokenizer."""
        step = self._existing(step)
        path = self._path(step)
        run = self.run(step)
        _check_model(path, run.model, trainer.run.model)
        if step:  # moments of a converted model are zeros, for any optimizer
            _check_optimizer(path, run.optimizer, trainer.run.optimizer)
        with self.open(step) as store:
            self._snapshot_of(trainer).check(store)
        saved = self.tokenizer(step)
        if saved.identity.same_as(tokenizer.identity):
            return
        there, here = f"{saved.name} of {saved.vocab}", f"{tokenizer.name} of {tokenizer.vocab}"
        what = f"({there} tokens there, {here} here)"
        if there == here:
            what = f"({here} tokens on both sides, trained on other text)"
        raise UserError(
            f"checkpoint {path} was written with another tokenizer {what}; use its text and "
            "tokenizer, or start a new run in another out"
        )

    def _snapshot_of(self, trainer: Trainer) -> Snapshot:
        if self._snapshot is None or self._snapshot.trainer is not trainer:
            self._snapshot = Snapshot(trainer)
        return self._snapshot


def _no_traceback(record: logging.LogRecord) -> bool:
    """False for what Orbax logs, with tracebacks, about a failed save: `_writing` reports that in a
    line. Nobody has to know that Orbax's own metadata found no room: nothing here reads them."""
    return record.levelno < logging.ERROR or "orbax" not in Path(record.pathname).parts


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: " + str(error).strip().partition("\n")[0]


def _check_model(path: Path, saved: ModelConfig, model: ModelConfig) -> None:
    differences = [
        f"{name}={there} there and {here} here"
        for name in _SHAPE_FIELDS
        if (there := getattr(saved, name, None)) != (here := getattr(model, name, None))
    ]
    if differences:
        raise UserError(
            f"checkpoint {path} is of another model: {', '.join(differences)}; use its values, or "
            "start a new run in another out"
        )


def _check_optimizer(path: Path, saved: OptimizerConfig, now: OptimizerConfig) -> None:
    """UserError for another optimizer: its arrays of the same names may mean something else."""
    for name, there, here in (
        ("name", saved.name, now.name),
        ("rest", saved.rest or saved.name, now.rest or now.name),
    ):
        if there != here:
            raise UserError(
                f"checkpoint {path} is of another optimizer: optimizer.{name}={there} there and "
                f"{here} here; go on with the one that it was saved with, or start anew elsewhere"
            )
