"""Short forms of the drills: kills during saves, and other numbers of processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DRILLS = Path(__file__).parent / "drills"
sys.path.insert(0, str(DRILLS))  # they are scripts, not a package

import restore_matrix  # noqa: E402


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the drill forks")
def test_kills_while_it_saves():
    command = [sys.executable, str(DRILLS / "kill_saves.py"), "--kills", "6", "--seed", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert int(re.search(r"(\d+) steps saved, none lost", ended.stdout)[1]) > 0


def test_one_process_and_two_read_each_other(tmp_path):
    """One writes on its layout, two read and write on others, one reads."""
    trainer = restore_matrix.trainer_of(restore_matrix.layouts()[3])
    restore_matrix.write(tmp_path, trainer, "origin")
    restore_matrix.run_group("relay", tmp_path, 2, 2)
    for layout in (0, 1):
        restore_matrix.read(tmp_path, trainer, restore_matrix.name_of(2, layout))
