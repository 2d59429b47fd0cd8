"""`import mtx`: its names at run time, for type checkers, and in the package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from errors import names

import mtx
from mtx.costs import ask
from mtx.view.notebook import explore

ROOT = Path(__file__).parent.parent
CHECK = """
import importlib, pkgutil, mtx
before = {name: getattr(mtx, name) for name in mtx.__all__}
for module in pkgutil.iter_modules(mtx.__path__):
    if module.name != "__main__":
        importlib.import_module(f"mtx.{module.name}")
changed = [name for name, value in before.items() if getattr(mtx, name) is not value]
assert not changed, changed
"""


def test_no_name_is_a_module_as_well():
    subprocess.run([sys.executable, "-c", CHECK], check=True)


def test_names_are_listed():
    assert dir(mtx) == sorted([*mtx.__all__, "__version__"])
    for name in ("Plan", "MeshView", "hardware", "generate", "evaluate", "convert"):
        assert name in mtx.__all__
    with pytest.raises(AttributeError, match="has no attribute 'make_pln'"):
        mtx.make_pln  # noqa: B018


def test_importing_it_loads_no_jax():
    """Nor does planning a model that was planned before."""
    ask._answer.cache_clear()
    mtx.make_plan(mtx.preset("gpt-1t"))
    code = "import sys, mtx; mtx.make_plan(mtx.preset('gpt-1t')); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_version_is_the_package_s():
    assert metadata.version("mtx") == mtx.__version__


RUN = mtx.preset("miniature")
WRONG_KINDS = {
    "preset, number": (lambda: mtx.preset(3), ["preset", 3, "int"]),
    "preset, none": (lambda: mtx.preset(None), ["preset", None]),
    "preset, list": (lambda: mtx.preset(["gpt-1t"]), ["preset", "gpt-1t", "list"]),
    "explore": (lambda: explore(None), ["run", None]),
    "explore, number": (lambda: explore(3), ["run", 3, "int"]),
    "make": (lambda: mtx.make(3, microbatches=8, stages=4), ["schedule", 3, "int"]),
    "make, list": (lambda: mtx.make(["1f1b"], microbatches=8, stages=4), ["schedule", "1f1b"]),
    "timeline_text": (lambda: mtx.timeline_text("1f1b"), ["shown", "1f1b", "str"]),
    "simulate": (lambda: mtx.simulate("1f1b"), ["schedule", "1f1b", "str"]),
    "from_lists": (lambda: mtx.Orders.from_lists(None), ["orders", None]),
    "from_lists, ops": (lambda: mtx.Orders.from_lists([3]), ["stage 0", 3]),
    "from_orders": (lambda: mtx.Schedule.from_orders("x", None), ["orders", None]),
    "make_plan": (lambda: mtx.make_plan("gpt-1t"), ["run", "gpt-1t", "str"]),
    "load_data": (lambda: mtx.load_data("miniature"), ["run", "miniature", "str"]),
    "Trainer": (lambda: mtx.Trainer(RUN.model), ["run", "GPT"]),
    "load_model": (lambda: mtx.load_model(None), ["checkpoints", None]),
    "no batch": (lambda: mtx.loss_and_gradients(RUN.model, RUN.layout, None), ["batch", None]),
    "empty batch": (lambda: mtx.loss_and_gradients(RUN.model, RUN.layout, {}), ["tokens"]),
    "layout": (lambda: mtx.loss_and_gradients(RUN.model, "x", {}), ["layout", "'x'"]),
    "model": (lambda: mtx.loss_and_gradients(RUN, RUN.layout, {}), ["model", "RunConfig"]),
    "consumed": (lambda: mtx.load_data(RUN).batch(0.5, 16), ["consumed", 0.5, "float"]),
    "consumed below 0": (lambda: mtx.load_data(RUN).batch(-1, 16), ["consumed", -1]),
    "rows": (lambda: mtx.load_data(RUN).batch(0, "16"), ["rows", "'16'", "str"]),
}


@pytest.mark.parametrize("case", WRONG_KINDS)
def test_an_argument_of_another_kind_is_refused(case):
    call, values = WRONG_KINDS[case]
    with pytest.raises(mtx.UserError) as error:
        call()
    assert names(error, *values)


# --- types ----------------------------------------------------------------------------------------

RIGHT = """
from pathlib import Path
import numpy as np
import mtx

