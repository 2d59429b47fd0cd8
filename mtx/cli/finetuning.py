"""What all tasks of `mtx finetune` share: options, epochs, and the folder of the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mtx.cli.opened import AnyLayout
from mtx.cli.options import Flag, part
from mtx.cli.output import progress
from mtx.config import Layout, ModelConfig, OptimizerConfig
from mtx.errors import UserError
from mtx.sizes import Interval, Seed, Sequences, Step, VirtualDevices

if TYPE_CHECKING:
    from mtx.checkpoint.checkpoints import Checkpoints

_MODEL = part(ModelConfig, "dropout", "lora_rank", "lora_alpha", "lora_on")
_OPTIMIZER = part(OptimizerConfig, "lr", "weight_decay")


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    # classify, choose an answer, or answer as an assistant
    task: Literal["classes", "race", "chat"] = "classes"
    # JSON lines with "text", "text_pair" if any, "label"; RACE's files; for chat, with "messages"
    train: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()  # the same, to judge the model by after each epoch
    out: str = "runs/finetuned"  # folder of the checkpoint and the results
    epochs: Step = 3  # passes over the examples
    batch: Sequences = 32  # examples per step; chat: rows of conversations
    warmup_fraction: float = 0.06  # of the steps, for warm-up; then the rate falls linearly to 0
    seed: Seed = 0  # seed for the head, the order of the examples, and dropout
    held_out: float = 0.05  # chat: fraction of the conversations to judge by if valid is not given
    # chat: the model's own if it came with one, or ChatML
    template: Literal["auto", "chatml"] = "auto"
    long: Literal["refuse", "skip"] = "refuse"  # chat: conversations too long for any row
    step: Interval | None = None  # the pre-trained checkpoint's step; by default the newest
    virtual_devices: VirtualDevices = 0  # CPU devices to create, for a machine without GPUs
    json: Flag = False  # print the results as JSON instead of a line per epoch
    model: object = field(default_factory=_MODEL)
    optimizer: object = field(default_factory=_OPTIMIZER)
    layout: Layout = field(default_factory=AnyLayout)


def by_epochs(
    train: Callable, judge: Callable[[Any], dict], save: Callable, *, steps: int, silent: bool
) -> list[dict]:
    """The results of each epoch: its training loss, and what `judge` returns for the state. `save`
    gets the state and all results so far. train: takes on_step and on_epoch, as
    `mtx.train.finetune.finetune` does."""
    import jax

    epochs, losses, silent = [], [], silent or jax.process_index() != 0
    if not silent:
        print("compiling  the step: it can take minutes", flush=True)

    def end_of_epoch(epoch: int, state) -> None:
        train_loss = sum(losses) / len(losses)
        epochs.append({"epoch": epoch, "train_loss": train_loss, **judge(state)})
        losses.clear()
        if not silent:
            numbers = ((k, v) for k, v in epochs[-1].items() if isinstance(v, float))
            said = "  ".join(f"{k.replace('_', ' ')} {v:.4f}" for k, v in numbers)
            print(f"epoch {epoch:>4}  {said}", flush=True)
        save(state, epochs)

    with progress("rows", said="training", silent=silent) as report:

        def end_of_step(step: int, loss: float) -> None:
            losses.append(loss)
            report(step, steps)

        train(on_step=end_of_step, on_epoch=end_of_epoch)
    return epochs


def out_of(name: str) -> Checkpoints:
    """The checkpoints to be written. UserError if there are some already."""
    from mtx.checkpoint.checkpoints import Checkpoints
    from mtx.launch.shared import require_shared

    require_shared(Path(name))
    out = Checkpoints(Path(name) / "checkpoints", keep=1)
    if out.steps():
        raise UserError(f"{out.directory} has a checkpoint already; use another out")
    return out


def make_folder(name: str) -> None:
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={name} cannot be made ({error.strerror}); use another") from None
