"""The step of a run at full size, typed by axis: nothing runs, and no devices are needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from mtx.certify import arrays, collectives, elementwise
from mtx.certify.cases import ways_to_weave
from mtx.certify.kinds import DIFFERENT, SAME, Kind, Value, different
from mtx.certify.walk import Finding, Walk, without_unread
from mtx.config import RunConfig
from mtx.sharding.axes import MESH
from mtx.step.trainer import Trainer

Tree = Any
RULES = elementwise.RULES | arrays.RULES | collectives.RULES
_STAGES = frozenset(axis.name for axis in MESH if axis.splits == "layers")


@dataclass(kw_only=True)
class Walked:
    """What was found in the equations of programs."""

    devices: int
    equations: int = 0
    findings: list[Finding] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)  # primitives without a rule
    mixed: int = 0  # values that went through buffers of several kinds
    outputs: int = 0  # arrays of the state and the metrics
    untold: int = 0  # of these, shards of which it is known only that they differ

    def add(self, other: Walked) -> None:
        self.equations += other.equations
        self.findings += [each for each in other.findings if each not in self.findings]
        self.unknown |= other.unknown
        self.mixed += other.mixed
        self.outputs += other.outputs
        self.untold += other.untold


def walk_all(run: RunConfig) -> Walked:
    """Walk the training step of `run`, with gradients that matmuls add in place and without, woven
    and plain if that is left open, and its held-out losses and scores."""
    first, *others = ways_to_weave(run)
    walked = walk_run(first)
    for other in others:
        walked.add(walk_run(other))
    for each in (first, *others):
        trainer = _trainer(each)
        trainer.axes = replace(trainer.axes, in_place=not trainer.axes.in_place)
        walked.add(walk_step(trainer))
    trainer = _trainer(first)
    for f in (trainer.evaluate, trainer.score):
        walked.add(walk_program(_traced(f, trainer)))
    return walked


def walk_run(run: RunConfig) -> Walked:
    """Walk the training step of `run`, as it is made for GPUs.

    A microbatch of one sequence is walked with two, since dims of one element could not be told
    apart. No equation changes by that.
    """
    return walk_step(_trainer(run))


def _trainer(run: RunConfig) -> Trainer:
    layout = replace(run.layout, attention="blocked")
    run = Trainer(replace(run, layout=layout)).run
    if run.layout.microbatch == 1:
        layout = replace(run.layout, microbatch=2)
        run = replace(run, layout=layout, global_batch=2 * run.global_batch)
    trainer = Trainer(run)
    trainer.platform = "gpu"  # asked for at no other place
    return trainer


def walk_step(trainer: Trainer) -> Walked:
    return walk_program(_traced(trainer.train_step, trainer))


def _traced(f: Any, trainer: Trainer) -> Any:
    batch = trainer.model.batch_fields(trainer.run.global_batch)
    return f.trace(trainer.states.shapes, batch)


def walk_program(traced: Any) -> Walked:
    """Walk the `shard_map` of a traced function: its inputs are what its specs say, and its outputs
    have to be what their specs say."""
    walked = None
    names = [keystr(path) for path, _ in jax.tree.leaves_with_path(traced.out_info)]
    for eqn in _shard_maps(traced.jaxpr.jaxpr):
        mesh = eqn.params["mesh"]
        sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
        walk = Walk(sizes=sizes, rules=RULES, stages=_STAGES)
        inputs = [given(spec, sizes) for spec in eqn.params["in_specs"]]
        values = walk.run(without_unread(eqn.params["jaxpr"]), inputs)
        outputs = list(zip(values, eqn.params["out_specs"], strict=True))
        for name, each in zip(names, outputs, strict=True):
            _check_output(walk, name, *each)
        own = Walked(
            devices=mesh.size, equations=walk.equations, findings=walk.findings,
            unknown=walk.unknown, mixed=walk.mixed, outputs=len(outputs),
            untold=sum(_is_untold(walk, *each) for each in outputs),
        )  # fmt: skip
        walked = walked or Walked(devices=mesh.size)
        walked.add(own)
    assert walked is not None, "no shard_map in the program"
    return walked


def _shard_maps(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            yield eqn
            continue
        inner = eqn.params.get("jaxpr")
        if inner is not None:
            yield from _shard_maps(getattr(inner, "jaxpr", inner))


def _dims(spec: P) -> dict[str, int]:
    """The dim that each axis shards."""
    return {
        axis: dim
        for dim, entry in enumerate(spec)
        for axis in (entry if isinstance(entry, tuple) else (entry,))
        if axis is not None
    }


def given(spec: P, sizes: dict[str, int]) -> Value:
    """A value that a PartitionSpec shards."""
    dims = _dims(spec)
    return Value(tuple(different({dims[a]}) if a in dims else SAME for a in sizes))


def _check_output(walk: Walk, name: str, value: Value, spec: P) -> None:
    dims = _dims(spec)
    for axis, kind in zip(walk.axes, value.kinds, strict=True):
        what = _wrong(kind, dims.get(axis))
        if what:
            walk.findings.append(Finding(axis, what, f"output {name}"))


def _wrong(kind: Kind, dim: int | None) -> str | None:
    """What is wrong with an output that has to be a shard of `dim`, or the same if that is None."""
    if kind.name == "partial":
        return "an unsummed partial value leaves the step"
    if dim is None and not kind.is_same:
        return f"what is to be the same on all devices is {kind}"
    if dim is not None and kind.dims and dim not in kind.dims:
        return f"what is to be a shard of dim {dim} is {kind}"
    return None


def _is_untold(walk: Walk, value: Value, spec: P) -> bool:
    """Whether an output differs along an axis, but is not known to be the shard that it has to be;
    along stages that cannot be known."""
    dims = _dims(spec)
    return any(
        axis in dims and kind == DIFFERENT and axis not in walk.stages
        for axis, kind in zip(walk.axes, value.kinds)
    )
