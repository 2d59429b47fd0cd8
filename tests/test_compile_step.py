"""The closed forms against the compiled training step: FLOPs, stash, communication."""

import functools
import math
import re
from collections import Counter

import jax
import pytest

from mtx.compile.hlo import read_program
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.costs.ask import layer_cost
from mtx.costs.cost import total
from mtx.plan.flops import hardware_matmul_flops
from mtx.plan.memory import layer_residual_bytes
from mtx.step.trainer import Trainer

GLOBAL_BATCH = 8
_BODY = re.compile(r"while/body/(?:closed_call/|eval_jaxpr/)?")  # of the loop over the ticks
LLAMA = {"family": "llama", "kv_heads": 2, "ffn": 48, "tied": False}
BERT = {"family": "bert"}
POST = BERT | {"norm_placement": "post"}
CASES = {  # (changes to the model, layout)
    "residuals": ({}, dict(data=2, pipe=2, tensor=2)),
    "full, blocked attention": ({"sequence": 64}, dict(pipe=2, recompute="full")),
    "dropout, phases": (
        {"dropout": 0.1, "attention_dropout": 0.1},
        dict(pipe=2, idle="phases"),
    ),
    "selective, masked": (
        {"attention_dropout": 0.1},
        dict(pipe=2, idle="phases", recompute="selective"),
    ),
    "inputs": ({}, dict(pipe=2, stash="inputs")),
    "split": ({}, dict(pipe=2, tensor=2, schedule="zb_h1")),
    "split, vee": ({}, dict(pipe=2, virtual=2, schedule="zb_v", idle="phases")),
    "sliced": ({}, dict(pipe=2, slices=4, schedule="seq1f1b")),
    "sliced, inputs": (
        {},
        dict(pipe=2, slices=2, schedule="seq1f1b", stash="inputs", idle="phases"),
    ),
    "sharded over data": (
        {},
        dict(data=2, pipe=2, virtual=2, schedule="breadth_first", zero=3, zero_unit="chunk"),
    ),
    "sharded over data, by layer": (
        LLAMA,
        dict(data=2, pipe=2, zero=3, zero_unit="layer"),
    ),
    "sharded over data, by layer, woven": (
        {},
        dict(data=4, zero=3, zero_unit="layer", weave="on", idle="phases"),
    ),
    "llama, fewer kv heads than tensor, split": (
        LLAMA,
        dict(pipe=2, tensor=4, schedule="zb_h1", idle="phases"),
    ),
    "llama, full, no sequence parallelism": (
        LLAMA | {"sequence": 64},
        dict(pipe=2, tensor=4, sequence_parallel=False, recompute="full"),
    ),
    "llama, sliced, selective": (
        LLAMA,
        dict(pipe=2, tensor=2, slices=4, schedule="seq1f1b", recompute="selective"),
    ),
    "context, ring": (
        LLAMA | {"sequence": 64},
        dict(pipe=2, context=4, context_attention="ring", recompute="around_attention"),
    ),
    "context, ulysses and a ring, split": (
        LLAMA,
        dict(pipe=2, context=4, context_attention="usp", schedule="zb_h1"),
    ),
    "adapters": (LLAMA | {"lora_rank": 4}, dict(data=2, pipe=2, tensor=2, virtual=2)),
    "adapters of attention, split": (
        LLAMA | {"lora_rank": 4, "lora_on": "attention"},
        dict(pipe=2, tensor=2, schedule="zb_h1", recompute="selective"),
    ),
    "bert, blocked attention": (
        BERT | {"sequence": 64},
        dict(pipe=2, tensor=2, microbatch=2, sequence_parallel=False),
    ),
    "bert, post, full": (POST, dict(pipe=2, tensor=2, recompute="full", schedule="zb_h1")),
}


@functools.cache
def compiled(case: str):
    """(trainer, program) of a small run."""
    model, layout = CASES[case]
    base = dict(layers=4, hidden=32, heads=4, sequence=16, vocab=120, vocab_multiple=8)
    model = ModelConfig(**(base | {"compute_dtype": "float32"} | model))
    run = RunConfig(model=model, layout=Layout(**layout), global_batch=GLOBAL_BATCH)
    trainer = Trainer(run)
    return trainer, read_program(trainer.compile_step().as_text())


