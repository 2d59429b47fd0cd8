"""The router of a mixture of experts: which experts a token goes to, how much each counts, and what
keeps them evenly loaded. In float32 throughout.

Everything is a sum over tokens or over sequences, so that no layout changes it. Three mechanisms
balance the experts, alone or together:

- "batch" auxiliary loss (Shazeer et al. 2017; Switch, Fedus et al. 2021, equation 4), E sum_e f_e
  P_e with P the mean probability over the global batch. f, how often an expert was chosen, has no
  gradient; it is that of the previous step's whole batch, since a pipeline's first microbatches
  are finished before its last ones begin. In the first step it is uniform.
- "sequence" auxiliary loss: f and P of each sequence by itself (DeepSeek-V3, equations 17 to 20).
  f counts the k best scores, regardless of groups and of the balance bias.
- a balance bias (DeepSeek-V3, section 2.1.2), which is added to the scores for the choice only,
  and updated once per step from the choices of the whole batch.

Choices are counted for tokens that count in the loss, as the cotangents of the states `load` and
`balance`, so that they are summed with the gradients.

Legend: B rows · S sequence (s: shard) · D hidden · E experts · k choices of a token · G groups
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from mtx.layers.context import Context, places_of
from mtx.layers.sublayer import Build
from mtx.sharding.collectives import all_gather_sequence
from mtx.sharding.custom_vjp import custom_vjp
from mtx.sharding.mesh import Axes
from mtx.sharding.parameter import parameter
from mtx.sharding.random import normal
from mtx.sharding.sequence import in_order

AuxLoss = Literal["none", "batch", "sequence"]
Keeps = Literal["first", "best"]


@dataclass(frozen=True, kw_only=True)
class Router:
    """The config of a router."""

    experts: int  # E
    choices: int  # k, of each token
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True  # a token's gates add up to `scale`
    scale: float = 1.0  # of the gates
    # G; a token's experts are in the `top_groups` groups whose two best scores have the highest sum
    groups: int = 1
    top_groups: int = 1
    bias: bool = False  # of the logits
    aux: AuxLoss = "batch"
    aux_weight: float = 0.0
    z_weight: float = 0.0  # of the mean of logsumexp(logits)^2 (ST-MoE, Zoph et al. 2022)
    # None: no balance bias. Otherwise how far a step moves it; 0: it stays as it is
    balance_rate: float | None = None
    # None: every choice counts. Otherwise an expert takes at most this times its even share of a
    # sequence's choices (GShard, Lepikhin et al. 2020)
    capacity: float | None = None
    # which it takes: the first, or those with the highest gates, which depends on later positions
    keeps: Keeps = "first"

    def module(self, build: Build, rngs: nnx.Rngs) -> RouterModule:
        return RouterModule(self, build, rngs)


def choose(scores_nE, balance_E, router: Router):
    """int32 [n, k]: the experts of each token, the best first."""
    chosen_nE = scores_nE if balance_E is None else scores_nE + balance_E
    if router.groups > 1:
        by_group = chosen_nE.reshape(len(chosen_nE), router.groups, -1)
        best_nG = lax.top_k(by_group, min(2, by_group.shape[-1]))[0].sum(axis=-1)
        kept_ng = lax.top_k(best_nG, router.top_groups)[1]
        kept_nG = (kept_ng[..., None] == jnp.arange(router.groups)).any(axis=1)
        chosen_nE = jnp.where(kept_nG[..., None], by_group, -jnp.inf).reshape(chosen_nE.shape)
    return lax.top_k(chosen_nE, router.choices)[1].astype(jnp.int32)


@custom_vjp()
def pick(values_nE, ids_nk):
    """[n, k]: the values of those experts."""
    return jnp.take_along_axis(values_nE, ids_nk, axis=-1)


def _pick_backward(saved, d_nk):
    ids_nk, numbers_E = saved
    of_choice = ids_nk[..., None] == numbers_E
    return jnp.where(of_choice, d_nk[..., None], 0).sum(axis=-2), None


pick.defvjp(
    lambda values_nE, ids_nk: (
        pick(values_nE, ids_nk), (ids_nk, jnp.arange(values_nE.shape[-1]))
    ),
    _pick_backward,
)  # fmt: skip


def gates_of(scores_nE, ids_nk, router: Router):
    """float32 [n, k]: how much each of a token's experts counts."""
    gates_nk = pick(scores_nE, ids_nk)
    if router.normalised:
        small = 1e-20 if router.score == "sigmoid" else 0.0
        gates_nk = gates_nk / (gates_nk.sum(axis=-1, keepdims=True) + small)
    return gates_nk * router.scale


