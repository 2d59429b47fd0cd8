"""The directive `option-reference`: every command of `mtx` with its options, read from the code."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Callable

from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from mtx.cli import with_actions
from mtx.cli.options import Help, options_of


class OptionReference(SphinxDirective):
    """A section a command: what it does, then a table of its options, by section of the config."""

    def run(self):
        lines = []
        for name, command in with_actions().items():
            lines += [f"## `mtx {name}`", "", *_about(command), ""]
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    command(["--help"])
            except Help as asked:
                lines += _table(options_of(asked.default))
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def _about(command: Callable) -> list[str]:
    """A docstring's paragraphs; indented ones, which list files or formats, as they stand."""
    lines = []
    for paragraph in (inspect.getdoc(command) or "").split("\n\n"):
        listed = any(line.startswith(" ") for line in paragraph.split("\n"))
        lines += ["```text", paragraph, "```", ""] if listed else [_plain(paragraph), ""]
    return lines


def _table(options: list[dict]) -> list[str]:
    rows = ["| option | what it is |", "|---|---|"]
    for option in options:
        flags = [flag for flag in option["flags"] if flag.startswith("--") and flag != "--help"]
        if flags:
            form, dot, about = option["description"].partition(" \u2022 ")
            takes = _plain(form) if dot else ""
            names = " ".join(f"`{flag}`" for flag in flags)
            rows.append(f"| {names} {takes} | {_plain(about if dot else form)} |")
    return [*rows, ""]


def _plain(text: str) -> str:
    """Text in which nothing is Markdown but backticks; options become code."""
    text = re.sub(r"(?<![`\w-])(--[\w.-]*\w)(?![\w`])", r"`\1`", " ".join(text.split()))
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([\\\\<>*_|$\[\]{}#])", r"\\\1", part)
        for part in parts
    )


def setup(app: Sphinx) -> dict:
    app.add_directive("option-reference", OptionReference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
