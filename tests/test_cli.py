"""The command line: what it prints, what it refuses in one line, and a run from end to end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import mtx
from mtx.cli import COMMANDS, TrainOptions, exit_status, main, output, parse, with_actions
from mtx.cli.completion import rows
from mtx.cli.reference import reference
from mtx.config import RunConfig, from_dict
from mtx.costs import ask
from mtx.errors import UserError
from mtx.plan.flops import parameters
from mtx.presets import NAMES, preset

ROOT = Path(__file__).parent.parent
TINY = [
    "--model.hidden", "32", "--model.sequence", "16", "--eval-batches", "1", "--global-batch", "4",
    "--layout.microbatch", "1",
]  # fmt: skip
ENVIRONMENT = {  # of a separate process: nothing of the user's, and the tests' cache
    "PYTHONPATH": str(ROOT), "PATH": "", "PYTHONIOENCODING": "ascii",
    "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> int:
    """The status of `main`, even if tyro exits after its help."""
    try:
        return main(arguments)
    except SystemExit as exit:
        return exit.code


# --- help -----------------------------------------------------------------------------------------


def test_without_a_command_there_is_an_overview(capsys):
    assert run() == run("--help") == 0
    first, second = capsys.readouterr().out.split("usage: mtx COMMAND [OPTIONS]")[1:]
    for name, command in COMMANDS.items():
        assert f"  {name:<12}{command.__doc__.splitlines()[0]}" in second


@pytest.mark.parametrize(
    "command, options",
    [
        (
            "train",
            [
                "--model.layers, --layers INT",
                "{none,selective,around_attention,full}",
                "--virtual-devices INT",
            ],
        ),
        ("plan", ["--layout.pipe, --pipe INT", "--model.hidden, --hidden INT", "--target NAME"]),
        ("schedule", ["--layout.pipe, --pipe INT", "--draw FILE"]),
        ("generate", ["--prompt", "--temperature FLOAT"]),
        ("presets", ["--help"]),
    ],
)
def test_help_of_a_command_lists_its_options(command, options, capsys):
    assert run(command, "--help") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: mtx {command}")
    for option in options:
        assert option in out


def test_help_of_a_command_by_name(capsys):
    for line in ("plan", "data build", "checkpoint verify", "help", "data"):
        assert run("help", *line.split()) == 0
        asked = capsys.readouterr().out
        assert run(*line.split(), "--help") == 0
        assert capsys.readouterr().out == asked


@pytest.fixture(scope="module")
def table():
    """Everything that is allowed on a command line."""
    return list(rows(with_actions()))


def test_every_option_has_a_line_of_help(table):
    options = [row for row in table if row.flag.startswith("--")]
    assert len(options) > 200
    for row in options:
        said = re.sub(r"\(default:.*\)", "", row.about).strip()
        assert said, f"mtx {row.command} {row.flag} says {row.about!r}"


def test_what_several_commands_have_means_one_thing(table):
    taking = {(row.command, flag): row.takes for row in table for flag in row.flag.split()}
    without = {row.command for row in table} - {command for command, _ in taking if _ == "--json"}
    # `mtx train` writes log.jsonl as it runs, and `mtx launch` prints nothing itself.
    assert without == {"", "data", "checkpoint", "train", "launch", "completion"}
    for (command, flag), takes in taking.items():
        assert takes == {"--json": "", "--out": "1", "--draw": "1"}.get(flag, takes), command
    for row in table:
        if row.flag == "--draw":
            assert "picture: .svg, .png or .pdf" in row.about


def test_without_a_terminal_long_work_says_each_minute_how_far_it_is(capsys, monkeypatch):
    clock = iter([0.0, 59.0, 61.0, 61.0, 100.0, 122.0, 122.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with output.progress("rows", said="compares") as report:
        for done in range(4):  # after 59, 61, 100 and 122 s
            report(done, 2000)
    assert capsys.readouterr().err == "compares: 1 of 2,000\ncompares: 3 of 2,000\n"
    with output.progress(silent=True) as report:
        report(1, 2)
    assert capsys.readouterr().err == ""


def test_the_version_is_that_of_the_package(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith(f"mtx {mtx.__version__}, jax {jax.__version__}, ")


def test_help_shows_the_values_of_the_preset_that_is_named(capsys):
    run("train", "gpt-175b", "--help")
    assert re.search(
        r"--model.hidden, --hidden INT\s+[^(]*\(default:\s+12288\)",
        capsys.readouterr().out,
    )


def test_what_computes_nothing_loads_no_jax(capsys):
    """Nor do values that have been counted before: the presets' parameters."""
    ask._answer.cache_clear()
    assert run("presets") == 0
    code = """if True:
        import sys
        from mtx.cli import main
        for line in ("--help", "presets", "schedule", "nonsense", "train --steps 0"):
            main(line.split())
        try:
            main(["train", "--help"])
        except SystemExit:
            pass
        heavy = {"jax", "flax", "optax", "orbax", "matplotlib"}
        print("loaded:", *sorted(heavy & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=ENVIRONMENT
    )
    assert done.stdout.splitlines()[-1] == "loaded:", done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_the_reference_has_every_option(table):
    page = reference()
    for row in table:
        if row.flag.startswith("--") and row.command:
            for flag in row.flag.split():
                assert f"`{flag}`" in page, (row.command, flag)
    assert all(line.count(" | ") == 3 for line in page.splitlines() if line.startswith("| `"))


# --- options --------------------------------------------------------------------------------------


def parsed(*arguments: str):
    start = TrainOptions(run=preset("miniature"))
    return parse(list(arguments), start, prog="mtx train")


def test_options_replace_fields_of_the_preset():
    options = parsed(
        "--model.layers", "12", "--layout.pipe=4", "--layout.virtual", "1", "--data.path", "a.txt",
        "b.txt", "--optimizer.decay-steps", "90", "--no-resume", "--layout.no-sequence-parallel",
        "--layout.stage_layers", "2", "4", "4", "2", "--virtual_devices", "16", "--out", "o",
    )  # fmt: skip
    start = preset("miniature")
    assert options.virtual_devices == 16
    assert options.run == replace(
        start,
        model=replace(start.model, layers=12),
        layout=replace(
            start.layout, pipe=4, virtual=1, sequence_parallel=False, stage_layers=(2, 4, 4, 2)
        ),
        data=replace(start.data, path=("a.txt", "b.txt")),
        optimizer=replace(start.optimizer, decay_steps=90),
        resume=False,
        out="o",
    )


def test_a_short_name_is_the_layout_s_field_in_every_command(table):
    long = {row.command for row in table if "--layout.pipe" in row.flag.split()}
    assert long >= {"train", "plan", "schedule", "evaluate", "generate", "finetune"}
    assert long == {row.command for row in table if "--pipe" in row.flag.split()}
    short = parsed("--pipe", "4", "--virtual", "1", "--data=1", "--data.path", "a.txt")
    assert short == parsed(
        "--layout.pipe", "4", "--layout.virtual", "1", "--layout.data", "1", "--data.path", "a.txt"
    )
    assert parsed("--pipe", "1", "--layout.pipe=1", "--virtual", "2").run.layout.pipe == 1
    # --dtype is a short name too, except where it is a command's own option.
    dtypes = {row.command: row.flag.split() for row in table if "--dtype" in row.flag.split()}
    assert {n for n, flags in dtypes.items() if flags == ["--dtype"]} == {
        "convert", "checkpoint export"
    }  # fmt: skip
    assert dtypes.keys() >= {"generate", "evaluate", "train"}


def test_the_family_that_is_named_decides_the_model_s_fields():
    start = preset("miniature").model
    model = parsed("--model.family", "llama", "--model.kv-heads", "2").run.model
    assert (model.family, model.kv_heads) == ("llama", 2)
    assert (model.hidden, model.layers, model.sequence) == (96, start.layers, start.sequence)


def test_without_options_it_is_the_preset():
    assert parsed() == TrainOptions(run=preset("miniature"))
    assert parsed("--layout.stage-layers", "balanced").run.layout.stage_layers == "balanced"


# --- mistakes -------------------------------------------------------------------------------------

# For each command line, what the one line that refuses it must name.
MISTAKES = {
    "shedule": "command | shedule | did you mean 'schedule' | checkpoint",
    "sched": "sched | did you mean 'schedule'",
    "--verison": "--verison | did you mean '--version' | --help",
    "--json": "option | --json | --help, --version",
    "export": "command 'export': known are",  # 'report' is two letters away
    "foo": "command 'foo': known are",
    "help foo": "command 'foo'",
    "completion fish": "fish | bash, zsh",
    "completion": "mtx completion SHELL | bash or zsh",
    "data bild": "bild | did you mean 'build' | index",
    "data run": "action 'run': known are | build",
    "train miniture": "preset | miniture | did you mean 'miniature' | bench-s",
    "plan gpt-2t": "gpt-2t | did you mean",
    "plan llama_4_8B": "llama_4_8B | did you mean 'llama-3-8b'",
    "plan llama-9-900b": "'llama-9-900b': known are",
    "plan bert": "did you mean 'bert-1.3b' or 'bert-3.9b' or 'bert-336m'",
    "plan gpt-3-175b": "gpt-3-175b | did you mean 'gpt-175b'",
    "train gpt-175b": "--data.path FILE | --data.tokenizer FILE, bpe | vocab=51,200",
    "train gpt-175b --data.path short": "--data.tokenizer",
    "train gpt-175b --data.tokenizer=bytes": "--data.path",
    "train bert-336m --data.path short": "--data.tokenizer FILE or wordpiece",
    "plan --target a100-80": "a100-80 | did you mean 'a100-80gb'",
    "train --model.layer 3": "--model.layer: did you mean --model.layers?",
    "train --norm-epsilon 3": "--norm-epsilon: did you mean --model.norm-epsilon?",
    "train --sequence_parallel": "--sequence-parallel: did you mean --layout.sequence-parallel?",
    "train --no-model.tied": "--no-model.tied: did you mean --model.no-tied?",
    "train --model.foo 3": "--model.foo: see --help",  # not --model.ffn
    "train --layer 3": "--layer: did you mean --model.layers?",
    "train --data.layers 3": "--data.layers: did you mean --model.layers?",
    "train --modle.layres 3": "--modle.layres: did you mean --model.layers?",
    "train --qqq=1": "--qqq: see --help",
    "train -x": "-x: see --help",
    "train --tensr 2": "--tensr: did you mean --layout.tensor?",
    "train --pipe 2 --layout.pipe 4": "--pipe 2 | --layout.pipe 4 | leave one out",
    "train --steps 3 --steps=4": "--steps 3 | --steps=4 | leave one out",
    "train --resume --no-resume": "--resume | --no-resume | leave one out",
    "train --stages 3": "--stages | --layout.pipe",
    "train --precision float16": "--precision | --model.compute-dtype",
    "train --model.family lama": "family | 'lama' | llama",
    "train --steps 3 miniature": "'miniature' | before all options",
    "train --resume False": "'False' | --no-resume",
    "train miniature gpt-1t": "'gpt-1t' | mtx train [PRESET",
    "train --model.layers x": "--model.layers | INT | 'x'",
    "train --pipe x": "--pipe | --layout.pipe | INT | 'x'",
    "train --model.layers=2.5": "--model.layers | INT | '2.5'",
    "train --optimizer.lr 1e-3x": "--optimizer.lr | FLOAT | '1e-3x'",
    "train --layout.stage-layers 1 two": "--layout.stage-layers | even,balanced | '1 two'",
    "train --steps": "'--steps'",
    "train --layout.schedule 1f2b": "1f2b | did you mean '1f1b'",
    "train --steps -3": "steps=-3",
    "train --model.hidden 130": "hidden=130 | heads=4 | 128 or 132",
    "train --model.hidden 99999999999999999999999": "hidden=99999999999999999999999 | 1,048,576",
    "train --tensor 3": "heads=4 | tensor=3 | 2 or 4",
    "train --global-batch 18": "global_batch=18 | microbatch=2*2",
    "train --optimizer.lr 0": "lr=0.0 | 0",
    "train --virtual-devices -1": "virtual_devices=-1 | 0",
    "train --virtual 3": "layers=4 | pipe*virtual=2*3 | 6",
    "train bench-s --data 4": "4*4*1 | 16 devices | 8",
    "train --data.path missing.txt": "missing.txt",
    "train --data.path empty": "empty | data path",
    "train --data.path binary": "binary | NUL | 1",
    "train --data.split 9,1": "data split='9,1' | eval_fraction",
    "train --data.cache here": "data cache='here' | eval_fraction",
    "train --out empty/run": "out=empty/run | empty",
    "train --data.path short --model.sequence 64": "training text",
    "generate": "mtx generate RUN_DIR | --out",
    "generate nowhere": "/nowhere | `out`",
    "generate . --tokens few": "--tokens | INT | 'few'",
    "generate . --top-p 0": "top_p=0.0",
    "generate . --precision float32": "--precision | --model.compute-dtype",
    "generate . --prompt a --prompt-file b": "--prompt | --prompt-file",
    "generate . --prompt a --prompt b": "--prompt a | --prompt b | leave one out",
    f"generate . --prompt a --prompt {'b' * 5000}": "--prompt a | bbb... are both given",
    "generate . --prompt-file missing.txt": "prompt_file missing.txt",
    "generate . --prompt-file missing.jsonl": "missing.jsonl",
    "generate . --prompt-file empty": "prompt_file=empty",
    "generate . --out no/folder": "out=no/folder",
    "finetune": "mtx finetune RUN_DIR",
    "finetune . --lr 3": "--lr | --optimizer.lr",
    "finetune . --train short": "--valid",
    "evaluate": "mtx evaluate RUN_DIR",
    "evaluate .": "--path",
    "evaluate . --path short --data 0": "data=0 | 1",
    "convert": "SOURCE TARGET | SOURCE is missing",
    "convert a": "SOURCE TARGET | TARGET is missing",
    "convert a b c": "'c' | SOURCE TARGET",
    "certify --layout.tensor 3": "heads=4 | tensor=3",
    "certify --cases -1": "cases=-1",
    "certify --out no/folder": "out=no/folder",
    "certify --mutants --cases 3": "--mutants | --cases",
    "certify gpt-7.5b --mutants": "--mutants | gpt-7.5b",
    "certify miniatur": "miniatur | miniature",
    "launch -- finetun a": "finetun",
    "launch": "mtx launch -n 2",
    "presets all": "'all'",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(line, empty_directory, capsys):
    Path("empty").touch()
    Path("binary").write_bytes(b"a\0b")
    Path("short").write_text("too short")
    assert run(*line.split()) == 2
    out, error = capsys.readouterr()
    assert error.startswith("mtx: ") and error.count("\n") == 1 and out == ""
    missing = [value for value in MISTAKES[line].split(" | ") if value not in error]
    assert not missing, error
    assert "─" not in error
    assert sorted(path.name for path in empty_directory.iterdir()) == ["binary", "empty", "short"]


def test_every_ending_has_its_status(capsys):
    def raising(error):
        raise error

    assert exit_status(lambda: None) == 0
    assert exit_status(lambda: 3) == 3
    assert exit_status(lambda: raising(UserError("one\ntwo"))) == 2
    assert exit_status(lambda: raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "mtx: one two\nmtx: interrupted\n"
    with pytest.raises(ValueError) as error:
        exit_status(lambda: raising(ValueError("a bug keeps its traceback")))
    assert str(error.value) == "a bug keeps its traceback"


@pytest.mark.parametrize("line", [
    "sys.meta_path.insert(0, Finder())",  # Ctrl-C while commands are imported
    "import mtx.cli; mtx.cli.main = lambda: 130",  # and while JAX computes, beneath the command
])  # fmt: skip
def test_an_interrupted_command_ends_at_once(line):
    """Without a traceback or the interpreter's shutdown, in which threads of JAX may crash."""
    code = f"""
import atexit, sys
from importlib.abc import MetaPathFinder

class Finder(MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "mtx.cli":
            raise KeyboardInterrupt

{line}
atexit.register(print, "the interpreter ends")
from mtx.__main__ import run
run()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert "Traceback" not in ended.stderr


def test_an_added_file_that_is_refused_ends_in_a_line():
    """A file of schedules without its table is refused when commands are imported."""
    code = """
