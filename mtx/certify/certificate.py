"""What was compared and walked, what differed, and what was not covered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from mtx.certify.cases import Case, cases_of, features
from mtx.certify.channels import own_channels
from mtx.certify.compare import Compared, compare
from mtx.certify.step import Walked, walk_all
from mtx.config import Layout, RunConfig
from mtx.errors import UserError
from mtx.sharding.axes import MESH

Report = Callable[..., None]
_MOST_REDUCTIONS = 16  # cases that are tried to find a smaller one that fails


@dataclass(kw_only=True)
class Certificate:
    """The certificate of a run."""

    run: RunConfig
    seed: int
    devices: int
    compared: list[Compared] = field(default_factory=list)
    walked: Walked
    smallest: Compared | None = None  # the first of the cases that fail, reduced

    @property
    def holds(self) -> bool:
        return not self.walked.findings and not any(each.differs for each in self.compared)

    @property
    def failure(self) -> str | None:
        """One line that names the smallest case that fails, or what the walker found."""
        if self.smallest is not None:
            return f"differs with {self.smallest.case.said}: {self.smallest.said}"
        if self.walked.findings:
            return f"the step on {self.walked.devices:,} devices: {self.walked.findings[0]}"
        return None


def certify(
    run: RunConfig, *, cases: int, seed: int, devices: int,
    report: Report = lambda *_: None, begins: Callable[[Case], None] = lambda case: None,
) -> Certificate:  # fmt: skip
    """Walk the run's step at full size, and compare `cases` cases of it on virtual devices.
    begins: called with each case before it runs."""
    report(0, cases, "walks the step")
    made = Certificate(run=run, seed=seed, devices=devices, walked=walk_all(run))
    with own_channels():
        for case in cases_of(run, seed=seed, devices=devices):
            if len(made.compared) == cases:
                break
            report(len(made.compared), cases, "compares")
            begins(case)
            compared = compare(case)
            if not compared.refused:
                made.compared.append(compared)
        failed = next((each for each in made.compared if each.differs), None)
        if failed is not None:
            report(cases, cases, "reduces")
            made.smallest = reduced(failed, begins)
    return made


def reduced(failed: Compared, begins: Callable[[Case], None] = lambda case: None) -> Compared:
    """The case with as little as it needs to fail: one thing after another is left out."""
    tried, best, again = 0, failed, True
    while again:
        again = False
        for run in _smaller(best.case.run):
            if tried == _MOST_REDUCTIONS:
                return best
            tried += 1
            case = replace(best.case, run=run, why="reduced")
            begins(case)
            other = compare(case)
            if other.differs and not other.refused and bool(other.error) == bool(failed.error):
                best, again = other, True
                break
    return best


def _smaller(run: RunConfig) -> Iterator[RunConfig]:
    """The run with one axis less, or one feature less."""
    layout, default = run.layout, Layout()
    first = [axis.name for axis in MESH if layout.sizes[axis.name] > 1]
    changes: list[dict[str, Any]] = [{axis: 1} for axis in first]
    changes += [{axis: 2} for axis in first if layout.sizes[axis] > 2]
    for name in features(run).keys() - set(first):
        change = {name: getattr(default, name)}
        changes.append(
            change | {"virtual": 1, "stage_layers": "even"} if name == "schedule" else change
        )
    changes.append({"microbatch": run.global_batch, **dict.fromkeys(first, 1)})
    for change in changes:
        try:
            yield replace(run, layout=replace(layout, **change))
        except UserError:
            continue
