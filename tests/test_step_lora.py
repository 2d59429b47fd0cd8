"""Adapters beside frozen weights: loss and gradients equal those of an unsharded reference whose
weights are W + scale A B, and nothing is computed or kept for frozen weights."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_llama
from errors import names
from parameters import params_of as drawn_of

import mtx
from mtx.api import trainer_for
from mtx.checkpoint.checkpoints import Checkpoints
from mtx.config import Layout, ModelConfig
from mtx.conversion.checkpoint import SavedParameters, canonical_shapes
from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError
from mtx.layers.model import Model
from mtx.plan.memory import predict_memory
from mtx.sharding.axes import axes_of
from mtx.step.optimizer import state_arrays

GPT = ModelConfig(
    layers=4, hidden=32, heads=4, sequence=16, vocab=101, compute_dtype="float32", vocab_multiple=8,
    lora_rank=3, lora_alpha=6.0,
)  # fmt: skip
LLAMA = ModelConfig(
    family="llama", layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, sequence=16, vocab=101,
    compute_dtype="float32", vocab_multiple=8, lora_rank=3, lora_alpha=6.0,
)  # fmt: skip
ATTENTION = replace(LLAMA, lora_on=("attention",))
ROWS = 8


@functools.cache
def params_of(model):
    """The parameters that training starts from, except that no B is zero."""
    params = drawn_of(model)
    random = np.random.default_rng(1)

    def moved(path, a):
        is_b = "_lora" in str(path) and path[-1].key == "b"
        return random.normal(0.0, 0.02, a.shape).astype(np.float32) if is_b else a

    return jax.tree.map_with_path(moved, params)


def merged(params, scale):
    """W + scale A B in place of W, and no adapters."""
    found = {}
    for name, value in params.items():
        if name.endswith("_lora"):
            continue
        found[name] = merged(value, scale) if isinstance(value, dict) else value
        if f"{name}_lora" in params:
            a, b = params[f"{name}_lora"]["a"], params[f"{name}_lora"]["b"]
            product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))
            found[name] = value + scale * product(a, b)
    return found


@functools.cache
def reference_of(model):
    """(loss, gradients of the adapters)"""
    loss = reference.loss if model.family == "gpt" else functools.partial(llama_loss, model)
    params = params_of(model)
    of = functools.partial(run, loss, model.lora_alpha / model.lora_rank)
    found, gradients = jax.jit(jax.value_and_grad(of))(params, batch_of(model))
    return jax.device_get((found, only_adapters(gradients)))


def run(loss, scale, params, batch):
    return loss(merged(params, scale), batch)


def llama_loss(model, params, batch):
    turning = reference_llama.frequencies(model.head_size, model.rotary_base)
    return reference_llama.loss(params, batch, turning)


def only_adapters(tree):
    found = {
        k: only_adapters(v) for k, v in tree.items() if isinstance(v, dict) and k[-5:] != "_lora"
    }
    return found | {k: v for k, v in tree.items() if k.endswith("_lora")}


def batch_of(model):
    return reference.random_batch(model, ROWS)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (GPT, Layout(data=2, pipe=2, tensor=2, virtual=2, microbatch=2)),
        (LLAMA, Layout(data=2, pipe=2, tensor=2, virtual=2, recompute="selective")),
        (ATTENTION, Layout(data=2, pipe=2, tensor=2, zero=3, recompute="full", virtual=2)),
        (LLAMA, Layout(pipe=2, tensor=4, sequence_parallel=False, stash="inputs")),  # heads repeat
        (LLAMA, Layout(data=4, pipe=2, zero=3, zero_unit="layer", schedule="zb_h1")),
        (LLAMA, Layout(pipe=2, tensor=2, virtual=2, data=2, weave="on", idle="phases")),
    ],
)  # fmt: skip
def test_gradients_equal_the_reference(model, layout):
    got = mtx.loss_and_gradients(model, layout, batch_of(model), params=params_of(model))
    reference.assert_same(got, reference_of(model))


BF16 = replace(LLAMA, compute_dtype="bfloat16")


@functools.cache
def stepped(layout):
    """(trainer, the first state, the next) of adapters in bfloat16; states on the host"""
    trainer = trainer_for(BF16, layout, global_batch=ROWS)
    first = trainer.state_from(drawn_of(BF16))
    on_host = jax.device_get(first)
    state, metrics = trainer.train_step(first, trainer.place(batch_of(BF16)))
    assert float(metrics.finite) == 1
    return trainer, on_host, state


def test_a_step_moves_adapters_alone():
    trainer, first, state = stepped(Layout(data=2, pipe=2, tensor=2))
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), first.params, state.params)
    assert moved == trainer.model.trained
    specs = trainer.states.specs.params
    for (path, a), spec in zip(jax.tree.leaves_with_path(first.params), jax.tree.leaves(specs)):
        is_adapter = "_lora" in str(path)
        assert a.dtype == ("float32" if is_adapter else "bfloat16")
        assert ("data" in str(spec)) == is_adapter  # frozen weights are not gathered in each step
    assert {path.split(".")[-2][-5:] for path in state_arrays(state.moments)} == {"_lora"}


def test_the_planners_bytes_are_the_arrays_own():
    trainer, *_ = stepped(Layout(data=2, pipe=2, tensor=2))
    states, sizes, held = trainer.states, trainer.run.layout.sizes, {}
    for name in ("params", "moments"):
        leaves = jax.tree.leaves(getattr(states.shapes, name))
        for a, spec in zip(leaves, jax.tree.leaves(getattr(states.specs, name))):
            shards = math.prod(sizes[axis] for axis in axes_of(spec))
            key = name, a.dtype.name if a.ndim else "count"
            held[key] = held.get(key, 0) + a.size // shards * a.dtype.itemsize
    adapters = 2 * held["params", "float32"] // 4  # over both replicas
    memory = predict_memory(BF16, trainer.run.layout, ROWS)
    assert memory.parameters_bytes == held["params", "bfloat16"] + 2 * adapters
    assert memory.optimizer_bytes == held["params", "float32"] + held["moments", "float32"]
    assert memory.gradients_bytes == 4 * adapters


def test_the_first_step_is_the_frozen_models():
    layout, batch = Layout(pipe=2, tensor=2, virtual=2), batch_of(BF16)
    with_adapters, alone = (
        mtx.loss_and_gradients(model, layout, batch)[0] for model in (BF16, BF16.merged())
    )
    assert float(with_adapters) == float(alone)


def test_a_checkpoint_is_restored_on_another_layout_and_merged(tmp_path):
    _, _, state = stepped(Layout(data=2, pipe=2, tensor=2))
    trainer, *_ = stepped(Layout(data=2, pipe=2, tensor=2))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(trainer, state, tokenizer=ByteTokenizer())
    checkpoints.wait()
    checkpoints.look()
    other = trainer_for(BF16, Layout(data=4, zero=3), global_batch=ROWS)
    restored = checkpoints.restore(other)
    want, got = (
        each.to_canonical(jax.device_get(of.params))
        for each, of in ((trainer, state), (other, restored))
    )
    assert jax.tree.all(jax.tree.map(np.array_equal, want, got))
    with checkpoints.open() as store:
        found = SavedParameters(store, BF16)
        found.expect(canonical_shapes(BF16.merged()))
        w = found.read("layers.block.attention.out.w", (slice(1, 3),))
    out = jax.tree.map(np.float32, got["layers"]["block"]["attention"]["out"])
    a, b = out["w_lora"]["a"], out["w_lora"]["b"]
    product = np.einsum("lhkr,lrd->lhkd", a, b)[1:3]
    np.testing.assert_allclose(w, out["w"][1:3] + 2.0 * product, rtol=1e-6, atol=1e-9)
    assert np.abs(product).max() > 0
    with pytest.raises(UserError) as error:
        checkpoints.restore(trainer_for(BF16.merged(), Layout(), global_batch=1))
    assert names(error, "lora_rank=3 there and 0 here")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_on": ("experts",)}, ("experts", "attention")),
        ({"family": "mixtral"}, ("lora_on=mlp", "lora_on=attention")),
        ({"family": "deepseek_v3", "lora_on": ("attention",)}, ("lora_on=attention",)),
        ({"fp8": "hybrid"}, ("lora_rank=2", "fp8='hybrid'")),
        ({"lora_rank": 0, "lora_alpha": 8.0}, ("lora_alpha=8.0", "lora_rank=0")),
    ],
)
def test_what_takes_no_adapters_is_refused_by_name(changes, said):
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "family": "llama"}
    with pytest.raises(UserError) as error:
        Model(ModelConfig(**sizes | {"lora_rank": 2} | changes))
    assert names(error, *said)
