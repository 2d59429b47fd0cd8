"""Wrong numbers are found and named, and the run rolls back."""

import dataclasses
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import names
from parameters import params_of
from rich.console import Console

import mtx
from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import GuardConfig, Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.data import Corpus
from mtx.errors import UserError
from mtx.launch.exits import Exit
from mtx.launch.startup import StartUp
from mtx.train.audit import Audit
from mtx.train.goodput import measure_goodput, read_log
from mtx.train.guard import Guard, RollBack, refuse_to_roll_back
from mtx.train.history import MOST_STEPS, History
from mtx.train.loop import run_training
from mtx.train.programs import Programs

pytestmark = pytest.mark.usefixtures("kept_programs")

MODEL = ModelConfig(
    layers=2, hidden=32, heads=4, sequence=16, vocab=96, compute_dtype="float32", vocab_multiple=8
)
NOTHING = np.float32(0)


def trainer_of(layout, **guard):
    return mtx.Trainer(
        RunConfig(model=MODEL, layout=layout, global_batch=8, guard=GuardConfig(**guard))
    )


def flip_bit(state, leaf, device, bit=9):
    """The state, with one bit of this leaf of the masters flipped on one device only."""
    leaves, structure = jax.tree.flatten(state.params)
    shards = [np.array(shard.data) for shard in leaves[leaf].addressable_shards]
    devices = [shard.device for shard in leaves[leaf].addressable_shards]
    shards[device].view(np.uint32).reshape(-1)[3] ^= np.uint32(1 << bit)
    leaves[leaf] = jax.make_array_from_single_device_arrays(
        leaves[leaf].shape, leaves[leaf].sharding, list(map(jax.device_put, shards, devices))
    )
    return state._replace(params=structure.unflatten(leaves))


def leaf_of(trainer, name):
    paths = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree.leaves_with_path(trainer.states.param_specs)
    ]
    return paths.index(name)


copied = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
LAYOUT = Layout(data=2, pipe=2, tensor=2)


@pytest.fixture(scope="module")
def checked():
    trainer = trainer_of(LAYOUT, checksums=True)
    return trainer, trainer.place(reference.random_batch(MODEL, 8))


def test_a_bit_that_flips_between_two_steps_is_found_on_its_device(checked):
    trainer, batch = checked
    state = trainer.state_from(params_of(MODEL))
    for _ in range(2):
        state, metrics = trainer.train_step(state, batch)
        assert not np.any(metrics.corrupt)
    for leaf, device in ((0, 5), (3, 2)):
        damaged = flip_bit(copied(state), leaf, device)
        _, metrics = trainer.train_step(damaged, batch)
        want = np.zeros(tuple(LAYOUT.sizes.values()))
        want.reshape(-1)[device] = 1
        np.testing.assert_array_equal(metrics.corrupt, want)
    with pytest.raises(RollBack) as error:
        Guard(GuardConfig()).check(3, 1.0, np.asarray(metrics.corrupt))
    names(error, "pipe 0", "data 1", "tensor 0")


def test_checksums_change_no_value(checked):
    trainer, batch = checked
    plain = trainer_of(LAYOUT)
    _, want = plain.train_step(plain.state_from(params_of(MODEL)), batch)
    _, got = trainer.train_step(trainer.state_from(params_of(MODEL)), batch)
    assert not np.any(got.corrupt)
    assert float(got.loss) == float(want.loss)
    assert float(got.gradient_norm) == float(want.gradient_norm)


@pytest.mark.parametrize(
    ("layout", "leaf", "device", "words"),
    [  # positions are held by every stage and tensor shard, half of them by each replica
        (Layout(data=2, pipe=2, tensor=2), "['embed']['positions']", 6, "pipe 1 data 1 tensor 0"),
        (Layout(tensor=4), "['layers']['block']['mlp_norm']['scale']", 2, "pipe 0 data 0 tensor 2"),
    ],
)
def test_copies_that_differ_are_named(layout, leaf, device, words):
    trainer = trainer_of(layout)
    audit, state = Audit(trainer), trainer.state_from(params_of(MODEL))
    assert audit.differences(state) == []
    lines = audit.differences(flip_bit(state, leaf_of(trainer, leaf), device))
    assert f"['params']{leaf} differs on {words}" in lines
    with pytest.raises(RollBack) as fault:
        Guard(GuardConfig()).compare(7, lines)
    names(fault, "differs")
    assert not fault.value.skip


