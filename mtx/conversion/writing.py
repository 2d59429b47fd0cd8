"""Canonical arrays as a Hugging Face directory: config.json and safetensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from mtx.config import ModelConfig
from mtx.conversion.configs import config_of, kind_of_model
from mtx.conversion.huggingface import (
    CONFIG,
    INDEX,
    ONE_FILE,
    Canonical,
    Form,
    Report,
    float32_of,
    parts,
    present,
    silent,
    write_json,
)
from mtx.conversion.safetensors import DTYPES, write_safetensors
from mtx.errors import UserError
from mtx.huggingface import Json, Shape, is_of_layers


def write_model(
    directory: Path,
    model: ModelConfig,
    source: Canonical,
    *,
    form: Form,
    base: Json,
    most_file_bytes: int = 5_000_000_000,
    report: Report = silent,
) -> None:
    """Writes config.json and the safetensors of `source` into an empty directory.

    base: a config.json whose other values are kept. Raises UserError for a value that float16
    cannot hold, OSError if writing fails.
    """
    pattern = model.stack().pattern
    names = kind_of_model(model).names_of(source.shapes, pattern)
    names = replace(names, prefix="") if form.bare else names
    shapes, dtype = present(source.shapes, form.absent), form.dtype
    tensors = {names.full(name): shape for name, shape in names.tensors(shapes, pattern).items()}
    always = float32_of(names, shapes, pattern).items()
    float32 = {
        names.full(name) for name, leaf in always if form.float32 is None or leaf in form.float32
    }
    sizes = {
        name: math.prod(shape) * DTYPES["F32" if name in float32 else dtype].itemsize
        for name, shape in tensors.items()
    }
    files = _divide(tensors, sizes, most_file_bytes)
    places = {name: file for file, inside in files.items() for name in inside}

    def values() -> Iterator[tuple[str, np.ndarray]]:
        """Tensors, or rows of them, in the order of `tensors`."""
        done, total = 0, sum(4 * math.prod(shape) for shape in shapes.values())
        done_paths: set[str] = set()
        for path, weight, starts in names.arrays(shapes, pattern):
            joined = [] if path in done_paths else names.joined(path, weight)
            done_paths.update(each for each, _ in joined)
            cuts = parts(path, shapes[path], finer=weight.in_parts)
            for cut, (each, weight) in itertools.product(cuts, joined):
                array = source.read(each, cut)
                start = ""
                if is_of_layers(path):
                    start, array = starts[cut[0].start], array[0]
                own = weight.tensor_names(shapes[each][1:])
                if weight.experts:
                    own = own[cut[1].start * len(weight.names) :][: len(array) * len(weight.names)]
                for name, tensor in zip(own, weight.to_tensors(array), strict=True):
                    _refuse_overflow(name := names.full(start + name), tensor, dtype)
                    yield name, tensor
                done += array.nbytes
                report(done, total)

    for file, group in itertools.groupby(values(), lambda value: places[value[0]]):
        written = (tensor for _, tensor in group)
        write_safetensors(directory / file, files[file], written, dtype=dtype, float32=float32)
    if len(files) > 1:
        size = {"total_size": sum(sizes.values())}
        write_json(directory / INDEX, {"metadata": size, "weight_map": places})
    write_json(directory / CONFIG, _whole_config(model, form, base))


def _divide(
    tensors: Mapping[str, Shape], sizes: Mapping[str, int], most_bytes: int
) -> dict[str, dict[str, Shape]]:
    """The tensors of each file; no file has more than `most_bytes`, unless one tensor has."""
    files: list[dict[str, Shape]] = [{}]
    size = 0
    for name, shape in tensors.items():
        tensor_bytes = sizes[name]
        if files[-1] and size + tensor_bytes > most_bytes:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += tensor_bytes
    if len(files) == 1:
        return {ONE_FILE: files[0]}
    count = len(files)
    return {f"model-{i:05}-of-{count:05}.safetensors": file for i, file in enumerate(files, 1)}


def _refuse_overflow(name: str, tensor: np.ndarray, dtype: str) -> None:
    if dtype == "F16" and tensor.size and (largest := np.abs(tensor).max()) > 65504:
        raise UserError(
            f"{name} has {largest:.6g}, more than float16 holds (65504); use --dtype bfloat16 or "
            "float32"
        )


def _whole_config(model: ModelConfig, form: Form, base: Json) -> Json:
    """config.json: our values, and those of `base` for which we have none."""
    ours = config_of(model)
    if base.get("model_type") != ours["model_type"]:
        base = {}
    dropped = ("torch_dtype", "dtype", "transformers_version", "_name_or_path")
    kept = {name: value for name, value in base.items() if name not in dropped}
    if form.architecture:
        ours["architectures"] = [form.architecture]
    for part, table in ours.items():  # a model made of several has a table for each
        if isinstance(table, dict) and "model_type" in table:
            ours[part] = (kept.get(part) or {}) | table
    ours_of_text, kept_of_text = (each.get("text_config") or each for each in (ours, kept))
    if not model.sequence_is_fixed:  # the run's may be shorter than what the model can take
        longest = kept_of_text.get("max_position_embeddings", 0)
        ours_of_text["max_position_embeddings"] = max(model.sequence, longest)
    return kept | ours | {"torch_dtype": DTYPES[form.dtype].name}
