"""The page of a layout, as one HTML element: no scripts, and tooltips by `title` alone.

Every cell of the mesh names its device in `data-device`, so that whoever shows the page can tell
what was clicked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from mtx.plan.compare import seconds
from mtx.plan.plan import Plan
from mtx.plan.priced import GIB
from mtx.plan.summary import title
from mtx.view.context import Cut
from mtx.view.explore import Look
from mtx.view.explore_device import numbers_text
from mtx.view.html import key, svg, table, tag
from mtx.view.memory import fill_bars
from mtx.view.mesh import Device, link_rows, shape_text
from mtx.view.mesh_picture import MeshMap
from mtx.view.picture import (
    COMMUNICATION,
    COMMUNICATION_LIGHT,
    FAINT,
    INK,
    LIMIT,
    WEIGHT,
    Picture,
    ink,
    new_figure,
    split_figure,
    stage_colours,
)
from mtx.view.plan import fill_schedule, fill_time
from mtx.view.spans import count

_ALONE = 1024  # up to this many devices are drawn one by one
_NUMBERED, _LABELLED = 24, 10  # most cells side by side that show numbers, and places
_CELL_PIXELS = 84  # at most
_WIDE, _HIGH = 10.0, 7.0  # of a cell, in the units of its picture
_PER_ROW = 16  # cells per row, when drawing the devices of one cell
_TOY = 0.1  # GiB: below, MiB are shown
# For the groups of a device, by axis: a dot's colour, and its place in a cell. Others: as data.
_DOTS = {
    "tensor": (COMMUNICATION, 1.5, 1.6),
    "data": (COMMUNICATION_LIGHT, 8.5, 1.6),
    "pipe": (LIMIT, 8.5, 4.0),
    "context": ("#0f8b8d", 1.5, 4.0),
    "expert": (WEIGHT, 5.0, 6.2),
}
_STYLE = (
    """
