"""`mtx presets`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from mtx.cli.options import parse
from mtx.config import to_dict
from mtx.presets import NAMES, preset


@dataclass(frozen=True, kw_only=True)
class PresetsOptions:
    # the same as JSON
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


def presets_command(arguments: list[str]) -> None:
    """List the presets."""
    options = parse(arguments, PresetsOptions(), prog="mtx presets", about=presets_command)
    print(json.dumps(_numbers(), indent=1) if options.json else "\n".join(_preset_rows()))


def _numbers() -> dict:
    """Each preset's parameters and config."""
    from mtx.plan.flops import parameters

    runs = {name: preset(name) for name in NAMES}
    return {
        name: {"parameters": parameters(run.model), **to_dict(run)} for name, run in runs.items()
    }


def _preset_rows() -> list[str]:
    from mtx.plan.flops import parameters

    rows = [("preset", "parameters", "layers", "hidden", "heads", "sequence", "vocab",
             "data x pipe x tensor", "virtual", "microbatch", "batch", "devices")]  # fmt: skip
    for name in NAMES:
        run = preset(name)
        model, layout = run.model, run.layout
        shape = model.layers, model.hidden, model.heads, model.sequence, model.vocab
        mesh = f"{layout.data} x {layout.pipe} x {layout.tensor}"
        how = layout.virtual, layout.microbatch, run.global_batch, layout.devices
        rows.append((name, _short(parameters(model)), *shape, mesh, *how))
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def _short(count: int) -> str:
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return str(count)
