"""Why one layout beats another, and what each change of the best one would cost."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from mtx.config import Layout, ModelConfig, OptimizerConfig
from mtx.errors import UserError
from mtx.plan.candidates import CONTEXT_WAYS, RECOMPUTE, Fixed, Question
from mtx.plan.choose import context_attention, with_zero
from mtx.plan.hardware import Hardware
from mtx.plan.makespan import LOOPED
from mtx.plan.search import Candidate
from mtx.plan.time import StepTime
from mtx.schedules.simulate import bubble_text

PART_NAMES = {
    "matmul_s": "matmuls",
    "attention_s": "attention",
    "elementwise_s": "norms and activations",
    "embedding_and_head_s": "embedding, logits and loss",
    "tensor_comm_s": "collectives over tensor",
    "context_comm_s": "collectives over context",
    "expert_comm_s": "tokens to experts and back",
    "host_comm_s": "copies to host memory and back",
    "pipeline_comm_s": "messages between stages",
    "bubble_s": "idle in the pipeline",
    "data_comm_s": "data-parallel collectives",
    "optimizer_s": "optimizer",
    "kernel_starts_s": "starts of kernels",
    "step_s": "the whole step",
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients, float32",
    "optimizer_bytes": "masters and moments",
    "stash_bytes": "stash between F and B",
    "transfer_bytes": "sends and receives",
    "activations_bytes": "activations of one layer's B",
    "logits_bytes": "logits",
}


def part_name(field: str) -> str:
    """What a part of the step or of the memory is called on pages and in pictures."""
    name = field.removesuffix("_bytes").removesuffix("_s").replace("_", " ")
    return PART_NAMES.get(field, name)


_WORTH_SAYING = 0.2  # of the largest difference between two candidates' parts


def reasons(better: Candidate, worse: Candidate, hardware: Hardware) -> str:
    """Why one beats the other: the parts of the step in which it gains most, and what it pays for
    them."""
    gained_s = {
        each.name: getattr(worse.time, each.name) - getattr(better.time, each.name)
        for each in fields(StepTime)
    }
    ordered = sorted(gained_s, key=lambda name: -abs(gained_s[name]))
    least_s = _WORTH_SAYING * abs(gained_s[ordered[0]])
    said = [name for name in ordered if gained_s[name] and abs(gained_s[name]) >= least_s]
    gains = [_compare(name, better, worse, hardware) for name in said if gained_s[name] > 0]
    pays = [_compare(name, better, worse, hardware) for name in said if gained_s[name] < 0]
    if not gains:
        return "as fast"
    return "; ".join(gains[:2]) + (f"; though {pays[0]}" if pays else "")


def _compare(name: str, one: Candidate, other: Candidate, hardware: Hardware) -> str:
    """One part of the step of `one`, compared with `other`'s."""
    mine_s, theirs_s = getattr(one.time, name), getattr(other.time, name)
    mine, theirs = one.layout, other.layout
    if name == "bubble_s":
        other_bubble = f"{other.time.bubble_over_ideal:.2%}"
        return f"{bubble_text(one.time.bubble_over_ideal)} instead of {other_bubble}"
    what = part_name(name)
    crossing = [_crosses(layout, name, hardware) for layout in (mine, theirs)]
    over_axis = name in ("tensor_comm_s", "context_comm_s", "expert_comm_s", "data_comm_s")
    if over_axis and crossing == [False, True]:
        what += " inside a node"
    elif over_axis and crossing == [True, False]:
        what += " across nodes"
    elif name == "matmul_s" and mine.recompute != theirs.recompute:
        what += f" (recompute={mine.recompute} instead of {theirs.recompute})"
    return f"{what} {seconds(mine_s)} instead of {seconds(theirs_s)}"


def _crosses(layout: Layout, part: str, hardware: Hardware) -> bool:
    """Whether some group of that part's axis spans nodes; devices fill nodes in mesh order."""
    beside = {
        "data_comm_s": layout.token_shards, "context_comm_s": layout.context,
        "expert_comm_s": layout.context * layout.expert,
    }  # fmt: skip
    reach = layout.tensor * beside.get(part, 1)
    return reach > hardware.node_devices or hardware.node_devices % reach != 0


def seconds(value: float) -> str:
    """12.30 s, or 4.56 ms."""
    return f"{value:,.2f} s" if value >= 0.995 else f"{value * 1e3:.3g} ms"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A candidate with one setting changed, and what that does."""

    name: str
    value: object
    candidate: Candidate
    fits: bool


def changes(
    best: Candidate, model: ModelConfig, *, global_batch: int, hardware: Hardware,
    scatter_gather: bool = True, expert_imbalance: float = 1.0,
    optimizer: OptimizerConfig | None = None,
) -> list[Change]:  # fmt: skip
    """What each single change of a setting of `best` would cost, mesh unchanged, fastest first.

    For microbatches and chunks, the two nearest values on each side are tried.
    """
    question = Question(
        model=model, gpus=best.layout.devices, global_batch=global_batch, hardware=hardware,
        fixed=Fixed(), scatter_gather=scatter_gather, expert_imbalance=expert_imbalance,
        optimizer=optimizer,
    )  # fmt: skip
    mesh, asked = best.layout, []
    settings = list(question.settings(replace(mesh, schedule=LOOPED[0], virtual=1)))
    tried = {
        "microbatch": {layout.microbatch for layout in settings},
        "virtual": set(question.virtuals(mesh)),
        "sequence_parallel": {layout.sequence_parallel for layout in settings},
        "weave": {layout.weave for layout in settings},
    }
    for name, found in tried.items():
        values = sorted(found | {getattr(mesh, name)})
        place = values.index(getattr(mesh, name))
        asked += [(name, value) for value in values[max(0, place - 2) : place + 3]]
    asked += [("recompute", way) for way in RECOMPUTE]
    asked += [("expert_tensor", split) for split in question.ways_of_experts(mesh)]
    asked += [("context_attention", way) for way in CONTEXT_WAYS if mesh.context > 1]
    asked += [("schedule", name) for name in ("gpipe", LOOPED[0]) if mesh.pipe > 1]
    asked += [("zero", zero) for zero in (0, 1, 3) if mesh.token_shards > 1]
    listed = []
    for name, value in asked:
        zero = value if name == "zero" else best.zero
        layout = with_zero(mesh, zero) if name == "zero" else _changed(mesh, name, value)
        if layout is None or _same(layout, mesh, model) and zero == best.zero:
            continue
        if not question.allows(layout):
            continue
        time = question.time(layout, zero)
        memory = question.memory(layout, zero)
        candidate = Candidate(layout=layout, zero=zero, time=time, memory=memory)
        fits = question.holds(memory.total_bytes)
        listed.append(Change(name=name, value=value, candidate=candidate, fits=fits))
    return sorted(listed, key=lambda change: change.candidate.time.step_s)


def _same(layout: Layout, other: Layout, model: ModelConfig) -> bool:
    """Whether two layouts are the same once attention over `context` is resolved."""
    return replace(layout, context_attention=context_attention(layout, model)) == replace(
        other, context_attention=context_attention(other, model)
    )


def _changed(layout: Layout, name: str, value: object) -> Layout | None:
    """The layout with that field changed; None if it cannot be, as for a schedule that needs
    another number of chunks."""
    try:
        return replace(layout, **{name: value})
    except UserError:
        return None
