"""A Hugging Face directory as our canonical arrays (`mtx.conversion.writing`: the other way).

Both read and write a layer, or some rows of a table, at a time. Canonical arrays have paths such as
"embed.tokens" and, for the layers of a kind, "layers.block.mlp.up.w" [L, ...] (`mtx.huggingface`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mtx import files
from mtx.conversion.configs import kind_of, read_config
from mtx.conversion.safetensors import SafetensorsFile
from mtx.data.documents import listed
from mtx.errors import UserError
from mtx.huggingface import HuggingFace, Json, Names, Shape, Weight, is_of_layers

CONFIG = "config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")
PART_BYTES = 64 << 20  # of a table at a time
Cut = tuple[slice, ...]  # of an array's first dims: layers, then maybe rows of a layer; or rows
Report = Callable[[int, int], None]  # bytes done, bytes in all
silent: Report = lambda done_bytes, all_bytes: None  # noqa: E731


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a directory holds a model."""

    dtype: str = "F32"  # as safetensors names it
    absent: tuple[str, ...] = ()  # paths of parts that the model lacks
    bare: bool = False  # names lack their common prefix
    architecture: str | None = None  # the class in transformers; None: that of a whole model
    # Leaves with `mtx.huggingface.Weight.float32` that are float32 whatever `dtype` is; None: all.
    float32: Sequence[str] | None = None


class Canonical(Protocol):
    """Where canonical arrays are read from."""

    shapes: Mapping[str, Shape]

    def read(self, path: str, cut: Cut) -> np.ndarray:
        """Part of an array, float32."""
        ...


def parts(path: str, shape: Shape, *, finer: bool = False) -> Iterator[Cut]:
    """The cuts to read one at a time: a layer, PART_BYTES of a table, or all of any other array.
    finer: PART_BYTES of a layer's rows, usually experts, instead of a layer."""
    if not is_of_layers(path):
        is_table = path.count(".") == 1
        for rows in _rows(shape, PART_BYTES if is_table else None):
            yield (rows,)
        return
    for layer in range(shape[0]):
        one = slice(layer, layer + 1)
        if not finer:
            yield (one,)
            continue
        for rows in _rows(shape[1:], PART_BYTES):
            yield one, rows


