"""`mtx certify`: cases of a run, comparisons, and the certificate."""

import json
import math
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mtx.certify import certificate
from mtx.certify import reference as reference_module
from mtx.certify.cases import cases_of, choices
from mtx.certify.certificate import Certificate, certify, reduced
from mtx.certify.channels import own_channels
from mtx.certify.compare import (
    ROUNDINGS,
    TOLERANCES,
    compare,
    differences,
    reference_of,
)
from mtx.certify.covered import not_covered, unseen
from mtx.certify.mutants import MUTANTS
from mtx.certify.reference import Reference, batches_of
from mtx.certify.said import config_hash, lines, numbers
from mtx.certify.small import LAYERS, small_model
from mtx.certify.step import Walked
from mtx.certify.ties import NEAR, watched_choices
from mtx.cli import main
from mtx.config import Layout
from mtx.layers import router
from mtx.presets import NAMES, preset
from mtx.schedules.makers import MAKERS
from mtx.sharding.axes import MESH

ROOT = Path(__file__).parents[1]


def cases(run, count, *, seed=0):
    return list(islice(cases_of(run, seed=seed, devices=8), count))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_shrunk_with_all_that_it_is_made_of(name):
    model = preset(name).model
    small = small_model(model)
    assert type(small) is type(model) and small.hidden == 32
    assert small.vocab % small.vocab_multiple  # rows of the table are padding
    kinds = model.stack().kinds.keys()
    assert any(small_model(model, layers=n).stack().kinds.keys() == kinds for n in LAYERS)
    for field in ("tied", "dropout", "attention_dropout"):
        assert getattr(small, field) == getattr(model, field)
    if getattr(model, "window", None):
        assert small.window < small.sequence
    if getattr(model, "kv_heads", None):
        assert small.groups == max(1, 8 * model.groups // model.heads) < small.heads or (
            model.groups == model.heads
        )


def test_the_runs_own_layout_is_the_first_case():
    run = preset("gpt-145b")
    run = replace(run, layout=replace(run.layout, weave="off"))
    first, *others = cases(run, 6, seed=4)
    layout = first.run.layout
    assert first.why == "the run's own" and not any(each.why for each in others)
    assert layout.sizes == dict.fromkeys(layout.sizes, 2) | {"context": 1, "expert": 1}
    for name in ("virtual", "idle", "recompute", "schedule", "microbatch"):
        assert getattr(layout, name) == getattr(run.layout, name)
    assert cases(run, 6, seed=4) == [first, *others]
    assert cases(run, 6, seed=5)[1:] != others


def test_what_devices_may_weave_is_compared_woven_as_well():
    run = preset("gpt-145b")
    assert run.layout.weave == "auto" and run.layout.weaves
    plain, woven, third = cases(run, 3, seed=4)
    assert plain.why == woven.why == "the run's own" and not third.why
    assert woven.run.layout == replace(plain.run.layout, weave="on") != plain.run.layout
    for changes in (dict(weave="off"), dict(weave="on"), dict(idle="skip")):
        layout = replace(run.layout, **changes)
        first, second = cases(replace(run, layout=layout), 2, seed=4)
        assert first.why and not second.why and first.run.layout.weave == layout.weave


def test_random_cases_share_experts_in_all_ways():
    runs = [each.run for each in cases(preset("mixtral-8x7b"), 40)]
    assert not [name for name in unseen(runs) if name.startswith("expert")]
    assert {run.layout.expert for run in runs} == {1, 2, 4, 8}
    ways = {(run.layout.expert_tensor, run.layout.expert_dispatch) for run in runs}
    assert len(ways) == 4


def test_random_cases_have_all_features_and_fit_the_devices():
    runs = [each.run for each in cases(preset("gpt-1.7b"), 150)]
    assert unseen(runs) == []
    assert all(1 < math.prod(run.layout.sizes.values()) <= 8 for run in runs)
    assert {run.layout.schedule for run in runs} == set(MAKERS)
    assert set(choices()) >= {"zero", "idle", "stash", "recompute", "weave", "zero_unit"}
    assert set(unseen([])) >= {axis.name for axis in MESH} | {"zero=3", "schedule=zb_v"}


