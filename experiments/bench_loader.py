"""How long a training step waits for its batch, with and without reading ahead.

Writes a dataset of random documents, reads it as a run at `--rate` tokens a second would, with a
sleep for a step's computation, and prints the time that a step spends in the loader: mean, worst,
and share of the step. Then it prints the highest rates at which batches can be read.

    python experiments/bench_loader.py
    python experiments/bench_loader.py --path 0.7 corpus_text_document 0.3 code_text_document
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtx.cli import exit_status, parse
from mtx.config import DataConfig, ModelConfig, RunConfig
from mtx.data import Corpus, load_data, read_ahead
from mtx.data.indexed import IndexedWriter
from mtx.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time in the loader for each step, with and without reading ahead."""

    path: tuple[str, ...] = ()  # as data.path; empty: random documents, written for this run
    tokenizer: str = "bytes"  # as data.tokenizer, of `path`
    tokens: int = 200_000_000  # of the random documents
    sequence: int = 2048
    global_batch: int = 128
    steps: int = 40
    rate: float = 1e6  # tokens a second that the model would take
    packed: bool = False


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Seconds that each step waited for its batch."""

    name: str
    step_s: float  # of the computation
    waits_s: list[float]

    @property
    def share(self) -> float:
        """Waiting, as a share of the whole step's time."""
        mean = statistics.mean(self.waits_s)
        return mean / (mean + self.step_s)


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="bench_loader.py")
    if options.steps < 2 or options.tokens < 100_000 or not options.rate > 0:
        raise UserError("steps must be at least 2, tokens 100,000, and rate above 0")
    with _dataset(options) as path:
        model = ModelConfig(
            sequence=options.sequence, layers=1, hidden=8, heads=1, compute_dtype="float32"
        )
        config = DataConfig(path=path, tokenizer=options.tokenizer, packed=options.packed)
        corpus = load_data(RunConfig(
            model=model, data=config, global_batch=options.global_batch, steps=options.steps + 1
        ))  # fmt: skip
        batch_tokens = options.global_batch * options.sequence
        print(f"data       {corpus.describe()}")
        print(
            f"step       {batch_tokens:,} tokens, {batch_tokens / options.rate:.3f} s at "
            f"{options.rate:,.0f} tokens/s, on {os.cpu_count()} CPUs"
        )
        print(f"{'':<14}{'mean wait':>12}{'worst':>12}{'share of step':>16}")
        for waits in measure(corpus, options):
            mean, worst = statistics.mean(waits.waits_s), max(waits.waits_s)
            print(
                f"{waits.name:<14}{mean * 1e3:>9.2f} ms{worst * 1e3:>9.2f} ms{waits.share:>15.2%}"
            )
        for name, threads in (("in the step", 0), ("ahead", 2)):
            tokens_s = rate_of(corpus, options, threads)
            print(f"at most    {tokens_s / 1e6:.1f} M tokens/s read {name}")
    return 0


def measure(corpus: Corpus, options: Options) -> list[Waits]:
    """The waits of `options.steps` steps, after a first that is not counted."""
    step_s = options.global_batch * options.sequence / options.rate
    ways = {"in the step": _read_now(corpus, options.global_batch), "ahead": None}
    found = []
    for name, batches in ways.items():
        with _opened(batches, corpus, options.global_batch) as batches:
            next(batches)
            waits_s = []
            for _ in range(options.steps):
                time.sleep(step_s)
                start = time.perf_counter()
                next(batches)
                waits_s.append(time.perf_counter() - start)
        found.append(Waits(name=name, step_s=step_s, waits_s=waits_s))
    return found


def rate_of(corpus: Corpus, options: Options, threads: int) -> float:
    """Tokens a second if batches are read one after the other, with no steps in between."""
    batches = None if threads else _read_now(corpus, options.global_batch)
    with _opened(batches, corpus, options.global_batch) as batches:
        next(batches)
        start = time.perf_counter()
        for _ in range(options.steps):
            next(batches)
        elapsed_s = time.perf_counter() - start
    return options.steps * options.global_batch * options.sequence / elapsed_s


@contextmanager
def _opened(batches: Iterator | None, corpus: Corpus, rows: int) -> Iterator[Iterator]:
    if batches is not None:
        yield batches
        return
    with read_ahead(corpus, 0, rows) as ahead:
        yield ahead


def _read_now(corpus: Corpus, rows: int) -> Iterator[dict[str, np.ndarray]]:
    consumed = 0
    while True:
        yield corpus.batch(consumed, rows)
        consumed += rows


@contextmanager
def _dataset(options: Options) -> Iterator[tuple[str, ...]]:
    """The names that the user gave, or that of a dataset that exists only within this context."""
    if options.path:
        yield options.path
        return
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder, "random"))
        with IndexedWriter(prefix, np.uint16) as writer:
            while writer.tokens < options.tokens:
                lengths = random.integers(20, 2000, 1000)
                tokens = random.integers(1, 256, lengths.sum(), np.uint16)
                tokens[np.cumsum(lengths) - 1] = 0
                writer.add(tokens, lengths, np.ones(len(lengths), np.int64))
        yield (prefix,)


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
