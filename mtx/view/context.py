"""Sequences split over `context`, as a picture: which device holds which positions, and when its
queries meet which keys.

Of 2c chunks, device r has the r-th and the r-th from the end (`mtx.sharding.sequence`). In step i
of a ring, its queries meet the keys of device r - i (`mtx.layers.over_context`); gathered keys are
met in the same order. If heads are split in place of positions, the ring is one of groups. With a
window, all the chunks that a device sees are sent to it at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtx.config import Layout, ModelConfig
from mtx.costs.ask import pattern_of
from mtx.plan.choose import context_attention
from mtx.view import picture
from mtx.view.picture import FAINT, INK, ink, rgb, stage_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_LABELLED = 16  # up to this many devices, cells have numbers in them
_TICKS = 16  # at most, along an axis
_LOW_TICKS = 8  # and along a low axis
_PARTLY = 0.45  # of a colour, if a chunk is seen in part


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the positions of a sequence are split, and what queries see."""

    sequence: int
    devices: int
    shards: int  # of a device's positions, by sequence parallelism
    by_heads: int  # devices that split whole sequences by heads: one member of a ring
    way: str
    causal: bool
    window: int | None = None

    @classmethod
    def of(cls, layout: Layout, model: ModelConfig) -> Cut:
        way, groups = context_attention(layout, model), max(1, model.groups // layout.tensor)
        shared = way in ("ulysses", "usp")
        alike = len(set(pattern_of(model))) == 1
        return cls(
            sequence=model.sequence, devices=layout.context,
            shards=layout.tensor if layout.sequence_parallel else 1,
            by_heads=math.gcd(groups, layout.context) if shared else 1, way=way,
            causal=model.causal, window=getattr(model, "window", None) if alike else None,
        )  # fmt: skip

    @property
    def members(self) -> int:
        """The size of the ring, in devices or groups of devices."""
        return self.devices // self.by_heads

    @property
    def near(self) -> bool:
        """Whether a window keeps queries from some of the keys."""
        return self.causal and self.window is not None and self.window < self.sequence

    def chunks(self, members: int) -> np.ndarray:
        """int [members, 2]: which of the 2 * members chunks each member has."""
        first = np.arange(members)
        return np.stack([first, 2 * members - 1 - first], axis=1)

    def seen(self) -> np.ndarray:
        """int [members, steps, 2, 2]: for each member and step, what its chunks of queries see of
        the chunks of keys that are there: 0 nothing, 1 a part, 2 all."""
        r = self.members
        numbers, size = self.chunks(r), self.sequence // (2 * r)
        keys = numbers[(np.arange(r)[:, None] - np.arange(r)) % r]  # [members, steps, 2]
        back = numbers[:, None, :, None] - keys[:, :, None, :]
        if not self.causal:
            return np.full(back.shape, 2)
        seen = np.select([back > 0, back == 0], [2, 1], 0)
        if not self.near:
            return seen
        assert self.window is not None
        nearest, farthest = (back - 1) * size + 1, (back + 1) * size - 1  # between two positions
        return np.select([nearest >= self.window, farthest >= self.window], [0, seen.clip(max=1)],
                         seen)  # fmt: skip

    def steps(self) -> np.ndarray:
        """float [2 members, 2 members], in the order of positions: the step in which a chunk of
        queries meets a chunk of keys or, with a window, how many chunks back it is; nan if unseen.
        """
        r, seen = self.members, self.seen()
        found, numbers = np.full((2 * r, 2 * r), np.nan), self.chunks(r)
        for member, step, a, b in np.argwhere(seen > 0):
            query, key = numbers[member, a], numbers[(member - step) % r, b]
            found[query, key] = query - key if self.near else step
        return found


def draw_context(layout: Layout, model: ModelConfig, path: str | Path | None = None) -> Figure:
    """Draw which device holds which positions, and the steps in which queries meet keys; saved to
    `path` if given. Errors: as for `draw_plan`."""
    figure = picture.new_figure(11.5, 7.0, path)
    fill_context(figure, layout, model)
    return picture.save_figure(figure, path)


def fill_context(figure: Figure | SubFigure, layout: Layout, model: ModelConfig) -> None:
    """The picture of `draw_context` in a figure, or in a part of one."""
    cut = Cut.of(layout, model)
    above, below = picture.split_figure(figure, 2.2, 4.2)
    picture.figure_title(above, f"context {cut.devices}, attention by {cut.way}: {_how(cut)}", 10)
    _draw_positions(above.add_subplot(), cut)
    parts = below.add_gridspec(1, 1 if cut.near else 2)
    if not cut.near:
        _draw_steps(below.add_subplot(parts[0]), cut)
    _draw_scores(below.add_subplot(parts[-1]), cut)


def _how(cut: Cut) -> str:
    if cut.by_heads == 1:
        if cut.near:
            return f"a window of {cut.window:,}, whose chunks are sent at once"
        each = {"gather": "keys are gathered, and met in this order", "ring": "keys go round"}
        return each[cut.way]
    groups = f"{cut.by_heads} neighbours share their sequences by heads"
    return groups + (f", {cut.members} groups are a ring" if cut.members > 1 else "")


def _draw_positions(axes: Axes, cut: Cut) -> None:
    """A row for each device: its two chunks, and the shards of sequence parallelism in them."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    size, colours = cut.sequence / (2 * cut.devices), stage_colours(cut.devices)
    boxes = [
        (Rectangle((chunk * size, device + 0.06), size, 0.88), colours[device])
        for device, own in enumerate(cut.chunks(cut.devices))
        for chunk in own
    ]
    axes.add_collection(
        PatchCollection(
            [box for box, _ in boxes], facecolors=[c for _, c in boxes], edgecolors="none"
        )  # fmt: skip
    )
    shard = 2 * size / cut.shards
    narrow = cut.devices * cut.shards > 64
    for device, own in enumerate(cut.chunks(cut.devices) if not narrow else ()):
        for number in range(cut.shards if cut.shards > 1 else 0):
            half, offset = divmod(number * shard, size)
            left = own[int(half)] * size + offset
            axes.plot([left, left], [device + 0.06, device + 0.94], color="white", linewidth=0.6)
            axes.text(
                left + min(shard, size) / 2, device + 0.5, f"t{number}", fontsize=5.5, ha="center",
                va="center", color=ink(colours[device]),
            )  # fmt: skip
    _name_rows(axes, cut.devices, "device", _LOW_TICKS)
    axes.set_xlim(0, cut.sequence)
    shards = f"; t: shards of sequence parallelism, {cut.shards} a device" if cut.shards > 1 else ""
    title = f"Who holds which positions: two chunks of {size:,.0f} each{shards}"
    picture.plain_axes(axes, title, f"positions of a sequence of {cut.sequence:,}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_steps(axes: Axes, cut: Cut) -> None:
    """A cell for each device and step: whose keys are there, in colour if they are seen, for both
    chunks of queries (rows) and of keys (columns)."""
    r, seen = cut.members, cut.seen()
    palette = np.array([rgb(colour) for colour in stage_colours(r)])
    keys = (np.arange(r)[:, None] - np.arange(r)) % r
    share = np.array([0.0, _PARTLY, 1.0])[seen][..., None]
    cells = 1 - share * (1 - palette[keys][:, :, None, None])
    image = cells.transpose(0, 2, 1, 3, 4).reshape(2 * r, 2 * r, 3)
    axes.imshow(image, extent=(0, r, r, 0), interpolation="nearest", aspect="auto")
    if r <= _LABELLED:
        axes.hlines(range(1, r), 0, r, color=INK, linewidth=0.6)
        axes.vlines(range(1, r), 0, r, color=INK, linewidth=0.6)
        for device, step in np.ndindex(r, r):
            axes.text(
                step + 0.5, device + 0.5, str(keys[device, step]), ha="center", va="center",
                fontsize=8, color=INK,
                bbox={"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": "none"},
            )  # fmt: skip
    _name_rows(axes, r, _member(cut), _TICKS)
    ticks = range(0, r, -(-r // _TICKS))
    axes.set_xticks([tick + 0.5 for tick in ticks], [str(tick) for tick in ticks])
    number = f"number: {_member(cut)} whose keys are there; " if r <= _LABELLED else ""
    title = f"Whom queries meet when\n({number}white: not seen, light: in part)"
    picture.plain_axes(axes, title, "step")


def _draw_scores(axes: Axes, cut: Cut) -> None:
    """The square of scores in the order of positions: the step in which each part is computed."""
    import matplotlib

    r, steps = cut.members, cut.steps()
    colours = matplotlib.colormaps["YlGnBu"]
    shown = colours(0.15 + 0.75 * np.nan_to_num(steps) / max(1.0, np.nanmax(steps)))
    shown[np.isnan(steps)] = 1.0
    axes.imshow(shown, extent=(0, 2 * r, 2 * r, 0), interpolation="nearest", aspect="auto")
    if 2 * r <= _LABELLED:
        for row, column in np.argwhere(~np.isnan(steps)):
            colour = ink("#" + "".join(f"{round(255 * x):02x}" for x in shown[row, column, :3]))
            axes.text(
                column + 0.5, row + 0.5, f"{steps[row, column]:.0f}", ha="center", va="center",
                fontsize=7, color=colour,
            )  # fmt: skip
    owners = {int(chunk): member for member, own in enumerate(cut.chunks(r)) for chunk in own}
    ticks = range(0, 2 * r, -(-2 * r // _TICKS))
    labels = [f"{owners[tick]}" for tick in ticks]
    axes.set_xticks([tick + 0.5 for tick in ticks], labels)
    axes.set_yticks([tick + 0.5 for tick in ticks], labels)
    what = "how many chunks back" if cut.near else "the step"
    farther = "the darker, the farther back" if cut.near else "the darker, the later"
    said = f"number and shade: {what}" if 2 * r <= _LABELLED else farther
    picture.plain_axes(
        axes, f"The square of scores, chunk by chunk\n({said}; white: not computed)",
        f"keys: the {_member(cut)} that has the chunk", f"queries: the {_member(cut)}",
    )  # fmt: skip


def _member(cut: Cut) -> str:
    return "device" if cut.by_heads == 1 else "group"


def _name_rows(axes: Axes, rows: int, name: str, most: int) -> None:
    ticks = range(0, rows, -(-rows // most))
    axes.set_yticks([tick + 0.5 for tick in ticks], [f"{name} {tick}" for tick in ticks])
    axes.set_ylim(rows, 0)
    axes.tick_params(axis="y", length=0, colors=FAINT)
