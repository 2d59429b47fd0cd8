"""FLOPs of a convolution as XLA writes it; on TPUs every matmul is a convolution.

A plain matmul has one position per window. A batched one hides its batch among the spatial dims,
with paddings and dilations that let each output see only one position of the window, so only
products without padding are counted.
"""

from __future__ import annotations

import re

import numpy as np

from mtx.errors import UserError


def convolution_flops(
    left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...], attributes: str
) -> float:
    """2 x the products of two numbers, neither of which is padding.

    left, right, result: dims of the input, the kernel and the output; attributes: the text after
    the operands, with `dim_labels=bf_io->bf` and, if there are spatial dims, `window={...}`.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if not labels:
        raise UserError(f"no dim_labels in {attributes[:60]!r}: its FLOPs are not known")
    inputs, kernel, output = labels.groups()
    window = re.search(r"window=\{([^}]*)\}", attributes)
    window = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
    products = result[output.index("b")] * result[output.index("f")] * right[kernel.index("i")]
    for dim in sorted(filter(str.isdigit, output)):
        products *= _pairs(
            left[inputs.index(dim)],
            right[kernel.index(dim)],
            result[output.index(dim)],
            {name: text.split("x")[int(dim)] for name, text in window.items()},
        )
    return 2.0 * products


def _pairs(size: int, kernel: int, outputs: int, window: dict[str, str]) -> int:
    """(output, kernel) positions along one dim at which the kernel meets an input."""
    stride, dilate = int(window.get("stride", 1)), int(window.get("lhs_dilate", 1))
    before = int(window.get("pad", "0_0").split("_")[0])
    reach = np.arange(kernel) * int(window.get("rhs_dilate", 1)) - before
    at = np.arange(outputs)[:, None] * stride + reach
    inside = (at >= 0) & (at <= (size - 1) * dilate) & (at % dilate == 0)
    return int(inside.sum())
