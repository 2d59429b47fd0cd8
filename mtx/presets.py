"""Named runs: SC'21's table 1, GPT-2 345M, GPT-3 175B, their miniature, and the benchmark's model.

Sources: table 1 of Narayanan et al., SC'21 (arXiv 2104.04473v5), microbatch sizes and virtual
stages from the run scripts its authors published; Shoeybi et al. 2019 for GPT-2 345M.
"""

from __future__ import annotations

from mtx.config import Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.errors import unknown_name

_SC21_VOCAB = 51200
# name: heads, hidden, layers, tensor, pipe, GPUs, global batch, microbatch, virtual
_SC21_TABLE1 = {
    "gpt-1.7b": (24, 2304, 24, 1, 1, 32, 512, 16, 1),
    "gpt-3.6b": (32, 3072, 30, 2, 1, 64, 512, 16, 1),
    "gpt-7.5b": (32, 4096, 36, 4, 1, 128, 512, 16, 1),
    "gpt-18b": (48, 6144, 40, 8, 1, 256, 1024, 8, 1),
    "gpt-39b": (64, 8192, 48, 8, 2, 512, 1536, 4, 1),
    "gpt-76b": (80, 10240, 60, 8, 4, 1024, 1792, 2, 3),
    "gpt-145b": (96, 12288, 80, 8, 8, 1536, 2304, 2, 2),
    "gpt-310b": (128, 16384, 96, 8, 16, 1920, 2160, 1, 2),
    "gpt-530b": (128, 20480, 105, 8, 35, 2520, 2520, 1, 3),
    "gpt-1t": (160, 25600, 128, 8, 64, 3072, 3072, 1, 1),
}
TABLE1 = tuple(_SC21_TABLE1)


def _gpt(
    *, heads, hidden, layers, tensor=1, pipe=1, data=1, global_batch, microbatch, virtual=1,
    sequence=2048, vocab=_SC21_VOCAB, dropout=0.0, lr=1.5e-4, steps=100_000,
) -> RunConfig:  # fmt: skip
    return RunConfig(
        model=ModelConfig(
            layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocab=vocab,
            dropout=dropout, attention_dropout=dropout,
        ),
        layout=Layout(
            data=data, pipe=pipe, tensor=tensor, virtual=virtual, microbatch=microbatch,
            idle="phases", recompute="full",
        ),
        optimizer=OptimizerConfig(lr=lr, warmup_steps=min(3000, steps // 10)),
        global_batch=global_batch, steps=steps, eval_every=1000, save_every=1000,
    )  # fmt: skip


def _table1(name: str) -> RunConfig:
    heads, hidden, layers, tensor, pipe, gpus, batch, microbatch, virtual = _SC21_TABLE1[name]
    return _gpt(
        heads=heads, hidden=hidden, layers=layers, tensor=tensor, pipe=pipe,
        data=gpus // (tensor * pipe), global_batch=batch, microbatch=microbatch, virtual=virtual,
    )  # fmt: skip


def _gpt_2() -> RunConfig:
    """GPT-2 345M as trained in Megatron-LM 2019, section 4.2 and appendix A."""
    return _gpt(
        heads=16, hidden=1024, layers=24, sequence=1024, vocab=50257, data=8, global_batch=512,
        microbatch=8, dropout=0.1, steps=300_000,
    )  # fmt: skip


def _gpt_3() -> RunConfig:
    """GPT-3 175B on 96 GPUs, one replica, as in SC'21's figure 12 (interleaved, v = 4)."""
    return _gpt(
        heads=96, hidden=12288, layers=96, tensor=8, pipe=12, virtual=4, microbatch=1,
        global_batch=60, lr=6e-5,
    )  # fmt: skip


def _miniature() -> RunConfig:
    """The 1T model's shape at laptop size: eight virtual devices as data 2 x pipe 2 x tensor 2.

    init_std=0.02 is for a hidden size in the thousands; with 96 it learns half as fast.
    """
    return RunConfig(
        model=ModelConfig(
            layers=4, hidden=96, heads=4, sequence=128, vocab=256, vocab_multiple=64,
            init_std=0.08, compute_dtype="float32",
        ),
        layout=Layout(data=2, pipe=2, tensor=2, virtual=2, microbatch=2),
        optimizer=OptimizerConfig(lr=3e-3, min_lr=2e-4, warmup_steps=40),
        global_batch=16, steps=500, eval_every=100, eval_batches=8,
    )  # fmt: skip


def _bench_s() -> RunConfig:
    """The model on which this project and its peers are timed: four stages, m = 8."""
    return RunConfig(
        model=ModelConfig(
            layers=8, hidden=256, heads=8, sequence=256, vocab=8192, compute_dtype="float32",
        ),
        layout=Layout(pipe=4, microbatch=2),
        global_batch=16, steps=12, eval_every=0,
    )  # fmt: skip


_MAKERS = {name: lambda name=name: _table1(name) for name in TABLE1} | {
    "gpt-2-345m": _gpt_2,
    "gpt-3-175b": _gpt_3,
    "miniature": _miniature,
    "bench-s": _bench_s,
}
NAMES = tuple(_MAKERS)
_ALSO = {"gpt-175b": "gpt-3-175b"}  # SC'21's own name for it


def preset(name: str) -> RunConfig:
    """The preset of that name; UserError with the nearest name where there is none."""
    name = _ALSO.get(name, name)
    if name not in _MAKERS:
        raise unknown_name("preset", name, NAMES)
    return _MAKERS[name]()
