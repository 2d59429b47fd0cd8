"""A Hugging Face directory as our canonical arrays, and canonical arrays as such a directory.

Both read and write a layer, or some rows of a table, at a time. Canonical arrays have paths such as
"embed.tokens" and, of the layers of a kind, "layers.block.mlp.up.w" [L, ...] (`mtx.huggingface`).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from mtx import files
from mtx.config import ModelConfig
from mtx.conversion.configs import config_of, kind_of, kind_of_model, read_config
from mtx.conversion.safetensors import DTYPES, SafetensorsFile, write_safetensors
from mtx.data.documents import listed
from mtx.errors import UserError
from mtx.huggingface import HuggingFace, Json, Names, Shape, is_of_layers

CONFIG = "config.json"
_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")
PART_BYTES = 64 << 20  # of a table at a time
Report = Callable[[int, int], None]  # bytes done, bytes in all
silent: Report = lambda done_bytes, all_bytes: None  # noqa: E731


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a directory holds a model."""

    dtype: str = "F32"  # as safetensors names it
    absent: tuple[str, ...] = ()  # paths of parts that the model is without
    bare: bool = False  # names are without their common prefix
    architecture: str | None = None  # the class in transformers; None: that of a whole model


class Canonical(Protocol):
    """Where canonical arrays are read from."""

    shapes: Mapping[str, Shape]

    def read(self, path: str, rows: slice) -> np.ndarray:
        """Rows of an array along its first dim, float32."""
        ...


