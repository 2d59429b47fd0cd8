"""Parameters of one device, counted."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mtx.config import Layout, ModelConfig
from mtx.costs.ask import model_parameters
from mtx.costs.cost import ExpertShards, Parameter, Parameters
from mtx.costs.place import placement_of
from mtx.schedules.partition import Placement
from mtx.sharding.axes import replica_axes


class Held(NamedTuple):
    """Parameters of one device."""

    total: int
    layers: int  # of all layers, with the padding of uneven stages
    chunk: int  # of the layers of one chunk, of every kind
    matrices: int  # of `total`, those that an optimizer treats as matrices
    shard: int  # of `total`, with each parameter sharded over its replicas (ZeRO)
    matrices_shard: int
    layers_shard: int
    states: int  # elements of states, which are not parameters and not sharded over replicas


def parameters_held(model: ModelConfig, layout: Layout, *, trained: bool = False) -> Held:
    """The parameters of one device, including the padding of the vocabulary and of uneven stages;
    states, of routers and of float8, are not parameters. trained: count only the trained ones."""
    parameters, states = parameters_of(model, layout), 0
    vocab, sizes = model.padded_vocab(layout.vocab_shards), tuple(layout.sizes.items())

    def count(these: tuple[Parameter, ...]) -> np.ndarray:
        return _count(these, vocab, sizes, trained)

    chunk = layers = np.zeros((2, 2))
    for kind, (rows, n) in _stacks(model, layout).items():
        own = n * count(parameters.layers[kind])
        chunk, layers = chunk + own, layers + rows * own
        of_kind = (each for each in parameters.layers[kind] if each.role == "state")
        states += rows * n * sum(elements_held(each, model, layout) for each in of_kind)
    (total, shard), (matrices, matrices_shard) = np.ceil(
        layers + count(parameters.shared)
    ).astype(int).tolist()  # fmt: skip
    return Held(
        total=total, layers=round(layers[0, 0]), chunk=round(chunk[0, 0]), matrices=matrices,
        shard=shard, matrices_shard=matrices_shard, layers_shard=math.ceil(layers[0, 1]),
        states=states,
    )  # fmt: skip


def parameters_per_device(model: ModelConfig, layout: Layout) -> int:
    """Parameters that one device holds, padding of vocabulary and of uneven stages included."""
    return parameters_held(model, layout).total


def parameters_of(model: ModelConfig, layout: Layout) -> Parameters:
    """All parameters of a model; for layers, those of one layer of each kind."""
    experts = ExpertShards.of(layout, model)
    return model_parameters(model, tensor=layout.tensor, experts=experts)


@lru_cache(maxsize=4096)
def _count(
    these: tuple[Parameter, ...], vocab: int, sizes: tuple[tuple[str, int], ...], trained: bool
) -> np.ndarray:
    """Elements of (all, matrices), each whole and sharded over replicas; vocab: padded."""
    held, by_axis = np.zeros((2, 2)), dict(sizes)
    for each in these:
        if each.role == "state" or (trained and not each.trained):
            continue
        n = _elements(each, vocab, by_axis)
        replicas = math.prod(by_axis[axis] for axis in replica_axes(each.axes))
        held += np.outer((1, each.is_matrix), (n, n / replicas))
    return held


def twice_held(model: ModelConfig, layout: Layout) -> int:
    """Elements of experts' weights of which XLA has the gradients of one device twice: where chunks
    of woven ticks have unlike numbers of layers, a conditional has the loops of further rounds,
    which add to them. (Qwen3 235B, jax 0.12: 81 GiB; even, with two more layers, 67.)"""
    woven = layout.weave == "on" and layout.virtual > 1 and bool(model.routed_experts)
    if not woven or placement_of(model, layout).even:
        return 0
    layers = parameters_of(model, layout).layers
    return sum(
        rows * n * elements_held(each, model, layout)
        for kind, (rows, n) in _stacks(model, layout).items()
        for each in layers[kind] if each.is_matrix and "expert" in each.axes
    )  # fmt: skip


def elements_held(parameter: Parameter, model: ModelConfig, layout: Layout) -> int:
    """Elements of one parameter that a device has."""
    return _elements(parameter, model.padded_vocab(layout.vocab_shards), layout.sizes)


def _elements(parameter: Parameter, vocab: int, sizes: dict[str, int]) -> int:
    whole = parameter.elements.at(1, vocab)
    for axis in parameter.axes:
        whole //= sizes[axis]
    return whole


def places(model: ModelConfig, layout: Layout) -> dict[str, int]:
    """Layers of a chunk by kind, or places for them if stages are uneven."""
    return {kind: count for kind, (_, count) in _stacks(model, layout).items()}


def _stacks(model: ModelConfig, layout: Layout) -> dict[str, tuple[int, int]]:
    """(rows of a kind's stack, places in each), by kind."""
    return _stacks_of(placement_of(model, layout))


@lru_cache(maxsize=4096)
def _stacks_of(placement: Placement) -> dict[str, tuple[int, int]]:
    return {kind: placement.slots_of(kind).shape[1:] for kind in placement.kinds}
