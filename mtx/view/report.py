"""What a training run was and how it went: numbers, rows for a person, and one HTML page."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from mtx.config import RunConfig, from_dict
from mtx.errors import UserError
from mtx.train.goodput import Record
from mtx.view.picture import Picture
from mtx.view.run import WORDS, RunLog, draw_panels
from mtx.view.spans import count


class Fact(NamedTuple):
    """One row of the report."""

    section: str
    name: str
    value: str


def summarize(records: Sequence[Record]) -> dict:
    """The numbers of a run's log, ready for JSON. Medians are over the steps that count."""
    log = RunLog.of(records)
    steps, goodput, start = log.steps, log.goodput, log.start
    held_out, memory = log.told("eval"), log.told("memory")
    numbers = {
        "steps": steps[-1]["step"] if steps else start["step"],
        "of": start["run"]["steps"],
        "parameters": start["parameters"],
        "devices": start["devices"],
        "device_kind": start["device_kind"],
        "run": start["run"],
        "loss": steps[-1]["loss"] if steps else None,
        "held_out_loss": held_out[-1]["loss"] if held_out else None,
        "goodput": goodput.fraction,
        "wall_s": goodput.wall_s,
        "seconds": goodput.parts,
        "sessions": goodput.sessions,
        "lost_steps": goodput.lost_steps,
        "skipped_steps": goodput.skipped_steps,
        "rollbacks": goodput.rollbacks,
        "damaged_checkpoints": len(log.told("damaged")),
        "failed_saves": len(log.told("save_failed")),
        "clock_jumps": goodput.clock_jumps,
    }
    for name in ("learning_rate", "gradient_norm", "loss_scale"):
        numbers[name] = steps[-1].get(name) if steps else None
    for name in ("step_s", "tokens_per_s", "tflops_sc21", "tflops_model", "mfu"):
        known = [step[name] for step in steps if step.get(name) is not None]
        numbers[name] = statistics.median(known) if known else None
    numbers["compiled_bytes"] = next(
        (m["compiled_bytes"] for m in reversed(memory) if "compiled_bytes" in m), None
    )
    peaks = [d["peak_bytes"] for m in memory for d in m.get("devices", ()) if d["peak_bytes"]]
    numbers["peak_bytes"] = max(peaks, default=None)
    return numbers


# --- rows -----------------------------------------------------------------------------------------


def report_facts(numbers: dict) -> list[Fact]:
    """What a person reads, from `summarize`; what is not known is said with its reason."""
    sections = (
        ("Run", _setup(numbers)),
        ("Training", _training(numbers)),
        ("Speed and memory", _speed(numbers)),
        ("Time", _time(numbers)),
    )
    return [Fact(section, *row) for section, rows in sections for row in rows]


def _setup(numbers: dict) -> list[tuple[str, str]]:
    devices = f"{numbers['devices']:,} x {numbers['device_kind']}"
    rows = [("devices", devices), ("model", f"{numbers['parameters']:,} parameters")]
    try:
        run = from_dict(RunConfig, numbers["run"])
    except UserError as error:  # of another version
        return [*rows, ("config", f"not that of a run of this version: {error}")]
    model, layout, optimizer = run.model, run.layout, run.optimizer
    tokens = run.global_batch * model.sequence
    shape = (
        f"{model.family}, {model.layers} layers of {model.hidden:,}, sequence {model.sequence:,}"
    )
    kept = f"recompute={layout.recompute}, stash={layout.stash}"
    parallel = f", sequence_parallel={layout.sequence_parallel}" if layout.tensor > 1 else ""
    rates = f"lr {optimizer.lr:g}, {optimizer.rate}"
    rates += "" if optimizer.rate == "constant" else f" to {optimizer.min_lr:g}"
    names = optimizer.name if optimizer.rest is None else f"{optimizer.name}, {optimizer.rest}"
    how = optimizer.hyperparameters(optimizer.name)
    betas = ", ".join(f"{key} {value:g}" for key, value in how.items())
    clip = f"clip {optimizer.clip:g}" if optimizer.clip else "no clipping"
    slices = f" of {layout.slices} slices" if layout.slices > 1 else ""
    return [
        *rows, ("", shape),
        ("layout", f"data {layout.data} x pipe {layout.pipe} x tensor {layout.tensor}{parallel}"),
        ("", f"zero={layout.zero}, {kept}"),
        ("schedule", f"{layout.schedule}, virtual v = {layout.virtual}"),
        ("", f"m = {run.microbatches} microbatches{slices} a replica, of b = {layout.microbatch}"),
        ("data", f"{' '.join(run.data.path) or 'help topics of Python'}, "
                 f"tokenizer {run.data.tokenizer}, seed {run.data.seed}"),
        ("", f"{run.global_batch:,} sequences, {tokens:,} tokens a step"),
        ("precision", _precision(run, numbers)),
        ("optimizer", f"{names}, {rates}, warm-up {optimizer.warmup_steps:,} steps"),
        ("", f"{betas}, weight decay {optimizer.weight_decay:g}, {clip}"),
    ]  # fmt: skip


