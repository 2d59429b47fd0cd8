"""Seconds of one layer, of the embedding and of the head, for one microbatch on one device.

A layer's time is that of its matmuls (`mtx.plan.gemm`), its attention (`mtx.plan.scores`), what its
other kernels read and write, and its collectives over `tensor`, `context` and `expert`: all of them
read off its trace (`mtx.costs`). What other software does in addition is counted in passes over an
array: a pass is one read or one write of all its elements.

Letters: b microbatch · s sequence · h hidden · t tensor
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from operator import add
from typing import NamedTuple

from mtx.config import Recompute
from mtx.costs.ask import shared_cost
from mtx.costs.cost import HEAD, Cost, Matmul, Pass, module_of, total
from mtx.plan.context import exposed_s
from mtx.plan.experts import later_s, to_experts_s
from mtx.plan.network import all_reduce_s, gather_s
from mtx.plan.scores import attention_s
from mtx.plan.shard import Shard

_ADDED_BYTES = 12  # per element, to add float32 to float32


class Work(NamedTuple):
    """Seconds of one device, by what they are spent on."""

    matmul_s: float = 0.0  # products with weights
    attention_s: float = 0.0  # scores: matmuls, softmax, dropout
    elementwise_s: float = 0.0  # norms, GELU, residuals, dropout, adding up gradients, the loss
    tensor_comm_s: float = 0.0  # collectives over `tensor` that nothing hides
    context_comm_s: float = 0.0  # and over `context`
    expert_comm_s: float = 0.0  # and those that take tokens to experts and back
    host_comm_s: float = 0.0  # copies to the host's memory and back that nothing hides

    @property
    def total_s(self) -> float:
        return sum(self)

    @property
    def sent(self) -> Work:
        """The part that weaving hides."""
        return Work(tensor_comm_s=self.tensor_comm_s, expert_comm_s=self.expert_comm_s)

    def __add__(self, other: Work) -> Work:
        return Work(*map(add, self, other))

    def __mul__(self, times: float) -> Work:
        return Work(*(part * times for part in self))


class Passes(NamedTuple):
    """The work of F, of B and of W; recomputation is part of B."""

    forward: Work = Work()
    backward: Work = Work()
    weight: Work = Work()

    @property
    def all(self) -> Work:
        return self.forward + self.backward + self.weight

    @property
    def seconds(self) -> tuple[float, float, float]:
        return self.forward.total_s, self.backward.total_s, self.weight.total_s

    def __add__(self, other: Passes) -> Passes:
        return Passes(*map(add, self, other))

    def __mul__(self, times: float) -> Passes:
        return Passes(*(part * times for part in self))


@lru_cache(maxsize=16384)
def layer_work(shard: Shard, kind: str, recompute: Recompute) -> Passes:
    """The work of one layer. recompute: "selective" computes the attention's scores again,
    "around_attention" everything except attention, "full" the whole layer."""
    cost = shard.cost(kind)
    weights = [
        (*each.shape(shard.microbatch), "float8" if each.float8 else "") for each in cost.weights
    ]
    attention_forward_s, attention_backward_s = attention_s(shard, cost)
    forward = Work(
        matmul_s=sum(shard.product_s(m, n, k, b, dtype=t) for b, m, n, k, t in weights),
        attention_s=attention_forward_s,
        elementwise_s=_elementwise_s(shard, cost, "F"),
        tensor_comm_s=_comm_s(shard, cost, "F"),
        context_comm_s=exposed_s(shard, cost, "F", attention_forward_s),
        expert_comm_s=to_experts_s(shard, cost.collectives, "F"),
    )
    copies = shard.calibration.software.stash_copies
    kept_bytes = total(shard.cost(kind, recompute).kept, shard.microbatch) if copies else 0
    stashed = Work(elementwise_s=shard.memory_s(copies * kept_bytes))
    forward_loops, *of_loops = _for_loops_s(shard, cost)
    stashed += Work(elementwise_s=forward_loops)
    inputs_s = [shard.product_s(m, k, n, b, dtype=t) for b, m, n, k, t in weights]
    trained = [each.weight in cost.trained for each in cost.weights]
    weights_s = [
        shard.product_s(k, n, m, b, dtype=t) if has_w else 0.0
        for has_w, (b, m, n, k, t) in zip(trained, weights)
    ]
    backward = Work(
        matmul_s=sum(inputs_s),
        attention_s=attention_backward_s,
        elementwise_s=_elementwise_s(shard, cost, "B"),
        tensor_comm_s=_comm_s(shard, cost, "BW") - _hidden_s(shard, _columns_s(cost, inputs_s)),
        context_comm_s=_context_backward_s(shard, kind, recompute, sum(weights_s)),
        expert_comm_s=to_experts_s(shard, shard.cost(kind, recompute).collectives, "BW"),
    )
    backward += _again(shard, kind, recompute, forward)
    backward += Work(elementwise_s=of_loops[0])
    size = sum(b * k * n for has_w, (b, _, n, k, _) in zip(trained, weights) if has_w)
    weight = Work(
        matmul_s=sum(weights_s),
        elementwise_s=_accumulate_s(shard, size, sum(trained)) + of_loops[1],
        tensor_comm_s=-_hidden_s(shard, _columns_s(cost, weights_s), weights=True),
    )
    return Passes(forward=forward + stashed, backward=backward, weight=weight)


@lru_cache(maxsize=16384)
def later_work(shard: Shard, kind: str, recompute: Recompute) -> Passes:
    """What the rounds after the first add to a layer if its experts are not evenly loaded."""
    passes = (later_s(shard, shard.cost(kind, recompute), during) for during in "FBW")
    works = (
        Work(matmul_s=products_s, elementwise_s=others_s, expert_comm_s=sent_s)
        for products_s, others_s, sent_s in passes
    )
    return Passes(*works)


def _for_loops_s(shard: Shard, cost: Cost) -> tuple[float, float, float]:
    """Seconds that the loops of experts' further rounds cost F, B and W, whether the rounds run or
    not: a loop reads a copy of a layer's weights, taken from their stack, and the gradients that
    come out of it cannot be added in place by the matmul before it."""
    looped = {each.weight for each in cost.later.matmuls if each.during == "F"}
    own = [each.shape(shard.microbatch) for each in cost.weights if each.weight in looped]
    size, kernels = sum(b * n * k for b, _, n, k in own), len(own)
    if shard.calibration.software.accumulate_bytes or not size:  # others add separately anyway
        return 0.0, 0.0, 0.0
    copy_s = shard.memory_s(2 * shard.item_bytes * size, kernels)
    return copy_s, copy_s, shard.memory_s(_ADDED_BYTES * size, kernels)


def _again(shard: Shard, kind: str, recompute: Recompute, forward: Work) -> Work:
    """The work that B recomputes. Over `context` it is read off the trace: a ring's output is kept
    in more ways than that of a single kernel, and its merges are much of a layer's other work."""
    if recompute == "none":
        return Work()
    if shard.context > 1:
        plain, more = (
            _traced_backward(shard, shard.cost(kind, way)) for way in ("none", recompute)
        )
        again = Work(*(max(0.0, b - a) for a, b in zip(plain, more)))
        return again._replace(tensor_comm_s=forward.tensor_comm_s * (recompute != "selective"))
    if recompute == "selective":
        return Work(attention_s=forward.attention_s)
    forward = forward._replace(expert_comm_s=0.0)  # the trace says what of it runs again
    return forward if recompute == "full" else forward._replace(attention_s=0.0)


