"""Layers, embedding and head, traced for a device that is not there, and what their equations cost.

A part is traced as the pipeline runs it (`mtx.vjp`): F, and the backward pass cut into B and W.
Nothing is computed and no device is needed. The microbatch and the vocabulary have sizes that
divide no other number, so that each array's size says how it grows (`mtx.costs.cost.Size`).

Equations without use are not counted, and identical ones are counted once, as in XLA.

Legend: B rows · S sequence (s: shard)
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from mtx.config import Layout, Recompute
from mtx.costs.cost import (
    EMBED,
    HEAD,
    PARAMETERS,
    Cost,
    Cut,
    ExpertShards,
    Parameter,
    Parameters,
    Question,
    Size,
    dim_of_tokens,
)
from mtx.costs.equations import ROWS, VOCAB, Reader, bytes_of, size_of
from mtx.costs.recompute import Both, has_checkpoints
from mtx.layers.model import Model
from mtx.sharding.axes import AXES, axes_of
from mtx.sharding.fp8 import HISTORY, is_quantised, weight
from mtx.sharding.mesh import Axes
from mtx.sharding.parameter import QUANTISED
from mtx.vjp import LayerVJP

_PIPE = 2  # the vocabulary is sharded over stages too; nothing else depends on their number
Tree = Any


def trace(question: Question) -> Cost | Parameters:
    """The answer to a question, for one device."""
    if question.part == PARAMETERS:
        return _Traced(question).parameters()
    plain = _traced(replace(question, recompute="none"))
    if question.recompute != "none" and plain.has_checkpoints:
        return _Traced(question).cost("none")
    return plain.cost(question.recompute)


@lru_cache(maxsize=32)
def _traced(question: Question) -> _Traced:
    """Cached for the other ways to recompute, which will soon be asked for."""
    return _Traced(question)


class _Traced:
    """A model for one device, with abstract arguments."""

    def __init__(self, question: Question):
        self.question = question
        layout = Layout(
            pipe=_PIPE, tensor=question.tensor, sequence_parallel=question.sequence_parallel,
            context=question.context, context_attention=question.context_attention,
            **(question.experts or ExpertShards())._asdict(),
        )  # fmt: skip
        self.shards, self.sizes = layout.vocab_shards, layout.sizes
        config = replace(question.model, vocab=VOCAB * self.shards, vocab_multiple=1)
        parts = ("embed", "head") if question.part in (EMBED, HEAD) else (question.part,)
        self.model = Model(
            config, axes=Axes.of(layout), recompute=question.recompute,
            kernel="described" if question.kernel == "cudnn" else "blocked",
            vocab_shards=self.shards, slices=question.slices,
            parts=None if question.part == PARAMETERS else parts,
        )  # fmt: skip

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.model.pattern))

    @property
    def has_checkpoints(self) -> bool:
        """Whether a layer recomputes something by itself: then its trace does not tell what a
        policy for the whole layer recomputes."""
        return self._part.has_checkpoints

    def cost(self, recompute: Recompute) -> Cost:
        """The cost with that recomputed, in addition to what the trace recomputes."""
        part = self.question.part
        if part in (EMBED, HEAD):
            return self._part.cost(jax.checkpoint_policies.everything_saveable)._replace(cuts=())
        return self._part.cost(self.model.policy(part, recompute))

    @cached_property
    def _part(self) -> _Part:
        """The traced part; inside a `shard_map`, because collectives know their axes there."""
        found = []

        def run():
            found.append(self._trace())
            return jnp.zeros(())

        mesh = AbstractMesh(
            tuple(self.sizes.values()), AXES, axis_types=(AxisType.Manual,) * len(AXES)
        )
        body = jax.shard_map(
            run, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False
        )
        with warnings.catch_warnings():
            # ROWS times a sequence may exceed int32, but no device is asked to count that far.
            warnings.filterwarnings("ignore", "Explicitly requested dtype int64", UserWarning)
            jax.eval_shape(body)
        return found[0]

    def parameters(self) -> Parameters:
        shared = self._parameters("embed", "head")
        layers = {kind: self._parameters("layers", kind) for kind in self.kinds}
        return Parameters(tuple(self.model.pattern), shared, layers)

    def _tree(self, of: Tree, *names: str) -> Tree:
        """The embedding and the head, or the layers of a kind, from a tree like the parameters."""
        return of["layers"][names[1]] if names[0] == "layers" else {n: of[n] for n in names}

    def _parameters(self, *names: str) -> tuple[Parameter, ...]:
        model = self.model
        shapes, *others = (
            self._tree(tree, *names)
            for tree in (model.shapes, model.specs, model.roles, model.trained)
        )
        leaves = zip(tree_leaves_with_path(shapes), *map(_leaves, others), strict=True)
        found = []
        for (path, leaf), spec, role, trained in leaves:
            number, rows, vocab = size_of(leaf.size)
            elements = Size(number // self.shards**vocab, rows, vocab)
            found.append(Parameter(_name(path), role, elements, axes_of(spec), trained))
        return tuple(found)

    def _local(self, *names: str) -> Tree:
        """The parameters of one device, as its layers receive them."""
        dtype = jnp.dtype(self.model.config.compute_dtype)

        def cut(leaf, spec, role, inputs):
            shape = list(leaf.shape)
            for dim, entry in enumerate(spec):
                shape[dim] //= math.prod(self.sizes[axis] for axis in axes_of([entry]))
            local = jax.ShapeDtypeStruct(shape, dtype)
            if fp8 == "off" or names[0] != "layers" or role not in QUANTISED:
                return local
            history = jnp.zeros(HISTORY) if config.fp8_steps else None
            quantised = partial(weight, fp8=fp8, dtype=dtype.name, history=history)
            return jax.eval_shape(lambda w: quantised(w).with_transposed(inputs, 0), local)

        model, config = self.model, self.model.config
        fp8 = config.fp8
        trees = model.shapes, model.specs, model.roles, model.inputs
        return jax.tree.map(cut, *(self._tree(tree, *names) for tree in trees))

    def _batch(self, rows: int) -> Tree:
        """Arrays of one item: a microbatch, or a slice of its sequences."""
        parts = self.question.slices * self.question.context

        def cut(a):
            shape = list(a.shape)
            if len(shape) == 2:  # [B, S]
                shape[1] //= parts
            return jax.ShapeDtypeStruct(shape, a.dtype)

        batch = jax.tree.map(cut, self.model.batch_fields(rows))
        return jax.eval_shape(lambda batch: self.model.weigh(batch, jnp.sum), batch)

    def _context(self, batch: Tree, rows: int) -> Tree:
        samples, key = jax.ShapeDtypeStruct((rows,), "int32"), jax.ShapeDtypeStruct((2,), "uint32")
        return jax.eval_shape(partial(self.model.context, 0), batch, samples, key)

    def stream(self, rows: int) -> Tree:
        """Shapes of the arrays passed from layer to layer; to be called inside the `shard_map`."""
        batch = self._batch(rows)
        shared, context = self._local("embed", "head"), self._context(batch, rows)
        return jax.eval_shape(self.model.embed, shared, batch, context)

    def _trace(self) -> _Part:
        model, part, batch = self.model, self.question.part, self._batch(ROWS)
        context = self._context(batch, ROWS)
        # The same for any kind of layer and any dropout.
        plain = replace(self.question.model, dropout=0.0, attention_dropout=0.0)
        stream = _stream(replace(self.question, model=plain, part=EMBED), ROWS)
        names = ("embed", "head") if part in (EMBED, HEAD) else ("layers", part)
        trees = self._tree(model.trained, *names), self._local(*names), stream
        if part == EMBED:
            return _Part(
                lambda shared, _, given: model.embed(shared, *given), *trees, (batch, context)
            )
        if part == HEAD:
            return _Part(model.loss, *trees, batch)
        cache = ()
        if self.question.slices > 1:
            cache = (jax.eval_shape(lambda: model.empty_cache(part, ROWS)),)
        return _Part(partial(model.layer, part), *trees, context, *cache)


@lru_cache(maxsize=64)
def _stream(question: Question, rows: int) -> Tree:
    return _Traced(question).stream(rows)


class _Part:
    """Traces of `function(params, stream, context or batch, *cache)` and of its backward pass, with
    gradients of the trained parameters."""

    def __init__(self, function, trained: Tree, params: Tree, stream: Tree, *given):
        vjp = LayerVJP(function, params, stream, *given, trained=trained)
        self._passes = Both(vjp, params, stream, given).passes
        self.has_checkpoints = any(map(has_checkpoints, (vjp.traced, vjp.traced_back)))
        gradients = tree_leaves_with_path(vjp.gradients)
        self._gradients = {at: _name(path) for at, (path, _) in enumerate(gradients)}
        parameters = tree_leaves_with_path(params, is_leaf=is_quantised)
        names = [_name(path) for path, w in parameters for _ in jax.tree.leaves(w)]
        self._parameters = dict(enumerate(names))
        self._stream, self._cache = _bytes(stream), _bytes(given[1:])

    def cost(self, policy) -> Cost:
        """policy: what is kept (`mtx.costs.recompute`)."""
        forward, backward, kept = self._passes(policy)
        of_b, of_w, deferred = backward.divided(len(self._gradients))
        read = Reader()
        read.add("F", forward.eqns, forward.outvars, forward.tags(self._parameters))
        after = {at + len(kept): name for at, name in self._parameters.items()}
        tags = backward.tags(after)
        read.add("B", *of_b, tags)
        read.add("W", *of_w, tags, made=backward.made(self._gradients))
        # A scalar is a constant of the program, and is not kept.
        arrays = [var.aval for var in kept if var.aval.ndim]
        return Cost(
            stream=self._stream, cache=self._cache, deferred=_bytes([v.aval for v in deferred]),
            kept=_bytes(arrays), cuts=_cuts(arrays), **read.found,
        )  # fmt: skip


def _cuts(arrays: list) -> tuple[Cut, ...]:
    dims = [(a, dim_of_tokens(a.shape)) for a in arrays]
    return tuple(Cut(a.shape[dim], *bytes_of([a])) for a, dim in dims if dim is not None)


def _bytes(arrays: Tree) -> tuple[Size, ...]:
    return bytes_of(jax.tree.leaves(arrays))


def _name(path) -> str:
    return keystr(path, simple=True, separator=".")


def _leaves(tree: Tree) -> list:
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
