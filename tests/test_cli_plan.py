"""`mtx plan`: what it chooses and prints, its JSON, its files, and what it refuses in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mtx.cli import main
from mtx.config import to_dict
from mtx.plan.plan import load_plan, load_run
from mtx.presets import preset


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def numbers(capsys, line: str) -> dict:
    assert main(["plan", *line.split(), "--json"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    return json.loads(out)


@pytest.mark.parametrize(
    "line",
    ["gpt-1t", "gpt-175b", "gpt-175b --global-batch 50", "gpt-1.7b",
     "gpt-175b --layout.schedule zb_h2 --virtual 1 --target h100",
     "gpt-175b --layout.schedule zb_v --virtual 2 --target h100"],
)  # fmt: skip
def test_the_bubble_is_one_number_on_the_page_in_json_and_in_the_picture(line, tmp_path, capsys):
    told = f"{numbers(capsys, line)['bubble_over_ideal']:.2%} of ideal time"
    assert main(["plan", *line.split(), "--draw", str(tmp_path / "plan.svg")]) == 0
    assert re.findall(r"bubble +(\S+ of ideal time)", capsys.readouterr().out) == [told]
    drawn = re.findall(r"bubble ([^<]*)<", (tmp_path / "plan.svg").read_text())
    assert drawn == [told]


def layout_of(plan: dict) -> tuple[int, ...]:
    layout = plan["layout"]
    return tuple(layout[name] for name in ("data", "pipe", "tensor", "virtual", "microbatch"))


PROMISED = {
    "parameters", "step_time_s", "sequences_per_s", "tflops_per_gpu_sc21", "tflops_per_gpu_model",
    "mfu", "bubble_over_ideal", "memory_gib", "memory_parts_gib", "fits", "days_per_300b_tokens",
}  # fmt: skip


def test_json_has_every_number(capsys):
    plan = numbers(capsys, "gpt-1t")
    assert PROMISED <= plan.keys()
    assert plan["parameters"] == 1_008_038_758_400 and plan["gpus"] == 3072
    parts = plan["step_time_parts_s"]
    rest_s = parts["bubble"] + parts["data_comm"] + parts["optimizer"]
    ideal_s = plan["step_time_s"] - rest_s
    assert plan["bubble_over_ideal"] == pytest.approx(parts["bubble"] / ideal_s)
    assert plan["published"]["tflops_per_gpu"] == 163
    assert layout_of(plan) == (6, 64, 8, 1, 1) and plan["chosen"] == []


def test_a_preset_alone_is_the_papers_layout(capsys):
    assert main(["plan", "gpt-76b"]) == 0
    out = capsys.readouterr().out
    assert "32 x 4 x 8 = 1,024 devices" in out and "140 teraFLOP/s, 45 % of peak" in out
    assert "Chosen" not in out and "predicted above, with" in out


def test_without_a_name_it_is_the_main_job(capsys):
    assert numbers(capsys, "") == numbers(capsys, "gpt-1t")
    half = "--model.compute-dtype float16"
    assert numbers(capsys, half) == numbers(capsys, f"gpt-1t {half}")


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, layout",
    [
        ("--tensor 4", (12, 64, 4, 1, 1)),  # data follows
        ("--pipe 32 --virtual 2", (12, 32, 8, 2, 1)),
        ("--data 12", (12, 64, 8, 1, 1)),  # and twice the GPUs
        ("--data 2 --pipe 64 --tensor 8 --gpus 1024", (2, 64, 8, 1, 1)),
        ("--gpus 3072 --microbatch 2", (6, 64, 8, 1, 2)),
        ("--layout.pipe 32 --layout.virtual 2 --pipe 32", (12, 32, 8, 2, 1)),
    ],
)
def test_parts_of_the_layout_replace_the_presets(capsys, options, layout):
    assert layout_of(numbers(capsys, f"gpt-1t {options}")) == layout


def test_every_option_arrives(capsys):
    plan = numbers(
        capsys,
        "gpt-1.7b --model.hidden 1536 --model.layers 12 --model.heads 16 --model.sequence 1024 "
        "--model.vocab 32000 --model.ffn 3072 --model.compute-dtype float16 --global-batch 64 "
        "--microbatch 2 --layout.schedule gpipe --layout.zero 0 --pipe 2 --tensor 2 --virtual 3 "
        "--layout.recompute none --layout.no-sequence-parallel --no-scatter-gather "
        "--target h100 --tokens 1e9 --price 2.5",
    )
    model, layout = plan["model"], plan["layout"]
    sizes = {"hidden": 1536, "layers": 12, "heads": 16, "sequence": 1024, "vocab": 32000}
    assert sizes.items() <= model.items() and model["ffn"] == 3072
    assert model["compute_dtype"] == "float16" and plan["global_batch"] == 64
    assert layout_of(plan) == (8, 2, 2, 3, 2)
    assert (layout["schedule"], layout["recompute"]) == ("gpipe", "none")
    assert layout["sequence_parallel"] is False and plan["scatter_gather"] is False
    assert plan["zero"] == 0 and plan["target"] == "h100" and plan["tokens"] == 1e9
    assert plan["cost"] == pytest.approx(2.5 * plan["gpu_hours"])
    assert plan["days"] == pytest.approx(plan["days_per_300b_tokens"] / 300)


def test_scatter_gather_and_zero_change_the_prediction(capsys):
    base = "gpt-175b --layout.no-sequence-parallel"
    on, off = numbers(capsys, base), numbers(capsys, f"{base} --no-scatter-gather")
    assert on["step_time_s"] < off["step_time_s"]
    sharded, whole = (numbers(capsys, f"gpt-1.7b --layout.zero {zero}") for zero in (1, 0))
    assert sharded["memory_gib"] < whole["memory_gib"]


# --- what is chosen -------------------------------------------------------------------------------


def test_the_optimizers_state_is_counted(capsys):
    """Lion keeps one array of moments, AdamW two; a search counts them as a plan does."""
    searched = "gpt-1.7b --search --data 8 --pipe 1 --microbatch 2 --layout.schedule 1f1b"
    for base in ("gpt-1.7b", searched):
        adamw, lion = (numbers(capsys, f"{base}{name}") for name in ("", " --optimizer.name lion"))
        parts = [plan["memory_parts_gib"]["optimizer"] for plan in (adamw, lion)]
        assert parts[1] == pytest.approx(parts[0] * 2 / 3)
        assert lion.get("search", {}).get("ranked", [lion])[0]["memory_gib"] == lion["memory_gib"]
    assert main(["plan", "gpt-1.7b", "--optimizer.lr", "1e-3", "--save", "plan.toml"]) == 0
    assert load_run("plan.toml").optimizer.lr == 1e-3


def test_another_number_of_gpus_opens_the_layout(capsys):
    """The README's command; takes seconds, and gives the reasons."""
    plan = numbers(capsys, "gpt-175b --gpus 1024 --target a100-80gb --global-batch 1536")
    assert plan["gpus"] == 1024 and plan["fits"] and plan["global_batch"] == 1536
    ranked = plan["search"]["ranked"]
    assert ranked[0]["runs"] and ranked[0]["step_time_s"] == pytest.approx(plan["step_time_s"])
    assert [one["step_time_s"] for one in ranked] == sorted(one["step_time_s"] for one in ranked)
    assert all("instead of" in one["beats_next_by"] for one in ranked[:-1])
    assert plan["chosen"][0].startswith("layout: the fastest of ")