def _traced_backward(shard: Shard, cost: Cost) -> Work:
    """The work of B in a trace, except for its collectives."""
    products = [each for each in cost.matmuls if each.weight and each.during == "B"]
    return Work(
        matmul_s=sum(
            shard.product_s(m, n, k, b, dtype="float8" if each.float8 else "")
            for each in products
            for b, m, n, k in (each.shape(shard.microbatch),)
        ),
        attention_s=attention_s(shard, cost)[1],
        elementwise_s=_elementwise_s(shard, cost, "B"),
    )


def _context_backward_s(shard: Shard, kind: str, recompute: Recompute, weights_s: float) -> float:
    """Seconds that a layer's backward pass sends over `context` and that are hidden neither by its
    attention nor by the weight gradients, for which nothing waits, as long as these last."""
    if shard.context == 1:
        return 0.0
    cost = shard.cost(kind, recompute)
    sent_s = exposed_s(shard, cost, "BW", attention_s(shard, cost)[1])
    return max(0.0, sent_s - weights_s * shard.calibration.software.overlaps_tensor)


def _sublayers(cost: Cost) -> Iterator[tuple[list[Matmul], list[Matmul]]]:
    """(products with weights, products of activations) of F, one sublayer after the other."""
    weights: list[Matmul] = []
    between: list[Matmul] = []
    for each in cost.matmuls:
        if each.during == "F" and each.weight:
            if weights and module_of(weights[0].weight) != module_of(each.weight):
                yield weights, between
                weights, between = [], []
            weights.append(each)
        elif each.during == "F":
            between.append(each)
    yield weights, between


def _columns_s(cost: Cost, times_s: list[float]) -> list[float]:
    """Seconds of each sublayer's column-parallel products: all its products except the last."""
    columns_s, at = [], 0
    for weights, _ in _sublayers(cost):
        columns_s.append(sum(times_s[at : at + len(weights) - 1]))
        at += len(weights)
    return columns_s


def _accumulate_s(shard: Shard, parameters: float, kernels: int = 1) -> float:
    """Seconds to add gradients to the sum over the microbatches; zero if the matmul does it."""
    software = shard.calibration.software
    if not software.accumulate_bytes:
        return 0.0
    return shard.memory_s(parameters * software.accumulate_bytes, kernels)