.mtx{font:13px/1.45 system-ui,sans-serif;color:%(ink)s;background:#fff;padding:8px;
box-sizing:border-box;max-width:100%%;overflow-wrap:anywhere}
.mtx h4{margin:12px 0 4px;font-size:13px}.mtx svg{display:block;max-width:100%%;height:auto}
.mtx .row{display:flex;flex-wrap:wrap;gap:4px 28px}
.mtx .row>div{flex:1 1 380px;min-width:0;overflow-x:auto}
.mtx table{border-collapse:collapse;font-size:12px;margin:0;width:100%%}
.mtx td,.mtx th{text-align:left;padding:1px 10px 1px 0;vertical-align:top;white-space:normal}
.mtx td:first-child,.mtx .held td:nth-child(2),.mtx th{white-space:nowrap}
.mtx th,.mtx small{color:%(faint)s;font-weight:400}.mtx [data-device]{cursor:pointer}
.mtx .key{display:inline-block;width:10px;height:10px;margin:0 5px 0 0}
""".strip()
    % {"ink": INK, "faint": "#6a6a6a"}
)


def page_html(look: Look) -> str:
    """Mesh, device, memory, time, schedule and communication of a layout, side by side if there is
    room."""
    columns = tag("div", *_mesh(look), _pictures(look.plan)) + tag("div", *_device(look))
    return tag(
        "div", tag("style", _STYLE), _headline(look), tag("div", columns, class_="row"),
        *_communication(look), class_="mtx",
    )  # fmt: skip


def _headline(look: Look) -> str:
    plan, layout = look.plan, look.layout
    fits = f"{plan.memory_share:.0%} of a device: {'fits' if plan.fits else 'does not fit'}"
    facts = [
        f"<b>{seconds(plan.time.step_s)}</b> a step",
        f"bubble <b>{plan.bubble_over_ideal:.2%}</b> of ideal time",
        f"<b>{plan.tflops_per_gpu_sc21:,.1f}</b> teraFLOP/s a GPU, MFU <b>{plan.mfu:.1%}</b>",
        f"memory <b>{_size(plan.memory.total_bytes)}</b>, "
        + (fits if plan.fits else tag("b", fits, style=f"color:{LIMIT}")),
    ]
    sizes = (
        f"{shape_text(layout)} = {layout.devices:,}, "
        f"{layout.schedule_text}, microbatches {plan.run.microbatches} of {layout.microbatch}"
    )
    chosen = [tag("small", escape(why)) for why in plan.chosen]
    said = f"{' · '.join(facts)} <small>(predicted)</small>"
    return "<br>".join([tag("b", escape(title(plan))), sizes, *chosen, said])


def _size(size_bytes: float) -> str:
    gib = size_bytes / GIB
    return f"{gib:,.2f} GiB" if gib >= _TOY else f"{1024 * gib:,.2f} MiB"


# --- the mesh -------------------------------------------------------------------------------------


def _mesh(look: Look) -> Iterator[str]:
    layout, node_size = look.layout, look.plan.hardware.node_devices
    grid = MeshMap.of(layout, node_size, alone=_ALONE)
    nodes = count(-(-layout.devices // node_size), "node")
    cell = "a cell: a device" if grid.unit == 1 else f"a cell: {grid.unit} devices"
    frames = grid.frames(node_size)
    framed = "frames: " if frames else ""
    groups = [axis for axis, size in layout.sizes.items() if size > 1]
    places = {grid.ranks(first): grid.corner(first) for first in grid.firsts()}
    yield tag("h4", "Mesh")
    yield _svg(look, places, _CELL_PIXELS, groups, [each[1:] for each in frames])
    yield tag(
        "small", f"colour: stage, p0 to p{layout.pipe - 1}; {cell}; {framed}{nodes} of {node_size}"
        "; click one, hover for what it is",
    )  # fmt: skip
    keys = [key(_dot(axis)[0], f"its {axis} group") for axis in groups]
    yield tag("div", key("#ffffff", "this device", border=INK), *keys)
    if grid.unit > 1:
        ranks = grid.ranks(grid.first(look.device.rank))
        yield tag("small", "the devices of its cell:")
        alone = {range(rank, rank + 1): (float(at % _PER_ROW), float(at // _PER_ROW))
                 for at, rank in enumerate(ranks)}  # fmt: skip
        yield _svg(look, alone, 4 * _WIDE)


def _dot(axis: str) -> tuple[str, float, float]:
    return _DOTS.get(axis, _DOTS["data"])


def _svg(
    look: Look, places: dict[range, tuple[float, float]], pixels: float,
    groups: Sequence[str] = (), frames: Sequence[tuple[float, ...]] = (),
) -> str:  # fmt: skip
    """Cells, each `pixels` wide, with their part of the model as a tooltip; frames around nodes
    (left, top, width, height) and around the device; and dots for its groups. places: the place of
    each cell, by its devices."""
    columns, rows = (max(place[dim] for place in places.values()) + 1 for dim in (0, 1))
    labels = (columns <= _NUMBERED) + (columns <= _LABELLED)
    drawn = [_cell(look, ranks, x * _WIDE, y * _HIGH, labels) for ranks, (x, y) in places.items()]
    for axis in reversed(groups):
        (colour, right, down), group = _dot(axis), set(look.device.group(axis))
        drawn += [
            tag(
                "circle", class_=axis, cx=x * _WIDE + right, cy=y * _HIGH + down, fill=colour,
                r=0.9 if labels else 1.4, stroke="#ffffff", stroke_width=0.25,
                pointer_events="none",
            )
            for ranks, (x, y) in places.items() if group.intersection(ranks)
        ]  # fmt: skip
    own = next(place for ranks, place in places.items() if look.device.rank in ranks)
    outlines = [("own", (own[0] + 0.01, own[1] + 0.014, 0.98, 1), INK, 0.6)]
    outlines += [("node", frame, FAINT, 0.3) for frame in frames]
    drawn += [
        tag(
            "rect", class_=name, x=float(x * _WIDE), y=float(y * _HIGH), width=float(wide * _WIDE),
            height=float(high * _HIGH), fill="none", stroke=colour, stroke_width=line,
            pointer_events="none",
        )
        for name, (x, y, wide, high), colour, line in outlines
    ]  # fmt: skip
    return svg(drawn, columns * _WIDE, rows * _HIGH, pixels * columns)


def _cell(look: Look, ranks: range, x: float, y: float, labels: int) -> str:
    device = Device(layout=look.layout, rank=ranks[0])
    colour = stage_colours(look.layout.pipe)[device.at["pipe"]]
    lines = [(3.2, 2.6, f"{device.rank}"), (5.6, 1.6, device.label)][:labels]
    texts = [
        tag(
            "text", line, x=x + _WIDE / 2, y=y + down, font_size=points, fill=ink(colour),
            text_anchor="middle", font_family="sans-serif",
        )
        for down, points, line in lines
    ]  # fmt: skip
    box = tag("rect", x=x + 0.3, y=y + 0.3, width=_WIDE - 0.6, height=_HIGH - 0.6, fill=colour)
    hover = tag("title", escape(_tooltip(look, device, ranks)))
    return tag("g", hover, box, *texts, data_device=device.rank)


def _tooltip(look: Look, device: Device, ranks: range) -> str:
    """The coordinates of one device, or which devices several are; their groups, layers, and the
    parts they have of dims of the parameters, each said once."""
    head = f"{device}, node {device.rank // look.plan.hardware.node_devices}"
    if len(ranks) > 1:
        stage = device.at["pipe"]
        head = f"devices {ranks[0]:,} to {ranks[-1]:,}: stage {stage}, from {head}"
    groups, held = [(axis, device.group(axis)) for axis in device.at], look.held_by(device)
    groups = [f"{axis} group: {numbers_text(group)}" for axis, group in groups if len(group) > 1]
    layers = [f"layers {numbers_text(each.layers)}" for each in held if each.layers is not None]
    cuts = [each.part_text for each in held if each.part_text != "all"]
    return "\n".join(dict.fromkeys([head, *groups, *layers, *cuts]))


# --- pictures, device, communication --------------------------------------------------------------


def _pictures(plan: Plan) -> str:
    """Memory, time of a step, and schedule."""
    figure = new_figure(5.4, 8.2)  # about as wide as its column, so that its text stays readable
    memory, time, schedule = split_figure(figure, 2.4, 3.0, 2.8)
    fill_bars(memory.add_subplot(), [plan], columns=2)
    fill_time(time.add_subplot(), plan)
    fill_schedule(schedule.add_subplot(), plan, (4.5, 1.9))
    return Picture(figure=figure).svg()


def _device(look: Look) -> Iterator[str]:
    """A device's place, its groups, and what it holds of every parameter."""
    device, node_size, held = (
        look.device,
        look.plan.hardware.node_devices,
        look.held_by(look.device),
    )
    yield tag("h4", f"{device}, in node {device.rank // node_size}")
    groups = {axis: device.group(axis) for axis in device.at}
    yield table(
        [(axis, numbers_text(group), _nodes_text(group, node_size))
         for axis, group in groups.items()], ("axis", "its group", "in nodes"),
    )  # fmt: skip
    if "context" in device.at:
        yield tag("small", f"of every sequence it has positions {_positions_text(look)}")
    rows = [
        (each.name.removeprefix("layers."),
         "" if each.layers is None else numbers_text(each.layers),
         each.part_text, each.master_text) for each in held
    ]  # fmt: skip
    parts = sum(each.elements for each in held)
    masters = sum(each.master_elements for each in held)
    rows.append(("in all", "", f"{parts:,} numbers", f"{masters:,} numbers"))
    yield tag("h4", "What it holds")
    head = ("parameter", "layers", "computes with", "updates, of that")
    yield table(rows, head, class_="held")
    yield tag(
        "small", "computes with: in the compute type, and a float32 gradient as large; updates: "
        "float32 master and Adam's two moments, its shard over data",
    )  # fmt: skip


def _positions_text(look: Look) -> str:
    """The positions in the device's two chunks."""
    cut = Cut.of(look.layout, look.plan.run.model)
    size, own = cut.sequence // (2 * cut.devices), cut.chunks(cut.devices)
    numbers = own[look.device.at["context"]].tolist()
    return " and ".join(numbers_text(range(n * size, (n + 1) * size)) for n in numbers)


def _nodes_text(ranks: range, node_size: int) -> str:
    nodes = sorted({rank // node_size for rank in ranks})
    return numbers_text(nodes) + (" (between nodes)" if len(nodes) > 1 else "")


def _communication(look: Look) -> Iterator[str]:
    step_s, rows = look.plan.time.step_s, []
    for axis, groups, links, sends in link_rows(look.layout, look.plan.hardware):
        spent = look.sent_s[axis]
        share = f"{seconds(spent)}, {spent / step_s:.1%}" if spent else ""
        rows.append((axis, groups.removesuffix("s").removesuffix(" device"), links, sends, share))
    yield tag("h4", "Communication of a device")
    yield table(rows, ("axis", "groups", "links", "what is sent", "of a step"))
