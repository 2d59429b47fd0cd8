"""In a notebook: sliders to explore layouts; and, after `%load_ext mtx.view.notebook`, simulations
that show themselves as schedules do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mtx.config import RunConfig
from mtx.presets import preset
from mtx.schedules.schedule import Schedule
from mtx.schedules.simulate import Simulation
from mtx.view.schedule import show

if TYPE_CHECKING:
    from mtx.view.explore import Look
    from mtx.view.explore_widgets import Explorer

_WIDGETS = ("ipywidgets", "anywidget")  # of the extra `notebook`


def explore(run: str | RunConfig, *, target: str = "a100-80gb") -> Explorer | Look:
    """Sliders for the layout of a run, or of a preset by its name, with all that follows from it:
    mesh, memory, time, bubble, communication, and what each device holds.

    target: a name in `mtx.plan.hardware`, or a TOML file's path. Where ipywidgets is missing, one
    line says so, and the layout is shown as it is. UserError for a run that cannot be planned.
    """
    from mtx.view.explore import look

    given = preset(run) if isinstance(run, str) else run
    try:
        from mtx.view.explore_widgets import Explorer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _WIDGETS:
            raise
        wanted = " and ".join(_WIDGETS)
        print(f"sliders need {wanted}: pip install 'mtx[notebook]', then restart the kernel")
        return look(given, target=target)
    return Explorer(given, name=run if isinstance(run, str) else None, target=target)


def load_ipython_extension(ipython: Any) -> None:
    """What `%load_ext` calls: registers the pictures with IPython's display."""
    png = ipython.display_formatter.formatters["image/png"]
    for shown in (Schedule, Simulation):
        png.for_type(shown, lambda one: show(one)._repr_png_())


def unload_ipython_extension(ipython: Any) -> None:
    """What `%unload_ext` calls."""
    png = ipython.display_formatter.formatters["image/png"]
    for shown in (Schedule, Simulation):
        png.pop(shown)