def branch_weights(trainer):
    """A function of a conditional: the shares of ticks that take its branches (idle, busy)."""
    table, layout = trainer.schedule, trainer.run.layout
    backward = [phase for phase in table.phases if phase.backward or layout.idle != "phases"]
    head_ticks = sum(phase.stop - phase.start for phase in backward)
    op = table.items * table.virtual / table.ticks
    shares = {"F/cond": op, "B/cond": op, "W/cond": op, "head/cond": table.items / head_ticks}
    shares |= {"F/embed/cond": 1.0, "embed_backward/cond": 1.0}  # no matmuls
    if layout.zero == 3:
        (gather, _), (gather_again, scatter) = table.forward.runs, table.backward.runs
        shares |= {"all_gather/cond": gather.mean(), "B/all_gather/cond": gather_again.mean()}
        shares |= {"B/reduce_scatter/cond": scatter.mean()}

    def weights(conditional):
        busy = shares.get(_BODY.split(conditional.op_name, maxsplit=1)[1])
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
        assert ring_bytes(trainer, program) == sum(rings(trainer).values())


def rings(trainer) -> dict[int, int]:
    """Bytes of the rings from F to B and from B to W, by their number of slots."""
    run, table = trainer.run, trainer.schedule
    layers = trainer.placement.layer.shape[-1]
    layer = layer_residual_bytes(
        run.model, run.layout, recompute=run.layout.recompute, backend="xla"
    )
    held = Counter({table.slots: table.slots * layers * layer})
    if table.split:
        slots = table.weight_stash.slots + (run.layout.idle != "skip")  # and a slot of zeros
        held[slots] += slots * layers * deferred_bytes(run)
    return held


def deferred_bytes(run: RunConfig) -> int:
    """Bytes of one layer deferred to W: inputs and output gradients of its matmuls, in float32. The
    inputs of column layers are shards of the sequence, if it is sharded; the gradients of row
    layers' outputs are whole; of everything else a device has its part of the width."""
    model, layout = run.model, run.layout
    if model.lora_rank:  # of the adapters' matmuls alone, as they are traced
        parts = {"tensor": layout.tensor, "sequence_parallel": layout.sequence_parallel}
        cost = layer_cost(model, kind="block", recompute=layout.recompute, **parts)
        return total(cost.deferred, layout.microbatch)
    hidden, gated = model.hidden, model.family == "llama"
    projected = 3 * hidden
    if gated:  # a device has at least one head of keys and values
        projected = hidden + 2 * max(model.groups, layout.tensor) * model.head_size
    split = projected + hidden + (3 if gated else 2) * model.ffn_hidden
    inputs = 2 * hidden // (layout.tensor if layout.sequence_parallel else 1)
    width = split // layout.tensor + inputs + 2 * hidden
    return 4 * layout.microbatch * model.sequence // (layout.slices * layout.context) * width


def ring_bytes(trainer, program) -> int:
    """Bytes that the loop over ticks carries in arrays [slots, layers of chunk, microbatch ...]."""
    layers = trainer.placement.layer.shape[-1]
    leading = [(slots, layers) for slots in rings(trainer)]
    loops = [
        [s for s in instruction.shapes if s.dims[:2] in leading and len(s.dims) > 2]
        for computation in program.computations.values()
        for instruction in computation.values()
        if instruction.opcode == "while"
    ]
    return max(sum(shape.bytes for shape in shapes) for shapes in loops)


def collectives_of(case: str):
    """(trainer, {(kind, axes): executions}, {(kind, axes): bytes of their operands})"""
    trainer, program = compiled(case)
    counts, sizes = Counter(), Counter()
    for collective in program.collectives(branch_weights(trainer)):
        at = collective.kind, collective.axes(trainer.run.layout.sizes)
        counts[at] += collective.count
        sizes[at] += round(collective.count * collective.operand_bytes)
    return trainer, counts, sizes


