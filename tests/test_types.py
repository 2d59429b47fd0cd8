"""pyright finds nothing in `mtx/` (basic mode; its settings are in pyproject.toml)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_pyright_finds_nothing():
    pytest.importorskip("basedpyright", reason="types need basedpyright: pip install mtx[test]")
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    report = json.loads(found.stdout)
    assert report["summary"]["filesAnalyzed"] >= len(list((ROOT / "mtx").rglob("*.py")))
    errors = [
        f"{one['file']}:{one['range']['start']['line'] + 1}: {one['message']}"
        for one in report["generalDiagnostics"]
        if one["severity"] == "error"
    ]
    assert not errors, "\n".join(errors)
