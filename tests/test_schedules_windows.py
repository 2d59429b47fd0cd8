"""Windows of a table: a chunk is gathered before its first F, scattered after its last B and W."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mtx.schedules.makers import make
from mtx.schedules.windows import cut, gather_windows, scatter_windows

TABLES = [("1f1b", 4, 3), ("1f1b", 2, 1), ("zb_v", 3, 2), ("breadth_first", 2, 4), ("gpipe", 3, 2)]


@pytest.mark.parametrize(("name", "stages", "virtual"), TABLES)
def test_a_chunk_is_gathered_before_its_first_f_and_scattered_after_its_last_use(
    name, stages, virtual
):
    table = make(name, microbatches=6, stages=stages, virtual=virtual).woven
    gathers, scatters = gather_windows(table), scatter_windows(table)
    for windows in (gathers, scatters):
        assert sorted(window.chunk for window in windows) == list(range(virtual))
        assert all(a.stop <= b.start or not b.ticks for a, b in pairwise(windows))
    assert [window.ticks for window in (gathers[0], scatters[-1])] == [0, 0]
    assert max(w.stop for w in gathers) <= min(w.start for w in scatters)
    used = np.concatenate([each[:, :, :, None] for each in table.tables], axis=-1)
    for window in gathers:
        assert window.stop <= used[:, window.chunk].min()
    for window in scatters:
        assert used[:, window.chunk].max() < window.start


@pytest.mark.parametrize(("name", "stages", "virtual"), TABLES)
def test_a_phase_lies_within_a_window_or_outside_of_all(name, stages, virtual):
    table = make(name, microbatches=6, stages=stages, virtual=virtual).woven
    windows = [*gather_windows(table), *scatter_windows(table)]
    phases = cut(table.phases, windows)
    ticks = [tick for phase in phases for tick in range(phase.start, phase.stop)]
    assert ticks == list(range(table.ticks))
    for window in windows:
        inside = [p for p in phases if p.start < window.stop and window.start < p.stop]
        assert sum(p.stop - p.start for p in inside) == window.ticks


def test_interleaved_1f1b_has_a_window_of_p_ticks_for_each_chunk_but_the_first():
    table = make("1f1b", microbatches=8, stages=4, virtual=3)
    assert [tuple(window) for window in gather_windows(table)] == [(0, 0, 0), (1, 0, 4), (2, 4, 8)]
    assert [window.ticks for window in scatter_windows(table)] == [4, 4, 0]
    assert [window.chunk for window in scatter_windows(table)] == [2, 1, 0]
