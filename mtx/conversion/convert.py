"""A Hugging Face directory to a run with a checkpoint, and a run's checkpoint to such a directory.

The target is written beside its place under another name, compared with its source, and only then
renamed: it is there whole and compared, or not at all.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, to_dict
from mtx.config.run import RUN_FILE
from mtx.conversion.check import Check, Comparison, compare
from mtx.conversion.checkpoint import SavedParameters, canonical_shapes, write_checkpoint
from mtx.conversion.configs import kind_of_model
from mtx.conversion.huggingface import (
    CONFIG,
    Form,
    HuggingFaceModel,
    Report,
    Shape,
    read_json,
    silent,
    write_json,
)
from mtx.conversion.safetensors import DTYPES, SHORT_NAMES, DtypeName
from mtx.conversion.tokenizer import NONE, has_tokenizer, own_tokenizer, write_tokenizer
from mtx.conversion.writing import write_model
from mtx.data import Tokenizer, tokenizer_from_dict
from mtx.data.spans import find_span_vocab
from mtx.errors import UserError
from mtx.paths import user_path

CONVERTED = "converted"  # in a checkpoint's extra: nothing has been trained since
_RENAMED = {  # what a BERT lacks, as checkpoints of formats 1 and 2 note it
    "head": "head.masked", "pooler": "head.pooler", "binary": "head.binary"
}  # fmt: skip
COMPANIONS = "huggingface"  # a run's folder for Hugging Face's files beside the tensors
_COMPANION_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "tokenizer.model", "spiece.model", "chat_template.json", "chat_template.jinja",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What has been written."""

    source: Path
    target: Path
    model: ModelConfig
    parameters: int
    comparison: Comparison | None  # None if it was not asked for
    notes: tuple[str, ...]  # what one might not expect


def is_huggingface(directory: Path) -> bool:
    """Whether a directory is a Hugging Face model, as opposed to a run with checkpoints. UserError
    if it is neither."""
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise UserError(
            f"{directory} {what}; name a Hugging Face directory, or the out of a training run"
        )
    if (directory / CONFIG).is_file():
        return True
    if Checkpoints(directory).steps():
        return False
    raise UserError(
        f"{directory} has neither a {CONFIG} nor a complete checkpoint; name a Hugging Face "
        "directory, or the out of a training run"
    )


def to_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    sequence: int | None = None,
    tokenizer: str | Tokenizer | None = None,
    dtype: DtypeName | None = None,
    run: RunConfig | None = None,
    check: Check = "auto",
    report: Report = silent,
) -> Converted:
    """Makes a run directory `target`, whose checkpoint of step 0 has the parameters of the Hugging
    Face directory `source`. Training continues from there, with moments of zero.

    sequence: of the run, for a model whose parameters do not depend on it; by default all that the
    model can take. tokenizer: a tokenizer.json, a folder that holds one, or "bytes"; by default
    that of `source`. dtype: the one that the run computes in; by default that of the tensors. run:
    instead of these, the run that is to continue from there. Raises UserError if the source cannot
    be converted, the target exists already or cannot be written, and if the two sides differ.
    """
    source, target = user_path(source, "source"), user_path(target, "target")
    theirs = HuggingFaceModel(source)
    with new_directory(target) as place:
        model = model_to_train(theirs, sequence, dtype) if run is None else run.model
        theirs.expect(canonical_shapes(model))
        named, eod = None, "auto"
        if tokenizer is None or isinstance(tokenizer, str):
            named = tokenizer or (str(target / COMPANIONS) if has_tokenizer(source) else None)
            tokenizer, eod = own_tokenizer(theirs, tokenizer)
        run = run or run_to_train(model, named, eod, out=str(target))
        notes = _notes_of(theirs, tokenizer)
        step = place / "checkpoints" / "0"
        step.mkdir(parents=True)
        documents = {
            "tokenizer": NONE if tokenizer is None else tokenizer.to_dict(),
            "extra": {CONVERTED: asdict(theirs.form)},
        }
        write_checkpoint(step, run, theirs, documents=documents, report=report)
        _copy_companions(source, place / COMPANIONS)
        write_json(place / RUN_FILE, to_dict(run))
        with Checkpoints(place).open(0) as store:
            comparison = _compared(model, SavedParameters(store, model), theirs, check, target)
    return Converted(
        source=source, target=target, model=model, parameters=_count(theirs.shapes),
        comparison=comparison, notes=tuple(notes),
    )  # fmt: skip


def model_to_train(
    theirs: HuggingFaceModel, sequence: int | None = None, dtype: DtypeName | None = None
) -> ModelConfig:
    """The model of a Hugging Face directory as a run of ours has it; see `to_checkpoint`."""
    model, dtype = theirs.model, dtype or DTYPES[theirs.form.dtype].name
    if sequence not in (None, model.sequence):
        if model.sequence_is_fixed:
            raise UserError(
                f"sequence={sequence}: a {theirs.config['model_type']} has a table of "
                f"{model.sequence} positions; leave it out"
            )
        if not 1 <= sequence <= model.longest:
            raise UserError(f"sequence={sequence} must lie between 1 and {model.longest}")
    return replace(model, sequence=sequence or model.sequence, compute_dtype=dtype)


