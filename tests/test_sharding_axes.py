"""The mesh's axes: over which of them a gradient is summed, and the work of adding another."""

import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec as P

from mtx.config import Layout
from mtx.sharding.axes import AXES, BATCH, MESH, TOKENS, axes_of, sum_axes
from mtx.sharding.mesh import make_mesh

ROOT = Path(__file__).parents[1]


def test_the_mesh_is_in_the_order_of_the_records():
    layout = Layout(data=2, pipe=2, tensor=2)
    assert make_mesh(layout).axis_names == AXES == tuple(layout.sizes)
    assert layout.devices == 8 and layout.replicas == 2
    assert [axis.name for axis in MESH if axis.splits == "batch"] == list(BATCH)
    assert [axis.name for axis in MESH if axis.splits in ("batch", "sequence")] == list(TOKENS)
    assert {"data", "expert", "context"} <= set(TOKENS)


@pytest.mark.parametrize(
    "spec, shards_tokens, whole_over_tensor",
    [
        (P("pipe", None, None, None, "tensor"), (), False),
        (P(("pipe", "tensor"), None), (), False),
        (P("pipe", None, None, None), (), True),
        (P(None, None), (), True),
        (P("pipe", None, None, "data", "tensor"), ("data",), False),
        (P("pipe", None, None, "expert", "tensor"), ("expert",), False),
        (P("pipe", None, None, TOKENS, "tensor"), TOKENS, False),
    ],
)
def test_sums_follow_from_what_an_axis_splits(spec, shards_tokens, whole_over_tensor):
    sums = tuple(axis for axis in TOKENS if axis not in shards_tokens)
    assert sum_axes(spec, sequence_parallel=False) == sums
    more = (*sums, "tensor") if whole_over_tensor else sums
    assert sum_axes(spec, sequence_parallel=True) == more
    assert not set(axes_of(spec)) & set(sum_axes(spec, sequence_parallel=True))


A_FURTHER_AXIS = """
from dataclasses import dataclass
import mtx.sharding.axes as axes

axes.MESH = (*axes.MESH[:1], axes.Axis("further", "batch"), *axes.MESH[1:])  # the record,
axes.AXES = tuple(axis.name for axis in axes.MESH)
axes.BATCH = axes.axes_that_split("batch")
axes.TOKENS = axes.axes_that_split("batch", "sequence")

import numpy as np
import jax
import mtx
from mtx.config import Layout, ModelConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class Wider(Layout):
    further: int = 1  # and its size


Layout.further = 1
mtx.use_virtual_devices(8)
model = ModelConfig(layers=2, hidden=16, heads=2, sequence=8, vocab=30, vocab_multiple=8,
                    dropout=0.1, compute_dtype="float32")
ids = np.random.default_rng(0).integers(0, 30, (8, 9), dtype=np.int32)
batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((8, 8), np.float32)}


def trained(layout):
    trainer = mtx.Trainer(RunConfig(model=model, layout=layout, global_batch=8))
    state = trainer.init()
    for _ in range(2):
        state, metrics = trainer.train_step(state, trainer.place(batch))
    params = trainer.to_canonical(jax.device_get(state.params))
    norms = [float(metrics.loss), float(metrics.gradient_norm)]
    return norms, params


plain, wanted = trained(Layout(microbatch=8))
for more in (dict(tensor=2), dict(pipe=2, zero=3)):
    numbers, params = trained(Wider(data=2, further=2, microbatch=2, **more))
    np.testing.assert_allclose(numbers, plain, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
print("the same")
"""


def test_an_axis_that_splits_the_batch_is_a_record_and_a_size():
    done = subprocess.run(
        [sys.executable, "-c", A_FURTHER_AXIS], cwd=ROOT, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.stdout.split("\n")[-2:] == ["the same", ""], done.stderr[-2000:]
