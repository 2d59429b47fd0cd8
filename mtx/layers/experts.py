"""The mixture-of-experts sublayer: a router, E MLPs of which each token goes through k, and
optionally an MLP that all tokens go through (DeepSeekMoE's shared experts).

Legend: B rows · S sequence (s: shard) · D hidden · F an expert's feed-forward (f: shard) ·
E experts (e: of a device) · m tokens at an expert · k choices of a token · n = 2 for gate, up
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from mtx.layers.context import Context
from mtx.layers.mlp import MLP, Activation, activate, gated
from mtx.layers.router import Router
from mtx.layers.sublayer import Build
from mtx.sharding.collectives import (
    all_gather_sequence,
    copy_to,
    gather_sequence,
    reduce_from,
    scatter_sequence,
)
from mtx.sharding.custom_vjp import custom_vjp
from mtx.sharding.experts import PRODUCTS, Way, through_experts
from mtx.sharding.linear import MATMUL_OUTPUT, used_by_heads
from mtx.sharding.parameter import parameter
from mtx.sharding.random import normal


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The config of a mixture of experts."""

    router: Router
    ffn: int  # F
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    shared: MLP | None = None
    looks_around = False
    has_aux = True

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return ExpertsModule(self, build, rngs)


@custom_vjp()
def products(x_emd, w_ed):
    """x_emd times each expert's own w [e, d, outputs...]; the gradient of w is float32."""
    outputs, flat = w_ed.ndim - 2, w_ed.reshape(*w_ed.shape[:2], -1)
    with jax.named_scope(PRODUCTS):
        y = lax.dot_general(x_emd, flat, (((2,), (1,)), ((0,), (0,))))
    return y.reshape(*y.shape[:2], *w_ed.shape[2 : 2 + outputs])


def _products_backward(saved, dy):
    x_emd, w_ed = saved
    flat = dy.reshape(*dy.shape[:2], -1)
    each = ((0,), (0,))
    with jax.named_scope(PRODUCTS):
        dx = lax.dot_general(flat, w_ed.reshape(*w_ed.shape[:2], -1), (((2,), (2,)), each))
        dw = lax.dot_general(x_emd, flat, (((1,), (1,)), each), preferred_element_type=jnp.float32)
    return dx, dw.reshape(w_ed.shape)


products.defvjp(lambda x_emd, w_ed: (products(x_emd, w_ed), (x_emd, w_ed)), _products_backward)


@dataclass(frozen=True)
class Compute:
    """y_emD: the outputs of a device's experts for the tokens at them, times the gates."""

    activation: Activation
    gated: bool

    def __call__(self, weights: dict[str, jax.Array], x_emD, gates_em1):
        h = products(x_emD, weights["up"])
        if "up_bias" in weights:
            h += weights["up_bias"][:, None]
        h = checkpoint_name(h, MATMUL_OUTPUT)
        act = gated if self.gated else activate
        # Gates multiply before the matmul, so that its output is not kept for their gradient.
        a_emf = act(h, self.activation).astype(jnp.float32) * gates_em1
        y_emD = products(a_emf.astype(h.dtype), weights["down"])
        if "down_bias" in weights:
            y_emD += (gates_em1 * weights["down_bias"][:, None]).astype(y_emD.dtype)
        return y_emD


class ExpertsModule(nnx.Module):
    """router; up: w [E, D, F], or [E, D, 2, F] of gate and up; down: w [E, F, D]; shared."""

    def __init__(self, config: Experts, build: Build, rngs: nnx.Rngs):
        self.config, self.build, self.axes = config, build, build.axes
        experts, wide = config.router.experts, (2, config.ffn) if config.gated else (config.ffn,)
        shard = "tensor" if build.axes.expert_tensor else None
        owner = "expert" if build.axes.expert_tensor else ("expert", "tensor")

        def weight(dims, shape, std, spec):
            value = std * normal(rngs.params, (experts, *shape))
            dims = "experts", *dims
            return parameter(value, spec=P(owner, *spec), role="matrix", dims=dims, inputs=2)

        within = (None,) * (len(wide) - 1)
        columns = ("gate and up", "columns") if config.gated else ("columns",)
        self.router = config.router.module(build, rngs)
        self.up = weight(
            ("hidden", *columns), (build.hidden, *wide), build.init_std, (None, *within, shard)
        )
        self.down = weight(
            ("rows", "hidden"), (config.ffn, build.hidden), build.output_std, (shard, None)
        )
        if config.bias:
            up, down = jnp.zeros((experts, *wide)), jnp.zeros((experts, build.hidden))
            up_dims, down_dims = ("experts", *columns), ("experts", "hidden")
            self.up_bias = parameter(up, spec=P(owner, *within, shard), role="bias", dims=up_dims)
            self.down_bias = parameter(down, spec=P(owner, None), role="bias", dims=down_dims)
        if config.shared is not None:
            self.shared = config.shared.module(build, rngs)

    def __call__(self, x_BsD, context: Context | None = None):
        """(what is added to the stream, x_BsD; auxiliary losses [B, s])"""
        axes = self.axes
        split = axes.tensor if axes.expert_tensor else None  # each device has part of every expert
        gathered = split if axes.sequence_parallel else None
        ids_Bsk, gates_Bsk, aux_Bs = self.router(x_BsD, context)
        if gathered:
            x_BSD, gates_BSk = (gather_sequence(a, gathered) for a in (x_BsD, gates_Bsk))
            ids_BSk = all_gather_sequence(ids_Bsk, gathered)
        else:
            x_BSD, gates_BSk, ids_BSk = copy_to(x_BsD, split), copy_to(gates_Bsk, split), ids_Bsk
        y_BSD = self._routed(x_BSD, gates_BSk, ids_BSk)
        y_BsD = scatter_sequence(y_BSD, gathered) if gathered else reduce_from(y_BSD, split)
        if self.config.shared is not None:
            y_BsD += self.shared(x_BsD, context)
        return y_BsD, aux_Bs

    def _routed(self, x_BSD, gates_BSk, ids_BSk):
        router, shape = self.config.router, x_BSD.shape
        compute = Compute(self.config.activation, self.config.gated)
        way = Way.of(
            compute, experts=router.experts, tokens=shape[0] * shape[1], choices=router.choices,
            rows=shape[0], axes=self.axes,
        )  # fmt: skip
        y_nD = through_experts(
            x_BSD.reshape(-1, shape[-1]), gates_BSk.reshape(-1, router.choices),
            ids_BSk.reshape(-1, router.choices), self._weights(), way,
        )  # fmt: skip
        return y_nD.reshape(shape)

    def _weights(self):
        weights = {"up": self.up[...], "down": self.down[...]}
        if self.config.bias:
            axes = self.axes
            down = self.down_bias[...]
            if axes.expert_tensor and axes.tensor:  # the output is summed over `tensor`
                down = used_by_heads(down, axes) * (lax.axis_index(axes.tensor) == 0)
            weights |= {"up_bias": self.up_bias[...], "down_bias": down}
        return weights
