"""The command line: `mtx train | plan | schedule | generate | presets`.

Options are the fields of dataclasses, by dotted names: `--model.layers 12`. A mistake is one line
on stderr and exit status 2. JAX is imported by the commands that compute, and when they do.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import itertools
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, TypeVar

import tyro

from mtx.config import RunConfig
from mtx.errors import UserError
from mtx.presets import NAMES, preset

if TYPE_CHECKING:
    from mtx.pipeline.schedule import Schedule

Options = TypeVar("Options")
OwnFields = tyro.conf.arg(name="")  # --steps instead of --run.steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status: 0, 2 for a user's mistake, 130 when interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    return exit_status(lambda: _dispatch(arguments))


def exit_status(body: Callable[[], int | None]) -> int:
    """`body`'s own exit status (None: 0), with a user's mistake as one line and no traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a table's lines, where there is only ASCII
    try:
        return body() or 0
    except UserError as error:
        print("mtx:", " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mtx: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, `head` perhaps, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, as the shell has it


def _dispatch(arguments: list[str]) -> int | None:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_overview())
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"unknown command {name!r}: {hint}known are {', '.join(COMMANDS)}")
    status = COMMANDS[name](arguments[1:])
    sys.stdout.flush()
    return status


def _overview() -> str:
    rows = [(name, command.__doc__.splitlines()[0]) for name, command in COMMANDS.items()]
    return "\n".join([
        "mtx: Megatron-LM's pipeline, tensor and data parallelism (SC'21), in JAX",
        "",
        "usage: mtx COMMAND [OPTIONS]",
        "",
        *(f"  {name:<10}{summary}" for name, summary in rows),
        "",
        "Options are fields of the config: mtx train miniature --model.layers 8 --layout.data 1",
        "mtx COMMAND --help lists them, with their defaults; so does mtx train PRESET --help.",
    ])  # fmt: skip


# --- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    run: Annotated[RunConfig, OwnFields]
    virtual_devices: int = 0  # CPU devices to make, for a machine without GPUs


def train_command(arguments: list[str]) -> int | None:
    """Train a preset, or a change of it.

    PRESET is miniature where none is named; options replace its fields. Log, config and
    checkpoints lie in --out, from which the same command goes on.
    """
    name, rest = split_name(arguments)
    start = TrainOptions(run=preset(name or "miniature"))
    options = parse(rest, start, prog="mtx train [PRESET]", about=train_command)
    start_devices(options.virtual_devices)
    from mtx.train.loop import train

    return 130 if train(options.run).interrupted else 0


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    run: Annotated[RunConfig, OwnFields]
    target: str = "a100-80gb"  # the accelerator: h100, tpu-v5p, ...


def plan_command(arguments: list[str]) -> None:
    """Say what a preset needs on its cluster: parameters, memory, bubble, FLOPs.

    PRESET is gpt-1t where none is named; options replace its fields. Nothing is run: all of it is
    computed from closed forms and the schedule's table.
    """
    name, rest = split_name(arguments)
    start = PlanOptions(run=preset(name or "gpt-1t"))
    options = parse(rest, start, prog="mtx plan [PRESET]", about=plan_command)
    from mtx.plan.summary import plan_lines

    print("\n".join(plan_lines(options.run, target=options.target)))


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    stages: int = 4  # p
    microbatches: int = 8  # m, of one replica and step
    virtual: int = 1  # v, model chunks per stage: above 1, 1f1b is interleaved
    draw: str = ""  # FILE.svg, .png or .pdf: a picture as well


def schedule_command(arguments: list[str]) -> None:
    """Show a pipeline schedule: what each stage does in every tick.

    NAME is 1f1b or gpipe; 1f1b where none is named.
    """
    name, rest = split_name(arguments)
    options = parse(rest, ScheduleOptions(), prog="mtx schedule [NAME]", about=schedule_command)
    for field in ("stages", "microbatches", "virtual"):
        if getattr(options, field) < 1:
            raise UserError(f"{field}={getattr(options, field)} must be at least 1")
    from mtx.pipeline.makers import make
    from mtx.view.schedule import draw_timeline, timeline_text

    schedule = make(
        name or "1f1b",
        microbatches=options.microbatches,
        stages=options.stages,
        virtual=options.virtual,
    )
    if options.draw:
        try:
            draw_timeline(schedule, options.draw)
        except OSError as error:
            raise UserError(f"cannot write {options.draw}: {error.strerror}") from None
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(timeline_text(schedule, width))
    print("\n".join(_schedule_facts(schedule)))
    if options.draw:
        print(f"picture    {options.draw}")


def _schedule_facts(schedule: Schedule) -> list[str]:
    from mtx.view.schedule import LockStep

    run = LockStep(schedule=schedule)
    p, v, m = schedule.stages, schedule.virtual, schedule.microbatches
    formula = (p - 1) / (v * m)
    idle = 1 / (1 - run.idle_share) - 1
    bubble = f"bubble     (p-1)/(v m) = {p - 1}/({v}*{m}) = {formula:.2%} of the ideal time"
    if abs(idle - formula) > 1e-9:
        bubble += f"; by the table {idle:.2%}, since p={p} does not divide m={m}"
    waiting = [str(count) for count in schedule.in_flight]
    if len(waiting) > 16:
        waiting = [*waiting[:4], "...", *waiting[-4:]]
    return [
        f"ticks      {schedule.ticks}, each one F and one B half",
        bubble,
        f"in flight  {' '.join(waiting)} on stages 0 to {p - 1}: chunks of microbatches between "
        "their F and their B, at most",
        f"slots      {schedule.slots} of the stash, on every stage",
    ]


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    prompt: tuple[str, ...] = ("",)  # one text or several; "" begins a new document
    tokens: int = 200  # at most, after each prompt
    temperature: float = 0.8  # 0: always the most likely token
    seed: int = 0
    virtual_devices: int = 0  # CPU devices to make, for a machine without GPUs


