"""Functions for notebooks, used in one line each: parameters, loss and gradients of a model on a
layout, and evaluation and conversion of a run's model.

Parameters and gradients are in canonical form here, whatever the layout: layers of each kind are
stacked [L, ...] in model order, with global shapes and no padding, as NumPy arrays on the host. So
results of two layouts can be compared. Parity tests and outside checks use the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from mtx.config import Layout, ModelConfig, RunConfig
from mtx.conversion.check import Check
from mtx.conversion.convert import Converted, is_huggingface, to_checkpoint, to_huggingface
from mtx.data.documents import read_documents
from mtx.errors import UserError, require_kind
from mtx.evaluation.choice import ChoiceScores, choice, read_race
from mtx.evaluation.cloze import ClozeScores, cloze, read_passages
from mtx.evaluation.masked import MaskedPerplexity, masked_perplexity
from mtx.evaluation.perplexity import Perplexity, is_wikitext, perplexity
from mtx.evaluation.score import load_model
from mtx.schedules.schedule import Schedule
from mtx.step.batch import check_tokens
from mtx.step.trainer import Trainer

Tree = Any


def trainer_for(
    model: ModelConfig,
    layout: Layout,
    *,
    global_batch: int,
    schedule: Schedule | None = None,
    **run: Any,
) -> Trainer:
    """The trainer of a model on a layout. run: further fields of `RunConfig`. schedule: your own
    table, in place of the one that the layout names."""
    config = RunConfig(model=model, layout=layout, global_batch=global_batch, **run)
    return Trainer(config, schedule=schedule)


def init_params(model: ModelConfig, *, seed: int = 0) -> Tree:
    """Float32 {"embed": ..., "head": ..., "layers": {kind: leaves [L, ...]}}, the parameters that
    training starts from."""
    trainer = trainer_for(model, Layout(), global_batch=1)
    return trainer.to_canonical(jax.device_get(trainer.init(seed).params))


def loss_and_gradients(
    model: ModelConfig,
    layout: Layout,
    batch: dict[str, np.ndarray],
    *,
    params: Tree | None = None,
    seed: int = 0,
    schedule: Schedule | None = None,
) -> tuple[np.ndarray, Tree]:
    """(mean loss float32 [], float32 gradients in canonical form) of one global batch.

    batch: {"tokens": int32 [G, S], "targets": int32 [G, S], "weights": float32 [G, S]}; a weight of
    0 leaves a position out. params: canonical, as from `init_params`; by default those of `seed`,
    which dropout depends on too. schedule: your own table. UserError if the batch or the model does
    not fit the layout.
    """
    require_kind("model", model, ModelConfig, "a ModelConfig, such as run.model")
    require_kind("layout", layout, Layout, "a Layout, such as run.layout")
    _check_batch(batch, model)
    trainer = trainer_for(
        model, layout, global_batch=len(batch["tokens"]), seed=seed, schedule=schedule
    )
    if params is not None:
        _check_params(params, trainer)
    masters = trainer.init().params if params is None else trainer.masters_from(params)
    return trainer.loss_and_gradients_of(masters, batch)


def evaluate(
    directory: str | Path,
    path: str | Path | Sequence[str | Path],
    *,
    task: Literal["perplexity", "lambada", "race", "mlm"] = "perplexity",
    step: int | None = None,
    layout: Layout | None = None,
) -> Perplexity | ClozeScores | ChoiceScores | MaskedPerplexity:
    """What `mtx evaluate` measures by default: the scores of a run's model (see `load_model`) on
    files. For other settings, `perplexity` and the others take texts and a loaded model."""
    names = [str(name) for name in ([path] if isinstance(path, (str, Path)) else path)]
    if task == "race":
        questions = read_race(names)
        return choice(*load_model(directory, step=step, layout=layout), questions)
    if task == "lambada":
        passages = read_passages(names)
        return cloze(*load_model(directory, step=step, layout=layout), passages)
    texts = read_documents(names).texts
    model = load_model(directory, step=step, layout=layout)
    if task == "mlm":
        return masked_perplexity(*model, texts)
    stride = min(32, model.trainer.run.model.sequence)
    return perplexity(*model, texts, stride=stride, wikitext=any(map(is_wikitext, texts)))


def convert(source: str | Path, target: str | Path, *, check: Check = "auto") -> Converted:
    """Convert a Hugging Face directory to a run of ours, or a run to their format, depending on
    `source`. `to_checkpoint` and `to_huggingface` have the further options of each direction."""
    there = is_huggingface(Path(source))
    return (to_checkpoint if there else to_huggingface)(source, target, check=check)


def _check_batch(batch: dict[str, np.ndarray], model: ModelConfig) -> None:
    require_kind("batch", batch, Mapping, "arrays by name, as of mtx.load_data(run).batch(0, 8)")
    further = ("neighbours",) if model.objective == "retrieval" else ()
    for name in ("tokens", "targets", "weights", *further):
        if name not in batch:
            raise UserError(f"a batch of {', '.join(map(str, batch)) or 'nothing'} has no {name}")
    shapes = {name: np.shape(batch[name]) for name in ("tokens", "targets", "weights")}
    if len(set(shapes.values())) > 1 or len(shapes["tokens"]) != 2:
        raise UserError(f"a batch's arrays must all be [G, S], and these are {shapes}")
    check_tokens({name: np.asarray(values) for name, values in batch.items()}, model)


def _check_params(params: Tree, trainer: Trainer) -> None:
    wanted = jax.eval_shape(trainer.to_canonical, trainer.states.shapes.params)
    shapes, wanted = (
        {jax.tree_util.keystr(path): np.shape(a) for path, a in jax.tree.leaves_with_path(tree)}
        for tree in (params, wanted)
    )
    for name in sorted(shapes.keys() | wanted.keys()):
        if shapes.get(name) != wanted.get(name):
            raise UserError(
                f"params{name} is {shapes.get(name, 'not there')}, and the model's is "
                f"{wanted.get(name, 'not there')}"
            )
