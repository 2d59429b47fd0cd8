"""Optimizers by role, on every layout: their updates, their state in checkpoints, and refusals."""

import functools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import names
from parameters import params_of

import mtx
from mtx import optimizers
from mtx.certify.small import small_model
from mtx.checkpoint.checkpoints import Checkpoints
from mtx.cli import main
from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError
from mtx.families import NAMES
from mtx.layers.model import Model
from mtx.plan.memory import predict_memory
from mtx.sharding.parameter import DECAYED, ROLES
from mtx.step.optimizer import check_optimizer, make_optimizer, state_arrays

SIZES = dict(layers=4, hidden=16, heads=2, sequence=8, vocab=30, vocab_multiple=8)
MODEL = ModelConfig(compute_dtype="float32", tied=False, **SIZES)
LAYOUTS = [
    Layout(),
    Layout(data=2, pipe=2, tensor=2, virtual=2),
    Layout(data=4, tensor=2, zero=3),
    Layout(data=3, pipe=2, stage_layers=(3, 1)),  # padded: 16 over three replicas
]
LION = OptimizerConfig(name="lion", lr=1e-2, rate="constant", weight_decay=0.3, clip=0.0)
MIXED = OptimizerConfig(
    name="lion", rest="adamw", rest_lr=3e-2, b2=0.98, lr=1e-2, rate="constant", weight_decay=0.3,
    clip=0.0,
)  # fmt: skip


def trainer_on(layout: Layout, optimizer: OptimizerConfig) -> mtx.Trainer:
    return mtx.Trainer(
        RunConfig(model=MODEL, layout=layout, global_batch=12, optimizer=optimizer, steps=10)
    )


def batches(count: int) -> list[dict]:
    ids = np.random.default_rng(3).integers(0, 30, (count, 12, 9), dtype=np.int32)
    ones = np.ones((12, 8), np.float32)
    return [{"tokens": a[:, :-1], "targets": a[:, 1:], "weights": ones} for a in ids]


def canonical(trainer, tree):
    return trainer.to_canonical(jax.device_get(tree))


def by_hand(p, g, state, step: int, *, name: str, lr, b1, b2, decay):
    """The papers' formulas, one array at a time: (new parameter, new state)."""
    if name == "lion":
        (m,) = state
        direction, state = np.sign(b1 * m + (1 - b1) * g), (b2 * m + (1 - b2) * g,)
    else:
        m, n = b1 * state[0] + (1 - b1) * g, b2 * state[1] + (1 - b2) * g * g
        corrected = m / (1 - b1**step), n / (1 - b2**step)
        direction, state = corrected[0] / (np.sqrt(corrected[1]) + 1e-8), (m, n)
    return p - lr * (direction + decay * p), state


@functools.cache
def differing_on(layout):
    """A trainer for gradients, which do not depend on the optimizer."""
    return trainer_on(layout, LION)


@pytest.mark.parametrize(
    ("config", "layout"),
    [(LION, LAYOUTS[0]), (LION, LAYOUTS[3]), *((MIXED, layout) for layout in LAYOUTS)],
)
def test_updates_are_those_of_the_papers_for_each_role(config, layout):
    trainer = trainer_on(layout, config)
    differ = differing_on(layout)
    state, seen = trainer.state_from(params_of(MODEL)), {}
    for step, batch in enumerate(batches(3), start=1):
        before = canonical(trainer, state.params)
        _, gradients = differ.loss_and_gradients_of(differ.masters_from(before), batch)
        state, _ = trainer.train_step(state, trainer.place(batch))
        after = canonical(trainer, state.params)

        def check(path, role, p, g, got, step=step):
            of_rest = config.rest is not None and role != "matrix"
            how = dict(name="adamw", lr=3e-2, b1=0.9, b2=0.95) if of_rest else dict(
                name="lion", lr=1e-2, b1=0.9, b2=config.b2 or 0.99
            )  # fmt: skip
            zeros = np.zeros_like(p)
            decay = 0.0 if role in ("norm", "bias") else 0.3
            last = seen.get(path, (zeros, zeros) if of_rest else (zeros,))
            want, seen[path] = by_hand(p, g, last, step, decay=decay, **how)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6, err_msg=str(path))

        jax.tree.map_with_path(check, trainer.model.roles, before, gradients, after)
    kept = {name.partition(".")[0] for name in state_arrays(state.moments)}
    assert kept == ({"mu"} if config is LION else {"mu", "nu"})


