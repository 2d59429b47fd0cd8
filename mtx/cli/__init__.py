"""The command line: `mtx COMMAND`, one module a command.

JAX is imported by the commands that compute, and when they do.
"""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from collections.abc import Callable, Sequence

from mtx.cli.checkpoint import checkpoint_command
from mtx.cli.convert import convert_command
from mtx.cli.data import data_command
from mtx.cli.evaluate import evaluate_command
from mtx.cli.finetune import finetune_command
from mtx.cli.generate import generate_command
from mtx.cli.launch import launch_command
from mtx.cli.options import OwnFields, exit_status, parse, start_devices
from mtx.cli.plan import plan_command
from mtx.cli.presets import presets_command
from mtx.cli.report import report_command
from mtx.cli.schedule import schedule_command
from mtx.cli.train import TrainOptions, train_command
from mtx.errors import UserError
from mtx.paths import check_path

__all__ = [
    "COMMANDS", "OwnFields", "TrainOptions", "exit_status", "main", "parse", "start_devices",
]  # fmt: skip

_NO_PATHS = ("--prompt", "--stop", "--cluster.coordinator")
_NUMBERS = re.compile(r"[-+.,\deE]*")

COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "train": train_command,
    "launch": launch_command,
    "plan": plan_command,
    "schedule": schedule_command,
    "data": data_command,
    "checkpoint": checkpoint_command,
    "convert": convert_command,
    "finetune": finetune_command,
    "evaluate": evaluate_command,
    "generate": generate_command,
    "report": report_command,
    "presets": presets_command,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status: 0, 2 for a user's mistake, 130 when interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    return exit_status(lambda: _dispatch(arguments))


def _dispatch(arguments: list[str]) -> int | None:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_overview())
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"unknown command {name!r}: {hint}known are {', '.join(COMMANDS)}")
    _check_paths(arguments[1:])
    status = COMMANDS[name](arguments[1:])
    sys.stdout.flush()
    return status


def _check_paths(arguments: Sequence[str]) -> None:
    """Refuses addresses such as gs://bucket/run, and names that no file can have, wherever they
    stand: no option takes one that is not a text, an address of its own, or for another program."""
    option = ""
    for argument in itertools.takewhile(lambda argument: argument != "--", arguments):
        if argument.startswith("--"):
            option, _, value = argument.partition("=")
        else:
            value = argument
        if option.replace("_", "-") not in _NO_PATHS and not _NUMBERS.fullmatch(value):
            check_path(option or "path", value)


def _overview() -> str:
    rows = [(name, command.__doc__.splitlines()[0]) for name, command in COMMANDS.items()]
    return "\n".join([
        "mtx: Megatron-LM's pipeline, tensor and data parallelism (SC'21), in JAX",
        "",
        "usage: mtx COMMAND [OPTIONS]",
        "",
        *(f"  {name:<12}{summary}" for name, summary in rows),
        "",
        "Options of train are fields of its config: mtx train --model.layers 8 --layout.data 1",
        "mtx COMMAND --help lists them, with their defaults; so does mtx train PRESET --help.",
    ])  # fmt: skip
