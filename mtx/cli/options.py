"""Command lines from dataclasses: options are their fields, by dotted names: `--model.layers 12`.

A mistake is one line on stderr and exit status 2.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tyro

from mtx.errors import UserError, nearest, shown
from mtx.fields import settle_types
from mtx.launch.cluster import ClusterOptions
from mtx.launch.exits import Exit, LostProcess
from mtx.launch.status import VIRTUAL_DEVICES
from mtx.sizes import VirtualDevices

Options = TypeVar("Options")
OwnFields = tyro.conf.arg(name="")  # --steps instead of --run.steps


def exit_status(body: Callable[[], int | None]) -> int:
    """`body`'s own exit status (None: 0), with a user's mistake as one line and no traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a table's lines, where there is only ASCII
    try:
        return body() or 0
    except Help as asked:
        asked.show()
        return 0
    except UserError as error:
        print("mtx:", " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mtx: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, `head` perhaps, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, as the shell has it


def start_devices(virtual: VirtualDevices, cluster: ClusterOptions | None = None) -> None:
    """Makes `virtual` CPU devices, if any, and joins the cluster, where this is a part of one:
    then each process says who it is."""
    from mtx.launch.start import join_cluster, use_virtual_devices

    virtual = virtual or int(os.environ.get(VIRTUAL_DEVICES, 0))
    if virtual:
        use_virtual_devices(virtual)
    try:
        who = join_cluster(cluster)
    except LostProcess as error:
        print("mtx:", error, file=sys.stderr)
        raise SystemExit(Exit.LOST) from None
    if who is not None:
        print(who, flush=True)


def check_writable(out: str | None) -> None:
    """UserError before anything is computed where the file --out cannot be made."""
    if out is None:
        return
    path = Path(out).expanduser()
    if path.is_dir():
        raise UserError(f"out={out} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UserError(f"out={out} lies in no folder that is there; make it first")


def write_text(path: Path, text: str) -> None:
    """All of it, or nothing."""
    from mtx.files import replacing

    with replacing(path.expanduser()) as written:
        written.write_text(text, encoding="utf-8")


def split_name(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The name that stands before all options, if there is one, and the rest."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    return None, arguments


class Help(SystemExit):
    """--help was asked for, of the options `default` of `prog`. Faces show it: exit status 0."""

    def __init__(self, default: object, *, prog: str, about: str, more: Callable[[], str] | None):
        super().__init__(0)
        self.default, self.prog, self._about, self._more = default, prog, about, more

    def show(self) -> None:
        with contextlib.suppress(SystemExit):
            _tyro(["--help"], self.default, prog=self.prog, about=self._about)
        if self._more is not None:
            print(self._more())


def parse(
    arguments: list[str],
    default: Options,
    *,
    prog: str,
    about: Callable | None = None,
    more: Callable[[], str] | None = None,
) -> Options:
    """`default` with the fields that `arguments` name replaced. Raises Help for --help, which ends
    with what `more` returns; UserError for an option, a value or a choice that cannot be."""
    described = inspect.cleandoc((about or type(default)).__doc__)
    if "-h" in arguments or "--help" in arguments:
        raise Help(default, prog=prog, about=described, more=more)
    printed = io.StringIO()
    # tyro draws its errors for what it finds at stdout: here no terminal, but UTF-8.
    nowhere = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(printed):
            options, unknown = _tyro(arguments, default, prog=prog, about=described)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise UserError(_one_line(printed.getvalue(), arguments)) from None
    settle_types(options)
    if unknown:
        raise _unknown(unknown, [flag for each in options_of(default) for flag in each["flags"]])
    return options


def _tyro(
    arguments: list[str], default: Options, *, prog: str, about: str
) -> tuple[Options, list[str]]:
    return tyro.cli(
        type(default), default=default, args=arguments, prog=prog, description=about,
        return_unknown_args=True,
    )  # fmt: skip


def options_of(default: object) -> list[dict[str, Any]]:
    """Every option as tyro writes it into a shell's completion: its flags, its description, which
    is "FORM \u2022 help" or, of a switch, the help alone, and its type, nargs and choices."""
    script = io.StringIO()
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
        _tyro(["--tyro-print-completion", "bash"], default, prog="mtx", about="")
    spec = re.search(r"^COMPLETION_SPEC = (.*)$", script.getvalue(), re.MULTILINE)
    return ast.literal_eval(spec[1])["options"]


def _unknown(unknown: list[str], known: list[str]) -> UserError:
    """Of what was left over: the first option, or else the first value."""
    options = [argument for argument in unknown if argument.startswith("-")]
    if not options:
        return UserError(
            f"unexpected argument {unknown[0]!r}: a name stands before all options, and a switch "
            "takes no value (--json, --no-resume)"
        )
    name = options[0].partition("=")[0].replace("_", "-")
    near = " or ".join(_near_options(name, known))
    return UserError(f"unknown option {name}: {f'did you mean {near}?' if near else 'see --help'}")


def _near_options(name: str, known: list[str]) -> list[str]:
    """--layers is --model.layers, --no-model.tied is --model.no-tied; or a slip in a part of it."""
    switch = re.sub(r"^--no-(.*)\.", r"--\1.no-", name)
    if switch in known:
        return [switch]
    section, field = _parts(name)
    parts = {option: _parts(option) for option in known}
    sections = nearest(section, {section for section, _ in parts.values()})
    here = {o: own for o, (above, own) in parts.items() if not section or above in sections}
    near = nearest(field, here.values())
    same = [option for option, (_, own) in parts.items() if own == field]
    return [option for option, own in here.items() if own in near][:3] or same[:3]


def _parts(option: str) -> tuple[str, str]:
    section, _, field = option.lstrip("-").rpartition(".")
    return section, field


def _one_line(box: str, arguments: list[str]) -> str:
    """What tyro says in a box of several paragraphs, as one line."""
    rows = [line.strip("│ ") for line in box.splitlines() if line.startswith("│")]
    message = " ".join(itertools.takewhile(lambda row: not row.startswith("─"), rows))
    wrong_value = re.match(r"Error parsing (--\S+):", message)
    if wrong_value and "Argument helptext:" in rows:
        option, *form = rows[rows.index("Argument helptext:") + 1].split()
        return f"{option} takes {' '.join(form)}, not {shown(_given(option, arguments))}"
    # A field's own check: "Error parsing run.model: hidden=130 cannot be divided ..."
    return re.sub(r"^Error parsing [\w.]*: ", "", message) or box


def _given(option: str, arguments: list[str]) -> str:
    """The value that `arguments` give to `option`."""
    given = ""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == option:
            values = itertools.takewhile(lambda a: not a.startswith("--"), arguments[place + 1 :])
            given = value if equals else " ".join(values)
    return given
