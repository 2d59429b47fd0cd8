"""kill -9 at random times while checkpoints are saved: none is ever lost or incomplete.

    python tests/drills/kill_saves.py [--kills 200] [--seed 0]

A process saves step after step, each with different parameters; it is killed, and another
continues. At any time the newest checkpoint that counts is at least the one last seen complete, and
its values are those of its step. The tests run a short form of this.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import shutil
import signal
import tempfile
import time
import warnings
from pathlib import Path

# Imported before the forks, so that a child begins to save within a tenth of a second.
import jax
import numpy as np

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.data.tokenizer import ByteTokenizer
from mtx.step.trainer import Trainer

_MOST_SAVES, _LONGEST_S = 6, 0.1  # saves that a process begins; time from the last to its kill
_START_S = 120
_KEEP = 2


def run_of(hidden: int) -> RunConfig:
    model = ModelConfig(
        layers=2, hidden=hidden, heads=4, sequence=16, vocab=256, compute_dtype="float32"
    )
    return RunConfig(model=model, layout=Layout(), global_batch=2)


def save_on_and_on(folder: Path, run: RunConfig, ready: int) -> None:
    """Save step after step; writes a byte to the pipe `ready` before the first, and whenever
    another has begun."""
    trainer = Trainer(run)
    _ = trainer.states.shapes
    checkpoints = Checkpoints(folder, keep=_KEEP)
    step = checkpoints.latest() or 0
    checkpoints.prepare(trainer)  # and JAX is started
    os.write(ready, b"r")
    parent = os.getppid()
    while os.getppid() == parent:  # not forever if the drill itself is killed
        step += 1
        state = jax.tree.map(
            lambda a, step=step: jax.device_put(np.full(a.shape, step, a.dtype)),
            trainer.states.shapes,
        )
        checkpoints.save(trainer, state, tokenizer=ByteTokenizer(), extra={"step": step})
        os.write(ready, b"s")
        if step % 3 == 0:  # otherwise the next save begins right after this one
            checkpoints.wait()


def check(folder: Path, at_least: int) -> int:
    """Read and compare every checkpoint that counts; returns the newest step."""
    checkpoints = Checkpoints(folder)  # its `find` would start JAX, and then forks hang
    newest = checkpoints.latest() or 0
    assert not checkpoints.incomplete()
    assert newest >= at_least, f"step {at_least} was there, and now {newest} is the newest"
    for step in checkpoints.steps():
        checkpoints.look(step)
        with checkpoints.open(step) as store:
            for name in store.catalog:
                values = store.read(name)
                assert (values == values.dtype.type(step)).all(), (step, name)
        assert checkpoints.extra(step) == {"step": step}
    return newest


def drill(folder: Path, *, kills: int, seed: int, hidden: int = 64) -> dict[str, int]:
    """Counts of the states in which kills found the saves."""
    rng, run = random.Random(seed), run_of(hidden)
    met = {"kills": kills, "unfinished": 0, "half_deleted": 0, "saved": 0}
    newest = 0
    for _ in range(kills):
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX has not begun to compute
            child = os.fork()
        if child == 0:
            try:
                save_on_and_on(folder, run, writing)
            finally:
                os._exit(1)
        os.close(writing)
        for _ in range(rng.randint(1, 1 + _MOST_SAVES)):
            assert select.select([reading], [], [], _START_S)[0], "the child does not save"
            assert os.read(reading, 1), "the child has failed"
        time.sleep(rng.random() * _LONGEST_S)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        os.close(reading)
        met["unfinished"] += any(folder.glob("*.orbax-checkpoint-tmp*"))
        met["half_deleted"] += (folder / "discarded").exists()
        newest = check(folder, newest)
    met["saved"] = newest
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=64, help="768 makes a save of 170 MB")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        met = drill(folder, kills=options.kills, seed=options.seed, hidden=options.hidden)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(
        f"{met['kills']} kills: {met['unfinished']} in the middle of a save, "
        f"{met['half_deleted']} in the middle of a deletion; {met['saved']} steps saved, none lost"
    )


if __name__ == "__main__":
    main()
