"""Every option of every command, as Markdown: `python -m mtx.cli.reference`."""

from __future__ import annotations

from mtx.cli import with_actions
from mtx.cli.completion import has_actions, of_all_families
from mtx.cli.options import help_of


def reference() -> str:
    """A section for each command: its usage, what it does, and a table of its options."""
    lines, commands = [], with_actions()
    for command, run in commands.items():
        if has_actions(command, commands):
            continue
        asked = help_of(run)
        about = [" ".join(paragraph.split()) for paragraph in asked.about.split("\n\n")]
        lines += [f"## mtx {command}", f"```text\n{asked.usage} [OPTIONS]\n```", *about]
        rows = ["| option | takes | default | |", "|---|---|---|---|"]
        for option in of_all_families(asked.default)[1:]:  # without --help
            flags = " ".join(f"`{flag}`" for flag in option.flags)
            cells = (f"`{text}`" if text else "" for text in (option.form, option.default))
            cells = (cell.replace("|", "\\|") for cell in (flags, *cells, option.about))
            rows.append(f"| {' | '.join(cells)} |")
        lines.append("\n".join(rows))
    return "\n\n".join(lines)


if __name__ == "__main__":
    print(reference())
