"""The checkpoints in a folder: which exist, what each holds, and which are set aside."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mtx.checkpoint.formats import current_run
from mtx.checkpoint.manifest import MANIFEST, Manifest, is_ours, read_document, read_manifest
from mtx.checkpoint.snapshot import odd_one_out, without_moments
from mtx.checkpoint.store import Damaged, Store
from mtx.config import RunConfig, from_dict
from mtx.data import Tokenizer, tokenizer_from_dict
from mtx.errors import UserError
from mtx.paths import check_path
from mtx.sharding.agree import agree

TIMEOUT_S = 600  # for one save, and for a process to answer
_DOCUMENTS = ("run", "tokenizer", "extra")
_ASIDE = ".aside"


class Folder:
    """Checkpoints by their steps. `directory` may also be a run's own, which holds one named
    "checkpoints"."""

    def __init__(self, directory: str | Path):
        check_path("checkpoints", directory)
        directory = Path(directory).absolute()
        inner = directory / "checkpoints"
        self.directory = inner if inner.is_dir() else directory

    # -- which exist ------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, oldest first."""
        return sorted(step for step in self._numbers() if (self._path(step) / MANIFEST).is_file())

    def incomplete(self) -> list[int]:
        """The steps whose directories hold no whole checkpoint: half deleted, or something else."""
        return sorted(set(self._numbers()) - set(self.steps()))

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def _numbers(self) -> list[int]:
        """The steps after which directories are named."""
        if self.directory.exists() and not self.directory.is_dir():
            raise UserError(f"{self.directory} is a file, and checkpoints lie in a directory")
        try:
            return [
                int(path.name)
                for path in self.directory.iterdir()
                if path.name.isdecimal() and path.name == str(int(path.name)) and path.is_dir()
            ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"{self.directory} cannot be read: {error.strerror}") from error

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

    # -- what one holds ---------------------------------------------------------------------------

    def manifest(self, step: int | None = None) -> Manifest:
        """The manifest of a checkpoint. Raises Damaged."""
        step = self._existing(step)
        manifest = read_manifest(self._path(step))
        if manifest.step != step:
            raise Damaged(self._path(step), f"{MANIFEST} is that of step {manifest.step:,}")
        if odd := odd_one_out(manifest.catalog):
            raise Damaged(
                self._path(step), f"{MANIFEST}: {odd} is missing, or not alike in all trees"
            )
        return manifest

    def look(self, step: int | None = None) -> None:
        """Raises Damaged if something is missing, or a small file is not what was written. The
        arrays' own bytes are checked when they are read."""
        manifest = self.manifest(step)
        documents = {
            name: read_document(self._path(manifest.step), manifest, name) for name in _DOCUMENTS
        }
        if odd := without_moments(manifest.catalog, documents["run"]):
            what = f"{MANIFEST}: {odd} has not the arrays that the run's optimizer keeps"
            raise Damaged(self._path(manifest.step), what)
        Store(directory=self._path(manifest.step), catalog=manifest.catalog).check_files()

    def verify(self, step: int | None = None) -> None:
        """Raises Damaged if anything in a checkpoint is not what was written; reads all of it."""
        self.look(step)
        with self.open(step) as store, ThreadPoolExecutor() as pool:
            for _ in pool.map(lambda name: sum(store.verify(name)), store.catalog):
                pass

    def open(self, step: int | None = None) -> Store:
        """A checkpoint's arrays, to be read one by one, as in `with checkpoints.open() as store:
        store.read("params.embed.tokens")`. Raises Damaged."""
        manifest = self.manifest(step)
        store = Store(directory=self._path(manifest.step), catalog=manifest.catalog)
        store.check_files()
        return store

    def document(self, name: str, step: int | None = None) -> dict:
        """One of its JSON documents: "run", "tokenizer" or "extra". Raises Damaged."""
        manifest = self.manifest(step)
        return read_document(self._path(manifest.step), manifest, name)

    def run(self, step: int | None = None) -> RunConfig:
        """The config of the run that wrote a checkpoint."""
        return from_dict(RunConfig, current_run(self.document("run", step)))

    def tokenizer(self, step: int | None = None) -> Tokenizer:
        """The tokenizer that its model was trained with."""
        return tokenizer_from_dict(self.document("tokenizer", step))

    def extra(self, step: int | None = None) -> dict:
        """What `save` was given as `extra`."""
        return self.document("extra", step)

    # -- set aside --------------------------------------------------------------------------------

    def find(self, say: Callable[[str], None]) -> int | None:
        """The step of the newest checkpoint whose manifest and documents are sound, the same on all
        processes; None if there are no checkpoints at all.

        Those that are not sound are set aside, and `say` gets a line about each. Raises UserError
        if there are checkpoints but none of them is sound.
        """

        def search(_) -> str:
            return json.dumps(self.search(self.look, self._rename))

        step, lines = json.loads(agree("find", "", search, timeout_s=TIMEOUT_S))
        for line in lines:
            say(line)
        if step is None and (lines or self.aside()):
            raise UserError(
                f"no checkpoint in {self.directory} is sound; put a copy back, or use another out "
                "to start anew"
            )
        return step

    def search(
        self, look: Callable[[int], None], put_away: Callable[[int], str]
    ) -> tuple[int | None, list[str]]:
        """(the step of the newest checkpoint that `look` does not find Damaged, or None; a line on
        each that is). put_away: takes a damaged one, and returns what became of it."""
        lines = [
            f"checkpoint {self._path(step)} is damaged: it has no {MANIFEST}"
            for step in self.incomplete()
            if any(self._path(step).iterdir()) and is_ours(self._path(step))
        ]
        for step in reversed(self.steps()):
            try:
                look(step)
                return step, lines
            except Damaged as error:
                lines.append(f"{error}; {put_away(step)}")
        return None, lines

    def set_aside(self, step: int, why: str, *, unless_oldest: bool = False) -> str:
        """Renames a checkpoint so that it no longer counts; returns a line that says so. `why`
        begins with a verb. `unless_oldest`: does nothing, and returns "", if there is no older one.
        To be called by all processes."""

        def rename(_) -> str:
            if unless_oldest and step not in self.steps()[1:]:
                return ""
            return f"checkpoint {self._path(step)} {why}; {self._rename(step)}"

        return agree("set_aside", "", rename, timeout_s=TIMEOUT_S)

    def _rename(self, step: int) -> str:
        path = self._path(step)
        taken = (path.with_name(f"{step}{_ASIDE}{n or ''}") for n in range(1_000_000))
        aside = next(name for name in taken if not name.exists())
        try:
            path.rename(aside)
        except OSError as error:
            raise UserError(f"{path} cannot be set aside: {error.strerror}") from error
        return f"it is now named {aside.name}"

    def aside(self) -> list[str]:
        """The names of the checkpoints that were set aside."""
        named = re.compile(rf"\d+{re.escape(_ASIDE)}\d*")
        return sorted(
            path.name
            for path in self.directory.glob(f"*{_ASIDE}*")
            if named.fullmatch(path.name) and path.is_dir()
        )
