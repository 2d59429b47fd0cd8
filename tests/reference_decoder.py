"""The oracle of families that are built like Llama: Mistral, Qwen 2 and 3, Gemma 2, Granite, and
those with sinks or latent attention. Plain jnp, unsharded, from the papers' formulas, without using
`mtx`. Parameters are in canonical form."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from reference_llama import _turn, frequencies


@dataclass(frozen=True)
class Rules:
    """What a family adds to a Llama; the defaults are a Llama."""

    kinds: tuple[str, ...]  # of each layer
    windows: tuple[int | None, ...]  # of each layer: positions that one sees, itself included
    base: float = 10000.0
    epsilon: float = 1e-5
    scale: float | None = None  # of products of queries and keys
    score_cap: float | None = None
    logit_cap: float | None = None
    offset: float = 0.0  # of norms' scales
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0
    gelu: bool = False  # instead of SiLU
    turned: int = 0  # numbers per head that are rotated, in latent attention
    second_weight: float = 0.0  # of the loss of the token after the next


def _norm(x, p, rules):
    rms = jnp.sqrt((x**2).mean(-1, keepdims=True) + rules.epsilon)
    return x / rms * (p["scale"] + rules.offset)


def _cap(x, cap):
    return x if cap is None else cap * jnp.tanh(x / cap)


def _attention(x, p, window, rules):
    qkv, positions = p["qkv"], jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    q = jnp.einsum("bsd,dhk->bshk", x, qkv["q"]) + qkv.get("q_bias", 0)
    kv = jnp.einsum("bsd,dngk->bsngk", x, qkv["kv"]) + qkv.get("kv_bias", 0)
    k, v = kv[:, :, 0], kv[:, :, 1]
    if "q_norm" in p:
        q, k = _norm(q, p["q_norm"], rules), _norm(k, p["k_norm"], rules)
    turning = frequencies(q.shape[-1], rules.base)
    q, k = _turn(q, positions, turning), _turn(k, positions, turning)
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scale = rules.scale or q.shape[-1] ** -0.5
    scores = _cap(jnp.einsum("bshk,bthk->bhst", q, k) * scale, rules.score_cap)
    apart = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])
    seen = (apart >= 0) & (apart < (window or x.shape[1]))
    return jnp.einsum("bhst,bthk,hkd->bsd", _weights(scores, seen, p), v, p["out"]["w"])


def _weights(scores, seen, p):
    exponentials = jnp.where(seen, jnp.exp(scores), 0)
    sinks = jnp.exp(p["sinks"])[:, None, None] if "sinks" in p else 0
    return exponentials / (exponentials.sum(-1, keepdims=True) + sinks)


def _latent(x, p, window, rules):
    """DeepSeek-V2 (arXiv 2405.04434), equations 37 to 47; neighbours form complex numbers."""
    size, turned = x.shape[1], rules.turned
    angles = jnp.outer(jnp.arange(size), rules.base ** -(jnp.arange(0, turned, 2) / turned))

    def turn(a):
        pairs = a.reshape(*a.shape[:-1], turned // 2, 2)
        spun = (pairs[..., 0] + 1j * pairs[..., 1]) * jnp.exp(1j * angles)[:, None]
        return jnp.stack([spun.real, spun.imag], axis=-1).reshape(a.shape)

    to_q = p["q"]["w"] if "q" in p else p["q_up"]["w"]
    latent = x if "q" in p else _norm(x @ p["q_down"]["w"], p["q_norm"], rules)
    q = jnp.einsum("bsl,lhk->bshk", latent, to_q)
    down = x @ p["kv_down"]["w"]
    kv = jnp.einsum(
        "bsl,lhk->bshk", _norm(down[..., :-turned], p["kv_norm"], rules), p["kv_up"]["w"]
    )
    plain = q.shape[-1] - turned
    shared = turn(down[:, :, None, -turned:])[:, :, 0]
    scores = jnp.einsum("bshn,bthn->bhst", q[..., :plain], kv[..., :plain])
    scores += jnp.einsum("bshr,btr->bhst", turn(q[..., plain:]), shared)
    weights = _weights(scores * rules.scale, jnp.tri(size, dtype=bool), p)
    return jnp.einsum("bhst,bthv,hvd->bsd", weights, kv[..., plain:], p["out"]["w"])


def _mlp(x, p, rules):
    gate, up = jnp.einsum("bsd,dnf->nbsf", x, p["up"]["w"])
    if rules.gelu:
        gate = 0.5 * gate * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    else:
        gate = gate / (1 + jnp.exp(-gate))
    return (gate * up) @ p["down"]["w"]


def _layer(x, p, window, rules):
    attend = _latent if "kv_up" in p["attention"] else _attention
    h = attend(_norm(x, p["attention_norm"], rules), p["attention"], window, rules)
    h = _norm(h, p["attention_post_norm"], rules) if "attention_post_norm" in p else h
    x = x + rules.residual_scale * h
    h = _mlp(_norm(x, p["mlp_norm"], rules), p["mlp"], rules)
    h = _norm(h, p["mlp_post_norm"], rules) if "mlp_post_norm" in p else h
    return x + rules.residual_scale * h


def _last(params, batch, rules):
    """(the head's input [G, S, D], its table)"""
    embed, head, done = params["embed"], params["head"], dict.fromkeys(rules.kinds, 0)
    x = embed["tokens"][batch["tokens"]] * rules.embed_scale
    for kind, window in zip(rules.kinds, rules.windows, strict=True):
        p = jax.tree.map(lambda a, n=done[kind]: a[n], params["layers"][kind])
        done[kind] += 1
        x = _layer(x, p, window, rules)
    norm = head["norm"] if "norm" in head else _further(params)["last_norm"]
    return _norm(x, norm, rules), head.get("output", embed["tokens"])


def _further(params):
    return jax.tree.map(lambda a: a[0], params["layers"]["mtp"])


def logits(params, batch, rules):
    """float32 [G, S, V]"""
    x, table = _last(params, batch, rules)
    return _cap(x @ table.T * rules.logit_scale, rules.logit_cap)


def _losses(all_logits, targets):
    chosen = jnp.take_along_axis(all_logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(all_logits, axis=-1) - chosen


def loss(params, batch, rules):
    """The mean loss over the positions of weight 1."""
    losses = _losses(logits(params, batch, rules), batch["targets"])
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


def _second(params, batch, rules):
    """DeepSeek-V3's loss of the token after the next (arXiv 2412.19437, equations 21 to 25)."""
    x, table = _last(params, batch, rules)
    p, following = _further(params), params["embed"]["tokens"][batch["targets"]]
    both = _norm(following, p["token_norm"], rules), _norm(x, p["stream_norm"], rules)
    x = _layer(jnp.concatenate(both, axis=-1) @ p["join"]["w"], p, None, rules)
    all_logits = _norm(x, p["output_norm"], rules) @ table.T
    losses = _losses(all_logits[:, :-1], batch["targets"][:, 1:]) * batch["weights"][:, 1:]
    return losses.sum() / batch["weights"].sum()


@functools.partial(jax.jit, static_argnums=2)
def loss_and_gradients(params, batch, rules):
    """(loss, gradients of everything that is minimised)"""

    def minimised(params):
        own = loss(params, batch, rules)
        second = _second(params, batch, rules) if rules.second_weight else 0
        return own + rules.second_weight * second, own

    gradients, own = jax.grad(minimised, has_aux=True)(params)
    return own, gradients