def local_bytes(trainer, part: str, but: tuple[str, ...] = ()) -> int:
    """Bytes of one device's float32 parameters that `data` can shard, before it shards them, except
    those with the names `but`."""
    shapes = jax.tree.leaves_with_path(trainer.states.param_shapes[part])
    others = (
        jax.tree.leaves(tree[part]) for tree in (trainer.states.param_specs, trainer.states.shards)
    )
    return 4 * sum(
        leaf.size // shards(spec, trainer.run.layout.sizes)
        for (path, leaf), spec, shard in zip(shapes, *others, strict=True)
        if shard.dim is not None and path[-1].key not in but
    )


def shards(spec, sizes) -> int:
    """The number of parts into which an array with this spec is split."""
    axes = [(entry,) if isinstance(entry, str) else entry for entry in spec if entry]
    return math.prod(sizes[axis] for names in axes for axis in names)


@pytest.mark.parametrize(
    "case", ["residuals", "split", "split, vee", "sliced", "sharded over data"]
)
def test_what_crosses_stages_is_one_permute_a_tick_and_route(case):
    """For x and for its gradient; 1/t of the sequence with sequence parallelism."""
    trainer, counts, sizes = collectives_of(case)
    table, layout = trainer.schedule, trainer.run.layout
    phases = [(phase.stop - phase.start, *phase[2:4]) for phase in table.phases]
    if layout.idle == "skip":
        phases = [(table.ticks, True, True)]
    expected = sum(
        ticks * occurs * sum(route.by != 0 for route in routes)
        for ticks, *kinds in phases
        for occurs, routes in zip(kinds, (table.receives, table.gradient_receives), strict=True)
    )
    across = "collective-permute", ("pipe",)
    assert counts[across] == expected
    model = trainer.run.model
    x_bytes = 4 * layout.microbatch * model.sequence // layout.slices * model.hidden
    assert sizes[across] == expected * x_bytes // layout.tensor


def test_gradients_are_reduced_and_parameters_gathered_over_data_once_a_step():
    trainer, _, sizes = collectives_of("residuals")
    local = sum(local_bytes(trainer, part) for part in ("embed", "head", "layers"))
    assert sizes["reduce-scatter", ("data",)] == local
    assert sizes["all-gather", ("data",)] == local / 2


def test_a_breadth_first_table_gathers_each_chunk_once_for_f_and_once_for_b():
    """And reduces its gradients once: v of each per step, whatever the number of microbatches. B
    does not need parameters that are only added, and XLA does not gather them."""
    trainer, _, sizes = collectives_of("sharded over data")
    layers = local_bytes(trainer, "layers")
    shared = local_bytes(trainer, "embed") + local_bytes(trainer, "head")
    multiplied = local_bytes(trainer, "layers", but=("b", "bias"))
    assert trainer.schedule.microbatches == 4 > trainer.schedule.virtual == 2
    assert sizes["reduce-scatter", ("data",)] == layers + shared
    assert sizes["all-gather", ("data",)] == (layers + multiplied + shared) / 2


@pytest.mark.parametrize(
    "case", ["sharded over data, by layer", "sharded over data, by layer, woven"]
)
def test_by_the_layer_f_and_b_gather_their_matrices_and_b_scatters_their_gradients(case):
    """With every microbatch; everything else is gathered and scattered once a step. If F and B of a
    woven tick have the same layer, XLA gathers it once for both."""
    trainer, _, sizes = collectives_of(case)
    matrices = local_bytes(trainer, "layers", but=("b", "bias", "scale"))
    others = sum(local_bytes(trainer, part) for part in ("embed", "head", "layers")) - matrices
    microbatches, replicas = trainer.schedule.microbatches, trainer.run.layout.replicas
    assert microbatches > 1
    assert sizes["reduce-scatter", ("data",)] == microbatches * matrices + others
    gathered = (2 * microbatches * matrices + others) / replicas
    assert sizes["all-gather", ("data",)] <= gathered
    assert "woven" in case or sizes["all-gather", ("data",)] == gathered
