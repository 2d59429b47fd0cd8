"""Communication and computation of attention over `context`, against counts by hand.

Legend: N positions of all sequences · c devices · u of them that share sequences by heads · d the
width of keys or values; queries are heads/kv_heads times as wide
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from mtx.compile.hlo import read_program
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.costs.ask import layer_cost
from mtx.layers.attend import Scores
from mtx.layers.over_context import attention_over_context
from mtx.layers.pairs import Pair
from mtx.sharding.mesh import Axes
from mtx.sharding.sequence import zigzag
from mtx.step.trainer import Trainer

LAYERS, SEQUENCE, ROWS, C = 2, 32, 4, 4
FLOAT = 4  # bytes
RING = "collective-permute"


def model_of(kv_heads):
    return ModelConfig(
        family="llama", layers=LAYERS, hidden=32, heads=4, kv_heads=kv_heads, sequence=SEQUENCE,
        vocab=60, vocab_multiple=8, compute_dtype="float32",
    )  # fmt: skip


def ring_bytes(nd, devices):
    """(forward, backward): keys and values, N d each, go around the ring; each device's part goes
    to all others. They go around again backward, followed by the sums of their gradients."""
    once = 2 * nd / C * (devices - 1) * FLOAT
    return once, 2 * once


def all_to_all_bytes(nd, devices, heads_a_group):
    """Each way: queries, keys, values and attention's outputs, except a device's own part."""
    return (2 * heads_a_group + 2) * nd / C * (devices - 1) / devices * FLOAT


@pytest.mark.parametrize(("way", "kv_heads", "by_heads"), [
    ("gather", 2, 1), ("ring", 2, 1), ("ulysses", 4, 4), ("usp", 2, 2),
])  # fmt: skip
def test_bytes_over_context_are_those_of_the_closed_form(way, kv_heads, by_heads):
    model, layout = model_of(kv_heads), Layout(data=2, context=C, context_attention=way)
    trainer = Trainer(RunConfig(model=model, layout=layout, global_batch=2 * ROWS))
    sent = Counter()
    for one in read_program(trainer.compile_step().as_text()).collectives():
        if one.axes(layout.sizes) == ("context",):
            sent[one.kind] += one.count * one.sent_bytes
    nd = ROWS * SEQUENCE * kv_heads * model.head_size
    forward, backward = ring_bytes(nd, C // by_heads)
    each = all_to_all_bytes(nd, by_heads, 4 // kv_heads)
    wanted = {
        "gather": {"all-gather": 2 * forward, "reduce-scatter": backward - forward},
        "ring": {RING: forward + backward},
        "ulysses": {"all-to-all": 2 * each},
        "usp": {RING: forward + backward, "all-to-all": 2 * each},
    }[way]
    assert sent == {kind: LAYERS * number for kind, number in wanted.items()}
    cost = layer_cost(model, kind="block", context=C, context_attention=way)
    traced = {"ppermute": RING, "all_to_all": "all-to-all", "all_gather": "all-gather",
              "reduce_scatter": "reduce-scatter"}  # fmt: skip
    planned = Counter()
    for one in cost.collectives:
        group = one.group or C
        share = 1 if one.kind == "ppermute" else (group - 1) / group
        planned[traced[one.kind]] += LAYERS * one.times * one.bytes.at(ROWS) * share
    assert planned == sent


# -- pairs of queries and keys ---------------------------------------------------------------------


def blocks_run(monkeypatch, rules, segments_BS=None):
    """[c] for a forward and for a backward pass: the pairs of chunks that each device computed; a
    chunk's pair with itself counts as the share that the mask leaves."""
    found = {"forward": np.zeros(C), "backward": np.zeros(C)}

    def counted(name, function):
        def run(pair, q, k, *rest):
            n = q.shape[1]
            own = pair.rules.causal and pair.offset == 0
            seen = np.tri(n)
            if own and pair.rules.window is not None:
                seen = seen - np.tri(n, k=-pair.rules.window)
            part = seen.sum() / n**2 if own else 1.0

            def add(rank):
                found[name][rank] += part

            jax.debug.callback(add, lax.axis_index("context"))
            return function(pair, q, k, *rest)

        return run

    for name in found:
        monkeypatch.setattr(Pair, name, counted(name, getattr(Pair, name)))
    axes = Axes(context="context", context_shards=C, attention="ring")
    order = zigzag(SEQUENCE, C)
    q, kv = (
        jax.random.normal(jax.random.key(n), (1, SEQUENCE, *dims))
        for n, dims in enumerate([(2, 8), (2, 1, 8)])
    )
    segments = None if segments_BS is None else jnp.asarray(segments_BS)[:, order]

    def attend(q, kv, *segments):
        return attention_over_context(
            (q, kv), segments[0] if segments else None, rules=rules, kernel="blocked", axes=axes
        ).sum()

    given = (q, kv) if segments is None else (q, kv, segments)
    spec = PartitionSpec(None, "context")
    mesh = Mesh(np.array(jax.devices()[:C]), ("context",))
    both = jax.shard_map(
        lambda *local: jax.grad(attend, argnums=(0, 1))(*local), mesh=mesh,
        in_specs=(spec,) * len(given), out_specs=(spec, spec), check_vma=False,
    )  # fmt: skip
    jax.block_until_ready(jax.jit(both)(*given))
    jax.effects_barrier()
    return found["forward"], found["backward"]


def visible(rules, segments_S=None):
    """bool [c, 2, 2c, n, n]: which keys of each chunk the queries of each device's chunks see."""
    place = np.arange(SEQUENCE)
    seen = place[:, None] >= place[None]
    if rules.window is not None:
        seen &= place[:, None] - place[None] < rules.window
    if segments_S is not None:
        seen &= segments_S[:, None] == segments_S[None]
    n = SEQUENCE // (2 * C)
    return seen[zigzag(SEQUENCE, C)].reshape(C, 2, n, 2 * C, n).swapaxes(2, 3)


def test_every_device_computes_the_pairs_that_it_sees_and_all_as_many(monkeypatch):
    rules = Scores()
    wanted = visible(rules).sum(axis=(1, 2, 3, 4)) / (SEQUENCE // (2 * C)) ** 2
    assert len(set(wanted)) == 1
    for found in blocks_run(monkeypatch, rules):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("window", [4, 7, 13])
def test_a_window_costs_every_device_a_chunk_more_than_it_sees_at_most(monkeypatch, window):
    """For either of its chunks; the first ones of a sequence see less."""
    rules = Scores(window=window)
    seen = visible(rules).sum(axis=(2, 3, 4)) / (SEQUENCE // (2 * C)) ** 2
    for found in blocks_run(monkeypatch, rules):
        assert len(set(found)) == 1
        assert 0 <= found[0] - 2 * seen.max() < 2


def test_documents_cost_the_chunks_in_which_something_is_seen(monkeypatch):
    segments_S = np.repeat(np.arange(6), [3, 9, 1, 6, 11, 2])
    seen = visible(Scores(), segments_S).any(axis=(3, 4)).sum(axis=(1, 2))
    own = np.tri(SEQUENCE // (2 * C)).mean()
    for found in blocks_run(monkeypatch, Scores(), segments_S[None]):
        np.testing.assert_array_equal(found, seen - 2 * (1 - own))
