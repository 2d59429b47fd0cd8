"""`python -m mtx` is `mtx`."""

import sys

from mtx.cli import main

sys.exit(main())
