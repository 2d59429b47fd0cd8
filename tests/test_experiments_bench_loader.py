"""The loader's benchmark: what it prints, on a few documents."""

from __future__ import annotations

import re

import pytest

from experiments import bench_loader
from mtx.errors import UserError

SMALL = ["--tokens", "100000", "--sequence", "16", "--global-batch", "4", "--steps", "3"]


def test_it_prints_the_waits_and_the_rates(capsys):
    assert bench_loader.main([*SMALL, "--rate", "1e6", "--packed"]) == 0
    data, step, head, *rows = capsys.readouterr().out.splitlines()
    assert data.endswith("bytes tokenizer, vocab 256; documents packed")
    assert step.startswith("step       64 tokens, 0.000 s at 1,000,000 tokens/s, on ")
    assert head.split() == ["mean", "wait", "worst", "share", "of", "step"]
    assert [row[:11] for row in rows] == [
        "in the step",
        "ahead      ",
        "at most    ",
        "at most    ",
    ]
    for row in rows[:2]:
        mean, worst, share = map(float, re.findall(r"[\d.]+(?= ms|%)", row))
        assert 0 <= mean <= worst and 0 <= share <= 100


@pytest.mark.parametrize("options", [["--steps", "1"], ["--tokens", "10"], ["--rate", "0"]])
def test_what_cannot_be_measured_is_refused(options):
    with pytest.raises(UserError, match="steps must be at least 2"):
        bench_loader.main(options)
