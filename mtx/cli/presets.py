"""`mtx presets`."""

from __future__ import annotations

from dataclasses import dataclass

from mtx.cli.options import Flag, Line, command
from mtx.cli.output import say, table
from mtx.config import to_dict
from mtx.presets import NAMES, preset

_LEGEND = "d x p x t: data x pipe x tensor; v: virtual; b: microbatch, in sequences"
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True, kw_only=True)
class PresetsOptions:
    json: Flag = False  # print each preset's parameters and config as JSON


@command("mtx presets", PresetsOptions)
def presets_command(line: Line[PresetsOptions]) -> None:
    """List the presets."""
    from mtx.plan.flops import parameters

    counts, numbers = {name: parameters(preset(name).model) for name in NAMES}, {}
    rows: list[tuple] = [(
        "preset", "params", "layers", "hidden", "heads", "sequence", "vocab",
        "d x p x t", "v", "b", "batch", "GPUs",
    )]  # fmt: skip
    for name, count in counts.items():
        run = preset(name)
        model, layout = run.model, run.layout
        numbers[name] = {"parameters": count, **to_dict(run)}
        rows.append((
            name, _short(count), model.layers, model.hidden, model.heads, model.sequence,
            model.vocab, f"{layout.data} x {layout.pipe} x {layout.tensor}", layout.virtual,
            layout.microbatch, run.global_batch, layout.devices,
        ))  # fmt: skip
    lines = [*table(rows, "<" + ">" * 11), "", _LEGEND]
    say(numbers, lines, as_json=line.options.json)


def _short(count: int) -> str:
    unit, letter = next((each for each in _UNITS if count >= each[0]), (1, ""))
    return f"{count / unit:.3g}{letter}"
