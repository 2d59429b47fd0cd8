"""Every schedule gives the loss and the gradients of the unsharded reference: from makers, random
or written by a user, with every option of a layout. The test's id seeds the random choices."""

import dataclasses
import functools
from random import Random

import jax
import numpy as np
import pytest
import reference
from errors import names
from parameters import params_of

import mtx
from mtx.config import Layout, ModelConfig
from mtx.errors import UserError
from mtx.schedules.makers import MAKERS
from mtx.schedules.orders import B, F, Orders, W
from mtx.schedules.schedule import Schedule, looped_placement, vee_placement
from mtx.view.schedule import show, timeline_text

SMALL = dict(layers=8, hidden=32, heads=8, sequence=16, vocab=101, vocab_multiple=8)
TIED = ModelConfig(**SMALL, compute_dtype="float32")
UNTIED = ModelConfig(**SMALL, compute_dtype="float32", tied=False)
DROPOUT = ModelConfig(**SMALL, compute_dtype="float32", dropout=0.1)
ROWS = 24  # the largest of any case


batch_of = reference.random_batch


@functools.cache
def unsharded(model):
    return mtx.trainer_for(model, Layout(microbatch=ROWS), global_batch=ROWS)


@functools.cache
def wanted(model, rows):
    """(loss, gradients); all cases of a model share one compiled reference"""
    batch, params = reference.padded(batch_of(model, rows), ROWS), params_of(model)
    if model.dropout:
        trainer = unsharded(model)
        return trainer.loss_and_gradients_of(trainer.masters_from(params), batch)
    return jax.device_get(reference.loss_and_gradients(params, batch))


def check(model, layout, microbatches, *, schedule=None, **tolerance):
    rows = microbatches * layout.data * layout.microbatch
    got = mtx.loss_and_gradients(
        model, layout, batch_of(model, rows), params=params_of(model), schedule=schedule
    )
    reference.assert_same(got, wanted(model, rows), **tolerance)


# -- drawn at random -------------------------------------------------------------------------------

MESHES = [(1, 1, 2), (1, 3, 1), (1, 4, 2), (1, 8, 1), (2, 2, 2), (2, 4, 1), (3, 2, 1), (4, 2, 1)]
KEPT = [
    ("residuals", "none"),
    ("residuals", "selective"),
    ("residuals", "full"),
    ("inputs", "none"),
]


