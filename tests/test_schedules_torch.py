"""Orders against those of torch.distributed.pipelining, and our CSV run by its runtime.

Run as a script with a folder, this is the program of the last test: every CSV in the folder is run
by one process per row, and its gradients are compared with those of the whole model.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from mtx.schedules.formats import from_csv, to_csv
from mtx.schedules.makers import make
from mtx.schedules.schedule import Schedule

pytest.importorskip("torch", reason="torch is absent: its schedules are not compared with ours")
from torch.distributed.pipelining import schedules as peer  # noqa: E402
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops  # noqa: E402
from torch.distributed.pipelining.stage import PipelineStage  # noqa: E402

ORDERS = [
    # theirs, ours, p, m, v. Left out: torch's plain 1F1B, which in torch 2.13 omits the last rank's
    # microbatch 0 and runs one that does not exist; and interleaved 1F1B if p does not divide m,
    # for which torch makes rounds of more than p microbatches and Megatron has no order.
    *[("GPipe", "gpipe", p, m, 1) for p, m in [(2, 4), (4, 8), (4, 3), (3, 7)]],
    *[("Interleaved1F1B", "interleaved_1f1b", *sizes)
      for sizes in [(2, 4, 2), (4, 8, 2), (4, 4, 2), (4, 12, 3), (2, 8, 4), (8, 16, 2)]],
    *[("LoopedBFS", "breadth_first", *sizes)
      for sizes in [(2, 4, 2), (4, 8, 2), (4, 9, 3), (4, 2, 2), (8, 8, 4)]],
    # Our counterpart of it has one chunk per stage.
    *[("InterleavedZeroBubble", "zb_h1", p, m, 1) for p, m in [(2, 4), (4, 8), (4, 4), (8, 24)]],
    *[("ZBVZeroBubble", "zb_v", p, m, 2) for p, m in [(2, 4), (4, 8), (4, 9), (8, 16)]],
    *[("DualPipeV", "dualpipe_v", p, m, 2) for p, m in [(2, 4), (4, 8), (4, 9), (8, 16)]],
]  # fmt: skip


def their_table(name: str, p: int, m: int, v: int) -> list[list]:
    """Each rank's actions, None if it idles."""
    multiple = issubclass(peer.get_schedule_class(name), peer.PipelineScheduleMulti)
    if multiple and v == 1:  # get_schedule_ops refuses this
        stage = mock.create_autospec(PipelineStage, instance=True)
        stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, p, p, None
        table = peer.get_schedule_class(name)([stage], m).pipeline_order
        return [table[rank] for rank in range(p)]
    return get_schedule_ops(name, p, m, num_stages_per_rank=v)


def their_orders(name: str, p: int, m: int, v: int, *, split: bool) -> list[list[str]]:
    """Each rank's ops, such as 2F0. Idle cells and gradient reductions are ignored, two overlapped
    ops are taken one after the other, and a B in a table with W stands for I and W."""
    orders: list[list[str]] = []
    for row in their_table(name, p, m, v):
        orders.append([])
        for cell in row:
            for action in getattr(cell, "sub_actions", None) or [cell]:
                if action is None or action.computation_type == peer.REDUCE_GRAD:
                    continue
                kind = action.computation_type.value
                for letter in "IW" if kind == "B" and split else kind:
                    orders[-1].append(f"{action.stage_index}{letter}{action.microbatch_index}")
    return orders


def our_orders(schedule: Schedule) -> list[list[str]]:
    letters = "FIW" if schedule.split else "FB"
    return [
        [f"{schedule.virtual_stages[chunk, stage]}{letters[kind]}{item}"
         for kind, item, chunk in schedule.orders.of(stage)]
        for stage in range(schedule.stages)
    ]  # fmt: skip


@pytest.mark.parametrize("theirs, ours, p, m, v", ORDERS)
def test_orders_are_those_of_torch(theirs, ours, p, m, v):
    schedule = make(ours, microbatches=m, stages=p, virtual=v)
    assert our_orders(schedule) == their_orders(theirs, p, m, v, split=schedule.split)


