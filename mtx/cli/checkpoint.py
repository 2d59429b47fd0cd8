"""`mtx checkpoint`: list, inspect, verify and export the checkpoints of a run."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.filesize import decimal

from mtx.cli.options import Command, Flag, Line, command
from mtx.cli.output import facts, progress, run_action, say, table
from mtx.errors import UserError
from mtx.sizes import Interval

if TYPE_CHECKING:
    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.checkpoint.store import Damaged
    from mtx.config import RunConfig


def checkpoint_command(arguments: list[str]) -> int | None:
    """List, inspect, verify and export checkpoints.

    list RUN_DIR, inspect RUN_DIR, verify RUN_DIR, export RUN_DIR --out FOLDER; mtx checkpoint
    ACTION --help lists the options of each.
    """
    usage = "mtx checkpoint ACTION RUN_DIR"
    return run_action(arguments, ACTIONS, usage=usage, about=checkpoint_command)


def _checkpoints(line: Line) -> Checkpoints:
    from mtx.checkpoint.checkpoints import Checkpoints

    return Checkpoints(line.names[0])


# -- list ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    json: Flag = False  # print the list as JSON


@command("mtx checkpoint list RUN_DIR", ListOptions)
def list_action(line: Line[ListOptions]) -> None:
    """List the saved steps: when, how large, complete or damaged.

    Checks the small files and that the large ones exist; `verify` reads the large ones as well.
    """
    checkpoints, options = _checkpoints(line), line.options
    rows = [_row(checkpoints, step) for step in checkpoints.steps()]
    rows += [{"step": step, "state": "incomplete"} for step in checkpoints.incomplete()]
    for name in checkpoints.aside():
        rows.append({"step": int(name.partition(".")[0]), "state": f"set aside as {name}"})
    rows.sort(key=lambda row: row["step"])
    if not rows and not options.json:
        raise UserError(f"{checkpoints.directory} holds no checkpoint")
    cells: list[tuple] = [("step", "saved", "size", "processes", "state")]
    for row in rows:
        saved = _saved(row["unix_time"]) if "bytes" in row else ""
        size = decimal(row["bytes"]) if "bytes" in row else ""
        cells.append((f"{row['step']:,}", saved, size, row.get("processes", ""), row["state"]))
    say(rows, table(cells, "><>><"), as_json=options.json)


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
    step: Interval | None = None  # the checkpoint's step; by default the newest
    json: Flag = False  # print the result as JSON


@command("mtx checkpoint inspect RUN_DIR", InspectOptions)
def inspect_action(line: Line[InspectOptions]) -> None:
    """Show what a checkpoint holds: its config, tokenizer, held-out loss, and every array.

    For each array: its shape without padding, dtype, bytes, and a fingerprint that is the same
    whatever layout the array was saved on. Layers are stacked in model order.
    """
    checkpoints, options = _checkpoints(line), line.options
    from mtx.config import to_dict

    manifest = checkpoints.manifest(options.step)
    run, extra = checkpoints.run(options.step), checkpoints.extra(options.step)
    tokenizer = {"kind": "none"}  # a model that was converted without a tokenizer
    if checkpoints.document("tokenizer", options.step) != tokenizer:
        known = checkpoints.tokenizer(options.step)
        tokenizer = {"kind": known.kind, "vocab": known.vocab}
    arrays = {
        name: {
            "shape": info.shape, "dtype": info.dtype.name, "bytes": info.size_bytes,
            "fingerprint": f"{info.fingerprint:016x}",
        }
        for name, info in manifest.catalog.items()
    }  # fmt: skip
    numbers = {
        "step": manifest.step, "unix_time": manifest.unix_time, "bytes": manifest.size_bytes,
        "processes": manifest.processes, "run": to_dict(run), "extra": extra,
        "tokenizer": tokenizer, "arrays": arrays,
    }  # fmt: skip
    directory = checkpoints.directory / str(manifest.step)
    say(numbers, _inspected(numbers, run, directory), as_json=options.json)


def _inspected(numbers: dict, run: RunConfig, directory: Path) -> list[str]:
    from mtx.train.session import MOST_LOSS

    layout, model = run.layout, run.model
    said, processes = dict(numbers["extra"]), numbers["processes"]
    held_out = said.get("held_out")
    if isinstance(held_out, dict) and type(held_out.get("loss")) is float:
        said["held_out"] = f"loss {held_out['loss']:.4f} at step {held_out.get('step')}"
    if said.get("usual_loss") == MOST_LOSS:
        said["usual_loss"] = "not known yet"
    tokenizer = numbers["tokenizer"].values()
    cells: list[tuple] = [("array", "shape", "dtype", "bytes", "fingerprint")]
    for name, array in numbers["arrays"].items():
        size, shape = f"{array['bytes']:,}", list(array["shape"])
        cells.append((name, shape, array["dtype"], size, array["fingerprint"]))
    return [
        *facts({
            "checkpoint": directory,
            "saved": f"{_saved(numbers['unix_time'])} by {processes} "
            f"process{'es' if processes > 1 else ''}, {decimal(numbers['bytes'])}",
            "layout": f"{layout.mesh_text}, "
            f"{layout.schedule}, v = {layout.virtual}",
            "model": f"{model.family}, {model.layers} layers, hidden {model.hidden:,}, "
            f"{model.heads} heads, sequence {model.sequence:,}, vocabulary {model.vocab:,}, "
            f"{model.compute_dtype}",
            "tokenizer": ", vocabulary ".join(
                f"{value:,}" if isinstance(value, int) else value for value in tokenizer
            ),
            **{name.replace("_", " "): str(value) for name, value in said.items()},
        }),
        "",
        *table(cells, "<<<><"),
    ]  # fmt: skip


# -- verify ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    step: Interval | None = None  # the checkpoint's step; by default all checkpoints
    json: Flag = False  # print the result as JSON


@command("mtx checkpoint verify RUN_DIR", VerifyOptions)
def verify_action(line: Line[VerifyOptions]) -> int:
    """Read everything and compare it with its checksums; exit status 1 if damaged.

    For a damaged checkpoint, names every file and every array that is not what was written.
    """
    checkpoints, options = _checkpoints(line), line.options
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
                print(f"step {step:>10,}  sound    {decimal(size)} in {elapsed_s:.1f} s, {rate}")
    if options.json:
        say(found, [], as_json=True)
    return 1 if any(found.values()) else 0


def _damages(checkpoints: Checkpoints, step: int) -> list[Damaged]:
    """Everything that is damaged in one checkpoint: at most one place per array."""
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
        progress("bytes", said=f"step {step}") as report,
    ):
        done, lock = 0, threading.Lock()

        def verify(name: str) -> Damaged | None:
            nonlocal done
            try:
                for read_bytes in store.verify(name):
                    with lock:
                        done += read_bytes
                    report(done, manifest.size_bytes)
            except Damaged as damage:
                return damage

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            damages += filter(None, pool.map(verify, store.catalog))
    return damages


# -- export ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    out: str = ""  # the folder to create
    step: Interval | None = None  # the checkpoint's step; by default the newest
    # orbax: a folder that plain Orbax reads
    format: Literal["safetensors", "orbax"] = "safetensors"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # dtype of the exported parameters
    optimizer: Flag = False  # export the optimizer's state as well, in float32
    json: Flag = False  # print what was written as JSON


@command("mtx checkpoint export RUN_DIR --out FOLDER", ExportOptions)
def export_action(line: Line[ExportOptions]) -> None:
    """Write the parameters, or the whole state, as safetensors or for plain Orbax.

    Names, shapes and the order of layers are the checkpoint's own, as `inspect` shows them;
    run.json and tokenizer.json are written next to them. --format orbax makes a folder that
    Orbax's StandardCheckpointer().restore reads without mtx. For Hugging Face's names and shapes,
    use mtx convert.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed
    options, out = line.options, line.options.out
    from mtx.conversion.export import export

    count = export(
        _checkpoints(line), Path(out), step=options.step, format=options.format,
        dtype=options.dtype, optimizer=options.optimizer,
    )  # fmt: skip
    numbers = {
        "path": out, "parameters": count, "dtype": options.dtype, "optimizer": options.optimizer,
    }  # fmt: skip
    more = " and the optimizer's state" if options.optimizer else ""
    said = f"wrote      {out}: {count:,} parameters in {options.dtype}{more}"
    say(numbers, [said], as_json=options.json)


def _saved(unix_time: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_time))


ACTIONS: dict[str, Command] = {
    "list": list_action,
    "inspect": inspect_action,
    "verify": verify_action,
    "export": export_action,
}
