"""Every notebook runs from top to bottom, and none carries outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUN = """if True:
    import sys
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(sys.argv[1], as_version=4)
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    nbformat.write(notebook, sys.argv[2])
"""


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == [
        "1_mesh_layouts", "2_schedules", "3_planning_1t", "4_reading_a_compiled_step",
    ]  # fmt: skip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_thin_and_stripped(path):
    assert cells(path, "markdown")[0]["source"][0].startswith("# ")
    for cell in cells(path, "code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None
        assert len(cell["source"]) <= 16 and not any("def " in line for line in cell["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path):
    """In a process of its own: the kernel's client leaves threads behind, and JAX starts once."""
    pytest.importorskip("nbclient", reason="notebooks need nbclient: pip install mtx[test]")
    pytest.importorskip("ipykernel", reason="notebooks need ipykernel: pip install mtx[test]")
    done = tmp_path / "done.ipynb"
    own = {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")}
    ran = subprocess.run(
        [sys.executable, "-c", RUN, path, done], cwd=tmp_path, env=os.environ | own,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    kinds = {
        kind
        for cell in cells(done, "code")
        for output in cell["outputs"]
        for kind in output.get("data", {})
    }
    if path.stem != "4_reading_a_compiled_step":
        assert "image/svg+xml" in kinds
    if path.stem == "3_planning_1t":
        assert "text/html" in kinds