import pkgutil
from mtx.__main__ import run
of_makers, of_all = "schedules/makers", pkgutil.iter_modules

def with_another(paths):
    found = list(of_all(paths))
    return found + [found[0]] if any(path.endswith(of_makers) for path in paths) else found

pkgutil.iter_modules = with_another
run()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "") and "use another name" in ended.stderr
    assert (
        ended.stderr.startswith("mtx: schedule 'breadth_first'") and ended.stderr.count("\n") == 1
    )


def test_a_terminal_that_knows_only_ascii_is_no_error():
    done = subprocess.run(
        [sys.executable, "-m", "mtx", "schedule"], capture_output=True, env=ENVIRONMENT, timeout=300
    )
    assert done.returncode == 0 and done.stderr == b""
    assert b"stage 1 | ?|F0|F1|F2  ?|F3  ?|" in done.stdout


def test_a_reader_that_leaves_early_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "mtx", "presets"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )  # fmt: skip
    process.stdout.close()
    assert process.wait(timeout=300) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


# --- output of the commands that compute nothing --------------------------------------------------


def test_plan_is_that_of_the_paper_s_largest_model(capsys):
    assert run("plan") == 0
    page = capsys.readouterr().out
    for fact in ("1,008,038,707,200", "6 x 64 x 8 = 3,072 devices", "502.0 petaFLOP/s"):
        assert fact in page
    assert run("plan", "miniature", "--pipe", "4", "--virtual", "1") == 0
    assert "1 x 4 x 2 = 8 devices" in capsys.readouterr().out


