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
from autoptd.schedule.wiring import PARTNER, Link, Wiring

# Kinds of actions that come before their stage's REDUCE.
GRADIENTS = (Kind.B, Kind.W, Kind.SEND_B)


def add_transfers(orders: Sequence[Sequence[Action]], links: Sequence[Link]) -> Orders:
    """Return the orders with all transfers for `links`, and with a REDUCE for every stage if they have none.

    Sends follow the computation that makes their value. Links within a rank need no transfer. PlanError for
    computations that are incomplete or do not end.
    """
    wiring = Wiring(links, ranks_of_stages(orders))
    computes = [list(filter(_is_compute, order)) for order in orders]
    woven: Orders = [[] for _ in computes]
    # By kind and stage of a computation: of every send after it, its kind, its peer, and the peer's order.
    sends: dict[tuple[Kind, int], list[tuple[Kind, int, list[Action]]]] = {}
    for kind, stage in set(map(itemgetter(0, 1), chain.from_iterable(computes))):
        after = wiring.sends_after(Action(kind, stage, 0))
        sends[kind, stage] = [(send.kind, send.peer, woven[wiring.ranks[send.peer]]) for send in after]
    for rank, action in _as_they_end(computes, links):
        _, stage, microbatch, _ = action
        woven[rank].append(action)
        for kind, peer, order in sends[action.kind, stage]:
            woven[rank].append(Action(kind, stage, microbatch, peer))
            # Both ends at once, so that all ranks follow the one order of the simulation.
            order.append(Action(PARTNER[kind], peer, microbatch, stage))
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
    found, forward = [], Kind.F
    for rank, (order, row) in enumerate(zip(computes, ends, strict=True)):
        for action, end in zip(order, row, strict=True):
            kind, stage, _, _ = action
            found.append((end, kind is not forward, stage if kind is forward else -stage, rank, action))
    # A stage has one computation at a time, so that actions are never compared.
    found.sort()
    return [(rank, action) for _, _, _, rank, action in found]


def has_reduces(orders: Sequence[Sequence[Action]]) -> bool:
    """Tell whether the orders contain REDUCE."""
    return any(Kind.REDUCE in map(itemgetter(0), order) for order in orders)


def add_reduces(orders: Sequence[Sequence[Action]]) -> Orders:
    """Return the orders with a REDUCE after the last B, W and SEND_B of every stage."""
    reduced: Orders = []
    for order in orders:
        last = {stage: index for index, (kind, stage, _, _) in enumerate(order) if kind in GRADIENTS}
        reduced.append(list(order))
        # From the end, so that the other indices stay valid.
        for index, stage in sorted(((index, stage) for stage, index in last.items()), reverse=True):
            reduced[-1].insert(index + 1, Action(Kind.REDUCE, stage))
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
