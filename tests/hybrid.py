"""A model of three kinds of layers that share no parameter shapes, in plain functions: it
implements all of `mtx.pipeline.model`'s Protocol without the project's own layers. And its
unsharded oracle.

attention: causal attention (keys and values are passed from slice to slice) and an MLP
mixer: a gated causal convolution along the sequence (its inputs are passed from slice to slice),
       which also sees the embedding: the stream's second leaf
gate: one matrix, passes nothing from slice to slice

A layer's output is scaled by its place in the model, so that no two of a kind can be swapped.

Legend: B rows · S sequence (s: shard, b: slice) · D hidden · H heads (h: shard) · K head size · F
feed-forward (f: shard) · W width of the convolution
"""

from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import mtx
from mtx.schedules.partition import place_layers
from mtx.sharding.collectives import reduce_from, scatter_sequence
from mtx.sharding.linear import MATMUL_OUTPUT, column_products, matmul
from mtx.sharding.vocab import embed_tokens, vocab_logits, vocab_losses, vocab_scores

WIDTH, WIDER = 3, 3  # of the convolution; of the mixer's inner size, over D
VOCAB = ("pipe", "tensor")


def shapes(kind, model):
    """{path: (shape, spec, role)} of a layer."""
    d, h, k, f = model.hidden, model.heads, model.head_size, model.ffn_hidden
    norm = ((d,), P(None), "norm")
    if kind == "attention":
        return {
            "norm": norm, "qkv": ((d, 3, h, k), P(None, None, "tensor"), "matrix"),
            "out": ((h, k, d), P("tensor"), "matrix"), "mlp_norm": norm,
            "up": ((d, f), P(None, "tensor"), "matrix"), "down": ((f, d), P("tensor"), "matrix"),
        }  # fmt: skip
    if kind == "mixer":
        inner = WIDER * d
        return {
            "norm": norm, "skip": norm, "enter": ((d, 2, inner), P(None, None, "tensor"), "matrix"),
            "kernel": ((WIDTH, inner), P(None, "tensor"), "matrix"),
            "leave": ((inner, d), P("tensor"), "matrix"),
        }  # fmt: skip
    return {"w": ((d, d), P(None, "tensor"), "matrix"), "back": ((d, d), P("tensor"), "matrix")}


def scale(layer):
    return 1 / (1.0 + layer)


def norm(x, w):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w


