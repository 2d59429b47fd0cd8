"""The makers of schedules, by name. Each file here has `MAKERS`, name -> `Maker`, with sources and
closed forms: a new schedule is one file. A maker gives the tick in which every op runs, or the
order of ops; `Schedule` checks that and derives the rest.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace

import numpy as np

from mtx.errors import UserError, require_kind, unknown_name
from mtx.schedules.orders import B, F, Orders
from mtx.schedules.schedule import Schedule
from mtx.schedules.shape import WEIGHT_SHARE, Maker, Shape, Times


def find_makers() -> dict[str, Maker]:
    """The makers of all files, in order: those for lock-step first, then those for whole sequences,
    then those of fewer chunks. UserError if a file has none, or two have the same name."""
    found, files = {}, {}
    for file in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        module = importlib.import_module(f"{__name__}.{file}")
        if not hasattr(module, "MAKERS"):
            raise UserError(f"{module.__file__} has no MAKERS; give it a table of its schedules")
        for name, each in module.MAKERS.items():
            if name in found:
                raise UserError(
                    f"schedule {name!r} is both in {files[name]} and in {module.__file__}; use "
                    "another name in one of them"
                )
            found[name], files[name] = each, module.__file__
    for name, each in found.items():
        if not (isinstance(each, Maker) and each.make.__doc__):
            raise UserError(
                f"schedule {name!r} of {files[name]} must be a Maker whose `make` has a docstring: "
                "its first paragraph is the line in `mtx schedule --help`"
            )
    order = sorted(found.items(), key=lambda row: (
        not row[1].lockstep, row[1].sliced, row[1].default_virtual
    ))  # fmt: skip
    return dict(order)


MAKERS = find_makers()


def maker(name: str) -> Maker:
    """The maker of that name; UserError with the nearest name if there is none."""
    require_kind("schedule", name, str, "its name, such as '1f1b'")
    if name not in MAKERS:
        raise unknown_name("schedule", name, MAKERS)
    return MAKERS[name]


def check_virtual(name: str, virtual: int, slices: int) -> None:
    """UserError if there is no such schedule, or not with that many chunks or slices."""
    known = maker(name)
    if known.virtual is not None and virtual != known.virtual:
        raise UserError(
            f"schedule {name!r} is made for virtual={known.virtual}, not virtual={virtual}; use "
            f"virtual={known.virtual}, or another schedule"
        )
    if slices != 1 and not known.sliced:
        sliced = [other for other, row in MAKERS.items() if row.sliced]
        raise UserError(
            f"schedule {name!r} does not cut sequences: use slices=1, not slices={slices}, or "
            f"one of {', '.join(sliced)}"
        )


def make(
    name: str,
    *,
    microbatches: int,
    stages: int,
    virtual: int | None = None,
    slices: int | None = None,
    times: Times | None = None,
    memory_limit: float | None = None,
    weight_share: float = WEIGHT_SHARE,
) -> Schedule:
    """The schedule of that name. virtual, slices: None for what the maker needs or prefers.

    UserError if there is no such name, or if it does not work with the number of chunks.
    """
    known = maker(name)
    virtual = (known.virtual or known.default_virtual) if virtual is None else virtual
    slices = known.default_slices if slices is None else slices
    check_virtual(name, virtual, slices)
    shape = Shape(
        microbatches=microbatches, stages=stages, virtual=virtual, slices=slices,
        times=times or Times(), memory_limit=memory_limit, weight_share=weight_share,
    )  # fmt: skip
    made = known.make(shape)
    if not isinstance(made, Schedule) or made.virtual != virtual:
        what = f"a table of virtual={made.virtual}" if isinstance(made, Schedule) else repr(made)
        raise UserError(
            f"schedule {name!r}: its maker gave {what} for virtual={virtual}; return a Schedule, "
            "and say Maker(virtual=...) where it knows one number of chunks only"
        )
    return replace(made, name=name)


def forward_table(virtual_stages: np.ndarray, microbatches: int) -> Schedule:
    """A table for F alone, with whole sequences: for evaluation on the stages of `virtual_stages`
    [C, P].

    Microbatches go in groups of P through one chunk after another, in model order; if virtual
    stages are looped, that is the order of interleaved 1F1B. All Bs come after, in reverse.
    """
    stages = virtual_stages.shape[1]
    groups = [range(g, min(g + stages, microbatches)) for g in range(0, microbatches, stages)]
    lists = []
    for stage in range(stages):
        chunks = np.argsort(virtual_stages[:, stage]).tolist()
        ops = [(i, c) for group in groups for c in chunks for i in group]
        lists.append([(F, *op) for op in ops] + [(B, *op) for op in reversed(ops)])
    return Schedule.from_orders("forward", Orders.from_lists(lists), virtual_stages=virtual_stages)