def drawn(random, *, virtual, slices, pipe=None):
    """(model, layout without a schedule, microbatches)"""
    data, stages, tensor = random.choice([mesh for mesh in MESHES if pipe in (None, mesh[1])])
    stash, recompute = random.choice(KEPT)
    layout = Layout(
        data=data, pipe=stages, tensor=tensor, virtual=virtual, slices=slices,
        microbatch=random.choice((1, 1, 2)) if data == 1 else 1,
        sequence_parallel=random.random() < 0.6, idle=random.choice(("skip", "phases")),
        stash=stash, recompute=recompute, zero=random.choice((1, 3)) if data > 1 else 1,
        stage_layers=drawn_layers(random, stages * virtual), schedule="seq1f1b",
    )  # fmt: skip
    most = min(8, ROWS // (layout.data * layout.microbatch))
    return random.choice((TIED, UNTIED, DROPOUT)), layout, random.randint(1, most)


def drawn_layers(random, virtual_stages):
    if TIED.layers % virtual_stages == 0 and random.random() < 0.5:
        return "even"
    held = [random.randrange(virtual_stages) for _ in range(TIED.layers)]
    return tuple(held.count(virtual_stage) for virtual_stage in range(virtual_stages))


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_gradients_under_every_maker_equal_the_reference(name):
    random, maker = Random(name), MAKERS[name]
    model, layout, microbatches = drawn(
        random,
        virtual=maker.virtual or random.choice((1, 2, 3)),
        slices=random.choice((2, 4)) if maker.sliced else 1,
    )
    layout = dataclasses.replace(layout, schedule=name)
    check(model, layout, microbatches)


def needs(kind, item, virtual_stage, *, last, slices):
    """Ops that an op waits for, each as ((kind, item, virtual stage), ticks from it to this)."""
    if kind == W:
        return [((B, item, virtual_stage), 0)]
    if kind == F:
        return [
            *[((F, item, virtual_stage - 1), 1)] * (virtual_stage > 0),
            *[((F, item - 1, virtual_stage), 1)] * (item % slices > 0),
        ]
    return [
        ((F, item, virtual_stage), 0),
        *[((B, item, virtual_stage + 1), 1)] * (virtual_stage < last),
        *[((B, item + 1, virtual_stage), 1)] * ((item + 1) % slices > 0),
    ]


def random_table(random, *, microbatches, virtual_stages, slices, split):
    """A random legal table: in each tick a stage picks ready ops at random, or stays idle."""
    items, kinds = range(microbatches * slices), (F, B, W) if split else (F, B)
    last, done, tick = int(virtual_stages.max()), {}, 0

    def ready(op):
        return op not in done and all(
            done.get(other, tick + 1) + wait <= tick
            for other, wait in needs(*op, last=last, slices=slices)
        )

    while len(done) < len(kinds) * len(items) * virtual_stages.size:
        for stage in range(virtual_stages.shape[1]):
            for kind in kinds:
                ops = [
                    (kind, item, virtual_stage)
                    for item in items
                    for virtual_stage in virtual_stages[:, stage].tolist()
                ]
                choices = [op for op in ops if ready(op)]
                if choices and random.random() < 0.7:
                    done[random.choice(choices)] = tick
        tick += 1
    tables = [
        np.array(
            [
                [[done[kind, item, k] for k in row] for row in virtual_stages.tolist()]
                for item in items
            ]
        )
        for kind in kinds
    ]
    return Schedule.from_ticks("random", *tables, virtual_stages=virtual_stages, slices=slices)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_under_random_tables_equal_the_reference(seed):
    random = Random(seed)
    virtual, slices, split = random.choice((1, 2, 3)), random.choice((1, 1, 2, 4)), seed % 2 == 0
    model, layout, microbatches = drawn(random, virtual=virtual, slices=slices)
    stages = layout.pipe
    anywhere = random.sample(range(stages * virtual), stages * virtual)
    virtual_stages = [
        looped_placement(stages, virtual),
        vee_placement(stages, virtual),
        np.reshape(anywhere, (virtual, stages)),
    ][seed % 3]
    table = random_table(
        random, microbatches=microbatches, virtual_stages=virtual_stages, slices=slices, split=split
    )
    check(model, layout, microbatches, schedule=table)


# -- one by one ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [
        # F and B both stop for some ticks in which values arrive that a later tick uses.
        (Layout(pipe=2, virtual=2, schedule="v_min", idle="phases"), 5),
        (Layout(pipe=2, virtual=2, schedule="dualpipe_v", idle="phases"), 3),
    ],
    ids=["F", "B"],
)
def test_what_arrives_between_phases_is_kept(layout, microbatches):
    check(TIED, layout, microbatches)


def test_idle_ops_add_nothing_whatever_they_compute():
    """One head's scores differ so much that the probabilities of one microbatch overflow if normed
    by another's; an idle B of a sliced table that is not skipped meets such a pair. The head's
    values are 0, so that no correct result depends on the size of its scores."""
    params = jax.tree.map(np.copy, params_of(TIED))
    qkv_LD3NK = params["layers"]["block"]["attention"]["qkv"]["w"]
    qkv_LD3NK[:, :, :2, 0] *= 100
    qkv_LD3NK[:, :, 2, 0] = 0
    batch = batch_of(TIED, 4)
    layout = Layout(pipe=2, slices=4, schedule="seq1f1b", idle="phases")
    got = mtx.loss_and_gradients(TIED, layout, batch, params=params)
    reference.assert_same(got, jax.device_get(reference.loss_and_gradients(params, batch)))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipe=2, tensor=2, slices=4, schedule="seq1f1b"),
        Layout(pipe=2, tensor=4, slices=2, schedule="terapipe", sequence_parallel=False),
        Layout(pipe=2, virtual=2, slices=2, schedule="seq1f1b", stash="inputs", microbatch=2),
    ],
    ids=["sequence parallel", "tensor parallel", "inputs"],
)
def test_dropout_masks_do_not_depend_on_the_slices(layout):
    check(DROPOUT, layout, 3)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipe=4, tensor=2, virtual=2, schedule="zb_v"),
        Layout(data=2, pipe=2, tensor=2, slices=4, schedule="seq1f1b"),
        Layout(data=3, pipe=2, virtual=2, zero=3, schedule="breadth_first", idle="phases"),
    ],
    ids=["vee", "sliced", "sharded over data"],
)
def test_evaluation_gives_the_loss_of_the_reference(layout):
    rows = 4 * layout.data
    trainer = mtx.trainer_for(UNTIED, layout, global_batch=rows)
    batch = trainer.place(batch_of(UNTIED, rows))
    total, weight = trainer.evaluate(trainer.state_from(params_of(UNTIED)), batch)
    assert float(total / weight) == pytest.approx(float(wanted(UNTIED, rows)[0]), rel=1e-6)


