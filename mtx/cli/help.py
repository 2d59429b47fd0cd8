"""The options of a command as a table, and the --help page made from it."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tyro

from mtx.cli.options import ALIASES, families, is_part, plain_form, spellings


class Option(NamedTuple):
    """One option: a field, in all its spellings."""

    section: str  # the config it belongs to: "layout"; "" for the command or the run itself
    flags: tuple[str, ...]  # --layout.pipe, --pipe
    form: str  # INT; "" for a switch
    many: bool  # takes several values
    about: str  # one line
    default: str  # "" if none is shown


def options_of(default: object) -> list[Option]:
    """All options of a command whose options are `default`, as tyro lists them for a shell."""
    script = io.StringIO()
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
        tyro.cli(type(default), default=default, args=["--tyro-print-completion", "bash"])
    (spec,) = re.findall(r"^COMPLETION_SPEC = (.*)$", script.getvalue(), re.MULTILINE)
    known = spellings(default)
    short = [(f"--{alias}", f"--{known[alias]}") for alias in ALIASES if alias in known]
    return [_option(each, default, short) for each in ast.literal_eval(spec)["options"]]


def _option(spec: dict, default: object, short: Sequence[tuple[str, str]]) -> Option:
    """An option that tyro describes as "FORM \u2022 about (default: 3)", or without a form."""
    section = spec["flags"][-1].lstrip("-").rpartition(".")[0]
    switch = spec["type"] in ("flag", "boolean")
    said = " ".join(spec["description"].split())
    form, _, said = ("", "", said) if switch else said.partition(" \u2022 ")
    ((about, value),) = re.findall(r"^(.*?)(?: ?\(default: ?(.*)\))?$", said)
    if value in ("None", "", "''") or (value == "False" and len(spec["flags"]) == 1):
        value = ""
    if "--model.family" in spec["flags"]:
        form, about = "{" + ",".join(families()) + "}", "whose fields the model has"
    return Option(
        section=section,
        flags=(*spec["flags"], *(a for a, full in short if full in spec["flags"] and a != full)),
        form=plain_form(form),
        many=not switch and spec["nargs"] not in (None, 1),
        about=about,
        default="" if is_part(_config(default, section)) else value,
    )


def _config(options: object, section: str) -> object:
    holder = options if hasattr(options, section) or not section else getattr(options, "run", None)
    return getattr(holder, section, None) if section else None


def help_page(default: object, *, usage: str, about: str) -> str:
    """The page that --help shows, as wide as the terminal."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)
    lines = [f"usage: {usage} [OPTIONS]", ""]
    for paragraph in about.split("\n\n"):
        lines += [*textwrap.wrap(paragraph, width), ""]
    by_section: dict[str, list[Option]] = {}
    for option in options_of(default):
        by_section.setdefault(option.section, []).append(option)
    for section, options in by_section.items():
        heading = _heading(section, _config(default, section))
        lines += [*textwrap.wrap(heading, width), *_rows(options, width), ""]
    return "\n".join(lines[:-1])


def _heading(section: str, config: object) -> str:
    doc = inspect.getdoc(type(config)) or ""
    if not dataclasses.is_dataclass(config) or doc.startswith(f"{type(config).__name__}("):
        return f"{section or 'options'}:"
    return f"{section}: {doc.splitlines()[0]}"


def _rows(options: list[Option], width: int) -> Iterator[str]:
    column = 38 if width > 100 else 30
    for option in options:
        head = f"  {', '.join(option.flags)} {option.form}".rstrip()
        about = f"{option.about} (default: {option.default})" if option.default else option.about
        first, *more = textwrap.wrap(about, width - column) or [""]
        if len(head) > column - 2:
            yield head
            head = ""
        yield f"{head:<{column}}{first}".rstrip()
        yield from (" " * column + line for line in more)
