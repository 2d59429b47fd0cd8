"""What docs/extend promises: a sublayer, a family, an optimizer and a schedule are one file each.
All four are added to a copy of the package, and nothing else is changed."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mtx.config import Layout, ModelConfig, RunConfig
from mtx.errors import UserError
from mtx.layers.layer import Kind, Stack
from mtx.layers.mlp import MLP
from mtx.layers.norm import Norm
from mtx.layers.sublayer import Build
from mtx.schedules.makers import MAKERS, make
from mtx.schedules.shape import Maker
from mtx.sharding.axes import AXES, Axis
from mtx.sharding.mesh import Axes
from mtx.sharding.parameter import parameter
from mtx.step.trainer import Trainer

ROOT = Path(__file__).parents[1]
FILES = {
    "layers/squared.py": '''
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from mtx.sharding.linear import ColumnLinear, RowLinear


@dataclass(frozen=True, kw_only=True)
class Squared:
    ffn: int
    looks_around = False

    def module(self, build, rngs):
        return SquaredModule(self, build, rngs)


class SquaredModule(nnx.Module):
    def __init__(self, config, build, rngs):
        how = dict(axes=build.axes, rngs=rngs, bias=False)
        self.up = ColumnLinear(build.hidden, (config.ffn,), split=0, std=build.init_std, **how)
        self.down = RowLinear((config.ffn,), build.hidden, std=build.output_std, **how)

    def __call__(self, x_BsD, context=None):
        return self.down(jnp.square(jax.nn.relu(self.up(x_BsD))))
''',
    "families/squared.py": '''
from dataclasses import dataclass, replace

from mtx.families.llama import Llama


@dataclass(frozen=True, kw_only=True)
class SquaredLlama(Llama):
    family: str = "squared"

    def stack(self):
        from mtx.layers.layer import Stack
        from mtx.layers.squared import Squared

        sublayers = ("attention", self.attention()), ("mlp", Squared(ffn=self.ffn_hidden))
        kind = replace(self.kind(), sublayers=sublayers)
        return Stack.uniform(kind, self.layers, **self.edges())


CONFIG = SquaredLlama
''',
    "optimizers/sign.py": '''
STATES, DEFAULTS = 0, {}


def make(rate, *, weight_decay, mask):
    import optax

    return optax.chain(
        optax.scale_by_sign(), optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(rate),
    )
''',
    "schedules/makers/late.py": '''
from mtx.schedules.orders import B, F, W, Orders
from mtx.schedules.schedule import Schedule
from mtx.schedules.shape import Maker


def late(shape):
    """All F, then all B, then all W."""
    items = range(shape.microbatches)
    order = [(F, i, 0) for i in items] + [(B, i, 0) for i in reversed(items)]
    order += [(W, i, 0) for i in items]
    return Schedule.from_orders("late", Orders.from_lists([order] * shape.stages))


MAKERS = {"late": Maker(make=late, source="here", virtual=1)}
''',
}  # fmt: skip
USES_THEM = """
import sys
from dataclasses import replace
import numpy as np
import mtx
from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.data.tokenizer import ByteTokenizer
from mtx.plan.plan import make_plan

mtx.use_virtual_devices(4)
model = ModelConfig(family="squared", layers=2, hidden=16, heads=4, kv_heads=2, sequence=8,
                    vocab=30, vocab_multiple=8, compute_dtype="float32")
ids = np.random.default_rng(0).integers(0, 30, (4, 9), dtype=np.int32)
batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((4, 8), np.float32)}


def run(**layout):
    optimizer = OptimizerConfig(name="sign", lr=1e-3, rate="constant")
    return RunConfig(model=model, layout=Layout(**layout), optimizer=optimizer, global_batch=4)


one, other = mtx.Trainer(run(microbatch=4)), mtx.Trainer(run(pipe=2, tensor=2, schedule="late"))
state, losses = one.init(), []
state, _ = one.train_step(state, one.place(batch))
with Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(one, state, tokenizer=ByteTokenizer())
    checkpoints.wait()
    moved = checkpoints.restore(other, 1)
