"""`mtx schedule`: one schedule's table, cost, files and pictures, or all of them compared."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from mtx.cli.options import parse, split_name
from mtx.errors import UserError
from mtx.schedules.shape import WEIGHT_SHARE
from mtx.sizes import Layers, Sequences, Slices, Stages

if TYPE_CHECKING:
    from mtx.schedules.schedule import Schedule
    from mtx.schedules.search import Candidate
    from mtx.schedules.shape import Times
    from mtx.schedules.simulate import Simulation

_INT = tyro.conf.arg(metavar="INT")
_Stages = Annotated[Stages | None, _INT]
_Microbatches = Annotated[Sequences | None, _INT]
_Virtual = Annotated[Layers | None, _INT]
_Slices = Annotated[Slices | None, _INT]
_File = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
_Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]

_MOST_PRINTED = 2**18  # cells of a timeline
_STAGES, _MICROBATCHES = 4, 8  # where nothing is said
FOR_COMPARISON = "made for a program per stage: here for comparison, and not for auto"
_VIRTUALS = (1, 2)  # that compare and auto try, where nothing is said


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    stages: _Stages = None  # p; 4 where not given
    microbatches: _Microbatches = None  # m, of one replica and step; 8 where not given
    virtual: _Virtual = None  # v, model chunks per stage; else what the schedule needs or prefers
    slices: _Slices = None  # of each microbatch's sequences, where the schedule cuts them
    # of a microbatch on one stage, and of a send, in any unit; B lasts B + W where W is not split
    times: Annotated[str, tyro.conf.arg(metavar="F,B,W,COMM")] = "1,1,1,0"
    # of one stage, in what one microbatch keeps there: for schedules that fill it, auto, compare
    memory_limit: Annotated[float | None, tyro.conf.arg(metavar="STASHES")] = None
    weight_share: float = WEIGHT_SHARE  # of a stash: what stays of it from B to W, where split
    # a second schedule, in the same picture and trace
    beside: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE")] = None
    model: Literal["lockstep", "asynchronous"] = "lockstep"  # of timeline, picture and trace
    csv: _File = None  # the table in the notation of torch.distributed.pipelining; - for stdout
    text: _File = None  # the table as text; - for stdout
    orders: _Flag = False  # csv and text hold what a program per stage runs, instead of ticks
    draw: _File = None  # timeline and memory as a picture: .svg, .png or .pdf
    trace: _File = None  # the timeline for ui.perfetto.dev
    json: _Flag = False  # numbers for programs, instead of text


def schedule_command(arguments: list[str]) -> None:
    """Show a pipeline schedule: what each stage does in every tick, its cost and its memory.

    NAME is one of those below; a .csv, .txt or .json file with a table; auto, for the best within
    the memory limit; or compare, for all of them beside one another. 1f1b where none is named.
    """
    name, rest = split_name(arguments)
    prog = "mtx schedule [NAME|FILE|auto|compare]"
    options = parse(rest, ScheduleOptions(), prog=prog, about=schedule_command, more=_names)
    times = _times(options.times)
    if name == "compare":
        _compare(options, times)
        return
    _check_outputs(options)
    names = [name or "1f1b"] + ([options.beside] if options.beside else [])
    made = [_schedule(name, options, times) for name in names]
    schedules = [schedule for schedule, _ in made]
    written = _write(schedules, options, times)
    if "-" in (options.csv, options.text):
        return
    share = options.weight_share
    runs = [_simulations(schedule, times, share) for schedule in schedules]
    if options.json:
        records = [_record(schedule, pair) for schedule, pair in zip(schedules, runs, strict=True)]
        print(json.dumps(records if options.beside else records[0], indent=1))
        return
    for (schedule, note), pair in zip(made, runs, strict=True):
        if schedule.stages * schedule.ticks <= _MOST_PRINTED:
            _print_timeline(pair[0 if options.model == "lockstep" else 1], bool(written))
        else:
            print(f"{schedule.ticks:,} ticks are too many to print: --text FILE has them")
        print("\n".join([*_facts(schedule, pair, options.memory_limit), *note]))
    print("".join(f"{f'wrote {what}':<15}{path}\n" for what, path in written), end="")


# --- what is asked for ----------------------------------------------------------------------------


def _times(text: str) -> Times:
    from mtx.schedules.shape import Times

    try:
        forward, backward, weight, comm = (float(part) for part in text.split(","))
    except ValueError:
        what = f"--times takes four numbers, F,B,W,comm such as 1,1,1,0, not {text!r}"
        raise UserError(what) from None
    return Times(forward=forward, backward=backward, weight=weight, comm=comm)


def _check_outputs(options: ScheduleOptions) -> None:
    """Before anything is computed or written."""
    from mtx.view.picture import check_suffix

    if options.draw:
        check_suffix(options.draw)
    if [options.csv, options.text].count("-") + options.json > 1:
        raise UserError("only one of --csv -, --text - and --json can be printed at a time")
    if options.beside and (options.csv or options.text):
        raise UserError("--csv and --text write one schedule: leave out --beside")
    if options.orders and not (options.csv or options.text):
        raise UserError("--orders says what --csv or --text hold: give one of them")


def _schedule(name: str, options: ScheduleOptions, times: Times) -> tuple[Schedule, list[str]]:
    """The schedule of that name or file, and what is to be said of its choice."""
    from mtx.schedules.formats import SUFFIXES, read_schedule
    from mtx.schedules.makers import make
    from mtx.schedules.search import choose

    if name.lower().endswith(SUFFIXES):
        schedule = read_schedule(name)
        for field in ("stages", "microbatches", "virtual", "slices"):
            asked, has = getattr(options, field), getattr(schedule, field)
            if asked not in (None, has):
                raise UserError(f"{name} is a table with {field}={has}, not {field}={asked}")
        return schedule, []
    if name == "auto":
        best = choose(_search(options, times, slices=(options.slices or 1,)))
        chosen = f"chosen         {best.label}: {best.reason}"
        return best.schedule, [*_published(best.schedule, times), chosen]
    stages, microbatches = _sizes(options)
    schedule = make(
        name.replace("-", "_"), microbatches=microbatches, stages=stages, virtual=options.virtual,
        slices=options.slices, times=times, memory_limit=options.memory_limit,
        weight_share=options.weight_share,
    )  # fmt: skip
    return schedule, _published(schedule, times)


def _sizes(options: ScheduleOptions) -> tuple[int, int]:
    return options.stages or _STAGES, options.microbatches or _MICROBATCHES


def _virtuals(options: ScheduleOptions) -> tuple[int, ...]:
    return _VIRTUALS if options.virtual is None else (options.virtual,)


def _search(
    options: ScheduleOptions, times: Times, *, slices: tuple[int, ...]
) -> tuple[Candidate, ...]:
    from mtx.schedules.search import search_schedules

    stages, microbatches = _sizes(options)
    return search_schedules(
        microbatches, stages, virtuals=_virtuals(options), slices=slices, times=times,
        memory_limit=options.memory_limit, weight_share=options.weight_share,
    )  # fmt: skip


def _slices(options: ScheduleOptions) -> tuple[int, ...]:
    from mtx.schedules.makers import MAKERS

    if options.slices is not None:
        return (options.slices,)
    return tuple(sorted({maker.default_slices for maker in MAKERS.values() if maker.sliced}))


# --- files ----------------------------------------------------------------------------------------


def _write(
    schedules: list[Schedule], options: ScheduleOptions, times: Times
) -> list[tuple[str, str]]:
    """(what, file) of all that was written."""
    from mtx.files import replacing
    from mtx.schedules.formats import to_csv, to_text
    from mtx.schedules.simulate import simulate

    written = []
    for what, path, render in (("csv", options.csv, to_csv), ("text", options.text, to_text)):
        if path == "-":
            print(render(schedules[0], orders=options.orders), end="")
        elif path:
            with replacing(path) as file:
                file.write_text(render(schedules[0], orders=options.orders))
            written.append((what, path))
    if not (options.draw or options.trace):
        return written
    runs = [
        simulate(schedule, times, model=options.model, weight_share=options.weight_share)
        for schedule in schedules
    ]
    if options.draw:
        from mtx.view.timeline import draw_timeline

        with replacing(options.draw) as file:
            draw_timeline(runs, file, memory_limit=options.memory_limit)
        written.append(("picture", options.draw))
    if options.trace:
        from mtx.view.trace import write_trace

        write_trace(runs, options.trace)
        written.append(("trace", options.trace))
    return written


# --- one schedule ---------------------------------------------------------------------------------


def _simulations(
    schedule: Schedule, times: Times, weight_share: float
) -> tuple[Simulation, Simulation]:
    """In lock-step, and asynchronous."""
    from mtx.schedules.simulate import simulate

    return (
        simulate(schedule, times, model="lockstep", weight_share=weight_share),
        simulate(schedule, times, weight_share=weight_share),
    )


def _record(schedule: Schedule, runs: tuple[Simulation, Simulation]) -> dict[str, Any]:
    """What --json gives of one schedule."""
    record = {
        "schedule": schedule.name, "stages": schedule.stages,
        "microbatches": schedule.microbatches, "virtual": schedule.virtual,
        "slices": schedule.slices, "ticks": schedule.ticks,
        "in_flight": schedule.in_flight.tolist(), "slots": schedule.slots,
    }  # fmt: skip
    for run in runs:
        record[run.model] = {
            "makespan": run.makespan,
            "ideal": run.ideal,
            "bubble_over_ideal": run.bubble_over_ideal,
            "in_flight": run.in_flight.tolist(),
            "peak_memory": run.peak_memory.tolist(),
        }
    return record


def _print_timeline(run: Simulation, written: bool) -> None:
    """The timeline as text; beside a file that was written only where a terminal has room for all
    of it, and its title elsewhere."""
    from mtx.view.schedule import run_markup, run_text, timeline_markup, timeline_text

    lockstep, terminal = run.model == "lockstep", sys.stdout.isatty()
    size = shutil.get_terminal_size((120, 40))
    shown = run.schedule if lockstep else run
    plain, coloured = (timeline_text, timeline_markup) if lockstep else (run_text, run_markup)
    width = None if lockstep and (written or not terminal) else size.columns
    rows = plain(shown, width).splitlines()
    if written and (len(rows) > size.lines or max(map(len, rows[1:-1])) > size.columns):
        print(rows[0])
    elif terminal:
        from rich.console import Console

        Console(highlight=False, soft_wrap=True).print(coloured(shown, width))
    else:
        print("\n".join(rows))


def _facts(
    schedule: Schedule, runs: tuple[Simulation, Simulation], limit: float | None
) -> list[str]:
    from mtx.schedules.search import WORTH_SAYING

    lockstep, asynchronous = runs
    stages = f"on stages 0 to {schedule.stages - 1}" if schedule.stages > 1 else "on stage 0"
    kinds = "F, one B and one W" if schedule.split else "F and one B"
    facts = [
        f"ticks          {schedule.ticks}, each at most one {kinds}",
        f"lock-step      {_price(lockstep)}, as our program runs the ticks",
        f"asynchronous   {_price(asynchronous)}, as a program per stage runs the orders",
        f"in flight      {_listed(schedule.in_flight)} {stages}: chunks of microbatches between "
        "their F and their B, at most",
        f"slots          {schedule.slots} of the stash, on every stage",
        f"memory         {_listed(lockstep.peak_memory)} {stages}: stashes of a whole stage, "
        "at most",
    ]
    if schedule.split:
        facts[-2] += f", and {schedule.weight_stash.slots} of what waits for W"
    if limit is not None and lockstep.peak_memory.max() > limit:
        facts[-1] += f", over the limit of {limit:g}"
    if 1 - asynchronous.makespan / lockstep.makespan >= WORTH_SAYING:
        facts.append(
            f"remark         lock-step cannot run this table well: {lockstep.makespan:.5g}, "
            f"against {asynchronous.makespan:.5g} by a program per stage"
        )
    return facts


def _price(run: Simulation) -> str:
    from mtx.schedules.simulate import bubble_text

    return f"{run.makespan:.5g}, {bubble_text(run.bubble_over_ideal)} ({run.ideal:.5g})"


def _published(schedule: Schedule, times: Times) -> list[str]:
    """The source, and its closed form of the bubble where there is one."""
    from mtx.schedules.makers import maker
    from mtx.schedules.shape import Shape

    known = maker(schedule.name)
    bubble = known.bubble_over_ideal(Shape(
        microbatches=schedule.microbatches, stages=schedule.stages, virtual=schedule.virtual,
        slices=schedule.slices, times=times,
    ))  # fmt: skip
    form = "" if bubble is None else f"; bubble in closed form {bubble:.2%}"
    return [f"source         {known.source}{form}"]


def _listed(numbers) -> str:
    shown = [f"{number:.4g}" for number in numbers.tolist()]
    if len(shown) > 16:
        shown = [*shown[:4], "...", *shown[-4:]]
    return " ".join(shown)


# --- all schedules --------------------------------------------------------------------------------


def _compare(options: ScheduleOptions, times: Times) -> None:
    from mtx.schedules.search import choose

    for field in ("csv", "text", "draw", "trace", "beside", "orders"):
        if getattr(options, field):
            raise UserError(f"--{field} goes with one schedule: name it instead of compare")
    if options.model != ScheduleOptions.model:
        raise UserError(f"compare shows both models: leave out --model {options.model}")
    found = _search(options, times, slices=_slices(options))
    made = [candidate for candidate in found if candidate.schedule is not None]
    if options.json:
        records = [_compared(candidate, times, options.weight_share) for candidate in made]
        print(json.dumps(records, indent=1))
        return
    print("\n".join(_table(made, _sizes(options)[1] * times.work)))
    refused = [candidate for candidate in found if candidate.schedule is None]
    if refused:
        print("\nnot for these numbers:")
        print("\n".join(f"  {candidate.name}: {candidate.reason}" for candidate in refused))
    best = choose(found)
    print(f"\nbest in lock-step: {best.label}: {best.reason}")
    if any(candidate.for_comparison for candidate in made):
        print(f"*: {FOR_COMPARISON}")


def _compared(candidate: Candidate, times: Times, weight_share: float) -> dict[str, Any]:
    record = _record(candidate.schedule, _simulations(candidate.schedule, times, weight_share))
    return {
        **record, "schedule": candidate.name, "for_comparison": candidate.for_comparison,
        "memory": candidate.memory, "fits": candidate.fits, "reason": candidate.reason,
    }  # fmt: skip


def _table(made: list[Candidate], ideal: float) -> list[str]:
    head = ("schedule", "ticks", "in flight", "slots", "stashes", "lock-step", "bubble",
            "asynchronous", "bubble", "")  # fmt: skip
    rows = [head]
    for candidate in made:
        schedule = candidate.schedule
        rows.append((
            candidate.label + " *" * candidate.for_comparison, str(schedule.ticks),
            str(schedule.in_flight.max()), str(schedule.slots),
            f"{candidate.memory:.4g}", f"{candidate.lockstep:.5g}",
            f"{candidate.lockstep / ideal - 1:.2%}", f"{candidate.asynchronous:.5g}",
            f"{candidate.asynchronous / ideal - 1:.2%}", candidate.reason,
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([
            row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:-1], widths[1:-1])),
            row[-1],
        ]).rstrip()
        for row in rows
    ]  # fmt: skip


def _names() -> str:
    """Every schedule's name, with a line of its own and its source."""
    from mtx.schedules.makers import MAKERS

    lines, groups = [], {True: "schedules:", False: f"schedules {FOR_COMPARISON}:"}
    for name, maker in MAKERS.items():
        if title := groups.pop(maker.lockstep, None):
            lines += ["", title]
        first = " ".join((maker.make.__doc__ or "").split("\n\n")[0].split())
        about = textwrap.shorten(first, 100, placeholder=" ...")
        needs = f"; virtual={maker.virtual}" if maker.virtual else ""
        lines += [f"  {name:<18}{about}", f"  {'':<18}{maker.source}{needs}"]
    return "\n".join(lines)
