"""`mtx schedule`: one schedule's table, cost, files and pictures, or a comparison of all."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, get_args

import tyro
from rich.console import Console

from mtx.cli.options import File, Flag, Line, command, part
from mtx.cli.output import check_distinct, check_picture, facts, say, table, write_text
from mtx.config import Layout
from mtx.errors import UserError
from mtx.files import replacing
from mtx.schedules.formats import SUFFIXES, read_schedule, to_csv, to_text
from mtx.schedules.makers import MAKERS, make, maker
from mtx.schedules.schedule import Schedule
from mtx.schedules.search import WORTH_SAYING, Candidate, choose, search_schedules
from mtx.schedules.shape import WEIGHT_SHARE, Shape, Times
from mtx.schedules.simulate import Model, Simulation, bubble_text, simulate
from mtx.sizes import Sequences
from mtx.view.schedule import timeline_in_colours

_MOST_PRINTED = 2**18  # cells of a timeline
_STAGES, _MICROBATCHES = 4, 8  # if not given
FOR_COMPARISON = "made for a program per stage: here for comparison, and not for auto"
_VIRTUALS = (1, 2)  # that compare and auto try, if not given
Runs = dict[str, Simulation]  # by the cost model


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    microbatches: Sequences | None = None  # m, per replica and step; by default 8
    # of a microbatch on one stage, and of a send, in any unit; B lasts B + W if W is not split
    times: Annotated[str, tyro.conf.arg(metavar="F,B,W,COMM")] = "1,1,1,0"
    # per stage, in stashes of one microbatch there; for schedules that fill it, auto, compare
    memory_limit: Annotated[float | None, tyro.conf.arg(metavar="STASHES")] = None
    weight_share: float = WEIGHT_SHARE  # fraction of a stash that stays from B to W, if split
    # a second schedule, for the same picture and trace
    beside: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE")] = None
    model: Model = "lockstep"  # cost model of timeline, picture and trace
    csv: File = None  # write the table in torch.distributed.pipelining's notation; - for stdout
    text: File = None  # write the table as text; - for stdout
    orders: Flag = False  # csv and text hold what a program per stage runs, instead of the ticks
    draw: File = None  # draw timeline and memory as a picture: .svg, .png or .pdf
    trace: File = None  # write the timeline for ui.perfetto.dev
    json: Flag = False  # print numbers as JSON instead of text
    layout: object = field(default_factory=part(Layout, "pipe", "virtual", "slices"))


def _names() -> str:
    """Every schedule's name, with a line about it and its source."""
    lines, groups = [], {True: "schedules:", False: f"schedules {FOR_COMPARISON}:"}
    for name, each in MAKERS.items():
        if title := groups.pop(each.lockstep, None):
            lines += ["", title]
        first = " ".join((each.make.__doc__ or "").split("\n\n")[0].split())
        about = textwrap.shorten(first, 100, placeholder=" ...")
        needs = f"; virtual={each.virtual}" if each.virtual else ""
        lines += [f"  {name:<18}{about}", f"  {'':<18}{each.source}{needs}"]
    return "\n".join(lines)


@command("mtx schedule [NAME|FILE|auto|compare]", ScheduleOptions, more=_names)
def schedule_command(line: Line[ScheduleOptions]) -> None:
    """Show a pipeline schedule: what each stage does in every tick, its cost and its memory.

    NAME is one of those below (by default 1f1b); FILE is a .csv, .txt or .json file with a table;
    auto takes the best within the memory limit; compare shows all of them side by side. In the
    layout, pipe is 4 by default, and virtual and slices are what the schedule needs or prefers; mtx
    train --layout.schedule runs it.
    """
    asked, options = _Asked(line), line.options
    if line.name == "compare":
        _compare(asked)
        return
    _check_outputs(options)
    names = [line.name or "1f1b"] + ([options.beside] if options.beside else [])
    made = [asked.schedule(name) for name in names]
    runs = [asked.runs(schedule) for schedule, _ in made]
    written = _write([each[options.model] for each in runs], options)
    if "-" in (options.csv, options.text):
        return
    if options.json:
        records = [_record(each) for each in runs]
        say(records if options.beside else records[0], [], as_json=True)
        return
    for (schedule, notes), each in zip(made, runs, strict=True):
        if schedule.stages * schedule.ticks <= _MOST_PRINTED:
            _print_timeline(each[options.model], bool(written))
        else:
            print(f"{schedule.ticks:,} ticks are too many to print: --text FILE has them")
        print("\n".join(facts(_facts(each, options.memory_limit) | notes, _WIDTH)))
    print("".join(f"{line}\n" for line in facts(written, _WIDTH)), end="")


_WIDTH = 15  # characters of a fact's name


