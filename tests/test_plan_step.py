"""The closed forms against the training step as XLA compiles it: FLOPs, stash, communication."""

import functools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtx.config import Layout, ModelConfig, RunConfig
from mtx.plan.flops import hardware_matmul_flops
from mtx.plan.hlo import read_program
from mtx.plan.memory import layer_residual_bytes
from mtx.train.step import Trainer

GLOBAL_BATCH = 8
CASES = {  # changes of the model, and the layout
    "residuals": ({}, dict(data=2, pipe=2, tensor=2)),
    "full, blocked attention": ({"sequence": 64}, dict(pipe=2, recompute="full")),
    "dropout, phases": (
        {"dropout": 0.1, "attention_dropout": 0.1},
        dict(pipe=2, idle="phases"),
    ),
    "selective, masked": (
        {"attention_dropout": 0.1},
        dict(pipe=2, idle="masked", recompute="selective"),
    ),
    "inputs": ({}, dict(pipe=2, stash="inputs")),
    "inputs, one-layer chunks": ({}, dict(pipe=2, virtual=2, stash="inputs", idle="phases")),
    "split": ({}, dict(pipe=2, tensor=2, schedule="zb_h1")),
    "split, full": ({}, dict(pipe=2, schedule="aligned_zb", recompute="full", idle="masked")),
    "split, vee": ({}, dict(pipe=2, virtual=2, schedule="zb_v", idle="phases")),
    "sliced": ({}, dict(pipe=2, slices=4, schedule="seq1f1b")),
    "sliced, selective": (
        {"dropout": 0.1},
        dict(pipe=2, slices=2, schedule="terapipe", recompute="selective"),
    ),
    "sliced, full": ({}, dict(pipe=2, slices=4, schedule="seq1f1b", recompute="full")),
    "sliced, inputs": (
        {},
        dict(pipe=2, slices=2, schedule="seq1f1b", stash="inputs", idle="phases"),
    ),
    "sharded over data": (
        {},
        dict(data=2, pipe=2, virtual=2, schedule="breadth_first", zero=3),
    ),
}


@functools.cache
def compiled(case: str):
    """(trainer, program) of a small run."""
    model, layout = CASES[case]
    base = dict(layers=4, hidden=32, heads=4, sequence=16, vocab=120, vocab_multiple=8)
    model = ModelConfig(**(base | {"compute_dtype": "float32"} | model))
    run = RunConfig(model=model, layout=Layout(**layout), global_batch=GLOBAL_BATCH)
    trainer = Trainer(run)
    state = jax.tree.map(
        lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        trainer.state_shapes,
        trainer.shardings(trainer.state_specs),
    )
    rows = NamedSharding(trainer.mesh, P("data"))
    batch = {
        name: jax.ShapeDtypeStruct((GLOBAL_BATCH, model.sequence), dtype, sharding=rows)
        for name, dtype in (("tokens", jnp.int32), ("targets", jnp.int32), ("weights", jnp.float32))
    }
    return trainer, read_program(trainer.train_step.lower(state, batch).compile().as_text())


def branch_weights(trainer):
    """For a conditional, the shares of the ticks that take its branches (idle, busy)."""
    table, layout = trainer.schedule, trainer.run.layout
    backward = [phase for phase in table.phases if phase.backward or layout.idle != "phases"]
    head_ticks = sum(phase.stop - phase.start for phase in backward)
    op = table.items * table.virtual / table.ticks
    shares = {"F/cond": op, "B/cond": op, "W/cond": op, "head/cond": table.items / head_ticks}
    shares |= {"F/embed/cond": 1.0, "embed_backward/cond": 1.0}  # no matmuls
    if layout.zero == 3:
        (fetch, _), (fetch_back, spend) = table.forward.runs, table.backward.runs
        shares |= {"fetch/cond": fetch.mean(), "B/fetch/cond": fetch_back.mean()}
        shares |= {"B/spend/cond": spend.mean()}

    def weights(conditional):
        busy = shares.get(re.split(r"while/body/(?:closed_call/)?", conditional.op_name, 1)[1])
        if busy is None:  # attention of each slice of a sequence
            assert len(conditional.branches) == table.slices > 1, conditional.op_name
            return [1 / table.slices] * table.slices
        return 1 - busy, busy

    return weights


@pytest.mark.parametrize("case", CASES)
def test_a_step_executes_the_matmuls_and_keeps_the_stash_that_are_predicted(case):
    trainer, program = compiled(case)
    run = trainer.run
    predicted = hardware_matmul_flops(run.model, run.layout, GLOBAL_BATCH, backend="xla")
    executed = program.matmul_flops(branch_weights(trainer))
    assert executed == pytest.approx(predicted / run.layout.devices, rel=1e-12)
    if run.layout.stash == "residuals":
        assert ring_bytes(trainer, program) == trainer.schedule.slots * layer_bytes(run)


def layer_bytes(run: RunConfig) -> int:
    """The residuals of one chunk of one microbatch."""
    layers = run.model.layers // (run.layout.pipe * run.layout.virtual)
    recompute = run.layout.recompute
    return layers * layer_residual_bytes(run.model, run.layout, recompute=recompute, backend="xla")


def ring_bytes(trainer, program) -> int:
    """What the loop over the ticks carries in arrays [slots, layers of a chunk, microbatch ...]."""
    slots, layers = trainer.schedule.slots, trainer.placement.layer.shape[-1]
    loops = [
        [s for s in instruction.shapes if s.dims[:2] == (slots, layers) and len(s.dims) > 2]
        for computation in program.computations.values()
        for instruction in computation.values()
        if instruction.opcode == "while"
    ]
    return max(sum(shape.bytes for shape in shapes) for shapes in loops)


def test_collectives_of_a_step_by_axis_and_bytes():
    """With sequence parallelism: what crosses stages is 1/t of the sequence, forth and back in
    every tick; gradients are reduce-scattered over `data` once, parameters gathered once."""
    trainer, program = compiled("residuals")
    model, sizes = trainer.run.model, trainer.sizes
    total = Counter()
    for collective in program.collectives(branch_weights(trainer)):
        axes = collective.axes(sizes)
        total[collective.kind, axes] += round(collective.count * collective.operand_bytes)
    x_bytes = model.sequence * model.hidden * 4 // 2
    assert total["collective-permute", ("pipe",)] == 2 * trainer.schedule.ticks * x_bytes
    leaves = zip(jax.tree.leaves(trainer.param_shapes), jax.tree.leaves(trainer.specs), strict=True)
    local = 4 * sum(leaf.size // shards(spec, sizes) for leaf, spec in leaves)
    assert total["reduce-scatter", ("data",)] == local
    assert total["all-gather", ("data",)] == local / 2


def shards(spec, sizes) -> int:
    """The parts into which an array of that spec is cut."""
    axes = [(entry,) if isinstance(entry, str) else entry for entry in spec if entry]
    return math.prod(sizes[axis] for names in axes for axis in names)
