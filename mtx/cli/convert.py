"""`mtx convert`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mtx.cli.options import Flag, Line, command, part
from mtx.cli.output import facts, progress, say
from mtx.config import DataConfig, ModelConfig, to_dict
from mtx.errors import UserError
from mtx.paths import user_path
from mtx.sizes import Interval

if TYPE_CHECKING:
    from mtx.conversion.convert import Converted

_MODEL = part(ModelConfig, "sequence", "compute_dtype")
_DATA = part(DataConfig, "tokenizer")


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    # what to compare the logits with: transformers, if it is installed and memory has room, or
    # ours: our own model with the parameters of SOURCE and with those of TARGET
    check: Literal["auto", "transformers", "ours", "none"] = "auto"
    step: Interval | None = None  # to Hugging Face: the checkpoint's step; by default the newest
    # to Hugging Face: dtype of the tensors; auto: the original one if nothing was trained since
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    most_file_gb: float = 5.0  # to Hugging Face: the largest size of a file of tensors
    json: Flag = False  # print what was done as JSON
    model: object = field(default_factory=_MODEL)
    data: object = field(default_factory=_DATA)


@command("mtx convert SOURCE TARGET", ConvertOptions)
def convert_command(line: Line[ConvertOptions]) -> None:
    """Convert a model from Hugging Face's format, or back to it.

    SOURCE is a Hugging Face directory (config.json and safetensors) of one of the families that
    transformers has, and TARGET a run directory that mtx train, evaluate and
    generate take as --out; or the other way round. From Hugging Face, --model.sequence (with rotary
    positions), --model.compute-dtype and --data.tokenizer default to the source's own. Nothing
    appears under TARGET until it is complete and its logits have been compared with those of
    SOURCE.
    """
    options, (source, target) = line.options, line.names
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a conversion computes next to nothing
    from mtx.conversion.convert import is_huggingface, to_checkpoint, to_huggingface

    theirs = is_huggingface(user_path(source))
    _refuse_others(line, theirs)
    with progress("bytes") as report:
        if theirs:
            model, data = line.changes("model"), line.changes("data")
            done = to_checkpoint(
                source, target, sequence=model.get("sequence"), tokenizer=data.get("tokenizer"),
                dtype=model.get("compute_dtype"), check=options.check, report=report,
            )  # fmt: skip
        else:
            dtype = None if options.dtype == "auto" else options.dtype
            done = to_huggingface(
                source, target, step=options.step, check=options.check, report=report,
                dtype=dtype, most_file_gb=options.most_file_gb,
            )  # fmt: skip
    _print(done, options.json)


def _refuse_others(line: Line[ConvertOptions], theirs: bool) -> None:
    """UserError for an option of the other direction."""
    to_them, from_them = ("--step", "--dtype", "--most-file-gb"), ("--model.", "--data.")
    for option in sorted(line.given):
        if option.startswith(to_them if theirs else from_them):
            way, what = ("to", "one of its folders") if theirs else ("from", "a run of ours")
            use = "; use --model.compute-dtype" if theirs and option == "--dtype" else ""
            raise UserError(
                f"{option} is for conversions {way} Hugging Face, and SOURCE is {what}; leave it "
                f"out{use}"
            )


def _print(done: Converted, as_json: bool) -> None:
    model = done.model
    numbers = {
        "source": str(done.source), "target": str(done.target), "parameters": done.parameters,
        "model": to_dict(model), "notes": done.notes,
        "comparison": done.comparison and vars(done.comparison),
    }  # fmt: skip
    lines = [
        *facts({"source": done.source, "target": done.target}),
        f"model      {model.family}, {done.parameters:,} parameters, layers {model.layers}, hidden "
        f"{model.hidden}, heads {model.heads}, vocabulary {model.vocab:,}; computes in "
        f"{model.compute_dtype}",
        *(f"note       {note}" for note in done.notes),
        f"compared   {done.comparison or 'not at all (--check none)'}",
    ]
    say(numbers, lines, as_json=as_json)