def parts(path: str, shape: Shape) -> Iterator[slice]:
    """The rows to read at a time: a layer, PART_BYTES of a table, or all of what is neither."""
    rows = 1
    if not is_of_layers(path):
        is_table = path.count(".") == 1
        rows = max(1, PART_BYTES // (4 * math.prod(shape[1:]))) if is_table else shape[0]
    for row in range(0, shape[0], rows):
        yield slice(row, min(row + rows, shape[0]))


class HuggingFaceModel:
    """A directory with config.json and safetensors, whole or in several files. Raises UserError
    where it is no such directory, where its model is none of ours, and where a file is not whole;
    `expect` says whether the tensors are those of the model."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.config = read_json(self.directory / CONFIG)
        where = str(self.directory / CONFIG)
        self.kind: HuggingFace = kind_of(self.config, where)
        self.model, self.notes = read_config(self.config, where)
        self.names: Names = self.kind.names
        self.shapes: Mapping[str, Shape] = {}
        self.absent: tuple[str, ...] = ()  # paths of parts that it is without; from `expect`
        self._pattern = self.model.stack().pattern
        self._tensors = self._open()

    # -- what there is ----------------------------------------------------------------------------

    def _open(self) -> dict[str, tuple[SafetensorsFile, str]]:
        """The file and the name there of each tensor, by short name."""
        found: dict[str, tuple[SafetensorsFile, str]] = {}
        for path in self._paths():
            file = SafetensorsFile(path)
            for name in file.tensors:
                short = self.names.short(name)
                if short in found:
                    other, twice = found[short]
                    raise UserError(
                        f"{self.directory}: {twice} in {other.path.name} and {name} in {path.name} "
                        "are the same tensor; remove one of them"
                    )
                found[short] = file, name
        return found

    def _paths(self) -> list[Path]:
        if (self.directory / _ONE_FILE).is_file():
            return [self.directory / _ONE_FILE]
        if not (self.directory / _INDEX).is_file():
            globs = (sorted(self.directory.glob(name)) for name in _PICKLES)
            if pickles := [path.name for found in globs for path in found]:
                raise UserError(
                    f"{self.directory} has {listed(pickles)} and no safetensors: a pickle can run "
                    "code when it is read, and none is read here. Write it anew with transformers, "
                    "on a machine where you trust it: AutoModel.from_pretrained(...)"
                    ".save_pretrained(..., safe_serialization=True)"
                )
            raise UserError(
                f"{self.directory} has neither {_ONE_FILE} nor {_INDEX}; name a directory that "
                "save_pretrained has written"
            )
        weight_map = read_json(self.directory / _INDEX).get("weight_map")
        names: set[str] = set()
        for name in weight_map.values() if isinstance(weight_map, dict) else (None,):
            if not isinstance(name, str) or Path(name).name != name:
                raise UserError(
                    f"{self.directory / _INDEX}: weight_map must name files of the same directory, "
                    f"not {name!r}"
                )
            names.add(name)
        missing = sorted(name for name in names if not (self.directory / name).is_file())
        if missing:
            raise UserError(
                f"{self.directory} is without {listed(missing)}, which {_INDEX} names; download it"
            )
        return [self.directory / name for name in sorted(names)]

    @property
    def form(self) -> Form:
        """Of the widest dtype, where they differ. After `expect`."""
        there = {file.tensors[name][0] for file, name in self._tensors.values()}
        dtype = next((dtype for dtype in ("F32", "BF16", "F16") if dtype in there), "F32")
        prefixed = any(name.startswith(self.names.prefix) for _, name in self._tensors.values())
        known = self.config.get("architectures")
        architecture = known[0] if isinstance(known, list) and known else None
        return Form(
            dtype=dtype, absent=self.absent, bare=not prefixed,
            architecture=architecture if isinstance(architecture, str) else None,
        )  # fmt: skip

    def expect(self, shapes: Mapping[str, Shape]) -> None:
        """Takes the canonical arrays of these shapes to be what the tensors make up. Raises
        UserError with the names of tensors that are missing, that belong to nothing, or that have
        another shape; and where tied weights differ."""
        self.absent = tuple(part for part in self.names.optional if not self._has(part, shapes))
        self.shapes, arrays = dict(shapes), self.names.arrays(shapes, self._pattern)
        self._weights = {path: (weight, starts) for path, weight, starts in arrays}
        needed = self.names.tensors(present(self.shapes, self.absent), self._pattern)
        for twin, main in self.names.twins.items():
            if twin in self._tensors and twin not in needed and main not in self._tensors:
                self._tensors[main] = self._tensors.pop(twin)
        missing = [name for name in needed if name not in self._tensors]
        twins = set(self.names.twins) - set(needed)
        extra = [
            name
            for name in self._tensors
            if name not in needed and name not in twins and not self.names.is_ignored(name)
        ]
        misshapen = [
            f"{name} {list(there)} instead of {list(shape)}"
            for name, shape in needed.items()
            if name in self._tensors and (there := self._shape(name)) != shape
        ]
        problems = [
            f"{what}: {listed(names, 4)}"
            for what, names in (
                ("missing", missing), ("unexpected", extra), ("of another shape", misshapen)
            )
            if names
        ]  # fmt: skip
        if problems:
            raise UserError(
                f"{self.directory}: the tensors are not those of its {CONFIG} "
                f"({self.config['model_type']}, {self.model.layers} layers); {'; '.join(problems)}"
            )
        for twin in sorted(twins & self._tensors.keys()):
            self._compare(twin, self.names.twins[twin])

    def _has(self, part: str, shapes: Mapping[str, Shape]) -> bool:
        of_part = [path for path in shapes if path.startswith(f"{part}.")]
        if not of_part:
            return True
        twins = {main: twin for twin, main in self.names.twins.items()}
        weights = [weight for weight in self.names.shared if weight.leaf in of_part]
        names = [name for weight in weights for name in weight.names]
        return any(name in self._tensors or twins.get(name) in self._tensors for name in names)

    def _shape(self, name: str) -> Shape:
        file, there = self._tensors[name]
        return file.tensors[there][1]

    def _compare(self, twin: str, main: str) -> None:
        shape = self._shape(main)
        if self._shape(twin) == shape and all(
            np.array_equal(self._read(twin, rows), self._read(main, rows))
            for rows in parts("embed.tokens", shape)
        ):
            return
        raise UserError(
            f"{self.directory}: {twin} and {main} differ, and with tied weights they are the same; "
            'set "tie_word_embeddings": false where the model is not tied'
        )

    # -- what is read -----------------------------------------------------------------------------

    def _read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        file, there = self._tensors[name]
        return file.read(there, rows)

    def read(self, path: str, rows: slice) -> np.ndarray:
        """Rows of a canonical array: layers, or rows of a table. What the model is without has
        the values of a new model: norms 1 and 0, biases 0, weights drawn anew."""
        shape = self.shapes[path]
        start, stop, _ = rows.indices(shape[0])
        if path.startswith(tuple(f"{part}." for part in self.absent)):
            return _new_values(path, shape, self.model.init_std)[start:stop]
        weight, starts = self._weights[path]
        if not is_of_layers(path):
            if weight.form == "table":
                return self._read(weight.names[0], rows).astype(np.float32)
            return weight.to_ours([self._read(name) for name in weight.names], shape)[start:stop]
        array = np.empty((stop - start, *shape[1:]), np.float32)
        of_tensor = self.names.rows(path, weight, self.shapes)
        for place, prefix in enumerate(starts[start:stop]):
            tensors = [self._read(prefix + name, of_tensor) for name in weight.names]
            array[place] = weight.to_ours(tensors, shape[1:])
        return array


def _new_values(path: str, shape: Shape, std: float) -> np.ndarray:
    if path.endswith(".scale"):
        return np.ones(shape, np.float32)
    if not path.endswith(".w"):
        return np.zeros(shape, np.float32)
    stream = np.random.default_rng(list(path.encode()))
    return (std * stream.standard_normal(shape)).astype(np.float32)


def present(shapes: Mapping[str, Shape], absent: Iterable[str]) -> dict[str, Shape]:
    """The shapes without those of some parts."""
    starts = tuple(f"{part}." for part in absent)
    return {path: shape for path, shape in shapes.items() if not path.startswith(starts)}


# --- writing --------------------------------------------------------------------------------------


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
    cannot hold, OSError where the disk says so.
    """
    names, pattern = kind_of_model(model).names, model.stack().pattern
    names = replace(names, prefix="") if form.bare else names
    shapes, dtype = present(source.shapes, form.absent), form.dtype
    tensors = {names.full(name): shape for name, shape in names.tensors(shapes, pattern).items()}
    files = _divide(tensors, DTYPES[dtype].itemsize, most_file_bytes)
    places = {name: file for file, inside in files.items() for name in inside}

    def values() -> Iterator[tuple[str, np.ndarray]]:
        """Tensors, or rows of them, in the order of `tensors`."""
        done, total = 0, sum(4 * math.prod(shape) for shape in shapes.values())
        written: set[str] = set()
        for path, weight, starts in names.arrays(shapes, pattern):
            joined = [] if path in written else names.joined(path, weight)
            written.update(each for each, _ in joined)
            for rows, (each, weight) in itertools.product(parts(path, shapes[path]), joined):
                array = source.read(each, rows)
                of_layers = is_of_layers(path)
                start, array = (starts[rows.start], array[0]) if of_layers else ("", array)
                for name, tensor in zip(weight.names, weight.to_tensors(array), strict=True):
                    _refuse_overflow(name := names.full(start + name), tensor, dtype)
                    yield name, tensor
                done += array.nbytes
                report(done, total)

    for file, group in itertools.groupby(values(), lambda value: places[value[0]]):
        written = (tensor for _, tensor in group)
        write_safetensors(directory / file, files[file], written, dtype=dtype)
    if len(files) > 1:
        size = sum(math.prod(shape) for shape in tensors.values()) * DTYPES[dtype].itemsize
        write_json(directory / _INDEX, {"metadata": {"total_size": size}, "weight_map": places})
    write_json(directory / CONFIG, _whole_config(model, form, base))


def _divide(
    tensors: Mapping[str, Shape], itemsize: int, most_bytes: int
) -> dict[str, dict[str, Shape]]:
    """The tensors of each file, none of more than `most_bytes` unless one tensor is."""
    files: list[dict[str, Shape]] = [{}]
    size = 0
    for name, shape in tensors.items():
        tensor_bytes = math.prod(shape) * itemsize
        if files[-1] and size + tensor_bytes > most_bytes:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += tensor_bytes
    if len(files) == 1:
        return {_ONE_FILE: files[0]}
    count = len(files)
    return {f"model-{i:05}-of-{count:05}.safetensors": file for i, file in enumerate(files, 1)}


def _refuse_overflow(name: str, tensor: np.ndarray, dtype: str) -> None:
    if dtype == "F16" and tensor.size and (largest := np.abs(tensor).max()) > 65504:
        raise UserError(
            f"{name} has {largest:.6g}, more than float16 holds (65504); use --dtype bfloat16 or "
            "float32"
        )


def _whole_config(model: ModelConfig, form: Form, base: Json) -> Json:
    """config.json: ours, and of `base` what ours does not speak of."""
    ours = config_of(model)
    if base.get("model_type") != ours["model_type"]:
        base = {}
    dropped = ("torch_dtype", "dtype", "transformers_version", "_name_or_path")
    kept = {name: value for name, value in base.items() if name not in dropped}
    if form.architecture:
        ours["architectures"] = [form.architecture]
    if not model.sequence_is_fixed:  # the run's may be shorter than what the model can take
        longest = kept.get("max_position_embeddings", 0)
        ours["max_position_embeddings"] = max(model.sequence, longest)
    return kept | ours | {"torch_dtype": DTYPES[form.dtype].name}


# --- JSON -----------------------------------------------------------------------------------------


def read_json(path: Path) -> Json:
    """The table in a JSON file; UserError where there is none."""
    values = files.read_json(path)
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no table but a {type(values).__name__}")
    return values


def write_json(path: Path, values: Json) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