def run_to_train(model: ModelConfig, tokenizer: str | None, eod: str, *, out: str) -> RunConfig:
    """A run that continues from a trained model, with values that suit most: a low learning rate
    that falls to a tenth, 16 sequences a step. Its data are yet to be named."""
    masked = model.objective == "masked tokens"
    data = DataConfig(order="nsp" if masked else "sop", eod=eod)
    data = data if tokenizer is None else replace(data, tokenizer=tokenizer)
    return RunConfig(
        model=model, data=data, global_batch=16, steps=1000, eval_every=100, save_every=250,
        optimizer=OptimizerConfig(
            lr=2e-5, min_lr=2e-6, warmup_steps=100, b2=0.999 if masked else 0.95
        ),
        out=out,
    )  # fmt: skip


def to_huggingface(
    source: str | Path,
    target: str | Path,
    *,
    step: int | None = None,
    dtype: DtypeName | None = None,
    most_file_gb: float = 5.0,
    check: Check = "auto",
    report: Report = silent,
) -> Converted:
    """Makes a Hugging Face directory `target` with the parameters of a checkpoint of run `source`.

    step: of the checkpoint; the newest by default. dtype: of the tensors; by default float32 or,
    for a model that was converted and not trained since, the dtype it had before. Tensors go into
    files of `most_file_gb` at most; adapters are merged into the weights. Raises UserError as
    `to_checkpoint` does.
    """
    if not 0 < most_file_gb < math.inf:
        raise UserError(f"most_file_gb={most_file_gb} must be a number above 0, such as 5")
    source, target = user_path(source, "source"), user_path(target, "target")
    checkpoints = Checkpoints(source)
    run, noted = checkpoints.run(step), checkpoints.extra(step).get(CONVERTED, {})
    absent = tuple(_RENAMED.get(part, part) for part in noted.get("absent", ()))
    form = Form(**noted | {"absent": absent} | ({"dtype": SHORT_NAMES[dtype]} if dtype else {}))
    companions = checkpoints.directory.parent / COMPANIONS
    base = read_json(companions / CONFIG) if (companions / CONFIG).is_file() else {}
    with checkpoints.open(step) as store, new_directory(target) as place:
        ours, model = SavedParameters(store, run.model), run.model.merged()
        ours.expect(canonical_shapes(model))
        _copy_companions(companions, place)
        tokenizer = checkpoints.document("tokenizer", step)
        end = write_tokenizer(place, tokenizer)
        base = base or _tokens_of(model, end, tokenizer)
        write_model(
            place, model, ours, form=form, base=base, report=report,
            most_file_bytes=int(most_file_gb * 1e9),
        )  # fmt: skip
        theirs = HuggingFaceModel(place)
        theirs.expect(ours.shapes)
        rounded = SavedParameters(store, run.model, dtype=DTYPES[form.dtype])
        comparison = _compared(model, rounded, theirs, check, target)
    notes = [f"tensors are {DTYPES[form.dtype].name}"]
    if run.model.lora_rank:
        notes.append(f"adapters of rank {run.model.lora_rank} are merged into the weights")
    if not has_tokenizer(target):
        notes.append(f"{target} has no tokenizer: copy its files there")
    return Converted(
        source=source, target=target, model=model, parameters=_count(ours.shapes),
        comparison=comparison, notes=tuple(notes),
    )  # fmt: skip


def _tokens_of(model: ModelConfig, end: int | None, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says about tokens that begin and end texts."""
    if model.objective == "masked tokens" or (not model.causal and tokenizer == NONE):
        return {}
    base = {"model_type": kind_of_model(model).model_type}
    if model.causal:
        return base | {"bos_token_id": end, "eos_token_id": end}
    pad = find_span_vocab(tokenizer_from_dict(dict(tokenizer))).pad
    return base | {"eos_token_id": end, "pad_token_id": pad, "decoder_start_token_id": pad}


# --- parts of it ----------------------------------------------------------------------------------


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory that becomes `target` if nothing fails, and is removed otherwise."""
    place = target.absolute().parent / f".{target.name}.{os.getpid()}.partial"
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserError(f"{target} is there already; name another, or remove it")
        place.mkdir(parents=True)
        yield place
        os.rename(place, target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _count(shapes: Mapping[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _notes_of(theirs: HuggingFaceModel, tokenizer: Tokenizer | None) -> list[str]:
    """What could otherwise surprise whoever trains or evaluates the converted model."""
    notes = list(theirs.notes)
    if tokenizer is None:
        notes.append(
            f"{theirs.directory} has no tokenizer, so the run has none either: to train on text or "
            "to generate, convert again with --data.tokenizer FILE, or bytes"
        )
    if theirs.absent:
        notes.append(
            f"the model has no {' and no '.join(theirs.absent)}: begun anew, with random values"
        )
    return notes


def _compared(
    model: ModelConfig, ours: SavedParameters, theirs: HuggingFaceModel, check: Check, target: Path
) -> Comparison | None:
    if check == "none":
        return None
    comparison = compare(model, ours, theirs, check=check)
    if not comparison.agrees:
        raise UserError(
            f"both sides of the conversion differ: {comparison}; {target} is not written. If the "
            "files are sound, this is a mistake in the conversion: report it with the config.json"
        )
    return comparison


def _copy_companions(source: Path, target: Path) -> None:
    """Copies the files beside the tensors: config, tokenizer, how to generate."""
    for name in _COMPANION_FILES:
        if (source / name).is_file():
            target.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)
