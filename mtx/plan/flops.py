"""FLOPs and parameters of a model in closed form, by three conventions that must not be mixed.

`sc21_flops`             the paper's: full attention, every block forward twice (recomputation)
`model_flops`            today's MFU: causal attention, no recomputation
`hardware_matmul_flops`  what this program's matmuls execute, whatever it is good for

All count matmuls only, 2 M N K each, for one step of `batch` sequences over the whole cluster.
Formulas in docstrings are of a GPT; of what other families are made says `mtx.plan.families`.

Letters as in the papers: B sequences · s sequence length · h hidden · l layers · V vocabulary ·
f the feed-forward multiple (4 in the paper)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mtx.config import Idle, Layout, ModelConfig
from mtx.plan.attention import Backend, attention_of
from mtx.plan.choose import schedule_for
from mtx.plan.families import ends_of, layer_of, parameters_by_part
from mtx.schedules.partition import place_layers
from mtx.schedules.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class ForwardFlops:
    """Matmul FLOPs of one forward pass, by part, all layers together."""

    embedding: float  # a lookup: 0
    attention_projections: float  # 8 B s h^2 a layer: q, k, v and the output
    attention_scores: float  # 4 B s^2 h a layer (q k^T and its product with v), causal half of it
    mlp: float  # 4 f B s h^2 a layer
    head: float  # 2 B s h V, and the layers before the logits

    @property
    def blocks(self) -> float:
        return self.attention_projections + self.attention_scores + self.mlp

    @property
    def total(self) -> float:
        return self.embedding + self.blocks + self.head


def forward_flops(
    model: ModelConfig, batch: int, *, causal: bool, vocab: int | None = None
) -> ForwardFlops:
    """One forward pass of `batch` sequences. causal: scores that the mask hides are not counted;
    of no account in models that see both ways. `vocab`: rows of the head, where they are padded."""
    tokens, layer, ends = batch * model.sequence, layer_of(model), ends_of(model)
    scores = (2 if causal and model.causal else 4) * tokens * model.sequence * model.hidden
    head = tokens * (model.hidden * (vocab or model.vocab) + _products(ends.on_tokens))
    return ForwardFlops(
        embedding=0.0,
        attention_projections=float(2 * model.layers * tokens * layer.weights("attention")),
        attention_scores=float(model.layers * scores),
        mlp=float(2 * model.layers * tokens * layer.weights("mlp")),
        head=float(2 * (head + batch * _products(ends.on_sequences))),
    )


def _products(products: Iterable[tuple[int, int]]) -> int:
    return sum(inputs * outputs for inputs, outputs in products)


def sc21_flops(model: ModelConfig, batch: int) -> float:
    """FLOPs a step by SC'21, equation (3): 96 B s l h^2 (1 + s/(6h) + V/(16 l h)) where f = 4.

    Blocks forward, forward again and backward (4 forwards), the head without the second; attention
    not halved for causality. The paper's teraFLOP/s, and its 502 petaFLOP/s, are in this unit; of
    another family's matmuls it is the same count.
    """
    forward = forward_flops(model, batch, causal=False)
    return 4 * forward.blocks + 3 * forward.head


def model_flops(model: ModelConfig, batch: int) -> float:
    """FLOPs a step as MFU counts them: 72 B s l h^2 (1 + s/(12h) + V/(12 l h)) where f = 4.

    Forward and backward (3 forwards), attention halved where it is causal, nothing for
    recomputation.
    """
    return 3 * forward_flops(model, batch, causal=True).total


def hardware_matmul_flops(
    model: ModelConfig, layout: Layout, global_batch: int, *, backend: Backend = "cuda"
) -> float:
    """FLOPs of all matmuls that one step of our program executes, on all devices together.

    Attention is what its kernel computes (see `attention_of`), the vocabulary is padded, and B
    costs two forwards (attention: 4 or 5 matmuls for its 2) plus what it computes again:
      recompute="selective"  attention, where its kernel's output is not kept
      recompute="full"       the block, but for its last matmul, whose output nobody needs
      stash="inputs"         the chunk; as recompute="full" where the chunk is one layer
    With idle="phases" idle ops compute too: they are counted.
    """
    schedule = schedule_for(layout, layout.microbatches(global_batch))
    placement = place_layers(
        model.layers, pipe=layout.pipe, virtual=layout.virtual, stage_layers=layout.stage_layers,
        virtual_stages=schedule.virtual_stages,
    )  # fmt: skip
    one_layer_chunks = placement.even and placement.layer.shape[-1] == 1
    per_layer = _layer_flops(model, layout, backend, one_layer_chunks, schedule.split)
    useful = schedule.items * schedule.virtual
    # Layers run per replica and item; an idle op runs the stage's first chunk.
    idle_layers = int(placement.count[:, 0].sum())
    blocks = sum(
        flops * (schedule.items * model.layers + (ops - useful) * idle_layers)
        for flops, ops in zip(per_layer, _executed_ops(layout.idle, schedule))
    )
    return layout.data * blocks / layout.slices + _head_flops(model, layout, global_batch)


def _head_flops(model: ModelConfig, layout: Layout, global_batch: int) -> float:
    """Forward and backward (3 forwards), on all devices together.

    Each device computes its part of the logits; what stands before them every stage computes, with
    sequence parallelism each device on its tokens; what is of whole sequences every device does. Of
    a single sequence that makes no matmul of a weight's gradient, but a product of two vectors.
    """
    ends, tokens = ends_of(model), global_batch * model.sequence
    copies = layout.vocab_shards // (layout.tensor if layout.sequence_parallel else 1)
    on_tokens = tokens * model.hidden * model.padded_vocab(layout.vocab_shards)
    on_tokens += copies * tokens * _products(ends.on_tokens)
    on_sequences = layout.vocab_shards * global_batch * _products(ends.on_sequences)
    return 2.0 * (3 * on_tokens + (3 if layout.microbatch > 1 else 2) * on_sequences)


def _layer_flops(
    model: ModelConfig, layout: Layout, backend: Backend, one_layer_chunks: bool, split: bool
) -> tuple[float, ...]:
    """(F, B) or (F, B, W) of one layer and one microbatch, over all tensor shards."""
    layer, tokens = layer_of(model), layout.microbatch * model.sequence
    attention = attention_of(model, backend, layout.slices)
    products = [layout.tensor * math.prod(each.product(layout.tensor)) for each in layer.linears]
    linear = 2.0 * tokens * sum(products)
    last = 0.0 if layer.needs_last else 2.0 * tokens * products[-1]
    score = attention.square * 2 * tokens * model.sequence * model.hidden
    forward = linear + 2 * score
    backward = 2 * linear + attention.backward_matmuls * score
    if layout.stash == "inputs" and not one_layer_chunks:
        backward += forward
    elif layout.stash == "inputs" or layout.recompute == "full":
        backward += linear - last + attention.full_matmuls * score
    if layout.recompute == "selective":
        backward += attention.selective_matmuls * score
    return (forward, backward - linear, linear) if split else (forward, backward)


def _executed_ops(idle: Idle, schedule: Schedule) -> tuple[int, ...]:
    """Ticks in which a stage computes F, B and W, idle ones included where they compute."""
    kinds = len(schedule.halves)
    if idle == "skip":
        return (schedule.items * schedule.virtual,) * kinds
    return tuple(
        sum(phase.stop - phase.start for phase in schedule.phases if phase[2 + kind])
        for kind in range(kinds)
    )


def sc21_parameters(model: ModelConfig) -> float:
    """P = 12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)), SC'21, equation (2); of a GPT, f = 4, tied
    ends."""
    layers, hidden = model.layers, model.hidden
    ends = (model.vocab + model.sequence) / (12 * layers * hidden)
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + ends)


def parameters(model: ModelConfig) -> int:
    """The exact number of parameters, without the padding of the vocabulary.

    Of a GPT, per layer (4 + 2f) h^2 + (9 + f) h: matrices, biases and two norms; at the ends the
    token table (twice where untied), the positions, and the final norm's 2h, which the paper's
    formula lacks.
    """
    return sum(parameters_by_part(model).values())


def training_time_s(
    *, parameters: float, tokens: float, devices: int, flops_per_device: float
) -> float:
    """Seconds to train on `tokens`: 8 T P / (n X), SC'21, equation (4).

    flops_per_device: X, FLOP/s of one device in the unit of `sc21_flops`.
    """
    return 8 * tokens * parameters / (devices * flops_per_device)
