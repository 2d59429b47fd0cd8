"""Checkpoints: any layout reads what any other wrote, and incomplete ones do not count."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from errors import names

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.checkpoint.commit import Writer
from mtx.checkpoint.fingerprint import MODULUS, factor_of, fingerprint
from mtx.checkpoint.snapshot import Snapshot
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.data.tokenizer import ByteTokenizer, train_bpe
from mtx.errors import UserError
from mtx.step.optimizer import LossScale
from mtx.step.state import TrainState
from mtx.step.trainer import Trainer

MODEL = ModelConfig(layers=4, hidden=32, heads=4, sequence=16, vocab=200, compute_dtype="float32")
RUN = RunConfig(model=MODEL, layout=Layout(data=2, pipe=2, tensor=2, virtual=2), global_batch=12)


def canonical(trainer: Trainer, state) -> dict:
    """Parameters and both moments on the host, in model order."""
    moments = {name: optax.tree_utils.tree_get(state.moments, name) for name in ("mu", "nu")}
    trees = {"params": state.params} | moments
    return {name: trainer.to_canonical(tree) for name, tree in jax.device_get(trees).items()}


def assert_same(one, other) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def random_state(trainer: Trainer) -> tuple[TrainState, dict]:
    """(state after three steps, one of them skipped; its parameters and moments in model order)"""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(trainer.to_canonical, trainer.states.shapes.params)
    arrays = {
        name: jax.tree.map(lambda a: rng.standard_normal(a.shape, np.float32), shapes)
        for name in ("params", "mu", "nu")
    }
    shardings = trainer.shardings(trainer.states.specs)
    params, mu, nu = map(trainer.masters_from, arrays.values())
    counted = optax.tree_utils.tree_set(trainer.states.shapes.moments, mu=mu, nu=nu)
    moments = jax.tree.map(lambda a: a if isinstance(a, jax.Array) else np.int32(2), counted)
    state = TrainState(
        step=np.int32(3), params=params, moments=moments, skipped=np.int32(1),
        loss_scale=LossScale(np.float32(1), np.int32(0)),
    )  # fmt: skip
    return jax.device_put(state, shardings), arrays


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A state that was saved while other arrays took over its memory."""
    trainer = Trainer(RUN)
    state, arrays = random_state(trainer)
    host = jax.device_get(jax.tree.map(jnp.copy, state))
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints")
    negated = jax.jit(lambda state: jax.tree.map(lambda a: -a, state), donate_argnums=0)
    with checkpoints:
        checkpoints.save(trainer, state, tokenizer=ByteTokenizer(), extra={"note": [1, None]})
        jax.block_until_ready(negated(state))
    assert state.params["embed"]["tokens"].is_deleted()
    return SimpleNamespace(
        trainer=trainer, host=host, arrays=arrays, checkpoints=checkpoints,
        directory=checkpoints.directory,
    )  # fmt: skip


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of the directory of checkpoints, to be damaged."""
    return shutil.copytree(saved.directory, tmp_path / "checkpoints")


# -- whole checkpoints -----------------------------------------------------------------------------


def test_same_layout_is_bit_for_bit_the_same(saved):
    trainer = Trainer(RUN)
    restored = saved.checkpoints.restore(trainer)
    assert jax.tree.structure(restored) == jax.tree.structure(saved.host)
    assert_same(jax.device_get(restored), saved.host)
    assert (int(restored.step), int(restored.skipped)) == (3, 1)
    wanted = trainer.shardings(trainer.states.specs)
    assert jax.tree.map(lambda a: a.sharding, restored) == wanted


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(pipe=4, tensor=2),
        Layout(data=2, pipe=2, virtual=2, schedule="gpipe"),
        Layout(data=3, tensor=2),  # 32 is not a multiple of 3: masters are padded
        Layout(data=3, pipe=2, stage_layers=(1, 3), sequence_parallel=False),
    ],
    ids=str,
)
def test_other_layouts_have_the_same_values(saved, layout):
    trainer = Trainer(replace(RUN, layout=layout))
    restored = saved.checkpoints.restore(trainer)
    assert_same(canonical(trainer, restored), saved.arrays)
    assert restored.step == 3 and restored.skipped == 1
    counts = optax.tree_utils.tree_get_all_with_path(restored.moments, "count")
    assert [int(count) for _, count in counts] == [2, 2]
    shapes = trainer.states.shapes
    assert jax.tree.map(lambda a: (a.shape, a.dtype), restored) == jax.tree.map(
        lambda a: (a.shape, a.dtype), shapes
    )


def test_on_disk_layers_are_stacked_and_nothing_is_padded(saved):
    with saved.checkpoints.open(3) as store:
        shapes = {name: info.shape for name, info in store.catalog.items()}
        for tree in ("params", "mu", "nu"):
            assert shapes[f"{tree}.layers.block.attention.qkv.w"] == (4, 32, 3, 4, 8)
            assert shapes[f"{tree}.layers.block.mlp_norm.scale"] == (4, 32)
            assert shapes[f"{tree}.embed.tokens"] == (200, 32)
            wanted = saved.arrays[tree]["layers"]["block"]["attention"]["qkv"]["w"]
            np.testing.assert_array_equal(
                store.read(f"{tree}.layers.block.attention.qkv.w"), wanted
            )
            middle = store.read(
                f"{tree}.layers.block.attention.qkv.w", (1, 5, 0, 1, 0), (2, 9, 3, 2, 8)
            )
            np.testing.assert_array_equal(middle, wanted[1:3, 5:14, :, 1:3])
    others = {name for name in shapes if name.split(".")[0] not in ("params", "mu", "nu")}
    assert others == {"step", "skipped", "loss_scale.scale", "loss_scale.good_steps"}


def test_orbax_alone_reads_it(saved):
    with ocp.Checkpointer(Writer(timeout_s=1)) as reader:
        arrays = reader.restore(saved.directory / "3")
    wanted = saved.arrays["mu"]["embed"]["positions"]
    np.testing.assert_array_equal(arrays["mu.embed.positions"], wanted)


def test_nothing_in_it_is_executable(saved):
    """It has only raw numbers and JSON, nothing for an unpickler."""
    for path in sorted((saved.directory / "3").iterdir()):
        if path.suffix != ".bin" and path.name != "commit_success.txt":
            json.loads(path.read_bytes())
    assert [p.name for p in (saved.directory / "3").glob("*.bin")] == ["arrays.0.bin"]
    numbers = sum(info.size_bytes for info in saved.checkpoints.manifest().catalog.values())
    assert (saved.directory / "3" / "arrays.0.bin").stat().st_size < numbers + 64 * 1000


def test_float16_starts_with_a_scale_of_its_own(saved):
    run = replace(RUN, model=replace(MODEL, compute_dtype="float16"), layout=Layout())
    restored = saved.checkpoints.restore(Trainer(run))
    assert saved.host.loss_scale.scale == 1.0
    assert restored.loss_scale.scale == run.optimizer.loss_scale


def test_config_and_tokenizer_lie_beside(saved):
    checkpoints = Checkpoints(saved.directory.parent)  # the run's own directory will do
    assert checkpoints.directory == saved.directory
    assert checkpoints.latest() == 3
    assert checkpoints.run() == RUN
    assert checkpoints.tokenizer(3).to_dict() == ByteTokenizer().to_dict()
    assert checkpoints.extra() == {"note": [1, None]}
    dropping = Trainer(replace(RUN, model=replace(MODEL, dropout=0.1)))
    checkpoints.check(dropping, ByteTokenizer())


def test_fingerprints_are_the_same_on_every_layout(saved, tmp_path):
    other = Trainer(replace(RUN, layout=Layout(data=3, pipe=2, stage_layers=(1, 3))))
    with Checkpoints(tmp_path) as checkpoints:
        state = saved.checkpoints.restore(other)
        checkpoints.save(other, state, tokenizer=ByteTokenizer())
    one, two = saved.checkpoints.manifest(), checkpoints.manifest()
    assert {n: a.fingerprint for n, a in one.catalog.items()} == {
        n: a.fingerprint for n, a in two.catalog.items()
    }
    with checkpoints.open() as store:
        for name, info in store.catalog.items():
            whole = fingerprint(store.read(name)) * factor_of(name, info.dtype) % MODULUS
            assert whole == info.fingerprint


def test_the_newest_are_kept(saved, copied):
    (copied / "4.orbax-checkpoint-tmp-1").mkdir()  # of a save that was killed
    (copied / "5").mkdir()
    state = saved.checkpoints.restore(saved.trainer)
    checkpoints = Checkpoints(copied, keep=2, keep_every=4)
    for step in (4, 5, 6, 6, 7):
        state = state._replace(step=jax.device_put(np.int32(step), state.step.sharding))
        path = checkpoints.save(saved.trainer, state, tokenizer=ByteTokenizer())
        assert path == copied / str(step)
    checkpoints.wait()
    assert checkpoints.steps() == [4, 6, 7]
    assert sorted(p.name for p in copied.iterdir()) == ["4", "6", "7"]
    assert_same(canonical(saved.trainer, checkpoints.restore(saved.trainer, 6)), saved.arrays)


def test_an_old_one_that_cannot_be_deleted(saved, copied, monkeypatch):
    """The new one is complete, one line reports the old one, and the next save deletes it."""
    state = saved.checkpoints.restore(saved.trainer)
    lines = []
    checkpoints = Checkpoints(copied, keep=1, say=lines.append)

    def save(step: int) -> None:
        numbered = state._replace(step=jax.device_put(np.int32(step), state.step.sharding))
        checkpoints.save(saved.trainer, numbered, tokenizer=ByteTokenizer())
        checkpoints.wait()

    def refuse(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("mtx.checkpoint.checkpoints.discard", refuse)
        save(4)
    assert checkpoints.steps() == [3, 4]
    assert lines == [
        f"checkpoints beyond keep=1 cannot be deleted in {copied} (No space left on device); the "
        "next save tries again"
    ]
    assert_same(canonical(saved.trainer, checkpoints.restore(saved.trainer, 4)), saved.arrays)
    save(5)
    assert checkpoints.steps() == [5] and len(lines) == 1


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"layers": 8}, ("layers=4", 8)),
        ({"hidden": 64, "vocab": 300}, ("hidden=32", 64, "vocab=200", 300, "ffn_hidden=128", 256)),
        ({"tied": False}, ("tied=True", False)),
    ],
)
def test_another_model(saved, change, values):
    trainer = Trainer(replace(RUN, model=replace(MODEL, **change), layout=Layout()))
    with pytest.raises(UserError) as error:
        saved.checkpoints.restore(trainer)
    assert names(error, saved.directory / "3", *values)
    with pytest.raises(UserError) as error:
        saved.checkpoints.check(trainer, ByteTokenizer())
    assert names(error, *values)


def test_arrays_of_another_shape(saved):
    other = Trainer(replace(RUN, model=replace(MODEL, vocab=300), layout=Layout()))
    with saved.checkpoints.open() as store:
        with pytest.raises(UserError) as error:
            Snapshot(other).load(store)
    assert names(error, "params.embed.tokens", "[200, 32]", "[300, 32]")


def test_another_tokenizer(saved, tmp_path):
    bpe = train_bpe(["to be or not to be"] * 9, vocab=260)
    with pytest.raises(UserError) as error:
        saved.checkpoints.check(saved.trainer, bpe)
    assert names(error, "bytes", 256, 260)
    state = saved.checkpoints.restore(saved.trainer)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(saved.trainer, state, tokenizer=bpe)
    assert checkpoints.tokenizer().encode("to be").tolist() == bpe.encode("to be").tolist()
    checkpoints.check(saved.trainer, bpe)
    other = train_bpe(["that is the question"] * 9, vocab=260)
    with pytest.raises(UserError) as error:
        checkpoints.check(saved.trainer, other)
    assert names(error, 260)


def test_half_written_and_half_deleted_ones_do_not_count(copied):
    (copied / "9").mkdir()
    (copied / "10.orbax-checkpoint-tmp-17").mkdir()
    shutil.copytree(copied / "3", copied / "11")
    (copied / "11" / "checkpoint.json").unlink()
    (copied / "notes.txt").write_text("12")
    checkpoints = Checkpoints(copied)
    assert checkpoints.steps() == [3] and checkpoints.latest() == 3
    with pytest.raises(UserError) as error:
        checkpoints.run(9)
    assert names(error, checkpoints.directory, 9, 3)


def test_a_directory_without_any(tmp_path):
    checkpoints = Checkpoints(tmp_path / "nothing")
    assert checkpoints.latest() is None
    with pytest.raises(UserError) as error:
        checkpoints.run()
    assert names(error, tmp_path / "nothing", "out")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError) as error:
        checkpoints.tokenizer()
    assert names(error, tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as error:
        Checkpoints(tmp_path / "file").latest()
    assert names(error, tmp_path / "file")
