"""Mixtures of experts on every kind of layout: losses, gradients, counts and states equal those of
an unsharded reference, which runs every token through every expert; nothing is dropped."""

import functools
from dataclasses import dataclass, replace

import jax
import numpy as np
import optax
import pytest
import reference
import reference_experts
import reference_llama
from errors import names
from parameters import params_of as drawn_of
from reference_experts import Rules
from test_step_families import packed

import mtx
from mtx.config import Layout, ModelConfig
from mtx.costs.ask import layer_cost
from mtx.costs.cost import ExpertShards
from mtx.errors import UserError
from mtx.families.mixtral import Mixtral
from mtx.layers.experts import Compute
from mtx.sharding.experts import Way, through_experts
from mtx.sharding.mesh import Axes

MIXTRAL = ModelConfig(
    family="mixtral", layers=4, hidden=32, heads=4, kv_heads=2, ffn=24, sequence=16, vocab=101,
    experts=8, choices=3, tied=False, compute_dtype="float32", vocab_multiple=8, aux_weight=0.2,
    z_weight=0.01,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Grouped(Mixtral):
    """The router of DeepSeek-V3, and a shared expert."""

    rate: float = 0.125

    def router(self, **others):
        return super().router(
            score="sigmoid", groups=4, top_groups=2, scale=2.5, balance_rate=self.rate, **others
        )

    def mixture(self, **others):
        from mtx.layers.mlp import MLP

        shared = MLP(ffn=16, activation="silu", gated=True, bias=False)
        return super().mixture(shared=shared, **others)


def grouped(**changes):
    fields = {name: getattr(MIXTRAL, name) for name in MIXTRAL.__dataclass_fields__}
    return Grouped(**fields | {"aux": "sequence"} | changes)


GROUPED, DROPPING = grouped(), replace(MIXTRAL, capacity=0.75)
LEAST = replace(DROPPING, capacity_keeps="best")
OF_MIXTRAL = Rules(choices=3, aux_weight=0.2, z_weight=0.01)
OF_GROUPED = OF_MIXTRAL._replace(
    score="sigmoid", groups=4, top_groups=2, scale=2.5, balance_rate=0.125, aux="sequence",
    shared=True,
)  # fmt: skip
OF_DROPPING = OF_MIXTRAL._replace(capacity=0.75)
RULES = {
    MIXTRAL: OF_MIXTRAL, GROUPED: OF_GROUPED, DROPPING: OF_DROPPING,
    LEAST: OF_DROPPING._replace(keeps="best"),
}  # fmt: skip
FREQUENCY = reference_llama.frequencies(MIXTRAL.head_size, MIXTRAL.rotary_base)


def uneven(params, seed=1):
    """Parameters with routers that prefer some experts, and with states as in a run."""
    random = np.random.default_rng(seed)
    router = params["layers"]["block"]["mlp"]["router"]
    router["w"] = 20 * router["w"]
    for name, most in {"load": 50, "balance": 0.3}.items():
        if name in router:
            router[name] = random.uniform(0, most, router[name].shape).astype(np.float32)
    return params


@functools.cache
def params_of(model):
    return uneven(jax.tree.map(np.copy, drawn_of(model)))


@functools.cache
def made(model, pack=False):
    batch = reference.random_batch(model, 8)
    batch = packed(batch) if pack else batch
    of_reference = jax.jit(
        functools.partial(reference_experts.loss_and_gradients, rules=RULES[model])
    )
    return batch, jax.device_get(of_reference(params_of(model), batch, FREQUENCY))


def check(model, layout, pack=False):
    batch, want = made(model, pack)
    got = mtx.loss_and_gradients(model, layout, batch, params=params_of(model))
    reference.assert_same(got, want)
    router = (each[1]["layers"]["block"]["mlp"]["router"] for each in (got, want))
    for ours, theirs in zip(*(r.items() for r in router)):
        if ours[0] in ("load", "balance"):
            np.testing.assert_array_equal(ours[1], theirs[1])


@pytest.mark.parametrize(
    "model, layout",
    [
        (MIXTRAL, Layout(microbatch=8, expert_room=0.25)),  # six rounds and more
        (MIXTRAL, Layout(expert=8)),
        (MIXTRAL, Layout(expert=2, pipe=2, virtual=2, tensor=2, expert_room=0.5, recompute="full")),
        (MIXTRAL, Layout(expert=4, tensor=2, sequence_parallel=False, expert_dispatch="gathered")),
        (GROUPED, Layout(expert=2, tensor=2, data=2, expert_tensor=False, zero=3)),
        (GROUPED, Layout(expert=2, pipe=2, context=2, microbatch=2, schedule="zb_h1")),
        (GROUPED, Layout(expert=2, pipe=2, tensor=2, virtual=2, idle="phases", weave="on")),
        (DROPPING, Layout(expert=2, tensor=2, context=2, microbatch=2)),
        (LEAST, Layout(expert=2, tensor=2, context=2, microbatch=2)),
    ],
)  # fmt: skip
def test_experts_equal_the_reference(model, layout):
    check(model, layout)


def test_packed_documents_route_as_any_others():
    check(GROUPED, Layout(expert=2, context=2, tensor=2, expert_tensor=False), pack=True)


def train(model, layout, steps, batches):
    run = mtx.RunConfig(
        model=model, layout=layout, global_batch=8, steps=steps,
        optimizer=mtx.OptimizerConfig(lr=1e-3, warmup_steps=0),
    )  # fmt: skip
    trainer = mtx.Trainer(run)
    state, found = trainer.state_from(drawn_of(model)), []
    for batch in batches:
        state, metrics = trainer.train_step(state, trainer.place(batch))
        found.append(jax.device_get(metrics))
    moments = optax.tree_utils.tree_get(state.moments, "mu")
    params, means = map(trainer.to_canonical, jax.device_get((state.params, moments)))
    for each in ("load", "balance"):  # states have no gradients
        del means["layers"]["block"]["mlp"]["router"][each]
    return found, params, means


@functools.cache
def alone():
    """20 batches, and the results of training on one device."""
    batches = [reference.random_batch(GROUPED, 8, seed) for seed in range(20)]
    return batches, *train(GROUPED, Layout(microbatch=4), 20, batches)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(expert=1, pipe=2, virtual=2, tensor=2, context=2, zero=3),
        Layout(expert=2, pipe=2, virtual=2, tensor=2, zero=3),
        Layout(expert=4, context=2, zero=3),
        Layout(expert=8),
    ],
    ids=lambda layout: f"expert-{layout.expert}",
)
def test_all_layouts_train_alike(layout):
    """Loss, auxiliary loss, norm, parameters, means of gradients and states of 20 steps."""
    batches, want, params, means = alone()
    got, same, of_gradients = train(GROUPED, layout, 20, batches)
    for a, b in zip(got, want):
        assert float(a.loss) == pytest.approx(float(b.loss), rel=1e-6)
        assert float(a.aux_loss) == pytest.approx(float(b.aux_loss), rel=1e-5)
        assert float(a.gradient_norm) == pytest.approx(float(b.gradient_norm), rel=1e-5)
    reference.assert_same((got[-1].loss, same), (want[-1].loss, params))
    reference.assert_same((got[-1].loss, of_gradients), (want[-1].loss, means))
    router, alone_s = (each["layers"]["block"]["mlp"]["router"] for each in (same, params))
    for state in ("load", "balance"):
        np.testing.assert_array_equal(router[state], alone_s[state])