def test_presets_as_json_are_what_they_are(capsys):
    assert run("presets", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(NAMES)
    for name, values in found.items():
        assert values.pop("parameters") == parameters(preset(name).model)
        assert from_dict(RunConfig, values) == preset(name)


def test_presets_are_listed(capsys):
    assert run("presets") == 0
    head, *rows, _, legend = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == list(NAMES)
    assert max(map(len, (head, *rows, legend))) <= 100
    (row,) = (row for row in rows if row.startswith("gpt-1t"))
    columns = head.replace("d x p x t", "mesh").split()
    assert dict(zip(columns, row.replace(" x ", "x").split(), strict=True)) == {
        "preset": "gpt-1t", "params": "1.01T", "layers": "128", "hidden": "25600",
        "heads": "160", "sequence": "2048", "vocab": "51200", "mesh": "6x64x8", "v": "1",
        "b": "1", "batch": "3072", "GPUs": "3072",
    }  # fmt: skip


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "finetune", "generate", "evaluate"])
def test_what_computes_can_be_launched(command, monkeypatch):
    started = []
    monkeypatch.setattr(
        "mtx.cli.launch.supervise", lambda command, options: started.append((command, options))
    )
    assert run("launch", "-n", "3", "--", command, "a") == 0
    [(argv, options)] = started
    assert argv == [sys.executable, "-m", "mtx", command, "a"] and options.processes == 3


