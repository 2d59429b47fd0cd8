"""Sliders above the page of a layout. Needs ipywidgets and anywidget, the extra `notebook`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import anywidget
import ipywidgets
import traitlets

from mtx.config import RunConfig
from mtx.errors import UserError
from mtx.plan.hardware import HARDWARE
from mtx.plan.summary import title
from mtx.presets import NAMES, preset
from mtx.sharding.axes import AXES
from mtx.view.explore import CHOICES, Look, choices_of, look
from mtx.view.explore_page import page_html
from mtx.view.mesh import Device
from mtx.view.picture import LIMIT

_OWN = "this run"  # the model's name if it is not a preset
_SCRIPT = """
function render({ model, el }) {
  const draw = () => { el.innerHTML = model.get("html"); };
  draw();
  model.on("change:html", draw);
  el.addEventListener("click", (event) => {
    const cell = event.target.closest("[data-device]");
    if (cell) model.send({ device: Number(cell.dataset.device) });
  });
}
export default { render };
"""


class Page(anywidget.AnyWidget):
    """HTML that sends {"device": rank} when an element of it with a `data-device` is clicked."""

    _esm = _SCRIPT
    html = traitlets.Unicode().tag(sync=True)


def _show(widget: ipywidgets.DOMWidget, wanted: bool) -> None:
    """Show a widget if wanted, else hide it: a choice of one is not a choice."""
    widget.layout.display = None if wanted else "none"


class Explorer:
    """A run's layout with a slider for each choice, and a page that follows them.

    `look` is what is shown: if the choices do not go together, the last that did, with one line
    that says why. `sliders` are the widgets, by the names of their choices.
    """

    def __init__(self, run: RunConfig, *, name: str | None = None, target: str = "a100-80gb"):
        self._run = run
        self._redrawing = True
        name = name if name in NAMES else _OWN
        targets = [*dict.fromkeys((*HARDWARE, target))]
        names = [_OWN, *NAMES] if name == _OWN else NAMES
        self.model = ipywidgets.Dropdown(options=names, value=name, description="model")
        self.target = ipywidgets.Dropdown(options=targets, value=target, description="GPU")
        self.sliders: dict[str, ipywidgets.SelectionSlider] = {
            choice: ipywidgets.SelectionSlider(
                options=[1], description=choice.replace("_", " "), continuous_update=False
            )
            for choice in (*CHOICES, "global_batch")
        }
        self.device = {
            axis: ipywidgets.BoundedIntText(description=f"device {axis[0]}", min=0, max=0)
            for axis in AXES
        }
        self.message = ipywidgets.HTML()
        self.page = Page()
        self._given = run
        self._set_choices()
        self.look: Look = look(run, target=target)  # UserError if the run itself cannot be shown
        for widget in (self.target, *self.sliders.values(), *self.device.values()):
            widget.observe(self._redraw, "value")
        self.model.observe(self._change_model, "value")
        self.page.on_msg(self._click)
        self._redrawing = False
        self._redraw()
        self.widget = self._arranged()

    def _redraw(self, _: Any = None) -> None:
        if self._redrawing:
            return
        choices = {name: slider.value for name, slider in self.sliders.items()}
        device = {axis: picker.value for axis, picker in self.device.items()}
        try:
            shown = look(self._run, target=str(self.target.value), device=device, **choices)
            html = page_html(shown)
        except UserError as error:
            self.message.value = (
                f'<span style="color:{LIMIT}">{escape(str(error))}</span> (below: the last layout '
                "that can be)"
            )
            return
        self.look, self.message.value, self.page.html = shown, "", html
        with self._together():
            for axis, picker in self.device.items():
                picker.max = shown.layout.sizes[axis] - 1
                picker.value = shown.device.at.get(axis, 0)
                _show(picker, axis in shown.layout.shown)

    def _click(self, page: Page, message: dict, buffers: Any) -> None:
        """Look from the device that was clicked, in the layout that the page shows."""
        device = Device(layout=self.look.layout, rank=message["device"])
        with self._together():
            for axis, picker in self.device.items():
                picker.value = device.at.get(axis, 0)
        self._redraw()

    def _change_model(self, change: Any) -> None:
        self._run = self._given if change["new"] == _OWN else preset(change["new"])
        with self._together():
            self._set_choices()
        self._redraw()

    def _set_choices(self) -> None:
        """Set the sliders to the choices of the run, at its own values."""
        for name, options in choices_of(self._run).items():
            source = self._run if name == "global_batch" else self._run.layout
            self.sliders[name].options = [(f"{option:,}", option) for option in options]
            self.sliders[name].value = getattr(source, name)
            _show(self.sliders[name], len(options) > 1)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Change several widgets, and redraw nothing until all are changed."""
        before, self._redrawing = self._redrawing, True
        try:
            yield
        finally:
            self._redrawing = before

    def _arranged(self) -> ipywidgets.Widget:
        wide = ipywidgets.Layout(grid_template_columns="repeat(auto-fit, minmax(300px, 1fr))")
        controls = [self.model, self.target, *self.sliders.values(), *self.device.values()]
        for control in controls:
            control.style.description_width = "96px"
            control.layout.width = "auto"
        return ipywidgets.VBox([ipywidgets.GridBox(controls, layout=wide), self.message, self.page])

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The widgets, and the picture of what they show for when no kernel runs them."""
        bundle: Any = self.widget._repr_mimebundle_(**options)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        png, size = self.look._repr_png_()
        shown = {"image/png": png, "text/plain": repr(self)}
        return {**data, **shown}, {**metadata, "image/png": size}

    def __repr__(self) -> str:
        return f"Explorer: {title(self.look.plan)}, {self.look.layout}"
