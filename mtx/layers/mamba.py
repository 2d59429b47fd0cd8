"""The Mamba-2 sublayer (Dao and Gu 2024): a state-space model. Each position decays the state and
adds to it, h <- exp(dt A) h + dt x B', and reads it, y = h C + D x (`mtx.layers.ssd`).

One projection of the stream gives a gate z, inputs x, B, C and dt. x, B and C go through a short
causal convolution; the output is gated and normed, group by group. Heads are split over `tensor`;
groups are split too or, if there are fewer, repeated, like heads of keys and values.

Everything between the projections and the output layer is recomputed in the backward pass: it is a
few hundredths of a layer's work, and none of it is kept, least of all the states.

Legend: B rows · S sequence (s: shard, t: the next positions) · D hidden · H heads (h: shard) ·
G groups of R heads that share B and C (g: shard) · K head size · N state size · W width of the
convolution (w = W - 1) · p spans of a sequence · n: z, x or B, C
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from mtx.errors import UserError
from mtx.layers.attend import ATTENTION_OUTPUT
from mtx.layers.context import Context
from mtx.layers.ssd import Spans, convolve, ssd
from mtx.layers.sublayer import Build, Keep
from mtx.sharding.custom_vjp import custom_vjp
from mtx.sharding.linear import MATMUL_OUTPUT, RowLinear, column_products, used_by_heads
from mtx.sharding.mesh import Axes
from mtx.sharding.parameter import parameter
from mtx.sharding.random import normal, uniform
from mtx.sharding.sequence import State, places

# Ranges of the initial dt and A, as in Dao and Gu's code: drawn uniformly, dt in its logarithm.
_DT, _A = (1e-3, 1e-1), (1.0, 16.0)


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """The config of a Mamba-2 mixer."""

    heads: int  # H
    size: int  # K
    state: int  # N
    groups: int  # G
    epsilon: float  # under the root of the norm, which is over each group's heads together
    width: int = 4  # W
    chunk: int = 256  # positions
    least_dt: float = 0.0
    looks_around = True
    over_context = True
    joins = True

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return MambaModule(self, build, rngs)

    def empty_cache(self, build: Build, rows: int, sequence: int) -> Kept:
        """[B, slices, ...]: what each slice leaves."""
        return jax.tree.map(
            lambda a: jnp.zeros((rows, build.slices, *a.shape[1:]), a.dtype),
            self._nothing(build, rows),
        )

    def empty_past(self, build: Build, rows: int, length: int) -> State:
        return as_past(self._nothing(build, rows))

    def _nothing(self, build: Build, rows: int) -> Kept:
        """What is kept before the first position: zeros."""
        heads, groups = self.heads // build.axes.tensor_shards, self.local_groups(build.axes)
        before = rows, self.width - 1
        return Kept(
            jnp.zeros((rows, heads, self.size, self.state), jnp.float32),
            jnp.zeros((*before, heads, self.size), build.dtype),
            jnp.zeros((*before, 2, groups, self.state), build.dtype),
        )

    def repeats(self, axes: Axes) -> bool:
        """Whether several devices of `tensor` share a group."""
        return self.groups % axes.tensor_shards != 0

    def local_groups(self, axes: Axes) -> int:
        return max(1, self.groups // axes.tensor_shards)


class Kept(NamedTuple):
    """What later positions need of earlier ones."""

    state: jax.Array  # [B, h, K, N] float32
    x: jax.Array  # [B, w, h, K], the last inputs of the convolution
    bc: jax.Array  # [B, w, 2, g, N]


def as_past(kept: Kept) -> State:
    """As generated texts keep it: [n, B, h, ...] each."""
    bc_wBngN = jnp.swapaxes(kept.bc, 0, 1)
    return State({
        "state": kept.state[None], "x": jnp.swapaxes(kept.x, 0, 1),
        "bc": jnp.swapaxes(bc_wBngN, 1, 2).reshape(-1, *kept.bc.shape[:1], *kept.bc.shape[3:]),
    })  # fmt: skip


def from_past(past: State) -> Kept:
    """The inverse of `as_past`."""
    arrays = past.arrays
    bc_wnBgN = arrays["bc"].reshape(-1, 2, *arrays["bc"].shape[1:])
    bc_BwngN = jnp.transpose(bc_wnBgN, (2, 0, 1, 3, 4))
    return Kept(arrays["state"][0], jnp.swapaxes(arrays["x"], 0, 1), bc_BwngN)


class MambaModule(nnx.Module):
    """zx [D, 2, H, K] of gate and input, bc [D, 2, G, N], dt [D, H]; the convolution's x_kernel
    [W, H, K] and bc_kernel [W, 2, G, N] with a bias each; A_log, D, dt_bias [H]; norm; out."""

    def __init__(self, config: Mamba, build: Build, rngs: nnx.Rngs):
        def weight(*shape, spec, dims):
            w = build.init_std * normal(rngs.params, (build.hidden, *shape))
            return parameter(w, spec=P(None, *spec), role="matrix", dims=("hidden", *dims))

        def convolution(*shape, spec, dims):
            bound = 1 / math.sqrt(config.width)
            shapes = (config.width, *shape), shape
            kernel, bias = (uniform(rngs.params, shape, -bound, bound) for shape in shapes)
            return (
                parameter(kernel, spec=P(None, *spec), role="filter", dims=("width", *dims)),
                parameter(bias, spec=P(*spec), role="bias", dims=dims),
            )

        def of_heads(values):
            return parameter(values, spec=P("tensor"), role="recurrence", dims=("heads",))

        self.config, self.axes = config, build.axes
        heads, groups = config.heads, (2, config.groups, config.state)
        in_heads = ("tensor", None)
        in_groups = (None, None if config.repeats(build.axes) else "tensor", None)
        of_x, of_bc = ("heads", "head size"), ("b c", "groups", "state")
        self.zx = weight(2, heads, config.size, spec=(None, *in_heads), dims=("z x", *of_x))
        self.bc = weight(*groups, spec=in_groups, dims=of_bc)
        self.dt = weight(heads, spec=("tensor",), dims=("heads",))
        self.x_kernel, self.x_bias = convolution(heads, config.size, spec=in_heads, dims=of_x)
        self.bc_kernel, self.bc_bias = convolution(*groups, spec=in_groups, dims=of_bc)
        a = uniform(rngs.params, (heads,), *_A)
        self.A_log = of_heads(jnp.log(a))
        self.D = of_heads(jnp.ones(heads))
        least, most = map(math.log, _DT)
        dt = jnp.exp(uniform(rngs.params, (heads,), least, most))
        self.dt_bias = of_heads(dt + jnp.log(-jnp.expm1(-dt)))  # softplus of it is dt
        self.norm = GatedNorm(config, build.axes)
        self.out = RowLinear(
            (heads, config.size), build.hidden, std=build.output_std, axes=build.axes, rngs=rngs,
            bias=False, dims=(*of_x, "hidden"),
        )  # fmt: skip

    def __call__(self, x_BsD, context: Context | None = None):
        segments_BS = None if context is None else context.segments_BS
        return self._applied(x_BsD, segments_BS)[0]

    def of_slice(self, x_BsD, context: Context, cache: Kept):
        """(output, [B, 1, ...] of what this slice leaves), given what the one before it left."""

        def left(a_Bi):
            before = lax.dynamic_index_in_dim(a_Bi, context.part - 1, 1, keepdims=False)
            return jnp.where(context.part == 0, 0, before)

        y_BsD, after = self._applied(x_BsD, before=jax.tree.map(left, cache))
        return y_BsD, jax.tree.map(lambda a: a[:, None], after)

    def of_text(self, x_BtD, context: Context | None, keep: Keep):
        """The output, given what `keep` holds of earlier positions."""
        held, last_B = keep(None), None if context is None else context.last_B
        before = None if held is None else from_past(held)
        y_BtD, after = self._applied(x_BtD, before=before, last_B=last_B)
        keep(as_past(after))
        return y_BtD

    def _applied(self, x_BsD, segments_BS=None, before: Kept | None = None, last_B=None):
        """(output, what is kept after all positions, or after each row's last token)"""
        repeats = None, 2 if self.config.repeats(self.axes) else None, None
        weights = self.zx.get_value(), self.bc.get_value(), self.dt.get_value()
        projected = column_products(x_BsD, weights, repeats, self.axes)
        projected = tuple(checkpoint_name(y, MATMUL_OUTPUT) for y in projected)
        mix = jax.checkpoint(partial(mixed, self.config, self.axes), prevent_cse=False)
        y_BShK, after = mix(projected, self._weights(), segments_BS, before, last_B)
        return self.out(checkpoint_name(y_BShK, ATTENTION_OUTPUT)), after

    def _weights(self) -> Weights:
        def own(w, dim: int):
            """The part of w for the group of this device's heads."""
            if not self.config.repeats(self.axes):
                return w
            group = lax.axis_index(self.axes.tensor) * w.shape[dim] // self.axes.tensor_shards
            return lax.dynamic_slice_in_dim(used_by_heads(w, self.axes), group, 1, dim)

        return Weights(
            (self.x_kernel[...], self.x_bias[...]),
            (own(self.bc_kernel[...], 2), own(self.bc_bias[...], 1)),
            self.A_log[...], self.D[...], self.dt_bias[...], self.norm.scale[...],
        )  # fmt: skip


# -- between the projections and the output layer --------------------------------------------------


class Weights(NamedTuple):
    """The weights of this device's heads."""

    x: tuple[jax.Array, jax.Array]  # the convolution's kernel and bias, [W, h, K] and [h, K]
    bc: tuple[jax.Array, jax.Array]
    A_log: jax.Array  # [h]
    D: jax.Array
    dt_bias: jax.Array
    scale: jax.Array  # [h, K]


def _positions_innermost(zx_BSnhK):
    """zx, laid out [n, h, K, B, S] in F and B, as the scan reads it. XLA:GPU would lay out a whole
    stash of it as the matmul wants it that makes the weight's gradient, and copy it between them.
    """
    return with_layout_constraint(zx_BSnhK, Layout((2, 3, 4, 0, 1)))


def mixed(
    config: Mamba, axes: Axes, projected, weights: Weights, segments_BS, before: Kept | None, last_B
):
    """(y_BShK, Kept) from zx_BSnhK, bc_BSngN and dt_BSh."""
    zx_BSnhK, bc_BSngN, dt_BSh = projected
    zx_BSnhK = _positions_innermost(zx_BSnhK)
    z_BShK, x_BShK = zx_BSnhK[:, :, 0], zx_BSnhK[:, :, 1]
    spans = Spans(axes=axes, segments_BS=segments_BS)
    x_BpShK, x_after = _convolved(x_BShK, weights.x, before and before.x, last_B, spans)
    bc_BpSngN, bc_after = _convolved(bc_BSngN, weights.bc, before and before.bc, last_B, spans)
    b_BpSgN, c_BpSgN = bc_BpSngN[:, :, :, 0], bc_BpSngN[:, :, :, 1]
    groups = b_BpSgN.shape[3]
    x_BpSgRK = x_BpShK.reshape(*x_BpShK.shape[:3], groups, -1, config.size)
    dt_BSh = _steps(dt_BSh, weights, config, last_B, axes)
    dt_BpSgR = spans.cut(dt_BSh).reshape(x_BpSgRK.shape[:-1])
    a_gR = -jnp.exp(weights.A_log.astype(jnp.float32)).reshape(groups, -1)
    head = *x_BpSgRK.shape[3:], config.state
    y_BpSgRK, state_BgRKN = ssd(
        x_BpSgRK, dt_BpSgR, a_gR, b_BpSgN, c_BpSgN, before and before.state.reshape(-1, *head),
        chunk=config.chunk, spans=spans,
    )  # fmt: skip
    skip_hK = weights.D.astype(jnp.float32)[:, None]
    y_BShK = y_BpSgRK.reshape(x_BShK.shape)
    y_BShK += skip_hK * x_BpShK.reshape(x_BShK.shape).astype(jnp.float32)
    y_BShK = gated_norm(y_BShK, z_BShK, weights.scale, config, axes)
    state_BhKN = state_BgRKN.reshape(-1, *x_BShK.shape[2:], config.state)
    if last_B is not None:
        state_BhKN = spans.of_last(state_BhKN)
    return y_BShK, Kept(state_BhKN, x_after, bc_after)


def _steps(dt_BSh, weights: Weights, config: Mamba, last_B, axes: Axes):
    """dt, float32; 0 for padding, which then neither decays the state nor adds to it."""
    dt_BSh = dt_BSh.astype(jnp.float32) + weights.dt_bias.astype(jnp.float32)
    dt_BSh = jnp.maximum(jax.nn.softplus(dt_BSh), config.least_dt)
    if last_B is None:
        return dt_BSh
    counts_BS = places(dt_BSh.shape[1], axes) <= last_B[:, None]
    return jnp.where(counts_BS[..., None], dt_BSh, 0)


def _convolved(a_BS, weights, before_Bw, last_B, spans: Spans):
    """([B, p, S, ...], the last w inputs of the sequence, or of each row up to its last token)"""
    kernel_W, bias = weights
    a_BpS, width = spans.cut(a_BS), kernel_W.shape[0] - 1
    if before_Bw is not None:
        before_Bpw = before_Bw[:, None]
    elif spans.count > 1 or spans.segments_BS is not None:
        if a_BpS.shape[2] < width:
            raise UserError(
                f"conv_width={width + 1} sees more than the {a_BpS.shape[2]} positions that a "
                f"sequence has in a row on a device; use a longer one or a smaller context="
                f"{spans.axes.context_shards}"
            )
        before_Bpw = spans.before(a_BpS[:, :, a_BpS.shape[2] - width :])
    else:
        before_Bpw = jnp.zeros((a_BpS.shape[0], 1, width, *a_BpS.shape[3:]), a_BpS.dtype)
    whole_BS = jnp.concatenate([before_Bpw[:, -1], a_BpS[:, -1]], axis=1)
    after_Bw = whole_BS[:, whole_BS.shape[1] - width :]
    if last_B is not None and spans.count > 1:
        after_Bw = spans.at(a_BS, last_B[:, None] + 1 - width + jnp.arange(width))
    elif last_B is not None:
        places_Bw = last_B[:, None] + 1 + jnp.arange(width)
        places_Bw = places_Bw.reshape(*places_Bw.shape, *(1,) * (a_BS.ndim - 2))
        after_Bw = jnp.take_along_axis(whole_BS, places_Bw, axis=1)
    return convolve(a_BpS, before_Bpw, kernel_W, bias, spans), after_Bw


class GatedNorm(nnx.Module):
    """scale [H, K], of heads."""

    def __init__(self, config: Mamba, axes: Axes):
        ones = jnp.ones((config.heads, config.size), jnp.float32)
        dims = "heads", "head size"
        self.scale = parameter(ones, spec=P("tensor", None), role="norm", dims=dims)


def gated_norm(y_BShK, z_BShK, scale_hK, config: Mamba, axes: Axes):
    """RMS norm of y silu(z), over each group's heads together, in z's type."""
    y_BShK *= jax.nn.silu(z_BShK.astype(jnp.float32))
    y_BSgk = y_BShK.reshape(*y_BShK.shape[:2], config.local_groups(axes), -1)
    squares_BSg = jnp.square(y_BSgk).sum(axis=-1)
    if config.repeats(axes):
        squares_BSg = _over_group(squares_BSg, axes, config.groups)
    mean_BSg = squares_BSg / (config.heads // config.groups * config.size)
    y_BSgk = y_BSgk * lax.rsqrt(mean_BSg + config.epsilon)[..., None]
    y_BShK = y_BSgk.reshape(y_BShK.shape) * scale_hK.astype(jnp.float32)
    return y_BShK.astype(z_BShK.dtype)


@custom_vjp(1, 2)
def _over_group(a, axes: Axes, groups: int):
    """The sum over the devices of `tensor` whose heads share a group, the same on each of them.
    Backward: the same sum, over the parts of the gradient that they have."""
    size = axes.tensor_shards // groups
    devices = [list(range(n, n + size)) for n in range(0, axes.tensor_shards, size)]
    return lax.psum(a, axes.tensor, axis_index_groups=devices)


_over_group.defvjp(
    lambda a, axes, groups: (_over_group(a, axes, groups), None),
    lambda axes, groups, _, da: (_over_group(da, axes, groups),),
)
