"""How a family's models correspond to those of Hugging Face's transformers: what a config.json
means, and which tensors make up which of our arrays.

Only transposes, reshapes and stacks are computed here, so that a round trip gives the same bits.
Our arrays are named by path, as in a checkpoint: "embed.tokens", "head.norm.scale" and, for the
layers of a kind, "layers.block.attention.out.w" [L, ...], in model order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from mtx.errors import UserError, shown
from mtx.fields import checked
from mtx.sizes import Interval, Step

Json = dict[str, Any]
Shape = tuple[int, ...]
# Of a tensor. vector: flat. table: like our array. conv1d: [inputs, outputs], a layer of GPT-2.
# linear: [outputs, inputs], a layer of torch. linears: one for each expert, [E, outputs, inputs].
# depthwise: [channels, 1, width], a convolution.
# neighbours: its last dim is our last two, swapped. convolution: its first dim is our last.
Form = Literal[
    "vector", "table", "conv1d", "linear", "linears", "depthwise", "neighbours", "convolution"
]  # fmt: skip
_MISSING = object()


# -- config.json -----------------------------------------------------------------------------------


class Fields:
    """The values of a config.json, with the defaults of transformers, which does not write them.

    A value that our models do not support is refused under its name in config.json.
    """

    def __init__(self, values: Json, defaults: Json, where: str):
        self._values = defaults | values
        self.where = where
        self.notes: list[str] = []  # values that are not read as they are written

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def whole(self, name: str, *, least: Literal[0, 1] = 1) -> int:
        """A whole number."""
        kind = Step if least else Interval
        return checked(f"{self.where}: {name}", self._values.get(name), kind)

    def number(self, name: str) -> float:
        return float(checked(f"{self.where}: {name}", self._values.get(name), float))

    def of_kind(self, kind: type, name: str) -> Any:
        if kind is bool:
            return bool(self._values.get(name))
        return self.number(name) if kind is float else self.whole(name)

    def require(self, name: str, *allowed: Any) -> None:
        """UserError if a value is present and is none of `allowed`."""
        value = self._values.get(name, _MISSING)
        if value is not _MISSING and value not in allowed:
            raise self.refused(name, " or ".join(map(repr, allowed)))

    def refused(self, name: str, ours: str) -> UserError:
        """The error for a value that our models do not support; they have `ours`."""
        value = shown(self._values.get(name))
        return UserError(f"{self.where}: {name}={value} must be {ours}: our models have no other")

    def choice(self, name: str, choices: Mapping[str, str]) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or value not in choices:
            raise self.refused(name, " or ".join(choices))
        return choices[value]

    def table(self, name: str, defaults: Json | None = None) -> Fields | None:
        """A nested table, over `defaults`; None if it is missing and has no defaults."""
        value = self._values.get(name)
        if value is None and defaults is None:
            return None
        if not isinstance(value, dict | None):
            raise UserError(f"{self.where}: {name}={shown(value)} must be a table")
        return Fields(value or {}, defaults or {}, f"{self.where}: {name}")


def ffn_field(fields: Fields, name: str, hidden_name: str) -> Json:
    """The size of an MLP in our config: as a multiple of the hidden size, if it is one."""
    size, hidden = fields.whole(name), fields.whole(hidden_name)
    return {"ffn": size} if size % hidden else {"ffn_multiple": size // hidden}


# -- tensors ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """One of our arrays and the tensors that it is made of."""

    leaf: str  # the path of our array; for layers, what follows "layers.<kind>."
    names: tuple[str, ...]  # of the tensors; (): there are none, and the array begins as zeros
    form: Form = "vector"
    inputs: int = 1  # how many of our leading dims are a layer's inputs
    stack: int | None = None  # the dim of ours along which several tensors are stacked
    of_layer: bool = True  # for layers: whether the names follow a layer's prefix, with its number
    experts: bool = False  # our first dim is experts, each with its own tensors; {}: its number
    float32: bool = False  # its tensors are float32, whatever the others are
    # Paths of our arrays, this one included, that are consecutive rows of the same tensors.
    joined: tuple[str, ...] = ()
    kinds: tuple[str, ...] | None = None  # for layers: the kinds that have it; None: all

    @property
    def in_parts(self) -> bool:
        """Whether some of our rows correspond to some tensors, or to some rows of them."""
        return self.experts or self.form in ("table", "neighbours", "linears")

    def tensor_names(self, shape: Shape) -> tuple[str, ...]:
        """The names of all tensors of an array of that shape."""
        if not self.experts:
            return self.names
        return tuple(name.format(expert) for expert in range(shape[0]) for name in self.names)

    def tensor_shape(self, shape: Shape) -> Shape:
        """The shape of each tensor, or of this array's rows of it, given our array's shape."""
        if self.experts:
            return replace(self, experts=False).tensor_shape(shape[1:])
        if self.form == "neighbours":
            return *shape[:-2], shape[-2] * shape[-1]
        if self.form == "linears":
            return shape[0], math.prod(shape[2:]), shape[1]
        if self.form == "convolution":
            return shape[-1], *shape[:-1]
        if self.stack is not None:
            shape = shape[: self.stack] + shape[self.stack + 1 :]
        if self.form == "table":
            return shape
        if self.form == "vector":
            return (math.prod(shape),)
        sizes = math.prod(shape[: self.inputs]), math.prod(shape[self.inputs :])
        if self.form == "depthwise":
            return sizes[1], 1, sizes[0]
        return sizes if self.form == "conv1d" else sizes[::-1]

    def to_ours(self, tensors: Sequence[np.ndarray], shape: Shape) -> np.ndarray:
        """Our float32 array of that shape, from its tensors."""
        if not self.names:
            return np.zeros(shape, np.float32)
        if self.experts:
            one, each = replace(self, experts=False), len(self.names)
            array = np.empty(shape, np.float32)
            for expert in range(shape[0]):
                own = tensors[expert * each : (expert + 1) * each]
                array[expert] = one.to_ours(own, shape[1:])
            return array
        if self.form == "neighbours":
            turned = tensors[0].reshape(*shape[:-2], shape[-1], shape[-2])
            return np.swapaxes(turned, -1, -2).astype(np.float32)
        if self.form == "linears":
            return np.swapaxes(tensors[0], 1, 2).astype(np.float32).reshape(shape)
        if self.form == "convolution":
            return np.moveaxis(tensors[0], 0, -1).astype(np.float32)
        if self.form in ("linear", "depthwise"):
            tensors = [tensor.T for tensor in tensors]
        if self.stack is None:
            return tensors[0].astype(np.float32).reshape(shape)
        part = shape[: self.stack] + shape[self.stack + 1 :]
        array = np.empty(shape, np.float32)
        for place, tensor in enumerate(tensors):
            array[(slice(None),) * self.stack + (place,)] = tensor.reshape(part)
        return array

    def to_tensors(self, array: np.ndarray) -> list[np.ndarray]:
        """The inverse of `to_ours`."""
        if not self.names:
            return []
        if self.experts:
            one = replace(self, experts=False)
            return [tensor for own in array for tensor in one.to_tensors(own)]
        if self.form == "neighbours":
            return [np.swapaxes(array, -1, -2).reshape(*array.shape[:-2], -1)]
        if self.form == "linears":
            return [np.swapaxes(array.reshape(*array.shape[:2], -1), 1, 2)]
        if self.form == "convolution":
            return [np.moveaxis(array, -1, 0)]
        parts = [array] if self.stack is None else np.moveaxis(array, self.stack, 0)
        if self.form == "table":
            return list(parts)
        if self.form == "vector":
            return [part.reshape(-1) for part in parts]
        matrices = []
        for part in parts:
            matrix = part.reshape(math.prod(part.shape[: self.inputs]), -1)
            matrices.append(matrix if self.form == "conv1d" else matrix.T)
        return [each[:, None] for each in matrices] if self.form == "depthwise" else matrices


def layer_of(leaf: str, name: str, form: Form, *, inputs: int = 1) -> tuple[Weight, Weight]:
    """The weight and bias of a linear layer."""
    return (
        Weight(f"{leaf}.w", (f"{name}.weight",), form, inputs),
        Weight(f"{leaf}.b", (f"{name}.bias",)),
    )


def norm_of(leaf: str, name: str) -> tuple[Weight, Weight]:
    """The scale and bias of a layer norm."""
    return Weight(f"{leaf}.scale", (f"{name}.weight",)), Weight(f"{leaf}.bias", (f"{name}.bias",))


@dataclass(frozen=True, kw_only=True)
class Names:
    """The tensors of a family, one table for all its kinds of layers."""

    layer: str  # prefix of the names of a layer's tensors, with {} for its number
    shared: tuple[Weight, ...]
    layers: tuple[Weight, ...]
    prefix: str  # of all names except those of `heads`; some files leave it out
    heads: tuple[str, ...]
    twins: Mapping[str, str] = field(default_factory=dict)
    # with tied weights: tensors that, if present, are the same as another
    spellings: Mapping[str, str] = field(default_factory=dict)  # older endings of names
    # Other beginnings of names, each looked for in turn, and ours
    beginnings: Mapping[str, str] = field(default_factory=dict)
    ignored: str = r"(?!)"  # tensors that are not parameters, as a regular expression
    optional: tuple[str, ...] = ()  # paths of parts that a model may lack
    # `layer` of kinds whose layers are numbered separately, such as an encoder's
    stacks: Mapping[str, str] = field(default_factory=dict)

    def short(self, name: str) -> str:
        """A tensor's name without the prefix, in its newest spelling."""
        name = name.removeprefix(self.prefix)
        for old, new in self.beginnings.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        for old, new in self.spellings.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        return name

    def full(self, name: str) -> str:
        """The inverse of `short`."""
        return name if name.startswith(self.heads) else self.prefix + name

    def is_ignored(self, name: str) -> bool:
        return re.fullmatch(self.ignored, name) is not None

    def arrays(
        self, shapes: Mapping[str, Shape], pattern: Sequence[str]
    ) -> Iterator[tuple[str, Weight, tuple[str, ...]]]:
        """For each of our arrays: its path, its Weight, and the prefixes of its tensors' names: an
        empty one if it is shared, else one for each layer. pattern: the kind of each layer."""
        known = self._rows(pattern)
        for path in shapes:
            yield (path, *known[path])

    def unnamed(self, shapes: Mapping[str, Shape], pattern: Sequence[str]) -> list[str]:
        """The paths of arrays that have no row in the table."""
        known = self._rows(pattern)
        return [path for path in shapes if path not in known]

    def _rows(self, pattern: Sequence[str]) -> dict[str, tuple[Weight, tuple[str, ...]]]:
        """By path: the Weight and the prefixes that `arrays` yields."""
        starts: dict[str, tuple[str, ...]] = {}
        known: dict[str, tuple[Weight, tuple[str, ...]]]
        counts: dict[str, int] = {}
        for kind in pattern:
            start = self.stacks.get(kind, self.layer)
            starts[kind] = (*starts.get(kind, ()), start.format(counts.setdefault(start, 0)))
            counts[start] += 1
        known = {weight.leaf: (weight, ("",)) for weight in self.shared}
        for kind, names in starts.items():
            for weight in self.layers:
                if weight.kinds is not None and kind not in weight.kinds:
                    continue
                before = names if weight.of_layer else ("",) * len(names)
                known[f"layers.{kind}.{weight.leaf}"] = weight, before
        return known

    def tensors(self, shapes: Mapping[str, Shape], pattern: Sequence[str]) -> dict[str, Shape]:
        """The short names and shapes of all tensors of a model whose arrays have these shapes."""
        found = {}
        for path, weight, starts in self.arrays(shapes, pattern):
            shape = shapes[path][1:] if is_of_layers(path) else shapes[path]
            for start in starts:
                rows, *rest = weight.tensor_shape(shape)
                for name in weight.tensor_names(shape):
                    before = found.get(start + name, (0,))[0] if weight.joined else 0
                    found[start + name] = (before + rows, *rest)
        return found

    def joined(self, path: str, weight: Weight) -> list[tuple[str, Weight]]:
        """The arrays whose rows an array's tensors consist of, in order: usually itself alone."""
        if not weight.joined:
            return [(path, weight)]
        start = path.removesuffix(weight.leaf)
        weights = {each.leaf: each for each in self.layers}
        return [(start + leaf, weights[leaf]) for leaf in weight.joined]

    def rows(self, path: str, weight: Weight, shapes: Mapping[str, Shape]) -> slice:
        """The rows of its tensors that an array of layers consists of."""
        if not weight.joined:
            return slice(None)
        counts = [each.tensor_shape(shapes[at][1:])[0] for at, each in self.joined(path, weight)]
        place = weight.joined.index(weight.leaf)
        return slice(sum(counts[:place]), sum(counts[: place + 1]))


def is_of_layers(path: str) -> bool:
    """Whether an array is [L, ...], stacked over the layers of a kind."""
    return path.startswith("layers.")


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """A model type, in the sense of transformers."""

    model_type: str
    architecture: str  # the class of a whole model
    defaults: Json  # of config.json
    names: Names
    fields: Mapping[str, str]  # values of the family's config, and their names in config.json
    to_model: Callable[[Fields], Json]  # the other fields of the family's config
    to_config: Callable[[Any], Json]  # and the other values of config.json
    fixed: Json = field(default_factory=dict)  # the only values that config.json may have
    has: Callable[[Any], bool] = lambda model: True  # whether a model of the family is of this type
    # the model without parts none of whose tensors, by short name, are there
    as_there: Callable[[Any, Mapping[str, Any]], Any] = lambda model, tensors: model

    def names_of(self, shapes: Mapping[str, Shape], pattern: Sequence[str]) -> Names:
        """`names`, for arrays of these shapes; UserError if one has no row there."""
        if unnamed := self.names.unnamed(shapes, pattern):
            raise UserError(
                f"model_type={self.model_type!r} has no names for {', '.join(unnamed[:4])}; give "
                "each a Weight in its family's table of names"
            )
        return self.names
