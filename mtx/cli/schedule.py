"""`mtx schedule`: one schedule's table, cost, files and pictures, or all of them compared."""

from __future__ import annotations

import shutil
import sys
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from mtx.cli.options import File, Flag, Line, part, read_line
from mtx.cli.output import check_picture, say, table
from mtx.config import Layout
from mtx.errors import UserError
from mtx.schedules.shape import WEIGHT_SHARE
from mtx.sizes import Sequences

if TYPE_CHECKING:
    from mtx.schedules.schedule import Schedule
    from mtx.schedules.search import Candidate
    from mtx.schedules.shape import Times
    from mtx.schedules.simulate import Simulation

_MOST_PRINTED = 2**18  # cells of a timeline
_STAGES, _MICROBATCHES = 4, 8  # where nothing is said
_VIRTUALS = (1, 2)  # that compare and auto try, where nothing is said


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    microbatches: Sequences | None = None  # m, of one replica and step; 8 where not given
    # of a microbatch on one stage, and of a send, in any unit; B lasts B + W where W is not split
    times: Annotated[str, tyro.conf.arg(metavar="F,B,W,COMM")] = "1,1,1,0"
    # of one stage, in what one microbatch keeps there: for schedules that fill it, auto, compare
    memory_limit: Annotated[float | None, tyro.conf.arg(metavar="STASHES")] = None
    weight_share: float = WEIGHT_SHARE  # of a stash: what stays of it from B to W, where split
    # a second schedule, in the same picture and trace
    beside: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE")] = None
    model: Literal["lockstep", "asynchronous"] = "lockstep"  # of timeline, picture and trace
    csv: File = None  # the table in the notation of torch.distributed.pipelining; - for stdout
    text: File = None  # the table as text; - for stdout
    orders: Flag = False  # csv and text hold what a program per stage runs, instead of ticks
    draw: File = None  # timeline and memory as a picture: .svg, .png or .pdf
    trace: File = None  # the timeline for ui.perfetto.dev
    json: Flag = False  # numbers for programs, instead of text
    layout: object = field(default_factory=part(Layout, "pipe", "virtual", "slices"))


def schedule_command(arguments: list[str]) -> None:
    """Show a pipeline schedule: what each stage does in every tick, its cost and its memory.

    NAME is one of those below; a .csv, .txt or .json file with a table; auto, for the best within
    the memory limit; or compare, for all of them beside one another. 1f1b where none is named. Of
    the layout, pipe is 4 where it is not given, virtual and slices what the schedule needs or
    prefers; mtx train --layout.schedule runs it.
    """
    usage = "mtx schedule [NAME|FILE|auto|compare]"
    line = read_line(arguments, ScheduleOptions(), usage, schedule_command, more=_names)
    options, asked, times = line.options, _Asked(line), _times(line.options.times)
    if line.name == "compare":
        _compare(options, asked, times)
        return
    _check_outputs(options)
    names = [line.name or "1f1b"] + ([options.beside] if options.beside else [])
    made = [_schedule(name, options, asked, times) for name in names]
    schedules = [schedule for schedule, _ in made]
    written = _write(schedules, options, times)
    if "-" in (options.csv, options.text):
        return
    share = options.weight_share
    runs = [_simulations(schedule, times, share) for schedule in schedules]
    if options.json:
        records = [_record(schedule, pair) for schedule, pair in zip(schedules, runs, strict=True)]
        say(records if options.beside else records[0], [], as_json=True)
        return
    for (schedule, note), pair in zip(made, runs, strict=True):
        if schedule.stages * schedule.ticks <= _MOST_PRINTED:
            _print_timeline(pair[0 if options.model == "lockstep" else 1], bool(written))
        else:
            print(f"{schedule.ticks:,} ticks are too many to print: --text FILE has them")
        print("\n".join([*_facts(schedule, pair, options.memory_limit), *note]))
    print("".join(f"{f'wrote {what}':<15}{path}\n" for what, path in written), end="")


# --- what is asked for ----------------------------------------------------------------------------


class _Asked:
    """The sizes that a command line gives, and None for the others."""

    def __init__(self, line: Line[ScheduleOptions]):
        layout = line.changes("layout")
        self.stages = layout.get("pipe")
        self.virtual, self.slices = layout.get("virtual"), layout.get("slices")
        self.microbatches = line.options.microbatches

    @property
    def virtuals(self) -> tuple[int, ...]:
        """To be tried."""
        return _VIRTUALS if self.virtual is None else (self.virtual,)


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
    check_picture(options.draw)
    if [options.csv, options.text].count("-") + options.json > 1:
        raise UserError("only one of --csv -, --text - and --json can be printed at a time")
    if options.beside and (options.csv or options.text):
        raise UserError("--csv and --text write one schedule: leave out --beside")
    if options.orders and not (options.csv or options.text):
        raise UserError("--orders says what --csv or --text hold: give one of them")


