"""Fine-tuning a BERT: a few epochs on labelled examples, with a new head on its pooled output.

G rows of a batch · C outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.data import Tokenizer
from mtx.data.batches import Batch
from mtx.data.special_tokens import find_special_tokens
from mtx.errors import UserError
from mtx.evaluation.score import Report, to_host
from mtx.fields import resolve_types
from mtx.layers.bert import Classes
from mtx.sharding.parameter import with_chosen
from mtx.sizes import Seed, Sequences, Step
from mtx.step.state import TrainState
from mtx.step.trainer import Trainer
from mtx.train.examples import Example, Task, make_batch, training_batch


@dataclass(frozen=True, kw_only=True)
class Finetuning:
    """How long and how fast to train: AdamW, with linear warm-up and linear decay to 0."""

    epochs: Step = 3
    batch: Sequences = 32  # examples a step
    lr: float = 2e-5
    warmup_fraction: float = 0.06  # of the steps
    weight_decay: float = 0.01
    dropout: float = 0.1  # in the model and on its pooled output
    seed: Seed = 0  # of the head, the order of the examples, and dropout

    def __post_init__(self):
        resolve_types(self)
        if not 0 <= self.warmup_fraction < 1:
            raise UserError(f"warmup_fraction={self.warmup_fraction} must lie in [0, 1)")

    def steps(self, examples: int) -> int:
        return math.ceil(self.epochs * examples / self.batch)

    def optimizer(self, steps: int) -> OptimizerConfig:
        return OptimizerConfig(
            lr=self.lr, min_lr=0.0, rate="linear", warmup_steps=round(self.warmup_fraction * steps),
            b2=0.999, weight_decay=self.weight_decay,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A model's answers to some examples."""

    examples: int
    loss: float  # mean over the examples, nats
    accuracy: float
    answers: list[int]  # the likeliest class or option of each
    log_probabilities: list[list[float]]  # of every class or option


class FinetuneTrainer(Trainer):
    """The trainer of a BERT with a head for `task`."""

    def __init__(self, run: RunConfig, task: Task, *, mesh: Mesh | None = None):
        check_family(run.model)
        if run.layout.microbatch % task.options:
            raise UserError(
                f"microbatch={run.layout.microbatch} cannot hold whole examples of {task.options} "
                f"options; use microbatch={task.options} or a multiple of it"
            )
        if run.layout.context > 1:
            raise UserError(
                f"context={run.layout.context} must be 1 for a head on whole rows; use context=1"
            )
        super().__init__(run, mesh=mesh)
        self.task = task

    def head(self) -> Classes:
        return Classes.instead_of(
            self.run.model.stack().head, outputs=self.task.outputs, options=self.task.options,
            dropout=self.run.model.dropout,
        )  # fmt: skip

    @property
    def batch(self) -> int:
        """Examples per step."""
        return self.run.global_batch // self.task.options

    def judge(
        self, state: TrainState, examples: Sequence[Example], *, report: Report | None = None
    ) -> Judged:
        """The model's answers, without dropout. UserError if there are no examples."""
        if not examples:
            raise UserError("examples is empty; name at least one to judge the model by")
        found = []
        for first in range(0, len(examples), self.batch):
            some = examples[first : first + self.batch]
            batch = make_batch(self.task, some, self.batch)
            losses_GC, _ = to_host(self.score(state, self.place(batch)))
            found.append(-losses_GC.reshape(self.batch, self.task.answers)[: len(some)])
            if report is not None:
                report(first + len(some), len(examples))
        log_p = np.concatenate(found)
        labels = np.array([example.label for example in examples])
        answers = log_p.argmax(axis=1)
        return Judged(
            examples=len(examples),
            loss=-float(log_p[np.arange(len(labels)), labels].mean(dtype=np.float64)),
            accuracy=float((answers == labels).mean()),
            answers=answers.tolist(),
            log_probabilities=log_p.tolist(),
        )


def check_family(model: ModelConfig) -> None:
    """Raises UserError for a model that is not a BERT."""
    if model.objective != "masked tokens":
        raise UserError(f"family={model.family!r} has no pooled output; fine-tune a 'bert'")


def finetune_run(
    pretrained: RunConfig, layout: Layout, task: Task, how: Finetuning, *, examples: int
) -> RunConfig:
    """The run that fine-tunes on `examples` examples."""
    steps = how.steps(examples)
    model = replace(pretrained.model, dropout=how.dropout, attention_dropout=how.dropout)
    return replace(
        pretrained, model=model, layout=layout, optimizer=how.optimizer(steps), seed=how.seed,
        steps=steps,
        global_batch=how.batch * task.options,
    )  # fmt: skip


