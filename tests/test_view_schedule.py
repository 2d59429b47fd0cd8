"""Timelines as text, as pictures and in notebooks."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from errors import names

from mtx.errors import UserError
from mtx.files import replacing
from mtx.schedules.makers import MAKERS, make
from mtx.schedules.schedule import Schedule
from mtx.schedules.shape import Times
from mtx.schedules.simulate import simulate
from mtx.view.schedule import (
    draw_timeline,
    op_order,
    show,
    timeline_in_colours,
    timeline_text,
)
from mtx.view.spans import shares, waits

FIGURE_4 = make("1f1b", microbatches=8, stages=4, virtual=2)
SPLIT = make("zb_h1", microbatches=6, stages=3)

# --- the table as text ----------------------------------------------------------------------------


def ours(figure: str) -> str:
    """Ops of the paper's figure, "1a" and "1A" for F and B of microbatch 1, chunk a, in ours."""

    def op(found: re.Match) -> str:
        number, letter = found.groups()
        chunk = ord(letter.lower()) - ord("a")
        return f"{'F' if letter.islower() else 'B'}{int(number) - 1}.{chunk}"

    return re.sub(r"\b(\d+)([abAB])\b", op, figure).replace(" ·", "   ·")


def test_figure_4_as_text():
    title, *rows, notation = timeline_text(FIGURE_4).split("\n")
    assert title == "1f1b: 4 stages of 2 chunks, 8 microbatches, 26 ticks"
    assert "\n".join(rows) + "\n" == ours(
        "stage 0 |1a|2a|3a|4a|1b|2b|3b|4b  ·|5a  ·|6a  ·|7a 1B|8a 2B|5b 3B|6b 4B|7b 1A|8b 2A"
        "| · 3A| · 4A| · 5B|6B|7B|8B|5A|6A|7A|8A|\n"
        "stage 1 | ·|1a|2a|3a|4a|1b|2b|3b  ·|4b  ·|5a 1B|6a 2B|7a 3B|8a 4B|5b 1A|6b 2A|7b 3A"
        "|8b 4A| · 5B| · 6B|7B|8B|5A|6A|7A|8A| ·|\n"
        "stage 2 | ·| ·|1a|2a|3a|4a|1b|2b  ·|3b 1B|4b 2B|5a 3B|6a 4B|7a 1A|8a 2A|5b 3A|6b 4A"
        "|7b 5B|8b 6B| · 7B|8B|5A|6A|7A|8A| ·| ·|\n"
        "stage 3 | ·| ·| ·|1a|2a|3a|4a|1b 1B|2b 2B|3b 3B|4b 4B|5a 1A|6a 2A|7a 3A|8a 4A|5b 5B"
        "|6b 6B|7b 7B|8b 8B|5A|6A|7A|8A| ·| ·| ·|\n"
    )
    assert notation == (
        "F7.1: F of microbatch 7, chunk 1, counted from 0; B likewise; ·: idle; |: a tick ends"
    )


def test_one_stage_as_text():
    assert timeline_text(make("gpipe", microbatches=2, stages=1)) == (
        "gpipe: 1 stage, 2 microbatches, 4 ticks\n"
        "stage 0 |F0|F1|B0|B1|\n"
        "F1: F of microbatch 1, counted from 0; B likewise; ·: idle; |: a tick ends"
    )


def test_weights_and_slices_as_text():
    split = timeline_text(make("zb_h1", microbatches=1, stages=1))
    assert split.split("\n")[1:] == [
        "stage 0 |F0 B0 W0|",
        "F0: F of microbatch 0, counted from 0; B and W likewise; ·: idle; |: a tick ends",
    ]
    title, row, notation = timeline_text(
        make("terapipe", microbatches=1, stages=1, slices=2)
    ).split("\n")
    assert title == "terapipe: 1 stage, 1 microbatch of 2 slices, 3 ticks"
    assert row == "stage 0 |F0/0|F0/1 B0/1|B0/0|"
    assert notation.startswith("F0/1: F of microbatch 0, slice 1, counted from 0; B likewise;")


@pytest.mark.parametrize(
    "name, m, p, v",
    [("1f1b", 12, 4, 3), ("gpipe", 5, 3, 2), ("1f1b", 4, 1, 28), ("zb_h2", 7, 3, 1),
     ("zb_v", 6, 3, 2)],
)  # fmt: skip
def test_text_rows_hold_the_ops_in_their_order(name, m, p, v):
    schedule = make(name, microbatches=m, stages=p, virtual=v)
    _, *rows, _ = timeline_text(schedule).split("\n")
    for row, order in zip(rows, op_order(schedule), strict=True):
        cells = row.split("|", 1)[1].replace("|", " ").split()
        ops = order if v > 1 else [op.removesuffix(".0") for op in order]
        assert [cell for cell in cells if cell != "·"] == ops