def count(ids_nk, experts: int, counted_n=None):
    """float32 [E]: how often each expert was chosen by the tokens that are counted."""
    chosen = ids_nk[..., None] == jnp.arange(experts)
    if counted_n is not None:
        chosen &= counted_n[..., None, None]
    return chosen.sum(axis=tuple(range(ids_nk.ndim)), dtype=jnp.float32)


def aux_losses(probabilities_nE, share_E, weight: float):
    """float32 [n]: each token's part of weight * E sum_e f_e P_e, which is their mean over tokens.
    share_E (or [n, E]): f, the share of each expert in all choices."""
    experts = probabilities_nE.shape[-1]
    return weight * experts * (lax.stop_gradient(share_E) * probabilities_nE).sum(axis=-1)


def z_losses(logits_nE, weight: float):
    """float32 [n]: each token's part of weight * the mean of logsumexp^2."""
    return weight * jnp.square(jax.nn.logsumexp(logits_nE, axis=-1))


@custom_vjp()
def counting(aux_n, states, ids_nk):
    """aux_n unchanged. Backward: the cotangent of each of `states` [E] is how often each expert was
    chosen by tokens for which the gradient of aux_n is not zero."""
    return aux_n


def _counting_backward(saved, daux_n):
    ids_nk, numbers_E, states = saved
    counts_E = count(ids_nk, len(numbers_E), daux_n != 0)
    return daux_n, tuple(counts_E for _ in range(len(states))), None


counting.defvjp(
    lambda aux_n, states, ids_nk: (
        aux_n, (ids_nk, jnp.arange(len(states[0])), jnp.zeros((len(states), 0)))
    ),
    _counting_backward,
)  # fmt: skip


def _latest(_, counts):
    """The rule of `load`: the counts of the last step."""
    return counts


