"""Schedules in files: written, read back exactly, and checked.

The formats are CSV as in PyTorch (`formats_csv`), plain text (`formats_text`), and JSON: `{"name",
"placement", "ticks": rows as in text, "orders": rows, if they differ from those of the ticks}`; one
of the last two is enough. A mistake in a file is reported in one line, with its row and column.

No format contains slots: they follow from the ticks, so that no file can overwrite one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtx.errors import UserError
from mtx.files import read_bytes
from mtx.schedules.cells import misplaced
from mtx.schedules.formats_csv import from_csv, to_csv
from mtx.schedules.formats_text import (
    Row,
    from_rows,
    from_text,
    order_rows,
    placement_words,
    tick_rows,
    to_text,
)
from mtx.schedules.orders import orders_of
from mtx.schedules.schedule import Schedule

__all__ = [
    "SUFFIXES", "from_csv", "from_dict", "from_json", "from_text", "read_schedule", "to_csv",
    "to_dict", "to_text",
]  # fmt: skip

SUFFIXES = (".csv", ".txt", ".json")
MOST_BYTES = 16 * 2**20  # five times the table of 64 stages of 4 chunks with 512 microbatches


def read_schedule(path: str | Path) -> Schedule:
    """The schedule in a .csv, .txt or .json file, named after it.

    UserError, with the row and column if there is one, for a file that cannot be read or holds no
    schedule that can run.
    """
    path = Path(path)
    readers = {".csv": from_csv, ".txt": from_text, ".json": from_json}
    if path.suffix.lower() not in readers:
        raise UserError(f"schedule file {str(path)!r} must end with one of {', '.join(SUFFIXES)}")
    data = read_bytes(path, "schedule", most=MOST_BYTES)
    try:
        return readers[path.suffix.lower()](_decode(data), path.stem)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _decode(data: bytes) -> str:
    at = data.find(b"\0")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = error.start if at < 0 else min(at, error.start)
    if at >= 0:
        before = data[:at].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        column = before[before.rfind(b"\n") + 1 :].count(b",") + 1
        raise misplaced(before.count(b"\n") + 1, column, f"this is not text: byte 0x{data[at]:02x}")
    return text


def to_dict(schedule: Schedule) -> dict[str, Any]:
    """Everything that defines the schedule, as plain lists and strings that JSON can hold."""
    record = {
        "name": schedule.name,
        "placement": placement_words(schedule.virtual_stages),
        "ticks": tick_rows(schedule),
    }
    by_tick = orders_of(*schedule.tables)
    columns = ("kind", "item", "chunk")
    if any((getattr(by_tick, c) != getattr(schedule.orders, c)).any() for c in columns):
        record["orders"] = order_rows(schedule)
    return record


def from_dict(record: Any, name: str = "json") -> Schedule:
    """The schedule of a `to_dict`. UserError, with row and column, for anything else."""
    known = ("name", "placement", "ticks", "orders")
    if not isinstance(record, dict) or not {"ticks", "orders"} & set(record):
        raise misplaced(1, 1, "expected an object with `ticks` or `orders`, a row for each stage")
    for key, value in record.items():
        if key not in known:
            raise misplaced(1, 1, f"unknown key; known are {', '.join(known)}", text=str(key))
        rows = value if key in ("ticks", "orders") else [value]
        if not (isinstance(rows, list) and rows and all(isinstance(row, str) for row in rows)):
            what = "a list with one string for each stage" if rows is value else "a string"
            raise misplaced(1, 1, f"`{key}` must be {what}")
    placement = Row(1, 0, record.get("placement", "looped"))
    tables = [
        [Row(number, 0, row) for number, row in enumerate(record[key], 1)]
        for key in ("ticks", "orders")
        if key in record
    ]
    return from_rows(record.get("name", name), placement, *tables)


def from_json(text: str, name: str = "json") -> Schedule:
    """The schedule of a `to_dict` as JSON text."""
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise misplaced(error.lineno, error.colno, f"this is not JSON: {error.msg}") from None
    except (RecursionError, ValueError):
        raise misplaced(1, 1, "expected a schedule, not brackets or digits without end") from None
    return from_dict(record, name)
