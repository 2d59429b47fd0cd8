"""What was compared and walked, what differed, and what was not covered."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from mtx import __version__
from mtx.certify.cases import Case, cases_of, features
from mtx.certify.compare import FLOOR, TOLERANCES, Compared, compare
from mtx.certify.reference import STEPS
from mtx.certify.small import small_model, small_optimizer
from mtx.certify.step import Walked, walk_all
from mtx.config import Layout, RunConfig, to_dict
from mtx.errors import UserError
from mtx.schedules.makers import MAKERS
from mtx.sharding.axes import MESH

Report = Callable[..., None]
_LEAST_REDUCTIONS = 16  # cases that are tried to find a smaller one that fails


@dataclass(kw_only=True)
class Certificate:
    """Of a run."""

    run: RunConfig
    seed: int
    devices: int
    compared: list[Compared] = field(default_factory=list)
    walked: Walked
    smallest: Compared | None = None  # of the cases that fail, the first one reduced

    @property
    def holds(self) -> bool:
        return not self.walked.findings and all(each.holds for each in self.compared)

    @property
    def failure(self) -> str | None:
        """One line that names the smallest case that fails, or what the walker found."""
        if self.smallest is not None:
            return f"differs with {self.smallest.case.said or 'one device'}: {said(self.smallest)}"
        if self.walked.findings:
            return f"the step on {self.walked.devices:,} devices: {self.walked.findings[0]}"
        return None


def certify(
    run: RunConfig, *, cases: int, seed: int, devices: int,
    report: Report = lambda *_: None,
) -> Certificate:  # fmt: skip
    """Walks the run's step at full size, and compares so many cases of it on virtual devices."""
    report(0, cases, "walks the step")
    made = Certificate(run=run, seed=seed, devices=devices, walked=walk_all(run))
    for case in cases_of(run, count=cases, seed=seed, devices=devices):
        report(case.number - 1, cases, "compares")
        made.compared.append(compare(case))
    failed = next((each for each in made.compared if not each.holds), None)
    if failed is not None:
        report(cases, cases, "reduces")
        made.smallest = reduced(failed)
    return made


def reduced(failed: Compared) -> Compared:
    """The case with as little as it needs to fail: one thing after the other is left out."""
    tried, best, again = 0, failed, True
    while again:
        again = False
        for run in _smaller(best.case.run):
            if tried == _LEAST_REDUCTIONS:
                return best
            tried += 1
            other = compare(replace(best.case, run=run, why="reduced"))
            if not other.holds and bool(other.error) == bool(failed.error):
                best, again = other, True
                break
    return best


def _smaller(run: RunConfig) -> Iterator[RunConfig]:
    """With one axis less, or one feature."""
    layout, default = run.layout, Layout()
    first = [axis.name for axis in MESH if layout.sizes[axis.name] > 1]
    changes: list[dict[str, Any]] = [{axis: 1} for axis in first]
    changes += [{axis: 2} for axis in first if layout.sizes[axis] > 2]
    for name in features(run).keys() - set(first):
        change = {name: getattr(default, name)}
        changes.append(change | {"virtual": 1, "stage_layers": "even"} if name == "schedule" else
                       change)
    changes.append({"microbatch": run.global_batch, **dict.fromkeys(first, 1)})
    for change in changes:
        try:
            yield replace(run, layout=replace(layout, **change))
        except UserError:
            continue


# -- what is said ----------------------------------------------------------------------------------


def said(compared: Compared) -> str:
    """In words, what is wrong with a case."""
    if compared.error:
        return compared.error
    parts = []
    for name in compared.beyond:
        value, leaf = compared.differences[name]
        of = f" of {leaf}" if leaf else ""
        parts.append(f"{name}{of} by {value:.1e}, {TOLERANCES[name]:.0e} is allowed")
    return "; ".join([*parts, *map(str, compared.findings)])


def config_hash(run: RunConfig) -> str:
    """Of all that decides a step's values: not of where the run lies, nor of its data."""
    parts = {name: to_dict(getattr(run, name)) for name in ("model", "layout", "optimizer")}
    parts |= {"global_batch": run.global_batch, "seed": run.seed, "steps": run.steps}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    return {"mtx": __version__, "jax": jax.__version__, "python": platform.python_version()}


def not_covered(made: Certificate) -> list[str]:
    """Plainly, what nothing here says anything of."""
    runs = [each.case.run for each in made.compared]
    found = []
    if missing := _unseen(runs):
        found.append(f"in no case: {', '.join(missing)}")
    found += [
        f"{made.run.model.compute_dtype} and {made.run.model.fp8} float8: cases compute in float32"
        if made.run.model.fp8 != "off" or made.run.model.compute_dtype != "float32" else "",
        "kernels of GPUs, and collectives between machines: cases run on virtual CPU devices",
        f"sizes: cases are small models of {small_model(made.run.model).hidden} hidden, "
        f"trained for {STEPS} steps",
        f"optimizer {made.run.optimizer.name}: cases train with AdamW, epsilon="
        f"{small_optimizer(made.run.optimizer).epsilon:g}, clip="
        f"{small_optimizer(made.run.optimizer).clip:g}",
        "the loader, checkpoints, evaluation beyond losses and scores",
    ]  # fmt: skip
    if made.run.layout.schedule_is_file or made.run.layout.schedule == "auto":
        found.append(f"schedule {made.run.layout.schedule}: cases have those with names")
    walked = made.walked
    found.append(
        "of the equations: constant factors, the order of shards along an axis, and which stage "
        "computes what" + (
            f"; {walked.mixed} values through buffers of mixed kinds lose their dims"
            if walked.mixed else ""
        )
    )  # fmt: skip
    if walked.unknown:
        found.append(f"primitives without a rule: {', '.join(sorted(walked.unknown))}")
    if walked.untold:
        found.append(f"{walked.untold} of {walked.outputs} outputs, shards of which no more is "
                     "known than that they differ")
    return [each for each in found if each]


