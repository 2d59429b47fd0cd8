"""The benchmark of generation: every way writes the same; what it prints and refuses."""

from __future__ import annotations

import importlib
import io
from pathlib import Path

import pytest
from rich.console import Console

from mtx.config import Layout, ModelConfig, RunConfig
from mtx.errors import UserError

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture(scope="module")
def bench_generate():
    """The script's module, with its folder first in the path, as Python does for a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXPERIMENTS))
        yield importlib.import_module("bench_generate")


def test_every_way_writes_the_same(bench_generate):
    model = ModelConfig(
        layers=1, hidden=16, heads=2, sequence=16, vocab=30, compute_dtype="float32",
        vocab_multiple=8,
    )  # fmt: skip
    options = bench_generate.Options(sequence=16, rows=2, prompt=4, tokens=3)
    run = RunConfig(model=model)
    row = bench_generate.measure_layout(run, Layout(microbatch=2), options)
    assert {name: len(seconds) for name, seconds in row["seconds"].items()} == {
        "whole": 3, "read": 3, "kept": 3
    }  # fmt: skip
    assert row["kept_bytes"] == 2 * 2 * 16 * 16 * 4  # k and v, rows, positions, hidden
    assert row["parameters_bytes"] == 4 * (30 * 16 + 16 * 16 + 12 * 16**2 + 13 * 16 + 2 * 16)


def test_the_table_has_the_rates_and_the_floor(bench_generate):
    seconds = {"whole": [9, 9, 0.8, 0.8], "read": [9, 9, 0.4, 0.4], "kept": [9, 9, 0.02, 0.02]}
    layout = {"data": 1, "pipe": 2, "tensor": 4}
    result = {
        "options": {"preset": "bench-s", "sequence": 64, "rows": 8, "prompt": 6, "tokens": 4},
        "machine": {"cores": 2, "jax": "0.10.2", "load_at_start": 0.1},
        "backend": "cpu", "bytes_a_second": 2e10,
        "rows": [{"layout": layout, "seconds": seconds, "kept_bytes": 3 * 2**20, "floor_s": 0.01}],
    }  # fmt: skip
    console = Console(width=bench_generate.bench.WIDTH, file=io.StringIO())
    console.print(bench_generate.table_of(result))
    line = console.file.getvalue().splitlines()[-1]
    assert line.split() == "1 x 2 x 4 10.0 20.0 400.0 40.0 20.0 20.0 10.0 2.0 3".split()
    assert "8 texts of 3 to 6 tokens and 4 more, cpu" in bench_generate.title_of(result)
    assert "20.0 GB/s" in " ".join(bench_generate.notes_of(result))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"tokens": 2}, "tokens=2 is too small"),
        ({"prompt": 1020}, "prompt=1020 and tokens=12 are more than sequence=1024"),
        ({"layouts": "1x1"}, "layout '1x1' is not data x pipe x tensor"),
    ],
)
def test_mistakes_are_named(bench_generate, wrong, message):
    with pytest.raises(UserError, match=message):
        bench_generate.Options(**wrong)