def test_a_search_is_printed_with_its_reasons(capsys):
    assert main(["plan", "gpt-18b", "--gpus", "64"]) == 0
    out = capsys.readouterr().out
    assert "Layouts of 64 x a100-80gb that fit, fastest first" in out
    assert "1 beats 2: " in out and "instead of" in out and "One change of the best layout" in out


def test_search_keeps_what_is_given(capsys):
    plan = numbers(capsys, "gpt-18b --search --tensor 4 --layout.recompute full --microbatch 2")
    assert plan["gpus"] == 256 and plan["layout"]["recompute"] == "full"
    assert plan["layout"]["tensor"] == 4 and plan["layout"]["microbatch"] == 2
    assert " meshes with tensor=4, microbatch=2, recompute=full, by " in plan["chosen"][0]


def test_a_schedule_is_chosen_and_said(capsys):
    plan = numbers(capsys, "gpt-39b --layout.schedule auto")
    assert plan["layout"]["schedule"] not in ("auto", "1f1b")
    assert plan["chosen"][0].startswith("schedule ") and "faster than" in plan["chosen"][0]
    given = numbers(capsys, "gpt-18b --search --layout.schedule zb_v")
    assert given["layout"]["schedule"] == "zb_v" and given["layout"]["virtual"] == 2


