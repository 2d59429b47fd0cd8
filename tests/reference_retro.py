"""The oracle of RETRO: plain jnp, unsharded, chunk by chunk, after Borgeaud et al. 2022, algorithm
1 and listing 1, with rotary positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def batch_of_chunks(model, rows, seed=0):
    """Random texts and neighbours; some targets have weight 0."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, model.vocab, (rows, model.sequence + 1), dtype=np.int32)
    count = model.sequence // model.chunk * model.neighbours * model.retrieved
    return {
        "tokens": ids[:, :-1], "targets": ids[:, 1:],
        "weights": (random.random((rows, model.sequence)) < 0.9).astype(np.float32),
        "neighbours": random.integers(0, model.vocab, (rows, count), dtype=np.int32),
    }  # fmt: skip


def _norm(x, p):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["scale"]


def _turned(x, places):
    """x [..., T, h, K] rotated by its places [T]; numbers k and k + K/2 are a pair."""
    half = x.shape[-1] // 2
    angle = np.asarray(places)[:, None, None] * 10000.0 ** -(np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.asarray(np.cos(angle), x.dtype), jnp.asarray(np.sin(angle), x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _softmax_of(q, k, v, hidden=None):
    """[b, Q, h, K] from k and v [b, T, h, K]"""
    scores = jnp.einsum("bqhk,bthk->bhqt", q, k) / np.sqrt(q.shape[-1])
    if hidden is not None:
        scores = jnp.where(hidden, -jnp.inf, scores)
    return jnp.einsum("bhqt,bthk->bqhk", jax.nn.softmax(scores, axis=-1), v)


def _out(o, p):
    return jnp.einsum("bqhk,hkd->bqd", o, p["out"]["w"])


def _mlp(x, p):
    h = jax.nn.gelu(_norm(x, p["mlp_norm"]) @ p["mlp"]["up"]["w"], approximate=True)
    return x + h @ p["mlp"]["down"]["w"]


def _causal(x, layer):
    p, size = layer["attention"], x.shape[1]
    h, places = _norm(x, layer["attention_norm"]), np.arange(x.shape[1])
    q = jnp.einsum("bsd,dhk->bshk", h, p["qkv"]["q"])
    k, v = jnp.einsum("bsd,dnhk->nbshk", h, p["qkv"]["kv"])
    later = np.triu(np.ones((size, size), bool), 1)
    return x + _out(_softmax_of(_turned(q, places), _turned(k, places), v, later), p)


def _cross(x, y, p, of_x, of_y):
    q = jnp.einsum("bqd,dhk->bqhk", x, p["q"]["w"])
    k, v = jnp.einsum("btd,dnhk->nbthk", y, p["kv"]["w"])
    return _out(_softmax_of(_turned(q, of_x), _turned(k, of_y), v), p)


def _encoder_layer(e, state, layer, model):
    """For one neighbour, e [b, R, E]; state [b, M, D]: the decoder's for its chunk, not normed"""
    p, places = layer["attention"], np.arange(model.retrieved)
    h = _norm(e, layer["attention_norm"])
    q, k, v = jnp.einsum("bsd,dnhk->nbshk", h, p["qkv"]["w"])
    e = e + _out(_softmax_of(_turned(q, places), _turned(k, places), v), p)
    if "state" in layer:
        h, state = _norm(e, layer["state_norm"]), _norm(state, layer["read_norm"])
        e = e + _cross(h, state, layer["state"], places, np.arange(model.chunk))
    e = _mlp(e, layer)
    return _norm(e, layer["end_norm"]) if "end_norm" in layer else e


def _chunked_cross(x, found, layer, model):
    """x plus what each chunk's neighbours add; found[u, j] is [b, R, E], the j-th of chunk u"""
    size, h = model.chunk, _norm(x, layer["cross_norm"])
    places = np.tile(np.arange(model.retrieved), model.neighbours)
    for u, of_chunk in enumerate(found):
        e = jnp.concatenate(list(of_chunk), axis=1)
        first = (u + 1) * size - 1
        end = min(first + size, x.shape[1])
        asking = np.arange(size - 1, size - 1 + end - first)
        added = _cross(h[:, first:end], e, layer["cross"], asking, places)
        x = x.at[:, first:end].add(added)
    return x


def logits(params, batch, model):
    """float32 [G, S, V]"""
    embed, layers = params["embed"], params["layers"]
    chunks, x = model.sequence // model.chunk, embed["tokens"][batch["tokens"]]
    table = embed.get("neighbours", embed["tokens"])
    rows = batch["neighbours"].reshape(len(x), chunks, model.neighbours, model.retrieved)
    found = table[rows.transpose(1, 2, 0, 3)]  # [u, j, b, R, E]
    place = dict.fromkeys(layers, 0)

    def next_of(kind):
        p = jax.tree.map(lambda a: a[place[kind]], layers[kind])
        place[kind] += 1
        return p

    reads = range(model.retrieval_first, model.layers + 1, model.retrieval_every)
    for number in range(1, model.layers - model.encoder_layers + 1):
        if number == model.retrieval_first:
            layer = next_of("state")
            x = _causal(x, layer)
            states = jnp.stack(jnp.split(x, chunks, axis=1))
            encoders = [layer["encoder"]]
            encoders += [next_of("encoder")["encoder"] for _ in range(model.encoder_layers - 2)]
            encoders += [next_of("end")["encoder"]] if model.encoder_layers > 1 else []
            for p in encoders:
                of_one = functools.partial(_encoder_layer, layer=p, model=model)
                found = jax.vmap(jax.vmap(of_one, (0, None)))(found, states)
            layer = next_of("joins")
        else:
            layer = next_of("reads" if number in reads else "block")
            x = _causal(x, layer)
        if number in reads:
            x = _chunked_cross(x, found, layer, model)
        x = _mlp(x, layer)
    x = _norm(x, params["head"]["norm"])
    return x @ params["head"].get("output", embed["tokens"]).T


@functools.partial(jax.jit, static_argnums=2)
def loss(params, batch, model):
    found = logits(params, batch, model)
    chosen = jnp.take_along_axis(found, batch["targets"][..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(found, axis=-1) - chosen
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


loss_and_gradients = jax.jit(jax.value_and_grad(loss), static_argnums=2)
