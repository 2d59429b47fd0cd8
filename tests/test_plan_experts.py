"""Experts in plans: the cost of an uneven load, and layouts that a search finds."""

import functools
import itertools
import json
from dataclasses import fields, replace

import pytest
from errors import names

from mtx.cli import main
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.costs import ask, cost
from mtx.costs.ask import layer_cost
from mtx.costs.cost import ExpertShards
from mtx.costs.trace import trace
from mtx.errors import UserError
from mtx.plan.candidates import Fixed, divisors
from mtx.plan.hardware import hardware
from mtx.plan.memory import predict_memory
from mtx.plan.plan import load_plan, make_plan, save_plan
from mtx.plan.search import search
from mtx.plan.summary import plan_rows
from mtx.plan.time import StepTime, later_rounds, predict_step, stage_times
from mtx.presets import preset

H100 = replace(hardware("h100"), node_devices=2)
E, K, D, F, S, B = 8, 2, 512, 256, 256, 2
MODEL = ModelConfig(
    family="mixtral", layers=6, hidden=D, heads=4, kv_heads=4, ffn=F, sequence=S, vocab=1024,
    experts=E, choices=K, tied=False,
)  # fmt: skip
GPT_OSS = ModelConfig(
    family="gpt_oss", layers=2, hidden=64, heads=4, kv_heads=2, ffn=32, sequence=32, vocab=128,
    experts=8, choices=2,
)  # fmt: skip
LAYOUT = Layout(data=2, expert=2, tensor=2, pipe=2, virtual=3, microbatch=B, idle="phases")
ROOM, LATER = 80, 20  # 1.2 times the even share, 64 tokens per sequence, in eights; a quarter of it


def step(imbalance: float, **changes) -> StepTime:
    layout = replace(LAYOUT, **changes)
    return predict_step(MODEL, layout, 32, H100, expert_imbalance=imbalance)


def test_a_round_is_the_closed_form():
    """F runs a later round like the first; B and W recompute what they need of it, except y."""
    found = layer_cost(
        MODEL, kind="block", tensor=2, sequence_parallel=True, kernel="cudnn",
        experts=ExpertShards.of(LAYOUT, MODEL),
    )  # fmt: skip
    slots, item = B * E * LATER, 2
    up, down = 2.0 * slots * D * 2 * F / 2, 2.0 * slots * D * F / 2  # half of each expert
    flops = {"F": up + down, "B": up + down + up, "W": up + down + up + down}
    sent = {"F": ("x", "gate", "x"), "B": ("x", "gate", "x", "x", "gate"), "W": ("x", "gate", "x")}
    sizes = {"x": slots * D * item, "gate": slots * 4}
    for during in "FBW":
        products = [each for each in found.later.matmuls if each.during == during]
        assert sum(each.flops(B) for each in products) == flops[during]
        bytes_ = sorted(c.bytes.at(B) for c in found.later.collectives if c.during == during)
        assert bytes_ == sorted(sizes[name] for name in sent[during])
        assert all(c.kind == "all_to_all" for c in found.later.collectives)


def test_more_choices_than_int32_counts_are_counted():
    """Traces have 16,381 rows: with these sequences and choices that makes 2 ** 34 choices."""
    long = replace(MODEL, sequence=2**17, choices=8)
    experts = ExpertShards.of(LAYOUT, long)
    found = layer_cost(
        long, kind="block", tensor=2, sequence_parallel=True, kernel="cudnn", experts=experts
    )  # fmt: skip
    assert not [each for each in found.later.matmuls if each.flops(B) <= 0]
    with pytest.raises(UserError) as error:
        replace(MODEL, experts=128, choices=65)
    names(error, "choices=65", 64)


@pytest.mark.parametrize("weave", ["off", "on"])
def test_an_uneven_load_costs_as_many_rounds_as_the_fullest_expert_needs(weave):
    even = predict_step(MODEL, replace(LAYOUT, weave=weave), 32, H100)
    assert step(1.0, weave=weave) == step(ROOM / 64, weave=weave) == even
    times = {}
    for imbalance, rounds in ((1.26, 1), (100 / 64, 1), (1.6, 2), (2.0, 3), (4.0, 9)):
        layout = replace(LAYOUT, weave=weave)
        assert later_rounds(MODEL, layout, H100, expert_imbalance=imbalance) == rounds
        times[rounds] = step(imbalance, weave=weave)
        for part in ("matmul_s", "elementwise_s", "expert_comm_s"):
            more, of_one = (
                getattr(times[n], part) - getattr(even, part) for n in (rounds, 1)
            )  # fmt: skip
            assert more == pytest.approx(rounds * of_one) and more > 0
    same = {
        each.name for each in fields(StepTime) if each.name.startswith(("atten", "data", "opt"))
    }
    assert all(getattr(times[9], name) == getattr(even, name) for name in same)
    assert even.step_s < times[1].step_s < times[2].step_s < times[9].step_s
    if weave == "on":  # nothing overlaps with a loop
        plain, woven = (
            step(2.0, weave=way).expert_comm_s - step(1.0, weave=way).expert_comm_s
            for way in ("off", "on")
        )
        assert woven == pytest.approx(plain)


