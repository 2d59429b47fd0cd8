"""The oracle of float8: the GPT of `reference`, unsharded, a sequence at a time; products with the
weights of layers in plain float32, of operands that were rounded. Nothing of `mtx`."""

import jax
import jax.numpy as jnp
from reference import _norm


def rounded(x, dtype):
    """x as numbers of float8 times a power of two, the largest with which none overflows."""
    most = float(jnp.finfo(dtype).max)
    scale = 2.0 ** jnp.floor(jnp.log2(most / jnp.abs(x).max()))
    return (x * scale).astype(dtype).astype(jnp.float32) / scale


def linear_in(of_gradients):
    """x[S, I] and w[I, O] -> [S, O], with output gradients in that type of float8."""
    e4m3 = jnp.float8_e4m3fn

    @jax.custom_vjp
    def linear(x, w):
        return rounded(x, e4m3) @ rounded(w, e4m3)

    def backward(saved, dy):
        x, w = saved
        dy = rounded(dy, of_gradients)
        return dy @ rounded(w, e4m3).T, rounded(x, e4m3).T @ dy

    linear.defvjp(lambda x, w: (linear(x, w), (x, w)), backward)
    return linear


def _attention(x, p, linear):
    w, b = p["qkv"]["w"], p["qkv"]["b"]
    qkv = linear(x, w.reshape(len(w), -1)).reshape(len(x), *b.shape) + b
    q, k, v = qkv.transpose(1, 2, 0, 3)
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    future = jnp.triu(jnp.ones(scores.shape[-2:], bool), 1)
    weights = jax.nn.softmax(jnp.where(future, -1e30, scores), axis=-1)
    o = (weights @ v).transpose(1, 0, 2).reshape(len(x), -1)
    return linear(o, p["out"]["w"].reshape(o.shape[-1], -1)) + p["out"]["b"]


def _mlp(x, p, linear):
    h = linear(x, p["up"]["w"]) + p["up"]["b"]
    h = 0.5 * h * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (h + 0.044715 * h**3)))
    return linear(h, p["down"]["w"]) + p["down"]["b"]


def _losses(params, tokens, targets, linear):
    """[S]"""
    embed, head = params["embed"], params["head"]
    x = embed["tokens"][tokens] + embed["positions"][: len(tokens)]

    def layer(x, p):
        x = x + _attention(_norm(x, p["attention_norm"]), p["attention"], linear)
        return x + _mlp(_norm(x, p["mlp_norm"]), p["mlp"], linear), None

    x, _ = jax.lax.scan(layer, x, params["layers"]["block"])
    logits = _norm(x, head["norm"]) @ embed["tokens"].T
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def loss_and_gradients(params, batch, of_gradients):
    """Of a batch [G, S], with tied embeddings."""
    linear = linear_in(of_gradients)

    def loss(params):
        losses = jax.vmap(lambda *row: _losses(params, *row, linear))
        total = (losses(batch["tokens"], batch["targets"]) * batch["weights"]).sum()
        return total / batch["weights"].sum()

    return jax.jit(jax.value_and_grad(loss))(params)
