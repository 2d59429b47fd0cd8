"""Checkpoints: any layout reads what any other wrote, and what is not whole does not count."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from mtx.config import Layout, ModelConfig, RunConfig
from mtx.data.tokenizer import ByteTokenizer, train_bpe
from mtx.errors import UserError
from mtx.train.checkpoint import Checkpoints
from mtx.train.step import Trainer

MODEL = ModelConfig(layers=4, hidden=32, heads=4, sequence=16, vocab=200, compute_dtype="float32")
RUN = RunConfig(model=MODEL, layout=Layout(data=2, pipe=2, tensor=2, virtual=2), global_batch=12)


def random_batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, MODEL.vocab, (2, 12, MODEL.sequence), dtype=np.int32)
    return {"tokens": tokens, "targets": targets, "weights": np.ones(tokens.shape, np.float32)}


def canonical(trainer: Trainer, state) -> dict:
    """Parameters and both moments on the host, in model order."""
    convert = jax.jit(trainer.to_canonical)
    moments = {name: optax.tree_utils.tree_get(state.moments, name) for name in ("mu", "nu")}
    trees = {"params": state.params} | moments
    return {name: jax.device_get(convert(tree)) for name, tree in trees.items()}


def assert_same(one, other) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two steps and a skipped one, saved while the next step runs and takes the state's place."""
    trainer = Trainer(RUN)
    state = trainer.init()
    broken = random_batch(2)
    broken["weights"][0, 0] = np.inf
    for batch in (random_batch(0), random_batch(1), broken):
        state, _ = trainer.train_step(state, trainer.place(batch))
    host, arrays = jax.device_get(state), canonical(trainer, state)
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints")
    with checkpoints:
        checkpoints.save(trainer, state, tokenizer=ByteTokenizer(), extra={"note": [1, None]})
        trainer.train_step(state, trainer.place(random_batch(3)))
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
    wanted = trainer.shardings(trainer.state_specs)
    assert jax.tree.map(lambda a: a.sharding, restored) == wanted


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(pipe=4, tensor=2),
        Layout(data=2, pipe=2, virtual=2, schedule="gpipe"),
        Layout(data=3, tensor=2),  # 32 is no multiple of 3: masters are padded
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
    shapes = trainer.state_shapes
    assert jax.tree.map(lambda a: (a.shape, a.dtype), restored) == jax.tree.map(
        lambda a: (a.shape, a.dtype), shapes
    )


def test_on_disk_layers_are_stacked_and_nothing_is_padded(saved):
    with ocp.StandardCheckpointer() as reader:
        tree = reader.metadata(saved.directory / "3" / "state").item_metadata.tree
    for part in ("params", "mu", "nu"):
        assert tree[part]["block"]["attention"]["qkv"]["w"].shape == (4, 32, 3, 4, 8)
        assert tree[part]["block"]["mlp_norm"]["scale"].shape == (4, 32)
        assert tree[part]["ends"]["tokens"].shape == (200, 32)
    assert set(tree) == {"params", "mu", "nu", "step", "skipped", "loss_scale"}


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
    checkpoints.check(replace(MODEL, dropout=0.1), ByteTokenizer())


def test_the_newest_are_kept(saved, copied):
    (copied / "4.orbax-checkpoint-tmp-1").mkdir()  # of a save that was killed
    (copied / "5").mkdir()
    state = saved.checkpoints.restore(saved.trainer)
    checkpoints = Checkpoints(copied, keep=2)
    for step in (4, 5, 6):
        state = state._replace(step=jax.device_put(np.int32(step), state.step.sharding))
        path = checkpoints.save(saved.trainer, state, tokenizer=ByteTokenizer())
        assert path == copied / str(step)
    checkpoints.wait()
    assert checkpoints.steps() == [5, 6]
    assert sorted(p.name for p in copied.iterdir()) == ["5", "6"]
    assert_same(canonical(saved.trainer, checkpoints.restore(saved.trainer, 5)), saved.arrays)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"layers": 8}, "layers=4 there and 8 here"),
        ({"hidden": 64, "vocab": 300}, "hidden=32 there and 64 here, vocab=200 there and 300 here"),
        ({"tied": False}, "tied=True there and False here"),
    ],
)
def test_another_model(saved, change, difference):
    trainer = Trainer(replace(RUN, model=replace(MODEL, **change), layout=Layout()))
    with pytest.raises(UserError, match=f"3 is of another model: {difference}; use its values"):
        saved.checkpoints.restore(trainer)
    with pytest.raises(UserError, match=difference):
        saved.checkpoints.check(trainer.run.model, ByteTokenizer())


def test_another_tokenizer(saved, copied):
    bpe = train_bpe(["to be or not to be"] * 9, vocab=260)
    with pytest.raises(UserError, match=r"bytes of 256 tokens there, bpe of 260 here"):
        saved.checkpoints.check(MODEL, bpe)
    (copied / "3" / "tokenizer" / "metadata").write_text(json.dumps(bpe.to_dict()))
    checkpoints = Checkpoints(copied)
    assert checkpoints.tokenizer().encode("to be").tolist() == bpe.encode("to be").tolist()
    checkpoints.check(MODEL, bpe)
    other = train_bpe(["that is the question"] * 9, vocab=260)
    with pytest.raises(UserError, match="bpe of 260 tokens on both sides, trained on other text"):
        checkpoints.check(MODEL, other)


def test_half_written_and_half_deleted_ones_do_not_count(copied):
    (copied / "9").mkdir()
    (copied / "10.orbax-checkpoint-tmp-17").mkdir()
    shutil.copytree(copied / "3", copied / "11")
    shutil.rmtree(copied / "11" / "state")
    (copied / "notes.txt").write_text("12")
    checkpoints = Checkpoints(copied)
    assert checkpoints.steps() == [3] and checkpoints.latest() == 3
    with pytest.raises(UserError, match="has no checkpoint of step 9; it has 3"):
        checkpoints.run(9)


def test_a_directory_without_any(tmp_path):
    checkpoints = Checkpoints(tmp_path / "nothing")
    assert checkpoints.latest() is None
    with pytest.raises(UserError, match="nothing does not exist; name the `out` of a training run"):
        checkpoints.run()
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="nothing holds no complete checkpoint"):
        checkpoints.tokenizer()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file, and checkpoints lie in a directory"):
        Checkpoints(tmp_path / "file").latest()


def test_what_cannot_be_written_is_one_line(saved, tmp_path):
    (tmp_path / "file").write_text("")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints")
    state = saved.checkpoints.restore(saved.trainer)
    with pytest.raises(UserError, match="no checkpoint can be written in .*NotADirectoryError"):
        checkpoints.save(saved.trainer, state, tokenizer=ByteTokenizer())
    checkpoints.wait()


@pytest.mark.parametrize("damaged", ["run/metadata", "state/_METADATA"])
def test_a_damaged_one_is_one_line(saved, copied, damaged):
    (copied / "3" / damaged).write_text("{")
    with pytest.raises(UserError, match=r"checkpoint \S+/3 cannot be read \(") as error:
        Checkpoints(copied).restore(saved.trainer)
    assert "\n" not in str(error.value)
