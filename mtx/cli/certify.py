"""`mtx certify`."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from typing import Annotated

from mtx.cli.options import File, Flag, OwnFields, read_line, split_names
from mtx.cli.output import check_writable, progress, say, write_text
from mtx.cli.process import start_devices
from mtx.config import RunConfig
from mtx.errors import UserError
from mtx.fields import Between
from mtx.plan.plan import is_plan_file, load_run
from mtx.presets import preset
from mtx.sizes import Seed

# Each program runs a few times: to optimise it costs more than it gives.
_QUICK = (
    "--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CertifyOptions:
    run: Annotated[RunConfig, OwnFields]
    cases: Annotated[int, Between(0, 100_000)] = 20  # compared with one device
    case_seed: Seed = 0  # of the random layouts and features; 0
    devices: Annotated[int, Between(2, 64)] = 8  # virtual CPU devices, at most, of a case
    mutants: Flag = False  # show that it can fail: known mistakes, and by what each is caught
    json: Flag = False  # the certificate as JSON
    out: File = None  # a file for the certificate, as JSON


def certify_command(arguments: list[str]) -> int:
    """Show that a run computes on its layout what one device would: cases run, equations walked.

    PRESET or PLAN is a run, options replace its fields; miniature where none is named. Random
    layouts, schedules and features of it, shrunk, run on virtual CPU devices against one unsharded
    device: losses, gradients, norm, and the state after five steps. The equations of the full-size
    step are walked without running: along each axis of the mesh a value is the same, a shard, or an
    unsummed partial, and sums over the wrong axes are found at any size. Prints what was not
    covered, too. Exit status: 0 no difference, 1 a difference, of which the smallest case found is
    named, 2 a mistake in what was asked for.
    """
    named = _named(*split_names(arguments)[0][:1])
    default = CertifyOptions(run=named)
    line = read_line(arguments, default, "mtx certify [PRESET | PLAN]", certify_command)
    options = line.options
    check_writable(options.out)
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_QUICK])
    start_devices(options.devices)
    if options.mutants:
        return _mutants(options)
    from mtx.certify.certificate import certify, lines, numbers

    with progress("rows") as report:
        made = certify(
            options.run, cases=options.cases, seed=options.case_seed, devices=options.devices,
            report=report,
        )  # fmt: skip
    width = min(shutil.get_terminal_size((100, 24)).columns, 140)
    found = numbers(made)
    if options.out:
        write_text(options.out, json.dumps(found, indent=1) + "\n")
    text = lines(made, width=width) if not options.json else []
    say(found, [*text, *filter(None, [made.failure])], as_json=options.json)
    return 0 if made.holds else 1


def _named(name: str = "miniature") -> RunConfig:
    return load_run(name) if is_plan_file(name) else preset(name)


def _mutants(options: CertifyOptions) -> int:
    raise UserError("mutants")
