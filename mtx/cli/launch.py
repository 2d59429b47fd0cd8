"""`mtx launch`."""

from __future__ import annotations

import sys

from mtx.cli.options import read_line
from mtx.errors import UserError
from mtx.launch.supervisor import LaunchOptions, supervise

_OWN = ("train", "finetune", "generate", "evaluate")  # commands of mtx that compute


def launch_command(arguments: list[str]) -> int:
    """Run a command in many processes on this machine, and restart it after a failure.

    mtx launch -n 4 --devices-per-process 2 -- train gpt-1.7b --data 8: what follows -- is a command
    of mtx, or any program that reads JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
    -n is --processes. If there are no GPUs, each process creates virtual CPU devices. Exit status:
    0 finished, 2 a user's mistake, 75 stopped by SIGTERM and 130 by Ctrl-C, 79 no restarts are
    left.
    """
    place = arguments.index("--") if "--" in arguments else len(arguments)
    own = ["--processes" if argument == "-n" else argument for argument in arguments[:place]]
    options = read_line(own, LaunchOptions(), "mtx launch", launch_command).options
    command = arguments[place + 1 :]
    if not command:
        raise UserError("name what to run: mtx launch -n 2 --devices-per-process 4 -- train ...")
    if command[0] in _OWN:
        command = [sys.executable, "-m", "mtx", *command]
    return supervise(command, options)
