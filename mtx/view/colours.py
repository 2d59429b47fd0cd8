"""The colours of the ops, the same in every picture: F blue, B green, W orange."""

from __future__ import annotations

import numpy as np

from mtx.view.picture import IDLE

# Of F, B and W: darkest and lightest; the chunks go from dark (first) to light (last), as in
# figure 4 of Narayanan et al., SC'21.
SHADES = (("#1d4f91", "#9cc4ee"), ("#1d6b3a", "#a3d9a5"), ("#b35c12", "#f6c48b"))

__all__ = ["IDLE", "SHADES", "hexadecimal", "ink", "rgb", "shade"]


def rgb(colour: str) -> np.ndarray:
    """float [3] in [0, 1]"""
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def hexadecimal(rgb: np.ndarray) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def shade(kind: int, chunk: int = 0, chunks: int = 1) -> str:
    """The colour of a chunk's F, B or W."""
    dark, light = (rgb(colour) for colour in SHADES[kind])
    return hexadecimal(dark + (light - dark) * (chunk / (chunks - 1) if chunks > 1 else 0.3))


def ink(colour: str) -> str:
    """The colour of text that is readable on `colour`."""
    luminance = rgb(colour) @ np.array([0.2126, 0.7152, 0.0722])  # Rec. 709
    return "#ffffff" if luminance < 0.5 else "#10243c"
