"""Timelines as text and as pictures."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from rich.text import Text

from mtx.errors import UserError
from mtx.pipeline.makers import make
from mtx.pipeline.schedule import Schedule
from mtx.view.schedule import LockStep, draw_timeline, op_order, timeline_markup, timeline_text

FIGURE_4 = make("1f1b", microbatches=8, stages=4, virtual=2)


def test_figure_4_as_text():
    assert timeline_text(FIGURE_4) == (
        "1f1b: 4 stages of 2 chunks, 8 microbatches, 26 ticks\n"
        "stage 0 |1a|2a|3a|4a|1b|2b|3b|4b  ·|5a  ·|6a  ·|7a 1B|8a 2B|5b 3B|6b 4B|7b 1A|8b 2A"
        "| · 3A| · 4A| · 5B|6B|7B|8B|5A|6A|7A|8A|\n"
        "stage 1 | ·|1a|2a|3a|4a|1b|2b|3b  ·|4b  ·|5a 1B|6a 2B|7a 3B|8a 4B|5b 1A|6b 2A|7b 3A"
        "|8b 4A| · 5B| · 6B|7B|8B|5A|6A|7A|8A| ·|\n"
        "stage 2 | ·| ·|1a|2a|3a|4a|1b|2b  ·|3b 1B|4b 2B|5a 3B|6a 4B|7a 1A|8a 2A|5b 3A|6b 4A"
        "|7b 5B|8b 6B| · 7B|8B|5A|6A|7A|8A| ·| ·|\n"
        "stage 3 | ·| ·| ·|1a|2a|3a|4a|1b 1B|2b 2B|3b 3B|4b 4B|5a 1A|6a 2A|7a 3A|8a 4A|5b 5B"
        "|6b 6B|7b 7B|8b 8B|5A|6A|7A|8A| ·| ·| ·|\n"
        "1a: F of microbatch 1, chunk a; 1A: its B, chunks a to b; ·: idle; |: a tick ends"
    )


def test_one_stage_as_text():
    assert timeline_text(make("gpipe", microbatches=2, stages=1)) == (
        "gpipe: 1 stage, 2 microbatches, 4 ticks\n"
        "stage 0 |1a|2a|1A|2A|\n"
        "1a: F of microbatch 1, chunk a; 1A: its B; ·: idle; |: a tick ends"
    )


@pytest.mark.parametrize(
    "name, m, p, v", [("1f1b", 12, 4, 3), ("gpipe", 5, 3, 2), ("1f1b", 4, 1, 28)]
)
def test_text_rows_hold_the_ops_in_their_order(name, m, p, v):
    schedule = make(name, microbatches=m, stages=p, virtual=v)
    letters = [chr(97 + c) if c < 26 else "a" + chr(97 + c - 26) for c in range(v)]
    _, *rows, _ = timeline_text(schedule).split("\n")
    for row, order in zip(rows, op_order(schedule), strict=True):
        cells = row.split("|", 1)[1].replace("|", " ").split()
        ops = [(op[0], *map(int, op[1:].split("."))) for op in order]
        assert [cell for cell in cells if cell != "·"] == [
            f"{mb + 1}{letters[c] if op == 'F' else letters[c].upper()}" for op, mb, c in ops
        ]


@pytest.mark.parametrize("width", [30, 60, 80, 119, 120])
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


def test_markup_is_the_text_in_colour():
    marked = Text.from_markup(timeline_markup(FIGURE_4, 80))
    assert marked.plain == timeline_text(FIGURE_4, 80)
    styles = {marked.plain[span.start : span.end].strip(): span.style for span in marked.spans}
    colours = [str(styles[cell]) for cell in ("1a", "1b", "6A", "6B", "·")]
    assert len(set(colours)) == 5


def test_lock_step_ticks_last_as_long_as_their_longest_stage():
    """p=2, m=2: F | F and F+B | F+B and B | B, with F=1 and B=2."""
    run = LockStep(schedule=make("1f1b", microbatches=2, stages=2))
    assert run.edges.tolist() == [0, 1, 4, 7, 9]
    assert run.total == 9 and run.idle_share == pytest.approx(1 - 6 / 9)
    ticks, starts = run.starts(run.schedule.backward, 0)
    assert (ticks.tolist(), starts.tolist()) == ([2, 3], [4, 7])
    ticks, starts = run.starts(run.schedule.backward, 1)
    assert (ticks.tolist(), starts.tolist()) == ([1, 2], [2, 5])


def boxes(axes) -> float:
    """The area of all ops drawn as boxes (not the idle background)."""
    area = 0.0
    for collection in axes.collections:
        for path in collection.get_paths():
            extent = path.get_extents()
            if collection.get_zorder() == 2:
                area += extent.width * extent.height
    return area


def test_picture_shows_every_op_with_its_microbatch():
    axes = draw_timeline(FIGURE_4).axes[0]
    assert boxes(axes) == pytest.approx(8 * 2 * 4 * (1 + 2) * 0.84)
    numbers = [text.get_text() for text in axes.texts if text.get_text().isdigit()]
    assert {n: numbers.count(n) for n in set(numbers)} == {str(n): 16 for n in range(1, 9)}
    assert axes.get_xlim() == (0, 57)  # (m v + p - 1)(F + B) = 19 x 3
    assert axes.get_title(loc="left").endswith("26 ticks, idle 15.8% of the time")  # 3 / 19
    legend = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert legend == ["F, chunk 0", "F, chunk 1", "B, chunk 0", "B, chunk 1", "idle"]


def test_numbers_stand_in_boxes_of_their_own_tick():
    run = LockStep(schedule=FIGURE_4)
    axes = draw_timeline(FIGURE_4).axes[0]
    drawn = {t.get_position(): t.get_text() for t in axes.texts if t.get_text().isdigit()}
    for half, length in ((FIGURE_4.forward, 1), (FIGURE_4.backward, 2)):
        for stage in range(4):
            ticks, starts = run.starts(half, stage)
            for tick, start in zip(ticks, starts, strict=True):
                number = str(half.microbatch[tick, stage] + 1)
                assert drawn[start + length / 2, stage] == number


def test_a_large_schedule_is_drawn_as_shares():
    schedule = make("1f1b", microbatches=512, stages=64)
    axes = draw_timeline(schedule).axes[0]
    (mesh,) = axes.collections
    colours = mesh.get_array()  # [stages, bins, RGB]
    assert colours.shape[0] == 64 and colours.shape[1] <= 1000
    blue, both, green, idle = (p.get_facecolor()[:3] for p in axes.figure.legends[0].get_patches())
    np.testing.assert_allclose(colours[0, 0], blue, atol=0.01)
    np.testing.assert_allclose(colours[32, colours.shape[1] // 2], both, atol=0.01)
    np.testing.assert_allclose(colours[0, -1], green, atol=0.01)
    np.testing.assert_allclose(colours[63, 0], idle, atol=0.01)
    assert [text for text in axes.texts if text.get_text().isdigit()] == []


def test_ticks_in_which_nobody_works_take_no_time_in_a_picture():
    small = make("1f1b", microbatches=2, stages=2)
    late = Schedule.from_ticks("late", small.forward_ticks, small.backward_ticks + 900)
    run = LockStep(schedule=late)
    assert run.total == 3 * 1 + 3 * 2
    many = make("1f1b", microbatches=600, stages=2)
    late = Schedule.from_ticks("late", many.forward_ticks, many.backward_ticks + 900)
    (mesh,) = draw_timeline(late).axes[0].collections
    assert mesh.get_array().ndim == 3 and np.isfinite(mesh.get_array()).all()


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
    with pytest.raises(UserError, match="must end with one of .svg, .png, .pdf"):
        draw_timeline(FIGURE_4, tmp_path / "timeline.txt")
    with pytest.raises(UserError, match="backward_time=0 must be above 0"):
        draw_timeline(FIGURE_4, backward_time=0)


def test_without_matplotlib_the_text_works_and_the_picture_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        draw_timeline(FIGURE_4)
    code = "import mtx.view.schedule, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