@pytest.mark.parametrize(
    "model, tensor, split, recompute, numbers",
    [
        (replace(MODEL, experts=16), 1, True, "full", (2, 8, 16)),
        (replace(MODEL, experts=24, capacity=1.25), 2, False, "selective", (3, 4, 12)),
        (GPT_OSS, 2, True, "none", (2, 4, 8)),
    ],
)
def test_costs_with_two_numbers_of_shards_say_those_with_others(
    model, tensor, split, recompute, numbers, tmp_path, monkeypatch
):
    """Whichever are asked for first; and reading the cache traces nothing."""
    asked = dict(tensor=tensor, sequence_parallel=tensor > 1, recompute=recompute, kernel="cudnn")
    kind, trace_once, traced = model.stack().pattern[0], functools.cache(trace), []

    def traced_here(question):
        if question.experts:
            traced.append(question.experts.expert)
        return trace_once(question)

    def shards(number):
        return ExpertShards(number, split, "alltoall", 1.2)

    def costs(numbers):
        ask._over_shards.cache_clear()
        return {n: layer_cost(model, kind=kind, experts=shards(n), **asked) for n in numbers}

    questions = {
        n: cost.Question(model=model, part=kind, experts=shards(n), **asked) for n in numbers
    }
    direct = {number: trace_once(question) for number, question in questions.items()}
    monkeypatch.setattr(ask, "_traced", traced_here)
    for first in numbers:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(first)))
        others = [number for number in numbers if number != first]
        for order in ([first, *others], [*others, first]):
            assert costs(order) == direct
        assert traced == [first, others[0]]
        traced.clear()


def test_more_room_is_fewer_rounds():
    roomy = replace(LAYOUT, expert_room=2.0)
    assert later_rounds(MODEL, roomy, H100, expert_imbalance=2.0) == 0
    assert step(2.0, expert_room=2.0).step_s < step(2.0).step_s
    assert step(1.0, expert_room=2.0).step_s > step(1.0).step_s


def test_uneven_chunks_of_woven_ticks_have_the_gradients_of_experts_twice():
    """Qwen3 235B, compiled for H100s by jax 0.12: 81.2 GiB woven, 67.3 plain; with 96 layers, which
    are even, 66.9 woven."""

    def gib(**changes):
        run = preset("qwen3-235b-a22b")
        layout = replace(run.layout, **changes)
        return predict_memory(run.model, layout, run.global_batch).total_bytes / 2**30

    assert gib(weave="on") == pytest.approx(81.2, rel=0.02)
    assert gib(weave="off") == pytest.approx(67.3, rel=0.02)


def test_loads_that_cannot_be():
    run = RunConfig(model=MODEL, layout=LAYOUT, global_batch=32)
    for imbalance in (0.9, 4.1):
        with pytest.raises(UserError) as error:
            make_plan(run, expert_imbalance=imbalance)
        names(error, f"expert_imbalance={imbalance}", "experts/choices=4")
    with pytest.raises(UserError) as error:
        make_plan(RunConfig(), expert_imbalance=1.3)
    names(error, "expert_imbalance=1.3", "gpt")


def test_what_a_user_types(tmp_path, capsys):
    run = RunConfig(model=MODEL, layout=LAYOUT, global_batch=32)
    save_plan(make_plan(run, target="h100", expert_imbalance=1.6), tmp_path / "run.toml")
    assert load_plan(tmp_path / "run.toml").expert_imbalance == 1.6
    assert main(["plan", str(tmp_path / "run.toml"), "--expert-imbalance", "2", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["expert_imbalance"], numbers["expert_later_rounds"]) == (2, 3)
    rows = {row.name: row.value for row in plan_rows(load_plan(tmp_path / "run.toml"))}
    said = "1.6 times the mean; room for 1.2; 2 more rounds"
    assert rows["tokens of the fullest expert"] == said


def test_each_stage_hides_its_own_collectives():
    """A stage of dense layers has no all-to-all to hide, and does not gain from those of others;
    all stages hide the sends of embedding and head."""
    deepseek = preset("deepseek-v3")
    times = {
        weave: stage_times(deepseek.model, replace(deepseek.layout, weave=weave), H100)[0]
        for weave in ("off", "on")
    }
    dense, mixtures, *_ = (
        [woven / plain for plain, woven in zip(*stages)] for stages in zip(*times.values())
    )
    assert all(0 < share <= 1 for share in (*dense, *mixtures[:2]))
    assert min(dense) > 0.8 and max(mixtures[:2]) < 0.6


def test_a_search_finds_the_best_shards_of_experts():
    """Plain enumeration finds nothing better; six layers on four stages are balanced."""
    fixed = Fixed(
        schedule="1f1b", microbatch=1, recompute="full", sequence_parallel=True, zero=1,
        weave="off", virtual=1,
    )  # fmt: skip
    best: dict[tuple[int, ...], float] = {}
    for data, pipe, expert, tensor in itertools.product(divisors(8), repeat=4):
        if data * pipe * expert * tensor != 8 or tensor > H100.node_devices:
            continue
        for split in (True, False) if tensor > 1 else (True,):
            layout = Layout(
                data=data, pipe=pipe, expert=expert, tensor=tensor, expert_tensor=split,
                idle="phases", recompute="full", stage_layers="balanced",
            )  # fmt: skip
            try:
                layout.check(MODEL)
                time = predict_step(MODEL, layout, 32, H100)
            except UserError:
                continue
            mesh = data, pipe, expert, tensor
            best[mesh] = min(best.get(mesh, float("inf")), time.step_s)
            assert predict_memory(MODEL, layout, 32).total_bytes < 0.9 * H100.memory_bytes
    found = search(MODEL, gpus=8, global_batch=32, hardware=H100, fixed=fixed, top=100)
    assert found.best.time.step_s == pytest.approx(min(best.values()))
    axes = ("data", "pipe", "expert", "tensor")
    assert {tuple(getattr(one.layout, axis) for axis in axes) for one in found.ranked} == {*best}
    assert any(one.layout.stage_layers == "balanced" for one in found.ranked)
