"""A model as the pipeline sees it: embed, block and loss over plain trees of parameters.

Modules are Flax NNX, written for the local shard: the same module runs on one device with
`Axes()`, and that is the reference of the tests. Every parameter carries its PartitionSpec and
role.

Legend: B rows · S sequence (s: shard) · D hidden · V padded vocabulary (v: shard) · G heads of keys
and values (g: shard) · K head size
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mtx.config import ModelConfig, Recompute
from mtx.errors import UserError
from mtx.models.attention import AttentionKernel
from mtx.models.cached import Keep
from mtx.models.place import Place
from mtx.sharding.linear import MATMUL_OUTPUT
from mtx.sharding.mesh import Axes
from mtx.sharding.random import fold, key_data

_ONE_DEVICE = Axes()
_EMBED = {"tokens": "tokens", "positions": "positions", "types": "types", "embed_norm": "norm"}
_HEAD = {
    "norm": "norm", "output": "output", "head": "masked", "pooler": "pooler", "binary": "binary",
    "classifier": "classifier",
}  # fmt: skip


class Model:
    """Parameters: {"ends": {...}, "block": {...}}, the block's leaves those of one layer, or of
    layers stacked.

    A family says what its ends and its block are; both are Flax modules. `axes` are those that the
    functions' local shards are written for; `Axes()` is one device.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        axes: Axes = _ONE_DEVICE,
        recompute: Recompute = "none",
        kernel: AttentionKernel = "blocked",
        vocab_shards: int = 1,
        slices: int = 1,
    ):
        self.config = config
        self.slices = slices
        self.kernel = kernel
        self.axes = axes
        self.recompute = recompute
        self.vocab_rows = config.padded_vocab(vocab_shards)
        ends = nnx.eval_shape(lambda: self.make_ends(nnx.Rngs(params=0)))
        block = nnx.eval_shape(lambda: self.make_block(nnx.Rngs(params=0)))
        self._ends_graph, ends_state = nnx.split(ends)
        self._block_graph, block_state = nnx.split(block)
        states = _shared(ends_state) | {"layers": {"block": block_state}}
        self.specs = _metadata(states, "spec")  # the PartitionSpec of every parameter; of one layer
        self.roles: dict = _metadata(states, "role")  # what each is for: `mtx.sharding.parameter`
        self.pattern = ("block",) * config.layers

    # -- what a family says -----------------------------------------------------------------------

    def make_ends(self, rngs: nnx.Rngs) -> nnx.Module:
        """With `embed`, `loss`, `scores` and `next_logits`."""
        raise NotImplementedError

    def make_block(self, rngs: nnx.Rngs) -> nnx.Module:
        """Called with (x_BsD, place), and for slices with a cache."""
        raise NotImplementedError

    def batch_fields(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a training batch of that many rows; others may come beside them."""
        shape = rows, self.config.sequence
        dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}

    def weigh(self, batch, total):
        """The batch, with weights that follow from the global batch; `total` sums over it."""
        return batch

    # -- parameters -------------------------------------------------------------------------------

    def init_shared(self, seed: int):
        """Float32 parameters of embedding and head, global shapes, vocabulary padded."""
        ends = self.make_ends(nnx.Rngs(params=_init_key(seed, -1)))
        return _shared(nnx.to_pure_dict(nnx.state(ends)))

    def init_layer(self, kind: str, seed: int, layer):
        """Float32 parameters of one layer, global shapes."""
        return nnx.to_pure_dict(nnx.state(self.make_block(nnx.Rngs(params=_init_key(seed, layer)))))

    # -- functions --------------------------------------------------------------------------------

    def context(self, layer, batch, samples_B, rng, part=0) -> Place | None:
        """Where a block's input stands; None where that does not matter: whole sequences of one
        segment, no dropout. rng: None for no dropout."""
        segments, positions = batch.get("segments"), batch.get("positions")
        if not (self.config.dropout or self.config.attention_dropout):
            rng = samples_B = None
        if self.slices == 1 and rng is None and segments is None and positions is None:
            return None
        if self.slices > 1 and segments is not None:
            raise UserError(
                f"slices={self.slices} does not go with documents packed into one sequence; use "
                "slices=1, or data that is not packed"
            )
        layer, part = jnp.asarray(layer, jnp.int32), jnp.asarray(part, jnp.int32)
        return Place(layer, samples_B, rng, part, segments, positions)

    def empty_cache(self, kind: str, rows: int):
        """[B, S, n, g, K], n = 2: the keys and values of one layer, for slices of sequences."""
        shards = lax.axis_size(self.axes.tensor) if self.axes.tensor else 1
        groups = max(1, self.config.groups // shards)
        shape = rows, self.config.sequence, 2, groups, self.config.head_size
        return jnp.zeros(shape, jnp.dtype(self.config.compute_dtype))

    def _ends(self, shared):
        ends = {
            name: shared[part][new]
            for part, names in (("embed", _EMBED), ("head", _HEAD))
            for name, new in names.items()
            if new in shared[part]
        }
        return nnx.merge(self._ends_graph, ends)

    def embed(self, shared, batch, place: Place | None = None):
        """x_BsD of batch["tokens"] int32 [B, S]."""
        return {"x": self._ends(shared).embed(batch, place)}

    def layer(self, kind: str, params, stream, place: Place | None = None, *cache):
        """x_BsD -> x_BsD, with the parameters of one layer; for a slice of the sequence, with the
        keys and values of earlier ones, (x_BsD, its own)."""

        def run(params, stream, place, *cache):
            y = nnx.merge(self._block_graph, params)(stream["x"], place, *cache)
            return ({"x": y[0]}, y[1]) if cache else {"x": y}

        if self.recompute == "none":
            return run(params, stream, place, *cache)
        policy = None  # "full": keep the block's input alone
        if self.recompute == "selective":
            policy = jax.checkpoint_policies.save_only_these_names(MATMUL_OUTPUT)
        return jax.checkpoint(run, policy=policy, prevent_cse=False)(params, stream, place, *cache)

    def empty_past(self, kind: str, rows: int, length: int):
        """[n, B, g, S, K], n = 2: the keys and values of one layer, for texts up to that length."""
        *_, groups, size = jax.eval_shape(lambda: self.empty_cache(kind, rows)).shape
        return jnp.zeros((2, rows, groups, length, size), jnp.dtype(self.config.compute_dtype))

    def extend(self, kind: str, params, stream, place: Place | None, keep: Keep):
        """(x_BtD, what `keep` gives back): a block of the next t positions of texts, whose keys and
        values it hands over to be kept. Their positions are those of `place`, or the first t.
        Neither dropout nor sequence parallelism."""
        block = nnx.merge(self._block_graph, params)
        x_BtD, kept = block.extend(stream["x"], place, keep)
        return {"x": x_BtD}, kept

    def next_logits(self, shared, stream, positions_B):
        """logits_Bv float32, this device's part of the vocabulary, at each row's position."""
        return self._ends(shared).next_logits(stream["x"], positions_B)

    def scores(self, shared, stream, batch):
        """(losses, hits) float32 [B, S] of batch["targets"]: a hit is 1 where the target is the
        likeliest token."""
        return self._ends(shared).scores(stream["x"], batch)

    def loss(self, shared, stream, batch):
        """The sum of the losses of batch["targets"] int32 [B, S], weighted by batch["weights"]."""
        return self._ends(shared).loss(stream["x"], batch)


def _init_key(seed: int, layer):
    key = fold(key_data(seed), layer + 1)
    return jax.random.wrap_key_data(key, impl="threefry2x32")


def _shared(ends) -> dict:
    """{"embed": ..., "head": ...}"""
    return {
        part: {new: ends[name] for name, new in names.items() if name in ends}
        for part, names in (("embed", _EMBED), ("head", _HEAD))
    }


def _metadata(tree, name: str) -> dict:
    """What every parameter says of itself under that name, as a plain nested dict."""
    return {
        key: value.get_metadata()[name]
        if isinstance(value, nnx.Variable)
        else _metadata(value, name)
        for key, value in tree.items()
    }
