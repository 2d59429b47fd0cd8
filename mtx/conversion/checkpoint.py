"""Our checkpoints, read and written one layer at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from mtx.checkpoint.catalog import Block, catalog_of
from mtx.checkpoint.manifest import write_documents
from mtx.checkpoint.store import Part, Store, write_parts
from mtx.config import ModelConfig, RunConfig, to_dict
from mtx.conversion.huggingface import Cut, HuggingFaceModel, Report, cut_shape, parts, silent
from mtx.conversion.safetensors import DTYPES, SHORT_NAMES
from mtx.errors import UserError
from mtx.huggingface import Shape
from mtx.layers.model import Model
from mtx.sharding.fp8 import is_history
from mtx.step.optimizer import LossScale, state_arrays
from mtx.step.trainer import Trainer

_FLOAT32 = np.dtype(np.float32)
_FILE_BYTES = 1 << 30
_ADAPTER = "_lora."  # follows the name of the weight that the adapter is for


def canonical_shapes(model: ModelConfig) -> dict[str, Shape]:
    """The shapes of a model's canonical arrays, by path, as in `mtx.huggingface`; without float8's
    histories, which only we have."""
    plain = Model(replace(model.without_fp8(), vocab_multiple=1))  # no padding
    leaves: dict[str, Any] = flatten_dict(plain.shapes, sep=".")
    layers = Counter(f"layers.{kind}" for kind in plain.pattern)

    def stack(path: str) -> Shape:
        kind = ".".join(path.split(".")[:2])
        return (layers[kind],) if kind in layers else ()

    return {path: stack(path) + leaf.shape for path, leaf in leaves.items()}


class SavedParameters:
    """The parameters of a checkpoint, as canonical arrays rounded to `dtype`. Every block that is
    read is checked."""

    def __init__(
        self, store: Store, model: ModelConfig | None = None, *, dtype: np.dtype = _FLOAT32
    ):
        """model: the checkpoint's, if it may have adapters; they are merged, W + scale A B."""
        self._store, self._dtype = store, dtype
        self._lora = model if model is not None and model.lora_rank else None
        start = "params."
        shapes: Mapping[str, Shape] = {
            name.removeprefix(start): info.shape
            for name, info in self._store.catalog.items()
            if name.startswith(start) and not is_history(name)
        }
        adapters = {path for path in shapes if _ADAPTER in path} if self._lora else set()
        self.shapes: Mapping[str, Shape] = {
            path: shape for path, shape in shapes.items() if path not in adapters
        }
        self._adapted = {path.partition(_ADAPTER)[0] for path in adapters}

    def expect(self, shapes: Mapping[str, Shape]) -> None:
        """UserError if one of these arrays is missing, or has another shape or dtype."""
        for path, shape in shapes.items():
            there = self._store.catalog.get(f"params.{path}")
            if there is None or there.shape != shape or there.dtype not in self._dtypes:
                what = "none" if there is None else f"{there.dtype} {list(there.shape)}"
                raise UserError(
                    f"checkpoint {self._store.directory}: params.{path} is {what}, and its model's "
                    f"is float32 {list(shape)}; use another checkpoint"
                )

    @property
    def _dtypes(self) -> set[np.dtype]:
        """The dtypes of parameters. Frozen ones are kept in the dtype of their computations."""
        if self._lora is None:
            return {_FLOAT32}
        return {_FLOAT32, DTYPES[SHORT_NAMES[self._lora.compute_dtype]]}

    def read(self, path: str, cut: Cut) -> np.ndarray:
        """Part of an array, float32. Raises Damaged."""
        shape = self.shapes[path]
        array = self._store.read(f"params.{path}", _start(cut, shape), cut_shape(cut, shape))
        if self._lora is not None and path in self._adapted:
            array = array.astype(np.float32) + self._product(self._lora, path, cut)
        return array.astype(self._dtype, copy=False).astype(np.float32, copy=False)

    def _product(self, model: ModelConfig, path: str, cut: Cut) -> np.ndarray:
        """Part of scale A B, for some layers."""
        layers = cut[:1]

        def read(name: str) -> np.ndarray:
            shape = self._store.catalog[name].shape
            return self._store.read(name, _start(layers, shape), cut_shape(layers, shape))

        a, b = (read(f"params.{path}{_ADAPTER}{name}") for name in "ab")
        scale = np.float32(model.lora_alpha / model.lora_rank)
        products = [np.tensordot(*pair, 1) for pair in zip(a, b, strict=True)]
        return scale * np.stack(products)[(slice(None), *cut[1:])]


