"""Checkpoints against the disk: saving and restoring beside a plain sequential write and read.

    python -m experiments.bench_checkpoint --directory /scratch --gb 1

The same bytes, on the same disk, in one run. Every write ends with fsync and replaces the previous
file; before every read the files are dropped from the page cache. A shared disk slows down after a
burst: a gigabyte right after another can take three times as long. So every round has a different
order, each way comes first as often as the others, and medians are shown. `delay` is how long the
training loop waits for a save to begin: the copy of the state to the host. At the end a matrix
product is timed alone and while a checkpoint is written.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtx.cli import exit_status, parse
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError
from mtx.launch.start import use_virtual_devices

_SLICE_BYTES = 16 << 20  # of the plain write and read
_REST_S = 0.5  # pause in which memory is freed in the background


@dataclass(frozen=True, kw_only=True)
class Options:
    """Checkpoints against the disk: saving and restoring beside a plain write and read."""

    directory: str = tempfile.gettempdir()  # where to write
    gb: float = 1.0  # size of the state
    rounds: int = 6  # orders of writing and of reading: a multiple of 6 is fair to all
    devices: int = 4  # virtual CPU devices, if there is no GPU


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="bench_checkpoint.py")
    for name in ("gb", "rounds"):
        if not getattr(options, name) > 0:
            raise UserError(f"{name}={getattr(options, name)} must be above 0")
    if not Path(options.directory).is_dir():
        raise UserError(f"directory={options.directory} is not there; make it first")
    use_virtual_devices(options.devices)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        measure(Path(folder), options.gb * 1e9, options.rounds)
    return 0


def measure(folder: Path, state_bytes: float, rounds: int) -> None:
    import jax

    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.step.trainer import Trainer

    devices = len(jax.devices())
    pipe = 2 if devices >= 2 else 1
    layout = Layout(data=devices // pipe, pipe=pipe, virtual=2 if pipe > 1 else 1)
    layers = 8  # of about 12 hidden^2 parameters, each with two moments, in float32
    hidden = max(1, round((state_bytes / 12 / 12 / layers) ** 0.5 / 16)) * 16
    model = ModelConfig(
        layers=layers, hidden=hidden, heads=16, sequence=64, vocab=256, compute_dtype="float32"
    )
    run = RunConfig(model=model, layout=layout, global_batch=16)
    trainer, other = Trainer(run), Trainer(RunConfig(model=model, global_batch=16))
    state = jax.block_until_ready(trainer.init())
    keep = Checkpoints(folder / "checkpoints", keep=1)
    keep.prepare(trainer)
    elsewhere = Checkpoints(folder / "checkpoints")
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable):
        start_s = time.perf_counter()
        result = work()
        times.setdefault(name, []).append(time.perf_counter() - start_s)
        return result

    def save() -> None:
        timed("delay", lambda: keep.save(trainer, state, tokenizer=ByteTokenizer()))
        keep.wait()

    save()
    times.clear()
    size = keep.manifest().size_bytes
    source = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    plain = folder / "plain"

    def write() -> None:
        write_plain(folder / "new", source)
        (folder / "new").replace(plain)

    def read(name: str, work: Callable) -> None:
        drop(plain, *(folder / "checkpoints" / "0").iterdir())
        timed(name, work)

    writers = (lambda: timed("plain write", write), lambda: timed("save", save))
    readers = (
        lambda: read("plain read", lambda: read_plain(plain)),
        lambda: read("restore", lambda: restore(keep, trainer)),
        lambda: read("restore, other layout", lambda: restore(elsewhere, other)),
    )
    for number in range(rounds):
        for order in (writers, readers):
            for place in range(len(order)):
                time.sleep(_REST_S)
                order[(number + place) % len(order)]()
    medians = {name: float(np.median(values)) for name, values in times.items()}
    kind = jax.devices()[0].device_kind
    print(
        f"state of {size / 1e9:.2f} GB on {devices} x {kind}, data {layout.data} x pipe "
        f"{layout.pipe}, v = {layout.virtual}; medians of {rounds} rounds"
    )
    print(f"{'':<24}{'s':>8}{'GB/s':>8}{'of plain':>10}")
    for name, base in (
        ("plain write", None), ("save", "plain write"), ("delay", None), ("plain read", None),
        ("restore", "plain read"), ("restore, other layout", "plain read"),
    ):  # fmt: skip
        share = f"{medians[base] / medians[name]:>10.0%}" if base else ""
        print(f"{name:<24}{medians[name]:>8.3f}{size / 1e9 / medians[name]:>8.2f}{share}")
    print(f"the step waits for {medians['delay'] / medians['save']:.1%} of a save's time")
    beside(keep, trainer, state)


def restore(checkpoints, trainer):
    import jax

    return jax.block_until_ready(checkpoints.restore(trainer))


def beside(checkpoints, trainer, state) -> None:
    """Time a matrix product alone, and while a save is in progress."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((1024, 1024))
    step = jax.jit(lambda x: x @ x / 1024)

    def median_s(until: Callable[[], bool]) -> float:
        seconds = []
        while not until():
            start_s = time.perf_counter()
            step(x).block_until_ready()
            seconds.append(time.perf_counter() - start_s)
        return float(np.median(seconds))

    step(x).block_until_ready()
    end_s = time.perf_counter() + 1
    alone_s = median_s(lambda: time.perf_counter() > end_s)
    path = checkpoints.save(trainer, state._replace(step=state.step + 1), tokenizer=ByteTokenizer())
    beside_s = median_s(path.exists)
    checkpoints.wait()
    print(f"a product of 1,024 x 1,024: {alone_s * 1e3:.1f} ms alone, {beside_s * 1e3:.1f} ms "
          "while a checkpoint is written")  # fmt: skip


def write_plain(path: Path, source: np.ndarray) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(source), _SLICE_BYTES):
            file.write(memoryview(source[start : start + _SLICE_BYTES]))
        os.fsync(file.fileno())


def read_plain(path: Path) -> None:
    buffer = bytearray(_SLICE_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def drop(*paths: Path) -> None:
    """Drop the files from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
