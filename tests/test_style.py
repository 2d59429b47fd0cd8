"""The whole tree is clean by ruff, files are short, and every README example runs."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

from mtx.cli import main
from mtx.cli.options import parse
from mtx.cli.train import TrainOptions
from mtx.plan.choose import check_shape, schedule_for
from mtx.presets import preset

ROOT = Path(__file__).parents[1]


def test_ruff_finds_nothing():
    for command in (["check"], ["format", "--check"]):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, str(ROOT)], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout + result.stderr


def test_files_and_functions_are_short():
    """In mtx/: files have at most 400 lines, functions 60."""
    long = {}
    for path in (ROOT / "mtx").rglob("*.py"):
        text = path.read_text()
        if len(text.splitlines()) > 400:
            long[path.name] = len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60:
                long[path.name, node.name] = node.end_lineno - node.lineno + 1
    assert not long


def test_the_examples_of_the_readme_run():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert np.isfinite(names["loss"]) and np.isfinite(float(names["metrics"].loss))


def test_the_table_that_the_readme_makes_fits_the_run_that_it_trains(tmp_path, monkeypatch):
    commands = {}
    for line in (ROOT / "README.md").read_text().splitlines():
        if line.startswith(".venv/bin/mtx ") and " zb.csv" in line:
            _, name, *arguments = shlex.split(line, comments=True)
            commands[name] = arguments
    monkeypatch.chdir(tmp_path)
    assert main(["schedule", *commands["schedule"]]) == 0
    preset_name, *options = commands["train"]
    run = parse(options, TrainOptions(run=preset(preset_name)), prog="mtx train").run
    check_shape(schedule_for(run.layout, run.microbatches), run.layout, run.microbatches)
    assert run.layout.schedule == "zb.csv"
