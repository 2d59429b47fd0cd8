"""Memory of one device in closed form: what the planner predicts before anything is compiled.

Every device holds the same buffers, since all stages run one program; stages that need fewer still
have them. Not counted: the runtime's context, communication buffers, library workspaces and
fragmentation, so leave a tenth of the device free.

Activations are counted as in Korthikanti et al. 2022 (arXiv 2205.05198), section 4, where a layer
keeps s b h (10 + 24/t + 5 a s/(h t)) bytes, all of it over t with sequence parallelism; what our
blocks keep instead is in `layer_residual_bytes`.

Letters as there: b microbatch · s sequence · h hidden · a heads · t tensor · f feed-forward
multiple
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mtx.config import Layout, ModelConfig, Recompute
from mtx.pipeline.makers import make
from mtx.pipeline.partition import Placement, place_layers
from mtx.plan.attention import Backend, attention_of

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device, by what they are for. Predicted."""

    parameters_bytes: int  # in the compute type, gathered at the start of the step
    gradients_bytes: int  # float32, accumulated over the microbatches
    optimizer_bytes: int  # float32 masters and Adam's two moments, sharded over `data`
    stash_bytes: int  # what waits between F and B: ring slots x (residuals or chunk inputs)
    transfer_bytes: int  # x and dx between stages, and what waits for its tick
    activations_bytes: int  # of the layer, or chunk, whose backward pass is running
    logits_bytes: int  # of this device's part of the vocabulary

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def predict_memory(
    model: ModelConfig, layout: Layout, global_batch: int, *, backend: Backend = "cuda"
) -> Memory:
    """The memory of one training step. UserError where the batch or the layers do not divide."""
    item, shards = _ITEM_BYTES[model.compute_dtype], layout.vocab_shards
    schedule = make(
        layout.schedule,
        microbatches=layout.microbatches(global_batch),
        stages=layout.pipe,
        virtual=layout.virtual,
    )
    boxes = (schedule.inbox, schedule.gradient_inbox, schedule.outbox)
    held = parameters_per_device(model, layout)
    tokens = layout.microbatch * model.sequence
    return Memory(
        # Masters that are neither sharded nor of another type are the parameters themselves.
        parameters_bytes=0 if item == 4 and layout.data == 1 else item * held,
        gradients_bytes=4 * held,
        optimizer_bytes=-(-12 * held // layout.data),
        stash_bytes=schedule.slots * _slot_bytes(model, layout, backend),
        transfer_bytes=(2 + sum(box.slots for box in boxes)) * _input_bytes(model, layout),
        activations_bytes=_working_bytes(model, layout, backend),
        # In float32, and their gradient in the compute type.
        logits_bytes=(4 + item) * tokens * model.padded_vocab(shards) // shards,
    )


def parameters_per_device(model: ModelConfig, layout: Layout) -> int:
    """Parameters that one device holds, padding of vocabulary and of uneven stages included.

    Of a layer, everything over `tensor` but the two output biases and the norms (6h); of the ends,
    the token table over `pipe` x `tensor`; positions and the last norm on every device.
    """
    hidden, multiple, tensor = model.hidden, model.ffn_multiple, layout.tensor
    split = (4 + 2 * multiple) * hidden**2 + (3 + multiple) * hidden
    layer = split // tensor + 6 * hidden
    layers = _placement(model, layout).layer[0].size
    tables = 1 if model.tied else 2
    rows = tables * model.padded_vocab(layout.vocab_shards) // layout.vocab_shards
    return layers * layer + (rows + model.sequence + 2) * hidden


def layer_residual_bytes(
    model: ModelConfig, layout: Layout, *, recompute: Recompute, backend: Backend = "cuda"
) -> int:
    """What one layer keeps of one microbatch between its F and its B, on one device.

    In elements of the compute type, s b h each, and those that `tensor` shards only with sequence
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
    if recompute == "full":
        return _input_bytes(model, layout)
    attention = attention_of(model, backend)
    item, tensor, multiple = _ITEM_BYTES[model.compute_dtype], layout.tensor, model.ffn_multiple
    shared = tensor if layout.sequence_parallel else 1
    tokens = layout.microbatch * model.sequence
    rows = tokens * model.heads // tensor
    elements = tokens * model.hidden
    if recompute == "selective":
        split = 3 + multiple + (1 if attention.output_survives else 0)
        kept_rows = attention.row_bytes if attention.output_survives else 0
        return 2 * item * elements // shared + split * item * elements // tensor + kept_rows * rows
    kept = 4 * item * elements // shared + (4 + 2 * multiple) * item * elements // tensor
    kept += 4 * 4 * tokens // shared + attention.row_bytes * rows
    if model.dropout:
        kept += 2 * elements // shared
    if attention.name == "dropout":
        kept += (attention.mask_bytes + attention.softmax_bytes + item) * rows * model.sequence
    return kept


def _placement(model: ModelConfig, layout: Layout) -> Placement:
    return place_layers(
        model.layers, pipe=layout.pipe, virtual=layout.virtual, stage_layers=layout.stage_layers
    )


def _input_bytes(model: ModelConfig, layout: Layout) -> int:
    """x_BsD: one microbatch between two layers."""
    shared = layout.tensor if layout.sequence_parallel else 1
    tokens = layout.microbatch * model.sequence
    return tokens * model.hidden * _ITEM_BYTES[model.compute_dtype] // shared


def _slot_bytes(model: ModelConfig, layout: Layout, backend: Backend) -> int:
    """One slot of the ring: a chunk's input, or the residuals of each of its layers."""
    if layout.stash == "inputs":
        return _input_bytes(model, layout)
    return _chunk_residual_bytes(model, layout, backend)


def _chunk_residual_bytes(model: ModelConfig, layout: Layout, backend: Backend) -> int:
    layers = _placement(model, layout).layer.shape[-1]
    return layers * layer_residual_bytes(model, layout, recompute=layout.recompute, backend=backend)


def _working_bytes(model: ModelConfig, layout: Layout, backend: Backend) -> int:
    """The backward pass of one layer; with stash="inputs" also the residuals of its chunk.

    The weights' gradients, about 15 arrays of the whole sequence, and four of its scores in
    float32: fitted to the buffers that XLA assigns when it compiles for A100 and H100.
    """
    item, tensor = _ITEM_BYTES[model.compute_dtype], layout.tensor
    tokens = layout.microbatch * model.sequence
    attention = attention_of(model, backend)
    working = (4 + 2 * model.ffn_multiple) * model.hidden**2 * item // tensor
    working += 15 * item * tokens * model.hidden
    if attention.name != "cudnn":
        scores = tokens * model.sequence * model.heads // tensor
        working += int(4 * 4 * attention.square * scores)
    if layout.stash == "inputs":
        working += _chunk_residual_bytes(model, layout, backend)
    return working
