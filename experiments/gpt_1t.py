"""The main job: GPT with a trillion parameters, planned for 3,072 GPUs, and its miniature trained.

    python experiments/gpt_1t.py

prints the first page of the plan (SC'21, table 1, last row: parameters by part, layout 6 x 64 x 8,
bytes of a GPU, predicted time of a step, bubble, FLOPs, days, and the paper's 502 petaFLOP/s beside
them; `mtx plan gpt-1t --compile` asks XLA), lists the devices at hand, and trains a miniature on
them, half a million parameters with the same kind of layout: pipeline, tensor and data parallelism
at once, as far as there are devices for it, interleaved with v = 2. Without a GPU or TPU it makes
eight CPU devices. Then the model writes a few lines.

Expected time: two to four minutes on two CPU cores, half a minute of it for compiling.
Expected result: the held-out loss falls from 5.7 nats a byte (ln 256 is 5.5) to about 1.9. The same
seed gives the same losses every time. Log, config and checkpoint lie in runs/gpt_1t; if the run was
stopped, the same command continues it.

    python experiments/gpt_1t.py --steps 100 --seed 1 --out runs/other --virtual-devices 4
    python experiments/gpt_1t.py --model.layers 8 --pipe 4 --data 1 --data.path a.txt
    DATA="--data.path /data/text --data.tokenizer /data/tokenizer.json"
    srun python experiments/gpt_1t.py --full $DATA --out /shared/gpt_1t
    srun python experiments/gpt_1t.py best.toml $DATA --out /shared/gpt_1t

The last two train the full size on a cluster (SLURM, torchrun and mpirun are recognized): in the
paper's layout, and in that of a plan file, as `mtx plan gpt-1t --search --save best.toml` writes.
On devices that cannot hold it, the run is refused before anything is allocated.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from mtx.cli import OwnFields, exit_status, parse, start_devices
from mtx.config import Layout, RunConfig
from mtx.plan.fit import fit_layout
from mtx.plan.page import plan_lines
from mtx.plan.plan import is_plan_file, load_run, make_plan
from mtx.presets import preset, require_data

VIRTUAL_DEVICES = 8
PROMPTS = ("The ", "A class ", "If an object ")
TOKENS = 160  # written after each prompt


@dataclass(frozen=True, kw_only=True)
class Options:
    """GPT-1T: prints its plan, trains its miniature, or with --full the trillion parameters.

    If a plan file (.toml or .json) comes before all options, it is trained instead.
    """

    run: Annotated[RunConfig, OwnFields]
    full: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # the 1T run itself, on a cluster
    virtual_devices: int = 0  # CPU devices to make; 0: eight, where there is no GPU or TPU


def main(arguments: Sequence[str]) -> int:
    full_run = replace(preset("gpt-1t"), out="runs/gpt_1t_full")
    small_run = replace(preset("miniature"), out="runs/gpt_1t")
    file = arguments[0] if arguments and is_plan_file(arguments[0]) else None
    default = full_run if "--full" in arguments else small_run
    start = Options(run=load_run(file) if file else default)
    options = parse(list(arguments[1 if file else 0 :]), start, prog="gpt_1t.py [PLAN]")
    run, as_given = options.run, options.full or file is not None
    require_data(start.run, run, arguments)

    if not options.full and not options.virtual_devices:
        os.environ.setdefault("JAX_PLATFORMS", "")  # JAX's choice: an accelerator, if there is one
        start_devices(VIRTUAL_DEVICES)
    else:
        start_devices(options.virtual_devices)
    import jax

    from mtx.evaluation.generate import generate
    from mtx.launch.exits import leave_at_once
    from mtx.launch.startup import StartUp
    from mtx.train.loop import run_training

    if not jax.distributed.is_initialized():
        leave_at_once()

    def say(*lines: str) -> None:
        if jax.process_index() == 0:
            print(*lines, sep="\n", flush=True)

    say(*plan_lines(make_plan(run if as_given else full_run)), "")

    devices = jax.devices()
    say(f"At hand: {len(devices):,} x {devices[0].device_kind}", "")
    if run.layout == start.run.layout and not as_given:
        run = replace(run, layout=layout_for(len(devices)))
    summary = run_training(run, startup=StartUp.of_process())
    if summary.interrupted:
        return summary.exit

    texts = generate(
        summary.trainer, summary.state, summary.data.tokenizer, PROMPTS, tokens=TOKENS,
        seed=run.seed,
    )  # fmt: skip
    say("", "What it writes:", *(f"  | {line}" for text in texts for line in shown(text)), "")

    first, last = summary.first_eval_loss, summary.last_eval_loss
    fell = f"{first:.4f} -> {last:.4f} nats a token, {last / first:.0%} of the first"
    again = f"mtx generate {run.out} --prompt 'The '"
    if devices[0].platform == "cpu":
        again += f" --virtual-devices {run.layout.devices}"
    say(
        f"Held-out loss  {fell if summary.losses else f'{last:.4f} nats a token'}",
        f"Checkpoint     {summary.checkpoint or 'none'}",
        f"Log            {summary.log}",
        f"More text      {again}",
        f"Full size      on {full_run.layout.devices:,} GPUs: "
        "srun python experiments/gpt_1t.py --full --data.path TEXT --data.tokenizer FILE "
        "--out DIRECTORY",
    )
    return summary.exit


def layout_for(devices: int) -> Layout:
    """The miniature's data x pipe x tensor: 2 x 2 x 2 on 8 devices, the largest part of it that
    fits on fewer, and more replicas on more. Only a power of two of the devices is used."""
    run = preset("miniature")
    devices = 2 ** (devices.bit_length() - 1)
    if devices <= run.layout.devices:
        return fit_layout(run.layout, devices)
    data = min(devices // (run.layout.pipe * run.layout.tensor), run.global_batch)
    microbatch = min(run.layout.microbatch, run.global_batch // data)
    return replace(run.layout, data=data, microbatch=microbatch)


def shown(text: str) -> list[str]:
    """The text's lines without characters that move the cursor: an early model writes any byte."""
    return ["".join(c if c.isprintable() else "\ufffd" for c in line) for line in text.split("\n")]


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
