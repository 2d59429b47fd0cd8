"""The benchmark of schedules: what it predicts from measured parts, prints, and refuses."""

import io
import json

import bench_schedules
import numpy as np
import pytest
import step_parts
from bench_schedules import Options, rows_of
from rich.console import Console
from step_parts import Costs, Sizes

from mtx.cli import exit_status
from mtx.config import ModelConfig, RunConfig
from mtx.schedules.makers import MAKERS, make
from mtx.schedules.schedule import Schedule

MODEL = ModelConfig(
    layers=4, hidden=32, heads=4, sequence=16, vocab=101, compute_dtype="float32", vocab_multiple=8
)
RUN = RunConfig(model=MODEL)
MACHINE = {"cores": 2, "jax": "0.10.2", "load_at_start": 0.1}
COSTS = Costs(forward=1.0, both=2.0, backward=1.25, weight=0.75, ends=0.5, tick=0.01, once=3.0)
P, M = 4, 8


def table(name, virtual=None):
    return make(name, microbatches=M, stages=P, virtual=virtual)


# With B and W in one or separate, the work is the same; plus 0.5 per item, 0.01 per tick and 3.
@pytest.mark.parametrize(
    ("name", "work"),
    [("gpipe", M * 3.0), ("1f1b", M * 3.0), ("zb_h1", M * 3.0), ("interleaved_1f1b", 2 * M * 3.0),
     ("seq1f1b", 2 * M * 3.5 - 2 * M * 0.5)],
)  # fmt: skip
def test_devices_that_share_cores_take_as_long_as_all_work(name, work):
    schedule = table(name)
    want = work + 0.5 * schedule.items + 0.01 * schedule.ticks + 3
    assert bench_schedules.step_on_shared_cores(schedule, COSTS) == pytest.approx(want)


@pytest.mark.parametrize(("name", "bubble"), [("1f1b", 3 * 3.0), ("aligned_zb", 3 * 2.25)])
def test_devices_of_their_own_wait_for_one_another(name, bubble):
    """The bubble is (p-1)(F+B+W); in the aligned table it is (p-1)(F+B)."""
    schedule = table(name)
    want = M * 3.5 + bubble + 0.01 * schedule.ticks + 3
    assert bench_schedules.step_on_own_cores(schedule, COSTS) == pytest.approx(want)


def test_a_tick_is_its_longest_f_and_then_its_longest_b_and_w():
    """Two microbatches on two stages; in tick 2 one stage's F meets the other's B."""
    forward, backward = [[[0, 1]], [[2, 4]]], [[[3, 2]], [[5, 4]]]
    schedule = Schedule.from_ticks("mixed", np.array(forward), np.array(backward))
    want = 4 * 1.0 + 4 * 2.0 + 2 * 0.5 + 6 * 0.01 + 3
    assert bench_schedules.step_on_own_cores(schedule, COSTS) == pytest.approx(want)


def test_an_op_of_a_chunk_or_slice_is_priced_as_one():
    """With twice the chunks, each of half the cost, the bubble halves."""
    half = Costs(
        **{part: getattr(COSTS, part) / 2 for part in ("forward", "both", "backward", "weight")},
        ends=0, tick=0, once=0,
    )  # fmt: skip
    for name in ("interleaved_1f1b", "seq1f1b"):
        got = bench_schedules.step_on_own_cores(table(name), half)
        assert got == pytest.approx(M * 3.0 + 3 * 3.0 / 2)


def test_bytes_of_all_slots():
    sizes = Sizes(input=1, residuals=100, deferred=10_000, cache=1_000_000)
    assert bench_schedules.slot_bytes(table("1f1b"), sizes) == 7 * 100 + 2  # one slot up, one down
    split = table("zb_h1")
    waiting = split.slots * 100 + split.weight_stash.slots * 10_000
    assert bench_schedules.slot_bytes(split, sizes) == waiting + split.receive_slots + 2
    sliced = table("seq1f1b")
    caches = sliced.cache.slots + sliced.gradient_cache.slots
    assert bench_schedules.slot_bytes(sliced, sizes) // 1_000_000 == caches > 0


