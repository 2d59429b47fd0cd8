"""F or B of one layer on its own, with its results stored in the layer's own entries.

XLA:GPU lets a pass or a matmul write its result straight to its place in a ring if only a barrier
and the end of the loop come after the write, and lets readers read it there, after that barrier.
This saves the copy that JAX's scans make of each residual. All indices except the layer's must be
known at compile time, so it is done only for rings of one slot.

XLA has no reason to put a weight gradient beside a collective; left alone, it puts all of them
last. So B's equations are ordered as in woven ticks (`mtx.pipeline.weave`), for B alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from mtx.pipeline.costs import communicates
from mtx.pipeline.own import Own
from mtx.pipeline.strands import once
from mtx.pipeline.weave import Braid
from mtx.vjp import Arrays, LayerVJP

Tree = Any


def forward(
    vjp: LayerVJP, own: Own, params: Tree, stream: Tree, given: tuple, *, in_place: bool
) -> Tree:  # fmt: skip
    """The layer's output; its residuals are written to its own ring. in_place: the equations that
    make residuals write them there, if XLA can, and their readers read them there."""
    if not (in_place and own.has_one_slot("ring")):
        y, residuals = vjp.forward(params, stream, *given)
        own.write("ring", residuals)
        return y
    braid, ring = Braid(), own.trees["ring"]
    inputs = [
        *braid.given(jax.tree.leaves(params), weights=True),
        *braid.given(jax.tree.leaves((stream, given))),
    ]
    made = braid.add(vjp.strands[0], inputs, side="F")
    count = len(jax.tree.leaves(vjp.output))
    written = braid.write(ring, made[count:], *own.at["ring"], taken=None, last=False)
    braid.run()
    own.trees["ring"] = tuple(braid.read(written))
    return jax.tree.structure(vjp.output).unflatten(braid.read(made[:count]))


def backward(
    vjp: LayerVJP, own: Own, residuals: Arrays, params: Tree, given: tuple, dy: Tree, *,
    split: bool, beside: bool,
) -> Sequence[Tree]:  # fmt: skip
    """The gradients of the stream and, if it is given, of the cache. Those of the parameters are
    added to the layer's own; if W is split from B, what weight gradients need is written in their
    place. beside: collectives lie beside matmuls, and `given` holds no cache."""
    if split:
        dparams, others, waits = vjp.cut.backward(residuals, params, given, dy)
        own.write("deferred", waits)
    elif beside and any(map(communicates, vjp.strands[1].eqns)):
        return [_woven_alone(vjp, own, residuals, params, given, dy)]
    else:
        dparams, others = vjp.backward(residuals, params, given, dy)
    own.add("gradients", dparams)
    return others


def _woven_alone(
    vjp: LayerVJP, own: Own, residuals: Arrays, params: Tree, given: tuple, dy: Tree
) -> Tree:  # fmt: skip
    """The gradient of the stream."""
    braid, totals = Braid(), own.trees["gradients"]
    structure, count = jax.tree.structure(totals), len(jax.tree.leaves(totals))
    inputs = [
        *braid.given(residuals),
        *braid.given(jax.tree.leaves(params), weights=True),
        *braid.given(jax.tree.leaves((given, dy))),
    ]
    made = braid.add(once(vjp.strands[1]), inputs, side="B")
    sums = braid.add_up(totals, structure.unflatten(made[:count]), *own.at["gradients"])
    braid.run()
    own.trees["gradients"] = jax.tree.map(braid.value, sums)
    return jax.tree.structure(dy).unflatten(braid.read(made[count:]))
