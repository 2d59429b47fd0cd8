"""The whole tree is clean by ruff, and every README example runs."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]


def test_ruff_finds_nothing():
    for command in (["check"], ["format", "--check"]):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, str(ROOT)], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout + result.stderr


def test_the_examples_of_the_readme_run():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert np.isfinite(names["loss"]) and np.isfinite(float(names["metrics"].loss))