def test_sizes_alone_are_enough(capsys):
    plan = numbers(capsys, "--model.hidden 6144 --model.layers 40")
    assert plan["model"]["heads"] == 48 and plan["model"]["vocab"] == 51200
    assert plan["fits"] and plan["gpus"] & (plan["gpus"] - 1) == 0
    chosen = " ".join(plan["chosen"])
    assert "heads=48, sequence=2048, vocab=51200, ffn=24576, compute_dtype=bfloat16" in chosen
    assert f"gpus={plan['gpus']}: the smallest power of two that holds it" in chosen
    assert f"global_batch={plan['global_batch']}: " in chosen and "layout: " in chosen


def test_sizes_of_another_family(capsys):
    plan = numbers(
        capsys,
        "--model.family llama --model.hidden 4096 --model.layers 32 --model.ffn 14336 "
        "--model.vocab 128256",
    )
    assert plan["model"]["family"] == "llama" and not plan["model"]["tied"]
    assert "heads=32, sequence=2048, compute_dtype=bfloat16, kv_heads=32: not" in plan["chosen"][0]
    assert numbers(capsys, "gpt-1.7b --model.family llama")["model"]["family"] == "llama"
    own = numbers(capsys, "gpt-1.7b --model.kv-heads 8 --model.family llama")["model"]
    assert own["family"] == "llama" and own["kv_heads"] == 8
    fewer = numbers(capsys, "llama-2-7b --model.kv-heads 8 --model.ffn 14336 --model.vocab 128256")
    assert fewer["parameters"] == 8_030_261_248 < plan["parameters"]


def test_sizes_with_an_odd_number_of_gpus(capsys):
    """The batch can be divided over 96 = 3 * 32 GPUs."""
    plan = numbers(capsys, "--model.hidden 6144 --model.layers 40 --gpus 96")
    assert plan["global_batch"] % 3 == 0 and plan["gpus"] == 96
    whole = numbers(capsys, "--model.hidden 6144 --model.layers 40 --data 2 --pipe 2 --tensor 2")
    assert layout_of(whole)[:3] == (2, 2, 2)


# --- files ----------------------------------------------------------------------------------------


def test_a_plan_file_runs_and_can_be_planned_again(capsys):
    saved = numbers(capsys, "gpt-18b --gpus 64 --target h100 --save best.toml")
    assert load_run("best.toml").layout.devices == 64
    assert load_run("best.toml").optimizer == preset("gpt-18b").optimizer
    again = numbers(capsys, "best.toml")
    assert again["target"] == "h100" and again["step_time_s"] == saved["step_time_s"]
    other = numbers(capsys, "best.toml --target a100-80gb --save best.json")
    assert other["target"] == "a100-80gb" == load_plan("best.json").target


def test_a_run_is_planned_by_its_folder(capsys):
    run = preset("gpt-1.7b")
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/run.json").write_text(json.dumps(to_dict(run)))
    assert numbers(capsys, "runs/a --target h100") == numbers(capsys, "gpt-1.7b --target h100")


