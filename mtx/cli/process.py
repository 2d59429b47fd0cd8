"""A command as a process: its exit status, and the devices that it starts."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

from mtx.cli.help import help_page
from mtx.cli.options import Help
from mtx.errors import UserError
from mtx.launch.cluster import ClusterOptions
from mtx.launch.exits import Exit, LostProcess
from mtx.launch.status import VIRTUAL_DEVICES
from mtx.sizes import VirtualDevices


def exit_status(body: Callable[[], int | None]) -> int:
    """`body`'s own exit status (None: 0); a user's mistake prints one line and no traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a table's lines, if only ASCII is possible
    try:
        try:
            return body() or 0
        except Help as asked:
            page = help_page(asked.default, usage=asked.usage, about=asked.about)
            print("\n".join([page, *([asked.more()] if asked.more else [])]))
            return 0
    except UserError as error:
        print("mtx:", " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mtx: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, perhaps `head`, is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, as in a shell


def start_devices(virtual: VirtualDevices, cluster: ClusterOptions | None = None) -> None:
    """Create `virtual` CPU devices, if any, and join the cluster if this process is part of one;
    each process then prints who it is."""
    from mtx.launch.start import join_cluster, use_virtual_devices

    virtual = virtual or int(os.environ.get(VIRTUAL_DEVICES, 0))
    if virtual:
        use_virtual_devices(virtual)
    try:
        who = join_cluster(cluster)
    except LostProcess as error:
        print("mtx:", error, file=sys.stderr)
        raise SystemExit(Exit.LOST) from None
    if who is not None:
        print(who, flush=True)
