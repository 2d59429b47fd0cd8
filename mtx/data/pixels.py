"""Pictures as pixels, as CLIP's processor makes them: the shorter side is resized to the model's,
and the middle is cut out. The processor's last step, dividing pixels by 255 and normalizing them,
is left to the model, so that bytes are read and sent to devices.

Files are decoded by Pillow; arrays (.npy) of the model's size do not need it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mtx.data.arrays import read_array
from mtx.errors import UserError, reason
from mtx.files import open_file

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".npy")
_MOST_LONG = 100  # times the shorter side
Picture = Path | np.ndarray  # a file, or uint8 [height, width, 3]


def read_picture(picture: Picture, side: int) -> np.ndarray:
    """uint8 [side, side, 3]. UserError for anything that is not a picture."""
    if isinstance(picture, np.ndarray):
        return _fitted(picture, side, "an array of pictures")
    if picture.name.lower().endswith(".npy"):
        return _fitted(read_array(picture), side, str(picture))
    image_module = _pillow(str(picture))
    with open_file(picture) as file:
        try:
            with image_module.open(file) as opened:
                image = opened.convert("RGB")
        except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
            raise UserError(
                f"{picture} is no picture that can be read: {reason(error)}; leave it out"
            ) from None
    return _resized(image, side, image_module, str(picture))


def require_pixels(array: np.ndarray, what: str) -> None:
    """UserError unless `array` is uint8 [height, width, 3]."""
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3 or not array.size:
        raise UserError(
            f"{what} is {array.dtype} {list(array.shape)} and must be uint8 [height, width, 3], of "
            "red, green and blue"
        )


def _fitted(array: np.ndarray, side: int, what: str) -> np.ndarray:
    require_pixels(array, what)
    if array.shape[:2] == (side, side):
        return array
    image_module = _pillow(f"{what} of {array.shape[0]} x {array.shape[1]} pixels")
    return _resized(image_module.fromarray(array), side, image_module, what)


def _resized(image: Any, side: int, image_module: Any, what: str) -> np.ndarray:
    """The image resized (bicubic, the longer side rounded down), then its middle. UserError for a
    narrow strip, whose resized image would take memory without bound."""
    short, long = min(image.size), max(image.size)
    if long > _MOST_LONG * short:
        raise UserError(
            f"{what} is {short} x {long} pixels: one side must be at most {_MOST_LONG} times the "
            "other; leave it out"
        )
    scaled = side, int(side * long / short)
    width, height = scaled if image.size[0] <= image.size[1] else scaled[::-1]
    pixels = np.asarray(image.resize((width, height), image_module.Resampling.BICUBIC))
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[top : top + side, left : left + side]


def _pillow(what: str) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise UserError(
            f"{what}: decoding and resizing need Pillow; pip install 'mtx[images]', or give arrays "
            "(.npy) of the model's size"
        ) from None
    return Image
