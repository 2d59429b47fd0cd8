"""A peer for the benchmark: JaxPP's pipelines (MPMD) on preset `bench-s`, on the CPU.

    python experiments/peers/jaxpp_pipeline.py --schedule zero_bubble --steps 8

One process with a virtual device a stage trains our GPT with `jaxpp.treduce`; JaxPP compiles each
stage's forward and backward as programs of their own, and sends by copies between the devices.
Its options are those of torch_pipeline.py that concern the schedule and the steps; it prints a line
of JSON with the same fields, and `jax`, the version.

Written for JaxPP's commit cdadca7 (github.com/NVIDIA/jaxpp), and run with jax 0.8.1, which is
older than ours: hence an interpreter of its own, with optax and numpy. It ran with jax 0.10.2,
too, and gave the same losses, on a copy whose uses of JAX's internals were brought up to date. Of
mtx it imports the configs alone, which need no JAX. What differs from ours: the output layer is
untied and lies on the last stage, the learning rate is constant. What is the same: attention takes
the queries in blocks, and activations are matrices, without which XLA transposes them for every
weight gradient. Exit codes: 1 it failed, 2 wrong arguments, 3 no JaxPP.

Shape letters: B rows · S sequence · R rows of a block · T keys · D hidden · H heads · K head size ·
V vocabulary · M rows x sequence.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
import types
from dataclasses import replace
from functools import partial

from mtx.config import ModelConfig, OptimizerConfig, RunConfig
from mtx.presets import preset

if importlib.util.find_spec("cupy") is None:
    # JaxPP imports it for sends between processes. One process makes none: empty modules do.
    sys.modules["cupy"] = types.ModuleType("cupy")
    sys.modules["cupy.cuda"] = types.ModuleType("cupy.cuda")
    sys.modules["cupy.cuda"].nccl = types.ModuleType("cupy.cuda.nccl")

try:
    import jax
    import jax.numpy as jnp
    import jaxpp.api as jaxpp
    import numpy as np
    import optax
except ModuleNotFoundError as error:
    if __name__ != "__main__" or error.name not in ("jax", "jaxpp", "optax"):
        raise
    print("needs JaxPP (github.com/NVIDIA/jaxpp), with a JAX that it supports", file=sys.stderr)
    sys.exit(3)

CHUNKS = {"1f1b": 1, "eager": 1, "zero_bubble": 1, "interleaved": 2, "dualpipev": 2}  # a stage
_BLOCK = 64  # queries
_SEED = 0


def _normalize(x_MD, scale_D, shift_D, epsilon: float):
    centered_MD = x_MD - x_MD.mean(-1, keepdims=True)
    variance_M1 = (centered_MD**2).mean(-1, keepdims=True)
    return centered_MD * jax.lax.rsqrt(variance_M1 + epsilon) * scale_D + shift_D


def _attend(q_BSHK, k_BSHK, v_BSHK):
    """Causal, [B, S, H, K]: the keys of a block of queries end with the block."""
    q_BHSK, k_BHSK, v_BHSK = (x.transpose(0, 2, 1, 3) for x in (q_BSHK, k_BSHK, v_BSHK))
    blocks = []
    for start in range(0, q_BHSK.shape[2], _BLOCK):
        stop = start + _BLOCK
        scores_BHRT = jnp.einsum("bhrk,bhtk->bhrt", q_BHSK[:, :, start:stop], k_BHSK[:, :, :stop])
        seen_RT = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
        scores_BHRT = jnp.where(seen_RT, scores_BHRT * q_BHSK.shape[-1] ** -0.5, -1e30)
        probabilities_BHRT = jax.nn.softmax(scores_BHRT)
        blocks.append(jnp.einsum("bhrt,bhtk->bhrk", probabilities_BHRT, v_BHSK[:, :, :stop]))
    return jnp.concatenate(blocks, axis=2).transpose(0, 2, 1, 3)


def _layer(x_MD, weights: dict, model: ModelConfig):
    y_MD = _normalize(x_MD, *weights["norm1"], model.norm_epsilon)
    qkv_M3D = y_MD @ weights["qkv"] + weights["qkv_bias"]
    heads = (-1, model.sequence, model.heads, model.hidden // model.heads)
    attended = _attend(*(part.reshape(heads) for part in jnp.split(qkv_M3D, 3, axis=-1)))
    x_MD += attended.reshape(x_MD.shape) @ weights["out"] + weights["out_bias"]
    y_MD = _normalize(x_MD, *weights["norm2"], model.norm_epsilon)
    hidden = jax.nn.gelu(y_MD @ weights["up"] + weights["up_bias"])
    return x_MD + hidden @ weights["down"] + weights["down_bias"]


def make_params(key, model: ModelConfig) -> dict:
    hidden, ffn = model.hidden, model.ffn_hidden
    keys = iter(jax.random.split(key, 3 + 4 * model.layers))

    def matrix(*shape, std=model.init_std):
        return std * jax.random.normal(next(keys), shape)

    def norm():
        return jnp.ones(hidden), jnp.zeros(hidden)

    def layer():
        last = model.init_std * (2 * model.layers) ** -0.5
        return {
            "norm1": norm(), "qkv": matrix(hidden, 3 * hidden), "qkv_bias": jnp.zeros(3 * hidden),
            "out": matrix(hidden, hidden, std=last), "out_bias": jnp.zeros(hidden),
            "norm2": norm(), "up": matrix(hidden, ffn), "up_bias": jnp.zeros(ffn),
            "down": matrix(ffn, hidden, std=last), "down_bias": jnp.zeros(hidden),
        }  # fmt: skip

    return {
        "embedding": matrix(model.vocab, hidden), "positions": matrix(model.sequence, hidden),
        "layers": [layer() for _ in range(model.layers)],
        "norm": norm(), "head": matrix(hidden, model.vocab),
    }  # fmt: skip


def loss_of(params: dict, batch: tuple, *, model: ModelConfig, chunks: int, microbatches: int):
    """A microbatch's part of the mean loss; `batch` is tokens and targets, [B, S] each."""
    tokens_BS, targets_BS = batch
    x_BSD = params["embedding"][tokens_BS] + params["positions"]
    x_MD = x_BSD.reshape(-1, model.hidden)
    for number, weights in enumerate(params["layers"]):
        if number and number % (model.layers // chunks) == 0:
            x_MD = jaxpp.pipeline_enter_stage(x_MD)
        x_MD = _layer(x_MD, weights, model)
    logits_MV = _normalize(x_MD, *params["norm"], model.norm_epsilon) @ params["head"]
    losses_M = optax.softmax_cross_entropy_with_integer_labels(logits_MV, targets_BS.reshape(-1))
    return jaxpp.pipeline_enter_stage(losses_M.mean() / microbatches)


def make_schedule(name: str, stages: int):
    if name in ("interleaved", "dualpipev"):
        make = {"interleaved": jaxpp.Interleaved1F1B, "dualpipev": jaxpp.DualPipeV}[name]
        return make(CHUNKS[name] * stages, stages)
    flat = {"1f1b": jaxpp.Std1F1B, "eager": jaxpp.Eager1F1B, "zero_bubble": jaxpp.ZeroBubble}
    return flat[name](stages)


def make_step(run: RunConfig, schedule: str, optimizer):
    """JaxPP's training step: (params, optimizer's state, batch) -> the same two, and the losses."""
    stages = run.layout.pipe
    devices = np.array(jax.devices()[:stages]).reshape(stages, 1)
    mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(devices, ("pipe", "data")), "pipe")
    loss = partial(
        loss_of, model=run.model, chunks=CHUNKS[schedule] * stages, microbatches=run.microbatches
    )

    @partial(jaxpp.mpmd_jit_with_loop, mpmd_mesh=mesh, donate_argnums=(0, 1))
    def step(params, state, batch):
        losses, gradients = jaxpp.treduce(
            partial(jax.value_and_grad(loss), params), batch,
            schedule=make_schedule(schedule, stages),
        )  # fmt: skip
        squares = [(gradient**2).sum() for gradient in jax.tree.leaves(gradients)]
        norm = jnp.sqrt(jaxpp.cross_mpmd_all_reduce(*squares))  # over the stages
        scale = jnp.minimum(1.0, run.optimizer.clip / norm)
        gradients = jax.tree.map(lambda gradient: gradient * scale, gradients)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, losses

    return step