@pytest.mark.parametrize("width", [30, 60, 80, 119, 205, 240])
def test_text_keeps_to_the_width_and_says_what_it_leaves_out(width):
    title, *rows, _ = timeline_text(FIGURE_4, width).split("\n")
    assert len({len(row) for row in rows}) == 1 and len(rows[0]) <= width
    shown = len(rows[0].split("|")) - 2
    whole = timeline_text(FIGURE_4).split("\n")[1:-1]
    if len(whole[0]) <= width:
        assert rows == whole
        return
    left_out = FIGURE_4.ticks - (shown - 1)
    assert title.endswith(f"26 ticks; {left_out} ticks in the middle left out")
    for row, full in zip(rows, whole, strict=True):
        head, tail = row.split("…|")
        assert full.startswith(head) and full.endswith(tail)


def test_colours_tell_ops_apart():
    marked = timeline_in_colours(FIGURE_4, 150)
    styles = {marked.plain[span.start : span.end].strip(): span.style for span in marked.spans}
    colours = [str(styles[cell]) for cell in ("F0.0", "F0.1", "B5.0", "B5.1", "·")]
    assert len(set(colours)) == 5


# --- a simulation as text -------------------------------------------------------------------------


def test_a_run_as_text_has_a_time_axis():
    """1F1B, p=2, m=2, F=1, B=2, a send takes 1: four characters for each unit of time."""
    run = simulate(make("1f1b", microbatches=2, stages=2), Times(comm=1))
    assert run.makespan == 11
    title, first, second, notation = timeline_text(run, len("stage 0 ") + 2 + 44).split("\n")
    assert title == (
        "1f1b: 2 stages, 2 microbatches; asynchronous: 11, bubble 83.33% of ideal time; "
        "a character is 0.25"
    )
    assert first == "stage 0 |F0  F1  ············~~~~B0      ~~~~B1      |"
    assert second == "stage 1 |····~~~~F0  B0      F1  B1      ············|"
    assert notation.endswith("·: idle; ~: waiting for data")


def test_a_crowded_run_as_text_shows_what_takes_the_most():
    run = simulate(make("gpipe", microbatches=60, stages=3))
    title, *rows, notation = timeline_text(run, 80).split("\n")
    assert len(rows) == 3 and {len(row) for row in rows} == {80}
    for row in rows:
        assert re.fullmatch(r"stage \d \|·*F+[·#]*B+·*\|", row)
        assert row.count("B") == pytest.approx(2 * row.count("F"), abs=3)
    assert notation == "F, B: what takes the time; #: they take turns; ·: idle"
    steady = timeline_text(simulate(make("1f1b", microbatches=80, stages=3)), 60).split("\n")
    assert re.fullmatch(r"stage 1 \|[F·#]{1,3}#{40,}[B·#]{1,3}\|", steady[2])
    with pytest.raises(UserError) as error:
        timeline_text(run, 15)
    names(error, "width=15", len("stage 2 ") + 10)


# --- what stages do over time ---------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize("model", ["lockstep", "asynchronous"])
def test_shares_add_up_to_the_time_of_the_ops(name, model):
    times = Times(forward=1, backward=1.2, weight=0.7, comm=0.1)
    run = simulate(make(name, microbatches=6, stages=3), times, model=model)
    edges = np.linspace(run.start.min(), run.end.max(), 38)
    share = shares(run, edges)
    np.testing.assert_allclose(share.sum(axis=-1), 1)
    taken = (share * np.diff(edges)[:, None]).sum(axis=1)  # [P, F B W wait idle]
    work = [1, 1.2, 0.7] if run.schedule.split else [1, 1.9, 0]
    np.testing.assert_allclose(taken[:, :3], 6 * np.array([work] * 3))
    assert (taken[:, 3] > 0).all()


def test_waits_are_the_sends_that_hold_a_stage_up():
    """1F1B, p=2, m=1: F, send, F, B, send, B."""
    schedule = make("1f1b", microbatches=1, stages=2)
    run = simulate(schedule, Times(comm=0.5))
    assert [array.tolist() for array in waits(run, 1)] == [[1.0], [1.5]]
    assert [array.tolist() for array in waits(run, 0)] == [[4.5], [5.0]]
    assert waits(simulate(schedule), 0)[0].size == 0
    both = waits(simulate(schedule, Times(comm=0.5), model="lockstep"), 0)
    assert [array.tolist() for array in both] == [[1.0, 4.5], [1.5, 5.0]]


