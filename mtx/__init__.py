"""mtx: Megatron-LM's PTD-P in JAX, as one SPMD program.

>>> import mtx
>>> run = mtx.preset("miniature")
>>> loss, gradients = mtx.loss_and_gradients(run.model, run.layout, batch)
>>> trainer = mtx.Trainer(run)
>>> state, metrics = trainer.train_step(trainer.init(), trainer.place(batch))

`__init__.pyi` lists the names and the modules that define them, for type checkers and for
`__getattr__`, which imports a name when it is first used (as in Scientific Python's SPEC 1). So
`import mtx` loads no JAX and touches no device. In a notebook it tells IPython how to show
schedules.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from typing import Any

__version__ = "0.1.0"

_LIST = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
_HOME = {
    alias.name: line.module
    for line in _LIST.body
    if isinstance(line, ast.ImportFrom) and line.module
    for alias in line.names
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mtx' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _show_in_notebooks() -> None:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        importlib.import_module("mtx.view.notebook").load_ipython_extension(shell)


_show_in_notebooks()
