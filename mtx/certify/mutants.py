"""Known mistakes, put into the step on purpose: the checks behind a certificate have to catch each.

They are those of NVIDIA/Megatron-LM issue 7452 (silent numerical errors of composed parallelism)
and similar ones, as far as this project has the parts for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mtx.certify import mistakes
from mtx.certify import mistakes_of_experts as experts
from mtx.certify.cases import Case
from mtx.certify.compare import compare, reference_of
from mtx.certify.small import small_model, small_run
from mtx.certify.step import walk_run
from mtx.config import Layout, ModelConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A mistake, and a run with the feature that it breaks."""

    name: str
    what: str
    change: Callable[[], mistakes.Change]
    run: RunConfig


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Whether a mutant was caught, and by what."""

    mutant: Mutant
    by: Literal["walker", "run", ""]
    said: str  # what was found first

    @property
    def caught(self) -> bool:
        return bool(self.by)


def try_mutants(report: Callable = lambda *_: None) -> list[Tried]:
    """Try all mutants; those that the walker does not catch are run."""
    tried = []
    for number, mutant in enumerate(MUTANTS):
        report(number, len(MUTANTS), mutant.name)
        tried.append(try_mutant(mutant))
    return tried


def try_mutant(mutant: Mutant) -> Tried:
    with mutant.change():
        findings = walk_run(mutant.run).findings
    if findings:
        return Tried(mutant=mutant, by="walker", said=str(findings[0]))
    reference_of(mutant.run)  # of the step without the mistake
    with mutant.change():
        found = compare(Case(number=0, run=mutant.run, why=mutant.name))
    by = "run" if found.differs and not found.error else ""
    return Tried(mutant=mutant, by=by, said=found.said)


# -- the runs that they break ----------------------------------------------------------------------


def _run(family: str = "gpt", model: dict[str, Any] | None = None, **layout: Any) -> RunConfig:
    layout = {"data": 2, "pipe": 2, "tensor": 2} | layout
    small = small_model(ModelConfig(family=family), **{"layers": 4} | (model or {}))
    return small_run(RunConfig(), small, Layout(**layout, attention="blocked"), 8)


_PARALLEL, _WHOLE = _run(), _run(sequence_parallel=False)  # activations over tensor
_CONTEXT = _run(pipe=1, context=2, context_attention="gather")
_OF_EXPERTS = {"layers": 1, "dense_layers": 0, "shared_experts": 0}
_EXPERTS = _run("deepseek_v3", _OF_EXPERTS, pipe=1, expert=2, tensor=1, expert_room=0.3)
_CUT_EXPERTS = _run("deepseek_v3", _OF_EXPERTS, pipe=1, expert=2)
_WHOLE_EXPERTS = _run("gpt_oss", {"layers": 2}, data=1, pipe=1, expert=2, sequence_parallel=False)
MUTANTS = tuple(Mutant(name=n, what=what, change=change, run=run) for n, what, change, run in (
    ("loss scaled", "the loss times the replicas", mistakes.loss_times_replicas, _PARALLEL),
    ("local token count", "a mean of the replicas' means",
     mistakes.tokens_of_own_replica, _PARALLEL),
    ("wrong group", "weights of the loss summed over tensor, not over the replicas",
     mistakes.tokens_over_other_axes, _PARALLEL),
    ("tokens without context", "the token count over the replicas, not over parts of sequences",
     mistakes.tokens_over_replicas_alone, _CONTEXT),
    ("loss of one replica", "the reported loss is each replica's own",
     mistakes.loss_of_own_replica, _PARALLEL),
    ("labels after cutting", "labels are shifted in a slice, of which the last has none",
     mistakes.labels_shifted_after_cutting, _run(schedule="seq1f1b", slices=2)),
    ("labels of a part", "labels are shifted in a device's part of the sequence",
     mistakes.labels_shifted_after_cutting, _CONTEXT),
    ("plain order", "sequences are cut in plain order, not in that of the devices",
     mistakes.sequences_in_plain_order, _CONTEXT),
    ("keys of others", "each device keeps its own gradient of its keys and values",
     mistakes.gradients_of_own_keys, _CONTEXT),
    ("second loss, local count", "BERT's order loss by each replica's count",
     mistakes.second_loss_by_own_count, _run("bert")),
    ("second loss scaled", "BERT's order loss times the replicas",
     mistakes.second_loss_times_replicas, _run("bert")),
    ("norm counts replicas", "replicated parameters counted on each device",
     mistakes.norm_counts_replicas, _PARALLEL),
    ("norm of own shards", "the norm is not summed over what shards parameters",
     mistakes.norm_of_own_shards, _PARALLEL),
    ("replicated, not summed", "gradients of norms and biases not summed over tensor",
     mistakes.no_sum_of_replicated, _PARALLEL),
    ("whole, summed", "whole gradients summed over tensor once more",
     mistakes.sum_of_whole_gradients, _WHOLE),
    ("sharded, summed", "gradients summed over the axis that shards them",
     mistakes.sum_of_shards, _PARALLEL),
    ("norms of heads", "their gradients not summed over tensor",
     mistakes.no_sum_of_head_norms, _run("qwen3", sequence_parallel=False)),
    ("repeated heads", "gradients of repeated keys and values not summed over tensor",
     mistakes.no_sum_of_repeated_heads,
     _run("llama", {"kv_heads": 2}, data=1, tensor=4, sequence_parallel=False)),
    ("row layers", "their output is not summed", mistakes.no_sum_after_row_layers, _WHOLE),
    ("row layers, cut", "their output is cut, and not summed",
     mistakes.no_sum_after_row_layers, _PARALLEL),
    ("vocabulary, sum", "the losses' sums over the vocabulary are each device's own",
     mistakes.no_sum_over_vocabulary, _PARALLEL),
    ("vocabulary, maximum", "logits are shifted by each device's own maximum",
     mistakes.largest_of_own_vocabulary, _PARALLEL),
    ("shards of another axis", "ZeRO's shards are gathered over tensor",
     mistakes.gathered_over_tensor, _PARALLEL),
    ("shards backwards", "ZeRO's shards are gathered in another order",
     mistakes.gathered_backwards, _PARALLEL),
    ("shard of own gradient", "each replica updates by its part of its own gradient",
     mistakes.own_part_of_own_gradient, _PARALLEL),
    ("mean of sums", "gradients divided by the replicas once more",
     mistakes.mean_over_replicas, _run(zero=3, zero_unit="layer")),
    ("same masks, other tokens", "dropout by the position in a shard of the sequence",
     mistakes.masks_by_local_position, _run(model={"dropout": 0.1})),
    ("same masks, other parts", "dropout by the position in a part of the sequence",
     mistakes.masks_by_place_in_part,
     _run(model={"dropout": 0.1}, data=1, context=2, sequence_parallel=False)),
    ("other masks, same tokens", "dropout that differs where activations are whole",
     mistakes.masks_by_device, _run(model={"dropout": 0.1}, sequence_parallel=False)),
    ("same masks, other rows", "dropout by the row in a replica",
     mistakes.masks_by_local_sample, _run(model={"dropout": 0.1})),
    ("head of own stage", "each stage's head takes its own output", mistakes.head_of_own_stage,
     _PARALLEL),
    ("embedding of own stage", "each stage's embedding takes its own gradient",
     mistakes.embedding_of_own_stage, _PARALLEL),
    ("head of the first stage", "all heads take the first stage's output",
     mistakes.head_of_another_stage, _PARALLEL),
    ("encoder of own stage", "gradients of the encoder's output stay on the stage that they are of",
     mistakes.encoder_of_own_stage, _run("t5", {"layers": 2}, data=1, tensor=1)),
    ("projector, not summed", "gradients of what images are projected to are each device's own",
     mistakes.projector_of_own_images, _run("llava", data=1, pipe=1)),
    ("branch of one stage", "the head, with its collectives, on the last stage alone",
     mistakes.head_where_it_is_held, _PARALLEL),
    ("experts scaled", "gradients of experts times the devices that share them",
     experts.gradients_times_shards, _EXPERTS),
    ("experts summed", "gradients of experts summed over the devices that share them",
     experts.gradients_summed_over_shards, _EXPERTS),
    ("norm without experts", "the norm, and so the clip, leaves experts out",
     experts.norm_without_experts, _EXPERTS),
    ("norm of own experts", "the norm is not summed over the devices that share experts",
     experts.norm_of_own_experts, _EXPERTS),
    ("norm, experts as replicas", "experts are divided by the devices that share them in the norm",
     experts.norm_as_if_replicated, _EXPERTS),
    ("balance of own counts", "the balance bias is moved by each replica's own counts",
     experts.balance_by_own_counts, _EXPERTS),
    ("auxiliary loss scaled", "auxiliary losses times the devices that share experts",
     experts.auxiliary_loss_times_shards, _EXPERTS),
    ("shares of a part", "a sequence's shares of experts counted in a device's part of it",
     experts.shares_of_own_positions, _CUT_EXPERTS),
    ("tokens dropped", "what an expert has no room for in the first round is lost",
     experts.no_later_rounds, _EXPERTS),
    ("rounds of own queues", "each device makes as many rounds as its own tokens need",
     experts.rounds_of_own_queues, _EXPERTS),
    ("tokens exchanged", "experts' outputs go back to other tokens' devices",
     experts.sent_back_in_another_order, _EXPERTS),
    ("biases of experts", "added on every device of tensor, whose outputs are then summed",
     experts.bias_on_every_shard, _WHOLE_EXPERTS),
    ("gates, not summed", "gradients of gates are those of a device's part of each expert",
     experts.gates_gradients_of_own_shard, _WHOLE_EXPERTS),
))  # fmt: skip
