"""Drawn pictures of coloured shapes, with captions: what an image model trains on if no files are
named, as text models train on Python's help topics."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mtx.data.samples import Rng

COUNT = 512  # pictures
SOURCE = f"{COUNT} drawn shapes"
_DRAWING = 11  # purpose of random numbers, in their keys
COLOURS = {
    "red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (240, 210, 50),
    "white": (245, 245, 245), "black": (20, 20, 20),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle")


class Drawing(NamedTuple):
    pixels: np.ndarray  # uint8 [side, side, 3]
    caption: str  # "a red circle on blue"


def draw(number: int, side: int, seed: int) -> Drawing:
    """Picture `number`: a shape of a third to two thirds of the side, at a random place."""
    rng = Rng(seed, _DRAWING, number)
    colour, ground = (list(COLOURS)[n] for n in rng.permutation(len(COLOURS))[:2])
    shape = SHAPES[rng.below(len(SHAPES))]
    size = side // 3 + rng.below(side // 3 + 1)
    top, left = rng.below(side - size + 1), rng.below(side - size + 1)
    y, x = ((np.arange(side) + 0.5 - first) / size for first in (top, left))
    inside = _inside(shape, y[:, None], x[None])
    pixels = np.where(inside[..., None], COLOURS[colour], COLOURS[ground]).astype(np.uint8)
    return Drawing(pixels, f"a {colour} {shape} on {ground}")


def _inside(shape: str, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Which points lie in a shape that fills the square from 0 to 1."""
    if shape == "circle":
        return (y - 0.5) ** 2 + (x - 0.5) ** 2 <= 0.25
    within = (y >= 0) & (y <= 1) & (x >= 0) & (x <= 1)
    return within & (abs(x - 0.5) <= y / 2) if shape == "triangle" else within