def test_gradients_that_stay_infinite_end_the_run():
    guard = Guard(GuardConfig(most_skipped=3))
    for step, finite in enumerate([False, False, True, False, False]):
        guard.check(step, 9.0, NOTHING, finite=finite)
    assert guard.skipped == 2
    with pytest.raises(UserError) as error:
        guard.check(5, 9.0, NOTHING, finite=False)
    names(error, "step 5", "3")


def test_a_run_that_only_skips_steps_keeps_its_sound_checkpoints(tmp_path, monkeypatch):
    batch = Corpus.batch

    def poisoned(self, after, rows, local=None):
        made = batch(self, after, rows, local)
        if after >= 5 * rows:
            made["weights"][:] = np.inf
        return made

    monkeypatch.setattr(Corpus, "batch", poisoned)
    run = run_of(tmp_path, guard=GuardConfig(most_skipped=10))
    run = dataclasses.replace(run, steps=40, save_every=1)
    with pytest.raises(UserError) as error:
        run_training(run, console=Console(quiet=True))
    names(error, "step 15", "10")
    assert Checkpoints(tmp_path).steps() == [4, 5]


def test_a_spike_goes_back_and_skips():
    guard = Guard(GuardConfig(spike_nats=0.5, spike_window=20))
    guard.check(1, 9.0, NOTHING)  # the first losses fall from far above: none counts as high
    for step in range(2, 30):
        guard.check(step, 3.0 + 0.3 * (step % 2), NOTHING)
    guard.check(30, float("nan"), NOTHING)  # the step has skipped it
    with pytest.raises(RollBack) as fault:
        guard.check(31, 3.7, NOTHING)
    names(fault, "3.700", "0.5", "3")
    assert fault.value.skip
    error = refuse_to_roll_back(fault.value, GuardConfig(spike_nats=0.5, rollbacks=2))
    assert isinstance(error, UserError)
    assert "guard.rollbacks=2" in str(error)


def test_bad_data_that_last_never_become_usual():
    """Neither if the loss climbs in steps too small for a spike, nor across a restart."""
    config = GuardConfig(spike_nats=1.0, spike_window=20)
    guard = Guard(config)
    assert guard.usual == np.inf
    noise = np.random.default_rng(0).normal(0, 0.05, 400)
    for step in range(100):
        guard.check(step, 3.0 + noise[step], NOTHING)
    for step in range(100, 200):
        guard.check(step, 3.8 + noise[step], NOTHING)
    assert guard.usual == pytest.approx(3.0, abs=0.05)
    with pytest.raises(RollBack) as error:
        guard.check(200, 4.5, NOTHING)
    names(error, "4.500", "1.0", "3.0")
    guard.start_from(150)
    assert guard.usual == pytest.approx(3.0, abs=0.05)
    again = Guard(config)
    again.start_from(150, guard.usual)
    with pytest.raises(RollBack) as error:
        again.check(151, 4.5, NOTHING)
    names(error, "50")
    guard.start_from(10)  # before all of that
    for step in range(11, 100):
        guard.check(step, 3.5 + noise[step], NOTHING)


def test_what_was_usual_goes_with_the_checkpoint_as_long_as_the_data_stay(tmp_path, monkeypatch):
    batch = Corpus.batch

    def poisoned(self, after, rows, local=None):
        made = batch(self, after, rows, local)
        if after >= 12 * rows:
            made["targets"][:] = 255
        return made

    monkeypatch.setattr("mtx.train.guard._LEAST_WINDOW", 5)
    guard = GuardConfig(spike_nats=0.5, spike_window=5, rollbacks=0)
    run = run_of(tmp_path, guard=guard)
    run_training(run, console=Console(quiet=True))
    monkeypatch.setattr(Corpus, "batch", poisoned)
    longer = dataclasses.replace(run, steps=14)
    with pytest.raises(UserError) as error:
        run_training(longer, console=Console(quiet=True))
    names(error, "step 13", "5")
    other = dataclasses.replace(longer, data=dataclasses.replace(run.data, seed=1))
    assert run_training(other, console=Console(quiet=True)).rollbacks == 0


