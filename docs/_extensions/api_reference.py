"""The directive `api-reference`, which documents the names of `mtx/__init__.pyi` by autodoc, and
the conversion of this project's docstrings, plain text with Markdown's backticks, to
reStructuredText."""

from __future__ import annotations

import inspect
import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import mtx

_GROUPS = {  # names are grouped by the package that defines them
    "Configs": ("mtx.config", "mtx.presets", "mtx.families"),
    "Training and evaluating": (
        "mtx.api", "mtx.step", "mtx.train", "mtx.data", "mtx.evaluation", "mtx.conversion",
        "mtx.checkpoint",
    ),
    "Schedules": ("mtx.schedules",),
    "Plans": ("mtx.plan",),
    "Pictures and text": ("mtx.view",),
    "Devices, errors": ("mtx",),
}  # fmt: skip


class ApiReference(SphinxDirective):
    """One section per group of names, each documented by autodoc under its name in `import mtx`."""

    def run(self):
        rest, found = list(mtx.__all__), []
        for group, homes in _GROUPS.items():
            names = [name for name in rest if _home(name).startswith(homes)]
            rest = [name for name in rest if name not in names]
            section = nodes.section(ids=[nodes.make_id(group)])
            section += nodes.title(text=group)
            section += self.parse_autodoc("\n".join(map(_directive, names)))
            found.append(section)
        return found

    def parse_autodoc(self, text: str) -> list:
        """Parse reStructuredText inside a Markdown page, as MyST's eval-rst does."""
        return self.parse_text_to_nodes(f"````{{eval-rst}}\n{text}\n````")


def _home(name: str) -> str:
    return mtx._HOME[name]


def _directive(name: str) -> str:
    value = getattr(mtx, name)
    if inspect.isclass(value):
        return f".. autoclass:: mtx.{name}\n   :members:\n"
    return f".. autofunction:: mtx.{name}\n"


def as_rest(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list) -> None:
    """Convert `lines` in place: paragraphs stay, backticks become literals, and indented text is
    shown as it is."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines).strip("\n"))
    lines[:] = [line for paragraph in paragraphs for line in [*_paragraph(paragraph), ""]]


def _paragraph(text: str) -> list[str]:
    rows = text.split("\n")
    if text.startswith(">>>"):
        return rows
    if any(re.match(r"\s|[-*] |\w+ {2,}\S", row) for row in rows):
        return ["::", "", *(f"    {row}" for row in rows)]
    parts = re.split(r"(`[^`]*`)", "\n".join(rows))
    return "".join(
        f"`{part}`" if part.startswith("`") else re.sub(r"([\\*_|])", r"\\\1", part)
        for part in parts
    ).split("\n")


def without_bounds(app, what, name, obj, options, signature, returned):
    """Signatures with `int` where the code has `Annotated[int, Between(...)]`."""
    if signature:
        name = r"~?(?:\w+\.)*"
        bounded = rf"{name}Annotated\[(\w+), {name}Between\([^()]*\)\]"
        signature = re.sub(bounded, r"\1", signature)
        return signature, returned
    return None


def by_public_name(app: Sphinx, env, node, contnode):
    """Resolve a type in a signature, however it is named there, by its name in `import mtx`."""
    name = node.get("reftarget", "").rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in mtx.__all__:
        return None
    python = env.get_domain("py")
    return python.resolve_xref(
        env, node["refdoc"], app.builder, "obj", f"mtx.{name}", node, contnode
    )


def setup(app: Sphinx) -> dict:
    app.add_directive("api-reference", ApiReference)
    app.connect("autodoc-process-docstring", as_rest)
    app.connect("autodoc-process-signature", without_bounds)
    app.connect("missing-reference", by_public_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
