"""The oracle of family "llama": plain jnp, unsharded, from the papers' formulas, without using
`mtx`. Parameters are in canonical form."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def _norm(x, scale, epsilon=1e-5):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def frequencies(size, base, *, scaling="none", factor=1.0, low=1.0, high=4.0, original=8192):
    """Frequencies, one pair at a time, as Llama 3.1's authors describe them."""
    found = []
    for pair in range(size // 2):
        turning = base ** (-2 * pair / size)
        wavelength = 2 * math.pi / turning
        if scaling == "linear":
            turning /= factor
        if scaling == "llama3" and wavelength > original / low:
            turning /= factor
        elif scaling == "llama3" and wavelength > original / high:
            smooth = (original / wavelength - low) / (high - low)
            turning = (1 - smooth) * turning / factor + smooth * turning
        found.append(turning)
    return np.array(found)


def yarn_frequencies(size, base, *, factor, low=1.0, high=32.0, original=8192, truncate=True):
    """Peng et al. 2023, equations 17 to 23: the ramp lies between two pairs."""

    def pair(turns):
        return size * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

    first, last = pair(high), pair(low)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last, found = max(first, 0), min(last, size - 1), []
    for place in range(size // 2):
        turning = base ** (-2 * place / size)
        slowed = min(1, max(0, (place - first) / (last - first)))
        found.append((1 - slowed) * turning + slowed * turning / factor)
    return np.array(found)


def dynamic_frequencies(size, base, *, factor, sequence, original):
    """With a base so large that the slowest pair turns as if positions were divided by `longer`."""
    longer = max(1, factor * sequence / original - (factor - 1))
    fastest_to_slowest = np.arange(size // 2) / (size // 2 - 1)
    return base ** (-2 * np.arange(size // 2) / size) * longer**-fastest_to_slowest


def _turn(x, positions, frequency):
    """x [b, s, h, k] as complex numbers of pairs (k, k + K/2); positions [b, s]."""
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:]
    z = z * jnp.exp(1j * positions[:, :, None, None] * frequency)
    return jnp.concatenate([z.real, z.imag], axis=-1)


def _attention(x, p, positions, segments, frequency):
    q = _turn(jnp.einsum("bsd,dhk->bshk", x, p["qkv"]["q"]), positions, frequency)
    k, v = jnp.einsum("bsd,dngk->nbsgk", x, p["qkv"]["kv"])
    k = _turn(k, positions, frequency)
    each = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, each, axis=2) for a in (k, v))
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / q.shape[-1] ** 0.5
    future = jnp.triu(jnp.ones(scores.shape[-2:], bool), 1)
    hidden = future | (segments[:, None, :, None] != segments[:, None, None, :])
    weights = jax.nn.softmax(jnp.where(hidden, -1e30, scores), axis=-1)
    return jnp.einsum("bhst,bthk,hkd->bsd", weights, v, p["out"]["w"])


def _mlp(x, p):
    gate, up = jnp.einsum("bsd,dnf->nbsf", x, p["up"]["w"])
    return (gate / (1 + jnp.exp(-gate)) * up) @ p["down"]["w"]


def logits(params, batch, frequency):
    """float32 [G, S, V]"""
    embed, head, shape = params["embed"], params["head"], batch["tokens"].shape
    x = embed["tokens"][batch["tokens"]]
    positions = batch.get("positions", jnp.broadcast_to(jnp.arange(shape[1]), shape))
    segments = batch.get("segments", jnp.zeros(shape, int))

    def layer(x, p):
        h = _norm(x, p["attention_norm"]["scale"])
        x = x + _attention(h, p["attention"], positions, segments, frequency)
        return x + _mlp(_norm(x, p["mlp_norm"]["scale"]), p["mlp"]), None

    x, _ = jax.lax.scan(layer, x, params["layers"]["block"])
    return _norm(x, head["norm"]["scale"]) @ head.get("output", embed["tokens"]).T


def loss(params, batch, frequency):
    """The mean loss over the positions of weight 1."""
    all_logits = logits(params, batch, frequency)
    chosen = jnp.take_along_axis(all_logits, batch["targets"][..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(all_logits, axis=-1) - chosen
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


loss_and_gradients = jax.jit(jax.value_and_grad(loss))
