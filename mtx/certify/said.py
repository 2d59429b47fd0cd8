"""A certificate, and the outcome for mutants, in words and as numbers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import textwrap
from collections.abc import Sequence
from typing import Any

import jax

from mtx import __version__
from mtx.certify.certificate import Certificate
from mtx.certify.compare import FLOOR, TOLERANCES, Compared
from mtx.certify.covered import not_covered
from mtx.certify.mutants import Tried
from mtx.certify.reference import STEPS
from mtx.config import RunConfig, to_dict

_COLUMNS = {name: max(len(name), 5) for name in TOLERANCES}


def config_hash(run: RunConfig) -> str:
    """A hash of all that decides a step's values; not of the run's folder, nor of its data."""
    parts = {name: to_dict(getattr(run, name)) for name in ("model", "layout", "optimizer")}
    parts |= {"global_batch": run.global_batch, "seed": run.seed, "steps": run.steps}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    return {"mtx": __version__, "jax": jax.__version__, "python": platform.python_version()}


# -- lines -----------------------------------------------------------------------------------------


def lines(made: Certificate, *, width: int) -> list[str]:
    """The table of cases, then the certificate, for a terminal of that width; last, what fails."""
    found = [*_table(made, width), "", *_summary(made, width)] if made.compared else []
    found = found or _summary(made, width)
    return [*found, "", made.failure] if made.failure else found


def _table(made: Certificate, width: int) -> list[str]:
    room = width - 6 - sum(size + 2 for size in _COLUMNS.values())
    head = "".join(f"  {name:>{size}}" for name, size in _COLUMNS.items())
    rows = [f"case  {'layout':<{room}}{head}"]
    for each in made.compared:
        why = f"{each.case.why}: " if each.case.why else ""
        layout = textwrap.wrap(why + each.case.said, room)
        values = "".join(
            f"  {f'{each.differences[name][0]:.0e}' if each.differences else '':>{size}}"
            for name, size in _COLUMNS.items()
        )
        rows.append(f"{each.case.number:>4}  {layout[0]:<{room}}{values}".rstrip())
        rows += [f"      {line}" for line in layout[1:]]
        if each.differs:
            rows += _indented(f"differs: {each.said}", width, 6)
        elif each.undecided:
            rows += _indented(f"undecided: {rounding_said(each)}", width, 6)
    return rows


def rounding_said(compared: Compared) -> str:
    """The quantities beyond their tolerance in an undecided case, in words."""
    return ", ".join(
        f"{name} by {compared.differences[name][0]:.0e}, where parameters moved to neighbouring "
        f"numbers move one device's by {compared.rounding[name]:.0e}"
        for name in compared.beyond
    )


def _summary(made: Certificate, width: int) -> list[str]:
    walked = made.walked
    own = " x ".join(f"{a} {size}" for a, size in made.run.layout.sizes.items() if size > 1)
    differing = sum(each.differs for each in made.compared)
    undecided = sum(each.undecided for each in made.compared)
    largest = ", ".join(f"{name} {value:.0e}" for name, value in TOLERANCES.items())
    facts = {
        "cases": f"{len(made.compared)} of seed {made.seed} on {made.devices} virtual devices, "
        f"against one: {f'{differing} differ' if differing else 'no difference'}"
        + (f", {undecided} of them undecided by rounding" if undecided else ""),
        "allowed": f"{largest}: losses and norms of {STEPS} steps, gradients of the first, "
        f"parameters and moments after the last; relative, of a leaf's largest, which counts as at "
        f"least {FLOOR:.0e} of the largest of all",
        "equations": f"{walked.equations:,} of the step at full size, on {walked.devices:,} "
        f"{f'devices, {own}' if own else 'device'}: "
        + (f"{len(walked.findings)} findings" if walked.findings else "nothing found"),
        "run": f"config {config_hash(made.run)}; "
        + ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    found = []
    for name, text in facts.items():
        found += textwrap.wrap(f"{name:<11}{text}", width, subsequent_indent=" " * 11)
        if name == "equations":
            found += [line for each in walked.findings for line in _indented(each, width, 11)]
    for number, each in enumerate(not_covered(made)):
        name = "" if number else "not covered"
        found += textwrap.wrap(f"{name:<11} {each}", width, subsequent_indent=" " * 14)
    return found


def _indented(text: Any, width: int, by: int) -> list[str]:
    return textwrap.wrap(
        str(text), width, initial_indent=" " * by, subsequent_indent=" " * (by + 2)
    )


def mutant_lines(tried: Sequence[Tried], *, width: int) -> list[str]:
    """For each mutant what it is, what caught it, and what that said."""
    size = max(len(each.mutant.name) for each in tried)
    found = [f"{'mutant':<{size}}  caught by"]
    for each in tried:
        found.append(f"{each.mutant.name:<{size}}  {each.by or 'nobody'}")
        for text in (each.mutant.what, each.said):
            found += _indented(text, width, 4) if text else []
    missed = [each.mutant.name for each in tried if not each.caught]
    by = {by: sum(each.by == by for each in tried) for by in ("walker", "run")}
    found += ["", f"{len(tried)} mutants: {by['walker']} caught by the walker, {by['run']} by runs"]
    return found + ([f"not caught: {', '.join(missed)}"] if missed else [])


# -- numbers ---------------------------------------------------------------------------------------


def numbers(made: Certificate) -> dict[str, Any]:
    """A certificate as plain data, ready for JSON."""
    walked = made.walked
    own = dataclasses.asdict(walked)
    own |= {"findings": list(map(str, walked.findings)), "unknown": sorted(walked.unknown)}
    return {
        "holds": made.holds, "failure": made.failure,
        "seed": made.seed, "devices": made.devices, "steps": STEPS,
        "tolerances": TOLERANCES, "floor": FLOOR,
        "versions": versions(), "config_hash": config_hash(made.run), "run": to_dict(made.run),
        "walked": own,
        "cases": [_numbers_of(each) for each in made.compared],
        "smallest": made.smallest and _numbers_of(made.smallest),
        "not_covered": not_covered(made),
    }  # fmt: skip


def _numbers_of(compared: Compared) -> dict[str, Any]:
    run = compared.case.run
    return {
        "number": compared.case.number, "why": compared.case.why, "holds": compared.holds,
        "undecided": compared.undecided,
        "model": to_dict(run.model), "layout": to_dict(run.layout),
        "global_batch": run.global_batch,
        "differences": {
            name: {"largest": value, "leaf": leaf}
            for name, (value, leaf) in compared.differences.items()
        },
        "rounding": compared.rounding, "findings": list(map(str, compared.findings)),
        "error": compared.error,
    }  # fmt: skip


def mutant_numbers(tried: Sequence[Tried]) -> dict[str, Any]:
    """The outcome for mutants as plain data, ready for JSON."""
    mutants = [
        {"name": each.mutant.name, "what": each.mutant.what, "caught_by": each.by,
         "said": each.said}
        for each in tried
    ]  # fmt: skip
    return {"holds": all(each.caught for each in tried), "versions": versions(), "mutants": mutants}
