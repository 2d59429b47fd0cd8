"""Files to documents, and the split into training and held-out text.

A file is one document. Without files, the documents are the help topics that every Python
carries in `pydoc_data.topics`, so that a run needs no download.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mtx.data.samples import shuffled
from mtx.data.sources import TEXT_SUFFIXES, files_below, read_whole
from mtx.errors import UserError
from mtx.paths import user_path


class Documents(NamedTuple):
    """Texts in an order that depends only on names, not on the file system."""

    texts: list[str]
    source: str  # where they come from, for people: "12 files from corpus"


@dataclass(frozen=True, kw_only=True)
class Split:
    """Training and held-out texts, both in shuffled order; no character is in both."""

    train: list[str]
    held_out: list[str]
    held_whole: int  # whole documents in `held_out`; its other texts are tails of documents

    def describe(self) -> str:
        tails = len(self.held_out) - self.held_whole
        parts = [_plural(self.held_whole, "whole document")] if self.held_whole else []
        parts += [f"the tail of {_plural(tails, 'document')}"] if tails else []
        return f"{' and '.join(parts) or 'nothing'} held out"


def read_documents(paths: Sequence[str]) -> Documents:
    """The documents in `paths` (files and folders), or Python's help topics if there are none.

    A named file is taken whatever its suffix, from a folder those of `files_below`, except empty
    ones. A file that is reached twice is read once: it must not be both trained on and held out.
    Raises UserError for a path that is missing, unreadable, empty or not UTF-8 text.
    """
    if not paths:
        return _python_topics()
    read: dict[str, str] = {}
    named = {Path(name).expanduser() for name in paths}
    for file in text_files(paths):
        if (real := os.path.realpath(file)) not in read:
            read[real] = read_whole(file)
        if not read[real] and file in named:
            raise UserError(f"{file} is empty; take it out of the data path")
    texts = [text for text in read.values() if text]
    empty = len(read) - len(texts)
    if not texts:
        raise UserError(
            f"all text files in {listed(paths)} are empty ({empty}); name files that hold text"
        )
    source = f"{_plural(len(texts), 'file')} from {listed(paths)}"
    return Documents(texts, source + (f" ({empty} empty left out)" if empty else ""))


def text_files(paths: Sequence[str]) -> Iterator[Path]:
    """The files of `read_documents`; one may come twice. UserError for a missing path."""
    for name in paths:
        path = user_path(name, "data path")
        if not os.path.exists(path):
            raise UserError(
                f"data path {name!r} does not exist or cannot be reached (from {Path.cwd()}); name "
                "files, folders or datasets that are there, or none to use Python's help topics"
            )
        yield from files_below(path, TEXT_SUFFIXES) if path.is_dir() else [path]


def hold_out(texts: Sequence[str], *, fraction: float, seed: int) -> Split:
    """Shuffles `texts` by `seed` and holds out about `fraction` of the characters.

    A document longer than a quarter of the held-out share is cut: its last `fraction` is held out.
    The others are held out whole, in shuffled order, until they make up `fraction` of their own
    total. So at least three quarters of the share is met, by one book as well as by a million
    notes. Identical text in two documents is not looked for.
    """
    long = fraction * sum(map(len, texts)) / 4
    left = fraction * sum(len(text) for text in texts if len(text) <= long)
    train, held_out, held_whole = [], [], 0
    for text in (texts[index] for index in shuffled(len(texts), seed, 0, 1)):
        if len(text) > long:
            cut = len(text) - round(fraction * len(text))
        elif len(text) <= left:
            cut, left, held_whole = 0, left - len(text), held_whole + 1
        else:
            cut, left = len(text), 0  # stop at the first that does not fit: no favour to short ones
        if cut > 0:
            train.append(text[:cut])
        if cut < len(text):
            held_out.append(text[cut:])
    return Split(train=train, held_out=held_out, held_whole=held_whole)


def _python_topics() -> Documents:
    """Python's help topics of which more than half is new: 22 of the 79 repeat chapters of others
    ("try" is in "compound"), so held-out text would also have been trained on."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            "this Python carries no pydoc_data.topics to use as text; name files in the data path"
        ) from None
    seen, kept = set(), {}
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        paragraphs = [" ".join(part.split()) for part in topics[name].split("\n\n")]
        new = sum(len(part) for part in paragraphs if part not in seen)
        if 2 * new > sum(map(len, paragraphs)):
            kept[name] = topics[name]
            seen.update(paragraphs)
    source = f"{len(kept)} help topics of Python {platform.python_version()}"
    return Documents([kept[name] for name in sorted(kept)], source)


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first `most` names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