def test_state_is_restored_on_another_layout_and_training_goes_on_the_same(tmp_path):
    one, other = trainer_on(LAYOUTS[1], MIXED), trainer_on(LAYOUTS[2], MIXED)
    state = one.state_from(params_of(MODEL))
    first, second = batches(2)
    state, _ = one.train_step(state, one.place(first))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(one, state, tokenizer=ByteTokenizer())
        checkpoints.wait()
        moved = checkpoints.restore(other, 1)
        arrays = set(checkpoints.manifest(1).catalog)
    assert {"mu.layers.block.mlp.up.w", "mu.embed.tokens", "nu.embed.tokens"} <= arrays
    assert "nu.layers.block.mlp.up.w" not in arrays  # Lion keeps one
    assert {int(a) for a in jax.tree.leaves(moved.moments) if a.shape == ()} == {1}
    losses = []
    for trainer, at in ((one, state), (other, moved)):
        at, metrics = trainer.train_step(at, trainer.place(second))
        losses.append(float(metrics.loss))
        at, metrics = trainer.train_step(at, trainer.place(second))
        losses.append(float(metrics.loss))
    np.testing.assert_allclose(losses[:2], losses[2:], rtol=1e-6)
    with (
        pytest.raises(UserError) as error,
        Checkpoints(tmp_path) as c,
    ):
        c.restore(trainer_on(Layout(), OptimizerConfig()), 1)
    assert names(error, "nu.layers.block", tmp_path)


@pytest.mark.parametrize("family", NAMES)
def test_every_parameter_has_a_role(family):
    model = Model(small_model(ModelConfig(family=family, tied=family != "llama")))
    roles = {
        ".".join(key.key for key in path): role
        for path, role in jax.tree.leaves_with_path(model.roles)
    }
    assert set(roles.values()) <= set(ROLES)
    assert jax.tree.structure(model.roles) == jax.tree.structure(
        jax.tree.map(str, model.specs, is_leaf=lambda a: isinstance(a, jax.sharding.PartitionSpec))
    )
    # Names used to decide what is decayed: names like these still show it.
    for name, role in roles.items():
        table = name in ("embed.encoder_bias", "embed.decoder_bias")  # of distances
        if name.endswith((".b", "bias", ".scale", ".sinks")) and not table:
            assert role not in DECAYED, name
        if table or name.endswith(".w"):
            assert role in DECAYED, name
    assert roles["embed.tokens"] == "embedding"
    outputs = (".mlp.down.w", ".mlp.down", ".out.w", ".mixer.down.w")
    downs = [role for name, role in roles.items() if name.endswith(outputs)]
    assert set(downs) == {"matrix"}
    if not model.config.tied:
        assert roles["head.output"] == "head"


def twice(*args, **kwargs):
    return optax.chain(optax.trace(0.9), optax.trace(0.5), optax.scale(-1e-3))


def per_array(change):
    return optax.stateless(lambda updates, _: jax.tree.map(change, updates))


def row_by_row(g):
    return jax.lax.scan(lambda total, row: (total + row, total), jnp.zeros(g.shape[1:]), g)[1]


@pytest.mark.parametrize(
    "make, what",
    [
        (lambda *a, **k: optax.lamb(1e-3), "reduce_sum"),
        (lambda *a, **k: optax.contrib.muon(1e-3), "ns_coeffs"),
        (lambda *a, **k: optax.adafactor(1e-3), "v_row"),
        (lambda *a, **k: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2)), "reduce"),
        (lambda *a, **k: optax.contrib.schedule_free_adamw(1e-3), "float32"),
        (twice, "trace"),
        (lambda *a, **k: optax.adamw(1e-3, mu_dtype="bfloat16"), "bfloat16"),
        (lambda *a, **k: optax.sm3(1e-3), "float32"),
        (lambda *a, **k: per_array(lambda g: g * g.shape[-1] ** -0.5), "mul"),
        (lambda *a, **k: per_array(lambda g: g ** g.shape[-1]), "integer_pow"),
        (lambda *a, **k: per_array(lambda g: jnp.clip(g, -1 / g.size, 1 / g.size)), "0.5"),
        (lambda *a, **k: per_array(lambda g: jnp.sign(g) * jnp.arange(g.shape[-1])), "iota"),
        (lambda *a, **k: per_array(lambda g: g + np.arange(g.shape[-1], dtype="f4")), "add"),
        (lambda *a, **k: per_array(lambda g: -g if g.size > 9 else g), "neg"),
        (lambda *a, **k: per_array(row_by_row), "scan"),
    ],
    ids=[
        "lamb", "muon", "adafactor", "clipped", "schedule-free", "twice", "half", "sm3", "size",
        "power", "bound", "place", "constant", "large", "loop",
    ],
)  # fmt: skip
def test_what_cannot_be_sharded_is_refused_by_name(make, what, monkeypatch):
    module = SimpleNamespace(STATES=1, DEFAULTS={}, make=make)
    monkeypatch.setattr(optimizers, "NAMES", (*optimizers.NAMES, "shampoo"))
    for place in ("mtx.optimizers", "mtx.step.optimizer"):
        monkeypatch.setattr(f"{place}.optimizer_module", lambda name: module)
    check_optimizer.cache_clear()
    with pytest.raises(UserError) as error:
        make_optimizer(OptimizerConfig(name="shampoo"), 10, {"layers": {"w": "matrix"}})
    assert names(error, "'shampoo'", what)
    check_optimizer.cache_clear()


