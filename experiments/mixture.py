"""A mixture of experts beside a dense model of the same FLOPs, on real text.

    python experiments/mixture.py

trains both from the same seeds on the sources of Python's library, a byte a token, on eight virtual
devices (data 2 x pipe 2 x expert 2; the dense one data 4 x pipe 2): the miniature with 8 experts, 2
of them per token, and with one MLP as wide as those two. Then a table, one row per seed:

dense, mixture   held-out loss after the last step, nats a byte
less             by how much the mixture's is lower
fullest          tokens of the fullest expert over the mean, averaged over the last tenth of steps

The report beside each mixture (`report.html` in its folder) has the heat map of load by expert and
layer. Expected time: six minutes a seed on two idle cores.
Expected result: the mixture is lower with every seed, and its fullest expert below 1.6 times the
mean. With --help-pages --steps 300 they are equal: too little text for three times the parameters.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from table1 import columns

from mtx.cli import exit_status, parse
from mtx.cli import main as mtx
from mtx.errors import UserError

_EXPERTS = (
    "--model.family", "mixtral", "--model.experts", "8", "--model.choices", "2",
    "--model.aux-weight", "0.02",
)  # fmt: skip
_WAYS = {
    "dense": ("--model.family", "llama", "--model.ffn", "{wide}", "--data", "4"),
    "mixture": (*_EXPERTS, "--model.ffn", "{half}", "--layout.expert", "2"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains a mixture and a dense model of the same FLOPs."""

    seeds: int = 3
    steps: int = 600
    ffn: int = 384  # of the dense model; an expert has half of it
    lr: float = 3e-3
    help_pages: bool = False  # train on Python's help pages, a twelfth of the text
    out: str = "runs/mixture"  # a folder for each run

    def __post_init__(self):
        if self.steps < 10 or self.seeds < 1 or self.ffn % 2:
            raise UserError(
                f"steps={self.steps} must be at least 10, seeds={self.seeds} at least 1 and "
                f"ffn={self.ffn} even"
            )


def arguments_of(way: str, seed: int, options: Options) -> list[str]:
    """The arguments of `mtx train`."""
    sizes = {"wide": options.ffn, "half": options.ffn // 2}
    return [
        "train", "miniature", "--virtual-devices", "8", "--tensor", "1", "--seed", f"{seed}",
        "--steps", f"{options.steps}", "--eval-every", f"{options.steps}",
        "--eval-batches", "32", "--optimizer.lr", f"{options.lr}", "--out",
        folder_of(way, seed, options), *(each.format(**sizes) for each in _WAYS[way]),
        *(() if options.help_pages else ("--data.path", *library())),
    ]  # fmt: skip


def library() -> list[str]:
    """The modules of Python's standard library, without packages: 4.7 MB."""
    return sorted(str(path) for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))


def folder_of(way: str, seed: int, options: Options) -> str:
    return str(Path(options.out) / f"{way}-{seed}")


def read_log(folder: str) -> tuple[float, float]:
    """(last held-out loss, the fullest expert's load averaged over the last tenth of the steps; 0
    for a dense model)"""
    rows = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "eval"]
    fullest = [row.get("imbalance") or 0.0 for row in rows if row["kind"] == "step"]
    last = fullest[-max(1, len(fullest) // 10) :]
    return losses[-1], sum(last) / len(last)


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="mixture.py")
    table = columns("seed", "dense", "mixture", "less", "fullest", left=1)
    for seed in range(1, options.seeds + 1):
        found = {}
        for way in _WAYS:
            if status := mtx(arguments_of(way, seed, options)):
                return status
            found[way] = read_log(folder_of(way, seed, options))
        (dense, _), (mixture, fullest) = found["dense"], found["mixture"]
        table.add_row(
            f"{seed}", f"{dense:.4f}", f"{mixture:.4f}", f"{dense - mixture:+.4f}", f"{fullest:.2f}"
        )
    console = Console(width=100, highlight=False)
    console.print(f"held-out nats a byte after {options.steps} steps: measured")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
