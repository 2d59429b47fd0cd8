"""Every notebook runs from top to bottom, and is stored with its outputs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIVE = "application/vnd.jupyter.widget-view+json"
MOST_BYTES = 1_500_000
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def kinds(path: Path) -> list[list[str]]:
    """The types in which each cell's outputs can be shown."""
    return [
        [kind for output in cell["outputs"] for kind in output.get("data", {})]
        for cell in cells(path, "code")
    ]


def printed(path: Path) -> list[str]:
    return [
        "".join(text for output in cell["outputs"] for text in output.get("text", []))
        for cell in cells(path, "code")
    ]


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == [
        "1_mesh_layouts", "2_schedules", "3_planning_1t", "4_reading_a_compiled_step",
    ]  # fmt: skip


@each_notebook
def test_it_is_thin(path):
    assert cells(path, "markdown")[0]["source"][0].startswith("# ")
    for cell in cells(path, "code"):
        assert len(cell["source"]) <= 16 and not any("def " in line for line in cell["source"])


@each_notebook
def test_what_it_shows_is_kept_and_fit_to_be(path):
    """All cells were run in order; nothing names this machine, and nothing needs a kernel."""
    text, code = path.read_text(), cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert len(text) < MOST_BYTES
    assert LIVE not in text and "image/svg" not in text  # see `mtx.view.picture.Picture`
    assert not re.search(r"/(home|root|opt|tmp|usr|Users)/|[A-Z]:\\\\", text)
    notebook = json.loads(text)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    for cell in code:
        assert cell["metadata"] == {}
        for output in cell["outputs"]:
            assert output["output_type"] != "error" and output.get("name") != "stderr"
            if "image/png" in output.get("data", {}):
                assert output["metadata"]["image/png"]["width"] <= 1400
    if path.stem != "4_reading_a_compiled_step":
        assert sum("image/png" in kind for kind in kinds(path)) >= 3


@each_notebook
def test_it_runs(path, tmp_path):
    """In a separate process: the kernel's client leaves threads behind, and JAX starts once. It
    prints what it was saved with, if that is only arithmetic."""
    pytest.importorskip("nbclient", reason="notebooks need nbclient: pip install mtx[test]")
    pytest.importorskip("ipykernel", reason="notebooks need ipykernel: pip install mtx[test]")
    done = tmp_path / path.name
    done.write_bytes(path.read_bytes())
    own = {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")}
    ran = subprocess.run(
        [sys.executable, ROOT / "notebooks" / "execute.py", done], cwd=tmp_path,
        env=os.environ | own, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert [sorted(kind) for kind in kinds(done)] == [sorted(kind) for kind in kinds(path)]
    if path.stem in ("2_schedules", "3_planning_1t"):
        assert printed(done) == printed(path), "run notebooks/execute.py, and commit what it shows"


def test_what_only_a_kernel_could_show_is_left_out(tmp_path):
    pytest.importorskip("nbclient", reason="notebooks need nbclient: pip install mtx[test]")
    nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat")
    pytest.importorskip("ipywidgets", reason="sliders need ipywidgets: pip install mtx[notebook]")
    assert importlib.util.find_spec("anywidget"), "the extra `notebook` has both"
    path = tmp_path / "live.ipynb"
    cell = nbformat.v4.new_code_cell("import ipywidgets\nipywidgets.IntSlider()", id="cell-0")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    ran = subprocess.run(
        [sys.executable, ROOT / "notebooks" / "execute.py", path], cwd=tmp_path,
        env=os.environ | {"IPYTHONDIR": str(tmp_path / "ipython")}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert kinds(path) == [["text/plain"]] and set(json.loads(path.read_text())["metadata"]) == {
        "kernelspec", "language_info",
    }  # fmt: skip
