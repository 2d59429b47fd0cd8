"""Memory of one device in closed form: what the planner predicts before anything is compiled.

Every device holds the same buffers, since all stages run one program; stages that need fewer still
have them. Counted is the moment that needs the most: the backward pass of one layer, or the head,
while gradients and stash are held. Not counted: the runtime's context, communication buffers,
library workspaces and fragmentation, so leave a tenth of the device free.

Activations are counted as in Korthikanti et al. 2022 (arXiv 2205.05198), section 4, where a layer
keeps s b h (10 + 24/t + 5 a s/(h t)) bytes, all of it over t with sequence parallelism; what our
blocks keep instead is in `layer_residual_bytes`. `experiments/memory_grid.py` prints how near all
this comes to what XLA assigns.

Letters as there: b microbatch · s sequence · h hidden · a heads · t tensor · f feed-forward
multiple
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import Literal, NamedTuple

from mtx.config import Layout, ModelConfig, OptimizerConfig, Recompute
from mtx.optimizers import optimizer_module
from mtx.plan.attention import Attention, Backend, attention_of
from mtx.plan.block import ITEM_BYTES
from mtx.plan.choose import schedule_for
from mtx.plan.families import Array, ends_of, family_of, layer_of
from mtx.schedules.partition import place_layers

Zero = Literal[0, 1, 3]  # of which a layout may have 1 or 3


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device, by what they are for. Predicted."""

    parameters_bytes: int  # in the compute type, gathered at the start of the step
    gradients_bytes: int  # float32, accumulated over the microbatches
    optimizer_bytes: int  # float32 masters and the optimizer's state, of AdamW two moments
    stash_bytes: int  # what waits between F, B and W: ring slots x (residuals or chunk inputs)
    transfer_bytes: int  # x and dx between stages, and what waits for its tick
    activations_bytes: int  # of the layer, or chunk, whose backward pass is running
    logits_bytes: int  # what the head needs beyond that: it runs when no layer does

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def predict_memory(
    model: ModelConfig,
    layout: Layout,
    global_batch: int,
    *,
    backend: Backend = "cuda",
    zero: Zero | None = None,
    optimizer: OptimizerConfig | None = None,
) -> Memory:
    """The memory of one training step. UserError where the batch or the layers do not divide.

    zero: what is sharded over `data` (Rajbhandari et al. 2020); None: what the layout says. 1:
    masters and moments; 3: gradients and parameters as well, gathered a chunk at a time; 0, which
    this program does not run: nothing. optimizer: None, AdamW.
    """
    zero = layout.zero if zero is None else zero
    slots = _slots(layout, layout.microbatches(global_batch))
    shards = 1 if zero == 0 else layout.data
    parameters, gradients = _weights_bytes(model, layout, zero)
    stash, waiting = _stash_bytes(model, layout, slots, backend)
    working, head = _working_bytes(model, layout, backend), _head_bytes(model, layout)
    if layout.idle == "skip" and conditionals_copy():
        blocks = 4 * layout.virtual * _places(model, layout) * _layer_parameters(model, layout)
        forward = stash if layout.stash == "residuals" else 0
        working = max(working + (waiting or blocks), forward, blocks)
    return Memory(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=-(-_optimizer_bytes(model, layout, optimizer) // shards),
        stash_bytes=stash + waiting,
        transfer_bytes=(2 + slots.rings) * _input_bytes(model, layout),
        activations_bytes=working,
        logits_bytes=max(0, head - working),
    )


@cache
def conditionals_copy() -> bool:
    """Whether the compiler of the installed JAX keeps what a conditional changes twice.

    With idle="skip" F, B and W stand in conditionals and change rings and gradients. XLA:GPU of jax
    0.10 copies those for the time of the op, that of jax 0.12 changes them in place.
    """
    return importlib.metadata.version("jax").startswith("0.10.")


def _weights_bytes(model: ModelConfig, layout: Layout, zero: Zero) -> tuple[int, int]:
    """(parameters in the compute type, gradients in float32)"""
    item, held = ITEM_BYTES[model.compute_dtype], parameters_per_device(model, layout)
    if zero == 3:
        chunk = _places(model, layout) * _layer_parameters(model, layout)
        blocks = layout.virtual * chunk
        ends, shard = held - blocks, -(-blocks // layout.data)
        # The chunk whose F runs and the one whose B does are gathered; one chunk's gradients are
        # not yet scattered. Masters in the compute type are the shards themselves.
        parameters = item * (ends + 2 * chunk) + (0 if item == 4 else item * shard)
        return parameters, 4 * (ends + chunk + shard)
    # Masters that are neither sharded nor of another type are the parameters themselves.
    same = item == 4 and (layout.data == 1 or zero == 0)
    return 0 if same else item * held, 4 * held


def _optimizer_bytes(model: ModelConfig, layout: Layout, optimizer: OptimizerConfig | None) -> int:
    """Masters and the optimizer's arrays beside them, not yet sharded over `data`."""
    optimizer = optimizer or OptimizerConfig()
    held = parameters_per_device(model, layout)
    matrices = sum(each.held(layout.tensor)[0] for each in layer_of(model).linears)
    matrices *= layout.virtual * _places(model, layout)
    states, of_rest = (
        optimizer_module(name).STATES for name in (optimizer.name, optimizer.rest or optimizer.name)
    )
    return 4 * (held + states * matrices + of_rest * (held - matrices))


def parameters_per_device(model: ModelConfig, layout: Layout) -> int:
    """Parameters that one device holds, padding of vocabulary and of uneven stages included.

    Of a layer, everything over `tensor` but the norms, the biases of row-parallel linears and heads
    of keys and values that are fewer than `tensor`; of the ends, rows of the vocabulary over `pipe`
    x `tensor`, all else on every device.
    """
    ends, shards = ends_of(model), layout.vocab_shards
    rows = (ends.table + ends.output) * model.padded_vocab(shards) // shards
    layers = layout.virtual * _places(model, layout) * _layer_parameters(model, layout)
    return layers + rows + ends.everywhere


def _layer_parameters(model: ModelConfig, layout: Layout) -> int:
    return layer_of(model).parameters_held(layout.tensor)


def layer_residual_bytes(
    model: ModelConfig, layout: Layout, *, recompute: Recompute, backend: Backend = "cuda"
) -> int:
    """What one layer keeps of one microbatch, or slice of one, between its F and its B.

    Those arrays of `mtx.plan.families.layer_of` that wait with this recomputation. Of a GPT, in
    elements of the compute type, s b h each, and those that `tensor` shards only with sequence
    parallelism in front:
      none       4 + (4 + 2f)/t: the two norms' inputs and outputs; q, k, v, attention's output,
                 GELU's input and output. In 16 bits and with two masks of dropout that is
                 Korthikanti's 34 s b h; four float32 numbers a token are the norms' own
      selective  2 + (4 + f)/t: what matmuls put out, from which the rest is quick to compute
      full       1: the block's input
    Attention adds a float32 a row and head; with dropout on its probabilities, where nothing is
    recomputed, 8 a s^2 b / t bytes instead (two masks, softmax in float32, the probabilities in 16
    bits), where Korthikanti's kernels keep 5.
    """
    layer, attention = layer_of(model), attention_of(model, backend)
    item, tokens = ITEM_BYTES[model.compute_dtype], _tokens(model, layout)
    again = {"attended"} if recompute == "selective" and not attention.output_survives else set()
    kept = sum(
        _array_bytes(array, model, layout)
        for array in layer.arrays
        if recompute in array.kept and array.name not in again
    )
    if family_of(model).rotary:  # int32 positions of a row, or the float32 frequencies of q and k
        kept += 4 * (model.sequence // layout.slices if recompute == "none" else model.head_size)
    rows = tokens * model.heads // layout.tensor
    if recompute == "none":
        shared = _sequence_shards(layout)
        kept += 4 * layer.norm_numbers * tokens // shared + attention.row_bytes * rows
        kept += attention.pair_bytes * tokens * model.sequence
        if model.dropout:
            kept += 2 * tokens * model.hidden // shared
        if attention.name == "dropout":
            kept += (attention.mask_bytes + attention.softmax_bytes + item) * rows * model.sequence
    elif recompute == "selective" and attention.output_survives:
        kept += attention.row_bytes * rows
    return kept


def _array_bytes(array: Array, model: ModelConfig, layout: Layout) -> int:
    """Of one microbatch, or slice of one, on one device."""
    shards = _sequence_shards(layout) if array.over == "sequence" else array.parts(layout.tensor)
    elements = _tokens(model, layout) * array.width
    return elements * ITEM_BYTES[model.compute_dtype] // shards


def _tokens(model: ModelConfig, layout: Layout) -> int:
    """Of a microbatch, or of a slice of one."""
    return layout.microbatch * model.sequence // layout.slices


def _sequence_shards(layout: Layout) -> int:
    return layout.tensor if layout.sequence_parallel else 1


def _places(model: ModelConfig, layout: Layout) -> int:
    """Layers of a chunk, or places for them where stages are uneven."""
    return _places_of(model.layers, layout.pipe, layout.virtual, layout.stage_layers)


@lru_cache(maxsize=4096)
def _places_of(layers: int, pipe: int, virtual: int, stage_layers) -> int:
    placement = place_layers(layers, pipe=pipe, virtual=virtual, stage_layers=stage_layers)
    return placement.layer.shape[-1]


class _Slots(NamedTuple):
    """How many values of each kind a schedule keeps at once."""

    stash: int  # from F to B, of a chunk
    weight_stash: int  # from B to W, of a chunk
    rings: int  # for x and dx that have come before their tick
    caches: int  # of a chunk's keys and values, and for their gradients


def _slots(layout: Layout, microbatches: int) -> _Slots:
    """In closed form for SC'21's schedules; from the table for all others."""
    pipe, virtual, name = layout.pipe, layout.virtual, layout.schedule
    if layout.slices == 1 and name in ("1f1b", "interleaved_1f1b", "eager_1f1b"):
        warming_up = min(microbatches, pipe) * virtual + max(0, microbatches - pipe)
        # One more than are in flight where a stage sits ticks out: it writes to a free slot.
        most = virtual if pipe == 1 else min(warming_up + 1, (virtual + 1) * pipe - 1)
        return _Slots(stash=most, weight_stash=0, rings=0, caches=0)
    if layout.slices == 1 and name == "gpipe":
        most = microbatches * virtual + 1
        return _Slots(stash=most, weight_stash=0, rings=microbatches + 1, caches=0)
    slots = _slots_of_table(name, pipe, virtual, layout.slices, microbatches)
    if slots.weight_stash and layout.idle != "skip":  # a slot of zeros, which an idle W reads
        return slots._replace(weight_stash=slots.weight_stash + 1)
    return slots


@lru_cache(maxsize=4096)
def _slots_of_table(name: str, pipe: int, virtual: int, slices: int, microbatches: int) -> _Slots:
    """The planner's one view of a schedule's table that has to do with memory."""
    layout = Layout(pipe=pipe, virtual=virtual, schedule=name, slices=slices)
    table = schedule_for(layout, microbatches)
    boxes = [route.ring for route in (*table.receives, *table.gradient_receives)]
    caches = [cache.slots for cache in (table.cache, table.gradient_cache) if cache]
    return _Slots(
        stash=table.slots,
        weight_stash=table.weight_stash.slots if table.weight_stash else 0,
        rings=sum(box.slots for box in (*boxes, table.outputs)),
        caches=sum(caches),
    )


def _stash_bytes(
    model: ModelConfig, layout: Layout, slots: _Slots, backend: Backend
) -> tuple[int, int]:
    """(rings from F to B, of residuals or chunk inputs, with the caches of sliced sequences; ring
    from B to W)"""
    layers = _places(model, layout)
    slot = layers * layer_residual_bytes(model, layout, recompute=layout.recompute, backend=backend)
    if layout.stash == "inputs":
        slot = _input_bytes(model, layout)
    stash = slots.stash * slot + slots.caches * layers * _cache_bytes(model, layout)
    if not slots.weight_stash:
        return stash, 0
    waiting = _deferred_bytes(model, layout)
    if attention_of(model, backend).name == "dropout" and layout.recompute == "selective":
        scores = _tokens(model, layout) * model.heads // layout.tensor * model.sequence
        waiting += ITEM_BYTES[model.compute_dtype] * scores
    return stash, slots.weight_stash * layers * waiting


def _cache_bytes(model: ModelConfig, layout: Layout) -> int:
    """Keys and values of one microbatch, its slices together, in one layer."""
    groups = model.groups // min(layout.tensor, model.groups)
    width = 2 * groups * model.head_size
    return ITEM_BYTES[model.compute_dtype] * layout.microbatch * model.sequence * width


def _deferred_bytes(model: ModelConfig, layout: Layout) -> int:
    """What waits for a layer's W: what its linears read, once where two read the same, and the
    gradients of what they make; that of a row-parallel one is whole."""
    linears = layer_of(model).linears
    reads = {each.reads.name: each.reads for each in linears}
    waiting = sum(_array_bytes(array, model, layout) for array in reads.values())
    for linear in linears:
        elements = _tokens(model, layout) * linear.makes.local_width(layout.tensor)
        waiting += elements * ITEM_BYTES[model.compute_dtype]
    return waiting


def _input_bytes(model: ModelConfig, layout: Layout) -> int:
    """x_BsD: one microbatch, or slice of one, between two layers."""
    return _array_bytes(layer_of(model).array("x"), model, layout)


def _working_bytes(model: ModelConfig, layout: Layout, backend: Backend) -> int:
    """The backward pass of one layer.

    The gradient of its largest matrix, in the compute type and in float32 (in float32 of all its
    matrices where the chunk is that one layer: without a loop XLA adds them up last); what is
    computed again (with stash="inputs", of the whole chunk); four arrays of whole sequences, which
    are gathered or about to be scattered; and of attention's scores the part that stands at once.
    """
    item = ITEM_BYTES[model.compute_dtype]
    places = _places(model, layout)
    matrices = [each.held(layout.tensor)[0] for each in layer_of(model).linears]
    added_up = sum(matrices) if places == 1 else max(matrices)
    working = item * max(matrices) + 4 * added_up
    working += 4 * item * _tokens(model, layout) * model.hidden
    working += _scores_bytes(model, layout, attention_of(model, backend))
    every, kept = (
        layer_residual_bytes(model, layout, recompute=recompute, backend=backend)
        for recompute in ("none", layout.recompute)
    )
    if layout.stash == "inputs":
        working += places * kept
    return working + every - kept


def _scores_bytes(model: ModelConfig, layout: Layout, attention: Attention) -> int:
    """Scores of the largest block of queries, or the whole square, and of their gradients: two in
    float32 and one in the compute type. Fused kernels have none."""
    item = ITEM_BYTES[model.compute_dtype]
    square = _tokens(model, layout) * model.sequence * model.heads // layout.tensor
    return int((2 * 4 + item) * attention.at_once * square)


def _head_bytes(model: ModelConfig, layout: Layout) -> int:
    """Logits in float32, their gradient in the compute type, this device's part of both."""
    shards, tokens = layout.vocab_shards, _tokens(model, layout)
    rows = model.padded_vocab(shards) // shards
    return (4 + ITEM_BYTES[model.compute_dtype]) * tokens * rows
