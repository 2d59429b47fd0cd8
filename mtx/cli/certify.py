"""`mtx certify`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from mtx.cli.options import File, Flag, Line, read_line, split_names
from mtx.cli.output import check_writable, progress, say, write_text
from mtx.cli.process import start_devices
from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.errors import UserError
from mtx.fields import Between
from mtx.launch.exits import on_abort
from mtx.launch.start import usable_cores
from mtx.plan.plan import is_plan_file, load_run
from mtx.presets import preset
from mtx.sizes import Seed, Sequences

_FLAGS = (
    # Each program runs only a few times: optimising it costs more than it saves, and so do the new
    # fusion emitters of jax 0.10.
    "--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CertifyOptions:
    cases: Annotated[int, Between(0, 100_000)] = 20  # number of cases to compare with one device
    seed: Seed = 0  # seed for random layouts and features, initial values and dropout
    devices: Annotated[int, Between(2, 64)] = 8  # the most virtual CPU devices per case
    mutants: Flag = False  # show that certify can fail: known mistakes, and what catches each
    json: Flag = False  # print the certificate as JSON instead of a table
    out: File = None  # write the certificate to this file, as JSON
    global_batch: Sequences = 16  # sequences per step, over all replicas
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


def certify_command(arguments: list[str]) -> int:
    """Show that a run on its layout computes what a single device would.

    PRESET or PLAN names a run (miniature if neither is given); options replace its fields. Random
    layouts, schedules and features of the run, shrunk, run on virtual CPU devices and are compared
    with one unsharded device: losses, gradients, norm, and the state after five steps. The
    equations of the full-size step are walked without being run: along each mesh axis a value is
    the same, a shard, or an unsummed partial, so sums over the wrong axes are found at any size.
    Also prints what was not covered. Exit status: 0 no difference, 1 a difference (the smallest
    case found is named), 2 a user's mistake.
    """
    run = _named(*split_names(arguments)[0][:1])
    parts = {name: getattr(run, name) for name in ("model", "layout", "optimizer", "global_batch")}
    usage = "mtx certify [PRESET | PLAN]"
    line = read_line(arguments, CertifyOptions(**parts), usage, certify_command)
    options = line.options
    if options.mutants:
        _refuse_others(line)
    run = replace(run, seed=options.seed, **{name: getattr(options, name) for name in parts})
    check_writable(options.out)
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS]).strip()
    # Nobody reads which source line made an op; recording it takes a tenth of the compile time.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    # A device may wait at several collectives at once (`mtx.certify.channels`), each in a thread.
    os.environ.setdefault("NPROC", str(3 * options.devices + usable_cores()))
    start_devices(options.devices)
    make = _mutants if options.mutants else _certificate
    with progress("rows") as report:
        holds, numbers, lines = make(run, options, report)
    if options.out:
        write_text(options.out, json.dumps(numbers, indent=1) + "\n")
    say(numbers, lines, as_json=options.json)
    return 0 if holds else 1


def _refuse_others(line: Line) -> None:
    """UserError for what --mutants, which has models and layouts of its own, would ignore."""
    others = [*line.names, *sorted(line.given - {"--mutants", "--json", "--out"})]
    if others:
        raise UserError(
            f"--mutants tries mistakes in programs of its own, and takes no {others[0]}; leave it "
            "out"
        )


def _named(name: str = "miniature") -> RunConfig:
    return load_run(name) if is_plan_file(name) else preset(name)


Made = tuple[bool, dict, list[str]]  # (whether it holds, numbers for programs, lines for people)


def _certificate(run: RunConfig, options: CertifyOptions, report: Callable) -> Made:
    from mtx.certify.certificate import certify
    from mtx.certify.said import lines, numbers

    with _named_if_aborted() as begins:
        made = certify(
            run, cases=options.cases, seed=options.seed, devices=options.devices, report=report,
            begins=begins,
        )  # fmt: skip
    return made.holds, numbers(made), lines(made, width=_width())


@contextmanager
def _named_if_aborted() -> Iterator[Callable[[Any], None]]:
    """Yields a function to call with each case that begins. If XLA's runtime ends the process,
    which raises no exception, the last line of stderr names the case that was running."""
    running: list[Any] = [None]

    def say_which() -> None:
        case = running[0]
        which = f"case {case.number} ({case.said})" if case else "the first case"
        os.write(
            2, f"\nmtx: XLA's runtime ended the process in {which}; nothing is known of it, use "
            "another --seed or fewer --cases for the others\n".encode()
        )  # fmt: skip
        os._exit(1)

    kept = on_abort(say_which)
    try:
        yield lambda case: running.__setitem__(0, case)
    finally:
        on_abort(None)
        del kept


def _mutants(run: RunConfig, options: CertifyOptions, report: Callable) -> Made:
    from mtx.certify.mutants import try_mutants
    from mtx.certify.said import mutant_lines, mutant_numbers

    tried = try_mutants(report)
    holds = all(each.caught for each in tried)
    return holds, mutant_numbers(tried), mutant_lines(tried, width=_width())


def _width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 80), 140)
