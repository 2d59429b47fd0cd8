"""The command line: `mtx COMMAND`, one module per command.

Only the commands that compute import JAX, and only once they start computing.
"""

from __future__ import annotations

import gc
import itertools
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from mtx import __version__
from mtx.cli.certify import certify_command
from mtx.cli.checkpoint import ACTIONS as CHECKPOINT_ACTIONS
from mtx.cli.checkpoint import checkpoint_command
from mtx.cli.completion import completion_script
from mtx.cli.convert import convert_command
from mtx.cli.data import ACTIONS as DATA_ACTIONS
from mtx.cli.data import data_command
from mtx.cli.evaluate import evaluate_command
from mtx.cli.finetune import finetune_command
from mtx.cli.generate import generate_command
from mtx.cli.launch import launch_command
from mtx.cli.options import Command, Line, OwnFields, command, parse, summary
from mtx.cli.plan import plan_command
from mtx.cli.presets import presets_command
from mtx.cli.process import exit_status, start_devices
from mtx.cli.report import report_command
from mtx.cli.schedule import schedule_command
from mtx.cli.train import TrainOptions, train_command
from mtx.errors import unknown_name
from mtx.paths import check_path

__all__ = [
    "COMMANDS", "OwnFields", "TrainOptions", "exit_status", "main", "parse", "start_devices",
]  # fmt: skip

_NO_PATHS = ("--prompt", "--stop", "--cluster.coordinator", "--model.pattern")
_NUMBERS = re.compile(r"[-+.,\deE]*")


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    pass


@command("mtx completion SHELL", CompletionOptions)
def completion_command(line: Line[CompletionOptions]) -> None:
    """Print a script that makes bash or zsh complete mtx's commands, options and their values.

    SHELL is bash or zsh. To install it: mtx completion bash >
    ~/.local/share/bash-completion/completions/mtx, or, in a folder of zsh's fpath,
    mtx completion zsh > _mtx. For the current shell only: eval "$(mtx completion bash)".
    """
    print(completion_script(line.names[0], with_actions()))


COMMANDS: dict[str, Command] = {
    "train": train_command,
    "launch": launch_command,
    "plan": plan_command,
    "certify": certify_command,
    "schedule": schedule_command,
    "data": data_command,
    "checkpoint": checkpoint_command,
    "convert": convert_command,
    "finetune": finetune_command,
    "evaluate": evaluate_command,
    "generate": generate_command,
    "report": report_command,
    "presets": presets_command,
    "completion": completion_command,
}


def with_actions() -> dict[str, Command]:
    """All commands, and their actions under names such as "data build"."""
    below = {f"data {name}": action for name, action in DATA_ACTIONS.items()}
    below |= {f"checkpoint {name}": action for name, action in CHECKPOINT_ACTIONS.items()}
    return COMMANDS | below


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0, 2 for a user's mistake, 130 if interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    gc.set_threshold(100_000, 20, 100)  # tracing makes many long-lived objects
    return exit_status(lambda: _dispatch(arguments))


def _dispatch(arguments: list[str]) -> int | None:
    name, *rest = arguments or ["help"]
    if name == "help" and rest:  # help on a command or an action: mtx help data build
        name, rest = rest[0], [*rest[1:], "--help"]
    if name in ("help", "-h", "--help"):
        print(_overview())
        return 0
    if name in ("-V", "--version"):
        print(_version())
        return 0
    if name.startswith("-"):
        raise unknown_name("option", name, ("--help", "--version"))
    if name not in COMMANDS:
        raise unknown_name("command", name, [*COMMANDS, "help"])
    _check_paths(rest)
    status = COMMANDS[name](rest)
    sys.stdout.flush()
    return status


def _check_paths(arguments: Sequence[str]) -> None:
    """Refuse addresses such as gs://bucket/run, and names that no file can have, anywhere on the
    line: only options that take text or an address, and another program's arguments, may be such.
    """
    option = ""
    for argument in itertools.takewhile(lambda argument: argument != "--", arguments):
        if argument.startswith("--"):
            option, _, value = argument.partition("=")
        else:
            value = argument
        if option.replace("_", "-") not in _NO_PATHS and not _NUMBERS.fullmatch(value):
            check_path(option or "path", value)


def _version() -> str:
    """The versions that decide most of what a run does: a bug report begins with them."""
    return f"mtx {__version__}, jax {metadata.version('jax')}, Python {platform.python_version()}"


def _overview() -> str:
    rows = [(name, summary(each)) for name, each in COMMANDS.items()]
    return "\n".join([
        "mtx: Megatron-LM's pipeline, tensor and data parallelism (SC'21), in JAX",
        "",
        "usage: mtx COMMAND [OPTIONS]",
        "       mtx help [COMMAND]",
        "       mtx --version",
        "",
        *(f"  {name:<12}{about}" for name, about in rows),
        "",
        "An option is a field of a run's config, by its path, in every command: --model.layers 8,",
        "--layout.pipe 4; the common ones are also --pipe, --tensor, --hidden, --layers, ...",
        "mtx help COMMAND lists them; mtx train PRESET --help has the preset's values.",
    ])  # fmt: skip