def test_states_of_routers_follow_what_was_chosen():
    batches, metrics, params, _ = alone()
    router = params["layers"]["block"]["mlp"]["router"]
    load = metrics[-1].counted["block"]["mlp.router.load"][0, 0]
    np.testing.assert_array_equal(router["load"], load)
    assert load.sum() == 4 * 3 * (batches[-1]["weights"] > 0).sum()
    moved = [m.counted["block"]["mlp.router.balance"][0, 0] for m in metrics]
    moves = [np.sign(counts.mean(-1, keepdims=True) - counts) for counts in moved]
    np.testing.assert_allclose(router["balance"], 0.125 * np.sum(moves, axis=0), atol=1e-6)


@pytest.mark.parametrize("way", ["alltoall", "gathered"])
def test_nothing_is_dropped_where_all_choose_one_expert(way):
    """The worst that a router can do is to send every token to the same experts."""
    params = jax.tree.map(np.array, params_of(MIXTRAL))
    params["layers"]["block"]["mlp"]["router"]["w"][:] = 0  # among equals, the first are chosen
    batch, _ = made(MIXTRAL)
    layout = Layout(expert=4, data=2, expert_room=0.5, expert_dispatch=way)
    got = mtx.loss_and_gradients(MIXTRAL, layout, batch, params=params)
    of_reference = jax.jit(
        functools.partial(reference_experts.loss_and_gradients, rules=OF_MIXTRAL)
    )
    want = jax.device_get(of_reference(params, batch, FREQUENCY))
    reference.assert_same(got, want)
    load = got[1]["layers"]["block"]["mlp"]["router"]["load"]
    assert (load[:, 3:] == 0).all() and (load[:, :3] == (batch["weights"] > 0).sum()).all()