BREADTH_FIRST = Layout(data=2, pipe=2, tensor=2, virtual=2, zero=3, schedule="breadth_first")


@pytest.mark.parametrize(
    ("layout", "unit"),
    [
        (BREADTH_FIRST, "layer"),
        (BREADTH_FIRST, "chunk"),
        (Layout(data=3, pipe=2, virtual=2, zero=3, schedule="gpipe", idle="phases"), "layer"),
        (Layout(data=4, pipe=2, zero=3, schedule="zb_h2", recompute="full"), "chunk"),
        (Layout(data=2, pipe=4, virtual=2, zero=3, schedule="zb_v", stash="inputs"), "layer"),
        (Layout(data=2, pipe=2, tensor=2, slices=2, zero=3, schedule="terapipe"), "layer"),
        # A row layer's bias has no dim that 3 divides, and none that 8 x 4 leave free.
        (Layout(data=4, tensor=2, virtual=3, zero=3, stage_layers=(1, 0, 7)), "chunk"),
    ],
    ids=["by the layer", "by the chunk", "padded", "split", "vee", "sliced", "one stage"],
)
def test_gradients_with_parameters_sharded_over_data_equal_the_reference(layout, unit):
    check(UNTIED, dataclasses.replace(layout, zero_unit=unit), 3)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipe=4, tensor=2, schedule="zb_h1"),
        Layout(pipe=2, tensor=2, data=2, slices=2, schedule="seq1f1b"),
        Layout(pipe=2, data=4, virtual=2, zero=3, schedule="breadth_first"),
    ],
    ids=["split", "sliced", "sharded over data"],
)
def test_gradients_in_bfloat16_are_near_the_reference(layout):
    """Rounding errors are 2^-9 of each value, and a gradient sums many; measured: below 1 %."""
    check(ModelConfig(**SMALL), layout, 4, loss=2e-3, gradient=0.03)


# -- a user's own ----------------------------------------------------------------------------------


def toy(microbatches, stages):
    """Pairs: each stage runs two F, their two B, and only then the two W."""
    lists = []
    for stage in range(stages):
        ahead = 2 * (stages - stage)  # microbatches in flight
        ops = [(F, i, 0) for i in range(min(ahead, microbatches))]
        for first in range(0, microbatches, 2):
            pair = range(first, min(first + 2, microbatches))
            ops += [(B, i, 0) for i in pair]
            ops += [(F, i + ahead, 0) for i in pair if i + ahead < microbatches]
            ops += [(W, i, 0) for i in pair]
        lists.append(ops)
    return Schedule.from_orders("pairs", Orders.from_lists(lists))


def test_a_toy_schedule_of_ones_own_draws_and_trains_with_the_same_gradients():
    table = toy(microbatches=6, stages=4)
    assert table.split and table.in_flight.max() == 6
    assert table.in_flight.tolist() == [6, 6, 4, 2]
    assert len(timeline_text(table).splitlines()) >= 4
    assert show(table).svg().startswith("<svg")
    check(TIED, Layout(pipe=4, tensor=2), 6, schedule=table)
    trainer = mtx.trainer_for(TIED, Layout(pipe=4, tensor=2), global_batch=6, schedule=table)
    state = trainer.state_from(params_of(TIED))
    _, metrics = trainer.train_step(state, trainer.place(batch_of(TIED, 6)))
    assert float(metrics.loss) == pytest.approx(float(wanted(TIED, 6)[0]), rel=1e-6)


def test_a_table_of_another_shape_is_refused():
    with pytest.raises(UserError) as error:
        mtx.trainer_for(TIED, Layout(pipe=2), global_batch=6, schedule=toy(6, 4))
    assert names(error, 4, 2)
