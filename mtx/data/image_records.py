"""Files of images with captions, or conversations about them, to records.

JSON lines, or a JSON list: each record is {"image": FILE or "images": [FILE, ...], and "text": a
caption, "messages": [{"role", "content"}, ...] or LLaVA's "conversations":
[{"from", "value"}, ...]}. An image's place in a text is <image>; if none is named, images come
first. Files are looked for beside the JSON. A folder holds pictures, each with its caption beside
it: cat.png and cat.txt. An .npz has the arrays "images", uint8 [n, height, width, 3], and
"texts" [n].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtx.data.arrays import read_arrays
from mtx.data.chat import ROLES, Message
from mtx.data.documents import listed
from mtx.data.pixels import SUFFIXES, Picture, require_pixels
from mtx.data.sources import Reading, files_below, lines_of, read_chunks, require_text
from mtx.errors import UserError, shown
from mtx.files import parse_json, read_json, read_text
from mtx.paths import user_path

MARK = "<image>"
_LINES = (".jsonl", ".ndjson")
_LLAVA_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


class Record(NamedTuple):
    """Pictures, and a caption or conversation about them."""

    pictures: tuple[Picture, ...]
    said: str | tuple[Message, ...]
    where: str  # for messages to people


# -- what is read ----------------------------------------------------------------------------------


def read_image_records(names: Sequence[str]) -> list[Record]:
    """The records in these files and folders. UserError, with the place, for anything else."""
    found: list[Record] = []
    for name in names:
        path = user_path(name, "data path")
        if path.is_dir():
            found += _folder(path)
        elif not path.is_file():
            raise UserError(f"data path {name!r} must be a file or a folder (from {Path.cwd()})")
        elif path.suffix == ".npz":
            found += _arrays(path)
        else:
            found += (_record(each, where, path.parent) for where, each in _objects(path))
    if not found:
        raise UserError(f"no images with text in {listed(list(names))}; name other files")
    return found


def _folder(path: Path) -> Iterator[Record]:
    for picture in files_below(path, SUFFIXES):
        text = picture.with_suffix(".txt")
        if not text.is_file():
            raise UserError(f"{picture} has no caption beside it; write {text.name}, or move it")
        yield Record((picture,), read_text(text).strip(), str(picture))


def _arrays(path: Path) -> Iterator[Record]:
    images, texts = read_arrays(path, "images", "texts")
    if images.ndim != 4 or texts.ndim != 1 or len(images) != len(texts) or texts.dtype.kind != "U":
        raise UserError(
            f"{path}: images {list(images.shape)} must be [n, height, width, 3] and texts "
            f"{texts.dtype} {list(texts.shape)} text [n]"
        )
    for number, (image, text) in enumerate(zip(images, texts.tolist())):
        where = f"{path}, image {number}"
        require_pixels(image, where)
        yield Record((image,), require_text(text, f"{where}: its text"), where)


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix not in _LINES:
        values = read_json(path)
        if not isinstance(values, list):
            raise UserError(f"{path} must be a list in JSON, or lines of it (.jsonl)")
        yield from ((f"{path}, record {number}", each) for number, each in enumerate(values, 1))
        return
    for chunk in read_chunks([path], Reading(lines=True), cuts=None, most_characters=0):
        for number, line in lines_of(chunk):
            where = f"{path}, line {number}"
            yield where, parse_json(line, where)


def _record(value: Any, where: str, folder: Path) -> Record:
    if not isinstance(value, dict):
        raise UserError(f'{where} is {shown(value)} and must be {{"image": FILE, "text": ...}}')
    names = value.get("images", value.get("image", []))
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list):
        raise UserError(f"{where}: images={shown(names)} must be a list of files")
    pictures = tuple(folder / require_text(name, f"{where}: an image") for name in names)
    for picture in pictures:
        if not picture.is_file():
            raise UserError(f"{where}: there is no file {picture}; images are named from there")
    if "text" in value:
        return Record(pictures, require_text(value["text"], f"{where}: 'text'"), where)
    return Record(pictures, _messages(value, where), where)


def _messages(value: dict, where: str) -> tuple[Message, ...]:
    ours = "messages" in value
    keys = ("role", "content") if ours else ("from", "value")
    turns = value.get("messages" if ours else "conversations")
    if not isinstance(turns, list) or not turns:
        raise UserError(f'{where} has no "text", "messages" or "conversations"; give one of them')
    found = tuple(
        _message(turn, keys, f"{where}, message {number}") for number, turn in enumerate(turns, 1)
    )
    if not any(each.role == "assistant" and each.content for each in found):
        raise UserError(f"{where}: the assistant says nothing, and there is nothing to learn")
    return found


def _message(turn: Any, keys: tuple[str, str], where: str) -> Message:
    if not isinstance(turn, dict):
        raise UserError(f'{where}: {shown(turn)} must be {{"{keys[0]}": ..., "{keys[1]}": ...}}')
    role, content = (require_text(turn.get(key), f"{where}: {key!r}") for key in keys)
    role = role if keys[0] == "role" else _LLAVA_ROLES.get(role, role)
    if role not in ROLES:
        raise UserError(f"{where}: {keys[0]}={shown(role)} must be one of {', '.join(ROLES)}")
    if role == "assistant" and MARK in content:
        raise UserError(f"{where}: the assistant gives no {MARK}; leave it out")
    return Message(role, content)