@pytest.mark.parametrize("theirs, ours, p, m, v", ORDERS)
def test_tables_are_read_with_the_communication_that_torch_puts_into_them(theirs, ours, p, m, v):
    table = their_table(theirs, p, m, v)
    rows = {rank: [action for action in row if action] for rank, row in enumerate(table)}
    parts = {
        rank: [part for a in row for part in a.sub_actions or [a]] for rank, row in rows.items()
    }
    rank_of = {a.stage_index: rank for rank, row in parts.items() for a in row}
    for rank, row in rows.items():
        rows[rank] = peer._add_reduce_grad(peer._add_unshard_reshard(row), m)
    rows = peer._add_send_recv(rows, rank_of.__getitem__, len(rank_of))
    text = "\n".join(",".join(map(str, row)) for row in rows.values())
    assert all(word in text for word in ("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_B"))
    schedule = from_csv(text, theirs)
    assert our_orders(schedule) == their_orders(theirs, p, m, v, split=schedule.split)


RUNS = [
    # name, m, v; two stages
    ("1f1b", 3, 1), ("gpipe", 4, 2), ("interleaved_1f1b", 4, 2), ("breadth_first", 3, 2),
    ("zb_h1", 4, 1), ("zb_2p", 5, 1), ("aligned_zb", 4, 2), ("zb_v", 4, 2), ("v_half", 5, 2),
    ("dualpipe_v", 4, 2),
]  # fmt: skip


def test_torch_runs_our_csv(tmp_path):
    for name, m, v in RUNS:
        schedule = make(name, microbatches=m, stages=2, virtual=v)
        for orders in (False, True):
            text = to_csv(schedule, orders=orders)
            tmp_path.joinpath(f"{name}-{m}-{v}-{orders:d}.csv").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    equal = {path.name for path in tmp_path.glob("*.equal")}
    assert equal == {f"{path.stem}.{r}.equal" for path in tmp_path.glob("*.csv") for r in range(2)}


def run_csvs(rank: int, stages: int, folder: str, store: str) -> None:
    """One process of that run: this rank's row of every CSV."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining.stage import PipelineStage

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=stages)
    for path in sorted(Path(folder).glob("*.csv")):
        m, v = (int(word) for word in path.stem.split("-")[1:3])
        torch.manual_seed(0)
        model = [
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(stages * v)
        ]
        x, target = torch.randn(2 * m, 4), torch.randn(2 * m, 4)

        def loss(y, target):
            return ((y - target) ** 2).sum()

        loss(torch.nn.Sequential(*model)(x), target).backward()
        expected = [[p.grad.clone() for p in part.parameters()] for part in model]
        for part in model:
            part.zero_grad()
        row = path.read_text().splitlines()[rank].split(",")
        mine = sorted({int(cell.rstrip("0123456789")[:-1]) for cell in row if cell})
        stage_list = [
            PipelineStage(model[k], k, len(model), torch.device("cpu"))
            for k in mine
        ]  # fmt: skip
        schedule = peer._PipelineScheduleRuntime(stage_list, m, loss_fn=loss, scale_grads=False)
        schedule.pipeline_order = {}
        schedule._load_csv(str(path))
        first, last = 0 in mine, len(model) - 1 in mine
        losses: list[torch.Tensor] | None = [] if last else None
        schedule.step(*([x] if first else []), target=target if last else None, losses=losses)
        for k in mine:
            for parameter, gradient in zip(model[k].parameters(), expected[k], strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)
        path.with_suffix(f".{rank}.equal").touch()
    dist.destroy_process_group()


def main() -> None:
    import torch.multiprocessing

    stages = 2
    with tempfile.TemporaryDirectory() as store:
        # Forked, so that torch is loaded once; this process has no threads yet.
        torch.multiprocessing.start_processes(
            run_csvs, (stages, sys.argv[1], f"{store}/store"), nprocs=stages, start_method="fork"
        )


if __name__ == "__main__":
    main()
