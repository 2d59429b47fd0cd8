"""The directive `option-reference`: every command of `mtx` with its options, read from the code."""

from __future__ import annotations

from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from mtx.cli.reference import reference


class OptionReference(SphinxDirective):
    def run(self):
        return self.parse_text_to_nodes(reference(), allow_section_headings=True)


def setup(app: Sphinx) -> dict:
    app.add_directive("option-reference", OptionReference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
