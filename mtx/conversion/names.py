"""Which tensors of a Hugging Face model make up which arrays of ours: one table a family.

Here nothing is computed but transposes, reshapes and stacks, so that going there and back gives
the same bits. Our arrays are those of `mtx.api`: names with dots, of one layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Shape = tuple[int, ...]
# vector: its numbers in one row. table: as it is. conv1d: [inputs, outputs], a layer of GPT-2.
# linear: [outputs, inputs], a layer of torch.
Form = Literal["vector", "table", "conv1d", "linear"]


@dataclass(frozen=True)
class Weight:
    """One of our arrays and the tensors that it is made of."""

    leaf: str
    names: tuple[str, ...]
    form: Form = "vector"
    inputs: int = 1  # how many of our leading dims are a layer's inputs
    stack: int | None = None  # the dim of ours along which several tensors are stacked

    def tensor_shape(self, shape: Shape) -> Shape:
        """The shape of each tensor, from that of our array."""
        if self.stack is not None:
            shape = shape[: self.stack] + shape[self.stack + 1 :]
        if self.form == "table":
            return shape
        if self.form == "vector":
            return (math.prod(shape),)
        sizes = math.prod(shape[: self.inputs]), math.prod(shape[self.inputs :])
        return sizes if self.form == "conv1d" else sizes[::-1]

    def to_ours(self, tensors: Sequence[np.ndarray], shape: Shape) -> np.ndarray:
        """Our array, of that shape, float32."""
        if self.form == "linear":
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
        parts = [array] if self.stack is None else np.moveaxis(array, self.stack, 0)
        if self.form == "table":
            return list(parts)
        if self.form == "vector":
            return [part.reshape(-1) for part in parts]
        matrices = []
        for part in parts:
            matrix = part.reshape(math.prod(part.shape[: self.inputs]), -1)
            matrices.append(matrix if self.form == "conv1d" else matrix.T)
        return matrices


@dataclass(frozen=True, kw_only=True)
class Names:
    """The tensors of a family."""

    layer: str  # what stands before the names of a layer's tensors, with {} for its number
    ends: tuple[Weight, ...]
    block: tuple[Weight, ...]
    prefix: str  # before all names but those of `heads`; some files leave it out
    heads: tuple[str, ...]
    twins: Mapping[str, str] = field(default_factory=dict)
    # with tied weights: tensors that, where they are there, are the same as another
    spellings: Mapping[str, str] = field(default_factory=dict)  # older endings of names
    ignored: str = r"(?!)"  # tensors that are no parameters, as a regular expression
    optional: tuple[str, ...] = ()  # parts of our ends that a model may be without

    def short(self, name: str) -> str:
        """A tensor's name without the prefix, in its newest spelling."""
        name = name.removeprefix(self.prefix)
        for old, new in self.spellings.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        return name

    def full(self, name: str) -> str:
        """The inverse of `short`."""
        return name if name.startswith(self.heads) else self.prefix + name

    def is_ignored(self, name: str) -> bool:
        return re.fullmatch(self.ignored, name) is not None

    def arrays(self, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Weight, tuple[str, ...]]]:
        """Of each of our arrays: its path, its Weight, and what stands before the tensors' names:
        nothing for the ends', one string a layer for the blocks'. shapes: all of them by path."""
        layers = next(shape[0] for path, shape in shapes.items() if path.startswith("block."))
        starts = tuple(self.layer.format(layer) for layer in range(layers))
        known = {f"ends.{weight.leaf}": (weight, ("",)) for weight in self.ends}
        known |= {f"block.{weight.leaf}": (weight, starts) for weight in self.block}
        for path in shapes:
            yield path, *known[path]

    def tensors(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """The short names and shapes of all tensors of a model whose arrays have these shapes."""
        found = {}
        for path, weight, starts in self.arrays(shapes):
            shape = shapes[path][1:] if path.startswith("block.") else shapes[path]
            for start in starts:
                for name in weight.names:
                    found[start + name] = weight.tensor_shape(shape)
        return found


def _linear(leaf: str, name: str, *, inputs: int = 1) -> tuple[Weight, Weight]:
    return (
        Weight(f"{leaf}.w", (f"{name}.weight",), "linear", inputs),
        Weight(f"{leaf}.b", (f"{name}.bias",)),
    )


def _conv1d(leaf: str, name: str, *, inputs: int = 1) -> tuple[Weight, Weight]:
    return (
        Weight(f"{leaf}.w", (f"{name}.weight",), "conv1d", inputs),
        Weight(f"{leaf}.b", (f"{name}.bias",)),
    )


def _norm(leaf: str, name: str) -> tuple[Weight, Weight]:
    return Weight(f"{leaf}.scale", (f"{name}.weight",)), Weight(f"{leaf}.bias", (f"{name}.bias",))


def _all(names: tuple[str, ...], ending: str) -> tuple[str, ...]:
    return tuple(f"{name}.{ending}" for name in names)


GPT2 = Names(
    prefix="transformer.",
    layer="h.{}.",
    heads=("lm_head.",),
    ends=(
        Weight("tokens", ("wte.weight",), "table"),
        Weight("positions", ("wpe.weight",), "table"),
        *_norm("norm", "ln_f"),
        Weight("output", ("lm_head.weight",), "table"),
    ),
    block=(
        *_norm("attention_norm", "ln_1"),
        *_conv1d("attention.qkv", "attn.c_attn"),
        *_conv1d("attention.out", "attn.c_proj", inputs=2),
        *_norm("mlp_norm", "ln_2"),
        *_conv1d("mlp.up", "mlp.c_fc"),
        *_conv1d("mlp.down", "mlp.c_proj"),
    ),
    twins={"lm_head.weight": "wte.weight"},
    ignored=r"h\.\d+\.attn\.(masked_)?bias",  # masks
)

LLAMA = Names(
    prefix="model.",
    layer="layers.{}.",
    heads=("lm_head.",),
    ends=(
        Weight("tokens", ("embed_tokens.weight",), "table"),
        Weight("norm.scale", ("norm.weight",)),
        Weight("output", ("lm_head.weight",), "table"),
    ),
    block=(
        Weight("attention_norm.scale", ("input_layernorm.weight",)),
        Weight("attention.qkv.q", ("self_attn.q_proj.weight",), "linear"),
        Weight(
            "attention.qkv.kv", ("self_attn.k_proj.weight", "self_attn.v_proj.weight"), "linear",
            stack=1,
        ),
        Weight("attention.out.w", ("self_attn.o_proj.weight",), "linear", inputs=2),
        Weight("mlp_norm.scale", ("post_attention_layernorm.weight",)),
        Weight("mlp.up.w", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "linear", stack=1),
        Weight("mlp.down.w", ("mlp.down_proj.weight",), "linear"),
    ),
    twins={"lm_head.weight": "embed_tokens.weight"},
    ignored=r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)  # fmt: skip

_QKV = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
_BERT_HEADS = (
    *_linear("head", "cls.predictions.transform.dense"),
    *_norm("head.norm", "cls.predictions.transform.LayerNorm"),
    Weight("head.bias", ("cls.predictions.bias",)),
    *_linear("pooler", "pooler.dense"),
    *_linear("binary", "cls.seq_relationship"),
)
_BERT_TABLES = (
    Weight("tokens", ("embeddings.word_embeddings.weight",), "table"),
    Weight("positions", ("embeddings.position_embeddings.weight",), "table"),
    Weight("types", ("embeddings.token_type_embeddings.weight",), "table"),
)
_BERT_LAYERS = (
    Weight("attention.qkv.w", _all(_QKV, "weight"), "linear", stack=1),
    Weight("attention.qkv.b", _all(_QKV, "bias"), stack=0),
    *_linear("attention.out", "attention.output.dense", inputs=2),
    *_linear("mlp.up", "intermediate.dense"),
    *_linear("mlp.down", "output.dense"),
)
_BERT_TWINS = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}

BERT = Names(
    prefix="bert.",
    layer="encoder.layer.{}.",
    heads=("cls.",),
    ends=(*_BERT_TABLES, *_norm("embed_norm", "embeddings.LayerNorm"), *_BERT_HEADS),
    block=(
        *_norm("attention_norm", "attention.output.LayerNorm"),
        *_norm("mlp_norm", "output.LayerNorm"),
        *_BERT_LAYERS,
    ),
    twins=_BERT_TWINS,
    spellings={".gamma": ".weight", ".beta": ".bias"},
    ignored=r"embeddings\.position_ids",
    optional=("head", "pooler", "binary"),
)

# BERT as Megatron-LM rearranges it: norms before attention and MLP, and one after the last layer.
MEGATRON_BERT = Names(
    prefix="bert.",
    layer="encoder.layer.{}.",
    heads=("cls.",),
    ends=(*_BERT_TABLES, *_norm("norm", "encoder.ln"), *_BERT_HEADS),
    block=(*_norm("attention_norm", "attention.ln"), *_norm("mlp_norm", "ln"), *_BERT_LAYERS),
    twins=_BERT_TWINS,
    ignored=r"embeddings\.position_ids",
    optional=("head", "pooler", "binary"),
)
