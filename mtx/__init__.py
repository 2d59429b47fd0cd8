"""mtx: Megatron-LM's PTD-P in JAX, as one SPMD program.

>>> import mtx
>>> run = mtx.preset("miniature")
>>> loss, gradients = mtx.loss_and_gradients(run.model, run.layout, batch)
>>> trainer = mtx.Trainer(run)
>>> state, metrics = trainer.train_step(trainer.init(), trainer.place(batch))

Names are imported when they are first used: `import mtx` loads no JAX and touches no device.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "mtx.api": ("init_params", "loss_and_gradients", "trainer_for"),
    "mtx.config": ("DataConfig", "Layout", "ModelConfig", "OptimizerConfig", "RunConfig"),
    "mtx.data": ("load_data",),
    "mtx.errors": ("UserError",),
    "mtx.pipeline.formats": ("read_schedule", "to_csv", "to_text"),
    "mtx.pipeline.makers": ("make",),
    "mtx.pipeline.orders": ("Orders",),
    "mtx.pipeline.schedule": ("Schedule",),
    "mtx.pipeline.shape": ("Times",),
    "mtx.pipeline.simulate": ("simulate",),
    "mtx.plan.plan": ("load_run", "make_plan", "save_plan"),
    "mtx.plan.search": ("search",),
    "mtx.presets": ("preset",),
    "mtx.sharding.mesh": ("make_mesh",),
    "mtx.launch.start": ("use_virtual_devices",),
    "mtx.train.loop": ("run_training",),
    "mtx.step.trainer": ("Trainer",),
    "mtx.view.mesh": ("draw_mesh", "mesh_text"),
    "mtx.view.schedule": ("draw_timeline", "show", "timeline_text"),
    "mtx.view.trace": ("write_trace",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mtx' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
