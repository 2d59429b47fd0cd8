"""Figures without pyplot: their colours and frames; saved by suffix, and shown by a notebook."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mtx.errors import UserError
from mtx.paths import user_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

SUFFIXES = (".svg", ".png", ".pdf")
# The same idea has the same colour in every picture.
FORWARD, BACKWARD, WEIGHT = "#2f6db5", "#3d9a5b", "#e08a2e"
COMMUNICATION, COMMUNICATION_LIGHT = "#7d4fa8", "#c3a6dc"
IDLE, INK, FAINT = "#e4e4e4", "#303030", "#8a8a8a"
LIMIT = "#b3261e"
# The darkest and lightest of F, B and W; the chunks go from dark (first) to light (last), as in
# figure 4 of Narayanan et al., SC'21.
SHADES = (("#1d4f91", "#9cc4ee"), ("#1d6b3a", "#a3d9a5"), ("#b35c12", "#f6c48b"))
_DPI = 150
_PIXELS_PER_INCH = 96  # on a page, at most
_MOST_PIXELS = 1400  # across a picture in a notebook, which stores it


def rgb(colour: str) -> np.ndarray:
    """float [3] in [0, 1]"""
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def hexadecimal(rgb: np.ndarray) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


@functools.lru_cache(maxsize=1024)  # a timeline has a hundred thousand cells
def shade(kind: int, chunk: int = 0, chunks: int = 1) -> str:
    """The colour of a chunk's F, B or W."""
    dark, light = (rgb(colour) for colour in SHADES[kind])
    return hexadecimal(dark + (light - dark) * (chunk / (chunks - 1) if chunks > 1 else 0.3))


@functools.lru_cache(maxsize=1024)
def ink(colour: str) -> str:
    """The colour of text that is readable on `colour`."""
    luminance = rgb(colour) @ np.array([0.2126, 0.7152, 0.0722])  # Rec. 709
    return "#ffffff" if luminance < 0.5 else "#10243c"


@functools.lru_cache
def stage_colours(stages: int) -> tuple[str, ...]:
    """A colour per stage, from dark to light, so that neighbours differ and the order shows."""
    from matplotlib import colormaps

    points = np.linspace(0.12, 0.95, stages) if stages > 1 else np.array([0.4])
    return tuple(hexadecimal(colour) for colour in colormaps["viridis"](points)[:, :3])


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure that a notebook shows, no wider than its cell.

    It is shown as PNG: JupyterLab lets an SVG run out of its cell, and shows no SVG of a notebook
    that it does not trust, such as one that has just been cloned.
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


def new_figure(width_inches: float, height_inches: float, path: str | Path | None = None) -> Figure:
    """An empty figure with its own canvas. UserError if matplotlib is missing, or if no picture can
    be saved at `path`."""
    if path is not None:
        check_suffix(path)
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
    """UserError if no picture can be saved under that name."""
    if user_path(path).suffix.lower() not in SUFFIXES:
        raise UserError(f"path={str(path)!r} must end with one of {', '.join(SUFFIXES)}")


def save_figure(figure: Figure, path: str | Path | None) -> Figure:
    """The figure, saved as .svg, .png or .pdf if there is a path. UserError for another suffix, or
    if it cannot be written."""
    if path is not None:
        check_suffix(path)
        try:
            _write(figure, path, Path(path).suffix.lower()[1:])
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
    return figure


def _write(figure: Figure, file: str | Path | io.BytesIO, kind: str, *, dpi: float = _DPI) -> None:
    """Write a figure. Text stays text in an SVG, and the same picture gives the same bytes."""
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none", "svg.hashsalt": "mtx",
        "font.sans-serif": ["DejaVu Sans", "Verdana"],
        "savefig.bbox": "tight", "savefig.pad_inches": 0.1,  # nothing is cut at an edge
    }  # fmt: skip
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context(settings):
        figure.savefig(file, format=kind, dpi=dpi, metadata=undated.get(kind))


# --- what pictures have in common -----------------------------------------------------------------


def split_figure(figure: Figure | SubFigure, *heights: float) -> list[SubFigure]:
    """Parts of a figure, one below the other."""
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    return list(parts)


def plain_axes(
    axes: Axes, title: str, x: str = "", y: str = "", *, pad: float | None = None
) -> None:
    """A plain frame, a title at its left (`pad` points above it), and labels of the axes."""
    axes.set_title(title, loc="left", fontsize=9.5, color=INK, pad=pad)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(labelsize=8, color=FAINT)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)


def figure_title(figure: Figure | SubFigure, text: str, points: float = 11) -> None:
    figure.suptitle(text, x=0.008, ha="left", fontsize=points, color=INK)


def stack_bars(
    axes: Axes, row: int, parts: Iterable[tuple[str, float, str]], *, label_above: float = np.inf
) -> float:
    """Draw a bar of parts (name, length, colour) end to end; returns where it ends. Parts longer
    than `label_above` are labelled with their length."""
    left = 0.0
    for name, length, colour in parts:
        axes.barh(
            row, length, left=left, height=0.64, color=colour, edgecolor="white", linewidth=0.5,
            label=name if row == 0 else None,
        )  # fmt: skip
        if length > label_above:
            axes.text(
                left + length / 2, row, f"{length:.1f}", ha="center", va="center", fontsize=7.5,
                color=ink(colour),
            )  # fmt: skip
        left += length
    return left


def name_rows(axes: Axes, names: Iterable[str]) -> None:
    """Name each row of bars, the first one on top."""
    names = list(names)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.6)


def legend_below(axes: Axes, columns: int, place: Literal["center", "left"] = "center") -> None:
    figure: Any = axes.figure
    figure.legend(
        *axes.get_legend_handles_labels(), loc=f"outside lower {place}", ncols=columns,
        fontsize=7.5, frameon=False, handlelength=1.0, columnspacing=1.2,
    )  # fmt: skip