def _schedule(
    name: str, options: ScheduleOptions, asked: _Asked, times: Times
) -> tuple[Schedule, list[str]]:
    """The schedule of that name or file, and what is to be said of its choice."""
    from mtx.schedules.formats import SUFFIXES, read_schedule
    from mtx.schedules.makers import make
    from mtx.schedules.search import choose

    if name.lower().endswith(SUFFIXES):
        schedule = read_schedule(name)
        for size, value in vars(asked).items():
            if value not in (None, has := getattr(schedule, size)):
                raise UserError(f"{name} is a table with {size}={has}, not {size}={value}")
        return schedule, []
    stages, microbatches = asked.stages or _STAGES, asked.microbatches or _MICROBATCHES
    if name == "auto":
        best = choose(
            microbatches, stages, virtuals=asked.virtuals, slices=(asked.slices or 1,),
            times=times, memory_limit=options.memory_limit, weight_share=options.weight_share,
        )  # fmt: skip
        chosen = f"chosen         {best.label}: {best.reason}"
        return best.schedule, [*_published(best.schedule, times), chosen]
    schedule = make(
        name.replace("-", "_"), microbatches=microbatches, stages=stages, virtual=asked.virtual,
        slices=asked.slices, times=times, memory_limit=options.memory_limit,
        weight_share=options.weight_share,
    )  # fmt: skip
    return schedule, _published(schedule, times)


def _slices(asked: _Asked) -> tuple[int, ...]:
    from mtx.schedules.makers import MAKERS

    if asked.slices is not None:
        return (asked.slices,)
    return tuple(sorted({maker.default_slices for maker in MAKERS.values() if maker.sliced}))


# --- files ----------------------------------------------------------------------------------------


def _write(
    schedules: list[Schedule], options: ScheduleOptions, times: Times
) -> list[tuple[str, str]]:
    """(what, file) of all that was written."""
    from mtx.schedules.formats import to_csv, to_text
    from mtx.schedules.simulate import simulate
    from mtx.view.files import replacing

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


def _compare(options: ScheduleOptions, asked: _Asked, times: Times) -> None:
    from mtx.schedules.search import search_schedules

    for name in ("csv", "text", "draw", "trace", "beside", "orders"):
        if getattr(options, name):
            raise UserError(f"--{name} goes with one schedule: name it instead of compare")
    if options.model != ScheduleOptions.model:
        raise UserError(f"compare shows both models: leave out --model {options.model}")
    stages, microbatches = asked.stages or _STAGES, asked.microbatches or _MICROBATCHES
    found = search_schedules(
        microbatches, stages, virtuals=asked.virtuals, slices=_slices(asked), times=times,
        memory_limit=options.memory_limit, weight_share=options.weight_share,
    )  # fmt: skip
    made = [candidate for candidate in found if candidate.schedule is not None]
    if options.json:
        records = [_compared(candidate, times, options.weight_share) for candidate in made]
        say(records, [], as_json=True)
        return
    print("\n".join(_table(made, microbatches * times.work)))
    refused = [candidate for candidate in found if candidate.schedule is None]
    if refused:
        print("\nnot for these numbers:")
        print("\n".join(f"  {candidate.name}: {candidate.reason}" for candidate in refused))
    if not (made and made[0].fits):
        raise UserError(_nothing_fits(made, options.memory_limit))
    print(f"\nbest in lock-step: {made[0].label}: {made[0].reason}")


def _compared(candidate: Candidate, times: Times, weight_share: float) -> dict[str, Any]:
    record = _record(candidate.schedule, _simulations(candidate.schedule, times, weight_share))
    memory = {"memory": candidate.memory, "fits": candidate.fits, "reason": candidate.reason}
    return {**record, "schedule": candidate.name, **memory}


def _nothing_fits(made: list[Candidate], limit: float | None) -> str:
    if not made:
        return "no schedule goes with these numbers"
    least = min(made, key=lambda candidate: candidate.memory)
    return f"no schedule fits memory_limit={limit:g}; {least.label} keeps least, {least.memory:.4g}"


def _table(made: list[Candidate], ideal: float) -> list[str]:
    head = ("schedule", "ticks", "in flight", "slots", "stashes", "lock-step", "bubble",
            "asynchronous", "bubble", "")  # fmt: skip
    rows = [head]
    for candidate in made:
        schedule = candidate.schedule
        rows.append((
            candidate.label, schedule.ticks, schedule.in_flight.max(), schedule.slots,
            f"{candidate.memory:.4g}", f"{candidate.lockstep:.5g}",
            f"{candidate.lockstep / ideal - 1:.2%}", f"{candidate.asynchronous:.5g}",
            f"{candidate.asynchronous / ideal - 1:.2%}", candidate.reason,
        ))  # fmt: skip
    return table(rows, "<>>>>>>>><")


def _names() -> str:
    """Every schedule's name, with a line of its own and its source."""
    from mtx.schedules.makers import MAKERS

    lines = ["", "schedules:"]
    for name, maker in MAKERS.items():
        first = " ".join((maker.make.__doc__ or "").split("\n\n")[0].split())
        about = textwrap.shorten(first, 100, placeholder=" ...")
        needs = f"; virtual={maker.virtual}" if maker.virtual else ""
        lines += [f"  {name:<18}{about}", f"  {'':<18}{maker.source}{needs}"]
    return "\n".join(lines)
