"""The head of fine-tuning on every kind of layout: loss and gradients of an unsharded reference."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_bert
from parameters import drawn

from mtx.config import Layout, ModelConfig, RunConfig
from mtx.data.special_tokens import SpecialTokens
from mtx.train.examples import Task
from mtx.train.finetune import FinetuneTrainer

ROWS = 12
PRE = ModelConfig(
    family="bert", layers=4, hidden=32, heads=4, sequence=16, vocab=101, compute_dtype="float32",
    vocab_multiple=8, init_std=0.1,
)  # fmt: skip
POST = dataclasses.replace(PRE, norm_placement="post", gelu="erf")
SPECIAL = SpecialTokens(cls=97, sep=98, mask=99, pad=100)
CLASSES = Task(labels=("a", "b", "c"), special=SPECIAL, sequence=16)
CHOICE = Task(options=3, special=SPECIAL, sequence=16)


def batch_of(task: Task) -> dict[str, np.ndarray]:
    """Random rows; those of the second example do not count."""
    random = np.random.default_rng(0)
    text = np.arange(16) < random.integers(5, 17, (ROWS, 1))
    counts = np.arange(ROWS) % task.options == 0
    counts[task.options] = False
    labels = random.integers(0, 3, ROWS)
    if task.options > 1:
        labels = np.eye(3, dtype=int)[labels[: ROWS // 3]].ravel()
    return {
        "tokens": random.integers(0, 101, (ROWS, 16), dtype=np.int32),
        "types": random.integers(0, 2, (ROWS, 16), dtype=np.int32),
        "segments": text.astype(np.int32),
        "weights": (counts[:, None] & (np.arange(16) == 0)).astype(np.float32),
        "labels": labels.astype(np.int32),
    }


def mean_loss(params, batch, *, options: int, post: bool, form: str):
    """Cross-entropy of the classes of each row, or of the options of each question."""
    x = reference_bert.hidden(params, batch, post=post, form=form)
    pooler, head = params["head"]["pooler"], params["head"]["classifier"]
    logits = jnp.tanh(x[:, 0] @ pooler["w"] + pooler["b"]) @ head["w"] + head["b"]
    examples = logits.reshape(ROWS // options, -1)
    right = batch["labels"].reshape(ROWS // options, -1)
    label = right.argmax(1) if options > 1 else right[:, 0]
    chosen = jnp.take_along_axis(examples, label[:, None], axis=1)[:, 0]
    weights = batch["weights"][::options, 0]
    return ((jax.nn.logsumexp(examples, axis=1) - chosen) * weights).sum() / weights.sum()


@functools.cache
def made(model: ModelConfig, task: Task):
    """(parameters, batch, loss and gradients of the reference)"""
    run = RunConfig(model=model, layout=Layout(microbatch=ROWS), global_batch=ROWS)
    trainer = FinetuneTrainer(run, task)
    params = drawn(trainer, model.init_std, seed=3)
    batch = batch_of(task)
    loss = functools.partial(
        mean_loss, options=task.options, post=model.norm_placement == "post", form=model.gelu
    )
    return params, batch, jax.device_get(jax.jit(jax.value_and_grad(loss))(params, batch))


@pytest.mark.parametrize(
    "model, task, layout",
    [
        (PRE, CHOICE, Layout(pipe=2, tensor=4, sequence_parallel=False, microbatch=3)),
        (POST, CLASSES, Layout(data=2, pipe=2, tensor=2, microbatch=3, zero=3, stash="inputs")),
    ],
)
def test_loss_and_gradients_are_those_of_the_reference(model, task, layout):
    params, batch, want = made(model, task)
    trainer = FinetuneTrainer(RunConfig(model=model, layout=layout, global_batch=ROWS), task)
    got = trainer.loss_and_gradients_of(trainer.masters_from(params), batch)
    if task is CHOICE:  # adding the same to all options changes nothing: 0 except for rounding
        assert all(abs(tree["head"]["classifier"]["b"]).max() < 1e-7 for tree in (got[1], want[1]))
        for tree in (got[1], want[1]):
            tree["head"]["classifier"] = {"w": tree["head"]["classifier"]["w"]}
    reference.assert_same(got, want)