class _Asked:
    """What a command line asks for: the sizes that it gives (None for others), and prices."""

    def __init__(self, line: Line[ScheduleOptions]):
        self.options, layout = line.options, line.changes("layout")
        self.sizes = {
            "stages": layout.get("pipe"), "microbatches": line.options.microbatches,
            "virtual": layout.get("virtual"), "slices": layout.get("slices"),
        }  # fmt: skip
        self.stages = layout.get("pipe", _STAGES)
        self.microbatches = line.options.microbatches or _MICROBATCHES
        self.times = _times(line.options.times)
        self.prices: dict[str, Any] = {
            "times": self.times, "memory_limit": line.options.memory_limit,
            "weight_share": line.options.weight_share,
        }  # fmt: skip

    def search(self, *, slices: tuple[int, ...]) -> tuple[Candidate, ...]:
        virtuals = (self.sizes["virtual"],) if self.sizes["virtual"] else _VIRTUALS
        return search_schedules(
            self.microbatches, self.stages, virtuals=virtuals, slices=slices, **self.prices
        )

    def schedule(self, name: str) -> tuple[Schedule, dict[str, str]]:
        """The schedule of that name or file, and what to say about its choice."""
        if name.lower().endswith(SUFFIXES):
            schedule = read_schedule(name)
            for size, value in self.sizes.items():
                if value not in (None, has := getattr(schedule, size)):
                    raise UserError(f"{name} is a table with {size}={has}, not {size}={value}")
            return schedule, {}
        if name == "auto":
            best = choose(self.search(slices=(self.sizes["slices"] or 1,)))
            assert best.schedule is not None, "no other is chosen"
            chosen = {"chosen": f"{best.label}: {best.reason}"}
            return best.schedule, self._published(best.schedule) | chosen
        schedule = make(
            name.replace("-", "_"), microbatches=self.microbatches, stages=self.stages,
            virtual=self.sizes["virtual"], slices=self.sizes["slices"], **self.prices,
        )  # fmt: skip
        return schedule, self._published(schedule)

    def _published(self, schedule: Schedule) -> dict[str, str]:
        """The source, and its closed form of the bubble if there is one."""
        known = maker(schedule.name)
        bubble = known.bubble_over_ideal(Shape(
            microbatches=schedule.microbatches, stages=schedule.stages, virtual=schedule.virtual,
            slices=schedule.slices, times=self.times,
        ))  # fmt: skip
        form = "" if bubble is None else f"; bubble in closed form {bubble:.2%}"
        return {"source": f"{known.source}{form}"}

    def runs(self, schedule: Schedule) -> Runs:
        share = self.options.weight_share
        return {
            model: simulate(schedule, self.times, model=model, weight_share=share)
            for model in get_args(Model)[::-1]
        }


def _times(text: str) -> Times:
    try:
        forward, backward, weight, comm = (float(part) for part in text.split(","))
    except ValueError:
        what = f"--times takes four numbers, F,B,W,comm such as 1,1,1,0, not {text!r}"
        raise UserError(what) from None
    return Times(forward=forward, backward=backward, weight=weight, comm=comm)


def _check_outputs(options: ScheduleOptions) -> None:
    """UserError, before anything is computed or written, for outputs that do not go together."""
    check_picture(options.draw)
    check_distinct({name: getattr(options, name) for name in ("csv", "text", "draw", "trace")})
    if [options.csv, options.text].count("-") + options.json > 1:
        raise UserError("only one of --csv -, --text - and --json can be printed at a time")
    if options.beside and (options.csv or options.text):
        raise UserError("--csv and --text write one schedule: leave out --beside")
    if options.orders and not (options.csv or options.text):
        raise UserError("--orders says what --csv or --text hold: give one of them")


def _write(runs: list[Simulation], options: ScheduleOptions) -> dict[str, str]:
    """Write all files that are asked for; returns their paths."""
    schedule, written = runs[0].schedule, {}
    for what, path, render in (("csv", options.csv, to_csv), ("text", options.text, to_text)):
        if path == "-":
            print(render(schedule, orders=options.orders), end="")
        elif path:
            write_text(path, render(schedule, orders=options.orders))
            written[f"wrote {what}"] = path
    if options.draw:
        from mtx.view.timeline import draw_timeline

        with replacing(options.draw) as file:
            draw_timeline(runs, file, memory_limit=options.memory_limit)
        written["wrote picture"] = options.draw
    if options.trace:
        from mtx.view.trace import write_trace

        write_trace(runs, options.trace)
        written["wrote trace"] = options.trace
    return written


# --- one schedule ---------------------------------------------------------------------------------


def _record(runs: Runs) -> dict[str, Any]:
    """What --json prints for one schedule."""
    schedule = runs["lockstep"].schedule
    record = {"schedule": schedule.name, "in_flight": schedule.in_flight.tolist()}
    for model, run in runs.items():
        record[model] = {
            "in_flight": run.in_flight.tolist(), "peak_memory": run.peak_memory.tolist(),
            **{key: getattr(run, key) for key in ("makespan", "ideal", "bubble_over_ideal")},
        }  # fmt: skip
    sizes = ("stages", "microbatches", "virtual", "slices", "ticks", "slots")
    return record | {size: getattr(schedule, size) for size in sizes}


