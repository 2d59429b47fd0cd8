"""Runs notebooks from top to bottom and keeps their outputs: `python notebooks/execute.py`.

Outputs that need a live kernel are left out: of a widget, the picture of its first state remains.
Needs the extra `test`, for nbclient and ipykernel, and `notebook`, for the sliders.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
_LIVE = "application/vnd.jupyter.widget-view+json"
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run in the notebook's folder."""
    notebook = nbformat.read(path, as_version=4)
    # Set before the kernel starts, which must find this copy of mtx in whatever directory it runs.
    paths = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", store_widget_state=False,
        record_timing=False, resources={"metadata": {"path": str(path.parent)}},
    )  # fmt: skip
    client.execute()
    notebook.metadata = nbformat.from_dict(_METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.NotebookNode()
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(_LIVE, None)
    return notebook


def main(paths: list[Path]) -> None:
    for path in paths or sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(execute(path), path)
        print(f"{path.name}: {path.stat().st_size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
