"""`mtx checkpoint`: what a run's checkpoints hold, whether they are sound, and what others read."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from mtx.cli.options import parse, split_name
from mtx.errors import UserError, unknown_name
from mtx.sizes import Interval

if TYPE_CHECKING:
    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.checkpoint.store import Damaged

_Step = Annotated[Interval | None, tyro.conf.arg(metavar="INT")]
_Name = Annotated[str | None, tyro.conf.arg(metavar="STR")]
_Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


def checkpoint_command(arguments: list[str]) -> int | None:
    """List, inspect, verify and export checkpoints.

    list RUN_DIR, inspect RUN_DIR, verify RUN_DIR, export RUN_DIR --out FOLDER; mtx checkpoint
    ACTION --help lists the options of each.
    """
    action, *rest = arguments or ["--help"]
    if action in ("-h", "--help"):
        print(_overview())
        return None
    if action not in ACTIONS:
        raise unknown_name("action", action, ACTIONS)
    return ACTIONS[action](rest)


def _overview() -> str:
    rows = [(name, action.__doc__.splitlines()[0]) for name, action in ACTIONS.items()]
    return "\n".join([
        checkpoint_command.__doc__.splitlines()[0], "",
        "usage: mtx checkpoint ACTION RUN_DIR [OPTIONS]", "",
        *(f"  {name:<10}{summary}" for name, summary in rows), "",
        "mtx checkpoint ACTION --help lists the options.",
    ])  # fmt: skip


def _open(name: str | None, rest: list[str]) -> Checkpoints | None:
    """The checkpoints of RUN_DIR; None where only help is asked for."""
    if name is None:
        if "-h" in rest or "--help" in rest:
            return None
        raise UserError("name the folder of a training run (its --out) before all options")
    from mtx.checkpoint.checkpoints import Checkpoints

    return Checkpoints(name)


# -- list ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    json: _Flag = False  # the same as JSON


def list_action(arguments: list[str]) -> None:
    """The steps that are saved: when, how large, complete or damaged.

    Checks the small files and that the large ones are there; `verify` reads these as well.
    """
    name, rest = split_name(arguments)
    checkpoints = _open(name, rest)
    options = parse(rest, ListOptions(), prog="mtx checkpoint list RUN_DIR", about=list_action)
    rows = [_row(checkpoints, step) for step in checkpoints.steps()]
    rows += [{"step": step, "state": "incomplete"} for step in checkpoints.incomplete()]
    for name in checkpoints.aside():
        rows.append({"step": int(name.partition(".")[0]), "state": f"set aside as {name}"})
    rows.sort(key=lambda row: row["step"])
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    if not rows:
        raise UserError(f"{checkpoints.directory} holds no checkpoint")
    print(f"{'step':>12}  {'saved':<19}  {'size':>10}  processes  state")
    for row in rows:
        saved, size, processes = "", "", ""
        if "bytes" in row:
            saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["unix_time"]))
            size, processes = _bytes_text(row["bytes"]), row["processes"]
        print(f"{row['step']:>12,}  {saved:<19}  {size:>10}  {processes:>9}  {row['state']}")


def _row(checkpoints: Checkpoints, step: int) -> dict:
    from mtx.checkpoint.store import Damaged

    try:
        checkpoints.look(step)
        manifest = checkpoints.manifest(step)
    except Damaged as damage:
        return {"step": step, "state": f"damaged: {damage.what}"}
    return {
        "step": step, "unix_time": manifest.unix_time, "bytes": manifest.size_bytes,
        "processes": manifest.processes, "state": "complete",
    }  # fmt: skip


# -- inspect ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    step: _Step = None  # the newest where not given
    json: _Flag = False  # the same as JSON


def inspect_action(arguments: list[str]) -> None:
    """What one holds: its config, tokenizer, held-out loss, and every array.

    Of an array: the shape without padding, its dtype, bytes and fingerprint, which is the same
    whatever the layout it was saved on. Layers are stacked in model order.
    """
    name, rest = split_name(arguments)
    checkpoints = _open(name, rest)
    options = parse(
        rest, InspectOptions(), prog="mtx checkpoint inspect RUN_DIR", about=inspect_action
    )
    from mtx.config import to_dict

    manifest = checkpoints.manifest(options.step)
    run, extra = checkpoints.run(options.step), checkpoints.extra(options.step)
    tokenizer = {"kind": "none"}  # of a model that was converted without one
    if checkpoints.document("tokenizer", options.step) != tokenizer:
        known = checkpoints.tokenizer(options.step)
        tokenizer = {"kind": known.kind, "vocab": known.vocab}
    if options.json:
        print(json.dumps({
            "step": manifest.step, "unix_time": manifest.unix_time, "bytes": manifest.size_bytes,
            "processes": manifest.processes, "run": to_dict(run), "extra": extra,
            "tokenizer": tokenizer,
            "arrays": {
                name: {
                    "shape": info.shape, "dtype": info.dtype.name, "bytes": info.size_bytes,
                    "fingerprint": f"{info.fingerprint:016x}",
                }
                for name, info in manifest.catalog.items()
            },
        }, indent=1))  # fmt: skip
        return
    layout, model = run.layout, run.model
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.unix_time))
    held_out = extra.get("held_out")
    if isinstance(held_out, dict) and type(held_out.get("loss")) is float:
        extra["held_out"] = f"loss {held_out['loss']:.4f} at step {held_out.get('step')}"
    print("\n".join([
        f"checkpoint {checkpoints.directory / str(manifest.step)}",
        f"saved      {saved} by {manifest.processes} "
        f"process{'es' if manifest.processes > 1 else ''}, {_bytes_text(manifest.size_bytes)}",
        f"layout     data {layout.data} x pipe {layout.pipe} x tensor {layout.tensor}, "
        f"{layout.schedule}, v = {layout.virtual}",
        f"model      {model.family}, {model.layers} layers, hidden {model.hidden:,}, "
        f"{model.heads} heads, sequence {model.sequence:,}, vocabulary {model.vocab:,}, "
        f"{model.compute_dtype}",
        "tokenizer  " + ", vocabulary ".join(f"{value:,}" if isinstance(value, int) else value
                                            for value in tokenizer.values()),
        *(f"{key.replace('_', ' '):<11}{value}" for key, value in extra.items()),
        "",
        f"{'array':<40}{'shape':<28}{'dtype':<10}{'bytes':>18}  fingerprint",
        *(
            f"{name:<40}{str(list(info.shape)):<28}{info.dtype.name:<10}{info.size_bytes:>18,}  "
            f"{info.fingerprint:016x}"
            for name, info in manifest.catalog.items()
        ),
    ]))  # fmt: skip


# -- verify ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    step: _Step = None  # all where not given
    json: _Flag = False  # the same as JSON


def verify_action(arguments: list[str]) -> int:
    """Read everything and compare it with its checksums; exit status 1 when damaged.

    Of a damaged checkpoint every file and every array that is not what was written is named.
    """
    name, rest = split_name(arguments)
    checkpoints = _open(name, rest)
    options = parse(
        rest, VerifyOptions(), prog="mtx checkpoint verify RUN_DIR", about=verify_action
    )
    steps = checkpoints.steps() if options.step is None else [options.step]
    if not steps:
        raise UserError(f"{checkpoints.directory} holds no complete checkpoint")
    found = {}
    for step in steps:
        start_s = time.perf_counter()
        damages = _damages(checkpoints, step)
        elapsed_s = time.perf_counter() - start_s
        found[step] = [damage.what for damage in damages]
        if not options.json:
            for what in found[step]:
                print(f"step {step:>10,}  DAMAGED  {what}")
            if not damages:
                size = checkpoints.manifest(step).size_bytes
                rate = f"{size / 1e9 / elapsed_s:.1f} GB/s"
                print(
                    f"step {step:>10,}  sound    {_bytes_text(size)} in {elapsed_s:.1f} s, {rate}"
                )
    if options.json:
        print(json.dumps(found, indent=1))
    return 1 if any(found.values()) else 0


def _damages(checkpoints: Checkpoints, step: int) -> list[Damaged]:
    """All that is damaged in one checkpoint: at most one place of each array."""
    from mtx.checkpoint.store import Damaged, Store

    damages = []
    try:
        checkpoints.look(step)
    except Damaged as damage:
        damages.append(damage)
    try:
        manifest = checkpoints.manifest(step)
    except Damaged:
        return damages
    directory = checkpoints.directory / str(step)
    with (
        Store(directory=directory, catalog=manifest.catalog) as store,
        _Bar(step, manifest.size_bytes) as bar,
    ):

        def verify(name: str) -> Damaged | None:
            try:
                for read_bytes in store.verify(name):
                    bar.advance(read_bytes)
            except Damaged as damage:
                return damage

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            damages += filter(None, pool.map(verify, store.catalog))
    return damages


class _Bar:
    """The bytes that are read, on stderr, where that is a terminal."""

    def __init__(self, step: int, total_bytes: int):
        self._progress = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

            columns = ("step", str(step), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task("", total=total_bytes)

    def __enter__(self) -> _Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exception) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, read_bytes: int) -> None:
        if self._progress is not None:
            self._progress.advance(self._task, read_bytes)


# -- export ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    out: _Name = None  # the folder to make
    step: _Step = None  # the newest where not given
    # orbax: a folder that plain Orbax reads
    format: Literal["safetensors", "orbax"] = "safetensors"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the parameters
    optimizer: _Flag = False  # its state as well, in float32
    json: _Flag = False  # what was written, as JSON


def export_action(arguments: list[str]) -> None:
    """Write the parameters, or all of the state, as safetensors or for Orbax alone.

    Names, shapes and the order of layers are the checkpoint's own, as `inspect` shows them; with
    run.json and tokenizer.json beside it. --format orbax makes a folder that Orbax's
    StandardCheckpointer().restore reads, without mtx. For Hugging Face's names and shapes: mtx
    convert.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed
    name, rest = split_name(arguments)
    checkpoints = _open(name, rest)
    options = parse(
        rest, ExportOptions(), prog="mtx checkpoint export RUN_DIR --out FOLDER",
        about=export_action,
    )  # fmt: skip
    if options.out is None:
        raise UserError("--out is missing: it names the folder to make")
    from mtx.conversion.export import export

    count = export(
        checkpoints, Path(options.out), step=options.step, format=options.format,
        dtype=options.dtype, optimizer=options.optimizer,
    )  # fmt: skip
    if options.json:
        written = {"path": options.out, "parameters": count, "dtype": options.dtype}
        print(json.dumps(written | {"optimizer": options.optimizer}, indent=1))
    else:
        more = " and the optimizer's state" if options.optimizer else ""
        print(f"wrote      {options.out}: {count:,} parameters in {options.dtype}{more}")


def _bytes_text(size_bytes: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.1f} TB"


ACTIONS: dict[str, Callable[[list[str]], int | None]] = {
    "list": list_action,
    "inspect": inspect_action,
    "verify": verify_action,
    "export": export_action,
}
