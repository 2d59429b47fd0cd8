"""Routers against those of Megatron-Core: choices, gates, losses, and what a capacity drops.

By convention ours differ in three points:

- we rank groups of experts by their two best scores (DeepSeek-V3, section 2.1.2), Megatron by the
  best choices / groups: the same if a token takes two of each of its groups;
- our f of the batch's auxiliary loss is that of the previous step, Megatron's that of the
  microbatch, or of the batch so far: the loss is the same for the same f;
- Megatron's drop_policy="position" ignores the order of positions, since torch.topk ranks equals
  arbitrarily: the same number is kept, but different ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mtx.config import Layout
from mtx.layers.router import Router
from mtx.layers.sublayer import Build
from mtx.sharding.mesh import Axes

torch = pytest.importorskip("torch", reason="torch is absent: routers have no peer")
moe_utils = pytest.importorskip(
    "megatron.core.transformer.moe.moe_utils", reason="megatron-core is absent: no router's peer"
)

E, B, S = 16, 3, 40
BALANCE = np.random.default_rng(1).normal(0, 0.05, E).astype(np.float32)
LOGITS = np.random.default_rng(0).normal(0, 1.5, (B, S, E)).astype(np.float32)
LOGITS += np.linspace(1, -1, E, dtype=np.float32)  # some experts are chosen more than others


def ours(load=None, **config):
    """(gates [B, S, E], 0 where not chosen; each loss [B]; gradient of the logits) of a router for
    these logits. The gradient is of all gates squared, plus the losses."""
    router = Router(experts=E, **config)
    build = Build(
        hidden=E, init_std=1.0, output_std=1.0, dtype="float32", axes=Axes.of(Layout()),
        kernel="blocked", site=0,
    )  # fmt: skip
    module = router.module(build, nnx.Rngs(0))
    module.w[...] = jnp.eye(E)
    if load is not None:
        module.load[...] = jnp.asarray(load, jnp.float32)
    if router.balance_rate is not None:
        module.balance[...] = jnp.asarray(BALANCE)

    def of(logits):
        ids, gates, aux = module(logits)
        dense = (jax.nn.one_hot(ids, E) * gates[..., None]).sum(-2)  # the id E is not an expert's
        return (dense**2).sum() + aux.mean(axis=1).sum(), (dense, aux.mean(axis=1))

    gradient, (gates, losses) = jax.grad(of, has_aux=True)(jnp.asarray(LOGITS))
    return np.asarray(gates), np.asarray(losses), np.asarray(gradient)


def theirs(choices, capacity=None, policy="probs", losses=lambda logits: 0.0, **rules):
    """The same by Megatron-Core, one sequence at a time."""
    found = []
    for logits in torch.tensor(LOGITS):
        logits.requires_grad_()
        gates, chosen = moe_utils.topk_routing_with_score_function(logits, choices, **rules)
        if capacity is not None:
            gates, _ = moe_utils.apply_router_token_dropping(
                gates, chosen, choices, capacity, policy
            )
        loss = torch.as_tensor(losses(logits))
        ((gates**2).sum() + loss).backward()
        found.append([each.detach().numpy() for each in (gates, loss, logits.grad)])
    return [np.stack(each) for each in zip(*found, strict=True)]


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


RULES = {
    "softmax of the chosen": (dict(choices=3), dict(choices=3)),
    "softmax of all": (
        dict(choices=3, normalised=False, scale=1.5),
        dict(choices=3, use_pre_softmax=True, scaling_factor=1.5),
    ),
    "groups and a bias": (
        dict(choices=4, score="sigmoid", groups=4, top_groups=2, scale=2.5, balance_rate=0.1),
        dict(
            choices=4, score_function="sigmoid", num_groups=4, group_topk=2, scaling_factor=2.5,
            expert_bias=torch.tensor(BALANCE),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_the_same_experts_and_gates(name):
    mine, other = RULES[name]
    got, want = ours(**mine), theirs(**other)
    np.testing.assert_array_equal(got[0] != 0, want[0] != 0)
    assert_same(got, want)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("aux", ["batch", "sequence"])
def test_the_same_losses(name, aux):
    mine, other = RULES[name]
    choices, score = mine["choices"], mine.get("score", "softmax")
    load = np.random.default_rng(2).integers(1, 99, E)  # of the whole batch

    def losses(logits):
        scores_of = moe_utils.compute_routing_scores_for_aux_loss
        chosen, scores = scores_of(logits, choices, score)
        of_batch = torch.tensor(load * S * choices / load.sum())  # scaled to a sequence's choices
        counts = chosen.sum(0) if aux == "sequence" else of_batch
        each = moe_utils.switch_load_balancing_loss_func(scores, counts, S, choices, E, 0.3)
        return each + moe_utils.z_loss_func(logits, 0.02)

    got = ours(**mine, aux=aux, aux_weight=0.3, z_weight=0.02, load=load)
    assert_same(got, theirs(**other, losses=losses))


@pytest.mark.parametrize("capacity", [0.5, 0.75, 1.0, 1.25])
@pytest.mark.parametrize("name", RULES)
def test_a_capacity_drops_the_same_choices(name, capacity):
    mine, other = RULES[name]
    got = ours(**mine, capacity=capacity, keeps="best")
    assert_same(got, theirs(**other, capacity=capacity))
    gates, full = ours(**mine, capacity=capacity)[0], ours(**mine)[0]
    by_position = theirs(**other, capacity=capacity, policy="position")[0]
    np.testing.assert_array_equal((gates != 0).sum(1), (by_position != 0).sum(1))
    assert (gates != 0).sum() < (full != 0).sum()
