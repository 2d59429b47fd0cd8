"""`mtx schedule`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from mtx.cli import main
from mtx.schedules.formats import read_schedule, to_csv, to_text
from mtx.schedules.makers import MAKERS, make
from mtx.schedules.shape import Times
from mtx.schedules.simulate import simulate
from mtx.view.spans import MODELS


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> int:
    """The status of `main`, even if tyro exits after its help."""
    try:
        return main(["schedule", *arguments])
    except SystemExit as exit:
        return exit.code


SMALL = ("--pipe", "2", "--microbatches", "3")


# --- one schedule ---------------------------------------------------------------------------------


def test_figure_4_is_printed(capsys):
    assert run("1f1b", "--pipe", "4", "--microbatches", "8", "--virtual", "2") == 0
    title, first, _, _, _, notation, *facts = capsys.readouterr().out.splitlines()
    assert title == "1f1b: 4 stages of 2 chunks, 8 microbatches, 26 ticks"
    assert first.startswith("stage 0 |F0.0|F1.0|F2.0|F3.0|F0.1|F1.1|F2.1|F3.1    ·|F4.0    ·|")
    assert facts == [
        "ticks          26, each at most one F and one B",
        "lock-step      28.5, bubble 18.75% of ideal time (24), as our program runs the ticks",
        "asynchronous   28.5, bubble 18.75% of ideal time (24), as a program per stage runs the "
        "orders",
        "in flight      11 9 7 5 on stages 0 to 3: chunks of microbatches between their F and "
        "their B, at most",
        "slots          11 of the stash, on every stage",
        "memory         5.5 4.5 3.5 2.5 on stages 0 to 3: stashes of a whole stage, at most",
        "source         Narayanan et al., SC'21, section 2.2; bubble in closed form 18.75%",
    ]


def test_what_lock_step_cannot_run_well_is_said_with_both_prices(capsys):
    assert run("zb-h1") == 0
    facts = capsys.readouterr().out.splitlines()
    assert "slots          5 of the stash, on every stage, and 4 of what waits for W" in facts
    assert (
        "remark         lock-step cannot run this table well: 45, against 27 by a program per stage"
        in facts
    )


def test_without_a_name_it_is_1f1b_and_many_stages_are_shortened(capsys):
    assert run("--pipe", "32", "--microbatches", "40") == 0
    out = capsys.readouterr().out
    assert out.startswith("1f1b: 32 stages, 40 microbatches, ")
    assert "in flight      40 40 40 40 ... 7 5 3 1 on stages 0 to 31:" in out
    assert run("gpipe", *SMALL, "--memory-limit", "2") == 0
    assert "stashes of a whole stage, at most, over the limit of 2" in capsys.readouterr().out


def test_the_asynchronous_model_has_a_time_axis(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert run("1f1b", *SMALL, "--model", "asynchronous", "--times", "1,1.5,0.5,0.25") == 0
    title, *rows = capsys.readouterr().out.splitlines()
    expected = simulate(
        make("1f1b", microbatches=3, stages=2),
        Times(forward=1, backward=1.5, weight=0.5, comm=0.25),
    )
    bubble = f"bubble {expected.bubble_over_ideal:.2%} of ideal time"
    assert f"; asynchronous: {expected.makespan:.5g}, {bubble}; a character is " in title
    assert "~" in rows[0] and len(rows[0]) == len(rows[1]) == 120


def test_json_is_for_programs(capsys):
    sizes = ("--pipe", "4", "--microbatches", "8")
    assert run("zb_h2", *sizes, "--times", "1,2,3,0.5", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    times = Times(forward=1, backward=2, weight=3, comm=0.5)
    schedule = make("zb_h2", microbatches=8, stages=4, times=times)
    shape = {"stages": 4, "microbatches": 8, "virtual": 1, "slices": 1}
    table = {"ticks": schedule.ticks, "in_flight": [7, 5, 3, 1], "slots": schedule.slots}
    priced = {}
    for model in ("lockstep", "asynchronous"):
        priced[model] = record.pop(model)
        known = simulate(schedule, times, model=model)
        for key in ("makespan", "ideal", "bubble_over_ideal"):
            assert priced[model].pop(key) == pytest.approx(getattr(known, key), rel=1e-12)
        assert priced[model] == {
            "in_flight": known.in_flight.tolist(), "peak_memory": known.peak_memory.tolist(),
        }  # fmt: skip
    assert record == {"schedule": "zb_h2", **shape, **table}


@pytest.mark.parametrize("model", ["lockstep", "asynchronous"])
@pytest.mark.parametrize(
    "line",
    ["1f1b --pipe 4 --microbatches 6", "interleaved_1f1b --pipe 4 --microbatches 6",
     "zb_h1 --pipe 3 --microbatches 5 --times 1,1.3,0.8,0.05",
     "zb_v --pipe 3 --microbatches 5 --times 1,1.3,0.8,0",
     "1f1b --pipe 64 --microbatches 130 --virtual 2"],
)  # fmt: skip
def test_the_bubble_is_one_number_in_text_json_picture_and_trace(line, model, capsys):
    assert run(*line.split(), "--json") == 0
    number = json.loads(capsys.readouterr().out)[model]["bubble_over_ideal"]
    told = f"bubble {number:.2%} of ideal time"
    files = ("--draw", "a.svg", "--trace", "a.json")
    assert run(*line.split(), "--model", model, *files) == 0
    facts = dict(re.findall(r"^(lock-step|asynchronous) +(.*)$", capsys.readouterr().out, re.M))
    assert told in facts[MODELS[model]]
    assert re.findall(r"bubble [^<]*", Path("a.svg").read_text()) == [told]
    trace = json.loads(Path("a.json").read_text())
    assert trace["otherData"]["bubble_over_ideal"] == [number]
    named = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"
             and event["name"] == "process_name"]  # fmt: skip
    assert len(named) == 1 and named[0].endswith(told)


def test_compare_has_the_same_bubbles(capsys):
    sizes = ("--pipe", "4", "--microbatches", "6", "--virtual", "2")
    assert run("compare", *sizes, "--json") == 0
    records = {record["schedule"]: record for record in json.loads(capsys.readouterr().out)}
    assert run("compare", *sizes) == 0
    table = capsys.readouterr().out.split("\n\n")[0].splitlines()[1:]
    for row in table:
        name, *cells = re.split(r"\s{2,}", row)
        record = records[name.split()[0]]
        known = [record[model]["bubble_over_ideal"] for model in MODELS]
        assert [cells[5], cells[7]] == [f"{bubble:.2%}" for bubble in known]


# --- files ----------------------------------------------------------------------------------------


def test_a_table_is_written_and_read_back(empty_directory, capsys):
    assert run("zb_v", *SMALL, "--csv", "a.csv", "--text", "a.txt") == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "wrote csv      a.csv", "wrote text     a.txt",
    ]  # fmt: skip
    schedule = make("zb_v", microbatches=3, stages=2)
    for name, text in (("a.csv", to_csv(schedule)), ("a.txt", to_text(schedule))):
        assert Path(name).read_text() == text
        assert run(name, "--json") == 0
        record = json.loads(capsys.readouterr().out)
        assert record["schedule"] == "a" and record["ticks"] == schedule.ticks
    assert run("a.csv", "--pipe", "2", "--virtual", "2") == 0
    out = capsys.readouterr().out
    assert out.startswith("a: 2 stages of 2 chunks, 3 microbatches") and "source" not in out


def test_a_dash_is_the_standard_output_and_nothing_else(capsys):
    schedule = make("1f1b", microbatches=3, stages=2)
    assert run("1f1b", *SMALL, "--csv", "-") == 0
    assert capsys.readouterr().out == to_csv(schedule)
    assert run("1f1b", *SMALL, "--text", "-", "--orders") == 0
    assert capsys.readouterr().out == to_text(schedule, orders=True)


def test_beside_a_picture_only_a_timeline_that_fits_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    large = ("interleaved_1f1b", "--pipe", "64", "--microbatches", "512")
    for model in MODELS:
        assert run(*large, "--model", model, "--draw", "a.png") == 0
        out = capsys.readouterr().out
        assert len(out) < 1500 and "stage 0 |" not in out
        assert out.startswith("interleaved_1f1b: 64 stages of 2 chunks, 512 microbatches")
        assert "lock-step      1630.5, bubble 6.15%" in out
    assert run("1f1b", *SMALL, "--draw", "a.png") == 0
    assert "stage 0 |F0|F1  ·|F2 B0|" in capsys.readouterr().out


def test_picture_and_trace_are_written(empty_directory, capsys):
    assert run(
        "1f1b", *SMALL, "--beside", "gpipe", "--draw", "a.svg", "--trace", "a.json", "--csv", ""
    ) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert out.endswith("wrote picture  a.svg\nwrote trace    a.json\n")
    assert out.index("1f1b: 2 stages") < out.index("gpipe: 2 stages")
    picture = Path("a.svg").read_text()
    assert picture.startswith("<?xml") and "1f1b: 2 stages" in picture and "gpipe: 2" in picture
    pids = {event["pid"] for event in json.loads(Path("a.json").read_text())["traceEvents"]}
    assert pids == {0, 1}
    assert sorted(path.name for path in empty_directory.iterdir()) == ["a.json", "a.svg"]


# --- all schedules --------------------------------------------------------------------------------


def test_compare_lists_every_schedule_with_both_prices_or_the_reason(capsys):
    assert run("compare", "--pipe", "4", "--microbatches", "8", "--virtual", "2") == 0
    table, refused, best = capsys.readouterr().out.split("\n\n")
    head, *rows = table.splitlines()
    assert re.split(r"\s{2,}", head) == [
        "schedule", "ticks", "in flight", "slots", "stashes", "lock-step", "bubble",
        "asynchronous", "bubble",
    ]  # fmt: skip
    prices = {row.split()[0]: re.split(r"\s{2,}", row) for row in rows}
    named = set(prices) | set(re.findall(r"^  (\w+):", refused, re.MULTILINE))
    assert named == set(MAKERS)
    assert prices["1f1b"][1:9] == [
        "26", "11", "11", "5.5", "28.5", "18.75%", "28.5", "18.75%",
    ]  # fmt: skip
    assert "zb_h1: made for virtual=1" in refused
    assert "lock-step does not suit it: 34.5, with a program per stage 25.5" in prices["zb_v"][-1]
    marked = {row.split()[0] for row in rows if " * " in row}
    assert marked == {name for name in prices if not MAKERS[name].lockstep}
    lockstep = [float(row[5]) for row in prices.values()]
    assert lockstep == sorted(lockstep)
    assert best.startswith(f"best in lock-step: {rows[0].split()[0]} v=2")


def test_compare_fits_a_terminal(monkeypatch, capsys):
    """Reasons are printed below the numbers if there is no room after them."""
    asked = ["compare", "--pipe", "4", "--microbatches", "8"]
    assert run(*asked) == 0
    head, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((100, 40)))
    assert run(*asked) == 0
    narrow = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert max(map(len, narrow)) <= 100 < max(map(len, rows))
    assert " ".join(" ".join(narrow).split()) == " ".join(" ".join([head, *rows]).split())


def test_compare_as_json_and_within_a_memory_limit(capsys):
    limit = ("--pipe", "4", "--microbatches", "8", "--memory-limit", "6")
    assert run("compare", *limit, "--json") == 0
    records = json.loads(capsys.readouterr().out)
    fitting = [record for record in records if record["fits"]]
    assert fitting == records[: len(fitting)]
    assert fitting and all(record["memory"] <= 6 for record in fitting)
    (plain,) = [r for r in records if (r["schedule"], r["virtual"]) == ("1f1b", 1)]
    assert plain["reason"] == "keeps 7 stashes, over the limit of 6" and plain["ticks"] == 14
    assert plain["lockstep"]["bubble_over_ideal"] == pytest.approx(3 / 8)

    assert run("auto", *limit, "--json") == 0
    best = json.loads(capsys.readouterr().out)
    uncut = next(r for r in fitting if r["slices"] == 1 and not r["for_comparison"])
    assert {key: uncut[key] for key in best} == best  # slices are tried if they are asked for
    assert run("auto", *limit) == 0
    assert f"chosen         {best['schedule']}" in capsys.readouterr().out

    assert run("compare", *SMALL, "--memory-limit", "0.1") == 2
    assert "0.1" in capsys.readouterr().err


# --- help and mistakes ----------------------------------------------------------------------------


def test_help_names_every_schedule_and_its_source(capsys):
    assert run("--help") == 0
    out = capsys.readouterr().out
    for name, maker in MAKERS.items():
        assert re.search(rf"^  {name} +\S", out, re.MULTILINE) and maker.source in out


# For each command line, what the one line that refuses it must name.
MISTAKES = {
    "gpip": "gpip | did you mean 'gpipe'",
    "zb-h3": "zb_h3 | did you mean 'zb_h",
    "--pipe 0": "pipe=0 | 1",
    "compare --layout.slices 0": "slices=0 | 1",
    "--stages 4": "--stages | --layout.pipe",
    "--slices 2": "--slices | --layout.slices",
    "--pipe 2 --layout.pipe 4": "--pipe 2 | --layout.pipe 4 | leave one out",
    "--microbatch 2": "--microbatch | --microbatches",
    "--tensor 2": "--tensor",
    "--pipe 1000 --microbatches 4000": "stages=1000 | microbatches=4000 | virtual=1 | slices=1 | "
    "262,144",
    "zb_v --virtual 3": "zb_v | virtual=2 | virtual=3",
    "1f1b --layout.slices 2": "1f1b | slices=1",
    "--times 1,1": "--times | F,B,W,comm | '1,1'",
    "--times 1,1,1,x": "--times | 1,1,1,x",
    "--times 1,1,nan,0": "weight=nan",
    "--times 0,0,0,1": "forward, backward and weight",
    "--memory-limit 0": "memory_limit=0.0 | 0",
    "--model sync": "'sync' | --model",
    "--draw a.txt": "a.txt | .svg",
    "--draw no/a.svg": "no/a.svg",
    "--trace no/a.json": "no/a.json",
    "--csv no/a.csv": "no/a.csv",
    "--csv .": "cannot write .",
    "--csv - --json": "--csv - | --text - | --json",
    "--csv a.csv --beside gpipe": "--csv | --text | --beside",
    "--csv a.csv --text ./a.csv": "--csv | --text | a.csv",
    "--draw a.svg --trace a.svg": "--draw | --trace | a.svg",
    "--orders": "--orders | --csv | --text",
    "compare --model asynchronous": "compare | --model asynchronous",
    "compare --draw a.svg": "--draw | compare",
    "missing.csv": "missing.csv",
    "table.csv": "table.csv | row 2, column 2 | 1X0",
    "table.csv --csv table.csv": "table.csv | row 2, column 2 | 1X0",
    "sound.csv --pipe 2": "sound.csv | stages=1 | stages=2",
    "auto --memory-limit 0.01": "0.01",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(line, empty_directory, capsys):
    Path("table.csv").write_text("0F0,0B0\n1F0,1X0")
    Path("sound.csv").write_text("0F0,0B0")
    assert run(*line.split()) == 2
    out, error = capsys.readouterr()
    assert error.startswith("mtx: ") and error.count("\n") == 1 and out == ""
    missing = [value for value in MISTAKES[line].split(" | ") if value not in error]
    assert not missing, error
    assert sorted(path.name for path in empty_directory.iterdir()) == ["sound.csv", "table.csv"]
    assert read_schedule("sound.csv").ticks == 1
