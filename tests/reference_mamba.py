"""Mamba-2 and its hybrids in plain jnp, position by position, by the recurrence of Dao and Gu 2024,
equation (1), without using `mtx`.

Parameters are in canonical form, global shapes: {"embed", "head", "layers": {kind: leaves}}, with
leaves [L, ...] for the layers of a kind.
"""

import itertools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from reference_experts import Rules as Experts
from reference_experts import _route, _swiglu


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


def _attention(x, p, segments, scale):
    q = jnp.einsum("bsd,dhk->bhsk", x, p["qkv"]["q"])
    k, v = jnp.einsum("bsd,dngk->nbgsk", x, p["qkv"]["kv"])
    k, v = (jnp.repeat(a, q.shape[1] // k.shape[1], axis=1) for a in (k, v))
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    unseen = jnp.triu(jnp.ones(scores.shape[-2:], bool), 1)
    unseen = unseen | (segments[:, None, :, None] != segments[:, None, None, :])
    weights = jax.nn.softmax(jnp.where(unseen, -1e30, scores), axis=-1)
    return jnp.einsum("bhsk,hkd->bsd", weights @ v, p["out"]["w"])


class Rules(NamedTuple):
    """Granite's factors, and its experts; the defaults are a hybrid without them."""

    embedding: float = 1.0
    attention: float | None = None  # of products of queries and keys
    residual: float = 1.0
    logits: float = 1.0
    experts: Experts | None = None


HYBRID = Rules()


def _mlp(h, p, weights, rules):
    """(output, auxiliary losses [B, S], [E] choices of counted tokens)"""
    if "router" not in p:
        gated = p["up"]["w"].ndim == 3
        h = h if gated else jnp.maximum(h @ p["up"]["w"], 0) ** 2 @ p["down"]["w"]
        return _swiglu(h, p["up"]["w"][None], p["down"]["w"][None])[0] if gated else h, 0.0, 0.0
    gates, aux, chosen = _route(h, p["router"], rules.experts)
    y = jnp.einsum("bse,ebsd->bsd", gates, _swiglu(h, p["up"], p["down"]))
    y = y + _swiglu(h, p["shared"]["up"]["w"][None], p["shared"]["down"]["w"][None])[0]
    counted = jax.nn.one_hot(chosen, gates.shape[-1]) * (weights > 0)[..., None, None]
    return y, (aux * weights).sum(), counted.sum((0, 1, 2))


def forward(params, batch, segments, pattern, least_dt, rules):
    """(logits float32 [G, S, V], the sum of auxiliary losses, by kind: [L, E] choices of counted
    tokens); pattern: the kind of each layer."""
    x = params["embed"]["tokens"][batch["tokens"]] * rules.embedding
    done, losses, counts = dict.fromkeys(pattern, 0), 0.0, {kind: [] for kind in pattern}

    def layer(x, p):
        aux = counted = 0.0
        for name in ("mamba", "attention", "mlp"):
            if name not in p:
                continue
            h = _norm(x, p[f"{name}_norm"]["scale"])
            if name == "mamba":
                y = _mixer(h, p[name], segments, least_dt)
            elif name == "attention":
                y = _attention(h, p[name], segments, rules.attention)
            else:
                y, aux, counted = _mlp(h, p[name], batch["weights"], rules)
            x = x + rules.residual * y
        return x, (aux, counted)

    for kind, alike in itertools.groupby(pattern):
        first, done[kind] = done[kind], done[kind] + len(list(alike))
        run = jax.tree.map(lambda a, i=first, j=done[kind]: a[i:j], params["layers"][kind])
        x, (aux, counted) = jax.lax.scan(layer, x, run)
        losses += jnp.sum(aux)
        counts[kind].append(counted)
    table = params["head"].get("output", params["embed"]["tokens"])
    logits = _norm(x, params["head"]["norm"]["scale"]) @ table.T * rules.logits
    return logits, losses, {kind: jnp.concatenate(each) for kind, each in counts.items()}


@partial(jax.jit, static_argnames=("pattern", "least_dt", "rules"))
def loss_and_gradients(params, batch, pattern, least_dt=0.0, rules=HYBRID):
    """(mean cross-entropy, gradients of all losses); for routers' loads, the counted choices."""
    segments = batch.get("segments", jnp.zeros_like(batch["tokens"]))

    def minimised(params):
        found, aux, counts = forward(params, batch, segments, pattern, least_dt, rules)
        chosen = jnp.take_along_axis(found, batch["targets"][..., None], axis=-1)[..., 0]
        losses = jax.nn.logsumexp(found, axis=-1) - chosen
        weight = batch["weights"].sum()
        loss = (losses * batch["weights"]).sum() / weight
        return loss + aux / weight, (loss, counts)

    gradients, (loss, counts) = jax.grad(minimised, has_aux=True)(params)
    for kind, counted in counts.items() if rules.experts else ():
        gradients["layers"][kind]["mlp"]["router"]["load"] = counted
    return loss, gradients
