"""`mtx convert`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from mtx.cli.options import parse
from mtx.config import to_dict
from mtx.errors import UserError
from mtx.paths import user_path
from mtx.sizes import Interval, Tokens

if TYPE_CHECKING:
    from mtx.conversion.convert import Converted
    from mtx.conversion.huggingface import Report

_INT = tyro.conf.arg(metavar="INT")
_Tokens = Annotated[Tokens | None, _INT]
_Step = Annotated[Interval | None, _INT]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_Name = Annotated[str | None, tyro.conf.arg(metavar="STR")]


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    # what the logits are compared with: transformers, where it is installed and memory has room, or
    # ours: our own model with the parameters of SOURCE and with those of TARGET
    check: Literal["auto", "transformers", "ours", "none"] = "auto"
    sequence: _Tokens = None  # from Hugging Face, with rotary positions: of the run; else all
    tokenizer: _Name = None  # from Hugging Face: a tokenizer.json, a folder with one, or bytes
    dtype: Dtype = "auto"  # the run computes in, or the tensors are to have; auto: the source's own
    step: _Step = None  # to Hugging Face: of the checkpoint; the newest where not given
    most_file_gb: float = 5.0  # to Hugging Face: tensors go into files of this size at most
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # what was done, as JSON


_OF_OUR_SIDE = ("sequence", "tokenizer")
_OF_THEIR_SIDE = ("step", "most_file_gb")


def convert_command(arguments: list[str]) -> None:
    """Convert a model from Hugging Face's format, and back: BERT, Gemma 2, GPT-2, Llama, Mistral,
    Qwen2, Qwen3.

    SOURCE is a Hugging Face directory (config.json and safetensors) and TARGET a run directory that
    mtx train, evaluate and generate take as --out; or the other way round. Nothing appears under
    TARGET before it is whole and its logits have been compared with those of SOURCE.
    """
    names = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    options = parse(
        arguments[len(names) :], ConvertOptions(), prog="mtx convert SOURCE TARGET",
        about=convert_command,
    )  # fmt: skip
    if len(names) != 2:
        raise UserError(
            f"mtx convert SOURCE TARGET: name two directories before all options, not {len(names)}"
        )
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a conversion computes next to nothing
    from mtx.conversion.convert import is_huggingface, to_checkpoint, to_huggingface

    source, target = names
    theirs = is_huggingface(user_path(source))
    _refuse_others(options, _OF_THEIR_SIDE if theirs else _OF_OUR_SIDE, theirs)
    dtype = None if options.dtype == "auto" else options.dtype
    with progress_bar() as report:
        if theirs:
            done = to_checkpoint(
                source, target, sequence=options.sequence, tokenizer=options.tokenizer, dtype=dtype,
                check=options.check, report=report,
            )  # fmt: skip
        else:
            done = to_huggingface(
                source, target, step=options.step, check=options.check, report=report,
                dtype=dtype, most_file_gb=options.most_file_gb,
            )  # fmt: skip
    _print(done, options.json)


def _refuse_others(options: ConvertOptions, names: tuple[str, ...], theirs: bool) -> None:
    """UserError for an option of the other direction."""
    for name in names:
        if getattr(options, name) != getattr(ConvertOptions(), name):
            direction = "to" if theirs else "from"
            raise UserError(
                f"--{name.replace('_', '-')} is for conversions {direction} Hugging Face, and "
                f"SOURCE is {'one of its directories' if theirs else 'a run of ours'}; leave it out"
            )


def _print(done: Converted, as_json: bool) -> None:
    model = done.model
    if as_json:
        print(json.dumps({
            "source": str(done.source), "target": str(done.target), "parameters": done.parameters,
            "model": to_dict(model), "notes": done.notes,
            "comparison": done.comparison and vars(done.comparison),
        }, indent=1))  # fmt: skip
        return
    print("\n".join([
        f"source     {done.source}",
        f"target     {done.target}",
        f"model      {model.family}, {done.parameters:,} parameters, layers {model.layers}, hidden "
        f"{model.hidden}, heads {model.heads}, vocabulary {model.vocab:,}; computes in "
        f"{model.compute_dtype}",
        *(f"note       {note}" for note in done.notes),
        f"compared   {done.comparison or 'not at all (--check none)'}",
    ]))  # fmt: skip


@contextlib.contextmanager
def progress_bar() -> Iterator[Report]:
    """What a conversion reports to: a bar on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done_bytes, all_bytes: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
