"""Names that cannot be files of this machine are refused wherever given, and nothing is made."""

from __future__ import annotations

import pytest

import mtx
from mtx.checkpoint.checkpoints import Checkpoints
from mtx.cli import main
from mtx.data.indexed import require_new
from mtx.data.tokenizer_files import require_new_file
from mtx.errors import UserError
from mtx.launch.startup import use_compile_cache
from mtx.paths import check_path

ADDRESSES = [
    "gs://bucket/run", "s3://bucket", "S3://BUCKET/run", "gs:/bucket/run", "s3:bucket/run",
    "hdfs://host:9000/run", "abfss://a@b/c", "https://host/x", "file:///tmp/run", "gs:\\b\\c",
    "simplecache::s3://bucket/run", " gs://bucket/run", "my-store+v2://x",
]  # fmt: skip


@pytest.mark.parametrize("path", ADDRESSES)
def test_addresses(path):
    with pytest.raises(UserError, match="out=.* is an address.*; mount the bucket"):
        check_path("out", path)


@pytest.mark.parametrize(
    "path",
    [
        "runs/a", "/mnt/bucket/run", ".", "~/run", "./gs:/bucket", "C:/runs", "run:3", "a/b:c/d",
        "2024-11-24T10:30:00/run", "bytes", "0.7", "", "a" * 255, "/".join(["é" * 127] * 9),
    ],
)  # fmt: skip
def test_files_of_this_machine(path):
    check_path("out", path)


@pytest.mark.parametrize("path", ["a" * 256, "x/" + "é" * 128 + "/y", "a/" * 2000, "a\0b"])
def test_names_that_no_file_can_have(path):
    with pytest.raises(UserError, match="out=.*(is longer than a path can be|has a NUL)") as error:
        check_path("out", path)
    assert len(str(error.value)) < 400 and "\0" not in str(error.value)


LONG = "a" * 300


@pytest.mark.parametrize(
    "command",
    [
        "train --out gs://b/run", "train --out=s3://b/run", f"train --out {LONG}",
        "train --data.path text.txt s3://b/text.txt", "train --data.cache gs://b/c",
        "train --data.tokenizer hf://gpt2", "train --layout.schedule gs://b/t.csv",
        "train --compile-cache gs://b/c", "train --compile_cache gs://b/c", "train s3://b/plan.toml",
        "plan --draw gs://b/p.svg", "plan --save s3://b/p.toml", "plan --target https://h/t.toml",
        "plan gs://b/plan.toml", "schedule --csv gs://b/t.csv", "schedule s3://b/t.csv",
        "schedule --trace gs://b/t.json", "report gs://b/run", "report run --out gs://b/r.html",
        "report run --json az://b/r.json", "checkpoint list gs://b/run",
        "checkpoint export run --out s3://b/x", f"checkpoint export run --out {LONG}",
        "convert hf://a/b run", "convert run gs://b/x", f"convert run {LONG}",
        "evaluate run --path gs://b/t.txt", "evaluate run --json gs://b/r.json",
        "generate gs://b/run", "generate run --prompt-file s3://b/p.txt", "finetune run --out gs://b",
        "data build gs://b/t.txt --out d", "data build t.txt --out gs://b/d",
        "data index s3://b/d --sequence 8", "data tokenizer t.txt --out gs://b/t.json",
        f"data build t.txt --out {LONG}", f"plan --save {LONG}.toml",
    ],
    ids=lambda command: command[:60],
)  # fmt: skip
def test_every_command(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert "is an address" in error or "is longer than a path can be" in error
    assert error.count("\n") == 1 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        "generate nowhere --prompt gs://is.a.text/ --stop https://a",
        "train --cluster.coordinator gs:9 --steps -1",
    ],
)
def test_what_is_no_path_may_look_like_one(command, capsys):
    assert main(command.split()) == 2
    assert "is an address" not in capsys.readouterr().err


def test_from_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in ("gs://b/run", LONG, "a\0b"):
        for refused in (
            lambda out: mtx.run_training(mtx.RunConfig(out=out)),
            Checkpoints,
            lambda out: mtx.DataConfig(path=("0.3", out)),
            lambda out: mtx.DataConfig(tokenizer=out),
            lambda out: mtx.DataConfig(cache=out),
            use_compile_cache,
            require_new,
            require_new_file,
        ):
            with pytest.raises(UserError, match="is an address|is longer than|has a NUL"):
                refused(out)
    assert list(tmp_path.iterdir()) == []