def _rows(shape: Shape, most_bytes: int | None) -> Iterator[slice]:
    """All rows, at most `most_bytes` of float32 at a time; None: all at once."""
    rows = shape[0]
    if most_bytes is not None:
        rows = max(1, most_bytes // (4 * math.prod(shape[1:])))
    for row in range(0, shape[0], rows):
        yield slice(row, min(row + rows, shape[0]))


def cut_shape(cut: Cut, shape: Shape) -> Shape:
    """The shape of a cut of an array of this shape."""
    return *(len(range(*rows.indices(n))) for rows, n in zip(cut, shape)), *shape[len(cut) :]


class HuggingFaceModel:
    """A directory with config.json and safetensors, in one file or several. Raises UserError if it
    is not such a directory, if its model is none of ours, and if a file is incomplete; `expect`
    checks that the tensors are those of the model."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.config = read_json(self.directory / CONFIG)
        where = str(self.directory / CONFIG)
        self.kind: HuggingFace = kind_of(self.config, where)
        self.model, self.notes = read_config(self.config, where)
        self.names: Names = self.kind.names
        self.shapes: Mapping[str, Shape] = {}
        self.absent: tuple[str, ...] = ()  # paths of parts that it lacks; set by `expect`
        self._tensors = self._open()
        self.model = self.kind.as_there(self.model, self._tensors)
        self._pattern = self.model.stack().pattern

    # -- what there is ----------------------------------------------------------------------------

    def _open(self) -> dict[str, tuple[SafetensorsFile, str]]:
        """Each tensor's file, and its name in that file, by short name."""
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
        if (self.directory / ONE_FILE).is_file():
            return [self.directory / ONE_FILE]
        if not (self.directory / INDEX).is_file():
            globs = (sorted(self.directory.glob(name)) for name in _PICKLES)
            if pickles := [path.name for found in globs for path in found]:
                raise UserError(
                    f"{self.directory} has {listed(pickles)} and no safetensors: a pickle can run "
                    "code when it is read, and none is read here. Write it anew with transformers, "
                    "on a machine where you trust it: AutoModel.from_pretrained(...)"
                    ".save_pretrained(..., safe_serialization=True)"
                )
            raise UserError(
                f"{self.directory} has neither {ONE_FILE} nor {INDEX}; name a directory that "
                "save_pretrained has written"
            )
        weight_map = read_json(self.directory / INDEX).get("weight_map")
        names: set[str] = set()
        for name in weight_map.values() if isinstance(weight_map, dict) else (None,):
            if not isinstance(name, str) or Path(name).name != name:
                raise UserError(
                    f"{self.directory / INDEX}: weight_map must name files of the same directory, "
                    f"not {name!r}"
                )
            names.add(name)
        missing = sorted(name for name in names if not (self.directory / name).is_file())
        if missing:
            raise UserError(
                f"{self.directory} is without {listed(missing)}, which {INDEX} names; download it"
            )
        return [self.directory / name for name in sorted(names)]

    @property
    def form(self) -> Form:
        """How the directory holds the model; call after `expect`. Its dtype is the widest if they
        differ, not counting what is always float32."""
        always = float32_of(self.names, self.shapes, self._pattern)
        dtypes = {short: file.tensors[name][0] for short, (file, name) in self._tensors.items()}
        there = {dtype for short, dtype in dtypes.items() if short not in always}
        float32 = {leaf for short, leaf in always.items() if dtypes[short] == "F32"}
        dtype = next((dtype for dtype in ("F32", "BF16", "F16") if dtype in there), "F32")
        prefixed = any(name.startswith(self.names.prefix) for _, name in self._tensors.values())
        known = self.config.get("architectures")
        architecture = known[0] if isinstance(known, list) and known else None
        return Form(
            dtype=dtype, absent=self.absent, bare=not prefixed,
            architecture=architecture if isinstance(architecture, str) else None,
            float32=sorted(float32),
        )  # fmt: skip

    def expect(self, shapes: Mapping[str, Shape]) -> None:
        """Requires that the tensors make up canonical arrays of these shapes. Raises UserError with
        the names of tensors that are missing, that belong to nothing, or that have another shape;
        and if tied weights differ."""
        self.names = self.kind.names_of(shapes, self._pattern)
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
            for (rows,) in parts("embed.tokens", shape)
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

    def is_finer(self, path: str) -> bool:
        """Whether part of a layer can be read."""
        return self._weights[path][0].in_parts

    def read(self, path: str, cut: Cut) -> np.ndarray:
        """Part of a canonical array: layers, or rows of a table. Parts that the model lacks have
        the values of a new model: norms 1 and 0, biases 0, weights drawn at random."""
        shape, rows = self.shapes[path], cut[0]
        start, stop, _ = rows.indices(shape[0])
        if path.startswith(tuple(f"{part}." for part in self.absent)):
            return _new_values(path, shape, self.model.init_std)[start:stop]
        weight, starts = self._weights[path]
        if not is_of_layers(path):
            if weight.form == "table":
                return self._read(weight.names[0], rows).astype(np.float32)
            return weight.to_ours([self._read(name) for name in weight.names], shape)[start:stop]
        array = np.empty(cut_shape(cut, shape), np.float32)
        inner = cut[1] if len(cut) > 1 else slice(None)
        of_tensors = self.names.rows(path, weight, self.shapes) if weight.joined else inner
        for place, prefix in enumerate(starts[start:stop]):
            array[place] = self._of_layer(prefix, weight, shape[1:], inner, of_tensors)
        return array

    def _of_layer(
        self, prefix: str, weight: Weight, shape: Shape, rows: slice, of_tensors: slice
    ) -> np.ndarray:
        """Rows of a layer's array; all, unless it `is_finer`. of_tensors: the rows of its
        tensors."""
        names = weight.tensor_names(shape)
        if weight.experts:
            each = len(weight.names)
            first, last, _ = rows.indices(shape[0])
            names, of_tensors = names[first * each : last * each], slice(None)
        tensors = [self._read(prefix + name, of_tensors) for name in names]
        return weight.to_ours(tensors, cut_shape((rows,), shape))


def float32_of(names: Names, shapes: Mapping[str, Shape], pattern: Sequence[str]) -> dict[str, str]:
    """The leaves of tensors that are float32 whatever the others are, by short name."""
    return {
        start + name: weight.leaf
        for _, weight, starts in names.arrays(shapes, pattern)
        for start in starts if weight.float32
        for name in weight.names
    }  # fmt: skip


def _new_values(path: str, shape: Shape, std: float) -> np.ndarray:
    if path.endswith(".scale"):
        return np.ones(shape, np.float32)
    if not path.endswith(".w"):
        return np.zeros(shape, np.float32)
    stream = np.random.default_rng(list(path.encode()))
    return (std * stream.standard_normal(shape)).astype(np.float32)


def present(shapes: Mapping[str, Shape], absent: Iterable[str]) -> dict[str, Shape]:
    """The shapes, except those of absent parts."""
    starts = tuple(f"{part}." for part in absent)
    return {path: shape for path, shape in shapes.items() if not path.startswith(starts)}


# --- JSON -----------------------------------------------------------------------------------------


def read_json(path: Path) -> Json:
    """The table in a JSON file; UserError if there is none."""
    values = files.read_json(path)
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no table but a {type(values).__name__}")
    return values


def write_json(path: Path, values: Json) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