def test_first_come_cases_that_chance_is_slow_to_draw():
    for seed in range(3):
        found = cases(preset("gpt-1.7b"), 14, seed=seed)
        first, *others = (each.run.layout for each in found if not each.why)
        assert first.tensor > 1 and not first.sequence_parallel
        assert any(layout.slices > 1 for layout in others)


@pytest.fixture(scope="module")
def own():
    """The first case of a run, compared."""
    (case,) = cases(preset("miniature"), 1)
    return compare(case)


def test_the_own_layout_gives_what_one_device_does(own):
    assert own.holds and own.said == ""
    assert set(own.differences) == set(TOLERANCES)
    assert all(0 < value <= TOLERANCES[name] for name, (value, _) in own.differences.items())


def test_a_difference_in_any_quantity_is_one(own):
    want = reference_of(own.case.run)
    assert all(value == 0 for value, _ in differences(want, want).values())

    def changed(tree):
        path, leaf = jax.tree.leaves_with_path(tree)[3]
        other = leaf.copy()
        other.flat[7] += 1e-2 * abs(leaf).max()
        return jax.tree.map(lambda a: other if a is leaf else a, tree), jax.tree_util.keystr(
            path, simple=True, separator="."
        )

    params, leaf = changed(want.params)
    assert differences(replace(want, params=params), want)["params"] == (
        pytest.approx(1e-2, rel=1e-4), leaf
    )  # fmt: skip
    gradients, leaf = changed(want.gradients)
    assert differences(replace(want, gradients=gradients), want)["gradients"][1] == leaf
    moments = want.moments | {"nu": changed(want.moments["nu"])[0]}
    assert differences(replace(want, moments=moments), want)["moments"][0] > 1e-3
    losses = {"loss": [*want.losses["loss"][:-1], math.nan]}
    found = replace(own, differences=differences(replace(want, losses=losses), want))
    assert found.beyond == ["loss"] and not found.holds
    added, off = ({"aux": [share] * 5} | want.losses for share in (0.2, 0.2 + 1e-4))
    value, name = differences(replace(want, losses=off), replace(want, losses=added))["loss"]
    assert name == "aux" and 1e-6 < value < 1e-4


def test_what_rounding_does_to_one_device_decides_nothing(own, monkeypatch):
    """It is measured if a difference is beyond its tolerance; in most models it is far less."""
    assert own.rounding == {}
    monkeypatch.setitem(TOLERANCES, "moments", 1e-12)
    found = compare(own.case)
    assert set(found.rounding) == set(TOLERANCES)
    assert 0 < max(found.rounding.values()) < 5e-6
    value, leaf = found.differences["moments"]
    close = replace(found, rounding={"moments": value})
    assert close.undecided and not (close.holds or close.differs)
    walked = Walked(devices=8)
    made = Certificate(run=own.case.run, seed=3, devices=8, compared=[close], walked=walked)
    text = "\n".join(lines(made, width=100))
    assert made.holds and "undecided" in text and "tensor" in not_covered(made)[0]
    assert "tensor" not in not_covered(replace(made, compared=[own]))[0]
    far = replace(found, rounding={"moments": value / (1.01 * ROUNDINGS)})
    assert far.differs and far.beyond == ["moments"] and leaf in far.said
    rounding = numbers(replace(made, compared=[far]))["cases"][0]["rounding"]
    assert rounding == far.rounding


def test_a_certificate_says_what_was_compared_and_what_was_not(own, capsys):
    run = preset("miniature")
    made = Certificate(run=run, seed=3, devices=8, compared=[own], walked=Walked(devices=8))
    for width in (80, 140):
        text = lines(made, width=width)
        assert max(map(len, text)) <= width
    said = "\n".join(text)
    for words in ("no difference", "seed 3", "not covered", config_hash(run), jax.__version__):
        assert words in said
    assert "schedule=zb_v" in said and made.failure is None
    found = json.loads(json.dumps(numbers(made)))
    assert found["holds"] and found["cases"][0]["differences"]["loss"]["largest"] <= 1e-6
    assert config_hash(run) == config_hash(replace(run, out="elsewhere"))
    assert config_hash(run) != config_hash(replace(run, seed=1))