def _precision(run: RunConfig, numbers: dict) -> str:
    text = f"computes in {run.model.compute_dtype}, masters and moments in float32"
    if run.model.compute_dtype == "float16" and numbers["loss_scale"] is not None:
        text += f"; loss scale {numbers['loss_scale']:,.0f}"
    return text


def _training(numbers: dict) -> list[tuple[str, str]]:
    def last(name: str, form: str, without: str = "not finite") -> str:
        if numbers[name] is not None:
            return format(numbers[name], form)
        return without if numbers["step_s"] is not None else "no step has finished yet"

    steps, every = numbers["steps"], numbers["run"].get("eval_every")
    when = f"every {every:,} steps and at the end" if every else "at the end"
    skipped = f"{numbers['skipped_steps']:,}, their gradients were not finite"
    return [
        ("steps", f"{steps:,} of {numbers['of']:,}"),
        ("loss", last("loss", ".4f")),
        ("held-out loss", last("held_out_loss", ".4f", f"not yet: measured {when}")),
        ("learning rate", last("learning_rate", ".3g")),
        ("gradient norm", last("gradient_norm", ".4g", "not finite: that step was skipped")),
        ("skipped steps", skipped if numbers["skipped_steps"] else "none"),
        ("trained again", f"{count(numbers['lost_steps'], 'step')}, after "
                          f"{count(numbers['rollbacks'], 'rollback')} and "
                          f"{count(numbers['sessions'] - 1, 'restart')}"),
        ("checkpoints", f"{numbers['damaged_checkpoints']:,} damaged, "
                        f"{numbers['failed_saves']:,} not saved"),
    ]  # fmt: skip


def _speed(numbers: dict) -> list[tuple[str, str]]:
    kind = numbers["device_kind"]

    def median(name: str, form: str, unit: str, without: str) -> str:
        if numbers[name] is not None:
            return format(numbers[name], form) + unit
        return without if numbers["step_s"] is not None else "no step has finished yet"

    def gib(name: str, without: str) -> str:
        value = numbers[name]
        return without if value is None else f"{value / 2**30:.2f} GiB a device"

    untold = "the log does not say"
    return [
        ("step", median("step_s", ".4g", " s, median", untold)),
        ("throughput", median("tokens_per_s", ",.0f", " tokens/s, median", untold)),
        ("SC'21 formula", median("tflops_sc21", ".4g", " TFLOP/s a device", untold)),
        ("model FLOPs", median("tflops_model", ".4g", " TFLOP/s a device", untold)),
        ("MFU", median("mfu", ".1%", "", f"not known: no peak FLOP/s is listed for {kind}")),
        ("memory, compiled", gib("compiled_bytes", untold)),
        ("memory, peak", gib("peak_bytes", f"{kind} devices do not tell")),
    ]


def _time(numbers: dict) -> list[tuple[str, str]]:
    wall_s = numbers["wall_s"]
    jumps = numbers["clock_jumps"]
    return [
        ("goodput", f"{numbers['goodput']:.1%} of {wall_s:,.1f} s"),
        ("sessions", f"{numbers['sessions']:,}"),
        *(
            (WORDS[name], f"{seconds:,.1f} s, {seconds / max(wall_s, 1e-9):.1%}")
            for name, seconds in numbers["seconds"].items()
            if seconds
        ),
        *([("clock", f"set back {jumps} times between sessions")] if jumps else []),
    ]


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


def report_page(records: Sequence[Record], name: str) -> str:
    """One HTML file that needs no other: tables, then the pictures; two side by side where the
    window is wide enough."""
    title = html.escape(name)
    facts, parts = report_facts(summarize(records)), []
    for section in dict.fromkeys(fact.section for fact in facts):
        rows = "".join(
            f"<tr><td>{html.escape(fact.name)}<td>{html.escape(fact.value)}\n"
            for fact in facts
            if fact.section == section
        )
        parts.append(f"<section><h2>{section}</h2>\n<table>\n{rows}</table></section>")
    parts += [
        f"<figure style='margin:0'>{Picture(figure=figure).svg()}</figure>"
        for figure in draw_panels(records)
    ]
    return (
        "<!doctype html>\n<html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Run {title}</title>\n<style>{_STYLE}</style>\n<h1>Run {title}</h1>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</html>\n"
    )