def _comm_s(shard: Shard, cost: Cost, during: str) -> float:
    """Seconds of the collectives over `tensor` in these passes, one after the other."""
    return sum(
        (all_reduce_s if each.kind == "psum" else gather_s)(
            each.bytes.at(shard.microbatch), shard.group, **shard.machine
        )
        for each in cost.collectives
        if each.during in during and each.axes == ("tensor",) and each.kind != "all_to_all"
    )


def _hidden_s(shard: Shard, under_s: list[float], *, weights: bool = False) -> float:
    """Seconds of the collectives in a layer's backward pass that the matmuls of input gradients
    hide, or with `weights` those of weight gradients.

    These are the collectives of a column-parallel layer's input: without sequence parallelism an
    all-reduce of its gradient, under the weight gradients; with it a second all-gather of the
    input, which was kept in shards, and a reduce-scatter of its gradient, each under one of the
    two.
    """
    if not shard.calibration.software.overlaps_tensor or not (weights or shard.sequence_parallel):
        return 0.0
    longest_s = shard.gather_s() if shard.sequence_parallel else shard.all_reduce_s()
    return sum(min(longest_s, seconds) for seconds in under_s)


def _elementwise_s(shard: Shard, cost: Cost, during: Pass) -> float:
    """Seconds of a pass's other kernels, fused as in the trace. torch's operators read and write
    once more: in F for the activation's bias and, at each residual addition, for its bias and its
    dropout; in B for each sum of two gradients; and to reorder attention's output."""
    (moved,) = (each for each in cost.moved if each.during == during)
    rows = shard.microbatch
    moved_bytes = total(moved.bytes, rows)
    if shard.calibration.software.operators == "torch":
        stream = total(cost.stream, rows)
        for weights, between in _sublayers(cost):
            inner = weights[-1]
            width_bytes = 2 * inner.m.at(rows) * inner.k.at(rows) * shard.item_bytes
            moved_bytes += (4 if during == "F" else 2) * stream
            moved_bytes += width_bytes if between or during == "F" else 0
    return shard.memory_s(moved_bytes, round(moved.kernels))


@lru_cache(maxsize=4096)
def embedding_work(shard: Shard, shards: int) -> Passes:
    """The work of the lookup in a `shards`-th of the table, positions, dropout, the sum over
    `tensor`, and the table's dense gradient."""
    rows = shard.model.padded_vocab(shards) // shards
    table = rows * shard.model.hidden
    weight = Work(
        elementwise_s=shard.memory_s(4 * shard.hidden_bytes + table * shard.item_bytes, 6)
        + _accumulate_s(shard, table)
    )
    trained = shard.model.trains("embed.tokens", "embedding")
    return Passes(
        forward=Work(
            elementwise_s=shard.memory_s(6 * shard.hidden_bytes, 6),
            tensor_comm_s=shard.all_reduce_s(),
        ),
        weight=weight if trained else Work(),
    )


@lru_cache(maxsize=4096)
def head_work(shard: Shard, shards: int) -> Passes:
    """The work of the last norm, whatever else comes before the logits, the logits of a `shards`-th
    of the vocabulary, and the loss.

    Its input's gradient is summed over `tensor`; with sequence parallelism it is scattered, and the
    input gathered in F and once more in B.
    """
    model = shard.model
    columns = model.padded_vocab(shards) // shards
    cost = shared_cost(
        model, HEAD, tensor=shard.tensor, sequence_parallel=shard.sequence_parallel,
        context=shard.context,
    )  # fmt: skip
    by_tokens = [each for each in cost.weights if each.m.number > 1]  # not of the first token alone
    # (tokens, outputs, inputs)
    products = [each.shape(shard.microbatch, columns)[1:] for each in by_tokens]
    trained = [p for p, each in zip(products, by_tokens) if each.weight in cost.trained]
    loss_bytes = shard.calibration.software.loss_bytes * shard.tokens * columns
    loss_s = shard.memory_s(loss_bytes, 10)
    norm_s = shard.memory_s(shard.hidden_bytes) * len(products)
    return Passes(
        forward=Work(
            matmul_s=sum(shard.product_s(m, n, k) for m, n, k in products),
            elementwise_s=loss_s * 2 / 3 + 2 * norm_s,
            tensor_comm_s=shard.gather_s() if shard.sequence_parallel else 0.0,
        ),
        backward=Work(
            matmul_s=sum(shard.product_s(m, k, n) for m, n, k in products),
            elementwise_s=loss_s / 3 + 5 * norm_s,
            tensor_comm_s=shard.all_reduce_s(),
        ),
        weight=Work(
            matmul_s=sum(shard.product_s(k, n, m) for m, n, k in trained),
            elementwise_s=_accumulate_s(shard, sum(n * k for _, n, k in trained)),
        ),
    )