def test_a_failure_is_reduced_to_the_axis_that_it_needs():
    """Gradients of parameters that `tensor` replicates are not summed: no other axis is needed."""
    (mutant,) = [each for each in MUTANTS if each.name == "replicated, not summed"]
    layout = Layout(data=2, pipe=2, tensor=2, schedule="gpipe", recompute="full", idle="phases")
    (case,) = cases(preset("miniature"), 1)
    case = replace(case, run=replace(case.run, layout=layout))

    def walked_alone(case):  # runs show the same, but take a hundred times as long
        return replace(certificate.Compared(case=case), findings=walk_run(case.run).findings)

    from mtx.certify.step import walk_run

    reference_of(case.run)
    with mutant.change(), mock.patch.object(certificate, "compare", walked_alone):
        smallest = reduced(walked_alone(case))
    sizes = smallest.case.run.layout.sizes
    assert {axis for axis, size in sizes.items() if size > 1} == {"tensor"}
    assert smallest.case.said == "tensor=2"
    made = Certificate(
        run=case.run, seed=0, devices=8, compared=[walked_alone(case), smallest],
        walked=Walked(devices=8), smallest=smallest,
    )  # fmt: skip
    assert made.compared[0].holds  # the mistake is gone
    assert not made.holds and "tensor=2" in (made.failure or "")
    assert lines(made, width=80)[-1] == made.failure


def test_a_case_that_raises_fails_and_one_that_would_hang_does_not_run():
    (hangs,) = [each for each in MUTANTS if each.name == "branch of one stage"]
    (case,) = cases(preset("miniature"), 1)
    with hangs.change():
        found = compare(case)
    assert found.findings and not found.differences and not found.holds
    with mock.patch("mtx.certify.compare.batches_of", side_effect=ValueError("no batch")):
        found = compare(case)
    assert found.error == "ValueError: no batch" and not found.holds


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = ["certify", "llama-3-405b", "--cases", "1", "--model.tied", "--out", "found.json"]
    assert main(line) == 0
    out = capsys.readouterr().out
    assert "16,384" in out and "nothing found" in out and "the run's own" in out
    found = json.loads(Path("found.json").read_text())
    assert found["holds"] and found["cases"][0]["model"]["tied"]
    for mistake, words in (
        (["--layout.tensor", "7"], "tensor=7"), (["--out", "no/folder"], "no/folder"),
        (["--devices", "1"], "devices=1"),
    ):  # fmt: skip
        assert main(["certify", *mistake]) == 2
        assert words in capsys.readouterr().err
    (mutant,) = [each for each in MUTANTS if each.name == "no sum"] or [MUTANTS[1]]
    with mutant.change():
        assert main(["certify", "--cases", "0", "--json"]) == 1
    assert "unsummed" in json.loads(capsys.readouterr().out)["failure"]


