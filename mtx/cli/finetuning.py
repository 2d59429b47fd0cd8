"""What all tasks of `mtx finetune` share: options, epochs, and where the result lies."""

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
    # tell classes apart, choose an answer, or answer as an assistant
    task: Literal["classes", "race", "chat"] = "classes"
    # JSON lines with "text", "text_pair" if any, "label"; RACE's files; chat: with "messages"
    train: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()  # the same, to judge the model by after each epoch
    out: str = "runs/finetuned"  # checkpoint and results
    epochs: Step = 3  # passes over the examples
    batch: Sequences = 32  # examples a step; chat: rows of conversations
    warmup_fraction: float = 0.06  # of the steps; then the rate falls linearly to 0
    seed: Seed = 0  # of the head, the order of the examples, and dropout
    held_out: float = 0.05  # chat: of the conversations, to judge by where valid is not given
    # chat: the model's own, where it came with one, or ChatML
    template: Literal["auto", "chatml"] = "auto"
    long: Literal["refuse", "skip"] = "refuse"  # chat: conversations that no row can hold
    step: Interval | None = None  # of the pre-trained checkpoint; the newest where not given
    virtual_devices: VirtualDevices = 0  # CPU devices to make, for a machine without GPUs
    json: Flag = False  # the results as JSON, instead of a line an epoch
    model: object = field(default_factory=_MODEL)
    optimizer: object = field(default_factory=_OPTIMIZER)
    layout: Layout = field(default_factory=AnyLayout)


def by_epochs(
    train: Callable, judge: Callable[[Any], dict], save: Callable, *, steps: int, silent: bool
) -> list[dict]:
    """What was reached after each epoch, by what `judge` says of the state; `save` gets the state
    and all of these. train: takes on_step and on_epoch, as `mtx.train.finetune.finetune`."""
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
    """The checkpoints that are to be made. UserError where there are some."""
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
