"""A plan's numbers, and the files that store it."""

from __future__ import annotations

import dataclasses
import json
import tomllib

import pytest
from errors import names
from hypothesis import given
from hypothesis import strategies as st

from mtx.config import DataConfig, Layout, ModelConfig, RunConfig, to_dict
from mtx.errors import UserError
from mtx.plan.flops import model_flops, sc21_flops
from mtx.plan.hardware import hardware
from mtx.plan.plan import is_plan_file, load_plan, load_run, make_plan, save_plan, to_toml
from mtx.presets import NAMES, preset

TRILLION = make_plan(preset("gpt-1t"))


def test_speeds_follow_from_the_step():
    run, step_s = TRILLION.run, TRILLION.time.step_s
    assert TRILLION.sequences_per_s == pytest.approx(3072 / step_s)
    assert TRILLION.tokens_per_s == pytest.approx(3072 * 2048 / step_s)
    sc21 = sc21_flops(run.model, 3072) / step_s / 3072
    assert TRILLION.tflops_per_gpu_sc21 == pytest.approx(sc21 / 1e12)
    assert TRILLION.tflops_per_gpu_sc21 > TRILLION.tflops_per_gpu_model
    assert TRILLION.tflops_per_gpu_model == pytest.approx(312 * TRILLION.mfu)
    assert TRILLION.mfu == pytest.approx(model_flops(run.model, 3072) / step_s / 3072 / 312e12)
    time = TRILLION.time
    rest_s = time.bubble_s + time.data_comm_s + time.optimizer_s
    assert TRILLION.bubble_over_ideal == pytest.approx(time.bubble_s / (step_s - rest_s))
    assert TRILLION.bubble_over_ideal > 63 / 512, "the last stage has the head as well"


def test_a_target_is_hardware_or_its_name(tmp_path):
    run, h100 = preset("gpt-1.7b"), hardware("h100")
    assert make_plan(run, target=h100) == make_plan(run, target="h100")
    faster = dataclasses.replace(h100, link_gb_s=2 * h100.link_gb_s)
    plan = make_plan(preset("gpt-76b"), target=faster)
    assert plan.time.step_s < make_plan(preset("gpt-76b"), target=h100).time.step_s
    with pytest.raises(UserError) as error:
        save_plan(plan, tmp_path / "plan.toml")
    names(error, "target=h100")
    assert not list(tmp_path.iterdir())


def test_days_and_hours_of_a_token_budget():
    days = 300e9 / TRILLION.tokens_per_s / 86400
    assert TRILLION.days(300e9) == pytest.approx(days)
    assert TRILLION.gpu_hours(300e9) == pytest.approx(days * 24 * 3072)
    numbers = TRILLION.to_dict(tokens=450e9, price_per_gpu_hour=2.0)
    assert numbers["days_per_300b_tokens"] == pytest.approx(days)
    assert numbers["days"] == pytest.approx(1.5 * days)
    assert numbers["cost"] == pytest.approx(2.0 * 1.5 * days * 24 * 3072)


def test_a_schedule_that_is_to_be_chosen_is_chosen_and_said(tmp_path):
    run = preset("miniature")
    run = dataclasses.replace(run, layout=dataclasses.replace(run.layout, schedule="auto"))
    plan = make_plan(run, chosen=("the rest",))
    assert plan.run.layout.schedule not in ("auto", "1f1b")
    assert plan.chosen[0] == "the rest"
    assert plan.chosen[1].startswith(f"schedule {plan.run.layout.schedule}")
    assert plan == make_plan(plan.run, chosen=plan.chosen)
    save_plan(plan, tmp_path / "plan.toml")
    text = (tmp_path / "plan.toml").read_text()
    open_ = text.replace(f'"{plan.run.layout.schedule}"', '"auto"')
    (tmp_path / "open.toml").write_text(open_)
    assert load_plan(tmp_path / "open.toml").run == plan.run


def test_the_memory_fraction_is_named_where_the_default_will_not_do():
    shares = {}
    for gib in (20, 40, 80):
        hardware = dataclasses.replace(TRILLION.hardware, memory_gib=gib)
        plan = dataclasses.replace(TRILLION, hardware=hardware)
        shares[gib] = (plan.memory_share > 0.75, plan.memory_fraction)
    assert shares[80] == (False, None)
    for tight, fraction in shares.values():
        assert fraction == (0.9 if tight else None)


def test_it_is_a_table_in_a_notebook():
    html = TRILLION._repr_html_()
    assert html.startswith("<table>") and html.count("<tr>") > 40
    assert "1,008,038,758,400" in html and "<th" in html
    assert "SC&#x27;21, on A100-80GB" in html and "SC'21" not in html


@pytest.mark.parametrize("zero", [2, -1, 4])
def test_an_unknown_sharding_is_an_error(zero):
    with pytest.raises(UserError) as error:
        make_plan(preset("gpt-1.7b"), zero=zero)
    names(error, f"zero={zero}", 0, 1, 3)


