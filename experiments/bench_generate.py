"""Writing with kept keys and values against reading the whole text again for every token.

    python experiments/bench_generate.py

continues random prompts greedily with preset bench-s at S=1024, on several layouts of virtual CPU
devices (--devices 0: the machine's own, such as GPUs). Unless every way writes the same tokens,
nothing is printed. Then a table:

whole     each token by a pass over all S positions: what `Trainer.predict` does
read      by a pass over the text, its length rounded up to a power of two
kept      by a pass over one position per text, with keys and values kept
floor     for `kept`, the time to read the parameters and the kept keys and values once, at the rate
          at which all devices together sum a large array, measured in the same run; every replica
          reads its own parameters

Tokens a second count all texts together: the median of the tokens after the first two.

Expected time: five minutes on two idle cores.
Expected result: `kept` is more than ten times as fast as `read`, and takes up to about twice its
floor on one device. Virtual devices that share cores only add time: each stage waits its turn.

    python experiments/bench_generate.py --devices 0 --layouts 1x1x1 --preset gpt-345m --rows 32
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import bench
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from mtx.cli import exit_status, parse, start_devices
from mtx.config import Layout, RunConfig, to_dict
from mtx.errors import UserError
from mtx.evaluation.decoder import Decoder
from mtx.plan.flops import parameters
from mtx.presets import preset
from mtx.step.state import TrainState
from mtx.step.trainer import Trainer

_MIB = 2**20
_SUMMED_BYTES = 256 * _MIB  # beyond any cache


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compares ways to write, in tokens a second, on one model and several layouts."""

    preset: str = "bench-s"  # its model is used
    sequence: int = 1024  # S
    rows: int = 8  # texts at once
    prompt: int = 256  # tokens of the longest one; lengths range from half of it up
    tokens: int = 12  # written after each prompt, by each way
    layouts: str = "1x1x1,2x1x1,1x2x1,1x1x2,1x4x1"  # data x pipe x tensor
    devices: int = 4  # virtual CPU devices; 0: the machine's own
    json: str = ""  # FILE for everything that was measured

    def __post_init__(self):
        for name in ("rows", "prompt", "tokens"):
            if getattr(self, name) < (3 if name == "tokens" else 1):
                raise UserError(f"{name}={getattr(self, name)} is too small")
        if self.prompt + self.tokens > self.sequence:
            raise UserError(
                f"prompt={self.prompt} and tokens={self.tokens} are more than sequence="
                f"{self.sequence}; use less of them"
            )
        self.each_layout()

    def each_layout(self) -> list[Layout]:
        layouts = []
        for name in self.layouts.split(","):
            try:
                data, pipe, tensor = map(int, name.split("x"))
            except ValueError:
                raise UserError(
                    f"layout {name!r} is not data x pipe x tensor; use the like of 1x2x1"
                ) from None
            microbatch = max(1, self.rows // data)
            layouts.append(Layout(data=data, pipe=pipe, tensor=tensor, microbatch=microbatch))
        return layouts


class TextsDiffer(Exception):
    """Two ways wrote different texts."""


# --- measuring ------------------------------------------------------------------------------------


def bytes_a_second() -> float:
    """The rate at which all devices together read memory: each sums an array of its own."""
    mesh = Mesh(np.array(jax.devices()), ("all",))
    shape = mesh.size, _SUMMED_BYTES // 4 // mesh.size
    ones = jax.jit(lambda: jnp.ones(shape), out_shardings=NamedSharding(mesh, PartitionSpec("all")))
    values, total, seconds = ones(), jax.jit(lambda a: a.sum(axis=1)), []
    for _ in range(6):
        start_s = time.perf_counter()
        jax.block_until_ready(total(values))
        seconds.append(time.perf_counter() - start_s)
    return values.nbytes / min(seconds[1:])


class Whole:
    """Every token by a pass over all S positions."""

    def __init__(self, trainer: Trainer, state: TrainState, options: Options):
        self._trainer, self._state = trainer, state

    def __call__(self, texts: list[list[int]]) -> list[int]:
        tokens = np.zeros((len(texts), self._trainer.run.model.sequence), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        last = np.array([len(text) - 1 for text in texts], np.int32)
        batch = self._trainer.place({"tokens": tokens, "last": last})
        return np.asarray(self._trainer.predict(self._state, batch)).argmax(axis=1).tolist()


class Read:
    """Every token by a pass over each text, with parameters already in the compute type."""

    def __init__(self, trainer: Trainer, state: TrainState, options: Options):
        self.decoder = Decoder(trainer, state, vocab=trainer.run.model.vocab)
        self._room = options.prompt + options.tokens

    def __call__(self, texts: list[list[int]]) -> list[int]:
        return [int(choice.ids[0]) for choice in self.decoder.read(texts, count=1)]


class KeptAlong(Read):
    """Every token by a pass over one position of each text, after a first pass over all of them."""

    def __call__(self, texts: list[list[int]]) -> list[int]:
        if not self.decoder.kept_bytes:
            choices = self.decoder.begin(texts, self._room, count=1)
        else:
            places = [len(text) - 1 for text in texts]
            choices = self.decoder.extend([text[-1] for text in texts], places, count=1)
        return [int(choice.ids[0]) for choice in choices]


WAYS = {"whole": Whole, "read": Read, "kept": KeptAlong}


def write(way: Whole, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[float]]:
    """(texts, seconds of each token)"""
    texts, seconds = [list(prompt) for prompt in prompts], []
    for _ in range(tokens):
        start_s = time.perf_counter()
        following = way(texts)
        seconds.append(time.perf_counter() - start_s)
        for text, token in zip(texts, following, strict=True):
            text.append(token)
    return texts, seconds


def measure_layout(run: RunConfig, layout: Layout, options: Options) -> dict:
    """One line of the table, without its floor."""
    random = np.random.default_rng(0)
    lengths = np.linspace(options.prompt / 2, options.prompt, options.rows).astype(int)
    prompts = [random.integers(0, run.model.vocab, max(1, n)).tolist() for n in lengths]
    rows = -(-options.rows // layout.data) * layout.data
    trainer = Trainer(replace(run, layout=layout, global_batch=rows))
    state, texts, row = trainer.init(), {}, {"layout": to_dict(layout), "seconds": {}}
    for name, make in WAYS.items():
        way = make(trainer, state, options)
        padded = [prompts[i % len(prompts)] for i in range(rows)]
        texts[name], row["seconds"][name] = write(way, padded, options.tokens)
        row["kept_bytes"] = way.decoder.kept_bytes if name == "kept" else 0
        if texts[name] != texts["whole"]:
            raise TextsDiffer(f"{_name(row)}: {name!r} has not written what 'whole' has")
    size = np.dtype(jnp.dtype(run.model.compute_dtype)).itemsize
    row["parameters_bytes"] = parameters(run.model) * size * layout.data
    return row


def measure(options: Options, machine: dict) -> dict:
    run = preset(options.preset)
    run = replace(
        run, model=replace(run.model, sequence=options.sequence, dropout=0.0, attention_dropout=0.0)
    )
    rows, rate = [], bytes_a_second()
    layouts = options.each_layout()
    with bench.Work(len(layouts)) as work:
        for layout in layouts:
            work.begin(f"{layout.data}x{layout.pipe}x{layout.tensor}")
            row = measure_layout(run, layout, options)
            row["floor_s"] = (row["parameters_bytes"] + row["kept_bytes"]) / rate
            rows.append(row)
    return {
        "options": to_dict(options), "machine": machine, "model": to_dict(run.model),
        "bytes_a_second": rate, "backend": jax.default_backend(), "rows": rows,
    }  # fmt: skip


# --- what is printed ------------------------------------------------------------------------------


def _name(row: dict) -> str:
    return "x".join(str(row["layout"][axis]) for axis in ("data", "pipe", "tensor"))


def table_of(result: dict) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    table.add_column("\ndata x pipe x tensor", no_wrap=True)
    for header in (
        "tokens/s\nwhole", "\nread", "\nkept", "kept over\nwhole", "\nread", "kept\nms a token",
        "\nfloor ms", "\nratio", "kept\nMiB",
    ):  # fmt: skip
        table.add_column(header, justify="right", no_wrap=True)
    for row in result["rows"]:
        # The first token waits for the compiler, and for `kept` the second one does too.
        token_s = {name: statistics.median(s[2:]) for name, s in row["seconds"].items()}
        rates = {name: result["options"]["rows"] / s for name, s in token_s.items()}
        table.add_row(
            _name(row).replace("x", " x "),
            *(f"{rate:,.1f}" for rate in rates.values()),
            *(f"{token_s[name] / token_s['kept']:.1f}" for name in ("whole", "read")),
            f"{1e3 * token_s['kept']:.1f}",
            f"{1e3 * row['floor_s']:.1f}",
            f"{token_s['kept'] / row['floor_s']:.1f}",
            f"{row['kept_bytes'] / _MIB:,.0f}",
        )
    return table


def title_of(result: dict) -> str:
    options, machine = result["options"], result["machine"]
    return (
        f"{options['preset']} at S={options['sequence']}, {options['rows']} texts of "
        f"{options['prompt'] // 2} to {options['prompt']} tokens and {options['tokens']} more, "
        f"{result['backend']}: {bench.measured_on(machine)}"
    )


def notes_of(result: dict) -> list[str]:
    rate = result["bytes_a_second"] / 1e9
    return [
        f"Floor: parameters and kept keys and values read once, at the {rate:.1f} GB/s at which "
        "all devices together sum a large array.",
        *bench.load_notes(result["machine"]),
    ]


def main(arguments: Sequence[str]) -> int:
    options = parse(list(arguments), Options(), prog="bench_generate.py")
    bench.check_path(options.json)
    machine = bench.describe_machine("jax", "jaxlib")
    start_devices(options.devices)
    try:
        result = measure(options, machine)
    except TextsDiffer as error:
        print(f"bench_generate.py: {error}", file=sys.stderr)
        return 1
    bench.print_table(title_of(result), table_of(result), notes_of(result))
    bench.write_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
