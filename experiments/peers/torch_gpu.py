"""A peer for `bench_gpu.py`: a GPT-2 in PyTorch on one GPU, as well as torch.compile makes it.

    python experiments/peers/torch_gpu.py LAYERS HIDDEN HEADS SEQUENCE MICROBATCH GLOBAL_BATCH

float32 masters, autocast to bfloat16, `scaled_dot_product_attention` (flash), fused AdamW, clipping
by the norm, gradients added up over microbatches. Prints a line of JSON: `step_s`, the median of
five steps after three that do not count, `peak_gib`, `compile_s`, of the first step, `torch`,
`losses`, and `by_name`, the seconds of a ninth step's kernels. Exit code 3: no PyTorch that sees a
GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ModuleNotFoundError as error:
    if __name__ != "__main__" or error.name != "torch":
        raise
    print("needs torch: pip install 'mtx[peers]'", file=sys.stderr)
    sys.exit(3)

VOCAB = 50304  # 50,257, padded as ours is


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        rows, sequence, hidden = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, sequence, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, sequence, hidden))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Tied embedding; returns the mean loss of a microbatch."""

    def __init__(self, layers: int, hidden: int, heads: int, sequence: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.float().view(-1, VOCAB), targets.view(-1))


def main(layers: int, hidden: int, heads: int, sequence: int, rows: int, batch: int) -> dict:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = GPT(layers, hidden, heads, sequence).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    compiled = torch.compile(model)
    ids = torch.randint(0, VOCAB, (batch, sequence), device="cuda")
    targets = ids.roll(-1, dims=1)
    count = batch // rows
    times, losses = [], []

    def step():
        total = 0.0
        for i in range(count):
            part = slice(i * rows, (i + 1) * rows)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = compiled(ids[part], targets[part]) / count
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    for _ in range(8):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    by_name = {
        event.key: event.self_device_time_total * 1e-6
        for event in profile.key_averages()
        if event.self_device_time_total
    }
    return {
        "step_s": statistics.median(times[3:]), "all_s": times[3:], "compile_s": times[0],
        "peak_gib": peak, "losses": losses, "torch": torch.__version__, "by_name": by_name,
    }  # fmt: skip


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("PyTorch sees no GPU here", file=sys.stderr)
        sys.exit(3)
    print(json.dumps(main(*map(int, sys.argv[1:7]))))
