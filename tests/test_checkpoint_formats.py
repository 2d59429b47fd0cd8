"""Checkpoints of earlier formats, under tests/data, as the code of their time wrote them: they
are restored bit for bit on other layouts, and training continues with the losses of that time.

tests/data/format_2/{gpt,bert}: two steps, on data=2, pipe=2, of commit 9975e14; expected.json has
the digests of all canonical arrays, by their old names, and the losses of the next two steps.
"""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from errors import names

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.checkpoint.formats import current_catalog
from mtx.checkpoint.store import Damaged
from mtx.config import Layout
from mtx.step.optimizer import state_arrays
from mtx.step.trainer import Trainer

DATA = Path(__file__).parent / "data" / "format_2"
LAYOUTS = {
    "gpt": Layout(pipe=2, virtual=2, tensor=2, schedule="zb_v"),
    "bert": Layout(data=2, zero=3, virtual=2, idle="phases"),
}
ENDS = {
    "tokens": "embed.tokens", "positions": "embed.positions", "types": "embed.types",
    "norm": "head.norm", "output": "head.output", "head": "head.masked", "pooler": "head.pooler",
    "binary": "head.binary",
}  # fmt: skip


def batch_of(model, rows, seed):
    random, shape = np.random.default_rng(seed), (rows, model.sequence)
    ids = random.integers(0, model.vocab, (rows, model.sequence + 1), dtype=np.int32)
    weights = (random.random(shape) < 0.9).astype(np.float32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}
    if model.family == "bert":
        batch |= {"types": np.zeros(shape, np.int32), "segments": np.ones(shape, np.int32)}
        batch |= {"order": (np.arange(rows) % 2).astype(np.int32)}
    return batch


def new_name(old):
    tree, part, path = old.split(".", 2)
    if part == "block":
        return f"{tree}.layers.block.{path}"
    first, dot, rest = path.partition(".")
    return f"{tree}.{ENDS[first]}{dot}{rest}"


@pytest.fixture(params=sorted(LAYOUTS))
def family(request):
    return request.param


@pytest.fixture
def copied(family, tmp_path):
    return shutil.copytree(DATA / family, tmp_path / "run")


def test_format_2_is_restored_bit_for_bit_on_another_layout_and_trains_on(family, copied):
    expected = json.loads((copied / "expected.json").read_text())
    checkpoints = Checkpoints(copied)
    checkpoints.look()
    run = checkpoints.run()
    assert run.layout.idle != "masked"
    trainer = Trainer(replace(run, layout=LAYOUTS[family]))
    state = checkpoints.restore(trainer)
    moments = state_arrays(state.moments)
    trees = {"params": state.params} | {
        name: jax.tree.map_with_path(
            lambda path, _, name=name: moments[".".join((name, *(key.key for key in path)))],
            state.params,
        )
        for name in ("mu", "nu")
    }
    trees = {name: trainer.to_canonical(tree) for name, tree in jax.device_get(trees).items()}
    got = {
        ".".join(key.key for key in path): hashlib.sha256(np.ascontiguousarray(a).tobytes())
        for path, a in jax.tree.leaves_with_path(trees)
    }
    want = {new_name(old): digest for old, digest in expected["sha256"].items()}
    assert {name: digest.hexdigest()[:16] for name, digest in got.items()} == want
    for seed, loss in zip((2, 3), expected["losses"], strict=True):
        state, metrics = trainer.train_step(state, trainer.place(batch_of(run.model, 4, seed)))
        assert float(metrics.loss) == pytest.approx(loss, rel=1e-6)


def test_what_format_2_holds_is_still_checked(copied):
    """By its old fingerprints, converted to those of today's names."""
    checkpoints = Checkpoints(copied)
    block = checkpoints.manifest().catalog["mu.embed.tokens"].blocks[0]
    with (copied / "2" / block.file).open("r+b") as file:
        file.seek(block.offset + 5)
        byte = file.read(1)
        file.seek(block.offset + 5)
        file.write(bytes([byte[0] ^ 1]))
    with checkpoints.open() as store, pytest.raises(Damaged) as error:
        for name in store.catalog:
            list(store.verify(name))
    assert names(error, "mu.embed.tokens", block.file)


def test_two_arrays_that_would_be_of_one_name_are_refused(copied):
    catalog = Checkpoints(copied).manifest().catalog
    info = catalog["params.embed.tokens"]
    with pytest.raises(ValueError) as error:
        current_catalog({"params.ends.tokens": info, "params.embed.tokens": info}, 2)
    assert names(error, 2)