def test_memory_of_steps_does_not_grow_with_them():
    history = History()
    for step in range(3 * MOST_STEPS):
        history.add(step, float(step), finite=step % 10 > 0)
        history.evaluated(step, float(step))
    assert (len(history.losses), history.skipped) == (MOST_STEPS, 3 * MOST_STEPS // 10)
    assert (history.first_evaluation[0], history.last_evaluation[0]) == (0, 3 * MOST_STEPS - 1)
    history.start_from(3 * MOST_STEPS - 101)
    assert history.losses[-1] == 3 * MOST_STEPS - 101
    assert history.skipped == 3 * MOST_STEPS // 10 - 10


def test_without_a_threshold_no_loss_is_a_spike():
    guard = Guard(GuardConfig())
    for step, loss in enumerate([1.0] * 60 + [1e6]):
        guard.check(step, loss, NOTHING)
    with pytest.raises(UserError) as error:
        GuardConfig(spike_nats=-1)
    names(error, "spike_nats=-1")
    assert dataclasses.asdict(RunConfig())["guard"]["compare_every"] == 200


def run_of(out, **changes):
    return RunConfig(
        model=dataclasses.replace(MODEL, vocab=256), global_batch=8, steps=12, out=str(out),
        eval_every=0, eval_batches=1, save_every=4,
        optimizer=OptimizerConfig(lr=1e-2, rate="constant"), **changes,
    )  # fmt: skip


def records_of(out, kind):
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture
def spike(monkeypatch):
    """The batch after seven steps has a single target token: its loss is far from the usual."""
    batch = Corpus.batch

    def poisoned(self, after, rows, local=None):
        made = batch(self, after, rows, local)
        if after == 7 * rows:
            made["targets"][:] = 255
        return made

    monkeypatch.setattr(Corpus, "batch", poisoned)


def test_a_run_goes_back_from_a_spike_and_past_its_batches(tmp_path, spike, monkeypatch):
    compiled, held, before = [], [], jax.live_arrays()
    compile, restore = Programs.compile, Checkpoints.restore

    def compile_counted(self, *args, **kwargs):
        compiled.append(self)
        compile(self, *args, **kwargs)

    def restore_watched(self, *args):
        old = set(map(id, before))
        held.extend(a for a in jax.live_arrays() if a.nbytes > 1000 and id(a) not in old)
        return restore(self, *args)

    monkeypatch.setattr(Programs, "compile", compile_counted)
    monkeypatch.setattr(Checkpoints, "restore", restore_watched)
    run = run_of(tmp_path, guard=GuardConfig(spike_nats=0.5, spike_window=5))
    summary = run_training(run, console=Console(quiet=True), startup=StartUp("launch", ago_s=100))
    assert summary.rollbacks == 1 and len(compiled) == 1
    assert not held  # the abandoned state has been freed by then
    (event,) = records_of(tmp_path, "rollback")
    assert event["what"].startswith("step 8: the loss is ")
    assert event["step"] == 4  # the checkpoint
    steps = [record["step"] for record in records_of(tmp_path, "step")]
    assert steps == [*range(1, 9), *range(5, 13)]
    assert records_of(tmp_path, "end")[0]["rollbacks"] == 1
    assert Checkpoints(tmp_path).extra()["consumed"] == (12 + 4) * 8  # four batches are skipped
    goodput = measure_goodput(read_log(tmp_path / "log.jsonl"))
    assert (goodput.sessions, goodput.lost_steps, goodput.clock_jumps) == (2, 4, 0)
    assert 100 < goodput.parts["start"] < 150  # there was one launch


def test_a_run_that_was_asked_to_stop_does_not_go_back(tmp_path, spike):
    def ask(record):
        if record.step == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    run = run_of(tmp_path, guard=GuardConfig(spike_nats=0.5, spike_window=5))
    with pytest.raises(SystemExit) as left:
        run_training(run, console=Console(quiet=True), on_step=ask)
    assert left.value.code == Exit.PREEMPTED
    assert len(records_of(tmp_path, "start")) == 1
    assert Checkpoints(tmp_path).steps() == [4]
    summary = run_training(run, console=Console(quiet=True))  # continues from there
    assert not summary.interrupted
    assert [record["step"] for record in records_of(tmp_path, "start")] == [0, 4]


def test_nor_where_replicas_are_found_apart_before_the_last_save(
    tmp_path, monkeypatch, usual_interrupt
):
    def ask(record):
        if record.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Audit, "differences", lambda self, state: ["['params'] differs"])
    with pytest.raises(KeyboardInterrupt):
        run_training(run_of(tmp_path), console=Console(quiet=True), on_step=ask)
    assert len(records_of(tmp_path, "start")) == 1 and not Checkpoints(tmp_path).steps()


