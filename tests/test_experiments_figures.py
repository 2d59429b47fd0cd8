"""The scripts that compare published and predicted values: what they print, draw and refuse."""

import figures
import fit_time
import pytest
import table1
from errors import names
from published_runs import FITTED_RUNS, TABLE_1_RUNS

from mtx.errors import UserError
from mtx.plan.calibration import FITTED, calibration_of
from mtx.plan.hardware import hardware


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
    assert "The largest error is -4.4%" in printed[-1]


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
    for path in (tmp_path / "none" / "picture.png", tmp_path / "picture.doc"):
        with pytest.raises(UserError) as error:
            script.main(["--draw", str(path)])
        names(error, path)


def test_an_unknown_figure_is_an_error():
    with pytest.raises(UserError) as error:
        figures.main(["--only", "figure 19"])
    names(error, "figure 19", "figure 18")


def test_the_packages_constants_are_those_of_the_fit():
    fitted = fit_time.fit(FITTED_RUNS, rounds=200)
    package = calibration_of(hardware("a100-80gb"))
    for name in FITTED:
        assert getattr(package, name) == pytest.approx(getattr(fitted, name), abs=2e-3)


def test_what_no_run_tells_stays_where_the_fit_starts():
    """Without figure 13 no fitted run has a tensor group that leaves its node."""
    inside = [run for run in FITTED_RUNS if run.where == "figure 16"]
    fitted = fit_time.fit(inside, rounds=5)
    assert fitted.network_share == fit_time.START["network_share"]
    assert fitted.matmul_share != fit_time.START["matmul_share"]


def test_each_figure_is_left_out_once(monkeypatch):
    monkeypatch.setattr(figures, "fit", lambda runs, rounds: calibration_of(hardware("a100-80gb")))
    table = figures.left_out_table()
    assert list(table.columns[0].cells) == ["table 1", "figure 13", "figure 16", "figure 18"]
    assert list(table.columns[1].cells) == ["10", "2", "8", "10"]


def test_residuals_are_printed(capsys):
    assert fit_time.main(["--check"]) == 0
    printed = "\n".join(lines(capsys))
    assert "fitted: 30 runs" in printed and "held out: 49 runs" in printed
    assert "matmul_share" not in printed
