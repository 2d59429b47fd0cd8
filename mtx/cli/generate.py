"""`mtx generate`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtx.cli.options import parse, split_name, start_devices
from mtx.errors import UserError


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    prompt: tuple[str, ...] = ("",)  # one text or several; "" begins a new document
    tokens: int = 200  # at most, after each prompt
    temperature: float = 0.8  # 0: always the most likely token
    seed: int = 0
    virtual_devices: int = 0  # CPU devices to make, for a machine without GPUs


def generate_command(arguments: list[str]) -> None:
    """Let a trained model go on from a text.

    RUN_DIR is the --out of a training run. Its newest checkpoint is read on its own layout, or on
    a part of that where there are fewer devices.
    """
    directory, rest = split_name(arguments)
    prog = "mtx generate RUN_DIR"
    options = parse(rest, GenerateOptions(), prog=prog, about=generate_command)
    if directory is None:
        raise UserError("mtx generate RUN_DIR: name the directory of a training run (its --out)")
    start_devices(options.virtual_devices)
    import jax

    from mtx.evaluate.generate import generate
    from mtx.train.checkpoint import Checkpoints
    from mtx.train.fit import fit_layout
    from mtx.train.step import Trainer

    checkpoints = Checkpoints(directory)
    run = checkpoints.run()
    trainer = Trainer(replace(run, layout=fit_layout(run.layout, jax.device_count())))
    texts = generate(
        trainer,
        checkpoints.restore(trainer),
        checkpoints.tokenizer(),
        options.prompt,
        tokens=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    if jax.process_index() == 0:
        print("\n\n".join(texts))