def make_optimizer(config: OptimizerConfig):
    how = config.hyperparameters("adamw")
    return optax.adamw(
        config.lr, b1=how["b1"], b2=how["b2"], eps=how["epsilon"], weight_decay=config.weight_decay
    )


def make_batch(run: RunConfig) -> tuple:
    """Random and fixed: tokens and targets, [m, B, S] each."""
    rows = run.global_batch // run.microbatches
    shape = (run.microbatches, rows, run.model.sequence + 1)
    tokens = np.random.default_rng(_SEED).integers(run.model.vocab, size=shape, dtype=np.int32)
    return jnp.asarray(tokens[..., :-1]), jnp.asarray(tokens[..., 1:])


def train(run: RunConfig, schedule: str, steps: int) -> tuple[list[float], list[float]]:
    """Seconds and mean loss of each step."""
    optimizer = make_optimizer(run.optimizer)
    params = jax.jit(partial(make_params, model=run.model))(jax.random.key(_SEED))
    state = jax.jit(optimizer.init)(params)
    step, batch = make_step(run, schedule, optimizer), make_batch(run)
    step_s, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        params, state, parts = step(params, state, batch)
        arrays = [array.to_mpmd_local_array for array in jax.tree.leaves((params, state, parts))]
        jax.block_until_ready(arrays)
        step_s.append(time.perf_counter() - start)
        losses.append(float(np.sum(parts.to_mpmd_local_array)))
    return step_s, losses


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schedule", choices=tuple(CHUNKS), default="1f1b")
    parser.add_argument("--stages", type=int, default=4, help="virtual devices of the pipeline")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones")
    options = parser.parse_args()
    layers = preset("bench-s").model.layers
    chunks = CHUNKS[options.schedule] * options.stages
    if options.stages < 2 or layers % chunks:
        parser.error(f"--stages {options.stages}: {layers} layers in {chunks} chunks")
    if options.steps < 1 or options.warmup < 0:
        parser.error("--steps must be at least 1, --warmup 0")
    return options


def main() -> None:
    options = parse_arguments()
    devices = f"--xla_force_host_platform_device_count={options.stages}"  # read at the first use
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip()
    run = preset("bench-s")
    run = replace(run, layout=replace(run.layout, pipe=options.stages))
    step_s, losses = train(run, options.schedule, options.warmup + options.steps)
    timed_s = [round(seconds, 4) for seconds in step_s[options.warmup :]]
    print(json.dumps({
        "trainer": f"JaxPP {options.schedule}", "jax": jax.__version__,
        "processes": 1, "threads": len(os.sched_getaffinity(0)),
        "step_s": timed_s, "median_s": statistics.median(timed_s),
        "loss_first": losses[0], "loss_last": losses[-1],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
