"""The oracle of family "bert": plain jnp, unsharded, from the papers' formulas, without using
`mtx`. Parameters are in canonical form."""

import functools

import jax
import jax.numpy as jnp


def _norm(x, p, epsilon=1e-5):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + epsilon) * p["scale"] + p["bias"]


def _gelu(x, form):
    if form == "erf":
        return 0.5 * x * (1 + jax.scipy.special.erf(x / 2**0.5))
    return 0.5 * x * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _attention(x, p, segments):
    qkv = jnp.einsum("bsd,dnhk->nbhsk", x, p["qkv"]["w"]) + p["qkv"]["b"][:, None, :, None, :]
    q, k, v = qkv
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    hidden = segments[:, None, :, None] != segments[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(hidden, -1e30, scores), axis=-1)
    return jnp.einsum("bhsk,hkd->bsd", weights @ v, p["out"]["w"]) + p["out"]["b"]


def _mlp(x, p, form):
    return _gelu(x @ p["up"]["w"] + p["up"]["b"], form) @ p["down"]["w"] + p["down"]["b"]


def hidden(params, batch, *, post, form):
    """float32 [G, S, D]: the input of both heads."""
    embed = params["embed"]
    x = embed["tokens"][batch["tokens"]] + embed["positions"] + embed["types"][batch["types"]]
    if post:
        x = _norm(x, embed["norm"])

    def layer(x, p):
        if post:
            x = _norm(x + _attention(x, p["attention"], batch["segments"]), p["attention_norm"])
            return _norm(x + _mlp(x, p["mlp"], form), p["mlp_norm"]), None
        h = _norm(x, p["attention_norm"])
        x = x + _attention(h, p["attention"], batch["segments"])
        return x + _mlp(_norm(x, p["mlp_norm"]), p["mlp"], form), None

    x, _ = jax.lax.scan(layer, x, params["layers"]["block"])
    return x if post else _norm(x, params["head"]["norm"])


def logits(params, batch, *, post, form):
    """(logits of masked tokens [G, S, V], of the order [G, 2])"""
    x, head = hidden(params, batch, post=post, form=form), params["head"]
    masked = head["masked"]
    h = _norm(_gelu(x @ masked["w"] + masked["b"], form), masked["norm"])
    pooled = jnp.tanh(x[:, 0] @ head["pooler"]["w"] + head["pooler"]["b"])
    order = pooled @ head["binary"]["w"] + head["binary"]["b"]
    return h @ params["embed"]["tokens"].T + masked["bias"], order


@functools.partial(jax.jit, static_argnames=("post", "form"))
def loss_and_gradients(params, batch, *, post, form):
    """The loss is the mean over the masked tokens plus the mean over the rows with an order."""

    def mean_of(logits, targets, weights):
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - chosen
        return (losses * weights).sum() / weights.sum()

    def loss(params):
        masked, order = logits(params, batch, post=post, form=form)
        known = batch["order"] >= 0
        return mean_of(masked, batch["targets"], batch["weights"]) + mean_of(
            order, jnp.where(known, batch["order"], 0), known
        )

    return jax.value_and_grad(loss)(params)
