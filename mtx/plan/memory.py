"""Memory of one device in closed form: what the planner predicts before anything is compiled.

Every device holds the same buffers, since all stages run one program; stages that need fewer still
have them. Not counted: the runtime's context, communication buffers, library workspaces and
fragmentation, so leave a tenth of the device free.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198), section 4, in which a layer keeps
s b h (10 + 24/t + 5 a s/(h t)) bytes, and all of it is divided by t with sequence parallelism. Our
blocks differ in three places, which `layer_residual_bytes` names.

Letters as there: b microbatch · s sequence · h hidden · a heads · t tensor · f feed-forward multiple
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mtx.config import Layout, ModelConfig, Recompute
from mtx.pipeline.makers import make
from mtx.pipeline.partition import Placement, place_layers

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
    logits_bytes: int  # float32, this device's part of the vocabulary

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def predict_memory(
    model: ModelConfig,
    layout: Layout,
    global_batch: int,
    *,
    fused_attention: bool | None = None,
) -> Memory:
    """The memory of one training step. UserError where the batch or the layers do not divide.

    fused_attention: whether attention keeps no scores; None: as on an NVIDIA GPU, see
    `fuses_attention`.
    """
    fused = fuses_attention(model) if fused_attention is None else fused_attention
    item, shards = _ITEM_BYTES[model.compute_dtype], layout.vocab_shards
    placement = _placement(model, layout)
    schedule = make(
        layout.schedule, microbatches=layout.microbatches(global_batch), stages=layout.pipe,
        virtual=layout.virtual,
    )  # fmt: skip
    held = parameters_per_device(model, layout)
    waiting = 2 + sum(
        box.slots for box in (schedule.inbox, schedule.gradient_inbox, schedule.outbox)
    )
    tokens = layout.microbatch * model.sequence
    return Memory(
        # Masters that are neither sharded nor of another type are the parameters themselves.
        parameters_bytes=0 if item == 4 and layout.data == 1 else item * held,
        gradients_bytes=4 * held,
        optimizer_bytes=-(-12 * held // layout.data),
        stash_bytes=schedule.slots * _slot_bytes(model, layout, placement, fused),
        transfer_bytes=waiting * _input_bytes(model, layout),
        activations_bytes=_working_bytes(model, layout, placement, fused),
        # The probabilities, and the gradient of the logits that is made of them.
        logits_bytes=2 * 4 * tokens * model.padded_vocab(shards) // shards,
    )


def fuses_attention(model: ModelConfig) -> bool:
    """Whether cuDNN's fused attention serves this model on an NVIDIA GPU."""
    return (
        model.compute_dtype != "float32" and model.head_size <= 128 and not model.attention_dropout
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
    model: ModelConfig, layout: Layout, *, recompute: Recompute, fused_attention: bool
) -> int:
    """What one layer keeps of one microbatch between its F and its B, on one device.

    In elements of the compute type, s b h (4 + (4 + 2f)/t), or all of it over t with sequence
    parallelism: the inputs of the two norms and what they put out; q, k, v and attention's output;
    the input of GELU and its output. Dropout adds two masks of s b h bytes. With f = 4 and 16 bits
    that is Korthikanti's 34 s b h. Beside it, where theirs differs:
      norms   four float32 numbers a token, their means and scales
      scores  recompute="none" without a fused kernel: the causal mask, dropout's mask, softmax in
              float32 and the probabilities, 7 a s^2 b bytes in 16 bits (8 with dropout) for their 5;
              a fused kernel keeps one float32 a row instead
    """
    if recompute == "full":
        return _input_bytes(model, layout)
    item, tensor = _ITEM_BYTES[model.compute_dtype], layout.tensor
    tokens = layout.microbatch * model.sequence
    shared = tensor if layout.sequence_parallel else 1
    elements = tokens * model.hidden * item
    kept = 4 * elements // shared + (4 + 2 * model.ffn_multiple) * elements // tensor
    kept += 4 * 4 * tokens // shared
    if model.dropout:
        kept += 2 * tokens * model.hidden // shared
    if fused_attention:
        kept += 4 * tokens * model.heads // tensor
    elif recompute == "none":
        score = 1 + 4 + item + (1 if model.attention_dropout else 0)
        kept += score * tokens * model.sequence * model.heads // tensor
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


def _slot_bytes(model: ModelConfig, layout: Layout, placement: Placement, fused: bool) -> int:
    """One slot of the ring: a chunk's input, or the residuals of each of its layers."""
    if layout.stash == "inputs":
        return _input_bytes(model, layout)
    layer = layer_residual_bytes(model, layout, recompute=layout.recompute, fused_attention=fused)
    return placement.layer.shape[-1] * layer


def _working_bytes(model: ModelConfig, layout: Layout, placement: Placement, fused: bool) -> int:
    """The backward pass of one layer: what it computes again, the whole sequence gathered, the
    gradients of its scores and of its weights; and what stash="inputs" and idle="skip" add."""
    item, tensor = _ITEM_BYTES[model.compute_dtype], layout.tensor
    tokens = layout.microbatch * model.sequence
    square = (4 + 2 * model.ffn_multiple) * model.hidden**2 // tensor

    def residuals(recompute: Recompute) -> int:
        return layer_residual_bytes(model, layout, recompute=recompute, fused_attention=fused)

    working = square * item
    if layout.recompute != "none":
        working += residuals("none")
    if layout.recompute == "selective":
        working -= residuals("selective")
    if layout.sequence_parallel and tensor > 1:
        working += 2 * tokens * model.hidden * item
    if not fused:
        working += 2 * 4 * tokens * model.sequence * model.heads // tensor
    if layout.stash == "inputs":  # the residuals of the chunk, computed at once
        working += placement.layer.shape[-1] * residuals(layout.recompute)
    if layout.idle == "skip":  # XLA's conditionals on GPUs copy the gradients that go through them
        working += 4 * placement.layer[0].size * square
    return working