def test_a_plan_refuses_what_training_does(monkeypatch, capsys):
    module = SimpleNamespace(STATES=2, DEFAULTS={}, make=lambda rate, **_: optax.lamb(rate))
    monkeypatch.setattr(optimizers, "NAMES", (*optimizers.NAMES, "shampoo"))
    for place in ("mtx.optimizers", "mtx.step.optimizer"):
        monkeypatch.setattr(f"{place}.optimizer_module", lambda name: module)
    check_optimizer.cache_clear()
    assert main(["plan", "miniature", "--optimizer.name", "shampoo"]) == 2
    out, error = capsys.readouterr()
    check_optimizer.cache_clear()
    assert out == "" and error.count("\n") == 1 and "shampoo" in error


def forgetful(rate, *, weight_decay, mask):
    return optax.sgd(rate, momentum=0.9)


def undiscerning(rate, *, weight_decay, mask):
    return optax.chain(
        optax.add_decayed_weights(weight_decay),
        forgetful(rate, weight_decay=weight_decay, mask=mask),
    )


@pytest.mark.parametrize(
    "make, states, what",
    [
        (forgetful, 1, "weight_decay"), (undiscerning, 1, "mask"),
        (lambda *a, **k: optax.adam(1e-3), 1, "STATES=1 must be 2"),
        (lambda *a, **k: None, 0, "None"),
    ],
)  # fmt: skip
def test_what_says_one_thing_and_does_another_is_refused(make, states, what, monkeypatch):
    module = SimpleNamespace(STATES=states, DEFAULTS={}, make=make)
    monkeypatch.setattr("mtx.step.optimizer.optimizer_module", lambda name: module)
    check_optimizer.cache_clear()
    with pytest.raises(UserError) as error:
        make_optimizer(OptimizerConfig(), 10, {"layers": {"w": "matrix"}})
    assert names(error, "'adamw'", what)
    check_optimizer.cache_clear()


@pytest.mark.parametrize(
    "text",
    [
        "def make(rate, *, weight_decay): ...", "def make(rate, *, eps, weight_decay, mask): ...",
        "DEFAULTS = {'eps': 1e-8}\ndef make(rate, *, eps, weight_decay, mask): ...",
    ],
)  # fmt: skip
def test_make_takes_the_options_that_a_file_has(text, tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_text(f"STATES, DEFAULTS = 1, {{}}\n{text}\n")
    monkeypatch.setattr(optimizers, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "mtx.optimizers.odd", raising=False)
    with pytest.raises(UserError) as error:
        optimizers.optimizer_module("odd")
    assert names(error, tmp_path / "odd.py", "mask", "epsilon")


def test_a_file_that_leaves_something_out_is_named(tmp_path, monkeypatch):
    (tmp_path / "nothing.py").write_text("STATES = 1\n")
    monkeypatch.setattr(optimizers, "__path__", [str(tmp_path)])
    with pytest.raises(UserError) as error:
        optimizers.optimizer_module("nothing")
    assert names(error, tmp_path / "nothing.py", "DEFAULTS", "make")


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_each_file_says_what_it_keeps(name):
    module = optimizers.optimizer_module(name)
    made = module.make(1e-3, weight_decay=0.1, mask=None, **module.DEFAULTS)
    params = {"layers": {"w": jax.ShapeDtypeStruct((2, 3), "float32")}}
    assert len(state_arrays(jax.eval_shape(made.init, params))) == module.STATES
    RunConfig(model=MODEL, optimizer=OptimizerConfig(name=name))


@pytest.mark.parametrize(
    "values, name",
    [
        ({"name": "adam"}, "adamw"),
        ({"rest": "liom"}, "lion"),
        ({"name": "lion", "epsilon": 1e-8}, "epsilon=1e-08"),
        ({"rest_lr": 1e-3}, "rest_lr=0.001"),
        ({"rest": "adamw", "rest_lr": -1.0}, "rest_lr=-1.0"),
    ],
)
def test_what_does_not_go_together_is_refused(values, name):
    with pytest.raises(UserError) as error:
        OptimizerConfig(**values)
    assert names(error, name)


@pytest.mark.parametrize("config", [OptimizerConfig(), LION, MIXED], ids=["adamw", "lion", "both"])
def test_the_planner_knows_the_bytes_of_the_state(config):
    layout = Layout(pipe=2, tensor=2)
    trainer = trainer_on(layout, config)
    shapes, specs = trainer.states.shapes, trainer.states.specs
    shards = jax.tree.leaves(
        jax.tree.map(
            lambda a, sharding: 4 * np.prod(sharding.shard_shape(a.shape)),
            [shapes.params, list(state_arrays(shapes.moments).values())],
            trainer.shardings([specs.params, list(state_arrays(specs.moments).values())]),
        )
    )
    memory = predict_memory(MODEL, layout, 12, optimizer=config)
    assert memory.optimizer_bytes == sum(shards)
