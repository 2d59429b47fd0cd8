"""A model as the pipeline sees it (`mtx.pipeline.model`): embed, layer and loss over plain trees.

Modules are Flax NNX, written for the local shard: the same module runs on one device with
`Axes()`, which is the reference in tests. Every parameter carries its PartitionSpec and role.

Legend: B rows · S sequence (s: shard) · D hidden · V padded vocabulary (v: shard)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property, lru_cache, partial
from itertools import count
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from mtx.errors import UserError, unknown_name
from mtx.layers import fused
from mtx.layers.attend import ATTENTION_OUTPUT, FUSED_OUTPUT
from mtx.layers.context import Context
from mtx.layers.kernels import AttentionKernel
from mtx.layers.layer import Stack
from mtx.layers.multi_token import NEXT, of_next, of_second, predicts_second, with_second
from mtx.layers.over_context import in_parts
from mtx.layers.sublayer import Build
from mtx.sharding import fp8
from mtx.sharding.adapter import Adapters
from mtx.sharding.collectives import reduce_from, shard_of_sequence
from mtx.sharding.linear import MATMUL_OUTPUT, output_std
from mtx.sharding.mesh import Axes
from mtx.sharding.random import NoKeys, fold, key_data
from mtx.sharding.sequence import places

Tree = Any
Stream = dict[str, jax.Array]
Recompute = Literal["none", "selective", "around_attention", "full"]
_ONE_DEVICE = Axes()
_FIRST = 32  # keys of a layer's parameters that are made at once; few layers have more
# Primitives of cuDNN's attention: jax.nn's, and the one that describes it where it cannot be
# traced. Their results have no names.
_FUSED = ("dot_product_attention_fwd_wrapper", fused.FORWARD.name)


class Model:
    """The functions of a model for the local shards of `axes`; `Axes()` is one device.

    Parameters: {"embed": ..., "head": ..., "layers": {kind: ...}}, with the leaves of a layer or of
    stacked layers. `shared` is such a tree without the layers.
    """

    def __init__(
        self,
        config: Any,
        *,
        axes: Axes = _ONE_DEVICE,
        recompute: Recompute = "none",
        kernel: AttentionKernel = "blocked",
        vocab_shards: int = 1,
        slices: int = 1,
        head: Any = None,
        parts: Collection[str] | None = None,
    ):
        """config: a `mtx.families.ModelConfig`. head: the config of a head that replaces the
        family's. parts: which of "embed", "head" and kinds of layers will be called; None: all."""
        config.require_read()
        stack: Stack = config.stack()
        self.config, self.axes, self.slices = config, axes, slices
        self.recompute: Recompute = recompute
        self.kinds, self.pattern = stack.kinds, stack.pattern
        self.vocab_rows = config.padded_vocab(vocab_shards)
        self._embedding, self._head = stack.embedding, head or stack.head
        self._build = Build(
            hidden=config.hidden, init_std=config.init_std, axes=axes, kernel=kernel, site=0,
            output_std=output_std(config.init_std, config.layers), dtype=config.compute_dtype,
            slices=slices, adapters=self._adapters(),
        )  # fmt: skip
        build, rows = self._build, self.vocab_rows
        parts = {"embed", "head", *self.kinds} if parts is None else parts
        shared = {"embed": self._embedding, "head": self._head}
        found, layers = (
            {name: _abstract(each, build, *rows) for name, each in of.items() if name in parts}
            for of, rows in ((shared, (rows,)), (self.kinds, ()))
        )
        self._graphs: dict[str, Any] = {
            name: graph for name, (graph, _) in (found | layers).items()
        }
        states: Tree = {name: state for name, (_, state) in found.items()}
        states["layers"] = {kind: state for kind, (_, state) in layers.items()}
        self.shapes = {name: nnx.to_pure_dict(state) for name, (_, state) in found.items()}
        self.shapes["layers"] = {
            kind: nnx.to_pure_dict(state) for kind, (_, state) in layers.items()
        }
        self.specs = _metadata(states, "spec")  # every parameter's PartitionSpec, for one layer
        self.inputs = _metadata(states, "inputs")  # how many dims of a matrix are inputs
        self.dims = _metadata(states, "dims")  # the names of a parameter's dims, a tuple, or ()
        self.roles = _metadata(states, "role")  # what each is for: `mtx.sharding.parameter`
        self.rules = _metadata(states, "rule")  # how a step updates each state; None for others
        if config.fp8_steps:
            self._add_histories()
        self.trained = jax.tree.map_with_path(
            lambda path, role: config.trains(keystr(path, simple=True, separator="."), role),
            self.roles,
        )
        self._has_aux = any(kind.has_aux for kind in self.kinds.values())

    # -- parameters -------------------------------------------------------------------------------

    def _adapters(self) -> Adapters | None:
        """The adapters, or None. UserError for a name that is not a sublayer's."""
        config = self.config
        if not config.lora_rank:
            return None
        names = dict.fromkeys(n for kind in self.kinds.values() for n, _ in kind.sublayers)
        for name in config.lora_on:
            if name not in names:
                raise unknown_name("lora_on", name, names)
        return Adapters(rank=config.lora_rank, alpha=config.lora_alpha, on=config.lora_on)

    def _add_histories(self) -> None:
        """Add the histories of delayed scaling to the other parameters of layers."""
        rule = fp8.Delayed(self.config.fp8_steps)
        states = (
            (self.shapes, jax.ShapeDtypeStruct(fp8.HISTORY, jnp.float32)),
            (self.specs, P(None, None)), (self.inputs, 1), (self.rules, rule),
            (self.dims, ("operand", "exponent")), (self.roles, "state"),
        )  # fmt: skip
        for kind, roles in self.roles["layers"].items():
            for tree, value in states:
                tree["layers"][kind] |= {fp8.AMAX: fp8.histories(roles, value)}

    def init_shared(self, seed: int) -> Tree:
        """Float32 {"embed": ..., "head": ...}, global shapes, vocabulary padded."""
        build, rows, rngs = self._build, self.vocab_rows, _rngs_of(_init_key(seed, -1))
        embed = self._embedding.module(build, rows, rngs)
        return {"embed": _plain(embed), "head": _plain(self._head.module(build, rows, rngs))}

    def init_layer(self, kind: str, seed: int, layer) -> Tree:
        """Float32 parameters of a layer, global shapes."""
        params = _plain(self.kinds[kind].module(self._build, _rngs_of(_init_key(seed, layer))))
        if self.config.fp8_steps:
            zeros = jnp.zeros(fp8.HISTORY, jnp.float32)
            params[fp8.AMAX] = fp8.histories(self.roles["layers"][kind], zeros)
        return params

    # -- batches ----------------------------------------------------------------------------------

    def batch_fields(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a training batch of that many rows; a batch may have others as well."""
        return self._head.batch_fields(rows, self.config.sequence)

    def weigh(self, batch: Tree, total: Callable) -> Tree:
        """The batch with weights that follow from the global one; `total` sums an array over it."""
        if self._second_weight:
            batch = with_second(batch, self.axes)
        return self._head.weigh(batch, total)

    @property
    def _second_weight(self) -> float:
        """The weight of the loss of a second token; 0 if there is none."""
        return getattr(self._head, "second_weight", 0.0)

    # -- a microbatch -----------------------------------------------------------------------------

    @cached_property
    def _drops(self) -> bool:
        return bool(self.config.dropout or self.config.attention_dropout)

    def context(self, layer, batch: Tree, samples_B, rng, part=0, busy=None) -> Context | None:
        """What a layer is told besides its input; None if nothing of it matters: whole sequences of
        one segment, no dropout. rng: None for no dropout."""
        names = "segments", "positions", "last", "patches"
        segments, positions, last, patches = map(batch.get, names)
        if not self._drops:
            rng = samples_B = None
        if positions is None and self.axes.context is not None:
            positions = places(batch["tokens"].shape[1], self.axes)
        busy = busy if self._has_aux or self.config.fp8_steps else None
        said = rng, segments, positions, busy, last, patches
        if self.slices == 1 and all(each is None for each in said):
            return None
        if self.slices > 1 and segments is not None:
            raise UserError(
                f"slices={self.slices} must be 1 where documents are packed into one sequence; use "
                "slices=1, or data that is not packed"
            )
        layer, part = jnp.asarray(layer, jnp.int32), jnp.asarray(part, jnp.int32)
        return Context(layer, samples_B, rng, part, segments, positions, busy, last, patches)

    def embed(self, shared: Tree, batch: Tree, context: Context | None = None) -> Stream:
        """The stream before the first layer, the same on every stage: x_BsD of batch["tokens"]
        int32 [B, S]. Expects the same gradient on every stage."""
        embedding = nnx.merge(self._graphs["embed"], shared["embed"])
        stream = {"x": embedding(batch, context)}
        if hasattr(embedding, "leaves"):
            stream |= embedding.leaves(batch, context)
        if self._has_aux:
            stream["aux"] = jnp.zeros(stream["x"].shape[:2], jnp.float32)
        if predicts_second(batch):
            stream[NEXT] = embedding(of_next(batch), context)
        return stream

    def layer(
        self, kind: str, params: Tree, stream: Stream, context: Context | None = None, *cache: Tree
    ):
        """The stream after a layer; for a slice of the sequence, given the cache of earlier ones,
        (stream, its own part of the cache)."""

        def run(params, stream, context, *cache):
            params = fp8.with_histories(params, None if context is None else context.busy)
            return nnx.merge(self._graphs[kind], params)(stream, context, *cache)

        if self.recompute != "none":
            policy = self.policy(kind, self.recompute)
            run = jax.checkpoint(run, policy=policy, prevent_cse=False)
        return run(params, stream, context, *cache)

    def policy(self, kind: str, recompute: Recompute) -> Callable[..., Any]:
        """The `jax.checkpoint` policy of a layer of that kind: whether it keeps the results of an
        equation, given its primitive, shapes and parameters. If a fused kernel gives parts, only
        their merged result is kept."""
        parts = in_parts(self.axes, max(1, self.config.groups // self.axes.tensor_shards))
        parts |= any(getattr(each, "in_parts", False) for _, each in self.kinds[kind].sublayers)
        if parts and recompute == "around_attention":
            return _names(ATTENTION_OUTPUT)
        return _POLICIES[recompute]

    def loss(self, shared: Tree, stream: Stream, batch: Tree):
        """The sum of the losses of batch["targets"] int32 [B, S], weighted by batch["weights"]."""
        return self._call_head("loss", shared, stream, batch)

    def losses(self, shared: Tree, stream: Stream, batch: Tree) -> dict[str, jax.Array]:
        """The losses whose sum training minimises: {"loss": `loss`}; if layers have losses of their
        own, {"aux": theirs, each token's with the same weight as in `loss`}; and, if there is one,
        {"second": that of the tokens after the next}, times its weight."""
        losses = {"loss": self.loss(shared, stream, batch)}
        if NEXT in stream:
            second = self.loss(shared, {"x": stream[NEXT]}, of_second(batch))
            losses["second"] = self._second_weight * second
        if "aux" in stream:
            axes, aux_Bs = self.axes, stream["aux"]
            split = axes.tensor if axes.sequence_parallel else None
            weights_Bs = shard_of_sequence(batch["weights"], split)
            losses["aux"] = reduce_from((aux_Bs * weights_Bs).sum(), split)
        return losses

    def head_positions(self, shared: Tree, stream: Stream) -> int:
        """How many positions of a shard of the sequence the head takes at once."""
        rows, positions = stream["x"].shape[:2]
        shards = self.axes.tensor_shards if self.axes.sequence_parallel else 1
        vocab = shared["embed"]["tokens"].shape[0]
        return self._head.positions(rows * shards, positions, vocab)

    def scores(self, shared: Tree, stream: Stream, batch: Tree):
        """(losses, hits) float32 [B, S] of batch["targets"]: a hit is 1 if the target is the
        likeliest token."""
        return self._call_head("scores", shared, stream, batch)

    def next_logits(self, shared: Tree, stream: Stream, positions_B):
        """logits_Bv float32, this device's part of the vocabulary, at each row's position."""
        return self._call_head("next_logits", shared, stream, positions_B)

    def _call_head(self, name: str, shared: Tree, stream: Stream, argument):
        head = nnx.merge(self._graphs["head"], shared["head"])
        return getattr(head, name)(shared["embed"]["tokens"], stream["x"], argument)

    # -- sequences in slices, and generated text --------------------------------------------------

    def empty_cache(self, kind: str, rows: int) -> Tree:
        """[B, S, ...] each: what a layer hands from slice to slice."""
        return self.kinds[kind].empty_cache(self._build, rows, self.config.sequence)

    def empty_past(self, kind: str, rows: int, length: int) -> Tree:
        """[n, B, g, S, K] each, or a `State`: what a layer keeps of texts up to that length."""
        return self.kinds[kind].empty_past(self._build, rows, length)

    def extend(self, kind: str, params: Tree, stream: Stream, context, keep: Callable) -> Stream:
        """The stream after a layer, for the next t positions of texts; the layer gives `keep` what
        is to be kept of them. Their positions are those of the context, or the first t. There is
        neither dropout nor sequence parallelism."""
        layer = nnx.merge(self._graphs[kind], fp8.with_histories(params))
        return layer.of_text(stream, context, keep)


def _is_fused(primitive, *_, **__) -> bool:
    return primitive.name in _FUSED


_names = jax.checkpoint_policies.save_only_these_names
_POLICIES = {  # what is kept of a layer, besides its input
    "none": jax.checkpoint_policies.everything_saveable,
    "selective": _names(MATMUL_OUTPUT, ATTENTION_OUTPUT),
    "around_attention": jax.checkpoint_policies.save_from_both_policies(
        _names(ATTENTION_OUTPUT, FUSED_OUTPUT), _is_fused
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def _init_key(seed: int, layer):
    key = fold(key_data(seed), layer + 1)
    return jax.random.wrap_key_data(key, impl="threefry2x32")


class _Keys:
    """`nnx.Rngs(params=key, adapter=...)`, with the keys of parameters made at once: a program with
    a loop for each takes a third longer to compile. Adapters have their own stream, so that other
    parameters have the same initial values with adapters as without."""

    def __init__(self, key):
        self._key, self._used = key, count()
        self._first = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(_FIRST, dtype="uint32"))
        self.adapter = nnx.RngStream(jax.random.fold_in(key, 1), tag="adapter")

    def params(self):
        n = next(self._used)
        return self._first[n] if n < _FIRST else jax.random.fold_in(self._key, n)


class _Shapes:
    """`_Keys` for parameters of which only the shapes are needed."""

    params = adapter = NoKeys()


_SHAPES = cast(nnx.Rngs, _Shapes())


def _rngs_of(key) -> nnx.Rngs:
    return cast(nnx.Rngs, _Keys(key))


@lru_cache(maxsize=1024)
def _abstract(config: Any, build: Build, *rows: int) -> tuple[Any, nnx.State]:
    """(graph, parameters as shapes with their metadata) of the module of a layer, embedding or
    head. Cached, because many models, above all those of a plan, consist of the same ones."""
    return nnx.split(nnx.eval_shape(lambda: config.module(build, *rows, _SHAPES)))


def _plain(module: nnx.Module) -> Tree:
    return nnx.to_pure_dict(nnx.state(module))


def _metadata(tree, name: str) -> dict:
    """The metadata of that name of every parameter, as a plain nested dict."""
    return {
        key: value.get_metadata()[name]
        if isinstance(value, nnx.Variable)
        else _metadata(value, name)
        for key, value in tree.items()
    }