def _print_timeline(run: Simulation, written: bool) -> None:
    """Print the timeline as text; if a file was written too, print only its title unless all of it
    fits on the terminal."""
    lockstep, terminal = run.model == "lockstep", sys.stdout.isatty()
    size = shutil.get_terminal_size((120, 40))
    width = None if lockstep and (written or not terminal) else size.columns
    text = timeline_in_colours(run.schedule if lockstep else run, width)
    rows = text.plain.splitlines()
    if written and (len(rows) > size.lines or max(map(len, rows[1:-1])) > size.columns):
        print(rows[0])
    elif terminal:
        Console(highlight=False, soft_wrap=True).print(text)
    else:
        print(text.plain)


def _facts(runs: Runs, limit: float | None) -> dict[str, str]:
    lockstep, asynchronous = runs["lockstep"], runs["asynchronous"]
    schedule = lockstep.schedule
    stages = f"on stages 0 to {schedule.stages - 1}" if schedule.stages > 1 else "on stage 0"
    kinds = "F, one B and one W" if schedule.split else "F and one B"
    split = schedule.weight_stash
    waiting = f", and {split.slots} of what waits for W" if split else ""
    over = limit is not None and lockstep.peak_memory.max() > limit
    said = {
        "ticks": f"{schedule.ticks}, each at most one {kinds}",
        "lock-step": f"{_price(lockstep)}, as our program runs the ticks",
        "asynchronous": f"{_price(asynchronous)}, as a program per stage runs the orders",
        "in flight": f"{_listed(schedule.in_flight)} {stages}: chunks of microbatches between "
        "their F and their B, at most",
        "slots": f"{schedule.slots} of the stash, on every stage{waiting}",
        "memory": f"{_listed(lockstep.peak_memory)} {stages}: stashes of a whole stage, at most"
        + (f", over the limit of {limit:g}" if over else ""),
    }  # fmt: skip
    if 1 - asynchronous.makespan / lockstep.makespan >= WORTH_SAYING:
        said["remark"] = (
            f"lock-step cannot run this table well: {lockstep.makespan:.5g}, against "
            f"{asynchronous.makespan:.5g} by a program per stage"
        )
    return said


def _price(run: Simulation) -> str:
    return f"{run.makespan:.5g}, {bubble_text(run.bubble_over_ideal)} ({run.ideal:.5g})"


def _listed(numbers) -> str:
    shown = [f"{number:.4g}" for number in numbers.tolist()]
    if len(shown) > 16:
        shown = [*shown[:4], "...", *shown[-4:]]
    return " ".join(shown)


# --- all schedules --------------------------------------------------------------------------------


def _compare(asked: _Asked) -> None:
    options = asked.options
    for name in ("csv", "text", "draw", "trace", "beside", "orders"):
        if getattr(options, name):
            raise UserError(f"--{name} goes with one schedule: name it instead of compare")
    if options.model != ScheduleOptions.model:
        raise UserError(f"compare shows both models: leave out --model {options.model}")
    slices = sorted({each.default_slices for each in MAKERS.values() if each.sliced})
    slices = (asked.sizes["slices"],) if asked.sizes["slices"] else tuple(slices)
    found = asked.search(slices=slices)
    made = [(one, one.schedule) for one in found if one.schedule is not None]
    if options.json:
        say([
            _record(asked.runs(schedule))
            | {key: getattr(one, key) for key in ("for_comparison", "memory", "fits", "reason")}
            | {"schedule": one.name}
            for one, schedule in made
        ], [], as_json=True)  # fmt: skip
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    print("\n".join(_table(made, asked.microbatches * asked.times.work, width)))
    refused = [f"  {one.name}: {one.reason}" for one in found if one.schedule is None]
    if refused:
        print("\n".join(["\nnot for these numbers:", *refused]))
    best = choose(found)
    print(f"\nbest in lock-step: {best.label}: {best.reason}")
    if any(one.for_comparison for one, _ in made):
        print(f"*: {FOR_COMPARISON}")


def _table(made: list[tuple[Candidate, Schedule]], ideal: float, width: float) -> list[str]:
    """Reasons come after the numbers if `width` columns hold them, else below."""
    rows: list[tuple] = [
        ("schedule", "ticks", "in flight", "slots", "stashes", "lock-step", "bubble",
         "asynchronous", "bubble")
    ]  # fmt: skip
    for one, schedule in made:
        rows.append((
            one.label + " *" * one.for_comparison, schedule.ticks, schedule.in_flight.max(),
            schedule.slots, f"{one.memory:.4g}", f"{one.lockstep:.5g}",
            f"{one.lockstep / ideal - 1:.2%}", f"{one.asynchronous:.5g}",
            f"{one.asynchronous / ideal - 1:.2%}",
        ))  # fmt: skip
    head, *lines = table(rows, "<>>>>>>>>")
    reasons = [one.reason for one, _ in made]
    beside = [f"{line}  {reason}" for line, reason in zip(lines, reasons)]
    if max(map(len, beside), default=0) <= width:
        return [head, *beside]
    below = partial(textwrap.wrap, width=int(width), initial_indent="  ", subsequent_indent="  ")
    return [head, *(row for line, reason in zip(lines, reasons) for row in (line, *below(reason)))]
