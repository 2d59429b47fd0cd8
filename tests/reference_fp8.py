"""The oracle of float8: the GPT of `reference`, unsharded, one sequence at a time; products with
layers' weights are in plain float32, of rounded operands. Does not use `mtx`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from reference import _norm

E4M3 = jnp.float8_e4m3fn
LINEARS = "qkv", "out", "up", "down"


def rounded(x, dtype):
    """x rounded to float8 after scaling by the largest power of two with which none overflows."""
    most = float(jnp.finfo(dtype).max)
    scale = 2.0 ** jnp.floor(jnp.log2(most / jnp.abs(x).max()))
    return (x * scale).astype(dtype).astype(jnp.float32) / scale


def scaled(x, dtype, scale):
    """x rounded to float8 numbers times 1 / scale; values beyond the range are clipped to it."""
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x * scale, -most, most).astype(dtype).astype(jnp.float32) / scale


def linear_in(of_gradients):
    """x[S, I] and w[I, O] -> [S, O], with output gradients in this type of float8. scales: of x, w
    and dy; their gradients are then the largest magnitudes. None: each is scaled by its own."""

    def all_rounded(x, w, scales):
        if scales is None:
            return rounded(x, E4M3), rounded(w, E4M3)
        return scaled(x, E4M3, scales[0]), scaled(w, E4M3, scales[1])

    @jax.custom_vjp
    def linear(x, w, scales):
        x, w = all_rounded(x, w, scales)
        return x @ w

    def backward(saved, dy):
        x8, w8 = all_rounded(*saved)
        scales = saved[2]
        if scales is None:
            dy8, most = rounded(dy, of_gradients), None
        else:
            dy8 = scaled(dy, of_gradients, scales[2])
            most = jnp.stack([jnp.abs(a).max() for a in (*saved[:2], dy)])
        return dy8 @ w8.T, x8.T @ dy8, most

    linear.defvjp(lambda x, w, scales: (linear(x, w, scales), (x, w, scales)), backward)
    return linear


def _attention(x, p, linear):
    w, b = p["qkv"]["w"], p["qkv"]["b"]
    qkv = linear("qkv", x, w.reshape(len(w), -1)).reshape(len(x), *b.shape) + b
    q, k, v = qkv.transpose(1, 2, 0, 3)
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    future = jnp.triu(jnp.ones(scores.shape[-2:], bool), 1)
    weights = jax.nn.softmax(jnp.where(future, -1e30, scores), axis=-1)
    o = (weights @ v).transpose(1, 0, 2).reshape(len(x), -1)
    return linear("out", o, p["out"]["w"].reshape(o.shape[-1], -1)) + p["out"]["b"]


def _mlp(x, p, linear):
    h = linear("up", x, p["up"]["w"]) + p["up"]["b"]
    h = 0.5 * h * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (h + 0.044715 * h**3)))
    return linear("down", h, p["down"]["w"]) + p["down"]["b"]


def _losses(params, scales, tokens, targets, linear):
    """[S]; scales: {linear: [L, 3] or None}"""
    embed, head = params["embed"], params["head"]
    x = embed["tokens"][tokens] + embed["positions"][: len(tokens)]

    def layer(x, of_layer):
        p, scales = of_layer

        def named(name, x, w):
            return linear(x, w, scales[name])

        x = x + _attention(_norm(x, p["attention_norm"]), p["attention"], named)
        return x + _mlp(_norm(x, p["mlp_norm"]), p["mlp"], named), None

    x, _ = jax.lax.scan(layer, x, (params["layers"]["block"], scales))
    logits = _norm(x, head["norm"]) @ embed["tokens"].T
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def loss_and_gradients(params, batch, of_gradients):
    """(loss, gradients) of a batch [G, S], with tied embeddings."""
    scales = dict.fromkeys(LINEARS)
    loss, (gradients, _) = _with_scales(of_gradients)(params, scales, batch)
    return loss, gradients


@functools.cache
def _with_scales(of_gradients):
    linear = linear_in(of_gradients)

    def loss(params, scales, batch):
        losses = jax.vmap(lambda scales, *row: _losses(params, scales, *row, linear))
        losses_GS = losses(scales, batch["tokens"], batch["targets"])
        return (losses_GS * batch["weights"]).sum() / batch["weights"].sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def delayed(params, batches, of_gradients, *, steps, margin=0):
    """(losses, gradients, histories) with these parameters and each of the batches in turn:
    tensors are scaled by their largest magnitude in the previous `steps` batches.
    histories: {linear: [L, 3, batches]}, of input, weight and output gradient."""
    run, rows = _with_scales(of_gradients), len(batches[0]["tokens"])
    layers = len(params["layers"]["block"]["mlp"]["up"]["w"])
    ends = np.array([float(jnp.finfo(dtype).max) for dtype in (E4M3, E4M3, of_gradients)])
    histories = {name: np.zeros((layers, 3, 0)) for name in LINEARS}
    losses, gradients = [], []
    for batch in batches:
        most = {n: h[..., -steps:].max(axis=-1, initial=0) for n, h in histories.items()}
        scales = {
            n: np.where(m > 0, 2.0 ** (np.floor(np.log2(ends / np.where(m > 0, m, 1))) - margin), 1)
            for n, m in most.items()
        }
        each = {n: np.tile(np.float32(s), (rows, 1, 1)) for n, s in scales.items()}
        loss, (of_params, seen) = jax.device_get(run(params, each, batch))
        losses.append(loss)
        gradients.append(of_params)
        histories = {
            n: np.concatenate([h, seen[n].max(axis=0)[..., None]], axis=-1)
            for n, h in histories.items()
        }
    return losses, gradients, histories