table = mtx.make("interleaved_1f1b", microbatches=8, stages=4, virtual=2)
timed = mtx.simulate(table, mtx.Times(comm=0.1), model="lockstep")
print(table.ticks, table.in_flight.tolist(), timed.makespan, timed.bubble_over_ideal)
print(mtx.timeline_text(table, 100), mtx.to_text(table), mtx.to_csv(table), mtx.__version__)
mtx.show([table, timed]).save("both.svg")
mtx.write_trace(table, Path("trace.json"))
hardware: mtx.Hardware = mtx.hardware("h100")
run = mtx.preset("miniature")
plan: mtx.Plan = mtx.make_plan(run, target=hardware)
print(plan.time.step_s, plan.memory.total_bytes / 2**30, plan.gpus, plan.to_dict()["target"])
mtx.save_plan(plan, "plan.toml")
again: mtx.RunConfig = mtx.load_run("plan.toml")
found = mtx.search(run.model, gpus=64, global_batch=128, hardware=hardware)
print(found.best.layout.pipe, found.best.time.step_s)
layout = mtx.Layout(data=2, pipe=2, tensor=2)
print(mtx.MeshView(layout=layout, hardware=hardware), mtx.mesh_text(layout))
mtx.use_virtual_devices(8)
batch = mtx.load_data(run).batch(0, run.global_batch)
start = mtx.init_params(run.model)
loss, gradients = mtx.loss_and_gradients(run.model, layout, batch, params=start)
print(float(np.sqrt(loss)), gradients)
print(mtx.convert("gpt2", "runs/gpt2").notes)
print(mtx.evaluate("runs/gpt2", "wiki.txt"))
model = mtx.load_model("runs/gpt2", layout=layout)
texts: list[str] = mtx.generate(*model, ["The "], tokens=8)
print(texts, mtx.perplexity(*model, texts).loss, mtx.to_huggingface("runs/gpt2", "back").notes)
try:
    summary = mtx.run_training(run, on_step=lambda record: print(record.loss))
    print(summary.losses[-1], summary.checkpoint)
except mtx.UserError as error:
    print(error)
"""
WRONG = """
import mtx
table = mtx.make("1f1b", microbatches=8, stages=4)
print(table.tickz)
mtx.make_pln(mtx.preset("gpt-1t"))
mtx.Layout(daat=2)
mtx.make_plan(mtx.preset("gpt-1t"), target=3)
"""
MISTAKES = {"tickz": 4, "make_pln": 5, "daat": 6, "target": 7}
# Of the packages that mtx imports, only numpy has types that a script like this sees.
MYPY = """[mypy]
strict = true
follow_imports = silent
[mypy-jax.*,jaxlib.*,flax.*,optax.*,orbax.*,matplotlib.*,rich.*,grain.*,tokenizers.*]
follow_imports = skip
ignore_missing_imports = true
"""


def mypy(folder: Path) -> dict[str, list[tuple[int, str]]]:
    (folder / "mypy.ini").write_text(MYPY)
    command = [sys.executable, "-m", "mypy", "--output", "json", "right.py", "wrong.py"]
    found = subprocess.run(
        command, cwd=folder, env=os.environ | {"MYPYPATH": str(ROOT)}, capture_output=True,
        text=True,
    )  # fmt: skip
    errors = [json.loads(line) for line in found.stdout.splitlines()]
    assert found.returncode == bool(errors), found.stderr
    return by_file((one["file"], one["line"], one["message"]) for one in errors)


def pyright(folder: Path) -> dict[str, list[tuple[int, str]]]:
    config = {"extraPaths": [str(ROOT)], "strict": ["right.py"], "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    errors = json.loads(found.stdout)["generalDiagnostics"]
    return by_file(
        (one["file"], one["range"]["start"]["line"] + 1, one["message"]) for one in errors
    )


def by_file(errors) -> dict[str, list[tuple[int, str]]]:
    found: dict[str, list[tuple[int, str]]] = {"right.py": [], "wrong.py": []}
    for file, line, message in errors:
        found[Path(file).name].append((line, message))
    return found


@pytest.mark.parametrize("module, check", [("mypy", mypy), ("basedpyright", pyright)])
def test_a_type_checker_finds_four_mistakes_and_no_more(module, check, tmp_path):
    pytest.importorskip(module)
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    found = check(tmp_path)
    assert found["right.py"] == []
    assert [line for line, _ in found["wrong.py"]] == list(MISTAKES.values())
    for (_, message), word in zip(found["wrong.py"], MISTAKES, strict=True):
        assert word in message


# --- the package ----------------------------------------------------------------------------------


def test_wheel_and_sdist_carry_the_types(tmp_path):
    """And a page whose links work wherever it is read."""
    pytest.importorskip("setuptools", minversion="77")
    (tmp_path / "docs").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "docs/package.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "mtx", tmp_path / "mtx", ignore=shutil.ignore_patterns("__pycache__"))
    code = "from setuptools import build_meta as b; b.build_wheel('out'); b.build_sdist('out')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "out").glob(f"mtx-{mtx.__version__}-*.whl")
    sdist = tmp_path / "out" / f"mtx-{mtx.__version__}.tar.gz"
    with zipfile.ZipFile(wheel) as inside, tarfile.open(sdist) as source:
        for name in ("mtx/py.typed", "mtx/__init__.pyi"):
            assert name in inside.namelist()
            assert f"mtx-{mtx.__version__}/{name}" in source.getnames()
        page = inside.read(f"mtx-{mtx.__version__}.dist-info/METADATA").decode()
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert links and all(link.startswith("https://") for link in links)
