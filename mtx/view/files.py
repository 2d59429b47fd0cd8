"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtx.errors import UserError
from mtx.paths import user_path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to, with its suffix, which takes its place at the end.

    Where writing fails nothing is left behind and what was at `path` stays; where it fails because
    it cannot be done, UserError says why. What is no file, such as /dev/null, is written to itself.
    """
    path = user_path(path)
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        target = Path(os.path.realpath(path))  # a link stays a link
        written = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
        written.touch()  # says what is wrong with a folder before anything is computed
        try:
            yield written
            os.replace(written, target)
        finally:
            written.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
