"""B of a layer, by itself: what it makes is put where the layer's own things are kept.

XLA has no reason to put a weight gradient beside a collective, and left alone it puts all of them
last: so the equations are put in order as in woven ticks (`mtx.pipeline.weave`), for B alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from mtx.pipeline.nodes import communicates
from mtx.pipeline.own import Own
from mtx.pipeline.weave import Braid, once
from mtx.vjp import Arrays, LayerVJP

Tree = Any


def backward(
    vjp: LayerVJP, own: Own, residuals: Arrays, params: Tree, given: tuple, dy: Tree, *,
    split: bool, beside: bool,
) -> Sequence[Tree]:  # fmt: skip
    """The gradients of the stream and of what is given. Those of the parameters are added to the
    layer's own or, where W is split from B, what those of the weights need is written. beside:
    collectives lie beside matmuls, and there is no cache among what is given."""
    if split:
        dparams, others, waits = vjp.cut.backward(residuals, params, given, dy)
        own.write("deferred", waits)
    elif beside and any(map(communicates, vjp.strands[1].eqns)):
        return [_woven_alone(vjp, own, residuals, params, given, dy)]
    else:
        dparams, *others = vjp.backward(residuals, params, given, dy)
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