def test_a_run_goes_back_though_its_last_save_has_failed(tmp_path, monkeypatch, spike, full_disk):
    """The failure is noticed only when the run rolls back."""
    full_disk(2)
    monkeypatch.setattr(Checkpoints, "poll", lambda self: None)
    run = run_of(tmp_path, guard=GuardConfig(spike_nats=0.5, spike_window=5))
    run = dataclasses.replace(run, save_every=3)
    summary = run_training(run, console=Console(quiet=True))
    assert summary.rollbacks == 1
    assert [failed["step"] for failed in records_of(tmp_path, "save_failed")] == [6]
    (event,) = records_of(tmp_path, "rollback")
    assert event["step"] == 3
    steps = [record["step"] for record in records_of(tmp_path, "step")]
    assert steps == [*range(1, 9), *range(4, 13)]
    records = records_of(tmp_path, "step")
    losses = [record["loss"] for record in records]
    assert summary.losses == losses[:3] + losses[8:]  # those that led to the state, once each
    assert summary.first_eval_loss == records_of(tmp_path, "eval")[0]["loss"]
    assert summary.seconds.train >= 0.999 * sum(record["step_s"] for record in records)


def test_a_checkpoint_that_leads_to_two_spikes_is_left_for_the_one_before_it(tmp_path, monkeypatch):
    """Every batch after the tenth step is bad, until the run has rolled back before its eighth."""
    batch = Corpus.batch

    def poisoned(self, after, rows, local=None):
        made = batch(self, after, rows, local)
        if after >= 9 * rows and len(records_of(tmp_path, "start")) < 3:
            made["targets"][:] = 255
        return made

    monkeypatch.setattr(Corpus, "batch", poisoned)
    run = run_of(tmp_path, guard=GuardConfig(spike_nats=0.5, spike_window=1))
    summary = run_training(run, console=Console(quiet=True))
    assert summary.rollbacks == 2
    went_back = [event["what"] for event in records_of(tmp_path, "rollback")]
    assert len(went_back) == 2 and "has led" not in went_back[0]
    assert went_back[1].endswith("8 has led to two spikes; it is now named 8.aside")
    starts = [record["step"] for record in records_of(tmp_path, "start")]
    assert starts == [0, 8, 4]
    assert Checkpoints(tmp_path).steps() == [4, 8, 12][-2:]


def test_what_came_apart_is_never_saved(tmp_path, monkeypatch):
    """The difference is found at a save that is due before the next comparison."""
    found = iter([[], ["['params'] differs on pipe 0 data 0 tensor 1"], *[[]] * 9])
    monkeypatch.setattr(Audit, "differences", lambda self, state: next(found))
    run = run_of(tmp_path, guard=GuardConfig(compare_every=100))
    assert run_training(run, console=Console(quiet=True)).rollbacks == 1
    (event,) = records_of(tmp_path, "rollback")
    assert event["what"].startswith("step 8: ") and event["step"] == 4
    assert [record["step"] for record in records_of(tmp_path, "save")] == [4, 8, 12]


def test_a_run_that_goes_back_too_often_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(
        Audit, "differences", lambda self, state: ["['params'] differs on pipe 0 data 0 tensor 1"]
    )
    run = run_of(tmp_path, guard=GuardConfig(compare_every=100, rollbacks=1))
    with pytest.raises(UserError) as error:
        run_training(run, console=Console(quiet=True))
    names(error, "step 4", "guard.rollbacks=1")
    assert len(records_of(tmp_path, "rollback")) == 1
