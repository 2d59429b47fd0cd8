"""The weight gradients of a tick's last layer, divided over the sends: the gradients are the same
however they are divided, and the division chosen hides most."""

import itertools
from functools import partial

import jax
import numpy as np
import pytest
from test_pipeline_vjp import layer, random_like

from mtx.pipeline import shares
from mtx.pipeline.shares import Division, Sends

NOTHING = Sends(with_head=(0, 0, 0), without=(0, 0, 0), heads=1, x=0, head=0)
QKV, OUT, UP, DOWN = (("attention", "qkv"), ("attention", "out"), ("mlp", "up"), ("mlp", "down"))


def names(division, leaves):
    paths = [path for path, _ in jax.tree.leaves_with_path(division.gradients.unflatten(leaves))]
    return [tuple(key.key for key in path[:2]) for path in paths]


def in_parts(vjp, division, residuals, params, given, dy):
    """The gradients, joined from B's and from each part, which runs separately."""
    arguments = jax.tree.leaves((residuals, params, given, dy))
    early, others, waits = division.of_b(division.cut.b(*arguments))
    leaves = jax.tree.leaves(early, is_leaf=lambda a: a is None)
    found = [{0: value} if value is not None else {} for value in leaves]
    for part in range(3):
        mine, strand = division.part(part)
        for share, value in zip(mine, strand(*waits), strict=True):
            assert share.row not in found[share.leaf]
            found[share.leaf][share.row] = value
    joined = []
    for rows in found:
        starts, values = zip(*sorted(rows.items()), strict=True)
        assert list(starts) == [0, *itertools.accumulate(len(v) for v in values[:-1])]
        joined.append(np.concatenate(values) if len(values) > 1 else values[0])
    return division.gradients.unflatten(joined), others


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize(
    "choice",
    [
        dict(parts=(0, 2, 1, 3)),
        dict(parts=(0, 0, 3, 3)),
        dict(parts=(2, 2, 2, 2)),
        dict(parts=(0, 2, 1, 3), units=2, other=3),  # the first rows with B
        dict(parts=(0, 3, 3, 1), units=6, other=2),
        dict(parts=(1, 1, 3, 1), units=4, other=0),
    ],
    ids=str,
)
def test_wherever_they_lie_the_gradients_are_those_of_the_whole(choice, recompute, monkeypatch):
    vjp, params, x, given = layer(recompute=recompute, in_place=True)
    dy, chosen = random_like(vjp.output, seed=2), shares._Choice(**choice)
    monkeypatch.setattr(shares, "_best", lambda *_: chosen)
    division = Division.of(vjp, NOTHING)
    assert len(division.shares) == division.gradients.num_leaves + bool(chosen.units)

    @jax.jit
    def run(params, x, given, dy):
        _, residuals = vjp.forward(params, x, *given)
        return vjp.backward(residuals, params, given, dy), residuals

    want, residuals = run(params, x, given, dy)
    got = in_parts(vjp, division, residuals, params, given, dy)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b), path


def test_where_nothing_is_sent_the_smallest_stays_with_b_and_the_others_lie_apart():
    vjp, *_ = layer()
    division = Division.of(vjp, NOTHING)
    every = names(division, list(range(division.gradients.num_leaves)))
    waiting = [division.part(part)[0] for part in range(3)]
    assert [[every[share.leaf] for share in part] for part in waiting] == [[DOWN], [QKV], [UP]]
    early, _, _ = division.of_b(division.cut.b.outvars)
    kept = [path for path, _ in jax.tree.leaves_with_path(early)]
    assert OUT in [tuple(key.key for key in path[:2]) for path in kept]
    assert not division.x_beside_head
    waits = random_like(division.cut.deferred)
    late = [share for part in waiting for share in part]
    want = dict(zip(sorted(late), jax.jit(division.cut.w)(*waits), strict=True))
    for part in range(3):
        (share,), strand = division.part(part)
        assert len(strand.eqns) < len(division.cut.w.eqns)
        np.testing.assert_array_equal(jax.jit(strand)(*waits)[0], want[share])


def exposed_s(seconds, parts, sends, scatter_s, x_beside_head):
    """Exposed seconds in plain numbers, tick by tick."""
    beside = [sum(s for s, p in zip(seconds, parts) if p == part) for part in range(4)]
    with_head = list(sends.with_head)
    if not x_beside_head:
        with_head[1] = max(with_head[1], sends.x)
    of_head = max(0.0, sends.x - sends.head) if x_beside_head else 0.0
    of_head += sum(max(0.0, a - b) for a, b in zip(with_head, beside))
    of_others = sum(max(0.0, a - b) for a, b in zip(sends.without, beside))
    of_both = max(0.0, scatter_s - beside[3])
    return sends.heads * of_head + (1 - sends.heads) * of_others + of_both


@pytest.mark.parametrize("seed", range(12))
def test_least_is_left_exposed(seed):
    """Among all ways, including two shares of a gradient if that is worth the copies."""
    random = np.random.default_rng(seed)
    seconds = sorted(random.uniform(5e-5, 7e-4, 4), reverse=True)
    items = [shares._Item(leaf, s, int(1e12 * s), (leaf,)) for leaf, s in enumerate(seconds)]
    a, b, c, d, e, f, x = random.uniform(0, 5e-4, 7)
    sends = Sends((a, b, c), (d, e, f), random.uniform(), x, random.uniform(0, 5e-4))
    scatter_s, copied_s = random.uniform(0, 3e-4), random.choice([None, 0.0, 4e-5])
    first = shares._by_sizes(items)
    found = shares._best(items, first, sends, scatter_s, copied_s)
    exposed = partial(exposed_s, sends=sends, scatter_s=scatter_s)

    def of(choice):
        moved = seconds[0] * choice.units / 8
        each, parts = [seconds[0] - moved, *seconds[1:]], list(choice.parts)
        each, parts = (each + [moved], parts + [choice.other]) if choice.units else (each, parts)
        return exposed(each, parts, x_beside_head=choice.x_beside_head)

    every = [
        shares._Choice(parts, units, other, beside)
        for parts in itertools.product(range(4), repeat=4)
        for units in ((0,) if copied_s is None else (0, 2, 4, 6))
        for other in (range(4) if units else (0,))
        for beside in (False, True)
        if not units or parts[0] != 3
    ]
    least = min(of(choice) + (copied_s if choice.units else 0.0) for choice in every)
    cost = of(found) + (copied_s if found.units else 0.0)
    assert least - 1e-12 <= cost <= least + 2e-6  # so small a gain is no reason for another way
    assert cost < of(first) or found == first


def test_gate_and_up_lie_in_two_parts_and_enough_beside_what_is_scattered_last():
    """A tick of Llama 2 70B, by the costs of its gradients: the smallest, of keys and values, is
    too short for the scatter, and gate and up together take longer than any send."""
    items = [
        shares._Item(leaf, seconds, int(1e12 * seconds), (leaf,))
        for leaf, seconds in enumerate((650e-6, 325e-6, 93e-6, 93e-6, 32e-6))
    ]
    sends = Sends((391e-6, 196e-6, 338e-6), (391e-6, 302e-6, 302e-6), 0.25, 302e-6, 93e-6)
    first = shares._by_sizes(items)
    assert first.parts[-1] == 3
    found = shares._best(items, first, sends, 196e-6, 56e-6)
    assert found.units == 4 and {found.parts[0], found.other} == {0, 2}
    assert sum(item.seconds for item, p in zip(items, found.parts) if p == 3) > 180e-6
    assert not shares._best(items, first, sends, 196e-6, None).units