def test_a_plan_is_trained_on_what_is_named(capsys, few_presets):
    """Not on the text that comes with Python, and not in bytes, unless asked for."""
    numbers(capsys, "gpt-18b --gpus 64 --target h100 --save best.toml")
    text = Path("best.toml").read_text()
    Path("book.txt").write_text("one two three " * 20_000)
    assert "[data]" not in text and "tokenizer" not in text
    for options, missing in (
        ("", "data.path and data.tokenizer are not given"),
        ("--data.path book.txt", "data.tokenizer is not given"),
        ("--data.path book.txt --data.tokenizer bytes", "a model of 18,449,756,160"),
    ):
        assert main(["train", "best.toml", *options.split()]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and missing in error
    Path("best.toml").write_text(text + '[data]\npath = ["book.txt"]\ntokenizer = "bpe"\n')
    assert main(["train", "best.toml"]) == 2
    assert "a model of 18,449,756,160 parameters needs" in capsys.readouterr().err
    numbers(capsys, "miniature --save small.json")
    assert load_run("small.json") == preset("miniature")


def test_a_target_of_ones_own(capsys, empty_directory):
    (empty_directory / "ours.toml").write_text('like = "h100"\nmemory_gib = 10\n')
    plan = numbers(capsys, "gpt-1t --target ours.toml")
    assert plan["device_memory_gib"] == 10 and not plan["fits"]


def test_a_picture_is_drawn(capsys, empty_directory):
    assert main(["plan", "miniature", "--draw", "plan.svg"]) == 0
    assert capsys.readouterr().out.endswith("picture plan.svg\n")
    text = (empty_directory / "plan.svg").read_text()
    for said in ("pipe 2 x data 2 x tensor 2", "matmuls", "GiB", "Throughput"):
        assert said in text


# --- mistakes -------------------------------------------------------------------------------------

# For each command line, what the one line that refuses it must name.
MISTAKES = {
    "gpt-2t": "gpt-2t | did you mean",
    "gpt-1t --target a100": "a100 | did you mean | a100-",
    "gpt-1t --target no.toml": "no.toml",
    "gpt-1t --gpus 0": "gpus=0 | 1",
    "gpt-1t --model.layers -3": "layers=-3 | 1",
    "gpt-1t --microbatch 0": "microbatch=0 | 1",
    "gpt-1t --tokens -1": "tokens=-1.0 | 0",
    "gpt-1t --price nan": "price=nan",
    "gpt-1t --gpus x": "--gpus | INT | 'x'",
    "gpt-1t --layout.zero 2": "'2' | --layout.zero",
    "gpt-1t --layout.recompute half": "'half' | --layout.recompute",
    "gpt-1t --model.compute-dtype int8": "'int8' | --model.compute-dtype",
    "gpt-1t --model.compute-dtype float16 --target tpu-v5p": "tpu-v5p | float16",
    "gpt-1t --layout.schedule 2f2b": "2f2b",
    "gpt-1t --search --layout.schedule 2f2b": "2f2b",
    "gpt-1t --search --layout.idle phases": "layout.idle=phases | recompute | leave it out",
    "gpt-1t --model.hidden 100 --model.heads 7": "hidden=100 | heads=7 | 98",
    "gpt-1t --model.ffn 1001": "ffn_hidden=1001 | tensor=8 | tensor=1",
    "gpt-1t --model.family lama": "family | lama | llama",
    "gpt-1t --model.kv-heads 8": "kv",
    "llama-2-7b --model.kv-heads 5": "heads=32 | kv_heads=5 | 4 or 8",
    "gpt-1t --tensor 7": "data*pipe*tensor=6*64*7 | gpus=3072 | --gpus 2688",
    "gpt-1t --data 5 --gpus 3072": "data*pipe*tensor=5*64*8 | gpus=3072",
    "gpt-1t --data 7 --pipe 2 --tensor 8 --gpus 3072": "data*pipe*tensor=7*2*8 | gpus=3072",
    "gpt-1t --pipe 48": "layers=128 | pipe*virtual=48*1 | 96 or 144",
    "gpt-1t --global-batch 100": "global_batch=100 | microbatch=6*1",
    "gpt-1t --gpus 8": "8 x a100-80gb",
    "gpt-1t --gpus 7": "gpus=7 | layers=128 | heads=160 | global_batch=3072",
    "gpt-1t --gpus 1024 --pipe 3": "gpus=1024 | pipe=3 | leave",
    "gpt-1t --layout.sequence-parallel --layout.no-sequence-parallel": "--layout.sequence-parallel"
    " | --layout.no-sequence-parallel | leave one out",
    "--model.heads 4": "--hidden | --layers",
    "--model.hidden 512 --model.layers 4 --model.heads 3": "hidden=512 | heads=3",
    "gpt-1t --layout.zero 0 --compile": "layout.zero=0 | --layout.zero 1",
    "gpt-1t --save no/plan.toml": "no/plan.toml",
    "gpt-1t --save plan.txt": "plan.txt | .toml | .json",
    "miniature --draw no/plan.svg": "no/plan.svg",
    "gpt-1t --draw plan.txt": "plan.txt | .svg | .png | .pdf",
    "no.toml": "no.toml",
    ".": ". | run.json | preset | .toml | training run",
    "runs/a": "runs/a | preset | .toml | training run",
    "gpt-1t --optimizer.name leon": "optimizer.name | leon | lion",
    "gpt-1t --optimizer.lr 0": "lr=0.0",
    "llama-3-8b --model.family gemma2 --model.score-scale 0": "score_scale=0.0",
    "gpt-1t --ffn 3": "--ffn | --model.ffn",
    "gpt-1t --schedule zb_v": "--schedule | --layout.schedule",
    "gpt-1t --schedule full": "--schedule | --layout.schedule",
    "gpt-1t --precision float16": "--precision | --model.compute-dtype",
    "gpt-1t --pipe 32 --layout.pipe 16": "--pipe 32 | --layout.pipe 16 | leave one out",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(line, empty_directory, capsys):
    assert main(["plan", *line.split()]) == 2
    out, error = capsys.readouterr()
    assert error.startswith("mtx: ") and error.count("\n") == 1 and out == ""
    missing = [value for value in MISTAKES[line].split(" | ") if value not in error]
    assert not missing, error
    assert list(empty_directory.iterdir()) == []
