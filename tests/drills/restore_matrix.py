"""Every layout and number of processes reads checkpoints of all others, bit for bit.

    python tests/drills/restore_matrix.py [--processes 1 2 4] [--layouts 8]

Four virtual devices, divided over the processes. First each group of processes writes the same
state on every layout; then each reads what all have written, on every layout, and compares the
values it holds with the first one's bytes. The tests run a few pairs of this.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

DEVICES = 4
PROCESSES = (1, 2, 4)


def layouts() -> list:
    from mtx.config import Layout

    return [
        Layout(tensor=4),
        Layout(pipe=2, virtual=2, tensor=2),
        Layout(data=4),
        Layout(data=2, pipe=2, stage_layers=(5, 3)),
        Layout(pipe=4),
        Layout(data=2, tensor=2, zero=3),
        Layout(pipe=2, virtual=4, data=2),
        Layout(pipe=4, schedule="dualpipe_v", virtual=2),
        Layout(data=2, pipe=2, zero=3),
    ]


def trainer_of(layout):
    from mtx.config import ModelConfig, RunConfig
    from mtx.step.trainer import Trainer

    # 250 is not a multiple of 4 x 128, nor 20 of 8: the vocabulary and some masters are padded.
    model = ModelConfig(
        layers=8, hidden=20, heads=4, sequence=16, vocab=250, compute_dtype="float32"
    )
    return Trainer(RunConfig(model=model, layout=layout, global_batch=16))


def name_of(processes: int, layout: int) -> str:
    return f"{processes}_processes_layout_{layout}"


# -- one process -----------------------------------------------------------------------------------


def work(phase: str, folder: Path, count: int) -> None:
    from mtx.launch.start import use_virtual_devices

    processes = int(os.environ.get("JAX_NUM_PROCESSES", "1"))
    use_virtual_devices(DEVICES // processes)
    from mtx.launch.start import join_cluster

    join_cluster()
    import jax

    for place, layout in enumerate(layouts()[:count]):
        trainer = trainer_of(layout)
        if phase != "read":
            write(folder, trainer, name_of(processes, place))
        if phase == "relay":  # both in one process, for the tests
            read(folder, trainer, "origin")
        if phase != "read":
            continue
        for written in sorted(path for path in folder.iterdir() if path.name != "origin"):
            read(folder, trainer, written.name)
            if jax.process_index() == 0:
                print(f"{written.name} -> {name_of(processes, place)}: equal", flush=True)


def write(folder: Path, trainer, name: str) -> None:
    """Save the origin's state as `name`, or the origin itself."""
    if name == "origin":
        save(folder / name, trainer, random_state(trainer))
        return
    save(folder / name, trainer, restored(folder / "origin", trainer)[0])


def read(folder: Path, trainer, name: str) -> None:
    """Restore `name`, and compare the parts that this process holds with the origin's bytes."""
    state, snapshot = restored(folder / name, trainer)
    compare(folder / "origin", folder / name, snapshot.take(state))


def random_state(trainer):
    import jax
    import numpy as np

    rng = np.random.default_rng(0)

    def draw(shape, sharding):
        values = rng.standard_normal(shape.shape).astype(shape.dtype)
        return jax.device_put(values, sharding)

    state = jax.tree.map(draw, trainer.states.shapes, trainer.shardings(trainer.states.specs))
    return state._replace(
        step=jax.device_put(np.int32(7), state.step.sharding),
        skipped=jax.device_put(np.int32(2), state.step.sharding),
    )


def save(folder: Path, trainer, state) -> None:
    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.data.tokenizer import ByteTokenizer

    with Checkpoints(folder) as checkpoints:
        checkpoints.save(trainer, state, tokenizer=ByteTokenizer())


def restored(folder: Path, trainer):
    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.checkpoint.snapshot import Snapshot

    return Checkpoints(folder).restore(trainer), Snapshot(trainer)


def compare(origin: Path, written: Path, parts) -> None:
    """Compare this process's parts with the origin's bytes, and the fingerprints of both."""
    from mtx.checkpoint.checkpoints import Checkpoints

    ours, theirs = Checkpoints(origin), Checkpoints(written)
    one, two = ours.manifest().catalog, theirs.manifest().catalog
    assert {n: a.fingerprint for n, a in one.items()} == {n: a.fingerprint for n, a in two.items()}
    with ours.open() as store:
        for part in parts:
            there = store.read(part.name, part.start, part.values.shape)
            assert there.tobytes() == part.values.tobytes(), f"{written}: {part.name} {part.start}"


# -- all of them -----------------------------------------------------------------------------------


def run_group(phase: str, folder: Path, processes: int, count: int) -> str:
    """Run one phase in this many processes; returns the output of the first."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    started = []
    for process in range(processes):
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        if processes > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(processes),
                "JAX_PROCESS_ID": str(process),
            }
        command = [sys.executable, __file__, "--phase", phase, "--folder", str(folder)]
        started.append(
            subprocess.Popen(
                [*command, "--layouts", str(count)], env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    printed = [process.communicate(timeout=1800)[0] for process in started]
    for process, text in zip(started, printed):
        if process.returncode:
            raise SystemExit(f"{phase} with {processes} processes failed:\n{text}")
    return printed[0]


def main(arguments: list[str] | None = None) -> int:
    """Run the matrix; returns the number of pairs that were equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=PROCESSES)
    parser.add_argument("--layouts", type=int, default=len(layouts()), help="the first so many")
    parser.add_argument("--phase", choices=("write", "read", "relay"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.phase:
        work(options.phase, options.folder, options.layouts)
        return 0
    from mtx.launch.start import use_virtual_devices

    use_virtual_devices(DEVICES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder, trainer_of(layouts()[0]), "origin")
        for phase, processes in itertools.product(("write", "read"), options.processes):
            text = run_group(phase, folder, processes, options.layouts)
            print(text, end="")
    pairs = (len(options.processes) * options.layouts) ** 2
    print(f"{pairs} pairs of {options.layouts} layouts and {options.processes} processes: equal")
    return pairs


if __name__ == "__main__":
    main()
