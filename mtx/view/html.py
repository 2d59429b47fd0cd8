"""Elements of a page as text: tags, tables, bars of parts, and the keys of their colours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mtx.view.picture import ink


def tag(name: str, *inside: str, **attributes: object) -> str:
    """An element. `class_` is its class, `data_device` its data-device; numbers are rounded."""

    def text(value: object) -> str:
        return f"{value:g}" if isinstance(value, float) else f"{value}"

    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{words}>{''.join(inside)}</{name}>"


def table(rows: Iterable[Iterable[str]], head: Sequence[str] = (), **attributes: object) -> str:
    lines = [tag("tr", *(tag("th", cell) for cell in head))] if head else []
    lines += [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    return tag("table", "\n".join(lines), **attributes)


def svg(drawn: Iterable[str], width: float, height: float, pixels: float) -> str:
    """A picture of elements in units of its own, with a margin of one."""
    return tag(
        "svg", *drawn, viewBox=f"-1 -1 {width + 2:g} {height + 2:g}", width=round(pixels),
        xmlns="http://www.w3.org/2000/svg",
    )  # fmt: skip


def key(colour: str, text: str, *, border: str | None = None) -> str:
    """What a colour means."""
    frame = f";border:2px solid {border};box-sizing:border-box" if border else ""
    square = tag("span", class_="key", style=f"background:{colour}{frame}")
    return tag("small", square, text, style="white-space:nowrap;margin-right:12px") + " "


def bar(
    parts: Sequence[tuple[str, float, str]], whole: float, text: Callable[[float], str],
    *, marks: Iterable[tuple[float, str]] = (),
) -> str:  # fmt: skip
    """Parts (name, value, colour) side by side on a bar that stands for `whole`, and what they are;
    with marks at some values."""
    parts = [part for part in parts if part[1] > 0]
    spans = [
        tag(
            "span", text(value) if value > 0.12 * whole else "",
            style=f"width:{100 * value / whole:.3f}%;background:{colour};color:{ink(colour)}",
            title=f"{name}: {text(value)}, {value / whole:.1%}",
        )
        for name, value, colour in parts
    ]  # fmt: skip
    lines = [
        tag("i", style=f"left:{min(100.0, 100 * at / whole):.2f}%", title=title)
        for at, title in marks
    ]
    keys = [key(colour, f"{name} {text(value)}") for name, value, colour in parts]
    return tag("div", *spans, *lines, class_="bar") + tag("div", *keys)
