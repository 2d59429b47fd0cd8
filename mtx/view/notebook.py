"""In a notebook: sliders to explore layouts, and schedules and simulations that show themselves.

`import mtx` registers the latter if IPython runs; `%load_ext mtx.view.notebook` does as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtx.config import RunConfig
    from mtx.view.explore import Look
    from mtx.view.explore_widgets import Explorer

_WIDGETS = ("ipywidgets", "anywidget")  # of the extra `notebook`
_SHOWN = (("mtx.schedules.schedule", "Schedule"), ("mtx.schedules.simulate", "Simulation"))


def explore(run: str | RunConfig, *, target: str = "a100-80gb") -> Explorer | Look:
    """Sliders for the layout of a run, or of a preset by its name, with what follows from it:
    mesh, memory, time, bubble, communication, and what each device holds.

    target: a name in `mtx.plan.hardware`, or a TOML file's path. If ipywidgets is missing, one line
    says so, and the layout is shown as it is. UserError for a run that cannot be planned.
    """
    from mtx.config import RunConfig
    from mtx.errors import require_kind
    from mtx.presets import preset
    from mtx.view.explore import look

    given = preset(run) if isinstance(run, str) else run
    require_kind("run", given, RunConfig, "a preset's name, such as 'gpt-1t', or a RunConfig")
    try:
        from mtx.view.explore_widgets import Explorer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _WIDGETS:
            raise
        wanted = " and ".join(_WIDGETS)
        print(f"sliders need {wanted}: pip install 'mtx[notebook]', then restart the kernel")
        return look(given, target=target)
    return Explorer(given, name=run if isinstance(run, str) else None, target=target)


def _picture(shown: Any) -> tuple[bytes, dict[str, int]]:
    from mtx.view.schedule import show

    return show(shown)._repr_png_()


def load_ipython_extension(ipython: Any) -> None:
    """Register the pictures with IPython's display; nothing is imported until one is shown."""
    png = ipython.display_formatter.formatters["image/png"]
    for module, name in _SHOWN:
        png.for_type_by_name(module, name, _picture)
