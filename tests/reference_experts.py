"""The oracle of mixtures of experts: every token through every expert, plain jnp, unsharded, from
the papers' formulas, without using `mtx`. Attention is the Llama oracle's. Parameters are in
canonical form."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from reference_llama import _attention, _norm


class Rules(NamedTuple):
    choices: int = 2
    score: str = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    aux: str = "batch"
    aux_weight: float = 0.0
    z_weight: float = 0.0
    balance_rate: float | None = None
    capacity: float | None = None
    keeps: str = "first"
    shared: bool = False


def _chosen(scores, rules):
    """[b, s, k]: the experts of each token, best first."""
    experts = scores.shape[-1]
    if rules.groups > 1:
        each = experts // rules.groups
        by_group = scores.reshape(*scores.shape[:-1], rules.groups, each)
        best = jnp.sort(by_group, axis=-1)[..., -2:].sum(-1)
        groups = jnp.argsort(-best, axis=-1)[..., : rules.top_groups]
        of_group = jnp.arange(experts) // each
        allowed = (groups[..., None] == of_group).any(-2)
        scores = jnp.where(allowed, scores, -jnp.inf)
    return jnp.argsort(-scores, axis=-1)[..., : rules.choices]


def _route(x, p, rules):
    """(gates [b, s, E], 0 where not chosen; auxiliary losses [b, s]; choices [b, s, k])"""
    logits = x @ p["w"] + p.get("bias", 0)
    scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[rules.score](logits)
    experts, positions = scores.shape[-1], scores.shape[1]
    chosen = _chosen(jax.lax.stop_gradient(scores) + p.get("balance", 0), rules)
    one_hot = jax.nn.one_hot(chosen, experts)  # [b, s, k, E]
    gates = scores * one_hot.sum(-2)
    if rules.normalised:
        gates = gates / gates.sum(-1, keepdims=True)
    if rules.capacity is not None:
        room = -(-rules.capacity * positions * rules.choices // experts)
        in_turn = one_hot.reshape(len(x), -1, experts)
        number = jnp.cumsum(in_turn, axis=1).reshape(one_hot.shape)
        if rules.keeps == "best":  # rank: those with a higher gate, plus itself
            number = 1 + (gates[:, None] > gates[:, :, None]).sum(2)[:, :, None]
        gates = gates * (one_hot * (number <= room)).sum(-2)
    aux = rules.z_weight * jax.nn.logsumexp(logits, axis=-1) ** 2
    probabilities = scores / scores.sum(-1, keepdims=True)
    if rules.aux == "batch":
        share = jnp.where(p["load"].sum() > 0, p["load"] / p["load"].sum(), 1 / experts)
    else:
        best = jnp.argsort(-scores, axis=-1)[..., : rules.choices]  # without groups, or a bias
        best = jax.nn.one_hot(best, experts).sum((1, 2))[:, None]
        share = best / (positions * rules.choices)
    share = jax.lax.stop_gradient(share)
    aux += rules.aux_weight * experts * (share * probabilities).sum(-1)
    return rules.scale * gates, aux, chosen


def _swiglu(x, up, down):
    """x [b, s, d] through experts' up [E, d, 2, f] and down [E, f, d]: [E, b, s, d]"""
    gate, up = jnp.einsum("bsd,ednf->nebsf", x, up)
    return jnp.einsum("ebsf,efd->ebsd", gate / (1 + jnp.exp(-gate)) * up, down)


def losses(params, batch, frequency, rules):
    """(mean cross-entropy + auxiliary losses, (mean cross-entropy, [L, E] choices of counted
    tokens))"""
    embed, head, shape = params["embed"], params["head"], batch["tokens"].shape
    weights = batch["weights"]
    positions = batch.get("positions", jnp.broadcast_to(jnp.arange(shape[1]), shape))
    segments = batch.get("segments", jnp.zeros(shape, int))

    def layer(x, p):
        h = _norm(x, p["attention_norm"]["scale"])
        x = x + _attention(h, p["attention"], positions, segments, frequency)
        h, mlp = _norm(x, p["mlp_norm"]["scale"]), p["mlp"]
        gates, aux, chosen = _route(h, mlp["router"], rules)
        x = x + jnp.einsum("bse,ebsd->bsd", gates, _swiglu(h, mlp["up"], mlp["down"]))
        if rules.shared:
            shared = mlp["shared"]
            x = x + _swiglu(h, shared["up"]["w"][None], shared["down"]["w"][None])[0]
        counted = jax.nn.one_hot(chosen, gates.shape[-1]) * (weights > 0)[..., None, None]
        return x, ((aux * weights).sum(), counted.sum((0, 1, 2)))

    x, (aux, counts) = jax.lax.scan(
        layer, embed["tokens"][batch["tokens"]], params["layers"]["block"]
    )
    logits = _norm(x, head["norm"]["scale"]) @ head.get("output", embed["tokens"]).T
    picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    loss = ((jax.nn.logsumexp(logits, axis=-1) - picked) * weights).sum() / weights.sum()
    return loss + aux.sum() / weights.sum(), (loss, counts)


def loss_and_gradients(params, batch, frequency, rules):
    """(mean cross-entropy, gradients of all losses); for states, the counted choices."""
    of = jax.value_and_grad(losses, has_aux=True)
    (_, (loss, counts)), gradients = of(params, batch, frequency, rules)
    router = gradients["layers"]["block"]["mlp"]["router"]
    for state in {"load", "balance"} & set(router):
        router[state] = counts
    return loss, gradients