# --- pictures -------------------------------------------------------------------------------------


def boxes(axes) -> float:
    """The area of all ops drawn as boxes (not the idle background)."""
    extents = [
        path.get_extents()
        for collection in axes.collections
        if collection.get_zorder() == 2
        for path in collection.get_paths()
    ]
    return sum(extent.width * extent.height for extent in extents)


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_picture_shows_every_op_with_its_microbatch():
    axes, memory = draw_timeline(FIGURE_4).axes
    assert boxes(axes) == pytest.approx(8 * 4 * (1 + 2) * 0.84)
    numbers = [text.get_text() for text in axes.texts if text.get_text().isdigit()]
    assert {n: numbers.count(n) for n in set(numbers)} == {str(n): 16 for n in range(8)}
    assert axes.get_xlim() == (0, 28.5)  # (m + (p - 1) / v)(F + B) = 9.5 x 3
    title = axes.get_title(loc="left")
    assert title.endswith("26 ticks; lock-step: 28.5, bubble 18.75% of ideal time")  # 3 / 16
    assert legend(axes.figure) == ["F, chunk 0", "F, chunk 1", "B, chunk 0", "B, chunk 1", "idle"]
    assert memory.get_xlabel() == "time (a microbatch on one stage: F 1, B 2)"


@pytest.mark.parametrize("model", ["lockstep", "asynchronous"])
def test_numbers_stand_in_boxes_of_their_own_op(model):
    run = simulate(SPLIT, Times(forward=1, backward=1.5, weight=0.5, comm=0.2), model=model)
    axes = draw_timeline(run).axes[0]
    drawn = {t.get_position(): t.get_text() for t in axes.texts if t.get_text().isdigit()}
    assert len(drawn) == 3 * 6 * 3
    for stage in range(3):
        for op, start, end in zip(run.orders.of(stage), run.start[stage], run.end[stage]):
            assert drawn[start + (end - start) / 2, stage] == str(op.item)
    assert legend(axes.figure) == ["F", "B", "W", "waiting for data", "idle"]


def test_memory_is_drawn_beneath_and_ends_at_its_peak():
    run = simulate(FIGURE_4)
    _, memory = draw_timeline(run, memory_limit=7.0).axes
    tops = {line.get_label(): max(line.get_ydata()) for line in memory.lines}
    assert tops == {f"stage {s}": peak for s, peak in enumerate(run.peak_memory)} | {"limit": 7.0}
    for line in memory.lines[:-1]:
        assert line.get_ydata()[-1] == 0
    assert len(draw_timeline(run, memory=False).axes) == 1
    many = draw_timeline(simulate(make("1f1b", microbatches=20, stages=20))).axes[1]
    assert [line.get_label() for line in many.lines] == ["stage 0", "stage 19"]


def test_two_schedules_share_their_time_axis():
    figure = draw_timeline([make("gpipe", microbatches=8, stages=4), FIGURE_4])
    first, _, second, last = figure.axes
    assert first.get_xlim() == second.get_xlim() == (0, 33)
    assert first.get_title(loc="left").startswith("gpipe: 4 stages, 8 microbatches, 22 ticks;")
    assert "1f1b: 4 stages of 2 chunks" in second.get_title(loc="left")
    assert legend(figure)[:3] == ["F", "B", "F, chunk 0"]
    assert last.get_xlabel() and not first.get_xlabel()
    with pytest.raises(UserError) as error:
        draw_timeline([])
    names(error, "shown=[]")


def bands(figure) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """float [rows of pixels, bins, RGB] of a picture of shares, and the legend's colours."""
    (image,) = figure.axes[0].images
    patches = zip(legend(figure), figure.legends[0].get_patches(), strict=True)
    return np.asarray(image.get_array()), {
        text: np.array(patch.get_facecolor()[:3]) for text, patch in patches
    }


def heights(column: np.ndarray, colours: dict[str, np.ndarray]) -> dict[str, float]:
    """The share of each colour in a column of pixels, without the white between rows."""
    alike = {
        text: np.isclose(column, colour, atol=0.01).all(-1) for text, colour in colours.items()
    }
    seen = sum(same.sum() for same in alike.values())
    return {text: same.sum() / seen for text, same in alike.items()}


