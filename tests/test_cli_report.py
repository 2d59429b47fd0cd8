"""`mtx report`: a table, numbers, and pictures of a log."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from test_train_goodput import LOG

from mtx.cli import main


@pytest.fixture
def run(tmp_path):
    """A run's directory with a log of two processes."""
    more = {"parameters": 12345, "devices": 2, "device_kind": "cpu", "run": {"steps": 6}}
    speeds = {"tokens_per_s": 100.0, "tflops_sc21": 1.0, "tflops_model": 0.5, "mfu": None}
    records = [
        record | more if record["kind"] == "start"
        else record | speeds if record["kind"] == "step"
        else record
        for record in LOG
    ]  # fmt: skip
    records += [
        {
            "kind": "processes",
            "step": n,
            "t_s": 6.0,
            "host_s": [0.1, 0.1],
            "device_s": [0.1, 0.1 * n],
        }
        for n in range(1, 7)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return tmp_path


def test_it_prints_a_table_and_writes_the_numbers(run, capsys):
    assert main(["report", str(run)]) == 0
    out = capsys.readouterr().out
    for words in ("6 of 6", "12,345 parameters", "14.1% of 39.0 s", "3 trained again, 1 skipped"):
        assert words in out
    assert main(["report", str(run), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["held_out_loss"] == 2.0
    assert numbers["goodput"] == pytest.approx(5.5 / 39)
    assert numbers["seconds"]["down"] == pytest.approx(17)


@pytest.mark.parametrize("name", ["report.html", "report.svg", "report.png"])
def test_it_draws(run, name):
    option = "--out" if name.endswith("html") else "--draw"
    assert main(["report", str(run), option, str(run / name)]) == 0
    drawn = (run / name).read_bytes()
    if name.endswith("png"):
        assert drawn.startswith(b"\x89PNG")
        return
    text = drawn.decode()
    svg = text[text.index("<svg") : text.index("</svg>") + 6]
    assert ElementTree.fromstring(svg) is not None
    for words in ("Goodput 14.1%, 2 sessions", "held out", "process", "trained again later"):
        assert words in svg


def test_mistakes_are_one_line(run, capsys):
    for arguments, words in (
        ([], "name the directory"),
        ([str(run / "none")], "cannot be read"),
        ([str(run), "--out", "report.svg"], "must end in .html"),
        ([str(run), "--draw", "report.html"], "must end with one of .svg"),
    ):
        assert main(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
