"""What a training run was and how it went: numbers, rows for people, and one HTML page."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from dataclasses import asdict

from mtx.config import RunConfig, from_dict
from mtx.errors import UserError
from mtx.plan.summary import Row
from mtx.train.goodput import Record
from mtx.view.html import table, tag
from mtx.view.picture import Picture
from mtx.view.run import SPENT, RunLog, draw_panels
from mtx.view.spans import count

_OF_SOME = {  # numbers that only some models' steps have: in words
    "second_loss": "loss of the second token, weighted",
    "aux_loss": "auxiliary loss",
    "imbalance": "fullest expert, over the mean",
}


def summarize(records: Sequence[Record]) -> dict:
    """The numbers of a run's log, ready for JSON. Medians are over the steps that count."""
    log = RunLog(records)
    steps, goodput, start, counts = log.steps, log.goodput, log.start, asdict(log.goodput)
    held_out, memory = log.told("eval"), log.told("memory")
    last = steps[-1] if steps else {}
    known = {
        name: [step[name] for step in steps if step.get(name) is not None]
        for name in ("step_s", "tokens_per_s", "tflops_sc21", "tflops_model", "mfu")
    }
    compiled = [m["compiled_bytes"] for m in memory if "compiled_bytes" in m]
    peaks = [d["peak_bytes"] for m in memory for d in m.get("devices", ()) if d["peak_bytes"]]
    return {
        "steps": last.get("step", start["step"]),
        "of": start["run"]["steps"],
        **{name: start[name] for name in ("parameters", "devices", "device_kind", "run")},
        "loss": last.get("loss"),
        "held_out_loss": held_out[-1]["loss"] if held_out else None,
        "goodput": goodput.fraction,
        "seconds": counts.pop("parts"),
        "wall_s": goodput.wall_s,
        **counts,
        "damaged_checkpoints": len(log.told("damaged")),
        "failed_saves": len(log.told("save_failed")),
        **{name: last.get(name) for name in ("learning_rate", "gradient_norm", "loss_scale")},
        **{name: last[name] for name in _OF_SOME if last.get(name) is not None},
        **{name: statistics.median(values) if values else None for name, values in known.items()},
        "compiled_bytes": compiled[-1] if compiled else None,
        "peak_bytes": max(peaks, default=None),
    }


# --- rows -----------------------------------------------------------------------------------------

_UNTOLD = "the log does not say"


def report_facts(numbers: dict) -> list[Row]:
    """Rows for people, from `summarize`; a value that is not known is given with the reason."""
    sections = (
        ("Run", _setup(numbers)),
        ("Training", _training(numbers)),
        ("Speed and memory", _speed(numbers)),
        ("Time", _time(numbers)),
    )
    return [Row(section, *row, "") for section, rows in sections for row in rows]


def _setup(numbers: dict) -> list[tuple[str, str]]:
    devices = f"{numbers['devices']:,} x {numbers['device_kind']}"
    rows = [("devices", devices), ("model", f"{numbers['parameters']:,} parameters")]
    try:
        run = from_dict(RunConfig, numbers["run"])
    except UserError as error:  # a config of another version
        return [*rows, ("config", f"not that of a run of this version: {error}")]
    model, layout, optimizer = run.model, run.layout, run.optimizer
    shape = f"{model.layers} layers of {model.hidden:,}, sequence {model.sequence:,}"
    sizes = " x ".join(f"{axis} {size}" for axis, size in sorted(layout.shown.items()))
    parallel = f", sequence_parallel={layout.sequence_parallel}" if layout.tensor > 1 else ""
    slices = f" of {layout.slices} slices" if layout.slices > 1 else ""
    tokens = run.global_batch * model.sequence
    names = " ".join(run.data.path) or "help topics of Python"
    precision = f"computes in {model.compute_dtype}, masters and moments in float32"
    if model.compute_dtype == "float16" and numbers["loss_scale"] is not None:
        precision += f"; loss scale {numbers['loss_scale']:,.0f}"
    name = optimizer.name if optimizer.rest is None else f"{optimizer.name}, {optimizer.rest}"
    rates = f"lr {optimizer.lr:g}, {optimizer.rate}"
    rates += "" if optimizer.rate == "constant" else f" to {optimizer.min_lr:g}"
    how = optimizer.hyperparameters(optimizer.name)
    betas = ", ".join(f"{key} {value:g}" for key, value in how.items())
    clip = f"clip {optimizer.clip:g}" if optimizer.clip else "no clipping"
    return [
        *rows,
        ("", f"{model.family}, {shape}"),
        ("layout", f"{sizes}{parallel}"),
        ("", f"zero={layout.zero}, recompute={layout.recompute}, stash={layout.stash}"),
        ("schedule", layout.schedule_text),
        ("", f"m = {run.microbatches} microbatches{slices} a replica, of b = {layout.microbatch}"),
        ("data", f"{names}, tokenizer {run.data.tokenizer}, seed {run.data.seed}"),
        ("", f"{run.global_batch:,} sequences, {tokens:,} tokens a step"),
        ("precision", precision),
        ("optimizer", f"{name}, {rates}, warm-up {optimizer.warmup_steps:,} steps"),
        ("", f"{betas}, weight decay {optimizer.weight_decay:g}, {clip}"),
    ]


