"""A compiled step's memory: as the table counts it, flat in the number of microbatches if the table
says so, and with the state donated."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from mtx.compile.hlo import read_program
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.layers.model import Model
from mtx.step.trainer import Trainer
from mtx.vjp import LayerVJP

# Most of a device's temporary memory is the stash: 64 tokens per microbatch against h = 64.
MODEL = ModelConfig(layers=8, hidden=64, heads=4, sequence=64, vocab=128, compute_dtype="float32")
MICROBATCHES = 12


@functools.cache
def trainer_of(layout: Layout, microbatches: int) -> Trainer:
    rows = microbatches * layout.microbatch * layout.data
    return Trainer(RunConfig(model=MODEL, layout=layout, global_batch=rows))


@functools.cache
def memory(layout: Layout, microbatches: int = MICROBATCHES):
    """XLA's analysis of the step."""
    return trainer_of(layout, microbatches).compile_step().memory_analysis()


def nbytes(shapes) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(shapes))


def counted_bytes(layout: Layout, microbatches: int = MICROBATCHES) -> int:
    """Bytes in the table's slots on one device, for a layout without `tensor`: activations kept
    from F to B, values deferred to W, inputs received before their tick, keys and values of
    slices."""
    trainer = trainer_of(layout, microbatches)
    table, layers = trainer.schedule, trainer.placement.layer.shape[-1]
    gpt = Model(MODEL, recompute=layout.recompute, slices=table.slices)
    params = jax.eval_shape(functools.partial(gpt.init_layer, "block", 0), 0)
    shape = layout.microbatch, MODEL.sequence // table.slices, MODEL.hidden
    x = {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}
    context = gpt.context(0, {}, jnp.zeros(layout.microbatch), jnp.zeros(2, jnp.uint32))
    cache = (gpt.empty_cache("block", layout.microbatch),) if table.slices > 1 else ()
    layer = LayerVJP(functools.partial(gpt.layer, "block"), params, x, context, *cache)
    kept = nbytes(x) if layout.stash == "inputs" else layers * nbytes(layer.residuals)
    held = table.slots * kept + table.receive_slots * nbytes(x)
    if table.split:
        waiting = table.weight_stash.slots + (layout.idle != "skip")  # plus a slot of zeros
        held += waiting * layers * nbytes(layer.cut.deferred)
    if table.slices > 1:
        held += (table.cache.slots + table.gradient_cache.slots) * layers * nbytes(cache)
    return held


@functools.cache
def constant_bytes() -> int:
    """Bytes that are the same for every table: parameters' gradients, the running layer, the
    logits. Measured once, with 1F1B."""
    layout = Layout(pipe=4)
    return memory(layout).temp_size_in_bytes - counted_bytes(layout)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipe=4, schedule="gpipe"),
        Layout(pipe=4, schedule="interleaved_1f1b", virtual=2, idle="phases"),
        Layout(pipe=4, schedule="zb_h1"),
        Layout(pipe=4, schedule="zb_v", virtual=2),
        Layout(pipe=4, schedule="seq1f1b", slices=2),
    ],
    ids=lambda layout: layout.schedule,
)
def test_temporary_memory_is_what_the_table_counts(layout):
    predicted = constant_bytes() + counted_bytes(layout)
    assert memory(layout).temp_size_in_bytes == pytest.approx(predicted, rel=0.1)
    assert counted_bytes(layout) > predicted / 2


def test_the_constant_part_is_less_than_half_of_any_of_these():
    assert 0 < constant_bytes() < counted_bytes(Layout(pipe=4)) / 2


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipe=4),
        Layout(pipe=4, schedule="interleaved_1f1b", virtual=2, idle="phases"),
        Layout(pipe=4, stash="inputs"),
        Layout(pipe=4, schedule="zb_v", virtual=2),
        Layout(pipe=4, schedule="seq1f1b", slices=2),
    ],
    ids=["1f1b", "interleaved", "inputs", "zb_v", "seq1f1b"],
)
def test_temporary_memory_is_flat_in_the_microbatches(layout):
    """Except for the batch itself and the table's rows."""
    few, many = MICROBATCHES, 96
    growth = memory(layout, many).temp_size_in_bytes - memory(layout, few).temp_size_in_bytes
    rows_bytes = 3 * 4 * MODEL.sequence  # tokens, targets, weights of a microbatch
    assert growth <= 2 * (many - few) * rows_bytes


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v"])
def test_gradients_are_added_to_in_place(schedule):
    """No part of an accumulator, float32 [C, N, ...], is copied before something is added to it.
    The layers' parameters have the same shapes, but are bfloat16 at that point."""
    layout = Layout(pipe=4, schedule=schedule, virtual=2)
    model = replace(MODEL, compute_dtype="bfloat16")
    trainer = Trainer(RunConfig(model=model, layout=layout, global_batch=MICROBATCHES))
    last = [
        list(computation.values())[-1]
        for computation in read_program(trainer.compile_step().as_text()).computations.values()
    ]
    params = jax.eval_shape(functools.partial(Model(model).init_layer, "block", 0), 0)
    parts = {(1, 1, *a.shape) for a in jax.tree.leaves(params) if a.ndim > 1}
    sliced = [i.shapes[0] for i in last if i.opcode == "dynamic-slice"]
    assert not {shape for shape in sliced if shape.dims in parts and shape.dtype == "f32"}
    updated = [i.shapes[0] for i in last if i.opcode == "dynamic-update-slice"]
    wholes = {(2, *part[1:]) for part in parts}
    assert wholes <= {shape.dims for shape in updated if shape.dtype == "f32"}


def state_bytes(layout: Layout) -> int:
    trainer = trainer_of(layout, 1)
    return nbytes(
        jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(s.shard_shape(a.shape), a.dtype),
            trainer.states.shapes,
            trainer.shardings(trainer.states.specs),
        )
    )


def test_the_state_is_donated_and_sharded_over_data():
    for layout in (Layout(pipe=2, tensor=2), Layout(data=2, pipe=2, tensor=2)):
        analysis, tokens = memory(layout, 4), 4 * layout.microbatch * MODEL.sequence
        assert analysis.argument_size_in_bytes == state_bytes(layout) + 3 * 4 * tokens
        assert analysis.alias_size_in_bytes == state_bytes(layout)
    assert state_bytes(Layout(data=2)) == pytest.approx(state_bytes(Layout()) / 2, rel=1e-3)