def generate_command(arguments: list[str]) -> None:
    """Let a trained model go on from a text.

    RUN_DIR is the --out of a training run. Its newest checkpoint is read on its own layout, or on
    a part of that where there are fewer devices.
    """
    directory, rest = split_name(arguments)
    prog = "mtx generate RUN_DIR"
    options = parse(rest, GenerateOptions(), prog=prog, about=generate_command)
    if directory is None:
        raise UserError("mtx generate RUN_DIR: name the directory of a training run (its --out)")
    start_devices(options.virtual_devices)
    import jax

    from mtx.evaluate.generate import generate
    from mtx.train.checkpoint import Checkpoints
    from mtx.train.fit import fit_layout
    from mtx.train.step import Trainer

    checkpoints = Checkpoints(directory)
    run = checkpoints.run()
    trainer = Trainer(replace(run, layout=fit_layout(run.layout, jax.device_count())))
    texts = generate(
        trainer,
        checkpoints.restore(trainer),
        checkpoints.tokenizer(),
        options.prompt,
        tokens=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    if jax.process_index() == 0:
        print("\n\n".join(texts))


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    pass


def presets_command(arguments: list[str]) -> None:
    """List the presets."""
    parse(arguments, NoOptions(), prog="mtx presets", about=presets_command)
    print("\n".join(_preset_rows()))


def _preset_rows() -> list[str]:
    from mtx.plan.flops import parameters

    rows = [("preset", "parameters", "layers", "hidden", "heads", "sequence", "vocab",
             "data x pipe x tensor", "virtual", "microbatch", "batch", "devices")]  # fmt: skip
    for name in NAMES:
        run = preset(name)
        model, layout = run.model, run.layout
        shape = model.layers, model.hidden, model.heads, model.sequence, model.vocab
        mesh = f"{layout.data} x {layout.pipe} x {layout.tensor}"
        how = layout.virtual, layout.microbatch, run.global_batch, layout.devices
        rows.append((name, _short(parameters(model)), *shape, mesh, *how))
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def _short(count: int) -> str:
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return str(count)


COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "train": train_command,
    "plan": plan_command,
    "schedule": schedule_command,
    "generate": generate_command,
    "presets": presets_command,
}


# --- devices --------------------------------------------------------------------------------------


def start_devices(virtual: int) -> None:
    """Makes `virtual` CPU devices, if any, and joins the cluster, where this is a part of one."""
    from mtx.train.launch import join_cluster, use_virtual_devices

    if virtual < 0:
        raise UserError(f"virtual_devices={virtual} must be at least 0")
    if virtual:
        use_virtual_devices(virtual)
    join_cluster()


# --- options --------------------------------------------------------------------------------------


def split_name(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The name that stands before all options, if there is one, and the rest."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    return None, arguments


def parse(
    arguments: list[str], default: Options, *, prog: str, about: Callable | None = None
) -> Options:
    """`default` with the fields that `arguments` name replaced. Prints the help and exits with
    status 0 for --help; raises UserError for an option, a value or a choice that cannot be."""
    described = (about or type(default)).__doc__

    def read(arguments: list[str]) -> tuple[Options, list[str]]:
        return tyro.cli(
            type(default), default=default, args=arguments, prog=prog,
            description=inspect.cleandoc(described), return_unknown_args=True,
        )  # fmt: skip

    if "-h" in arguments or "--help" in arguments:
        read(["--help"])
    printed = io.StringIO()
    # tyro draws its errors for what it finds at stdout: here no terminal, but UTF-8.
    nowhere = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(printed):
            options, unknown = read(arguments)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise UserError(_one_line(printed.getvalue(), arguments)) from None
    if unknown:
        listing = io.StringIO()
        with contextlib.redirect_stdout(listing), contextlib.suppress(SystemExit):
            read(["--help"])
        raise _unknown(unknown, re.findall(r"--[a-z][\w.-]*", listing.getvalue()))
    return options


def _unknown(unknown: list[str], known: list[str]) -> UserError:
    """Of what was left over: the first option, or else the first value."""
    options = [argument for argument in unknown if argument.startswith("-")]
    if not options:
        return UserError(
            f"unexpected argument {unknown[0]!r}: a name stands before all options, and a switch "
            "takes no value (--resume, --no-resume)"
        )
    name = options[0].partition("=")[0].replace("_", "-")
    same_end = [option for option in known if option.rpartition(".")[2] == name.lstrip("-")]
    near = same_end or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return UserError(
        f"unknown option {name}: " + (f"did you mean {near[0]}?" if near else "see --help")
    )


def _one_line(box: str, arguments: list[str]) -> str:
    """What tyro says in a box of several paragraphs, as one line."""
    rows = [line.strip("│ ") for line in box.splitlines() if line.startswith("│")]
    message = " ".join(itertools.takewhile(lambda row: not row.startswith("─"), rows))
    wrong_value = re.match(r"Error parsing (--\S+):", message)
    if wrong_value and "Argument helptext:" in rows:
        option, *form = rows[rows.index("Argument helptext:") + 1].split()
        return f"{option} takes {' '.join(form)}, not {_given(option, arguments)!r}"
    # A field's own check: "Error parsing run.model: hidden=130 cannot be divided ..."
    return re.sub(r"^Error parsing [\w.]*: ", "", message) or box


def _given(option: str, arguments: list[str]) -> str:
    """The value that `arguments` give to `option`."""
    given = ""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == option:
            values = itertools.takewhile(lambda a: not a.startswith("--"), arguments[place + 1 :])
            given = value if equals else " ".join(values)
    return given
