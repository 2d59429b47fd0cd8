"""What models of each family are made of: the one description that all closed forms read.

A layer is a chain of arrays [tokens, width] with linear layers between them. Its FLOPs are those of
the linears, its stash the arrays that wait for B, its share of a device what `tensor` cuts. A
family is a row of `FAMILIES`: closed forms ask for what it has, not for its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from mtx.config import ModelConfig, Recompute

Part = Literal["attention", "mlp"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the layers and the ends of a family's models have."""

    title: str
    norm_numbers: int  # of LayerNorm 2, of RMSNorm 1: weights an element; numbers a token for B
    biases: bool  # of linear layers
    grouped: bool  # keys and values have heads, and a weight, of their own
    gated: bool  # SwiGLU: a second matrix into the MLP
    rotary: bool  # positions turn queries and keys; else they are learned, in a table
    types: int = 0  # of tokens, in a table
    two_heads: bool = False  # for masked words, behind a layer on each token; and a binary one


FAMILIES = {
    "gpt": Family(
        title="GPT", norm_numbers=2, biases=True, grouped=False, gated=False, rotary=False
    ),
    "llama": Family(
        title="Llama", norm_numbers=1, biases=False, grouped=True, gated=True, rotary=True
    ),
    "bert": Family(
        title="BERT", norm_numbers=2, biases=True, grouped=False, gated=False, rotary=False,
        types=2, two_heads=True,
    ),
}  # fmt: skip


def family_of(model: ModelConfig) -> Family:
    return FAMILIES[model.family]


# --- a layer --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Array:
    """One array of a layer's F, [tokens, width], in the compute type."""

    name: str
    width: int
    over: Literal["sequence", "width"]  # what `tensor` cuts; the sequence where it is parallel
    kept: tuple[Recompute, ...]  # the ways to recompute with which it waits for B
    most_parts: int | None = None  # of the width; with more devices some have the same part

    def parts(self, tensor: int) -> int:
        """Into which `tensor` devices cut its width."""
        return 1 if self.over == "sequence" else min(tensor, self.most_parts or tensor)

    def local_width(self, tensor: int) -> int:
        return self.width // self.parts(tensor)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """makes = reads @ w + b, w [reads.width, makes.width]: column-parallel where it makes what is
    cut by width, row-parallel where it reads that."""

    part: Part
    reads: Array
    makes: Array
    bias: bool

    @property
    def is_column(self) -> bool:
        return self.makes.over == "width"

    @property
    def weights(self) -> int:
        return self.reads.width * self.makes.width

    @property
    def biases(self) -> int:
        return self.makes.width if self.bias else 0

    def product(self, tensor: int) -> tuple[int, int]:
        """(inputs, outputs) of the product that one device computes for each token."""
        return self.reads.local_width(tensor), self.makes.local_width(tensor)

    def held(self, tensor: int) -> tuple[int, int]:
        """(weights, biases) of one device: those of its part, or all where the parts are fewer than
        devices."""
        inner = self.makes if self.is_column else self.reads
        parts = tensor if inner.parts(tensor) == tensor else 1
        return self.weights // parts, self.biases // (parts if self.is_column else 1)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One transformer block."""

    arrays: tuple[Array, ...]  # in the order in which they are made
    linears: tuple[Linear, ...]  # in theirs
    norm_weights: int
    norm_numbers: int  # float32 a token, kept by the norms for B
    needs_last: bool  # in B: a norm reads what the last linear makes

    @property
    def parameters(self) -> int:
        return self.norm_weights + sum(each.weights + each.biases for each in self.linears)

    def parameters_held(self, tensor: int) -> int:
        """Of one device; it has the norms whole."""
        return self.norm_weights + sum(sum(each.held(tensor)) for each in self.linears)

    def array(self, name: str) -> Array:
        return next(each for each in self.arrays if each.name == name)

    def weights(self, part: Part) -> int:
        return sum(each.weights for each in self.linears if each.part == part)


