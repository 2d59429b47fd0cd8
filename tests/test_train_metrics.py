"""A step's numbers and the log's lines, without a device."""

from __future__ import annotations

import errno
import json
import math
import os

import numpy as np
import pytest

from mtx.config import Layout, ModelConfig, RunConfig
from mtx.presets import preset
from mtx.step.state import Metrics
from mtx.train.log import Log
from mtx.train.metrics import Meter
from mtx.train.report import step_text


def metrics(loss: float = 2.5, finite: float = 1.0) -> Metrics:
    return Metrics(*(np.float32(value) for value in (loss, 1.25, 1e-3, 1.0, finite, 0)))


def test_the_paper_s_table_in_its_own_unit():
    """1T on 3,072 A100s: 163 teraFLOP/s a GPU, 502 petaFLOP/s in all (SC'21, table 1)."""
    run = preset("gpt-1t")
    flops = (
        96 * 3072 * 2048 * 128 * 25600**2 * (1 + 2048 / (6 * 25600) + 51200 / (16 * 128 * 25600))
    )
    record = Meter(run, peak_flops=312e12).measure(7, metrics(), flops / 502e15)
    assert record.tflops_sc21 == pytest.approx(163.4, rel=1e-3)
    assert record.tflops_model == pytest.approx(163.4 * 72 / 96, rel=0.01)
    assert record.mfu == pytest.approx(record.tflops_model / 312)
    assert record.tokens_per_s * record.step_s == pytest.approx(3072 * 2048)


def test_numbers_are_plain():
    run = RunConfig(model=ModelConfig(), layout=Layout(data=2))
    record = Meter(run).measure(3, metrics(finite=0.0), 0.5)
    assert type(record.loss) is float and type(record.gradient_norm) is float
    assert record.finite is False and record.mfu is None and record.step == 3
    assert record.tokens_per_s == 16 * 256 / 0.5


@pytest.mark.parametrize(
    ("tflops", "text"), [(142.4, "142 model"), (19.52, "19.5 model"), (1.4e-4, "0.000140 model")]
)
def test_text_has_three_digits(tflops, text):
    run = RunConfig(model=ModelConfig(), layout=Layout())
    meter = Meter(run, peak_flops=200e12)
    seconds = meter.measure(1, metrics(), 1.0).tflops_model / tflops
    line = step_text(meter.measure(1, metrics(), seconds))
    assert text in line and f"MFU {tflops / 200:.1%}" in line
    assert line.startswith("loss 2.5000  lr 1.00e-03  norm 1.250  ")


def test_losses_beside_the_head_s_are_said():
    meter = Meter(RunConfig(model=ModelConfig(), layout=Layout()))
    record = meter.measure(1, metrics()._replace(second_loss=np.float32(0.75)), 1.0)
    assert record.second_loss == 0.75 and record.aux_loss is None
    assert step_text(record).startswith("loss 2.5000  second token 0.7500  lr ")
    assert "second" not in step_text(meter.measure(1, metrics(), 1.0))


def test_log_lines_are_strict_json(tmp_path):
    path = tmp_path / "log.jsonl"
    values = {"a": math.nan, "b": [np.float32(-np.inf), np.float32(0.5)], "c": {"d": np.int32(3)}}
    with Log(path) as log:
        log.write("step", values)
        assert path.read_text().endswith("\n")  # at once, not at the end
    (line,) = path.read_text().splitlines()
    assert line.startswith('{"kind": "step", "a": null, "b": [null, 0.5], "c": {"d": 3}, "t_s": ')
    assert 0 <= json.loads(line)["t_s"] < 60


def test_log_appends_after_a_torn_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    with Log(path) as log:
        log.write("step", {"step": 2})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with Log(None) as log:
        log.write("end", {"step": 1})
    assert not [*tmp_path.iterdir()] and capfd.readouterr() == ("", "")


class SmallDisk:
    """A file on a disk with room for `room` bytes."""

    def __init__(self, file, room):
        self._file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._file.write(data[: self.room])
        self.room -= written
        return written

    def close(self):
        self._file.close()


def test_lines_wait_for_room_on_the_disk(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    with Log(path) as log:
        log.write("eval", {"step": 0, "loss": 3.0})
        disk = log._file = SmallDisk(log._file, room=10)
        for step in range(1, 4):
            log.write("eval", {"step": step, "loss": 3.0})
        told = capsys.readouterr().err
        assert told.count("log.jsonl cannot be written (No space left on device)") == 1
        assert path.read_text().count("\n") == 1
        disk.room = 1000
        log.write("eval", {"step": 4, "loss": 3.0})
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*range(5)]
        disk.room = 3
        log.write("eval", {"step": 5, "loss": 3.0})
    assert "the last line is not in" in capsys.readouterr().err
    with Log(path) as log:  # removes the rest of that line
        log.write("eval", {"step": 6, "loss": 3.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*range(5), 6]
