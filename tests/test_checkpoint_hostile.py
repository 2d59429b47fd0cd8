"""Manifests with right checksums and wrong values are named in one line, or harmless."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from errors import names

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.checkpoint.fingerprint import MODULUS, factor_of
from mtx.checkpoint.store import Damaged
from mtx.cli import main
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError
from mtx.step.trainer import Trainer

MODEL = ModelConfig(layers=2, hidden=16, heads=2, sequence=8, vocab=256, compute_dtype="float32")
RUN = RunConfig(model=MODEL, layout=Layout(pipe=2), global_batch=2)
PATH = "layers.block.mlp.up.w"
UP = f"params.{PATH}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Steps 1 and 2 of a state whose arrays all differ from each other, in several blocks each."""
    trainer = Trainer(RUN)
    count = iter(range(1, 1000))
    state = jax.tree.map(
        lambda a: a + a.dtype.type(next(count) if a.dtype == np.float32 else 0), trainer.init()
    )
    with Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints") as checkpoints:
        for step in (1, 2):
            numbered = state._replace(
                step=jax.device_put(np.int32(step), state.step.sharding),
                skipped=jax.device_put(np.int32(0), state.step.sharding),
            )
            checkpoints.save(trainer, numbered, tokenizer=ByteTokenizer(), extra={"consumed": 4})
    return SimpleNamespace(
        trainer=trainer, checkpoints=checkpoints, state=jax.device_get(checkpoints.restore(trainer))
    )


@pytest.fixture
def copied(saved, tmp_path):
    return Checkpoints(shutil.copytree(saved.checkpoints.directory, tmp_path / "checkpoints"))


def values_of(checkpoints: Checkpoints) -> dict:
    """The values of the newest checkpoint's manifest."""
    return json.loads((checkpoints.directory / "2" / "checkpoint.json").read_bytes())["manifest"]