@lru_cache(maxsize=1024)
def layer_of(model: ModelConfig) -> Layer:
    """A layer of `model`. Without recomputation matmuls, norms, attention and the MLP's activation
    keep what they read; with "selective" what matmuls make waits, where B needs it."""
    family = family_of(model)
    post = getattr(model, "norm_placement", "pre") == "post"
    hidden, inner = model.hidden, model.ffn_hidden
    keys_and_values = 2 * model.groups * model.head_size

    def whole(name: str, *kept: Recompute) -> Array:
        return Array(name=name, width=hidden, over="sequence", kept=kept)

    def cut(name: str, width: int, *kept: Recompute, most_parts: int | None = None) -> Array:
        return Array(name=name, width=width, over="width", kept=kept, most_parts=most_parts)

    def linear(part: Part, reads: Array, makes: Array) -> Linear:
        return Linear(part=part, reads=reads, makes=makes, bias=family.biases)

    x, normed = whole("x", "none", "selective", "full"), whole("attention_norm", "none")
    if family.grouped:
        projected = (
            cut("q", hidden, "none", "selective"),
            cut("kv", keys_and_values, "none", "selective", most_parts=model.groups),
        )
    else:
        projected = (cut("qkv", 3 * hidden, "none", "selective"),)
    attended, out = cut("attended", hidden, "none", "selective"), whole("out", "selective")
    added, normed_again = whole("added", "none"), whole("mlp_norm", "none")
    up = cut("up", (2 if family.gated else 1) * inner, "none", "selective")
    active = cut("active", inner, "none")
    down = whole("down", *(("selective",) if post else ()))
    if post:  # x, attention, add, norm, MLP, add, norm
        entering, between = x, normed
        arrays = (x, *projected, attended, out, added, normed, up, active, down,
                  whole("added_again", "none"))  # fmt: skip
    else:  # x, norm, attention, add, norm, MLP, add
        entering, between = normed, normed_again
        arrays = (x, normed, *projected, attended, out, added, normed_again, up, active, down)
    return Layer(
        arrays=arrays,
        linears=(
            *(linear("attention", entering, each) for each in projected),
            linear("attention", attended, out),
            linear("mlp", between, up),
            linear("mlp", active, down),
        ),
        norm_weights=2 * family.norm_numbers * hidden,
        norm_numbers=2 * family.norm_numbers,
        needs_last=post,
    )


# --- the ends -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What stands before the first layer and after the last.

    Rows of the vocabulary lie over `pipe` x `tensor`, all else on every device.
    """

    table: int  # elements a row of the vocabulary, of the embedding
    output: int  # and of the head, besides what it shares with the embedding
    embedding: int  # positions and types of tokens
    norms: int
    head: int  # of the head, but for its rows
    binary_head: int
    on_tokens: tuple[tuple[int, int], ...]  # (inputs, outputs) of products before the logits
    on_sequences: tuple[tuple[int, int], ...]  # of those on the first token of a sequence alone

    @property
    def everywhere(self) -> int:
        return self.embedding + self.norms + self.head + self.binary_head


@lru_cache(maxsize=1024)
def ends_of(model: ModelConfig) -> Ends:
    """The ends of a model of this family, counted in elements."""
    family, hidden = family_of(model), model.hidden
    norm = family.norm_numbers * hidden
    tables = (0 if family.rotary else model.sequence) + family.types
    masked, binary = ((hidden, hidden),), ((hidden, hidden), (hidden, 2))

    def dense(products) -> int:
        return sum(inputs * outputs + outputs for inputs, outputs in products)

    return Ends(
        table=hidden,
        output=(0 if model.tied else hidden) + (1 if family.two_heads else 0),
        embedding=tables * hidden,
        norms=norm,
        head=dense(masked) + norm if family.two_heads else 0,
        binary_head=dense(binary) if family.two_heads else 0,
        on_tokens=masked if family.two_heads else (),
        on_sequences=binary if family.two_heads else (),
    )


# --- the whole model ------------------------------------------------------------------------------


def parameters_by_part(model: ModelConfig) -> dict[str, int]:
    """The exact numbers of parameters, without the padding of the vocabulary; a tied head has no
    table of its own."""
    layer, ends = layer_of(model), ends_of(model)
    parts = {"embedding": model.vocab * ends.table + ends.embedding}
    for part in ("attention", "mlp"):
        parts[part] = model.layers * sum(
            each.weights + each.biases for each in layer.linears if each.part == part
        )
    parts["norms"] = model.layers * layer.norm_weights + ends.norms
    parts["head"] = model.vocab * ends.output + ends.head
    if ends.binary_head:
        parts["binary head"] = ends.binary_head
    return parts
