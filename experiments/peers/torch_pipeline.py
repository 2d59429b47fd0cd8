"""A peer for the benchmark: PyTorch's own pipelines on preset `bench-s`, on the CPU.

    python experiments/peers/torch_pipeline.py --schedule 1f1b --steps 8

One gloo process a stage, on the loopback interface, trains our GPT with
`torch.distributed.pipelining`; `--schedule none` sums the microbatches' gradients in one process.
Prints a line of JSON: `trainer`, `torch` (its version), `processes`, `threads` of each, `step_s` of
each timed step in the slowest process, `median_s`, and the mean losses of the very first step (a
warm-up) and of the last one, `loss_first` and `loss_last`.

The batch is random and fixed, and each layer has its own seed: all schedules report the same
losses, to rounding. What differs from ours: the output layer is untied, since a torch stage owns
its parameters; the learning rate is constant. Eager: zero-bubble schedules refuse torch.compile.
Exit codes: 1 a process failed or time was up, 2 wrong arguments, 3 no PyTorch.

Shape letters: B rows · S sequence · D hidden · H heads · K head size · V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import timedelta

from mtx.config import ModelConfig, OptimizerConfig, RunConfig
from mtx.presets import preset

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch import Tensor, nn
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torch.nn import functional
except ModuleNotFoundError as error:
    if __name__ != "__main__" or error.name != "torch":
        raise
    print("needs torch: pip install 'mtx[peers]'", file=sys.stderr)
    sys.exit(3)


@dataclass(frozen=True, kw_only=True)
class PeerSchedule:
    """A schedule of PyTorch's, and how it lays model chunks over the processes."""

    torch_name: str  # class in torch.distributed.pipelining.schedules
    chunks: int = 1  # on each process
    folded: bool = False  # the second half of the chunks runs back from the last process (a "V")

    def chunks_of(self, rank: int, stages: int) -> list[int]:
        """Model-order indices of the chunks that process `rank` of `stages` holds."""
        if self.folded:
            return [rank, 2 * stages - 1 - rank]
        return [rank + turn * stages for turn in range(self.chunks)]


SCHEDULES = {
    "none": None,  # one process, no pipeline
    "1f1b": PeerSchedule(torch_name="1F1B"),
    "gpipe": PeerSchedule(torch_name="GPipe"),
    "interleaved": PeerSchedule(torch_name="Interleaved1F1B", chunks=2),
    "interleaved_zb": PeerSchedule(torch_name="InterleavedZeroBubble", chunks=2),
    "looped_bfs": PeerSchedule(torch_name="LoopedBFS", chunks=2),
    "zbv": PeerSchedule(torch_name="ZBVZeroBubble", chunks=2, folded=True),
    "dualpipev": PeerSchedule(torch_name="DualPipeV", chunks=2, folded=True),
}


class Block(nn.Module):
    """A pre-LN transformer block with biases and GELU's tanh form."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.heads = model.heads
        self.attention_norm = nn.LayerNorm(model.hidden, eps=model.norm_epsilon)
        self.qkv = nn.Linear(model.hidden, 3 * model.hidden)
        self.attention_out = nn.Linear(model.hidden, model.hidden)
        self.ffn_norm = nn.LayerNorm(model.hidden, eps=model.norm_epsilon)
        self.ffn_in = nn.Linear(model.hidden, model.ffn_hidden)
        self.ffn_out = nn.Linear(model.ffn_hidden, model.hidden)

    def forward(self, x_BSD: Tensor) -> Tensor:
        qkv_BS3HK = self.qkv(self.attention_norm(x_BSD)).unflatten(-1, (3, self.heads, -1))
        q_BHSK, k_BHSK, v_BHSK = qkv_BS3HK.permute(2, 0, 3, 1, 4).unbind()
        y_BHSK = functional.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, is_causal=True)
        x_BSD = x_BSD + self.attention_out(y_BHSK.transpose(1, 2).flatten(-2))
        h_BSF = functional.gelu(self.ffn_in(self.ffn_norm(x_BSD)), approximate="tanh")
        return x_BSD + self.ffn_out(h_BSF)


class Embedding(nn.Module):
    """Tokens plus learned positions."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.tokens = nn.Embedding(model.vocab, model.hidden)
        self.positions = nn.Parameter(torch.empty(model.sequence, model.hidden))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.tokens(tokens_BS) + self.positions