@pytest.mark.parametrize("name, work", [("1f1b", (1, 2, 0)), ("zb_h2", (1, 1, 1))])
def test_a_large_schedule_is_drawn_in_bands_as_high_as_the_shares_of_time(name, work):
    """64 stages and 512 microbatches: F, B and W keep their own colours, none is mixed."""
    figure = draw_timeline(simulate(make(name, microbatches=512, stages=64)))
    pixels, colours = bands(figure)
    kinds = [f"{kind}'s share of the time" for kind in "FBW"[: np.count_nonzero(work)]]
    assert legend(figure) == [*kinds, "idle"]
    seen = {tuple(colour) for colour in np.unique(pixels.reshape(-1, 3).round(3), axis=0)}
    assert seen == {(1, 1, 1)} | {tuple(colour.round(3)) for colour in colours.values()}
    steady = heights(pixels[:, pixels.shape[1] // 2], colours)
    for kind, part in zip(kinds, work, strict=False):
        assert steady[kind] == pytest.approx(part / sum(work), abs=0.02)
    first_row = len(pixels) // 32  # of two stages
    assert heights(pixels[:first_row, 0], colours)[kinds[0]] > 0.8
    assert heights(pixels[-first_row:, 0], colours)["idle"] == 1
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels[0] == "stages 0-1" and labels[-1] == "stages 62-63"
    assert [text for text in figure.axes[0].texts if text.get_text().isdigit()] == []


def test_ticks_in_which_nobody_works_take_no_time_in_a_picture():
    many = make("1f1b", microbatches=600, stages=2)
    late = Schedule.from_ticks("late", many.forward_ticks, many.backward_ticks + 900)
    figure = draw_timeline(late)
    pixels, colours = bands(figure)
    assert heights(pixels[:, -1], colours)["idle"] < 0.9, "the end of the picture is empty"
    assert figure.axes[0].get_xlim() == (0, 601 * 1 + 601 * 2)


@pytest.mark.parametrize(
    "suffix, magic", [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")]
)
def test_pictures_are_saved_by_suffix(tmp_path, suffix, magic):
    path = tmp_path / f"timeline.{suffix}"
    draw_timeline(make("1f1b", microbatches=2, stages=2), path)
    assert path.read_bytes().startswith(magic)


def test_the_same_picture_gives_the_same_bytes(tmp_path):
    for name in ("a.svg", "b.svg"):
        draw_timeline(make("1f1b", microbatches=2, stages=2), tmp_path / name)
    first, second = (tmp_path / "a.svg").read_bytes(), (tmp_path / "b.svg").read_bytes()
    assert first == second and b">stage 0<" in first


def test_wrong_arguments_are_errors(tmp_path):
    with pytest.raises(UserError) as error:
        draw_timeline(FIGURE_4, tmp_path / "timeline.txt")
    names(error, "timeline.txt", ".svg", ".png", ".pdf")


def test_without_matplotlib_the_text_works_and_the_picture_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError) as error:
        draw_timeline(FIGURE_4)
    names(error, "pip install matplotlib")
    code = "import mtx.view.schedule, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


# --- files and notebooks --------------------------------------------------------------------------


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(RuntimeError), replacing(path) as written:
        written.write_text("half")
        raise RuntimeError
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    link = tmp_path / "link.txt"
    link.symlink_to(path)
    with replacing(link) as written:
        assert written.suffix == ".txt"
        written.write_text("after")
    assert link.is_symlink() and path.read_text() == "after"
    with replacing("/dev/null") as written:
        assert str(written) == "/dev/null"
    with pytest.raises(UserError) as error, replacing(tmp_path / "no" / "a.txt"):
        pass
    names(error, tmp_path / "no" / "a.txt")


def test_a_notebook_shows_the_picture():
    svg = show(FIGURE_4).svg()
    assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>")
    assert "asynchronous: 9" in show(simulate(make("1f1b", microbatches=2, stages=2))).svg()


IN_A_NOTEBOOK = r"""
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_cell("import mtx; table = mtx.make('1f1b', microbatches=2, stages=2)")
table, run = shell.user_ns["table"], shell.user_ns["mtx"].simulate(shell.user_ns["table"])
for one in (table, run):
    shown, metadata = shell.display_formatter.format(one)
    assert shown["image/png"].startswith(b"\x89PNG") and metadata["image/png"]["width"] > 0
"""


def test_schedules_and_simulations_show_themselves_where_ipython_runs(tmp_path):
    pytest.importorskip("IPython", reason="IPython is absent: nothing is registered with it")
    ran = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:mtx", "-c", IN_A_NOTEBOOK],
        env=os.environ | {"IPYTHONDIR": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
