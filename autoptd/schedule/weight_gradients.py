"""Split backwards: place a W (weight gradients) for every B of an order.

In: orders of F and B. Out: the same with W actions. A backward is then B, which computes what earlier stages
wait for, and W, which only the stage's REDUCE waits for (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").

    delay_weight_gradients(gpipe(p=1, m=2), "after_b")        # F0.0 F0.1 B0.0 W0.0 B0.1 W0.1
    delay_weight_gradients(gpipe(p=1, m=2), "before_reduce")  # F0.0 F0.1 B0.0 B0.1 W0.0 W0.1
"""

from __future__ import annotations

from collections.abc import Sequence

from autoptd.ir.actions import Action, Kind, Orders
from autoptd.options import DELAYS


def delay_weight_gradients(orders: Sequence[Sequence[Action]], delay: str) -> Orders:
    """Return `orders` with a W for every B: right after it ("after_b"), or all of a stage's after its last B
    ("before_reduce").

    The latter keeps the inputs and output gradients of every GEMM alive for all microbatches.
    """
    if delay not in DELAYS:
        raise ValueError(f"delay {delay!r}: must be one of {', '.join(DELAYS)}")
    return [_delay(order, delay == "after_b") for order in orders]


def _delay(order: Sequence[Action], at_once: bool) -> list[Action]:
    # The index of the last backward of every stage.
    last = {action.stage: index for index, action in enumerate(order) if action.kind is Kind.B}
    waiting: dict[int, list[Action]] = {stage: [] for stage in last}
    delayed: list[Action] = []
    for index, action in enumerate(order):
        delayed.append(action)
        if action.kind is Kind.B:
            waiting[action.stage].append(Action(Kind.W, action.stage, action.microbatch))
            if at_once or last[action.stage] == index:
                delayed += waiting[action.stage]
                waiting[action.stage] = []
    return delayed