def build_chunk(model: ModelConfig, chunk: int, chunks: int) -> nn.Sequential:
    """Chunk `chunk` of the model cut into `chunks` runs of equally many layers."""
    first, end = (n * model.layers // chunks for n in (chunk, chunk + 1))
    parts = [_initialize(Block(model), model, seed=1 + layer) for layer in range(first, end)]
    if chunk == 0:
        parts.insert(0, _initialize(Embedding(model), model, seed=0))
    if chunk == chunks - 1:
        parts.append(nn.LayerNorm(model.hidden, eps=model.norm_epsilon))
        output = nn.Linear(model.hidden, model.vocab, bias=False)
        parts.append(_initialize(output, model, seed=1 + model.layers))
    return nn.Sequential(*parts)


@torch.no_grad()
def _initialize(module: nn.Module, model: ModelConfig, *, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            scale = math.sqrt(2 * model.layers) if name.endswith("_out.weight") else 1.0
            parameter.normal_(std=model.init_std / scale, generator=generator)
        elif name.endswith("bias"):
            parameter.zero_()
    return module


def mean_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Cross-entropy in nats, the mean over tokens."""
    return functional.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


def make_batch(run: RunConfig) -> tuple[Tensor, Tensor]:
    """Fixed random tokens_BS and their successors targets_BS."""
    generator = torch.Generator().manual_seed(run.seed)
    shape = (run.global_batch, run.model.sequence + 1)
    tokens = torch.randint(run.model.vocab, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Training:
    """Steps on one batch, with AdamW and a limit on the norm of the gradients."""

    def __init__(self, parameters: list[nn.Parameter], config: OptimizerConfig):
        self.parameters, self.clip = parameters, config.clip
        self.optimizer = make_optimizer(parameters, config)

    def accumulate_gradients(self) -> list[Tensor]:
        """The microbatches' losses, where this process has them; sets `.grad`."""
        raise NotImplementedError

    def step(self) -> list[Tensor]:
        losses = self.accumulate_gradients()
        clip_gradients(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses


class AccumulatedTraining(Training):
    """A batch in one process, a microbatch after the other."""

    def __init__(self, run: RunConfig):
        self.model = build_chunk(run.model, 0, 1)
        super().__init__(list(self.model.parameters()), run.optimizer)
        self.batch = [tensor.chunk(run.microbatches) for tensor in make_batch(run)]

    def accumulate_gradients(self) -> list[Tensor]:
        losses = []
        for tokens_BS, targets_BS in zip(*self.batch, strict=True):
            loss = mean_loss(self.model(tokens_BS), targets_BS)
            (loss / len(self.batch[0])).backward()
            losses.append(loss.detach())
        return losses


class PipelinedTraining(Training):
    """This process's share of a batch: the losses are with the last chunk."""

    def __init__(self, run: RunConfig, schedule: PeerSchedule):
        count = run.layout.pipe * schedule.chunks
        held = schedule.chunks_of(dist.get_rank(), run.layout.pipe)
        models = [build_chunk(run.model, chunk, count) for chunk in held]
        super().__init__([p for model in models for p in model.parameters()], run.optimizer)
        cpu = torch.device("cpu")
        stages = [PipelineStage(m, c, count, cpu) for m, c in zip(models, held, strict=True)]
        self.schedule = get_schedule_class(schedule.torch_name)(
            stages if schedule.chunks > 1 else stages[0], run.microbatches, loss_fn=mean_loss
        )
        tokens_BS, targets_BS = make_batch(run)
        self.inputs = (tokens_BS,) if 0 in held else ()
        self.targets = targets_BS if count - 1 in held else None

    def accumulate_gradients(self) -> list[Tensor]:
        losses = []
        # The outputs are the logits: merging them would copy the largest tensor of the step.
        self.schedule.step(*self.inputs, target=self.targets, losses=losses, return_outputs=False)
        return [loss.detach() for loss in losses]


def make_optimizer(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW, with decay on matrices only; fused is the fastest of torch's forms on a CPU."""
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
    ]
    how = config.hyperparameters("adamw")
    return torch.optim.AdamW(groups, config.lr, (how["b1"], how["b2"]), how["epsilon"], fused=True)


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> None:
    """Scales gradients in place so that their norm over all processes is at most `limit`."""
    squared_norm = nn.utils.get_total_norm([p.grad for p in parameters], foreach=True).square()
    dist.all_reduce(squared_norm)
    nn.utils.clip_grads_with_norm_(parameters, limit, squared_norm.sqrt(), foreach=True)


def make_training(run: RunConfig, name: str) -> Training:
    schedule = SCHEDULES[name]
    return PipelinedTraining(run, schedule) if schedule else AccumulatedTraining(run)


# -- processes: of this script, and of megatron_pipeline.py ----------------------------------------

# From the preset and a schedule's name to the training of a process that has joined the others.
MakeTraining = Callable[[RunConfig, str], Training]


def run_rank(
    rank: int, make: MakeTraining, run: RunConfig, options, count: int, port: int, results
) -> None:
    """One process: joins the others, trains, and on rank 0 puts what it measured into `results`."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    torch.set_num_threads(options.threads)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=options.timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=limit)
    measured = train(make(run, options.schedule), options.warmup + options.steps)
    if rank == 0:
        results.put(measured)
    dist.destroy_process_group()


def _end_with_launcher() -> None:
    mp.parent_process().join()  # returns however the launcher ends, SIGKILL included
    os._exit(1)


def train(training: Training, steps: int) -> tuple[list[float], list[float]]:
    """Seconds (in the slowest process) and mean loss of each of `steps` steps."""
    seconds, means = torch.zeros(steps, dtype=torch.float64), torch.zeros(steps)
    for step in range(steps):
        dist.barrier()
        start = time.perf_counter()
        losses = training.step()
        seconds[step] = time.perf_counter() - start
        if losses:
            means[step] = torch.stack(losses).mean()
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(means)  # zero on all processes but the one with the last chunk
    return seconds.tolist(), means.tolist()


def launch(
    make: MakeTraining, run: RunConfig, options: argparse.Namespace, count: int
) -> tuple[list, list]:
    """What `train` measured in `count` processes; leaves none. TimeoutError where time is up."""
    deadline = time.monotonic() + options.timeout_s
    results = mp.get_context("spawn").SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a free port
    arguments = (make, run, options, count, store.port, results)
    ranks = mp.spawn(run_rank, arguments, nprocs=count, join=False, daemon=True)
    try:
        while not ranks.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=1):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{options.schedule} took more than {options.timeout_s} s")
        return results.get()
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def main(make: MakeTraining, schedules: Collection[str], trainer: str, about: str) -> int:
    """Trains as the command line says, and prints what was measured. "none" takes one process."""
    script = os.path.basename(sys.argv[0])
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--schedule", choices=tuple(schedules), default="1f1b")
    parser.add_argument("--stages", type=int, default=4, help="processes of the pipeline")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--threads", type=int, default=0, help="each; 0: the cores, shared out")
    parser.add_argument("--timeout-s", type=int, default=300, help="for everything")
    options = parser.parse_args()
    if options.stages < 1:
        parser.error(f"--stages {options.stages} must be at least 1")
    if min(options.steps, options.timeout_s) < 1 or min(options.warmup, options.threads) < 0:
        parser.error("--steps and --timeout-s must be at least 1, --warmup and --threads 0")
    run = preset("bench-s")
    run = replace(run, layout=replace(run.layout, pipe=options.stages))
    count = 1 if options.schedule == "none" else options.stages
    options.threads = options.threads or max(1, torch.get_num_threads() // count)
    try:
        step_s, losses = launch(make, run, options, count)
    except (TimeoutError, mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        print(f"{script}: {error}", file=sys.stderr)
        return 1
    timed_s = [round(seconds, 4) for seconds in step_s[options.warmup :]]
    print(json.dumps({
        "trainer": f"{trainer} {options.schedule}", "torch": torch.__version__,
        "processes": count, "threads": options.threads,
        "step_s": timed_s, "median_s": statistics.median(timed_s),
        "loss_first": losses[0], "loss_last": losses[-1],
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(make_training, SCHEDULES, "torch.distributed.pipelining", __doc__))