for trainer, at in ((one, state), (other, moved)):
    for _ in range(2):
        at, metrics = trainer.train_step(at, trainer.place(batch))
        losses.append([float(metrics.loss), float(metrics.gradient_norm)])
np.testing.assert_allclose(losses[:2], losses[2:], rtol=1e-5)
planned = [run(pipe=2, tensor=2, schedule="late")]
planned.append(replace(planned[0], optimizer=OptimizerConfig()))
keeps, adamw = (make_plan(run, target="a100-80gb").memory.optimizer_bytes for run in planned)
assert 3 * keeps == adamw  # the masters alone, and with two moments
print("the same")
"""


def test_a_sublayer_a_family_an_optimizer_and_a_schedule_are_a_file_each(tmp_path):
    shutil.copytree(ROOT / "mtx", tmp_path / "mtx", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in FILES.items():
        assert not (tmp_path / "mtx" / name).exists()
        (tmp_path / "mtx" / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", USES_THEM, str(tmp_path / "saved")], cwd=tmp_path, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.split("\n")[-2:] == ["the same", ""], done.stderr[-2000:]


@dataclass(frozen=True, kw_only=True)
class Around:
    """A sublayer that sees other positions and declares nothing else."""

    looks_around = True


@pytest.mark.parametrize(
    "asked, values",
    [
        (
            lambda kind, build: kind.module(build, nnx.Rngs(0)),
            "context=2 .*over_context; use context=1",
        ),
        (lambda kind, build: kind.empty_cache(build, 1, 8), "slices=4 .*empty_cache"),
        (lambda kind, build: kind.empty_past(build, 1, 8), "empty_past"),
    ],
)
def test_what_a_sublayer_that_looks_around_has_no_rule_for_is_refused(asked, values):
    kind = Kind(sublayers=(("mix", Around()),), norm=Norm(kind="rms", epsilon=1e-6))
    build = Build(
        hidden=8, init_std=1, output_std=1, dtype="float32", kernel="blocked", site=0, slices=4,
        axes=Axes(context="context", context_shards=2),
    )  # fmt: skip
    with pytest.raises(UserError, match=values):
        asked(kind, build)


@dataclass(frozen=True, kw_only=True)
class Keeps(Around):
    """One that keeps values its module does not know."""

    def empty_past(self, build, rows, length):
        return None

    def module(self, build, rngs):
        return nnx.Module()


BUILD = Build(
    hidden=8, init_std=1, output_std=1, dtype="float32", kernel="blocked", site=0, axes=Axes()
)


def test_what_a_sublayer_keeps_its_module_must_know():
    kind = Kind(sublayers=(("mix", Keeps()),), norm=Norm(kind="rms", epsilon=1e-6))
    with pytest.raises(UserError, match="mix: Keeps .*empty_past.*Module.*of_text"):
        kind.module(BUILD, nnx.Rngs(0))


@pytest.mark.parametrize(
    "values, said",
    [(dict(norm_placement="after"), "'after'.*both"), (dict(), "Unsaid .*looks_around")],
)
def test_a_kind_says_what_it_is(values, said):
    unsaid = type("Unsaid", (), {}) if not values else Around
    with pytest.raises(UserError, match=said):
        Kind(sublayers=(("mix", unsaid()),), norm=Norm(kind="rms", epsilon=1e-6), **values)


@pytest.mark.parametrize("placement", ["pre", "post", "both", "output"])
def test_where_a_norm_stands(placement):
    kind = Kind(
        sublayers=(("mlp", MLP(ffn=16, activation="relu")),), norm_placement=placement,
        norm=Norm(kind="rms", epsilon=1e-6),
    )  # fmt: skip
    layer = kind.module(BUILD, nnx.Rngs(0))
    x_BsD = jax.random.normal(jax.random.key(0), (2, 3, 8))
    norm, f = layer.mlp_norm, layer.mlp
    want = {
        "pre": lambda: x_BsD + f(norm(x_BsD)), "post": lambda: norm(x_BsD + f(x_BsD)),
        "both": lambda: x_BsD + layer.mlp_post_norm(f(norm(x_BsD))),
        "output": lambda: x_BsD + norm(f(x_BsD)),
    }[placement]()  # fmt: skip
    np.testing.assert_array_equal(layer({"x": x_BsD})["x"], want)


def test_a_stack_has_the_kinds_of_its_pattern():
    mlp, norm = MLP(ffn=16, activation="relu"), Norm(kind="rms", epsilon=1e-6)
    kind = Kind(sublayers=(("mlp", mlp),), norm=norm)
    kinds = {"wide": kind, "mixer": kind}
    stack = Stack(kinds=kinds, pattern=("wide",) * 2, embedding=None, head=None)
    assert stack.kinds == {"wide": kind}
    with pytest.raises(UserError, match="'narrow'.*wide"):
        Stack(kinds=kinds, pattern=("narrow",), embedding=None, head=None)


@pytest.mark.parametrize(
    "values, said",
    [
        (dict(role="scale"), "'scale'.*norm"), (dict(spec=P("tensr")), "'tensr'.*tensor"),
        (dict(spec=P(None, "tensor")), r"2 dims.*\(4,\)"),
        (dict(dims=("hidden", "heads")), r"'heads'.*2 dims.*\(4,\)"),
    ],
)  # fmt: skip
def test_a_parameter_says_what_it_is(values, said):
    with pytest.raises(UserError, match=said):
        parameter(jnp.zeros(4), **dict(spec=P(), role="norm") | values)


def test_a_size_that_an_axis_does_not_divide_is_named(monkeypatch):
    monkeypatch.setattr(ModelConfig, "split_widths", {}, raising=True)
    model = ModelConfig(family="llama", layers=2, hidden=16, heads=4, sequence=8, ffn=30)
    run = RunConfig(model=model, layout=Layout(tensor=4), global_batch=4)
    with pytest.raises(UserError, match=r"tensor=4 must divide .*\.mlp\.down\.w, 30"):
        Trainer(run).init()


def test_dropout_that_no_layer_reads_is_refused():
    model = ModelConfig(family="mamba2", attention_dropout=0.5)
    with pytest.raises(UserError, match="attention_dropout=0.5 .*mamba2"):
        model.require_read()
    with pytest.raises(UserError, match="attention_dropout"):
        Trainer(RunConfig(model=model, global_batch=4)).init()


@pytest.mark.parametrize("splits", ["bath", ""])
def test_an_axis_splits_what_there_is(splits):
    with pytest.raises(UserError, match="batch"):
        Axis("replica", splits)


@pytest.mark.parametrize("axes", [(*AXES, "replica"), AXES[1:]])
def test_an_axis_has_a_record_and_a_size(axes, monkeypatch):
    monkeypatch.setattr("mtx.config.layout.AXES", axes)
    with pytest.raises(UserError, match="(replica|pipe) .*MESH.*Layout"):
        Layout()


@pytest.mark.parametrize(
    "made, said", [(None, "None"), (make("1f1b", microbatches=4, stages=2), "virtual=1")]
)
def test_what_a_maker_gives_is_checked(made, said, monkeypatch):
    monkeypatch.setitem(MAKERS, "mine", Maker(make=lambda shape: made, source="here"))
    with pytest.raises(UserError, match=f"'mine'.*{said} for virtual=2"):
        make("mine", microbatches=4, stages=2, virtual=2)


def test_a_family_has_a_config(monkeypatch):
    monkeypatch.delattr("mtx.families.qwen3.CONFIG")
    with pytest.raises(UserError, match="qwen3.* has no CONFIG"):
        ModelConfig(family="qwen3")