class RouterModule(nnx.Module):
    """w [D, E], bias [E]; states: load [E], how often experts were chosen in the previous step, and
    balance [E]."""

    def __init__(self, config: Router, build: Build, rngs: nnx.Rngs):
        self.config, self.axes = config, build.axes
        experts = config.experts
        w = build.init_std * normal(rngs.params, (build.hidden, experts))
        self.w = parameter(w, spec=P(None, None), role="router", dims=("hidden", "experts"))
        zeros, each = jnp.zeros(experts, jnp.float32), {"spec": P(None), "dims": ("experts",)}
        if config.bias:
            self.bias = parameter(zeros, role="bias", **each)
        self.load = parameter(zeros, role="state", rule=_latest, **each)
        if config.balance_rate is not None:
            rule = _Balance(config.balance_rate)
            self.balance = parameter(zeros, role="state", rule=rule, **each)

    def __call__(self, x_BsD, context: Context | None = None):
        """(ids int32 [B, s, k], gates float32 [B, s, k], auxiliary losses float32 [B, s]); a
        dropped choice has the id E and the gate 0."""
        config, balances = self.config, self.config.balance_rate is not None
        logits = jnp.matmul(x_BsD.astype(jnp.float32), self.w[...], precision="highest")
        if config.bias:
            logits += self.bias[...].astype(jnp.float32)
        logits_nE = logits.reshape(-1, config.experts)
        if config.score == "softmax":
            scores_nE = jax.nn.softmax(logits_nE, axis=-1)
        else:
            scores_nE = jax.nn.sigmoid(logits_nE)
        balance_E = self.balance[...] if balances else None
        ids_nk = choose(lax.stop_gradient(scores_nE), balance_E, config)
        if context is not None and context.busy is not None:
            # The results of an idle stage are thrown away; make it take as long as any other.
            ids_nk = jnp.where(context.busy, ids_nk, _in_turn(ids_nk, config.experts))
        gates_nk = gates_of(scores_nE, ids_nk, config)
        rows = x_BsD.shape[:2]
        aux_n = self._aux(logits_nE, scores_nE, rows)
        states = (self.load[...], *((balance_E,) if balances else ()))
        aux_n = counting(aux_n, states, ids_nk)
        ids, gates = (a.reshape(*rows, config.choices) for a in (ids_nk, gates_nk))
        if config.capacity is not None:
            kept = self._kept(ids, lax.stop_gradient(gates))
            ids, gates = jnp.where(kept, ids, config.experts), jnp.where(kept, gates, 0)
        return ids, gates, aux_n.reshape(rows)

    def _aux(self, logits_nE, scores_nE, rows: tuple[int, ...]):
        config = self.config
        aux_n = jnp.zeros(len(scores_nE), jnp.float32)
        if config.z_weight:
            aux_n += z_losses(logits_nE, config.z_weight)
        if config.aux == "none" or not config.aux_weight:
            return aux_n
        if config.score == "sigmoid":
            scores_nE = scores_nE / scores_nE.sum(axis=-1, keepdims=True)
        if config.aux == "batch":
            load_E = self.load[...]
            total = load_E.sum()
            share_E = jnp.where(total > 0, load_E / jnp.maximum(total, 1), 1 / config.experts)
            return aux_n + aux_losses(scores_nE, share_E, config.aux_weight)
        best_nk = lax.top_k(lax.stop_gradient(scores_nE), config.choices)[1]
        counts_BE = jax.vmap(lambda ids: count(ids, config.experts))(
            best_nk.reshape(*rows, config.choices)
        )
        cut = tuple(axis for axis in (self._tokens_axis, self.axes.context) if axis)
        counts_BE = lax.psum(counts_BE, cut) if cut else counts_BE
        share_BE = counts_BE / counts_BE.sum(axis=-1, keepdims=True)
        share_nE = jnp.repeat(share_BE, rows[1], axis=0)
        return aux_n + aux_losses(scores_nE, share_nE, config.aux_weight)

    @property
    def _tokens_axis(self) -> str | None:
        return self.axes.tensor if self.axes.sequence_parallel else None

    def _kept(self, ids_Bsk, gates_Bsk):
        """bool [B, s, k]: which choices are within their expert's capacity, in the order of
        positions in the whole sequence, the better ones of a position first; or of their gates."""
        config = self.config
        whole = self._whole(ids_Bsk)
        room = math.ceil((config.capacity or 0) * whole.shape[1] * config.choices / config.experts)
        order = jnp.arange(whole[0].size)[None]
        if config.keeps == "best":
            order = jnp.argsort(-self._whole(gates_Bsk).reshape(len(whole), -1), axis=-1)
        in_turn = jnp.take_along_axis(whole.reshape(len(whole), -1), order, axis=-1)
        chosen = in_turn[..., None] == jnp.arange(config.experts)
        before = (jnp.cumsum(chosen, axis=1) * chosen).sum(axis=-1)
        before = jnp.take_along_axis(before, jnp.argsort(order, axis=-1), axis=-1)
        return own_positions(before.reshape(whole.shape) <= room, ids_Bsk.shape[1], self.axes)

    def _whole(self, a_Bsk):
        """[B, S, k]: all positions, in their order."""
        axes = self.axes
        whole = all_gather_sequence(a_Bsk, self._tokens_axis)
        if axes.context is not None:
            whole = in_order(all_gather_sequence(whole, axes.context), 1, axes.context_shards)
        return whole


def own_positions(whole_BS, own: int, axes: Axes):
    """This device's positions of an array that has all of them."""
    if axes.context is None and not axes.sequence_parallel:
        return whole_BS
    at_s = places_of(whole_BS[:, :own], axes, None)
    return whole_BS[:, at_s]


def _in_turn(ids_nk, experts: int):
    """Choices of all experts in turn, so that each is chosen equally often."""
    numbers = jnp.arange(ids_nk.size, dtype=jnp.int32).reshape(ids_nk.shape)
    return numbers % experts


@dataclass(frozen=True)
class _Balance:
    """The rule of a balance bias: up by `rate` if an expert was chosen less often than the mean,
    down if more often."""

    rate: float

    def __call__(self, balance_E, counts_E):
        mean = counts_E.mean(axis=-1, keepdims=True)
        return balance_E + self.rate * jnp.sign(mean - counts_E)