def test_a_target_without_the_type_is_an_error():
    run = preset("gpt-1.7b")
    half = dataclasses.replace(run, model=dataclasses.replace(run.model, compute_dtype="float16"))
    with pytest.raises(UserError) as error:
        make_plan(half, target="tpu-v5p")
    names(error, "tpu-v5p", "float16")


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".toml", ".json", ".TOML"])
def test_a_plan_comes_back_from_its_file(tmp_path, suffix):
    path = tmp_path / f"plan{suffix}"
    layout = Layout(pipe=2, tensor=2, stage_layers=(3, 5), recompute="selective", microbatch=2)
    data = DataConfig(path=("a b.txt",), tokenizer="bpe")
    run = RunConfig(
        model=ModelConfig(layers=8), layout=layout, data=data, out='runs/"odd\\name"\n\x7fé'
    )
    plan = make_plan(run, target="h100", scatter_gather=False)
    save_plan(plan, path)
    assert load_plan(path) == plan
    assert load_run(path) == run


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_plan_file_has_no_data_unless_the_run_names_some(suffix, tmp_path):
    path = tmp_path / f"plan{suffix}"

    def saved(run):
        save_plan(make_plan(run), path)
        text = path.read_text()
        return (tomllib.loads(text) if suffix == ".toml" else json.loads(text)).get("data")

    large = preset("gpt-1.7b")
    assert saved(large) is None
    assert saved(dataclasses.replace(large, data=DataConfig(tokenizer="bpe"))) is None
    corpus = DataConfig(path=("0.7", "a", "0.3", "b"), tokenizer="tokenizer.json")
    assert saved(dataclasses.replace(large, data=corpus))["tokenizer"] == "tokenizer.json"
    assert load_run(path).data == corpus
    assert saved(preset("miniature-bert"))["tokenizer"] == "wordpiece"


def test_the_config_beside_a_checkpoint_is_a_plan_file_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_dict(preset("miniature"))))
    assert load_run(tmp_path / "config.json") == preset("miniature")


def test_what_is_only_priced_is_not_trained(tmp_path):
    path = tmp_path / "plan.toml"
    save_plan(make_plan(preset("gpt-1.7b"), zero=3), path)
    assert load_plan(path).zero == 3 == load_run(path).layout.zero
    save_plan(make_plan(preset("gpt-1.7b"), zero=0), path)
    assert load_plan(path).zero == 0
    with pytest.raises(UserError) as error:
        load_run(path)
    names(error, "zero=0", "--zero 1")


@pytest.mark.parametrize(
    "name, text, values",
    [
        ("missing.toml", None, ["missing.toml", "No such file"]),
        ("plan.txt", "", [".toml", ".json"]),
        ("bad.toml", "steps = ", ["TOML"]),
        ("bad.json", "{", ["JSON"]),
        ("list.json", "[]", ["mtx plan PRESET --save FILE"]),
        ("plan.toml", "plan = 3", []),
        ("field.toml", "step = 3", ["'step'", "'steps'"]),
        ("value.toml", "steps = 0", ["steps=0", 1]),
        ("type.toml", "[model]\nhidden = 'x'", ["hidden='x'", "whole number"]),
        ("type2.toml", "eval_every = 1.5", ["eval_every=1.5", "whole number"]),
        ("type3.toml", "resume = 'no'", ["resume='no'", True, False]),
        ("type4.toml", "profile = [1]", ["profile=", "2 values", "whole number"]),
        ("type5.toml", "[layout]\nschedule = 3", ["schedule=3", "text"]),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, name, text, values):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as error:
        load_run(tmp_path / name)
    names(error, name, *values)


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "plan.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError) as error:
        load_run(tmp_path / "plan.toml")
    names(error, "plan.toml", "UTF-8")


def test_where_it_cannot_be_written(tmp_path):
    with pytest.raises(UserError) as error:
        save_plan(TRILLION, tmp_path / "no" / "plan.toml")
    names(error, "plan.toml", "No such file or directory")
    with pytest.raises(UserError) as error:
        save_plan(TRILLION, tmp_path / "plan.yaml")
    names(error, "plan.yaml", ".toml", ".json")


def test_plan_files_and_presets_are_told_apart():
    assert is_plan_file("best.toml") and is_plan_file("a/b.JSON")
    assert not any(is_plan_file(name) for name in NAMES)


LEAVES = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(
    st.characters(exclude_categories=["Cs"])
)  # fmt: skip
VALUES = LEAVES | st.lists(LEAVES, max_size=3)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
TABLES = st.recursive(
    st.dictionaries(KEYS, VALUES, max_size=4),
    lambda inner: st.dictionaries(KEYS, VALUES | inner, max_size=4),
    max_leaves=8,
)


@given(TABLES)
def test_what_is_written_as_toml_reads_back(values):
    assert tomllib.loads(to_toml(values)) == values