def test_each_collective_has_a_channel_of_its_own():
    """On a shared channel, XLA's CPU runtime takes devices in different collectives to be in the
    same: that ended `mtx certify miniature --seed 61` in case 15, and, of the same shapes, that of
    granite-4-small in case 13."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    both = jax.shard_map(
        lambda a: jax.lax.psum(jax.lax.all_gather(a, "x") + jax.lax.all_gather(2 * a, "x"), "x"),
        mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False,
    )  # fmt: skip

    def channels():
        text = jax.jit(lambda a: both(a)).lower(np.zeros(2)).as_text()
        return re.findall(r"channel_handle<handle = (\d+)", text)

    with own_channels():
        assert len(set(channels())) == len(channels()) == 3
    assert len(set(channels())) == 1  # JAX's default: if that changes, own_channels can go


ABORTS = """
import os
from mtx.certify import certificate
from mtx.cli import main
certificate.walk_all = lambda run: None
certificate.compare = lambda case: os.abort()
main(["certify", "--cases", "2"])
"""


def test_a_case_in_which_the_runtime_ends_the_process_is_named():
    done = subprocess.run(
        [sys.executable, "-c", ABORTS], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "case 1 (" in done.stderr.splitlines()[-1] and "pipe=2" in done.stderr


def test_what_the_step_refuses_is_no_case(monkeypatch, own):
    refused = replace(own, refused=True, error="cannot be")
    each = iter([own, refused, own])
    monkeypatch.setattr(certificate, "compare", lambda case: replace(next(each), case=case))
    made = certify(preset("miniature"), cases=2, seed=0, devices=8)
    assert [each.case.number for each in made.compared] == [1, 3] and made.holds


def test_certifying_compares_as_many_cases_as_asked(monkeypatch, own):
    monkeypatch.setattr(certificate, "compare", lambda case: replace(own, case=case))
    seen = []
    made = certify(
        preset("miniature"), cases=3, seed=0, devices=8, report=lambda *a: seen.append(a)
    )
    assert len(made.compared) == 3 and made.holds and made.smallest is None
    assert seen[0][:2] == (0, 3) and seen[-1][0] == 2


def test_choices_that_rounding_decides_are_found():
    scores = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    scores[2] = [0.5, 9, 0.4, 8, 0.3, 7, 7 * (1 + NEAR / 2), 0.2]
    config = router.Router(experts=8, choices=3)

    def found(config, scores):
        with watched_choices() as ties:
            jax.jit(lambda scores: router.choose(scores, None, config))(scores)
            jax.effects_barrier()
        return ties

    assert found(config, scores) == [1]
    four = replace(config, choices=4)
    assert found(four, scores) == [0]  # both are chosen
    assert found(replace(four, capacity=1.0), scores) == [1]  # and it matters which is first
    scores[2, 6] = 7 * (1 + 4 * NEAR)
    assert found(config, scores) == [0]


def test_other_batches_are_drawn_where_there_are_ties(own):
    reference, drawn = Reference(run=own.case.run), []

    def trained(draw):
        drawn.append(draw)
        ties.append(draw < 2)
        return replace(reference_of(own.case.run), draw=draw)

    ties = []
    with mock.patch.object(reference_module, "watched_choices", lambda: nullcontext(ties)):
        with mock.patch.object(Reference, "_trained", lambda self, draw: trained(draw)):
            assert reference.train().draw == 2 and drawn == [0, 1, 2]
    first, other = (batches_of(own.case.run, draw)[0]["tokens"] for draw in (0, 1))
    assert (first != other).any()


A_FURTHER_AXIS = """
from itertools import islice
from dataclasses import dataclass, replace
import mtx.sharding.axes as axes

axes.MESH = (*axes.MESH[:1], axes.Axis("replica", "batch"), *axes.MESH[1:])
axes.AXES = tuple(axis.name for axis in axes.MESH)
axes.BATCH = axes.axes_that_split("batch")
axes.TOKENS = axes.axes_that_split("batch", "sequence")

import mtx
from mtx.config import Layout
from mtx.layers import router
from mtx.certify.cases import cases_of
from mtx.certify.compare import compare
from mtx.certify.step import walk_all
from mtx.presets import preset


@dataclass(frozen=True, kw_only=True)
class Wider(Layout):
    replica: int = 1


Layout.replica = 1
mtx.use_virtual_devices(8)
run = preset("miniature")
run = replace(run, layout=Wider(replica=2, data=2, tensor=2, zero=3, zero_unit="layer"))
walked = walk_all(run)
assert walked.devices == 8 and not walked.findings, walked.findings
cases = cases_of(run, seed=0, devices=8)
own = next(cases)
assert any(case.run.layout.replica > 1 for case in islice(cases, 40))
found = compare(own)
assert own.run.layout.sizes == {
    "pipe": 1, "replica": 2, "data": 2, "expert": 1, "context": 1, "tensor": 2
}
assert found.holds, found.said
print("the same")
"""


def test_a_further_axis_comes_for_free():
    done = subprocess.run(
        [sys.executable, "-c", A_FURTHER_AXIS], cwd=ROOT, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.stdout.split("\n")[-2:] == ["the same", ""], done.stderr[-2000:]
