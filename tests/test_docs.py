"""The pages of docs/ are built by Sphinx without a warning, and the files they show exist."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mtx
from mtx.schedules.makers import MAKERS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "notebooks" not in path.parts[:-1])
OPTION = re.compile(r':([\w-]+): *"?(.*?)"?\n')
INCLUDE = re.compile(r"```\{literalinclude\} (\S+)\n((?::[\w-]+:.*\n)*)```")


def includes(page: Path) -> list[tuple[Path, dict[str, str]]]:
    """[(file that a page shows, options that select a part of it)]"""
    return [
        ((page.parent / name).resolve(), dict(OPTION.findall(options)))
        for name, options in INCLUDE.findall(page.read_text())
    ]


def test_what_is_shown_of_the_code_is_in_the_code():
    shown = [(page, *found) for page in PAGES for found in includes(page)]
    assert {"lion.py", "breadth_first.py", "axes.py"} <= {path.name for _, path, _ in shown}
    for page, path, options in shown:
        text = path.read_text()
        if "pyobject" in options:
            names = {getattr(node, "name", None) for node in ast.walk(ast.parse(text))}
            assert set(options["pyobject"].split(".")) <= names, (page.name, path.name)
        at = text.find(options.get("start-at", ""))
        assert at >= 0, (page.name, options)
        for end in ("end-at", "end-before"):
            assert text.find(options.get(end, ""), at) >= 0, (page.name, options)


def test_links_lead_to_files_of_the_tree():
    """As written, so that they work on GitHub as well."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), (page.name, target)


def test_sphinx_builds_the_pages_without_a_warning(tmp_path):
    pytest.importorskip("sphinx_book_theme", reason="pages need Sphinx: pip install 'mtx[docs]'")
    pytest.importorskip("myst_nb", reason="pages need MyST-NB: pip install 'mtx[docs]'")
    out, doctrees = tmp_path / "html", tmp_path / "doctrees"
    strict = ["-W", "-n", "--keep-going", "-q", "-d", doctrees]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *strict, DOCS, out],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-3000:]
    api, options = (out / "api.html").read_text(), (out / "options.html").read_text()
    for name in mtx.__all__:
        assert f'id="mtx.{name}"' in api, name
    for option in ("--layout.pipe", "--optimizer.name", "--virtual-devices", "--out"):
        assert option in options
    gallery = (out / "schedules.html").read_text()
    for name in MAKERS:
        assert f'src="_gallery/{name}.svg"' in gallery
        assert (out / "_gallery" / f"{name}.svg").read_text().count("stage 3") > 0