class Hybrid:
    """See `mtx.pipeline.model.PipelineModel`."""

    def __init__(self, config, pattern, *, axes, recompute, vocab_shards, slices):
        self.config, self.pattern = config, pattern
        self.axes, self.recompute, self.slices = axes, recompute, slices
        self.vocab_rows = config.padded_vocab(vocab_shards)

    def _each(self, which):
        table = (P(VOCAB, None), "embedding"), (P(VOCAB, None), "head"), (P(None), "norm")
        embedding, output, norm = (each[which] for each in table)
        kinds = {kind: shapes(kind, self.config) for kind in dict.fromkeys(self.pattern)}
        return {
            "embed": {"tokens": embedding}, "head": {"norm": norm, "output": output},
            "layers": {
                kind: {name: said[1 + which] for name, said in leaves.items()}
                for kind, leaves in kinds.items()
            },
        }  # fmt: skip

    @property
    def shapes(self):
        def all_of_them():
            layers = {kind: self.init_layer(kind, 0, 0) for kind in set(self.pattern)}
            return self.init_shared(0) | {"layers": layers}

        return jax.eval_shape(all_of_them)

    specs = property(lambda self: self._each(0))
    roles = property(lambda self: self._each(1))
    inputs = property(lambda self: jax.tree.map(lambda _: 1, self.roles))
    rules = property(lambda self: jax.tree.map(lambda _: None, self.roles))
    trained = property(lambda self: jax.tree.map(lambda _: True, self.roles))

    def init_shared(self, seed):
        keys = jax.random.split(jax.random.key(seed), 2)
        used = (jnp.arange(self.vocab_rows) < self.config.vocab)[:, None]

        def table(key):  # each row has its own key, so padding rows do not change the others
            row = lambda n: jax.random.normal(jax.random.fold_in(key, n), self.config.hidden)  # noqa: E731
            return 0.3 * jax.vmap(row)(jnp.arange(self.vocab_rows)) * used

        tokens, output = map(table, keys)
        return {
            "embed": {"tokens": tokens},
            "head": {"norm": jnp.ones(self.config.hidden), "output": output},
        }

    def init_layer(self, kind, seed, layer):
        key = jax.random.fold_in(jax.random.key(seed), layer + 1)
        return {
            name: jnp.ones(shape)
            if role == "norm"
            else 0.3 * jax.random.normal(jax.random.fold_in(key, n), shape)
            for n, (name, (shape, _, role)) in enumerate(shapes(kind, self.config).items())
        }

    def batch_fields(self, rows):
        fields = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
        return {n: jax.ShapeDtypeStruct((rows, self.config.sequence), t) for n, t in fields.items()}

    def weigh(self, batch, total):
        return batch

    # -- a microbatch -----------------------------------------------------------------------------

    def context(self, layer, batch, samples_B, rng, part, busy):
        positions = batch.get("positions")
        return jnp.asarray(layer, jnp.int32), jnp.asarray(part, jnp.int32), positions

    def embed(self, shared, batch, context):
        x = embed_tokens(shared["embed"]["tokens"], batch["tokens"], self.axes)
        return {"x": x, "first": x}

    def layer(self, kind, params, stream, context, *cache):
        run = partial(getattr(self, f"_{kind}"))
        if self.recompute != "none":
            policy = None
            if self.recompute == "selective":
                policy = jax.checkpoint_policies.save_only_these_names(MATMUL_OUTPUT)
            run = jax.checkpoint(run, policy=policy, prevent_cse=False)
        x, own = run(params, stream, context, *cache)
        return (stream | {"x": x}, own) if cache else stream | {"x": x}

    def _columns(self, x, w):
        (y,) = column_products(x, (w,), (None,), self.axes)
        return checkpoint_name(y, MATMUL_OUTPUT)

    def _rows(self, x, w):
        y = matmul(x, w, w.ndim - 1)
        if self.axes.sequence_parallel:
            return scatter_sequence(y, self.axes.tensor)
        return reduce_from(y, self.axes.tensor)

    def _earlier(self, own, cache, context):
        """(`own`, or for a slice the whole sequence with `own` in its place; where `own` begins)"""
        if not cache:
            return own, 0
        start = context[1] * own.shape[1]
        return lax.dynamic_update_slice_in_dim(cache[0]["own"], own, start, 1), start

    def _attend(self, qkv, keys, positions):
        """qkv [B, b, 3, h, K], keys [B, S, 2, h, K], positions [B or 1, b]"""
        scores = jnp.einsum("bqhk,bshk->bhqs", qkv[:, :, 0], keys[:, :, 0])
        seen = jnp.arange(keys.shape[1]) <= positions[:, None, :, None]
        scores = jnp.where(seen, scores / qkv.shape[-1] ** 0.5, -1e30)
        return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores, axis=-1), keys[:, :, 1])

    def _after_attention(self, params, x, o, size):
        x = x + size * self._rows(o, params["out"])
        h = jnp.tanh(self._columns(norm(x, params["mlp_norm"]), params["up"]))
        return x + size * self._rows(h, params["down"])

    def _attention(self, params, stream, context, *cache):
        x, size = stream["x"], scale(context[0])
        qkv = self._columns(norm(x, params["norm"]), params["qkv"])
        keys, start = self._earlier(qkv[:, :, 1:], cache, context)
        o = self._attend(qkv, keys, start + jnp.arange(qkv.shape[1])[None])
        return self._after_attention(params, x, o, size), {"own": qkv[:, :, 1:]}

    def _mixer(self, params, stream, context, *cache):
        x, size = stream["x"], scale(context[0])
        inner = self._columns(norm(x, params["norm"]), params["enter"])
        whole, start = self._earlier(inner[:, :, 0], cache, context)
        before = jnp.pad(whole, ((0, 0), (WIDTH - 1, 0), (0, 0)))
        mixed = sum(
            lax.dynamic_slice_in_dim(before, start + n, inner.shape[1], 1) * params["kernel"][n]
            for n in range(WIDTH)
        )
        y = self._rows(mixed * jax.nn.sigmoid(inner[:, :, 1]), params["leave"])
        return x + size * (y + stream["first"] * params["skip"]), {"own": inner[:, :, 0]}

    def _gate(self, params, stream, context, *cache):
        x, size = stream["x"], scale(context[0])
        return x + size * self._rows(jnp.tanh(self._columns(x, params["w"])), params["back"]), {}

    # -- head -------------------------------------------------------------------------------------

    def _head(self, shared, stream):
        return norm(stream["x"], shared["head"]["norm"]), shared["head"]["output"]

    def head_positions(self, shared, stream):
        return stream["x"].shape[1]

    def loss(self, shared, stream, batch):
        x, table = self._head(shared, stream)
        losses = vocab_losses(x, table, batch["targets"], self.config.vocab, self.axes)
        return (losses * batch["weights"]).sum()

    def losses(self, shared, stream, batch):
        return {"loss": self.loss(shared, stream, batch)}

    def scores(self, shared, stream, batch):
        x, table = self._head(shared, stream)
        return vocab_scores(x, table, batch["targets"], self.config.vocab, self.axes)

    def next_logits(self, shared, stream, positions_B):
        x, table = self._head(shared, stream)
        x = jnp.take_along_axis(x, positions_B[:, None, None], axis=1)
        return vocab_logits(x, table, self.config.vocab, self.axes)[:, 0]

    # -- slices, and texts that are continued -----------------------------------------------------

    def empty_cache(self, kind, rows):
        if kind == "gate":
            return {}
        shards = lax.axis_size("tensor") if self.axes.tensor else 1
        model = self.config
        own = {
            "attention": (2, model.heads // shards, model.head_size),
            "mixer": (WIDER * model.hidden // shards,),
        }[kind]
        return {"own": jnp.zeros((rows, model.sequence, *own))}

    def empty_past(self, kind, rows, length):
        if kind != "attention":
            return {}
        _, _, n, heads, size = jax.eval_shape(lambda: self.empty_cache(kind, rows))["own"].shape
        return {"own": jnp.zeros((n, rows, heads, length, size))}

    def extend(self, kind, params, stream, context, keep):
        if kind == "mixer":
            raise NotImplementedError("a mixer keeps nothing of texts")
        if kind == "gate":
            return stream | {"x": self._gate(params, stream, context)[0]}
        x, size = stream["x"], scale(context[0])
        qkv = self._columns(norm(x, params["norm"]), params["qkv"])
        held = keep({"own": jnp.transpose(qkv[:, :, 1:], (2, 0, 3, 1, 4))})
        if held is None:
            keys, positions = qkv[:, :, 1:], jnp.arange(qkv.shape[1])[None]
        else:
            keys, positions = jnp.transpose(held["own"], (1, 3, 0, 2, 4)), context[2]
        o = self._attend(qkv, keys, positions)
        return stream | {"x": self._after_attention(params, x, o, size)}


class HybridTrainer(mtx.Trainer):
    """A hybrid's trainer: `run.model` gives its sizes."""

    def __init__(self, run, pattern, **more):
        self.pattern = pattern
        super().__init__(run, **more)

    @cached_property
    def model(self):
        layout = self.run.layout
        return Hybrid(
            self.run.model, self.pattern, axes=self.axes, recompute=layout.recompute,
            vocab_shards=layout.vocab_shards, slices=self.schedule.slices,
        )  # fmt: skip

    @cached_property
    def placement(self):
        layout = self.run.layout
        return place_layers(
            self.pattern, pipe=layout.pipe, virtual=layout.virtual,
            stage_layers=layout.stage_layers, virtual_stages=self.schedule.virtual_stages,
        )  # fmt: skip


# -- the oracle ------------------------------------------------------------------------------------


def logits(params, tokens, pattern):
    """float32 [G, S, V], from parameters in canonical form."""
    first = x = params["embed"]["tokens"][tokens]
    count = dict.fromkeys(pattern, 0)
    for number, kind in enumerate(pattern):
        p = jax.tree.map(lambda a, n=count[kind]: a[n], params["layers"][kind])
        count[kind] += 1
        size = 1 / (1.0 + number)
        if kind == "gate":
            x = x + size * jnp.tanh(x @ p["w"]) @ p["back"]
        elif kind == "mixer":
            u, gate = jnp.einsum("bsd,dnf->nbsf", norm(x, p["norm"]), p["enter"])
            mixed = sum(
                jnp.roll(u, n, axis=1).at[:, :n].set(0) * p["kernel"][WIDTH - 1 - n]
                for n in range(WIDTH)
            )
            x = x + size * ((mixed * jax.nn.sigmoid(gate)) @ p["leave"] + first * p["skip"])
        else:
            q, k, v = jnp.einsum("bsd,dnhk->nbhsk", norm(x, p["norm"]), p["qkv"])
            scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
            future = jnp.triu(jnp.ones(scores.shape[-2:], bool), 1)
            weights = jax.nn.softmax(jnp.where(future, -1e30, scores), axis=-1)
            x = x + size * jnp.einsum("bhsk,hkd->bsd", weights @ v, p["out"])
            x = x + size * jnp.tanh(norm(x, p["mlp_norm"]) @ p["up"]) @ p["down"]
    return norm(x, params["head"]["norm"]) @ params["head"]["output"].T


@partial(jax.jit, static_argnames="pattern")
def loss_and_gradients(params, batch, pattern):
    def loss(params):
        all_logits = logits(params, batch["tokens"], pattern)
        chosen = jnp.take_along_axis(all_logits, batch["targets"][..., None], axis=-1)[..., 0]
        losses = jax.nn.logsumexp(all_logits, axis=-1) - chosen
        return (losses * batch["weights"]).sum() / batch["weights"].sum()

    return jax.value_and_grad(loss)(params)


def perturbed(params, seed=0):
    """The parameters with noise added, so that norms are not all one."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda a: a + 0.1 * random.normal(size=a.shape).astype(a.dtype), params)
