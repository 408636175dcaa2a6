"""Add sends, receives and REDUCE to orders of forwards and backwards.

In: orders of F, B and W, and the links between stages (wiring.py). Out: the same with transfers, and a REDUCE
for every stage.

Terms. A *channel* is the directed pair of pipeline ranks that a message travels on; it delivers in order and
has no tags. A RECV *posts* a receive and does not wait: the F or B that needs the message waits. A SEND never
waits.

All ranks issue their messages in **one order**, that of a simulation, so that a rank would get through its
step even if each send and receive ended before the next began. NCCL needs this: kernels of all communicators
on a device may be launched, and wait for room on it, in issue order. It costs no time: a receive is posted
before the computation during which its message is made, and after those that end earlier. A message that is
made long before its turn (looped_bfs) waits on the receiver, as an input that the backward keeps anyway.

    add_transfers(one_f_one_b(p=2, m=1), links=[(0, 1, True)])
    # rank 0: F0.0 SEND_F0.0>1 RECV_B0.0<1 B0.0 REDUCE0
    # rank 1: RECV_F1.0<0 F1.0 B1.0 SEND_B1.0>0 REDUCE1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter

from autoptd.ir.actions import COMPUTES, SENDS, Action, Kind, Orders, ranks_of_stages
from autoptd.schedule.simulate import simulate
from autoptd.schedule.wiring import Link, Wiring, partner

# Kinds of actions that come before their stage's REDUCE.
GRADIENTS = (Kind.B, Kind.W, Kind.SEND_B)


def add_transfers(orders: Sequence[Sequence[Action]], links: Sequence[Link]) -> Orders:
    """Return the orders with all transfers for `links`, and with a REDUCE for every stage if they have none.

    Sends follow the computation that makes their value. Links within a rank need no transfer. PlanError for
    computations that are incomplete or do not end.
    """
    wiring = Wiring(links, ranks_of_stages(orders))
    computes = [list(filter(_is_compute, order)) for order in orders]
    sends: dict[tuple[Kind, int], list[tuple[Kind, int]]] = {}
    for action in chain.from_iterable(computes):
        if (action.kind, action.stage) not in sends:
            after = wiring.sends_after(Action(action.kind, action.stage, 0))
            sends[action.kind, action.stage] = [(send.kind, send.peer) for send in after]
    woven: Orders = [[] for _ in computes]
    for rank, action in _as_they_end(computes, links):
        woven[rank].append(action)
        for kind, peer in sends[action.kind, action.stage]:
            send = Action(kind, action.stage, action.microbatch, peer)
            woven[rank].append(send)
            # Both ends at once, so that all ranks follow the one order of the simulation.
            woven[wiring.ranks[peer]].append(partner(send))
    if not has_reduces(orders):
        return add_reduces(woven)
    return [_keep_reduces(order, given) for order, given in zip(woven, orders, strict=True)]


def _is_compute(action: Action) -> bool:
    return action.kind in COMPUTES


def _as_they_end(computes: Orders, links: Sequence[Link]) -> list[tuple[int, Action]]:
    """Return all computations with their ranks, in the order in which they end.

    Among those that end together, a sender comes before its receiver (forwards by ascending stage, backwards
    by descending), so that the receive is posted ahead of the receiver's computation at that time.
    """
    ends = simulate(computes, links=links).ends
    found = []
    for rank, (order, row) in enumerate(zip(computes, ends, strict=True)):
        for action, end in zip(order, row, strict=True):
            is_forward = action.kind is Kind.F
            place = action.stage if is_forward else -action.stage
            found.append((end, not is_forward, place, rank, action))
    found.sort(key=itemgetter(0, 1, 2))
    return [(rank, action) for _, _, _, rank, action in found]


def has_reduces(orders: Sequence[Sequence[Action]]) -> bool:
    """Tell whether the orders contain REDUCE."""
    return any(action.kind is Kind.REDUCE for order in orders for action in order)


def add_reduces(orders: Sequence[Sequence[Action]]) -> Orders:
    """Return the orders with a REDUCE after the last B, W and SEND_B of every stage."""
    reduced: Orders = []
    for order in orders:
        last = {action.stage: index for index, action in enumerate(order) if action.kind in GRADIENTS}
        after = {index: Action(Kind.REDUCE, stage) for stage, index in last.items()}
        reduced.append([])
        for index, action in enumerate(order):
            reduced[-1].append(action)
            if index in after:
                reduced[-1].append(after[index])
    return reduced


def _keep_reduces(order: list[Action], given: Sequence[Action]) -> list[Action]:
    """Put every REDUCE of `given` into `order`, after the computation that it follows there and its sends."""
    after: dict[Action | None, list[Action]] = defaultdict(list)
    latest = None
    for action in given:
        if action.kind is Kind.REDUCE:
            after[latest].append(action)
        latest = action if action.kind in COMPUTES else latest
    kept, latest = after[None], None
    for action in order:
        # Sends of a computation come between it and its REDUCE.
        if action.kind not in SENDS:
            kept += after.pop(latest, ())
        kept.append(action)
        latest = action if action.kind in COMPUTES else latest
    return kept + after[latest]
