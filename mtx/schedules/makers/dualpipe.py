"""DualPipeV: DeepSeek's DualPipe cut in half, so that no parameter is held twice.

Two chunks a stage, placed as a V (see `vee`, whose numbers for the kinds of op are used here).
"""

from __future__ import annotations

import numpy as np

from mtx.schedules.makers.vee import B0, B1, F0, F1, W0, W1, vee_maker
from mtx.schedules.orders import Orders
from mtx.schedules.schedule import Schedule, vee_placement
from mtx.schedules.shape import Maker, Shape


def dualpipe_v(shape: Shape) -> Schedule:
    """DualPipeV (DeepSeek, github.com/deepseek-ai/DualPipe; "cut-in-half" by Sea AI Lab).

    In the steady state F of one chunk is paired with B and W of the other, so that a runtime can
    hide the sends of each behind the other's work. The order is that of
    torch.distributed.pipelining's ScheduleDualPipeV, with each full backward as B, then W.
    Every stage keeps p + 1/2 microbatches, as published (PP + 1 chunks for PP = 2p).

    Asynchronous, with F = B = W and m >= 2p: p - 1 of 6m slots of F/2 are idle. DeepSeek's own
    count, (PP/2 - 1)(F&B + B - 3W), is twice that: its full backward sends the gradient only after
    W. With fewer than 2p microbatches, which torch refuses, the orders are those for 2p without the
    missing microbatches.
    """
    orders = _orders(shape.microbatches, shape.stages)
    return Schedule.from_orders("dualpipe_v", orders, virtual_stages=vee_placement(shape.stages))


def _orders(microbatches: int, stages: int) -> Orders:
    items = max(microbatches, 2 * stages)
    lists = []
    for stage in range(stages):
        after = stages - 1 - stage
        warm_up = [F0] * (2 * after) + [F0, F1] * (stage + 1) + [B1, W1, F1] * after
        steady = [F0, B1, W1, F1, B0, W0] * (items - 2 * stages + stage + 1)
        no_f0 = [B1, W1, F1, B0, W0] * after
        # The last Bs are B1 and B0 in turn. Each of the first half is followed by its W; the other
        # Ws wait, and fill the gaps between the B0s that come down the stages last.
        turns = [B1, B0] * (stage + 1)
        cool_down = [op for b in turns[: stage + 1] for op in (b, b + 2)] + turns[stage + 1 :]
        waiting = [b + 2 for b in turns[stage + 1 :]] + [W0] * after
        cool_down += [op for w in waiting[:after] for op in (w, B0)] + waiting[after:]
        lists.append(warm_up + steady + no_f0 + cool_down)
    return Orders.from_kinds(lists, microbatches, chunks=2)


MAKERS: dict[str, Maker] = {
    "dualpipe_v": vee_maker(
        dualpipe_v,
        "DeepSeek-AI 2025 (github.com/deepseek-ai/DualPipe)",
        least=lambda p: 2 * p,
        idle=lambda p, m: p - 1,
        in_flight=lambda p, m: np.minimum(min(2 * p + 1, 2 * m), m + 1 + np.arange(p)),
        times_matter=False,
    )
}
