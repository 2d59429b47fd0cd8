"""Named runs: SC'21's table 1, GPT-2 345M, GPT-3's 175B, their miniature, the benchmark's model,
Llama 2 and 3, and the BERTs of 2019.

Those of table 1 recompute every block, as they were published; the other large ones do so with
attention's scores alone, which fits 80 GiB everywhere and saves a fifth of the step.

Sources: table 1 of Narayanan et al., SC'21 (arXiv 2104.04473v5), microbatch sizes and virtual
stages from the run scripts its authors published; Shoeybi et al. 2019 (arXiv 1909.08053), sections
4 and 5, for GPT-2 345M and BERT; Touvron et al. 2023 (arXiv 2307.09288) and the Llama 3 paper
(arXiv 2407.21783, tables 3 and 4) for sizes, rates and, of the 405B, the layout: of the others it
is ours.
"""

from __future__ import annotations

from collections.abc import Iterable

from mtx.config import DataConfig, Layout, ModelConfig, OptimizerConfig, RunConfig
from mtx.errors import UserError, unknown_name

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
    recompute="selective",
) -> RunConfig:  # fmt: skip
    return RunConfig(
        model=ModelConfig(
            layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocab=vocab,
            dropout=dropout, attention_dropout=dropout,
        ),
        layout=Layout(
            data=data, pipe=pipe, tensor=tensor, virtual=virtual, microbatch=microbatch,
            idle="phases", recompute=recompute,
        ),
        optimizer=OptimizerConfig(lr=lr, warmup_steps=min(3000, steps // 10)),
        global_batch=global_batch, steps=steps, eval_every=1000, save_every=1000,
    )  # fmt: skip


def _table1(name: str) -> RunConfig:
    heads, hidden, layers, tensor, pipe, gpus, batch, microbatch, virtual = _SC21_TABLE1[name]
    return _gpt(
        heads=heads, hidden=hidden, layers=layers, tensor=tensor, pipe=pipe,
        data=gpus // (tensor * pipe), global_batch=batch, microbatch=microbatch, virtual=virtual,
        recompute="full",
    )  # fmt: skip


def _gpt_2() -> RunConfig:
    """GPT-2 345M as trained in Megatron-LM 2019, section 4.2 and appendix A."""
    return _gpt(
        heads=16, hidden=1024, layers=24, sequence=1024, vocab=50257, data=8, global_batch=512,
        microbatch=8, dropout=0.1, steps=300_000,
    )  # fmt: skip


def _gpt_175b() -> RunConfig:
    """GPT-3's 175B on 96 GPUs, one replica, laid out as in SC'21's figure 12 (v = 4)."""
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


def _miniature_bert() -> RunConfig:
    """BERT at laptop size, on the miniature's devices, with a WordPiece of its own text."""
    return RunConfig(
        model=ModelConfig(
            family="bert", layers=4, hidden=96, heads=4, sequence=128, vocab=1024,
            vocab_multiple=64, init_std=0.08, compute_dtype="float32",
        ),
        layout=Layout(data=2, pipe=2, tensor=2, virtual=2, microbatch=4),
        optimizer=OptimizerConfig(lr=3e-3, min_lr=2e-4, warmup_steps=40, b2=0.999),
        data=DataConfig(tokenizer="wordpiece", bpe_vocab=1024),
        global_batch=32, steps=500, eval_every=100, eval_batches=2,
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


# name: layers, hidden, heads, kv heads, F, vocabulary, sequence, rotary base, lr, sequences a step,
# data, pipe, tensor, virtual
_LLAMA = {
    "llama-2-7b": (32, 4096, 32, 32, 11008, 32000, 4096, 1e4, 3e-4, 1024, 16, 1, 4, 1),
    "llama-2-13b": (40, 5120, 40, 40, 13824, 32000, 4096, 1e4, 3e-4, 1024, 16, 1, 8, 1),
    "llama-2-70b": (80, 8192, 64, 8, 28672, 32000, 4096, 1e4, 1.5e-4, 1024, 16, 4, 8, 4),
    "llama-3-8b": (32, 4096, 32, 8, 14336, 128256, 8192, 5e5, 3e-4, 512, 16, 1, 4, 1),
    "llama-3-70b": (80, 8192, 64, 8, 28672, 128256, 8192, 5e5, 1.5e-4, 1024, 16, 4, 8, 4),
    "llama-3-405b": (126, 16384, 128, 8, 53248, 128256, 8192, 5e5, 8e-5, 2048, 128, 16, 8, 8),
}  # fmt: skip
_BERT = {  # name: layers, hidden, heads, tensor
    "bert-336m": (24, 1024, 16, 1),
    "bert-1.3b": (24, 2048, 32, 2),
    "bert-3.9b": (48, 2560, 40, 4),
}


def _llama(name: str) -> RunConfig:
    (layers, hidden, heads, groups, ffn, vocab, sequence, base, lr, batch, data, pipe, tensor,
     virtual) = _LLAMA[name]  # fmt: skip
    missing = -layers % (pipe * virtual) // 2  # at each end, where the embedding and the head are
    return RunConfig(
        model=ModelConfig(
            family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=groups, ffn=ffn,
            vocab=vocab, sequence=sequence, rotary_base=base, tied=False,
        ),
        layout=Layout(
            data=data, pipe=pipe, tensor=tensor, virtual=virtual, idle="phases",
            recompute="selective",
            stage_layers=((0,) * missing + (1,) * layers + (0,) * missing) if missing else "even",
        ),
        optimizer=OptimizerConfig(lr=lr, min_lr=lr / 10, warmup_steps=2000),
        global_batch=batch, steps=500_000, eval_every=1000, save_every=1000,
    )  # fmt: skip


def _bert(name: str) -> RunConfig:
    layers, hidden, heads, tensor = _BERT[name]
    return RunConfig(
        model=ModelConfig(
            family="bert", layers=layers, hidden=hidden, heads=heads, sequence=512, vocab=30522,
            dropout=0.1, attention_dropout=0.1,
        ),
        layout=Layout(data=128, tensor=tensor, microbatch=8, idle="phases"),
        optimizer=OptimizerConfig(
            lr=1e-4, min_lr=0.0, rate="linear", warmup_steps=10_000, b2=0.999, weight_decay=0.01
        ),
        global_batch=1024, steps=2_000_000, eval_every=1000, save_every=1000,
    )  # fmt: skip


_MAKERS = {name: lambda name=name: _table1(name) for name in TABLE1} | {
    "gpt-2-345m": _gpt_2,
    "gpt-175b": _gpt_175b,
    "miniature": _miniature,
    "miniature-bert": _miniature_bert,
    "bench-s": _bench_s,
}
_MAKERS |= {name: lambda name=name: _llama(name) for name in _LLAMA}
_MAKERS |= {name: lambda name=name: _bert(name) for name in _BERT}
NAMES = tuple(_MAKERS)
_ON_PYTHONS_TEXT = ("miniature", "miniature-bert", "bench-s")  # learn from what Python carries


def preset(name: str) -> RunConfig:
    """The preset of that name; UserError with the nearest name where there is none."""
    if name not in _MAKERS:
        raise unknown_name("preset", name, NAMES)
    return _MAKERS[name]()


def brings_data(run: RunConfig) -> bool:
    """Whether its data are settled: the run names them, or its model is that of a preset so small
    that the text which Python carries will do."""
    return bool(run.data.path) or run.model in [preset(name).model for name in _ON_PYTHONS_TEXT]


def require_data(start: RunConfig, run: RunConfig, arguments: Iterable[str]) -> None:
    """UserError where nobody has said what a run is to be trained on, or with which tokenizer.

    start: the preset or plan that the command line's `arguments` have made `run` of.
    """
    if brings_data(start):
        return
    default, given = DataConfig(), {argument.partition("=")[0] for argument in arguments}
    said = {
        "--data.path": bool(run.data.path),
        "--data.tokenizer": "--data.tokenizer" in given or run.data.tokenizer != default.tokenizer,
    }
    kinds = {
        "--data.path": "FILE, FOLDER or DATASET",
        "--data.tokenizer": "FILE or wordpiece" if run.model.family == "bert"
        else "FILE, bpe or bytes",
    }  # fmt: skip
    missing = [option for option, there in said.items() if not there]
    if missing:
        names = " and ".join(option.removeprefix("--") for option in missing)
        raise UserError(
            f"{names} {'is' if len(missing) == 1 else 'are'} not given, and a model with "
            f"vocab={run.model.vocab:,} has no text of its own; use "
            + " ".join(f"{option} {kinds[option]}" for option in missing)
        )