def test_train_generate_and_go_on(empty_directory, capsys, monkeypatch):
    assert run("train", *TINY, "--steps", "2", "--out", "a", "--virtual-devices", "8") == 0
    out, error = capsys.readouterr()
    assert "layout     data 2 x pipe 2 x tensor 2" in out and error == ""
    assert "finished   step 2" in out
    lines = [line.split(maxsplit=1)[0] for line in out.splitlines()]
    assert lines.index("out") < lines.index("compiling") < lines.index("compiled")

    ask = ["generate", "a", "--prompt", "The ", "A ", "--tokens", "5", "--seed", "3"]
    assert run(*ask) == 0
    texts = capsys.readouterr().out
    assert texts.startswith("The ") and "\n\nA " in texts
    # On one device: a part of the run's layout.
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    Path("prompts").write_text("The \nA \n")
    ask = [*ask[:2], "--prompt-file", "prompts", *ask[5:], "--out", "texts.jsonl"]
    assert run(*ask) == 0
    assert capsys.readouterr().out == ""
    found = [json.loads(line) for line in Path("texts.jsonl").read_text().splitlines()]
    assert "\n\n".join(one["prompt"] + one["text"] for one in found) + "\n" == texts
    assert run(*ask[:-2], "--json") == 0
    assert capsys.readouterr().out == Path("texts.jsonl").read_text()
    assert [len(one["tokens"]) for one in found] == [5, 5]
    monkeypatch.undo()
    monkeypatch.chdir(empty_directory)

    assert run("train", *TINY, "--steps", "3", "--out", "a") == 0
    assert "step      1 " not in capsys.readouterr().out
    assert sorted(path.name for path in Path("a/checkpoints").iterdir()) == ["2", "3"]

    before = sorted(Path("a").rglob("*"))
    assert run("train", *TINY, "--steps", "3", "--out", "a", "--model.layers", "8") == 2
    assert "is of another model: layers=4 there and 8 here" in capsys.readouterr().err
    assert sorted(Path("a").rglob("*")) == before