def test_each_table_is_one_row():
    rows = rows_of(Options(), layers=8)
    names = [name for row in rows for name in (row.name, *row.also)]
    assert len(set(names)) == len(names) and {name.split()[0] for name in names} == set(MAKERS)
    (plain,) = [row for row in rows if row.name == "1f1b"]
    assert {"interleaved_1f1b", "eager_1f1b"} <= set(plain.also)
    assert {row.parts for row in rows} == {(1, 1), (2, 1), (1, 2), (2, 2)}
    assert all(row.parts[0] == 1 for row in rows_of(Options(), layers=4))  # 4 stages: no room
    assert [row.name for row in rows_of(Options(schedules="v_min, zb_v"), layers=8)] == [
        "v_min v=2", "zb_v v=2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--schedules", "1f1"], "unknown schedule '1f1': did you mean '1f1b'?"),
        (["--stages", "1"], "stages=1 must be at least 2"),
        (["--rounds", "0"], "rounds=0 must be at least 1"),
        (["--stages", "3"], "layers=8 cannot be divided over stages=3"),
        (["--stages", "8", "--schedules", "zb_v"], "with the chunks that zb_v ask for"),
        (["--json", "no/such/folder/a.json"], "there is no directory no/such/folder"),
        (["--preset", "bench-x"], "unknown preset 'bench-x'"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, complaint):
    assert exit_status(lambda: bench_schedules.main(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and complaint in err and err.count("\n") == 1


@pytest.fixture(scope="module")
def measured():
    """A plain table, one with separate W, and one of two chunks and slices."""
    options = Options(stages=2, microbatches=2, rounds=1, schedules="1f1b,zb_h1,seq1f1b")
    names = ("1f1b", "zb_h1", "seq1f1b v=2")
    rows = [row for row in rows_of(options, MODEL.layers) if row.name in names]
    return bench_schedules.measure(rows, RUN, options, MACHINE)


def test_what_is_measured(measured):
    assert json.loads(json.dumps(measured)) == measured
    assert measured["devices"] == "own cores"  # two cores, two stages
    plain, split, sliced = measured["rows"]
    assert [row["ticks"] for row in measured["rows"]] == [
        make(name, microbatches=2, stages=2, virtual=virtual).ticks
        for name, virtual in (("1f1b", 1), ("zb_h1", 1), ("seq1f1b", 2))
    ]
    assert (split["split"], sliced["virtual"], sliced["slices"]) == (True, 2, 2)
    assert split["weight_slots"] > 0 == plain["weight_slots"]
    for row in measured["rows"]:
        for name in ("step_s", "work_s", "own_cores_s", "shared_cores_s", "predicted_work_s"):
            assert len(row[name]) == 1 and row[name][0] > 0
        assert row["own_cores_s"] == [row["predicted_s"]]
        assert row["time_ratio"] == pytest.approx(row["step_s"][0] / row["own_cores_s"][0])
        assert row["work_ratio"] > 0 and row["compile_s"] > 0
        assert len(row["losses"]) == 2 and row["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert row["losses"][1] < row["losses"][0]
        assert row["memory_ratio"] == row["temp_bytes"] / row["predicted_bytes"]
    for cost in measured["costs"]:
        assert cost["seconds"].keys() == cost["core_seconds"].keys() == COSTS.__dict__.keys()


def test_memory_of_the_plain_table_is_the_yardstick(measured):
    plain, split, sliced = measured["rows"]
    assert plain["memory_ratio"] == 1 and measured["constant_bytes"] > 0
    x_bytes = 4 * RUN.layout.microbatch * MODEL.sequence * MODEL.hidden
    assert plain["slot_bytes"]["input"] == 2 * sliced["slot_bytes"]["input"] == x_bytes
    assert plain["slot_bytes"] == split["slot_bytes"] and plain["slot_bytes"]["cache"] == 0
    assert 0 < sliced["slot_bytes"]["residuals"] < plain["slot_bytes"]["residuals"]
    assert sliced["slot_bytes"]["cache"] == 2 * x_bytes  # keys and values of its one layer


def row_with(*, time=1.0, work=(1.0, 1.0), memory=1.0, slices=1):
    middle = sum(work) / 2
    return {
        "time_ratio": time, "work_ratio": middle, "memory_ratio": memory, "slices": slices,
        "work_s": list(work), "predicted_work_s": [1.0] * len(work),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({}, []),
        ({"time": 1.09, "work": (0.95, 0.91), "memory": 1.09}, []),
        ({"time": 1.3}, ["cores"]),
        ({"time": 1.3, "work": (1.3, 1.2)}, ["unknown"]),
        ({"work": (1.0, 1.3)}, ["rounds"]),
        ({"work": (1.3, 1.2), "slices": 2, "memory": 1.2}, ["cache"]),
        ({"work": (0.8, 0.7), "slices": 2}, ["unknown"]),
        ({"time": 0.8, "memory": 0.8, "slices": 2}, ["cores", "constant"]),
    ],
)
def test_why_measured_and_predicted_differ(values, want):
    assert bench_schedules.reasons(row_with(**values)) == want
    assert all(reason in bench_schedules.REASONS for reason in want)
    assert all(f"\n{reason} " in bench_schedules.__doc__ for reason in want if reason != "unknown")


def test_losses_that_differ_are_not_printed(capsys, monkeypatch):
    def differ(*_):
        raise bench_schedules.bench.LossesDiffer("the losses of step 0 differ: 'a' 1, 'b' 2")

    monkeypatch.setattr(bench_schedules, "measure", differ)
    assert bench_schedules.main(["--schedules", "1f1b"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "the losses of step 0 differ" in err


def test_everything_fits_the_page(capsys):
    """All rows, with the widest numbers, with own and with shared cores."""
    seconds = step_parts.Seconds(12.3456, 23.4567)
    for cores in (2, 16):
        rows = [
            bench_schedules.Measured(
                row=row, sizes=Sizes(input=1, residuals=10, deferred=10, cache=10),
                temp_bytes=1234 * 2**20, compile_s=1.0, steps=[seconds], costs=[(COSTS, COSTS)],
                losses=[1.0],
            )
            for row in rows_of(Options(), layers=8)
        ]  # fmt: skip
        result = bench_schedules.result_of(
            rows, 1233 * 2**20, options=Options(), run=RUN, machine=MACHINE | {"cores": cores}
        )
        assert result["devices"] == ("shared cores" if cores == 2 else "own cores")
        console = Console(width=bench_schedules.bench.WIDTH, file=io.StringIO())
        console.print(bench_schedules.table_of(result))
        lines = console.file.getvalue().splitlines()
        assert len(lines) == len(rows) + 2 and max(map(len, lines)) <= 100
        assert "…" not in "".join(lines) and "12.346" in lines[-1] and "1234.0" in lines[-1]
        notes = " ".join(bench_schedules.notes_of(result))
        assert ("all wait for the longest" in notes) == (cores == 16)
        assert "1f1b is also the table of eager_1f1b, interleaved_1f1b" in notes