def _known(numbers: dict, name: str, form: str, without: str = _UNTOLD) -> str:
    """A number that steps report, formatted; or why it is not known."""
    if numbers[name] is not None:
        return form.format(numbers[name])
    return without if numbers["step_s"] is not None else "no step has finished yet"


def _training(numbers: dict) -> list[tuple[str, str]]:
    every = numbers["run"].get("eval_every")
    later = f"not yet: measured {f'every {every:,} steps and ' if every else ''}at the end"
    skipped, damaged = numbers["skipped_steps"], numbers["damaged_checkpoints"]
    again = count(numbers["lost_steps"], "step")
    why = (count(numbers["rollbacks"], "rollback"), count(numbers["sessions"] - 1, "restart"))
    infinite = "not finite: that step was skipped"
    return [
        ("steps", f"{numbers['steps']:,} of {numbers['of']:,}"),
        ("loss", _known(numbers, "loss", "{:.4f}", "not finite")),
        *((said, f"{numbers[name]:.4g}") for name, said in _OF_SOME.items() if name in numbers),
        ("held-out loss", _known(numbers, "held_out_loss", "{:.4f}", later)),
        ("learning rate", _known(numbers, "learning_rate", "{:.3g}", "not finite")),
        ("gradient norm", _known(numbers, "gradient_norm", "{:.4g}", infinite)),
        ("skipped steps", f"{skipped:,}, their gradients were not finite" if skipped else "none"),
        ("trained again", f"{again}, after {why[0]} and {why[1]}"),
        ("checkpoints", f"{damaged:,} damaged, {numbers['failed_saves']:,} not saved"),
    ]


def _speed(numbers: dict) -> list[tuple[str, str]]:
    kind, flops = numbers["device_kind"], "{:.4g} TFLOP/s a device"
    unlisted = f"not known: no peak FLOP/s is listed for {kind}"
    memory = []
    for name, without in (("compiled", _UNTOLD), ("peak", f"{kind} devices do not tell")):
        size = numbers[f"{name}_bytes"]
        value = without if size is None else f"{size / 2**30:.2f} GiB a device"
        memory.append((f"memory, {name}", value))
    return [
        ("step", _known(numbers, "step_s", "{:.4g} s, median")),
        ("throughput", _known(numbers, "tokens_per_s", "{:,.0f} tokens/s, median")),
        ("SC'21 formula", _known(numbers, "tflops_sc21", flops)),
        ("model FLOPs", _known(numbers, "tflops_model", flops)),
        ("MFU", _known(numbers, "mfu", "{:.1%}", unlisted)),
        *memory,
    ]


def _time(numbers: dict) -> list[tuple[str, str]]:
    wall_s, jumps = numbers["wall_s"], numbers["clock_jumps"]
    rows = [
        ("goodput", f"{numbers['goodput']:.1%} of {wall_s:,.1f} s"),
        ("sessions", f"{numbers['sessions']:,}"),
    ]
    for name, seconds in numbers["seconds"].items():
        if seconds:
            share = f"{seconds:,.1f} s, {seconds / max(wall_s, 1e-9):.1%}"
            rows.append((SPENT[name][0], share))
    return rows + [("clock", f"set back {jumps} times between sessions")] * bool(jumps)


# --- page -----------------------------------------------------------------------------------------

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #303030; max-width: 76rem; margin: 0 auto;
       padding: 0 1rem 2rem }
h1 { font-size: 1.5rem; overflow-wrap: anywhere }
h2 { font-size: 1.05rem; margin: 0 0 .3rem }
main { display: grid; gap: 1.6rem 2.4rem;
       grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)) }
table { border-collapse: collapse; width: 100% }
td { padding: .12rem 0; vertical-align: top; overflow-wrap: anywhere }
td:first-child { width: 9.5rem; padding-right: .8rem; color: #707070 }
svg { width: 100%; height: auto }
"""
_PAGE = """<!doctype html>
<html lang='en'><meta charset='utf-8'>
<meta name='viewport' content='width=device-width, initial-scale=1'>
<title>Run {title}</title>
<style>{style}</style>
<h1>Run {title}</h1>
<main>
{parts}
</main>
</html>
"""


def report_page(records: Sequence[Record], name: str) -> str:
    """One self-contained HTML file: tables, then the pictures; two side by side if the window is
    wide enough."""
    facts = report_facts(summarize(records))
    parts = []
    for section in dict.fromkeys(fact.section for fact in facts):
        rows = [map(html.escape, fact[1:3]) for fact in facts if fact.section == section]
        parts.append(tag("section", tag("h2", section), table(rows)))
    for figure in draw_panels(records):
        parts.append(tag("figure", Picture(figure=figure).svg(), style="margin:0"))
    return _PAGE.format(title=html.escape(name), style=_STYLE, parts="\n".join(parts))
