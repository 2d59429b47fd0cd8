"""`mtx.files`: any file is read, or refused in one line that names it."""

from __future__ import annotations

import os

import pytest

from mtx.checkpoint.manifest import MANIFEST, read_manifest
from mtx.checkpoint.store import Damaged
from mtx.conversion.huggingface import read_json as read_config
from mtx.data.indexed import read_identity
from mtx.data.tokenizer_files import load_tokenizer
from mtx.errors import UserError
from mtx.evaluation.files import read_records
from mtx.files import open_file, parse_json, read_json, read_text, read_toml
from mtx.plan.hardware import load_hardware
from mtx.plan.plan import load_run
from mtx.schedules.formats import read_schedule
from mtx.train.goodput import read_log

JSON_READERS = {
    "plan.json": load_run,
    "schedule.json": read_schedule,
    "config.json": read_config,
    "tokenizer.json": load_tokenizer,
    "vocab.json": load_tokenizer,
    "log.jsonl": read_log,
    "task.jsonl": lambda path: list(read_records([str(path)])),
}
TOML_READERS = {"plan.toml": load_run, "hardware.toml": load_hardware}
READERS = JSON_READERS | TOML_READERS
JSON_BOMBS = [
    "[" * 100_000,
    '{"a":' * 100_000,
    "[" * 900 + "]" * 900,
    "1" * 5000,
    '{"a": ' + "9" * 5000,
]
TOML_BOMBS = ["a = " + "[" * 100_000, "a = " + "{a=" * 900 + "1" + "}" * 900, "a = " + "1" * 5000]
NUMBERS = ["1" + "0" * 400, "9" * 30, "-9223372036854775809"]
TOML_BOMBS += [f"a = {number}" for number in NUMBERS] + ["a = 0x" + "f" * 5000]
TOML_BOMBS += [".".join("a" * 100_000) + " = 1", f"[{'.'.join('a' * 100_000)}]", "a = [\n"]


def refusal(read, path) -> str:
    with pytest.raises(UserError) as raised:
        read(str(path))
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("name", JSON_READERS)
@pytest.mark.parametrize("number", range(len(JSON_BOMBS)))
def test_json_without_end_is_refused_by_every_reader(tmp_path, name, number):
    path = tmp_path / name
    path.write_text(JSON_BOMBS[number] + "\n")
    assert name in refusal(READERS[name], path)


@pytest.mark.parametrize("name", TOML_READERS)
@pytest.mark.parametrize("number", range(len(TOML_BOMBS)))
def test_toml_without_end_is_refused_by_every_reader(tmp_path, name, number):
    path = tmp_path / name
    path.write_text(TOML_BOMBS[number])
    said = refusal(READERS[name], path)
    assert f"{name} is not TOML" in said or f"{name} has a whole number beyond 64 bits" in said


@pytest.mark.parametrize("text", JSON_BOMBS)
def test_a_manifest_without_end_is_damage_that_a_run_goes_back_over(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(Damaged):
        read_manifest(tmp_path)


def test_a_datasets_description_without_end_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("[" * 100_000)
    assert "x.json is not JSON" in refusal(read_identity, tmp_path / "x")


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_of_text_is_refused_by_every_reader(tmp_path, name):
    path = tmp_path / name
    refusal(READERS[name], path)
    path.mkdir()
    refusal(READERS[name], path)
    path.rmdir()
    os.mkfifo(path)  # nobody writes to it: a reader that opened it would wait forever
    refusal(READERS[name], path)
    path.unlink()
    path.symlink_to(path)
    refusal(READERS[name], path)
    path.unlink()
    path.write_bytes(b"\xff\xfe\x00")
    refusal(READERS[name], path)
    refusal(READERS[name], tmp_path / f"{'x' * 300}{name}")
    refusal(READERS[name], tmp_path / f"\0{name}")


def test_a_file_is_read_whole_up_to_what_it_may_have(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"\xef\xbb\xbfab")
    assert read_text(path) == "ab"
    assert "5 bytes" in refusal(lambda path: read_text(path, most=4), path)
    path.write_text('{"a": ' + "[" * 60 + "]" * 60 + "}")
    assert read_json(path)["a"]
    path.write_text("a.b = 1\nc = [0.5, 1.5]")
    assert read_toml(path) == {"a": {"b": 1}, "c": [0.5, 1.5]}
    path.write_text(f"[{2**64 - 1}, {-(2**63)}]")
    assert read_json(path) == [2**64 - 1, -(2**63)]
    for number in NUMBERS:
        path.write_text(f'[[{{"a": {number}}}]]')
        assert "64 bits" in refusal(read_json, path)
        assert parse_json(f"[{number}]", "a line") == [int(number)]


def test_errors_of_those_who_read_an_open_file_stay_what_they_are(tmp_path):
    (tmp_path / "a").write_text("a")
    with pytest.raises(ValueError, match="mine"), open_file(tmp_path / "a"):
        raise ValueError("mine")
