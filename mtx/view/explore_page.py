"""What is shown of a layout, as one piece of HTML: no scripts, and tooltips by `title` alone.

Every cell of the mesh says its device in `data-device`, so that whoever shows the page can tell
what was clicked.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from dataclasses import fields
from html import escape

import numpy as np

from mtx.plan.compare import seconds
from mtx.plan.priced import GIB
from mtx.plan.search import MEMORY_AT_MOST
from mtx.plan.summary import part_name, title
from mtx.view.colours import hexadecimal, ink
from mtx.view.explore import Look
from mtx.view.explore_device import Device, Held, numbers_text
from mtx.view.memory import MEMORY_COLOURS
from mtx.view.mesh import AXES, MeshMap, link_text, stage_colours
from mtx.view.picture import COMMUNICATION, COMMUNICATION_LIGHT, FAINT, INK, LIMIT
from mtx.view.plan import TIME_COLOURS
from mtx.view.spans import count

_ALONE = 1024  # devices that are drawn one by one
_LABELLED = 128  # with their numbers in them
_CELL_PIXELS = 84  # at most
_WIDE, _HIGH = 10.0, 7.0  # of a cell, in the units of its picture
_GROUP_COLOURS = {"tensor": COMMUNICATION, "data": COMMUNICATION_LIGHT, "pipe": LIMIT}
_ROWS = 16  # of stages of a schedule, at most
_PIXELS = 240  # height of a schedule, at most; and a row's is a tenth
_TOY = 0.1  # GiB: below, MiB are shown
_STYLE = (
    """
