"""`mtx report`: a table, numbers, and pictures of a log."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from test_train_goodput import LOG

from mtx.cli import main
from mtx.config import DataConfig, Layout, ModelConfig, RunConfig, to_dict
from mtx.train.goodput import read_log
from mtx.view.report import report_facts, summarize
from mtx.view.run import PANELS, draw_panels

RUN = RunConfig(
    model=ModelConfig(compute_dtype="float16"),
    layout=Layout(pipe=2, virtual=2, microbatch=2),
    data=DataConfig(path=("books", "wiki"), tokenizer="bpe"),
    steps=6,
)


def write_log(folder, records, run):
    more = {"parameters": 12345, "devices": 2, "device_kind": "cpu", "run": run}
    lines = [record | more if record["kind"] == "start" else record for record in records]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def run(tmp_path):
    """A run's directory with a log of two processes."""
    speeds = {"tokens_per_s": 100.0, "tflops_sc21": 1.0, "tflops_model": 0.5, "mfu": None}
    rates = {"learning_rate": 3e-4, "gradient_norm": 2.5, "loss_scale": 1024.0}
    records = [record | speeds | rates if record["kind"] == "step" else record for record in LOG]
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
    return write_log(tmp_path, records, to_dict(RUN))


def test_woven_ticks_are_said(tmp_path):
    layout = dataclasses.replace(RUN.layout, weave="on", idle="phases")
    woven = write_log(tmp_path, LOG, to_dict(dataclasses.replace(RUN, layout=layout)))
    facts = report_facts(summarize(read_log(woven / "log.jsonl")))
    assert "1f1b, virtual v = 2, woven ticks" in [row.value for row in facts]


def test_pages_are_written_before_anything_is_printed(run, tmp_path, monkeypatch):
    def gone(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("mtx.cli.report.say", gone)
    monkeypatch.setattr("mtx.cli.process.os.dup2", lambda *_: None)
    assert main(["report", str(run), "--out", str(tmp_path / "r.html")]) == 141
    assert (tmp_path / "r.html").stat().st_size > 1000


def test_it_prints_a_table_and_writes_the_numbers(run, capsys):
    assert main(["report", str(run)]) == 0
    out = capsys.readouterr().out
    for words in (
        "6 of 6",
        "12,345 parameters",
        "14.1% of 39.0 s",
        "3 steps, after 1 rollback and 1 restart",
    ):
        assert words in out
    assert main(["report", str(run), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["held_out_loss"] == 2.0
    assert numbers["goodput"] == pytest.approx(5.5 / 39)
    assert numbers["seconds"]["down"] == pytest.approx(17)


def test_it_says_what_ran(run, capsys):
    assert main(["report", str(run)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "layout data 1 x pipe 2 x tensor 1 zero=1", "schedule 1f1b, virtual v = 2",
        "m = 8 microbatches a replica, of b = 2", "data books wiki, tokenizer bpe",
        "computes in float16", "loss scale 1,024", "adamw, lr 0.00015, cosine to 1e-05",
        "learning rate 0.0003", "gradient norm 2.5", "skipped steps 1,",
    ):  # fmt: skip
        assert words in out, words


def test_losses_of_some_models_alone_are_said_where_they_are(run, capsys):
    assert main(["report", str(run), "--json"]) == 0
    assert "second_loss" not in json.loads(capsys.readouterr().out)
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    more = {"second_loss": 0.625, "aux_loss": None, "imbalance": 1.5}
    records = [r | more if r["kind"] == "step" else r for r in records]
    (run / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert main(["report", str(run), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["second_loss"], numbers["imbalance"]) == (0.625, 1.5)
    assert "aux_loss" not in numbers
    rows = {row.name: row.value for row in report_facts(numbers)}
    assert rows["loss of the second token, weighted"] == "0.625"
    axes = draw_panels(read_log(run / "log.jsonl"))[0].axes[0]
    assert "second token, weighted" in axes.get_legend_handles_labels()[1]


@pytest.mark.parametrize("records", [LOG[:1], LOG[:3]])
def test_what_is_not_known_is_said_with_its_reason(records, tmp_path, capsys):
    """For a run that has just begun, and for one whose steps log only their time and loss."""
    write_log(tmp_path, records, to_dict(RUN))
    page, picture = str(tmp_path / "report.html"), str(tmp_path / "report.svg")
    assert main(["report", str(tmp_path), "--out", page, "--draw", picture]) == 0
    last = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split()[-1] for line in last] == [page, picture]
    facts = report_facts(summarize(read_log(tmp_path / "log.jsonl")))
    assert not [fact for fact in facts if fact.value.strip(" -") == ""]
    values = {fact.name: fact.value for fact in facts}
    assert values["held-out loss"] == "not yet: measured every 50 steps and at the end" or (
        len(records) == 1 and values["held-out loss"] == "no step has finished yet"
    )
    assert values["memory, peak"] == "cpu devices do not tell"


def test_a_config_of_another_version_is_no_obstacle(tmp_path, capsys):
    write_log(tmp_path, LOG, to_dict(RUN) | {"of_another_version": 1})
    assert main(["report", str(tmp_path)]) == 0
    assert "of_another_version" in capsys.readouterr().out


PICTURED = ("Loss", "held out", "Learning rate", "Gradient norm", "not finite: 1 of 6",
            "Throughput", "Time of each process", "Goodput 14.1%, 2 sessions",
            "trained again later")  # fmt: skip


@pytest.mark.parametrize("name", ["report.svg", "report.png"])
def test_it_draws(run, name):
    assert main(["report", str(run), "--draw", str(run / name)]) == 0
    drawn = (run / name).read_bytes()
    if name.endswith("png"):
        assert drawn.startswith(b"\x89PNG")
        return
    assert ElementTree.fromstring(drawn.decode()) is not None
    for words in PICTURED:
        assert words in drawn.decode()


def test_the_page_holds_all_pictures_each_narrow_enough_for_a_telephone(run):
    assert main(["report", str(run), "--out", str(run / "report.html")]) == 0
    page = (run / "report.html").read_text()
    assert "width=device-width" in page and "data 1 x pipe 2 x tensor 1" in page
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == len(PANELS)
    for picture in pictures:
        # 420 px minus the margins, over as many points: text of 8 points is at least 9 px.
        assert float(ElementTree.fromstring(picture).get("viewBox").split()[2]) * 9 / 8 <= 388
    for words in PICTURED:
        assert words in "".join(pictures)


def test_mistakes_are_one_line(run, capsys):
    for arguments, words in (
        ([], "RUN_DIR"),
        ([str(run / "none")], "log.jsonl"),
        ([str(run), "--out", "report.svg"], ".html"),
        ([str(run), "--draw", "report.html"], ".svg"),
    ):
        assert main(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