def start_from(trainer: Trainer, checkpoints: Checkpoints, step: int | None = None) -> TrainState:
    """The first state: a checkpoint's parameters, new ones where it has none, as for a head or
    for adapters, and nothing of its optimizer."""
    run = replace(
        checkpoints.run(step), layout=trainer.run.layout, global_batch=trainer.run.global_batch
    )
    before = Trainer(run, mesh=trainer.mesh)
    return with_pretrained(trainer, before, checkpoints.restore(before, step).params)


def with_pretrained(trainer: Trainer, before: Trainer, params) -> TrainState:
    """The first state of `trainer` with the parameters of `before`, a trainer of the same model on
    the same mesh, wherever both have them."""

    def joined(new, old):
        both = with_chosen(trainer.to_canonical(new), before.to_canonical(old))
        return trainer.states.kept(trainer.from_canonical(both))

    state = trainer.init()
    shardings = trainer.shardings(trainer.states.specs.params)
    return state._replace(params=jax.jit(joined, out_shardings=shardings)(state.params, params))


def load_finetuned(
    directory: str | Path, *, layout: Layout | None = None
) -> tuple[FinetuneTrainer, TrainState, Tokenizer]:
    """Loads what `mtx finetune` wrote to its --out, on `layout` or else on the run's own layout;
    `trainer.judge` then answers examples of `trainer.task`. UserError for any other directory.
    """
    checkpoints = Checkpoints(directory)
    task, run = finetuned_task(checkpoints), checkpoints.run()
    if task is None:
        raise UserError(f"{directory} holds no fine-tuned model; name the --out of mtx finetune")
    trainer = FinetuneTrainer(replace(run, layout=layout or run.layout), task)
    return trainer, checkpoints.restore(trainer), checkpoints.tokenizer()


def finetuned_task(checkpoints: Checkpoints, step: int | None = None) -> Task | None:
    """The task of a checkpoint's head; None if it has no fine-tuned head."""
    extra = checkpoints.extra(step)
    if not {"labels", "options"} <= extra.keys():
        return None
    tokenizer, model = checkpoints.tokenizer(step), checkpoints.run(step).model
    return Task(
        labels=tuple(extra["labels"]), options=extra["options"],
        special=find_special_tokens(tokenizer), sequence=model.sequence,
    )  # fmt: skip


def finetune(
    trainer: FinetuneTrainer,
    state: TrainState,
    train: Sequence[Example],
    *,
    on_step: Callable[[int, float], None] | None = None,
    on_epoch: Callable[[int, TrainState], None] | None = None,
) -> TrainState:
    """The state after all steps of the trainer's run.

    `on_step` gets (steps done, loss) and `on_epoch` (epochs done, state), the last one at the end.
    Raises UserError if the gradients of three steps in a row are not finite.
    """

    def batch_of(step: int) -> Batch:
        return training_batch(
            trainer.task, train, step=step, count=trainer.batch, seed=trainer.run.seed
        )

    return run_steps(
        trainer, state, batch_of, epoch_steps=len(train) / trainer.batch, on_step=on_step,
        on_epoch=on_epoch,
    )  # fmt: skip


def run_steps(
    trainer: Trainer,
    state: TrainState,
    batch_of: Callable[[int], Batch],
    *,
    epoch_steps: float,
    on_step: Callable[[int, float], None] | None = None,
    on_epoch: Callable[[int, TrainState], None] | None = None,
) -> TrainState:
    """The state after all steps of the trainer's run, as from `finetune`. batch_of: gives the batch
    of each step, from 0 on; epoch_steps: the number of steps in an epoch."""
    run, epoch, wrong = trainer.run, 0, 0
    for step in range(run.steps):
        state, metrics = trainer.train_step(state, trainer.place(batch_of(step)))
        wrong = 0 if float(metrics.finite) else wrong + 1
        if wrong == 3:
            raise UserError(
                f"the gradients of three steps in a row, to step {step + 1}, are not finite; "
                "use a lower lr, or compute_dtype='bfloat16' or 'float32'"
            )
        if on_step is not None:
            on_step(step + 1, float(metrics.loss))
        done = math.floor((step + 1) / epoch_steps)
        if on_epoch is not None and done > epoch:
            on_epoch(done, state)
        epoch = done
    return state
