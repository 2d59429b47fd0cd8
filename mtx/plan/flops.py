"""FLOPs of a model, by three conventions that must not be mixed, and its parameters.

`sc21_flops`             the paper's: full attention, every block forward twice (recomputation)
`model_flops`            today's MFU: causal attention, no recomputation
`hardware_matmul_flops`  what this program's matmuls execute, useful or not

All count matmuls only, 2 M N K each, for one step of `batch` sequences over the whole cluster; the
matmuls are those of the traced model (`mtx.costs.cost`).

Letters as in the papers: B sequences · s sequence length · h hidden · l layers · V vocabulary ·
f the feed-forward multiple (4 in the paper)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtx.config import Idle, Layout, ModelConfig
from mtx.costs.ask import layer_cost, model_parameters, pattern_of, shared_cost
from mtx.costs.cost import EMBED, HEAD, Cost, ExpertShards, Matmul, Parameter, module_of
from mtx.costs.place import placement_of
from mtx.plan.attention import Backend, kernel_of
from mtx.plan.choose import context_attention, schedule_for
from mtx.schedules.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class ForwardFlops:
    """Matmul FLOPs of one forward pass, all layers together."""

    layers: Mapping[str, float]  # products with weights, by sublayer; per layer of a GPT
    # 8 B s h^2 in "attention" (q, k, v and the output) and 4 f B s h^2 in "mlp"
    scores: float  # products of activations; 4 B s^2 h per layer: q k^T, and that with v
    head: float  # 2 B s h V, and the layers before the logits
    embedding: float  # of images: a lookup has none
    backward: float  # of the backward pass: twice all these, less what is frozen

    @property
    def blocks(self) -> float:
        return sum(self.layers.values()) + self.scores

    @property
    def total(self) -> float:
        return self.embedding + self.blocks + self.head

    @property
    def by_part(self) -> dict[str, float]:
        """The FLOPs of each part, in the order in which the model computes them."""
        embedding = {"embedding": self.embedding} if self.embedding else {}
        return {**embedding, **self.layers, "scores": self.scores, "head": self.head}


def forward_flops(model: ModelConfig, batch: int, *, causal: bool) -> ForwardFlops:
    """One forward pass of `batch` sequences. causal: scores that the mask hides are not counted."""
    model = replace(model, dropout=0.0, attention_dropout=0.0)  # they are not matmuls
    layers: dict[str, float] = defaultdict(float)
    scores = backward = 0.0
    for kind, count in Counter(pattern_of(model)).items():
        cost = layer_cost(model, kind=kind, kernel="cudnn")
        for matmul in _forward(cost):
            flops = count * matmul.flops(batch) * (matmul.seen if causal else 1)
            backward += flops * _products_back(matmul, cost)
            if matmul.weight:
                layers[module_of(matmul.weight)] += flops
            else:
                scores += flops
    shared = {part: shared_cost(model, part) for part in (EMBED, HEAD)}
    backward += sum(
        each.flops(batch, model.vocab) * _products_back(each, cost)
        for cost in shared.values()
        for each in _forward(cost)
    )
    embedding, head = (cost.flops("F", batch, model.vocab) for cost in shared.values())
    return ForwardFlops(
        layers=dict(layers), scores=scores, head=head, embedding=embedding, backward=backward
    )


def _forward(cost: Cost) -> list[Matmul]:
    return [each for each in cost.matmuls if each.during == "F"]


def _products_back(matmul: Matmul, cost: Cost) -> int:
    """How many products of the same size a product has in the backward pass: one for the gradient
    of its input, if that is needed, and one for that of its weight; or one for each of two
    activations."""
    same = {each.during for each in cost.matmuls if each.weight == matmul.weight}
    return ("B" in same) + ("W" in same) if matmul.weight else 2 * ("B" in same)


def sc21_flops(model: ModelConfig, batch: int) -> float:
    """FLOPs per step by SC'21, equation (3): 96 B s l h^2 (1 + s/(6h) + V/(16 l h)) for f = 4.

    Blocks run forward, forward again and backward (4 forwards), the head without the second
    forward; attention is not halved for causality. The paper's teraFLOP/s, and its 502 petaFLOP/s,
    are in this unit. The matmuls of other families are counted in the same way.
    """
    forward = forward_flops(model, batch, causal=False)
    return forward.total + forward.blocks + forward.backward


def model_flops(model: ModelConfig, batch: int) -> float:
    """FLOPs per step as MFU counts them: 72 B s l h^2 (1 + s/(12h) + V/(12 l h)) for f = 4.

    Forward and backward (3 forwards; 2 for products with frozen weights, 1 if nothing before them
    is trained either), attention halved if it is causal, nothing for recomputation.
    """
    forward = forward_flops(model, batch, causal=True)
    return forward.total + forward.backward


def hardware_matmul_flops(
    model: ModelConfig, layout: Layout, global_batch: int, *, backend: Backend = "cuda"
) -> float:
    """FLOPs of all matmuls that one step of our program executes, on all devices together.

    Attention counts what its kernel computes, the vocabulary is padded, and B costs two forwards
    plus what it recomputes: with stash="inputs" the chunk or, if that is one layer, what
    recompute="full" does, since nobody needs the layer's output. With idle="phases" idle ops
    compute too, and are counted.
    """
    schedule = schedule_for(layout, layout.microbatches(global_batch))
    placement = placement_of(model, layout, schedule.virtual_stages)
    alone = placement.even and placement.layer.shape[-1] == 1
    executed, useful = _executed_ops(layout.idle, schedule), schedule.items * schedule.virtual
    flops = 0.0
    for number, kind in enumerate(placement.kinds):
        # Layers run per replica and item; an idle op runs the stage's first chunk.
        layers, idle = (
            int((placement.kind == number).sum()),
            int((placement.kind[:, 0] == number).sum()),
        )
        for each, ops in zip(
            _layer_flops(model, kind, layout, backend, alone, schedule.split), executed
        ):
            flops += each * (schedule.items * layers + (ops - useful) * idle)
    vocab = model.padded_vocab(layout.vocab_shards) // layout.vocab_shards
    for part in (EMBED, HEAD):
        cost = shared_cost(
            model, part, tensor=layout.tensor, sequence_parallel=layout.sequence_parallel,
            context=layout.context,
        )  # fmt: skip
        flops += layout.pipe * schedule.microbatches * cost.flops("FBW", layout.microbatch, vocab)
    return layout.token_shards * layout.tensor * flops


def _layer_flops(
    model: ModelConfig, kind: str, layout: Layout, backend: Backend, alone: bool, split: bool
) -> tuple[float, ...]:
    """(F, B) or (F, B, W) of one layer and one item on one device."""
    inputs = layout.stash == "inputs"
    cost = layer_cost(
        model, kind=kind, tensor=layout.tensor, sequence_parallel=layout.sequence_parallel,
        recompute="full" if inputs and alone else layout.recompute,
        kernel=kernel_of(model, backend, layout.slices), slices=layout.slices,
        context=layout.context, context_attention=context_attention(layout, model),
        experts=ExpertShards.of(layout, model),
    )  # fmt: skip
    forward, backward, weight = (cost.flops(each, layout.microbatch) for each in "FBW")
    if inputs and not alone:
        backward += forward
    return (forward, backward, weight) if split else (forward, backward + weight)


def _executed_ops(idle: Idle, schedule: Schedule) -> tuple[int, ...]:
    """Ticks in which a stage computes F, B and W, including idle ones if they compute."""
    kinds = len(schedule.halves)
    if idle == "skip":
        return (schedule.items * schedule.virtual,) * kinds
    return tuple(
        sum(phase.stop - phase.start for phase in schedule.phases if phase[2 + kind])
        for kind in range(kinds)
    )


def sc21_parameters(model: ModelConfig) -> float:
    """P = 12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)), SC'21, equation (2); for a GPT with f = 4 and
    tied embedding and head."""
    layers, hidden = model.layers, model.hidden
    ends = (model.vocab + model.sequence) / (12 * layers * hidden)
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + ends)


def parameters(model: ModelConfig) -> int:
    """The exact number of parameters, without the padding of the vocabulary.

    For a GPT, per layer (4 + 2f) h^2 + (9 + f) h: matrices, biases and two norms; outside the
    layers the token table (twice if untied), the positions, and the final norm's 2h, which the
    paper's formula lacks.
    """
    return sum(parameters_by_part(model).values())


def trained_parameters(model: ModelConfig) -> int:
    """How many of the parameters are not frozen."""
    every = model_parameters(model)
    shared = sum(each.elements.at(1, model.vocab) for each in every.shared if each.trained)
    return shared + sum(
        count * each.elements.number
        for kind, count in Counter(every.pattern).items()
        for each in every.layers[kind]
        if each.trained and each.role != "state"
    )


def parameters_by_part(model: ModelConfig) -> dict[str, int]:
    """The exact numbers of parameters, without the padding of the vocabulary; a tied head has no
    table of its own."""
    every = model_parameters(model)
    parts: Counter = Counter({"embedding": 0})
    for each in every.shared:
        parts[_part(each, every.shared)] += each.elements.at(1, model.vocab)
    for kind, count in Counter(every.pattern).items():
        for each in every.layers[kind]:
            if each.role != "state":  # moved by a rule, not trained: a buffer elsewhere
                parts[_part(each, every.layers[kind])] += count * each.elements.number
    parts["norms"] = parts.pop("norms")  # after the others
    return dict(parts)


def _part(parameter: Parameter, among: tuple[Parameter, ...]) -> str:
    """The part that a parameter belongs to: "norms" (those in the stream), "embedding", the head or
    one of several heads, or its sublayer."""
    *modules, _ = parameter.path.split(".")
    shared = modules[0] in ("embed", "head")
    norms = {each.path.rpartition(".")[0] for each in among if each.role == "norm"}
    if ".".join(modules) in norms and len(modules) == 1 + shared:
        return "norms"
    if modules[0] == "embed":
        return "embedding"
    return " ".join(reversed(modules[:2])) if shared else modules[0]


def training_time_s(
    *, parameters: float, tokens: float, devices: int, flops_per_device: float
) -> float:
    """Seconds to train on `tokens`: 8 T P / (n X), SC'21, equation (4).

    flops_per_device: X, FLOP/s of one device in the unit of `sc21_flops`.
    """
    return 8 * tokens * parameters / (devices * flops_per_device)
