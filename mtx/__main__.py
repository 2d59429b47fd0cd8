"""`python -m mtx`, the same as `mtx`: runs one command in its own process."""

import os
import sys
from typing import NoReturn

from mtx.errors import UserError


def run() -> NoReturn:
    """Runs one command and ends the process with its status, however early Ctrl-C comes."""
    try:
        from mtx.cli import main

        status = main()
    except KeyboardInterrupt:  # during these imports
        print("mtx: interrupted", file=sys.stderr)
        status = 130
    except UserError as error:  # from an added file of schedules, of a family or of an optimizer
        print(f"mtx: {error}", file=sys.stderr)
        status = 2
    if status == 130 and not _is_one_of_several():
        # JAX's threads may still be computing, and crash if the interpreter ends beneath them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _is_one_of_several() -> bool:
    """Whether this process has joined others, which must be told that it leaves."""
    if "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized()


if __name__ == "__main__":
    run()