def test_a_further_round_takes_a_quarter_of_the_memory_of_the_first():
    """In arrays by slot [E, C, ...]; so the memory of rounds is bounded, whatever routers do."""
    tokens, hidden, ffn, experts, choices = 640, 8, 24, 4, 2
    axes = Axes.of(Layout(expert_room=1.2))
    way = Way.of(
        Compute("silu", False), experts=experts, tokens=tokens, choices=choices, rows=1, axes=axes
    )
    weights = {"up": np.zeros((experts, hidden, ffn)), "down": np.zeros((experts, ffn, hidden))}
    given = np.zeros((tokens, hidden)), np.zeros((tokens, choices)), np.zeros(
        (tokens, choices), np.int32
    )  # fmt: skip

    def loss(x, gates, ids, weights):
        return through_experts(x, gates, ids, weights, way).sum()

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 3)))(*given, weights)
    rooms: dict[bool, set[int]] = {True: set(), False: set()}
    for shape, in_loop in shapes_of(traced.jaxpr):
        if len(shape) == 3 and shape[0] == experts and shape[2] in (hidden, ffn):
            rooms[in_loop].add(shape[1])
    matrices = {hidden, ffn}
    assert rooms[False] - matrices == {384}  # 1.2 of 640 * 2 / 4
    assert rooms[True] - matrices == {96}


def shapes_of(jaxpr, in_loop=False):
    """(shape, whether it is computed in a loop of unknown length) of every computed array."""
    for eqn in jaxpr.eqns:
        yield from ((v.aval.shape, in_loop) for v in eqn.outvars)
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", None)
            if inner is not None and hasattr(inner, "eqns"):
                yield from shapes_of(inner, in_loop or eqn.primitive.name == "while")


def test_what_is_sent_and_computed_is_the_closed_form():
    """Each token's k choices, times room, go to the experts and back with D elements each and a
    gate; there are no more matmuls than that."""
    model, room = replace(MIXTRAL, sequence=640), 1.2
    how = ExpertShards(expert=4, expert_room=room)
    cost = layer_cost(model, kind="block", experts=how)
    slots = room * 640 * model.choices
    for during, ways in (("F", 2), ("B", 2)):
        sent = [c for c in cost.collectives if (c.kind, c.during) == ("all_to_all", during)]
        assert all(c.axes == ("expert",) for c in sent)
        assert sum(c.bytes.at(1) for c in sent) == 4 * slots * (ways * model.hidden + 1)
    of_experts = [m for m in cost.weights if m.weight.endswith(("mlp.up", "mlp.down"))]
    assert sum(m.flops(1) for m in of_experts) == 2 * slots * 3 * model.hidden * model.ffn
    (least,) = {c.bytes.at(1) for c in cost.collectives if c.kind == "pmax"}
    assert least == 4  # the number of rounds that the fullest expert needs


@pytest.mark.parametrize(
    "layout, values",
    [
        ({"expert": 3}, ("experts=8", "expert=3")),
        ({"expert": 4, "tensor": 4, "expert_tensor": False}, ("experts=8", "expert*tensor=16")),
        (
            {"tensor": 2, "expert_tensor": False, "sequence_parallel": False},
            ("expert_tensor=False", "sequence_parallel=True", "tensor=2"),
        ),
    ],
)
def test_layouts_that_do_not_divide_experts_are_refused(layout, values):
    with pytest.raises(UserError) as error:
        Layout(**layout).check(MIXTRAL)
    assert names(error, *values)


@pytest.mark.parametrize("change", [{"capacity": 1.5}, {"aux": "sequence", "aux_weight": 0.1}])
def test_slices_do_not_count_choices_of_whole_sequences(change):
    layout = Layout(slices=2, schedule="seq1f1b")
    layout.check(replace(MIXTRAL, aux="batch", capacity=None))
    with pytest.raises(UserError) as error:
        layout.check(replace(MIXTRAL, **change))
    assert names(error, "slices=2", "{}={!r}".format(*next(iter(change.items()))))


def test_a_dense_model_has_no_axis_of_experts():
    with pytest.raises(UserError) as error:
        Layout(expert=2, data=2).check(MIXTRAL.of_family("llama"))
    assert names(error, "expert=2", "data=4")
