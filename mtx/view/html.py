"""Elements of a page as text: tags, tables, pictures, and the keys of their colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
    """An SVG picture of elements in its own units, with a margin of one unit."""
    return tag(
        "svg", *drawn, viewBox=f"-1 -1 {width + 2:g} {height + 2:g}", width=round(pixels),
        xmlns="http://www.w3.org/2000/svg",
    )  # fmt: skip


def key(colour: str, text: str, *, border: str | None = None) -> str:
    """A key: a colour and what it means."""
    frame = f";border:2px solid {border};box-sizing:border-box" if border else ""
    square = tag("span", class_="key", style=f"background:{colour}{frame}")
    return tag("small", square, text, style="white-space:nowrap;margin-right:12px") + " "
