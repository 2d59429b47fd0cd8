"""The benchmark of float8: short training beside bfloat16, and what it prints and refuses."""

from __future__ import annotations

import importlib
import io
from pathlib import Path

import numpy as np
import pytest
from errors import names
from rich.console import Console

from mtx.errors import UserError

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture(scope="module")
def bench_fp8():
    """The script's module, with its folder first in the path, as Python does for a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXPERIMENTS))
        yield importlib.import_module("bench_fp8")


def test_a_short_training_goes_as_in_bfloat16(bench_fp8, optimised):
    """Both learn; float8 ends within a quarter of a percent, but is not equal."""
    options = bench_fp8.Options(
        steps=60, layers=2, hidden=64, sequence=32, lr=3e-3, layouts="1x1x2"
    )
    exact, _, _ = bench_fp8.train(options, "off")
    delayed, *_ = bench_fp8.train(options, "delayed")
    float8, trainer, state = bench_fp8.train(options, "hybrid")
    ends = [np.mean(losses[-6:]) for losses in (exact, float8, delayed)]
    assert max(ends) < exact[0] - 0.03
    assert 0 < abs(ends[1] / ends[0] - 1) < 2.5e-3
    assert 0 < abs(ends[2] / ends[0] - 1) < 2.5e-3
    assert np.abs(np.subtract(exact, float8)).max() > 1e-5
    one, other = bench_fp8.apart(options, trainer, state).values()
    assert one == pytest.approx(other, rel=1e-5)


def test_the_table_compares_with_bfloat16(bench_fp8):
    result = {"rows": {
        "off": {
            "losses": [5.0] * 18 + [4.0] * 2, "held_out": 4.0,
            "layouts": {"1x1x1": 4.0, "1x1x2": 4.0},
        },
        "hybrid": {
            "losses": [5.0] * 18 + [4.01] * 2, "held_out": 4.02,
            "layouts": {"1x1x1": 4.0, "1x1x2": 4.0002},
        },
    }}  # fmt: skip
    console = Console(width=80, file=io.StringIO())
    console.print(bench_fp8.table_of(result))
    line = console.file.getvalue().splitlines()[-1]
    assert line.split() == ["hybrid", "4.0100", "+0.250%", "4.0200", "+0.500%", "5.0e-05"]


@pytest.mark.parametrize("wrong", [{"layouts": "1x2"}, {"steps": 3}])
def test_wrong_options_are_refused(bench_fp8, wrong):
    with pytest.raises(UserError) as error:
        bench_fp8.Options(**wrong)
    names(error, *wrong.values())