def _start(cut: Cut, shape: Shape) -> Shape:
    """Where a cut begins in an array of this shape."""
    return *(rows.indices(n)[0] for rows, n in zip(cut, shape)), *(0,) * (len(shape) - len(cut))


def write_checkpoint(
    directory: Path,
    run: RunConfig,
    source: HuggingFaceModel,
    *,
    documents: Mapping[str, Any],
    report: Report = silent,
) -> None:
    """Writes a checkpoint of step 0 into an empty directory: `source`'s parameters, and moments of
    zero, which all share the same bytes of one file. Raises OSError."""
    shapes = source.shapes
    moments = _moments(run, shapes)
    total, done = sum(4 * math.prod(shape) for shape in shapes.values()), 0
    blocks: list[Block] = []
    for number, group in enumerate(_files(source)):
        held = []  # frees the last group before the next is read
        for path, cut in group:
            start, values = _start(cut, shapes[path]), source.read(path, cut)
            held.append(Part(name=f"params.{path}", start=start, values=values))
        blocks += write_parts(directory / f"arrays.{number}.bin", held)
        done += sum(part.values.nbytes for part in held)
        report(done, total)
    scalars = _scalars(run)
    held = [Part(name=name, start=(), values=value) for name, value in scalars.items()]
    blocks += write_parts(directory / f"arrays.{number + 1}.bin", held)
    blocks += _write_zeros(directory / f"arrays.{number + 2}.bin", moments)
    float32 = {f"params.{path}": shape for path, shape in shapes.items()} | moments
    arrays = {name: (shape, _FLOAT32) for name, shape in float32.items()}
    arrays |= {name: (value.shape, value.dtype) for name, value in scalars.items()}
    write_documents(
        directory, step=0, processes=1, catalog=catalog_of(arrays, blocks),
        documents={"run": to_dict(run), **documents},
    )  # fmt: skip


def _files(source: HuggingFaceModel) -> list[list[tuple[str, Cut]]]:
    """What to write into each file: about as much as is held in memory at a time."""
    files: list[list[tuple[str, Cut]]] = [[]]
    file_bytes = 0
    for path, shape in source.shapes.items():
        for cut in parts(path, shape, finer=source.is_finer(path)):
            size = 4 * math.prod(cut_shape(cut, shape))
            if files[-1] and file_bytes + size > _FILE_BYTES:
                files.append([])
                file_bytes = 0
            files[-1].append((path, cut))
            file_bytes += size
    return files


def _scalars(run: RunConfig) -> dict[str, np.ndarray]:
    """The scalars of a run's first state."""
    scale = LossScale.start(run.optimizer, run.model.compute_dtype)._asdict()
    arrays = {"step": np.int32(0), "skipped": np.int32(0)}
    arrays |= {f"loss_scale.{name}": value for name, value in jax.device_get(scale).items()}
    return {name: np.asarray(value) for name, value in arrays.items()}


def _moments(run: RunConfig, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The canonical shapes of the optimizer state's arrays, by name: each is its parameter's."""
    model = run.model.without_fp8()
    trainer = Trainer(RunConfig(model=model, optimizer=run.optimizer, global_batch=1))
    names = state_arrays(trainer.states.shapes.moments)
    return {name: shapes[name.partition(".")[2]] for name in names}


def _write_zeros(path: Path, shapes: Mapping[str, Shape]) -> list[Block]:
    """Writes a file with as many zeros as the largest block has. Returns the blocks of the moments,
    all of which lie at its start. The fingerprint of zeros is 0."""
    blocks, most_bytes = [], 0
    for name, shape in shapes.items():
        for cut in parts(name.partition(".")[2], shape):
            part = cut_shape(cut, shape)
            most_bytes = max(most_bytes, 4 * math.prod(part))
            of_cut = {"name": name, "start": _start(cut, shape), "shape": part}
            blocks.append(Block(file=path.name, offset=0, fingerprint=0, **of_cut))
    with path.open("xb") as file:
        file.truncate(most_bytes)
    return blocks
