"""The oracle: a GPT in plain jnp, unsharded, from the papers' formulas, without using `mtx`.

Parameters are in canonical form, global shapes: {"embed", "head", "layers": {"block": leaves
[L, ...]}}.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

LOSS, GRADIENT = 1e-6, 1e-5  # relative errors in float32; never loosened


def random_batch(model, rows, seed=0):
    """Random tokens of the model's vocabulary; about one in ten has weight 0."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, model.vocab, (rows, model.sequence + 1), dtype=np.int32)
    weights = (random.random((rows, model.sequence)) < 0.9).astype(np.float32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}


def padded(batch, rows):
    """The batch, padded with rows of weight 0: batches of many sizes share one compiled program."""
    return {k: np.pad(a, [(0, rows - len(a)), (0, 0)]) for k, a in batch.items()}


def assert_same(got, want, *, loss=LOSS, gradient=GRADIENT):
    """Check that two (loss, gradients) are equal within these relative errors, leaf by leaf."""
    assert float(got[0]) == pytest.approx(float(want[0]), rel=loss)
    assert jax.tree.structure(got[1]) == jax.tree.structure(want[1])
    errors = jax.tree.map(
        lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b)), got[1], want[1]
    )
    worst = max(jax.tree.leaves_with_path(errors), key=lambda leaf: leaf[1])
    assert worst[1] < gradient, f"{jax.tree_util.keystr(worst[0])}: {worst[1]:.2e}"


def _norm(x, p, epsilon=1e-5):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + epsilon) * p["scale"] + p["bias"]


def _attention(x, p):
    qkv = jnp.einsum("bsd,dnhk->nbhsk", x, p["qkv"]["w"]) + p["qkv"]["b"][:, None, :, None, :]
    q, k, v = qkv
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    future = jnp.triu(jnp.ones(scores.shape[-2:], bool), 1)
    weights = jax.nn.softmax(jnp.where(future, -1e30, scores), axis=-1)
    return jnp.einsum("bhsk,hkd->bsd", weights @ v, p["out"]["w"]) + p["out"]["b"]


def _mlp(x, p):
    h = x @ p["up"]["w"] + p["up"]["b"]
    h = 0.5 * h * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (h + 0.044715 * h**3)))
    return h @ p["down"]["w"] + p["down"]["b"]


def logits(params, tokens):
    """float32 [G, S, V]"""
    embed, head = params["embed"], params["head"]
    x = embed["tokens"][tokens] + embed["positions"][: tokens.shape[1]]

    def layer(x, p):
        x = x + _attention(_norm(x, p["attention_norm"]), p["attention"])
        return x + _mlp(_norm(x, p["mlp_norm"]), p["mlp"]), None

    x, _ = jax.lax.scan(layer, x, params["layers"]["block"])
    return _norm(x, head["norm"]) @ head.get("output", embed["tokens"]).T


def loss(params, batch):
    """The mean loss over the positions of weight 1."""
    all_logits = logits(params, batch["tokens"])
    chosen = jnp.take_along_axis(all_logits, batch["targets"][..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(all_logits, axis=-1) - chosen
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


@jax.jit
def loss_and_gradients(params, batch):
    return jax.value_and_grad(loss)(params, batch)


def adamw_steps(params, batches, *, rate, b1, b2, epsilon, decay, clip):
    """Losses of AdamW at a constant rate, by the formulas of Loshchilov and Hutter 2019."""
    undecayed = {"b", "bias", "scale"}

    @jax.jit
    def update(params, first, second, gradients, step):
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
        gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip / (norm + 1e-6)), gradients)
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, first, gradients)
        second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, second, gradients)

        def change(path, p, m, v):
            direction = (m / (1 - b1**step)) / (jnp.sqrt(v / (1 - b2**step)) + epsilon)
            return p - rate * (direction + (0 if path[-1].key in undecayed else decay) * p)

        return jax.tree.map_with_path(change, params, first, second), first, second

    first = second = jax.tree.map(jnp.zeros_like, params)
    losses = []
    for step, batch in enumerate(batches, start=1):
        value, gradients = loss_and_gradients(params, batch)
        losses.append(float(value))
        params, first, second = update(params, first, second, gradients, step)
    return losses