def _unseen(runs: list[RunConfig]) -> list[str]:
    """Features that no case had."""
    wanted: dict[str, Callable[[RunConfig], Any]] = {
        axis.name: lambda run, a=axis.name: run.layout.sizes[a] > 1 for axis in MESH
    }
    for name, value in (
        ("zero", 3), ("zero_unit", "layer"), ("zero_unit", "chunk"), ("weave", "on"),
        ("idle", "skip"), ("idle", "phases"), ("stash", "inputs"), ("recompute", "selective"),
        ("recompute", "full"), ("sequence_parallel", False),
    ):  # fmt: skip
        wanted[f"{name}={value}"] = lambda run, n=name, v=value: getattr(run.layout, n) == v
    wanted["slices"] = lambda run: run.layout.slices > 1
    wanted["virtual"] = lambda run: run.layout.virtual > 1
    wanted["uneven stage_layers"] = lambda run: isinstance(run.layout.stage_layers, tuple)
    for name in MAKERS:
        wanted[f"schedule={name}"] = lambda run, n=name: run.layout.schedule == n
    model = runs[0].model if runs else None
    for name in ("dropout", "attention_dropout", "kv_heads", "window"):
        if model is not None and hasattr(model, name):
            wanted[name] = lambda run, n=name: bool(getattr(run.model, n))
    if model is not None and model.objective == "next token":
        wanted["tied head"] = lambda run: run.model.tied
        wanted["untied head"] = lambda run: not run.model.tied
    return [name for name, had in wanted.items() if not any(map(had, runs))]


def lines(made: Certificate, *, width: int) -> list[str]:
    """The table of cases, then the certificate, for a terminal of that width."""
    names = list(TOLERANCES)
    room = max(24, width - 4 - sum(len(name) + 2 for name in names) - 9)
    head = "".join(f"  {name:>{max(7, len(name))}}" for name in names)
    rows = [f"case  {'layout':<{room}}{head}"]
    for each in made.compared:
        layout = textwrap.wrap(each.case.said or "one device", room) or [""]
        values = "".join(
            f"  {each.differences[n][0]:>{max(7, len(n))}.0e}" if n in each.differences else
            f"  {'':>{max(7, len(n))}}"
            for n in names
        )  # fmt: skip
        rows.append(f"{each.case.number:>4}  {layout[0]:<{room}}{values}")
        rows += [f"      {line}" for line in layout[1:]]
        if not each.holds:
            rows += textwrap.wrap(
                f"DIFFERS: {said(each)}", width, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
    return rows + ["", *_summary(made, width)]


def _summary(made: Certificate, width: int) -> list[str]:
    walked, layout = made.walked, made.run.layout
    own = " x ".join(f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1)
    differing = [each for each in made.compared if not each.holds]
    facts = {
        "cases": f"{len(made.compared)}, seed {made.seed}, on {made.devices} virtual devices, "
        f"against one: {f'{len(differing)} differ' if differing else 'no difference'}",
        "allowed": ", ".join(f"{name} {value:.0e}" for name, value in TOLERANCES.items())
        + f"; relative, of a leaf's largest (at least {FLOOR:.0e} of all leaves'), over {STEPS} "
        "steps, gradients of the first",
        "equations": f"{walked.equations:,} of the full-size step on {walked.devices:,} devices "
        f"({own or 'one'}), each value typed by axis: "
        + (f"{len(walked.findings)} findings" if walked.findings else "nothing found"),
        "run": f"{config_hash(made.run)} (config), "
        + ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    found = []
    for name, text in facts.items():
        found += textwrap.wrap(f"{name:<11}{text}", width, subsequent_indent=" " * 11)
    for finding in walked.findings:
        found += textwrap.wrap(f"{'':<11}{finding}", width, subsequent_indent=" " * 13)
    found.append("not covered")
    for each in not_covered(made):
        found += textwrap.wrap(f"  - {each}", width, subsequent_indent=" " * 4)
    return found


def numbers(made: Certificate) -> dict[str, Any]:
    """Ready for JSON."""
    walked = dataclasses.asdict(made.walked)
    walked |= {"findings": list(map(str, made.walked.findings)),
               "unknown": sorted(made.walked.unknown)}
    return {
        "holds": made.holds,
        "failure": made.failure,
        "seed": made.seed, "devices": made.devices, "steps": STEPS,
        "tolerances": TOLERANCES, "floor": FLOOR,
        "versions": versions(), "config_hash": config_hash(made.run), "run": to_dict(made.run),
        "walked": walked,
        "cases": [_numbers_of(each) for each in made.compared],
        "smallest": made.smallest and _numbers_of(made.smallest),
        "not_covered": not_covered(made),
    }  # fmt: skip


def _numbers_of(compared: Compared) -> dict[str, Any]:
    return {
        "number": compared.case.number, "why": compared.case.why, "holds": compared.holds,
        "model": to_dict(compared.case.run.model), "layout": to_dict(compared.case.run.layout),
        "global_batch": compared.case.run.global_batch,
        "differences": {
            name: {"largest": value, "leaf": leaf}
            for name, (value, leaf) in compared.differences.items()
        },
        "findings": list(map(str, compared.findings)), "error": compared.error,
    }  # fmt: skip