def write(checkpoints: Checkpoints, values: object) -> None:
    """Rewrite the newest checkpoint's manifest, with a matching checksum."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = checkpoints.directory / "2" / "checkpoint.json"
    path.write_text(f'{{"sha256": "{digest}", "manifest": {text}}}')


def damage(saved, checkpoints: Checkpoints) -> str | None:
    """The one-line error of restoring the newest checkpoint; None if it gives the saved values."""
    try:
        restored = jax.device_get(checkpoints.restore(saved.trainer, 2))
    except UserError as error:
        assert str(checkpoints.directory / "2") in str(error) and "\n" not in str(error)
        assert len(str(error)) < 600
        return str(error)
    jax.tree.map(np.testing.assert_array_equal, restored, saved.state)
    return None


# -- by hand ---------------------------------------------------------------------------------------


def one_block_twice(values: dict) -> None:
    """With a fingerprint that is the sum over the blocks listed."""
    array = values["arrays"][UP]
    array["blocks"][-1] = array["blocks"][0]
    total = sum(int(block[4], 16) for block in array["blocks"])
    array["fingerprint"] = f"{total % 2**64:016x}"


def blocks_of_another(values: dict) -> None:
    arrays = values["arrays"]
    arrays["mu.embed.tokens"], arrays["nu.embed.tokens"] = (
        arrays["nu.embed.tokens"], arrays["mu.embed.tokens"],
    )  # fmt: skip


def other_numbers(values: dict) -> None:
    values["arrays"][UP]["dtype"] = "int32"


def turned(values: dict) -> None:
    """[2, 16, 64] read as [2, 64, 16]."""
    for sizes in [values["arrays"][UP]["shape"], *(b[3] for b in values["arrays"][UP]["blocks"])]:
        sizes[1:] = sizes[:0:-1]


def turned_everywhere(values: dict) -> None:
    for tree in ("params", "mu", "nu"):
        array = values["arrays"][UP.replace("params", tree)]
        for sizes in [array["shape"], *(block[3] for block in array["blocks"])]:
            sizes[1:] = sizes[:0:-1]


def left_out(values: dict) -> None:
    del values["arrays"][UP]


def without_steps(values: dict) -> None:
    del values["arrays"]["step"]


def steps_swapped(values: dict) -> None:
    arrays = values["arrays"]
    arrays["step"], arrays["skipped"] = arrays["skipped"], arrays["step"]


def outside(values: dict) -> None:
    values["files"][0] = "../1/arrays.0.bin"


def own_fingerprint(values: dict) -> None:
    values["arrays"][UP]["fingerprint"] = "0" * 16


def set_in(*path: object) -> Callable[[dict], None]:
    """A change that puts the last argument at the path given by the others."""
    *way, last, new = path

    def change(values: dict) -> None:
        for key in way:
            values = values[key]
        values[last] = new

    change.__name__ = "-".join(f"{part!s:.20}" for part in path)
    return change


BLOCK = ("arrays", UP, "blocks", 0)


@pytest.mark.parametrize(
    ("change", "values"),
    [
        (one_block_twice, [UP]),
        (blocks_of_another, ["u.embed.tokens", "arrays.0.bin"]),
        (other_numbers, [PATH]),
        (turned, [PATH]),
        (turned_everywhere, [UP, "[2, 64, 16]"]),
        (left_out, [PATH]),
        (without_steps, ["json", "step"]),
        (steps_swapped, ["array s", "arrays.0.bin"]),
        (outside, ["../1/arrays.0.bin"]),
        (own_fingerprint, [UP]),
        (set_in("step", 1), ["step 1"]),
        (set_in("step", "2"), ["step='2'"]),
        (set_in("step", True), ["step=True"]),
        (set_in("step", -2), ["step=-2"]),
        (set_in("format", 0), ["format=0"]),
        (set_in("format", 99), [99, 3]),
        (set_in("processes", 0), ["processes=0"]),
        (set_in("unix_time", "now"), ["unix_time='now'"]),
        (set_in("unix_time", float("nan")), ["unix_time=nan"]),
        (set_in("unix_time", 1e300), ["unix_time=1e+300"]),
        (set_in("documents", []), ["documents=[]"]),
        (set_in("documents", "run", 7), ["documents", 7]),
        (set_in("files", "arrays.0.bin"), ["files"]),
        (set_in("files", 0, "arrays.7.bin"), ["arrays.7.bin", "No such file"]),
        (set_in("files", 0, "run.json"), ["run.json"]),
        (set_in("arrays", []), ["arrays"]),
        (set_in("arrays", UP, None), [UP]),
        (set_in("arrays", "a/../b", {}), ["a/../b"]),
        (set_in("arrays", UP, "shape", [2**61, 2**61, 2]), [UP]),
        (set_in("arrays", UP, "shape", [1] * 70), [UP]),
        (set_in("arrays", UP, "dtype", ["float32"]), [UP, ["float32"]]),
        (set_in("arrays", UP, "blocks", []), [UP]),
        (set_in(*BLOCK, [0, 0]), [UP]),
        (set_in(*BLOCK, 0, -1), [UP, -1]),
        (set_in(*BLOCK, 0, 5), [UP, 5, 1]),
        (set_in(*BLOCK, 1, 64), [PATH, "arrays.0.bin"]),
        (set_in(*BLOCK, 1, 2**40), ["arrays.0.bin", "1,099,511,"]),
        (set_in(*BLOCK, 1, 2**62 - 1), [UP]),
        (set_in(*BLOCK, 1, 10**40), [UP, 10**40]),
        (set_in(*BLOCK, 1, 1.0), [UP, 1.0]),
        (set_in(*BLOCK, 2, [0, 0]), [UP, 2, 3]),
        (set_in(*BLOCK, 3, [1, 0, 64]), [UP, 0]),
        (set_in(*BLOCK, 4, "0x" + "1" * 14), [UP, "0x" + "1" * 14]),
        (set_in(*BLOCK, 4, 17), [UP, 17]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_does_not_fit_together_is_named(saved, copied, change, values):
    manifest = values_of(copied)
    change(manifest)
    write(copied, manifest)
    said = damage(saved, copied)
    assert said is not None and [value for value in map(str, values) if value not in said] == []


RAW = {
    "empty": b"", "a number": b"7", "a list": b"[]", "no UTF-8": b'{"manifest": "\xff\xfe"}',
    "deep": b'{"sha256": "", "manifest": ' + b"[" * 100_000, "cut": b'{"sha256": "ab", "mani',
    "twice": b'{"sha256": "", "manifest": {}, "manifest": {}}', "no manifest": b'{"sha256": ""}',
    "long number": b'{"sha256": "", "manifest": ' + b"9" * 100_000 + b"}",
    "nul": b"\0" * 4096, "UTF-16": '{"manifest": 1}'.encode("utf-16"),
}  # fmt: skip


@pytest.mark.parametrize("how", RAW)
def test_what_is_no_manifest_is_set_aside(copied, how):
    (copied.directory / "2" / "checkpoint.json").write_bytes(RAW[how])
    lines: list[str] = []
    assert copied.find(lines.append) == 1
    assert len(lines) == 1 and "2 is damaged: checkpoint.json" in lines[0]
    assert "it is now named 2.aside" in lines[0] and len(lines[0]) < 500


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(saved, copied):
    for name in ("arrays.0.bin", "run.json", "extra.json", "_CHECKPOINT_METADATA"):
        path = copied.directory / "2" / name
        content = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        assert (damage(saved, copied) or "").endswith(f"{name} must be a file")
        path.unlink()
        path.write_bytes(content)
    assert damage(saved, copied) is None


# -- at random -------------------------------------------------------------------------------------

HOSTILE = (
    None, True, False, -1, 0, 1, 2, 64, 2**31, 2**63, 2**64, 10**30, 0.5, 1e308, float("nan"),
    float("inf"), "", "x", "0" * 16, "f" * 16, "../../passwd", "arrays.0.bin", "arrays.1.bin", "\0",
    "\ud800", "step", [], {}, [[]], [0], [1, 1], {"a": 1}, [[[[[[[[]]]]]]]], "y" * 10_000,
)  # fmt: skip


def places(node: object) -> list[tuple[object, object]]:
    """Every (container, key) below a node."""
    keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    return [found for key in keys for found in ((node, key), *places(node[key]))]


def mutate(values: dict, rng: random.Random) -> None:
    """Make one random change: replace, remove, duplicate or swap values, rename a key, or change a
    number or a digit."""
    container, key = rng.choice(places(values))
    others = sorted(container) if isinstance(container, dict) else range(len(container))
    other, value = rng.choice(list(others)), container[key]
    change = rng.choice(["replace", "remove", "swap", "copy", "nudge", "nudge", "rename"])
    if change == "remove":
        del container[key]
    elif change == "swap":
        container[key], container[other] = container[other], container[key]
    elif change == "copy":
        container[key] = copy.deepcopy(container[other])
    elif change == "rename" and isinstance(container, dict):
        container[rng.choice(["z", "params.z", "mu.embed.tokens", key + ".x"])] = container.pop(key)
    elif change == "nudge" and type(value) is int:
        container[key] = value + rng.choice([-64, -1, 1, 2, 64, 1 << 32])
    elif change == "nudge" and isinstance(value, str) and value:
        place = rng.randrange(len(value))
        container[key] = value[:place] + rng.choice("0123456789abcdef./") + value[place + 1 :]
    else:
        container[key] = rng.choice(HOSTILE)


def test_no_mutation_gives_other_values(saved, copied):
    """Restored bit for bit or named in one line, but never wrong, and never another exception."""
    rng, sound = random.Random(25), values_of(copied)
    said = {}
    for number in range(300):
        values = copy.deepcopy(sound)
        for _ in range(rng.choice([1, 1, 2])):
            mutate(values, rng)
        write(copied, values)
        said[number] = damage(saved, copied)
    named = [line for line in said.values() if line is not None]
    assert len(named) > 200 and len(set(named)) > 100


@pytest.mark.parametrize(
    ("command", "statuses"),
    [
        ("checkpoint list {run}", {0}),
        ("checkpoint inspect {run} --step 2", {0, 2}),
        ("checkpoint verify {run}", {0, 1}),
        ("checkpoint export {run} --step 2 --out {out}", {0, 2}),
        ("checkpoint export {run} --step 2 --out {out} --format orbax --optimizer", {0, 2}),
        ("convert {run} {out} --step 2 --check none", {0, 2}),
    ],
)
def test_no_mutation_gives_a_command_a_traceback(copied, command, statuses, capsys):
    rng, sound = random.Random(8), values_of(copied)
    out = copied.directory.parent / "exported"
    left = set()
    for _ in range(25):
        values = copy.deepcopy(sound)
        mutate(values, rng)
        write(copied, values)
        status = main(command.format(run=copied.directory, out=out).split())
        error = capsys.readouterr().err
        assert error.count("\n") == (status == 2) and len(error) < 800
        assert out.exists() == (status == 0 and "{out}" in command)
        shutil.rmtree(out, ignore_errors=True)
        left.add(status)
    assert left == statuses


# -- formats ---------------------------------------------------------------------------------------


def test_format_1_is_still_read(saved, copied):
    """Its fingerprints did not depend on the array's name and dtype."""
    values = values_of(copied)
    values["format"] = 1
    for name, array in values["arrays"].items():
        inverse = pow(factor_of(name, np.dtype(array["dtype"])), -1, MODULUS)

        def plain(text: str) -> str:
            return f"{int(text, 16) * inverse % MODULUS:016x}"  # noqa: B023

        array["fingerprint"] = plain(array["fingerprint"])
        for block in array["blocks"]:
            block[4] = plain(block[4])
    write(copied, values)
    assert damage(saved, copied) is None
    values["arrays"][UP]["blocks"][0][4] = "0" * 16
    write(copied, values)
    assert UP in damage(saved, copied)


def test_one_of_a_format_to_come_is_left_where_it_is(copied):
    values = values_of(copied)
    values["format"] = 4
    write(copied, values)
    with pytest.raises(UserError) as error:
        copied.find(print)
    assert names(error, 4, copied.directory)
    assert not isinstance(error.value, Damaged)
    assert sorted(path.name for path in Path(copied.directory).iterdir()) == ["1", "2"]


def test_a_checkpoint_without_one_moment_is_set_aside(copied):
    values = values_of(copied)
    del values["arrays"]["nu.layers.block.mlp.up.w"]
    write(copied, values)
    said: list[str] = []
    assert copied.find(said.append) == 1 and len(copied.aside()) == 1  # the previous one counts
    assert "layers.block.mlp.up.w has not the arrays" in said[0]
