"""Optimizers, a file each, whose name is the optimizer's. A file says

    STATES    int: the arrays like a parameter that it keeps, float32
    DEFAULTS  of those of b1, b2 and epsilon that it has
    make      (rate, *, weight_decay, mask, **DEFAULTS) -> optax.GradientTransformation

rate: step -> learning rate. mask: params -> tree of bool, those that decay. Each device updates its
shards of the masters by itself: an update that is not elementwise, or that takes a number from an
array's sizes, or a state that is not float32 or of other shapes than the parameters', is refused
(`mtx.step.optimizer`). Clipping, the loss scale and steps that are not finite are the step's, for
all of them.
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
    """The file of one of `NAMES`; UserError where it leaves something out, or where `make` takes
    other options."""
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
