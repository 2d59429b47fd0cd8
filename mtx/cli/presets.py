"""`mtx presets`."""

from __future__ import annotations

from dataclasses import dataclass

from mtx.cli.options import Flag, read_line
from mtx.cli.output import say, table
from mtx.config import to_dict
from mtx.presets import NAMES, preset


@dataclass(frozen=True, kw_only=True)
class PresetsOptions:
    json: Flag = False  # each preset's parameters and config, as JSON


def presets_command(arguments: list[str]) -> None:
    """List the presets."""
    options = read_line(arguments, PresetsOptions(), "mtx presets", presets_command).options
    from mtx.plan.flops import parameters

    runs = {name: preset(name) for name in NAMES}
    counts = {name: parameters(run.model) for name, run in runs.items()}
    numbers = {name: {"parameters": counts[name], **to_dict(run)} for name, run in runs.items()}
    rows = [("preset", "parameters", "layers", "hidden", "heads", "sequence", "vocab",
             "data x pipe x tensor", "virtual", "microbatch", "batch", "devices")]  # fmt: skip
    for name, run in runs.items():
        model, layout = run.model, run.layout
        rows.append((
            name, _short(counts[name]), model.layers, model.hidden, model.heads, model.sequence,
            model.vocab, f"{layout.data} x {layout.pipe} x {layout.tensor}", layout.virtual,
            layout.microbatch, run.global_batch, layout.devices,
        ))  # fmt: skip
    say(numbers, table(rows, "<" + ">" * 11), as_json=options.json)


def _short(count: int) -> str:
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return str(count)
