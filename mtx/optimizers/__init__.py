"""Optimizers, one per file, each named after its file. A file defines

    STATES    int: how many float32 arrays like a parameter the optimizer keeps
    DEFAULTS  the default values of those of b1, b2 and epsilon that it has
    make      (rate, *, weight_decay, mask, **DEFAULTS) -> optax.GradientTransformation

rate: step -> learning rate. mask: params -> tree of bool, True for those that decay. Each device
updates its own shards of the masters: an update that is not elementwise or that depends on the
sizes of arrays, and a state that is not float32 or not of the parameters' shapes, are refused
(`mtx.step.optimizer`). Clipping, the loss scale and the handling of non-finite steps belong to the
step, for all optimizers.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

from mtx.errors import UserError

OPTIONS = "b1", "b2", "epsilon"
NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def optimizer_module(name: str) -> ModuleType:
    """The module of one of `NAMES`. UserError if it leaves something out, or if `make` takes other
    options."""
    module = importlib.import_module(f"{__name__}.{name}")
    missing = [each for each in ("STATES", "DEFAULTS", "make") if not hasattr(module, each)]
    if missing:
        raise UserError(f"{module.__file__} has no {' and no '.join(missing)}; give it what it has")
    takes = [each.name for each in inspect.signature(module.make).parameters.values()][1:]
    asked = {*module.DEFAULTS, "weight_decay", "mask"}
    if {*takes} != asked or not {*module.DEFAULTS} <= {*OPTIONS}:
        raise UserError(
            f"{module.__file__}: make(rate, {', '.join(takes)}) must take weight_decay, mask and "
            f"the names of DEFAULTS={module.DEFAULTS}, of {', '.join(OPTIONS)}"
        )
    return module
