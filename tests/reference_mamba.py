"""Mamba-2 and its hybrids in plain jnp, position by position, by the recurrence of Dao and Gu 2024,
equation (1), without using `mtx`.

Parameters are in canonical form, global shapes: {"embed", "head", "layers": {kind: leaves}}, with
leaves [L, ...] for the layers of a kind.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp


def recurrence(x, dt, a, b, c, state, starts):
    """(y [B, S, H, K], the last state [B, H, K, N]), given x [B, S, H, K], dt [B, S, H], a [H], b
    and c [B, S, H, N]; starts: [B, S], where documents begin."""

    def step(state, at):
        x, dt, b, c, begins = at
        state = jnp.where(begins[:, None, None, None], 0, state)
        state = jnp.exp(dt * a)[..., None, None] * state
        state = state + jnp.einsum("bh,bhk,bhn->bhkn", dt, x, b)
        return state, jnp.einsum("bhkn,bhn->bhk", state, c)

    by_position = (jnp.moveaxis(each, 1, 0) for each in (x, dt, b, c, starts))
    state, y = jax.lax.scan(step, state, tuple(by_position))
    return jnp.moveaxis(y, 0, 1), state


def _norm(x, scale, epsilon=1e-5):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def _convolve(x, kernel, bias, segments):
    """x [B, S, C], kernel [W, C]: position s sees s - W + 1 to s within its document."""
    total = bias
    for back in range(len(kernel)):
        earlier = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, : x.shape[1]]
        their = jnp.pad(segments, ((0, 0), (back, 0)), constant_values=-1)[:, : x.shape[1]]
        total = total + jnp.where((their == segments)[..., None], earlier, 0) * kernel[-1 - back]
    return jax.nn.silu(total)


def _mixer(x, p, segments, least_dt):
    rows, size = x.shape[:2]
    heads, head_size = p["norm"]["scale"].shape
    groups, state = p["bc"].shape[-2:]

    def convolved(name, values):
        kernel, bias = p[f"{name}_kernel"], p[f"{name}_bias"]
        flat = values.reshape(rows, size, -1)
        done = _convolve(flat, kernel.reshape(len(kernel), -1), bias.ravel(), segments)
        return done.reshape(values.shape)

    zx = jnp.einsum("bsd,dnhk->nbshk", x, p["zx"])
    u = convolved("x", zx[1])
    bc = convolved("bc", jnp.einsum("bsd,dngk->bsngk", x, p["bc"]))
    b, c = (jnp.repeat(bc[:, :, n], heads // groups, axis=2) for n in (0, 1))
    dt = jnp.maximum(jax.nn.softplus(x @ p["dt"] + p["dt_bias"]), least_dt)
    starts = jnp.diff(segments, axis=1, prepend=-1) != 0
    nothing = jnp.zeros((rows, heads, head_size, state))
    y, _ = recurrence(u, dt, -jnp.exp(p["A_log"]), b, c, nothing, starts)
    y = (y + p["D"][:, None] * u) * jax.nn.silu(zx[0])
    grouped = _norm(y.reshape(rows, size, groups, -1), 1.0).reshape(y.shape)
    return jnp.einsum("bshk,hkd->bsd", grouped * p["norm"]["scale"], p["out"]["w"])


def _attention(x, p, segments):
    q = jnp.einsum("bsd,dhk->bhsk", x, p["qkv"]["q"])
    k, v = jnp.einsum("bsd,dngk->nbgsk", x, p["qkv"]["kv"])
    k, v = (jnp.repeat(a, q.shape[1] // k.shape[1], axis=1) for a in (k, v))
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    unseen = jnp.triu(jnp.ones(scores.shape[-2:], bool), 1)
    unseen = unseen | (segments[:, None, :, None] != segments[:, None, None, :])
    weights = jax.nn.softmax(jnp.where(unseen, -1e30, scores), axis=-1)
    return jnp.einsum("bhsk,hkd->bsd", weights @ v, p["out"]["w"])


def logits(params, tokens, segments, pattern, least_dt):
    """float32 [G, S, V]; pattern: the kind of each layer."""
    x = params["embed"]["tokens"][tokens]
    done = dict.fromkeys(pattern, 0)

    def layer(x, p):
        (name,) = (each for each in ("mamba", "attention", "mlp") if each in p)
        h, p = _norm(x, p[f"{name}_norm"]["scale"]), p[name]
        if name == "mamba":
            return x + _mixer(h, p, segments, least_dt), None
        if name == "attention":
            return x + _attention(h, p, segments), None
        return x + jnp.maximum(h @ p["up"]["w"], 0) ** 2 @ p["down"]["w"], None

    for kind, alike in itertools.groupby(pattern):
        first, done[kind] = done[kind], done[kind] + len(list(alike))
        run = jax.tree.map(lambda a, i=first, j=done[kind]: a[i:j], params["layers"][kind])
        x, _ = jax.lax.scan(layer, x, run)
    table = params["head"].get("output", params["embed"]["tokens"])
    return _norm(x, params["head"]["norm"]["scale"]) @ table.T


@partial(jax.jit, static_argnames=("pattern", "least_dt"))
def loss_and_gradients(params, batch, pattern, least_dt=0.0):
    segments = batch.get("segments", jnp.zeros_like(batch["tokens"]))

    def loss(params):
        found = logits(params, batch["tokens"], segments, pattern, least_dt)
        chosen = jnp.take_along_axis(found, batch["targets"][..., None], axis=-1)[..., 0]
        losses = jax.nn.logsumexp(found, axis=-1) - chosen
        return (losses * batch["weights"]).sum() / batch["weights"].sum()

    return jax.value_and_grad(loss)(params)
