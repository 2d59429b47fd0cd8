"""The oracle of T5: encoder and decoder in plain jnp, unsharded, after Raffel et al. 2020."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def batch_of_spans(model, rows, seed=0):
    """Encoder texts of several lengths, and targets, some of weight 0."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, model.vocab, (rows, model.sequence + 1), dtype=np.int32)
    shape = rows, model.encoder_sequence
    lengths = random.integers(model.encoder_sequence // 2, model.encoder_sequence + 1, (rows, 1))
    return {
        "inputs": random.integers(0, model.vocab, shape, dtype=np.int32),
        "segments": (np.arange(model.encoder_sequence) < lengths).astype(np.int32),
        "tokens": ids[:, :-1], "targets": ids[:, 1:],
        "weights": (random.random((rows, model.sequence)) < 0.9).astype(np.float32),
    }  # fmt: skip


def bucket(distance, *, causal, buckets, farthest):
    """The bucket of one key at a distance after one query, in plain Python numbers."""
    first = 0
    if causal:
        distance = max(0, -distance)
    else:
        buckets //= 2
        first, distance = (buckets if distance > 0 else 0), abs(distance)
    near = buckets // 2
    if distance < near:
        return first + distance
    far = near + int(np.log(distance / near) / np.log(farthest / near) * (buckets - near))
    return first + min(far, buckets - 1)


def _norm(x, p):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["scale"]


def _attention(x, y, p, bias, hidden):
    """Attention of x to y; bias [h, S, T]; hidden: bool, is broadcast."""
    if "qkv" in p:
        q, k, v = jnp.einsum("bsd,dnhk->nbhsk", x, p["qkv"]["w"])
    else:
        q = jnp.einsum("bsd,dhk->bhsk", x, p["q"]["w"])
        k, v = jnp.einsum("bsd,dnhk->nbhsk", y, p["kv"]["w"])
    scores = jnp.where(hidden, -jnp.inf, q @ k.swapaxes(-1, -2) + bias)
    return jnp.einsum("bhsk,hkd->bsd", jax.nn.softmax(scores, axis=-1) @ v, p["out"]["w"])


def _mlp(x, p):
    if "mlp" in p:
        h, down = jax.nn.relu(_norm(x, p["mlp_norm"]) @ p["mlp"]["up"]["w"]), p["mlp"]["down"]
    else:
        gate, up = jnp.einsum("bsd,dnf->nbsf", _norm(x, p["gated_norm"]), p["gated"]["up"]["w"])
        h, down = jax.nn.gelu(gate, approximate=True) * up, p["gated"]["down"]
    return h @ down["w"]


def logits(params, batch, model):
    """float32 [G, S, V]"""

    def bias(table, size, causal):
        numbers = dict(causal=causal, buckets=model.buckets, farthest=model.farthest)
        found = [[bucket(key - query, **numbers) for key in range(size)] for query in range(size)]
        return jnp.moveaxis(table[np.array(found)], -1, 0)

    embed, layers = params["embed"], params["layers"]
    x, y = embed["tokens"][batch["inputs"]], embed["tokens"][batch["tokens"]]
    padding = batch["segments"][:, None, None] == 0
    later = np.triu(np.ones((model.sequence,) * 2, bool), 1)
    both_ways = bias(embed["encoder_bias"], model.encoder_sequence, False)
    before = bias(embed["decoder_bias"], model.sequence, True)
    end = layers["end"]
    encoder = [layers["encoder"]] if "encoder" in layers else []

    def encode(x, p):
        h = _norm(x, p["attention_norm"])
        x = x + _attention(h, h, p["attention"], both_ways, padding)
        return x + _mlp(x, p), None

    def decode(y, p):
        h = _norm(y, p["attention_norm"])
        y = y + _attention(h, h, p["attention"], before, later)
        y = y + _attention(_norm(y, p["cross_norm"]), x, p["cross"], 0.0, padding)
        return y + _mlp(y, p), None

    for kind in (*encoder, end):
        x, _ = jax.lax.scan(encode, x, kind)
    x = _norm(x, {"scale": end["end_norm"]["scale"][0]})
    y, _ = jax.lax.scan(decode, y, layers["decoder"])
    y = _norm(y, params["head"]["norm"])
    if "output" in params["head"]:
        return y @ params["head"]["output"].T
    return y * model.hidden**-0.5 @ embed["tokens"].T


@functools.partial(jax.jit, static_argnums=2)
def loss_and_gradients(params, batch, model):
    def loss(params):
        found = logits(params, batch, model)
        chosen = jnp.take_along_axis(found, batch["targets"][..., None], axis=-1)[..., 0]
        losses = jax.nn.logsumexp(found, axis=-1) - chosen
        return (losses * batch["weights"]).sum() / batch["weights"].sum()

    return jax.value_and_grad(loss)(params)
