"""A compiled step's memory: flat in the number of microbatches, and the state donated."""

import jax
import jax.numpy as jnp
import pytest

from mtx.config import Layout, ModelConfig, RunConfig
from mtx.train.step import Trainer

MODEL = ModelConfig(layers=8, hidden=128, heads=4, sequence=64, vocab=256, compute_dtype="float32")


def memory(layout: Layout, microbatches: int):
    """XLA's analysis of the step, and the bytes of its batch on one device."""
    rows = microbatches * layout.microbatch * layout.data
    trainer = Trainer(RunConfig(model=MODEL, layout=layout, global_batch=rows))
    return trainer.compile_step().memory_analysis(), 3 * 4 * rows * MODEL.sequence // layout.data


def state_bytes(layout: Layout) -> int:
    trainer = Trainer(RunConfig(model=MODEL, layout=layout, global_batch=layout.data))
    shards = jax.tree.map(
        lambda a, s: jnp.zeros(s.shard_shape(a.shape), a.dtype).nbytes,
        trainer.state_shapes,
        trainer.shardings(trainer.state_specs),
    )
    return sum(jax.tree.leaves(shards))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipe=4),
        Layout(pipe=4, virtual=2),
        Layout(pipe=4, virtual=2, idle="phases"),
        Layout(pipe=4, stash="inputs"),
    ],
    ids=["1f1b", "interleaved", "phases", "inputs"],
)
def test_temporary_memory_is_flat_in_the_microbatches(layout):
    temps = [memory(layout, m)[0].temp_size_in_bytes for m in (8, 32, 128)]
    assert max(temps) <= 1.03 * min(temps), temps


def test_gpipe_stash_grows_with_the_microbatches():
    few, many = (memory(Layout(pipe=4, schedule="gpipe"), m)[0].temp_size_in_bytes for m in (8, 32))
    assert many > 2 * few


def test_the_state_is_donated_and_sharded_over_data():
    for layout in (Layout(pipe=2, tensor=2), Layout(data=2, pipe=2, tensor=2)):
        analysis, batch_bytes = memory(layout, 4)
        assert analysis.argument_size_in_bytes == state_bytes(layout) + batch_bytes
        assert analysis.alias_size_in_bytes == state_bytes(layout)
    assert state_bytes(Layout(data=2)) == pytest.approx(state_bytes(Layout()) / 2, rel=1e-3)