.mtx{font:13px/1.45 system-ui,sans-serif;color:%(ink)s;background:#fff;padding:8px;
box-sizing:border-box;max-width:100%%;overflow-wrap:anywhere}
.mtx h4{margin:12px 0 4px;font-size:13px}.mtx svg{display:block;max-width:100%%;height:auto}
.mtx .row{display:flex;flex-wrap:wrap;gap:4px 28px}.mtx .row>div{flex:1 1 380px;min-width:0}
.mtx table{border-collapse:collapse;font-size:12px;margin:0;width:100%%}
.mtx td,.mtx th{text-align:left;padding:1px 10px 1px 0;vertical-align:top;white-space:normal}
.mtx td:first-child,.mtx .held td:nth-child(2),.mtx th{white-space:nowrap}
.mtx th,.mtx small{color:%(faint)s;font-weight:400}.mtx [data-device]{cursor:pointer}
.mtx .bar{display:flex;position:relative;height:26px;width:100%%;background:#f4f4f4}
.mtx .bar>i{position:absolute;top:-3px;bottom:-3px;border-left:2px solid %(limit)s}
.mtx .bar>span{overflow:hidden;font-size:11px;line-height:26px;text-align:center;white-space:nowrap}
.mtx .key{display:inline-block;width:10px;height:10px;margin:0 5px 0 0}
.mtx img{display:block;width:100%%;image-rendering:pixelated}
""".strip()
    % {"ink": INK, "faint": "#6a6a6a", "limit": LIMIT}
)


def page_html(look: Look) -> str:
    """Mesh, device, memory, time, schedule and communication of a layout, side by side where there
    is room."""
    left = [_mesh(look), _memory(look), _time(look), _schedule(look)]
    return (
        f'<div class="mtx"><style>{_STYLE}</style>{_headline(look)}'
        f'<div class="row"><div>{"".join(left)}</div><div>{device_html(look)}</div></div>'
        f"{_communication(look)}</div>"
    )


def _headline(look: Look) -> str:
    plan, layout = look.plan, look.layout
    facts = [
        f"<b>{seconds(plan.time.step_s)}</b> a step",
        f"bubble <b>{plan.bubble_over_ideal:.2%}</b> of ideal time",
        f"<b>{plan.tflops_per_gpu_sc21:,.1f}</b> teraFLOP/s a GPU, MFU <b>{plan.mfu:.1%}</b>",
        f"memory <b>{_size(plan.memory.total_bytes)}</b>, {_fits(look)}",
    ]
    layout_text = (
        f"pipe {layout.pipe} x data {layout.data} x tensor {layout.tensor} = {layout.devices:,}, "
        f"virtual {layout.virtual}, microbatches {plan.run.microbatches} of {layout.microbatch}"
    )
    chosen = "".join(f"<br><small>{escape(why)}</small>" for why in plan.chosen)
    return (
        f"<b>{escape(title(plan))}</b><br>{layout_text}{chosen}<br>{' · '.join(facts)} "
        "<small>(predicted)</small>"
    )


def _fits(look: Look) -> str:
    share = f"{look.plan.memory_share:.0%} of a device"
    if look.plan.fits:
        return f"{share}: fits"
    return f'<b style="color:{LIMIT}">{share}: does not fit</b>'


def _size(size_bytes: float) -> str:
    gib = size_bytes / GIB
    return f"{gib:,.2f} GiB" if gib >= _TOY else f"{1024 * gib:,.2f} MiB"


# --- the mesh -------------------------------------------------------------------------------------


def _mesh(look: Look) -> str:
    layout, node_size = look.layout, look.plan.hardware.node_devices
    grid = MeshMap.of(layout, node_size, alone=_ALONE)
    nodes = count(-(-layout.devices // node_size), "node")
    cell = "a cell: a device" if grid.unit == 1 else f"a cell: {grid.unit} devices"
    framed = "frames: " if _framed(grid, node_size) else ""
    keys = _key("#ffffff", "this device", border=INK)
    keys += "".join(
        _key(colour, f"its {axis} group")
        for axis, colour in _GROUP_COLOURS.items()
        if getattr(layout, axis) > 1
    )
    below = ""
    if grid.unit > 1:
        stage_devices = layout.data * layout.tensor
        (first,) = _cells_of([look.device.rank], grid, stage_devices)
        stop = min(first + grid.unit, (look.device.stage + 1) * stage_devices)
        below = f"<small>the devices of its cell:</small>{_inside(look, range(first, stop))}"
    return (
        f"<h4>Mesh</h4>{mesh_svg(look, grid)}<small>colour: stage, p0 to p{layout.pipe - 1}; "
        f"{cell}; {framed}{nodes} of {node_size}; click one, hover for what it is</small>"
        f"<div>{keys}</div>{below}"
    )


def mesh_svg(look: Look, grid: MeshMap) -> str:
    """The cells of the mesh, each with its device, its groups and its part of the model as a
    tooltip; framed are the nodes, the device and its groups."""
    layout, stage_devices = look.layout, look.layout.data * look.layout.tensor
    colours = [hexadecimal(colour) for colour in stage_colours(layout.pipe)]
    cells = [
        (stage * stage_devices + cell * grid.unit, stage)
        for stage in range(layout.pipe)
        for cell in range(grid.cells)
    ]
    places = {first: grid.corner(first, stage_devices) for first, _ in cells}
    groups = {axis: look.device.group(axis) for axis in AXES if getattr(layout, axis) > 1}
    drawn, labelled = [], layout.devices <= _LABELLED
    for first, stage in cells:
        stop = min(first + grid.unit, (stage + 1) * stage_devices)
        ranks = range(first, stop)
        drawn.append(_cell(look, places[first], ranks, colours[stage], labelled))
    for axis, ranks in groups.items():
        firsts = sorted(_cells_of(ranks, grid, stage_devices))
        drawn += [_mark(places[first], axis, labelled) for first in firsts]
    (own,) = _cells_of([look.device.rank], grid, stage_devices)
    drawn.append(_own(places[own]))
    drawn += _node_frames(places, grid, look.plan.hardware.node_devices)
    width = (max(x for x, _ in places.values()) + 1) * _WIDE
    height = (max(y for _, y in places.values()) + 1) * _HIGH
    pixels = round(_CELL_PIXELS * width / _WIDE)
    return (
        f'<svg viewBox="-1 -1 {width + 2:g} {height + 2:g}" width="{pixels}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(drawn)}</svg>'
    )


def _cells_of(ranks: Iterable[int], grid: MeshMap, stage_devices: int) -> set[int]:
    """The first devices of the cells that hold `ranks`."""
    return {rank - rank % stage_devices % grid.unit for rank in ranks}


def _cell(look: Look, place: tuple[float, float], ranks: range, colour: str, labelled: bool) -> str:
    x, y = place[0] * _WIDE, place[1] * _HIGH
    device = Device.of(look.layout, ranks[0])
    text = ""
    if labelled:
        at = f"p{device.stage} d{device.replica} t{device.shard}"
        text = "".join(
            f'<text x="{x + _WIDE / 2:g}" y="{y + down:g}" font-size="{points}" fill="{ink(colour)}'
            f'" text-anchor="middle" font-family="sans-serif">{line}</text>'
            for down, points, line in ((3.2, 2.6, f"{device.rank}"), (5.6, 1.6, at))
        )
    return (
        f'<g data-device="{device.rank}"><title>{escape(tooltip(look, ranks))}</title><rect '
        f'x="{x + 0.3:g}" y="{y + 0.3:g}" width="{_WIDE - 0.6:g}" height="{_HIGH - 0.6:g}" '
        f'fill="{colour}"/>{text}</g>'
    )


def tooltip(look: Look, ranks: range) -> str:
    """What a cell of the mesh holds: of one device its coordinates, its groups and its part of the
    model; of several, which they are."""
    device, node_size = Device.of(look.layout, ranks[0]), look.plan.hardware.node_devices
    lines = [f"{device}, node {device.rank // node_size}"]
    if len(ranks) > 1:
        lines[0] = f"devices {ranks[0]:,} to {ranks[-1]:,}: stage {device.stage}, from {lines[0]}"
    lines += [
        f"{axis} group: {numbers_text(group)}"
        for axis in AXES
        if len(group := device.group(axis)) > 1
    ]
    return "\n".join([*lines, *_part_lines(look.held_by(device))])


def _part_lines(held: list[Held]) -> list[str]:
    """Its layers, and of which dims of the parameters it has a part, each said once."""
    layers = [f"layers {numbers_text(each.layers)}" for each in held if each.layers is not None]
    cuts = [each.part_text for each in held if each.part_text != "all"]
    return list(dict.fromkeys([*layers, *cuts]))


def _mark(place: tuple[float, float], axis: str, labelled: bool) -> str:
    """A dot on a cell of the device's group over `axis`."""
    right, down = {"tensor": (1.5, 1.6), "data": (8.5, 1.6), "pipe": (8.5, 4.0)}[axis]
    radius = 0.9 if labelled else 1.4
    return (
        f'<circle class="{axis}" cx="{place[0] * _WIDE + right:g}" r="{radius}" stroke="#ffffff" '
        f'cy="{place[1] * _HIGH + down:g}" fill="{_GROUP_COLOURS[axis]}" stroke-width="0.25" '
        'pointer-events="none"/>'
    )


def _own(place: tuple[float, float]) -> str:
    return _outline("own", place[0] * _WIDE + 0.1, place[1] * _HIGH + 0.1, _WIDE - 0.2, INK, 0.6)


def _outline(name: str, x: float, y: float, wide: float, colour: str, line: float) -> str:
    return (
        f'<rect class="{name}" x="{x:g}" y="{y:g}" width="{wide:g}" height="{_HIGH:g}" fill="none" '
        f'stroke="{colour}" stroke-width="{line}" pointer-events="none"/>'
    )


def _framed(grid: MeshMap, node_size: int) -> bool:
    return grid.aligned and grid.unit < node_size


def _node_frames(
    places: dict[int, tuple[float, float]], grid: MeshMap, node_size: int
) -> Iterator[str]:
    """Thin frames around each node's cells of a row; none where cells are nodes, or not aligned."""
    if not _framed(grid, node_size):
        return
    start, before = None, None
    for first, (x, y) in [*sorted(places.items()), (-1, (-1.0, -1.0))]:
        node = first // node_size
        if before is not None and (node, y, x) != (before[0], before[1], before[2] + 1):
            left, wide = start * _WIDE, (before[2] - start + 1) * _WIDE
            yield _outline("node", left, before[1] * _HIGH, wide, FAINT, 0.3)
            start = None
        start, before = x if start is None else start, (node, y, x)


def _inside(look: Look, ranks: range) -> str:
    """The devices of the chosen one's cell, to be clicked."""
    layout = look.layout
    colours = [hexadecimal(colour) for colour in stage_colours(layout.pipe)]
    drawn = []
    for place, rank in enumerate(ranks):
        at = (place % 16, place // 16)
        colour = colours[Device.of(layout, rank).stage]
        drawn.append(_cell(look, at, range(rank, rank + 1), colour, labelled=True))
        if rank == look.device.rank:
            drawn.append(_own(at))
    wide, high = min(len(ranks), 16) * _WIDE, -(-len(ranks) // 16) * _HIGH
    return (
        f'<svg viewBox="-1 -1 {wide + 2:g} {high + 2:g}" width="{round(4 * wide)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(drawn)}</svg>'
    )


# --- a device -------------------------------------------------------------------------------------


def device_html(look: Look) -> str:
    """A device's place, its groups, and what it holds of every parameter."""
    device, node_size = look.device, look.plan.hardware.node_devices
    groups = "".join(
        f"<tr><td>{axis}</td><td>{numbers_text(group)}</td><td>{_nodes_text(group, node_size)}</td>"
        f"</tr>"
        for axis in AXES
        for group in [device.group(axis)]
    )
    held = look.held
    rows = "".join(
        f"<tr><td>{each.name.removeprefix('layers.')}</td>"
        f"<td>{'' if each.layers is None else numbers_text(each.layers)}</td>"
        f"<td>{each.part_text}</td><td>{each.master_text}</td></tr>"
        for each in held
    )
    parts, masters = (
        sum(getattr(each, name) for each in held) for name in ("elements", "master_elements")
    )
    return (
        f"<h4>{device}, in node {device.rank // node_size}</h4>"
        f"<table><tr><th>axis</th><th>its group</th><th>in nodes</th></tr>{groups}</table>"
        '<h4>What it holds</h4><table class="held"><tr><th>parameter</th><th>layers</th>'
        "<th>computes with</th><th>updates, of that</th></tr>"
        f"{rows}<tr><td>in all</td><td></td><td>{parts:,} numbers</td><td>{masters:,} numbers</td>"
        "</tr></table><small>computes with: in the compute type, and a float32 gradient as large; "
        "updates: float32 master and Adam's two moments, its shard over data</small>"
    )


def _nodes_text(ranks: range, node_size: int) -> str:
    nodes = sorted({rank // node_size for rank in ranks})
    return numbers_text(nodes) + (" (between nodes)" if len(nodes) > 1 else "")


# --- memory, time, schedule, communication --------------------------------------------------------


def _memory(look: Look) -> str:
    memory, device = look.plan.memory, look.plan.hardware
    parts = [
        (part_name(each.name), getattr(memory, each.name), MEMORY_COLOURS[each.name])
        for each in fields(memory)
    ]
    whole = max(memory.total_bytes, device.memory_bytes)
    toy = memory.total_bytes < 0.02 * device.memory_bytes
    bar = _bar(parts, memory.total_bytes if toy else whole, _size)
    if not toy:
        limits = "".join(
            f'<i style="left:{min(100.0, 100 * share * device.memory_bytes / whole):.2f}%" '
            f'title="{share:.0%} of {device.memory_gib:g} GiB"></i>'
            for share in (MEMORY_AT_MOST, 1.0)
        )
        bar = bar.replace("</div>", limits + "</div>", 1)
    heading = f"Memory of a device: {_size(memory.total_bytes)} of {device.memory_gib:g} GiB"
    return f"<h4>{heading}</h4>{bar}"


def _time(look: Look) -> str:
    time = look.plan.time
    parts = [
        (part_name(each.name), getattr(time, each.name), TIME_COLOURS[each.name])
        for each in fields(time)
    ]
    return f"<h4>Time of a step: {seconds(time.step_s)}</h4>{_bar(parts, time.step_s, seconds)}"


def _bar(parts: list[tuple[str, float, str]], whole: float, text) -> str:
    """Parts side by side on a bar that stands for `whole`, and what they are."""
    parts = [part for part in parts if part[1] > 0]
    spans = "".join(
        f'<span style="width:{100 * value / whole:.3f}%;background:{colour};color:{ink(colour)}" '
        f'title="{name}: {text(value)}, {value / whole:.1%}">'
        f"{text(value) if value > 0.12 * whole else ''}</span>"
        for name, value, colour in parts
    )
    keys = "".join(_key(colour, f"{name} {text(value)}") for name, value, colour in parts)
    return f'<div class="bar">{spans}</div><div>{keys}</div>'


def _key(colour: str, text: str, *, border: str | None = None) -> str:
    style = f"background:{colour}" + (
        f";border:2px solid {border};box-sizing:border-box" * bool(border)
    )
    return (
        f'<small style="white-space:nowrap;margin-right:12px"><span class="key" style="{style}">'
        f"</span>{text}</small> "
    )


def _schedule(look: Look) -> str:
    plan, layout = look.plan, look.layout
    heading = f"Schedule: bubble {plan.bubble_over_ideal:.2%} of ideal time"
    if look.timeline is None:
        return f"<h4>{heading}</h4><small>the schedule is too long for a picture</small>"
    every = -(-layout.pipe // _ROWS)
    drawn = look.timeline[::every]
    stages, kinds = drawn.shape[:2]
    high = min(_PIXELS // 10, _PIXELS // stages) // kinds
    picture = np.repeat(drawn.reshape(stages * kinds, *drawn.shape[2:]), high, axis=0)
    picture[:: high * kinds] = 1.0  # between stages
    rows = "a stage" if every == 1 else f"for every {every} stages"
    return (
        f"<h4>{heading}</h4>{_png(picture)}<small>{layout.schedule}: a row {rows}, from p0; in "
        f"each {', '.join(look.kinds)} below each other, over time; grey: idle</small>"
    )


def _png(rgb_YX3: np.ndarray) -> str:
    from matplotlib.image import imsave

    data = io.BytesIO()
    imsave(data, rgb_YX3, format="png")
    text = base64.b64encode(data.getvalue()).decode()
    return f'<img src="data:image/png;base64,{text}" alt="schedule">'


def _communication(look: Look) -> str:
    return (
        "<h4>Communication of a device</h4><table><tr><th>axis</th><th>groups</th><th>links</th>"
        f"<th>what is sent</th><th>of a step</th></tr>{''.join(_axis_rows(look))}</table>"
    )


def _axis_rows(look: Look) -> Iterator[str]:
    hardware, step_s = look.plan.hardware, look.plan.time.step_s
    for axis in look.axes:
        links = axis.links
        spent = f"{seconds(axis.seconds)}, {axis.seconds / step_s:.1%}" if axis.seconds else ""
        columns = (
            links.axis, f"{axis.groups:,} of {links.size}", link_text(links, hardware),
            links.sends, spent,
        )  # fmt: skip
        yield f"<tr>{''.join(f'<td>{column}</td>' for column in columns)}</tr>"
