"""A training run killed by kill -9 at random times, N times, ends as if nothing had happened.

    python tests/drills/kill_runs.py [--kills 20] [--processes 1] [--seed 0] [--relayout]

A run in float16 (so with a changing loss scale) and with dropout, saved after every other step. It
is killed (if it has several processes, a random one of them) and started again until it is done.
Then the losses of all steps and every array of the last checkpoint are bitwise those of an
undisturbed run; and after every kill each checkpoint that counts is sound, and the newest is no
older than before. With --relayout, every start is on another layout, in float32, and the losses are
the same except for rounding.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEVICES = 4
_GONE_S = 90  # for the remaining processes to end when one is killed: a minute while compiling
_DONE_S = 900


def work(out: Path, steps: int, place: int | None) -> None:
    """One process of the run; place: the index of its layout, if any."""
    from mtx.launch.start import join_cluster, use_virtual_devices

    use_virtual_devices(DEVICES // int(os.environ.get("JAX_NUM_PROCESSES", "1")))
    join_cluster()
    from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig
    from mtx.train.loop import run_training

    layouts = [
        Layout(data=2, pipe=2, virtual=2), Layout(pipe=4), Layout(tensor=2, data=2, zero=3),
        Layout(pipe=2, tensor=2, stage_layers=(3, 1)),
    ]  # fmt: skip
    dtype = "float16" if place is None else "float32"
    model = ModelConfig(
        layers=4, hidden=64, heads=4, sequence=32, vocab=256, dropout=0.1, compute_dtype=dtype
    )
    run = RunConfig(
        model=model, layout=layouts[(place or 0) % len(layouts)], global_batch=8, steps=steps,
        optimizer=OptimizerConfig(lr=1e-3, loss_scale=2.0**24, loss_scale_window=5),
        out=str(out), eval_every=0, eval_batches=1, save_every=2,
    )  # fmt: skip
    run_training(run)


def start(
    out: Path, processes: int, steps: int, place: int | None = None
) -> list[subprocess.Popen]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    started = []
    for process in range(processes):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "JAX_COMPILATION_CACHE_DIR": str(out.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        if processes > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes),
                "JAX_PROCESS_ID": str(process),
            }  # fmt: skip
        log = (out.parent / f"{out.name}.{process}.log").open("a")
        command = [sys.executable, __file__, "--out", str(out), "--steps", str(steps)]
        command += [] if place is None else ["--layout", str(place)]
        started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return started


def finish(out: Path, processes: int, steps: int, place: int | None = None) -> float:
    """Run it to its end; returns the seconds that this took."""
    start_s = time.perf_counter()
    for process in start(out, processes, steps, place):
        if process.wait(_DONE_S):
            raise SystemExit((out.parent / f"{out.name}.0.log").read_text())
    return time.perf_counter() - start_s


def drill(
    folder: Path, *, kills: int, processes: int, seed: int, steps: int, relayout: bool
) -> str:
    from mtx.checkpoint.checkpoints import Checkpoints

    rng = random.Random(seed)
    whole, disturbed = folder / "whole", folder / "disturbed"
    first = 0 if relayout else None
    finish(whole, processes, steps, first)
    whole_s = finish(folder / "timed", processes, steps, first)  # compiled programs are on disk now
    checkpoints = Checkpoints(disturbed / "checkpoints")
    newest, killed, in_save, finished = 0, 0, 0, 0
    while killed < kills:
        started = start(disturbed, processes, steps, killed if relayout else None)
        end_s = time.perf_counter() + rng.uniform(0.3, 1.0) * whole_s
        victim = rng.choice(started)
        while time.perf_counter() < end_s and victim.poll() is None:
            time.sleep(0.01)
        if victim.poll() is not None:  # it was done: start over
            for process in started:
                process.wait(_DONE_S)
            disturbed.rename(folder / f"finished.{finished}")
            newest, finished = 0, finished + 1
            continue
        victim.send_signal(signal.SIGKILL)
        killed += 1
        for number, process in enumerate(started):
            try:
                process.wait(_GONE_S)
            except subprocess.TimeoutExpired:
                raise SystemExit(
                    f"process {number} is left:\n{(folder / f'disturbed.{number}.log').read_text()}"
                ) from None
        in_save += any(checkpoints.directory.glob("*.orbax-checkpoint-tmp*"))
        newest = check(checkpoints, newest)
    finish(disturbed, processes, steps, killed if relayout else None)
    compare(whole, disturbed, exactly=not relayout)
    same = "to rounding" if relayout else "bit for bit, as are the parameters"
    return (
        f"{killed} kills of {processes} processes, {in_save} while a checkpoint was written: the "
        f"same losses, {same}"
    )


def check(checkpoints, at_least: int) -> int:
    """Read every checkpoint that counts; returns the newest step."""
    steps = checkpoints.steps()
    for step in steps:
        checkpoints.look(step)
        with checkpoints.open(step) as store:
            for name in store.catalog:
                for _ in store.verify(name):
                    pass
    newest = max(steps, default=0)
    assert newest >= at_least, f"step {at_least} was there, and now {newest} is the newest"
    return newest


def losses(out: Path) -> dict[int, float]:
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def compare(one: Path, other: Path, *, exactly: bool) -> None:
    from mtx.checkpoint.checkpoints import Checkpoints

    if not exactly:
        for (step, wanted), loss in zip(losses(one).items(), losses(other).values(), strict=True):
            assert math.isclose(loss, wanted, rel_tol=2e-5), f"step {step}: {loss} for {wanted}"
        return
    assert losses(one) == losses(other), "the losses differ"
    catalogs = [Checkpoints(out).manifest().catalog for out in (one, other)]
    for name, info in catalogs[0].items():
        assert info.fingerprint == catalogs[1][name].fingerprint, f"{name} differs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--relayout", action="store_true")
    parser.add_argument("--layout", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        work(options.out, options.steps, options.layout)
        return
    with tempfile.TemporaryDirectory() as folder:
        said = drill(
            Path(folder), kills=options.kills, processes=options.processes, seed=options.seed,
            steps=options.steps, relayout=options.relayout,
        )  # fmt: skip
    print(said)


if __name__ == "__main__":
    main()
