"""Figures without pyplot: made, saved by suffix, and shown by a notebook."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtx.errors import UserError
from mtx.paths import user_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")
# The same idea has the same colour in every picture; see also `mtx.view.schedule`.
FORWARD, BACKWARD, WEIGHT = "#2f6db5", "#3d9a5b", "#e08a2e"
COMMUNICATION, COMMUNICATION_LIGHT = "#7d4fa8", "#c3a6dc"
IDLE, INK, FAINT = "#e4e4e4", "#303030", "#8a8a8a"
LIMIT = "#b3261e"
_DPI = 150
_PIXELS_PER_INCH = 96  # on a page, at most
_MOST_PIXELS = 1400  # across a picture in a notebook, which keeps it


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure that a notebook shows, no wider than its cell.

    As PNG: JupyterLab lets an SVG run out of its cell, and shows none of a notebook that it does
    not trust, such as one that has just been cloned.
    """

    figure: Figure

    def save(self, path: str | Path) -> None:
        save_figure(self.figure, path)

    def svg(self) -> str:
        """The picture as an element of a page."""
        text = io.BytesIO()
        _write(self.figure, text, "svg")
        svg = text.getvalue().decode()
        return svg[svg.index("<svg") :]  # without the declaration before it

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        data, width = io.BytesIO(), self.figure.get_figwidth()
        _write(self.figure, data, "png", dpi=min(_DPI, _MOST_PIXELS / width))
        return data.getvalue(), {"width": round(_PIXELS_PER_INCH * width)}


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """An empty figure with a canvas of its own. UserError where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "pictures need matplotlib, which is not installed: pip install matplotlib"
        ) from error
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_suffix(path: str | Path) -> None:
    """UserError where no picture can be saved under that name."""
    if user_path(path).suffix.lower() not in SUFFIXES:
        raise UserError(f"path={str(path)!r} must end with one of {', '.join(SUFFIXES)}")


def save_figure(figure: Figure, path: str | Path) -> None:
    """As .svg, .png or .pdf. UserError for another suffix, or where it cannot be written."""
    check_suffix(path)
    try:
        _write(figure, path, Path(path).suffix.lower()[1:])
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _write(figure: Figure, file: str | Path | io.BytesIO, kind: str, *, dpi: float = _DPI) -> None:
    """Text stays text in an SVG, and the same picture gives the same bytes."""
    import matplotlib

    fonts = ["DejaVu Sans", "Verdana"]
    settings = {
        "svg.fonttype": "none", "svg.hashsalt": "mtx", "font.sans-serif": fonts,
        "savefig.bbox": "tight", "savefig.pad_inches": 0.1,  # nothing is cut at an edge
    }  # fmt: skip
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context(settings):
        figure.savefig(file, format=kind, dpi=dpi, metadata=undated.get(kind))
