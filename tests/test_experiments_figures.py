"""The scripts that put published beside predicted: what they print, draw, and refuse."""

import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

import figures  # noqa: E402
import fit_time  # noqa: E402
import table1  # noqa: E402

from mtx.errors import UserError  # noqa: E402
from mtx.plan.calibration import FITTED, calibration_of  # noqa: E402
from mtx.plan.hardware import hardware  # noqa: E402
from mtx.plan.published_runs import FITTED_RUNS, TABLE_1_RUNS  # noqa: E402


def lines(capsys):
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 100
    assert not any("…" in line for line in printed), "cut off"
    return printed


def test_table_1_is_printed_whole(capsys):
    assert table1.main([]) == 0
    printed = lines(capsys)
    for run in TABLE_1_RUNS:
        (row,) = [line for line in printed if line.startswith(run.x + " ")]
        assert f"{run.published:g} {run.predicted():.1f} {run.error():+.1%} " in " ".join(
            row.split()
        )
    assert "The largest error is -4.5%" in printed[-1]


def test_parts_of_a_step_are_all_of_it():
    for run in TABLE_1_RUNS:
        assert sum(table1.shares(run.time()).values()) == pytest.approx(1)


def test_figures_are_printed_whole(capsys):
    assert figures.main([]) == 0
    printed = "\n".join(lines(capsys))
    for where, runs in figures.FIGURES.items():
        assert where in printed
        assert all(f"{run.error():+.1%}" in printed for run in runs)
    assert figures.main(["--only", "figure 13"]) == 0
    assert "figure 12" not in capsys.readouterr().out


@pytest.mark.parametrize("script", [table1, figures])
def test_pictures_are_drawn(script, tmp_path):
    path = tmp_path / "picture.png"
    assert script.main(["--draw", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000


@pytest.mark.parametrize("script", [table1, figures])
def test_what_cannot_be_drawn_is_an_error(script, tmp_path):
    with pytest.raises(UserError, match="there is no directory"):
        script.main(["--draw", str(tmp_path / "none" / "picture.png")])
    with pytest.raises(UserError, match="use a .png, .pdf or .svg file"):
        script.main(["--draw", str(tmp_path / "picture.doc")])


def test_an_unknown_figure_is_an_error():
    with pytest.raises(UserError, match="unknown figure 'figure 19': did you mean"):
        figures.main(["--only", "figure 19"])


def test_the_packages_constants_are_those_of_the_fit():
    fitted = fit_time.fit(FITTED_RUNS, rounds=200)
    package = calibration_of(hardware("a100-80gb"))
    for name in FITTED:
        assert getattr(package, name) == pytest.approx(getattr(fitted, name), abs=2e-3)


def test_the_simplex_finds_a_minimum():
    found = fit_time.minimize(
        lambda x: (x[0] - 1) ** 2 + 10 * (x[1] + 2) ** 2, fit_time.np.zeros(2), rounds=120
    )
    assert found == pytest.approx([1, -2], abs=1e-3)


def test_residuals_are_printed(capsys):
    assert fit_time.main(["--check"]) == 0
    printed = "\n".join(lines(capsys))
    assert "fitted: 30 runs" in printed and "held out: 41 runs" in printed
    assert "matmul_share" not in printed
