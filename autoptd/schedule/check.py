"""Find the faults in an order without running it: `simulate` calls this for an order that is incomplete or
gets stuck.

In: orders, with or without transfers, and the links they serve. Out: one sentence per fault.

Checked: every stage runs F and B (and W, if there is any W) of every microbatch exactly once, on its own
rank, in that sequence; a value is sent after it is made, and its receive posted before it is used; every
message that a link needs is sent once and received once; on each channel, receives are posted in the order of
the sends; a stage is reduced after its last backward and its last W. `find_crossed` finds messages that
cannot be put into one order for all ranks.

    find_faults(parse_orders("B0.0 F0.0"), links=[])
    # ["rank 0: B0.0 comes before F0.0"]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter

from autoptd.ir.actions import COMPUTES, RECVS, SENDS, Action, Kind, ranks_of_stages
from autoptd.schedule.wiring import Link, Wiring, partner

# (rank, index in its order)
Place = tuple[int, int]
Places = dict[Action, Place]
COMPUTE_OF = {Kind.SEND_F: Kind.F, Kind.RECV_F: Kind.F, Kind.SEND_B: Kind.B, Kind.RECV_B: Kind.B}


def find_faults(orders: Sequence[Sequence[Action]], links: Sequence[Link]) -> list[str]:
    """Return every fault of `orders` as a sentence."""
    places: Places = {}
    ranks = ranks_of_stages(orders)
    faults = list(_place(orders, ranks, places)) + list(_check_grid(places, ranks, len(orders)))
    # The later checks assume that every action exists once, on its own rank.
    if not faults:
        faults += _check_sequence(places)
        if has_transfers(orders):
            faults += _check_messages(places, Wiring(links, ranks))
            faults += _check_channels(orders, ranks)
        faults += _check_reduces(places)
    return faults


def find_crossed(orders: Sequence[Sequence[Action]]) -> str:
    """Describe where ranks issue messages in conflicting orders. The orders must have no other fault."""
    ranks = ranks_of_stages(orders)
    queues = [list(filter(_is_transfer, order)) for order in orders]
    # Per rank, the index of its next message.
    at = [0] * len(orders)

    def peer(rank: int) -> int:
        return ranks[queues[rank][at[rank]].peer]

    def meets(rank: int) -> bool:
        other = peer(rank)
        return at[other] < len(queues[other]) and queues[other][at[other]] == partner(queues[rank][at[rank]])

    stuck = [rank for rank, queue in enumerate(queues) if queue]
    # Match messages as a rendezvous until no two ranks are at the same one.
    while ready := [rank for rank in stuck if meets(rank)]:
        # Both ends of a message advance together.
        for rank in {ready[0], peer(ready[0])}:
            at[rank] += 1
        stuck = [rank for rank in stuck if at[rank] < len(queues[rank])]
    # Follow the ranks that wait for each other until one repeats: that is the cycle.
    path = [stuck[0]]
    while peer(path[-1]) not in path:
        path.append(peer(path[-1]))
    circle = path[path.index(peer(path[-1])) :]
    waits = {peer(rank): partner(queues[rank][at[rank]]) for rank in circle}
    texts = [f"rank {rank} issues {queues[rank][at[rank]]} before {waits[rank]}" for rank in circle]
    return f"messages cross: {', '.join(texts)}; NCCL requires the same order on all ranks"


def _is_transfer(action: Action) -> bool:
    return action.kind in COMPUTE_OF


def has_transfers(orders: Sequence[Sequence[Action]]) -> bool:
    """Tell whether the orders contain transfers; if not, values are assumed to move by themselves."""
    kinds = {kind for order in orders for kind in set(map(itemgetter(0), order))}
    return not kinds.isdisjoint((*SENDS, *RECVS))


def guess_links(orders: Sequence[Sequence[Action]]) -> list[Link]:
    """Return the links of the transfers in the orders; without transfers, the chain 0 -> 1 -> 2 ..."""
    if not has_transfers(orders):
        stages = sorted({action.stage for order in orders for action in order})
        return [(stage, stage + 1, True) for stage in stages[:-1]]
    grads: dict[tuple[int, int], bool] = {}
    for order in orders:
        for action in order:
            if action.kind in COMPUTE_OF:
                ends = (min(action.stage, action.peer), max(action.stage, action.peer))
                grads[ends] = grads.get(ends, False) or COMPUTE_OF[action.kind] is Kind.B
    # A transfer without a second stage, or to its own stage, is reported elsewhere.
    ends_of_links = [(source, target) for source, target in sorted(grads) if 0 <= source < target]
    return [(source, target, grads[source, target]) for source, target in ends_of_links]


def _place(orders: Sequence[Sequence[Action]], ranks: Sequence[int], places: Places) -> Iterator[str]:
    """Fill `places`; yield actions that are incomplete, duplicated or on the wrong rank."""
    for rank, order in enumerate(orders):
        for index, action in enumerate(order):
            if (action.microbatch < 0) != (action.kind is Kind.REDUCE):
                yield f"rank {rank}: {action} has {'no' if action.microbatch < 0 else 'a'} microbatch"
            if (action.peer < 0) != (action.kind not in COMPUTE_OF):
                yield f"rank {rank}: {action} has {'no' if action.peer < 0 else 'a'} second stage"
            if action.stage < len(ranks) and rank != ranks[action.stage] >= 0:
                yield f"rank {rank}: {action} belongs to rank {ranks[action.stage]}"
            if action.peer >= len(ranks):
                yield f"rank {rank}: {action} is a transfer with stage {action.peer}, which does not exist"
            if action in places:
                yield f"{action} appears twice: on rank {places[action][0]} and on rank {rank}"
            places[action] = (rank, index)


def _check_grid(places: Places, ranks: Sequence[int], p: int) -> Iterator[str]:
    """Yield the missing actions: stages 0 .. p*v-1 each need F, B (and W) of microbatches 0 .. m-1."""
    computes = [action for action in places if action.kind in COMPUTES]
    stages = sorted({action.stage for action in computes})
    microbatches = sorted({action.microbatch for action in computes})
    if not stages or len(stages) % p or stages[-1] != len(stages) - 1:
        yield f"the stages are {_brief(stages)}, not 0 .. {p}*v-1"
    else:
        counts = [ranks.count(rank) for rank in range(p)]
        if len(set(counts)) > 1:
            yield f"ranks have different numbers of stages: {', '.join(map(str, counts))}"
    if microbatches != list(range(len(microbatches))):
        yield f"the microbatches are {_brief(microbatches)}, not 0 .. m-1"
    # One W anywhere splits all backwards: a stage without W would never compute its weight gradients.
    kinds = COMPUTES if any(action.kind is Kind.W for action in computes) else (Kind.F, Kind.B)
    for stage in stages:
        for microbatch in microbatches:
            for kind in kinds:
                action = Action(kind, stage, microbatch)
                if action not in places:
                    yield f"rank {ranks[stage]}: {action} is missing"


def _check_sequence(places: Places) -> Iterator[str]:
    """Yield pairs on one rank in the wrong sequence, and transfers of computations that do not exist."""
    for action in places:
        if action.kind is Kind.B:
            yield from _after(action, Action(Kind.F, action.stage, action.microbatch), places)
        elif action.kind is Kind.W:
            yield from _after(action, Action(Kind.B, action.stage, action.microbatch), places)
        elif action.kind in COMPUTE_OF:
            compute = Action(COMPUTE_OF[action.kind], action.stage, action.microbatch)
            early, late = (compute, action) if action.kind in SENDS else (action, compute)
            yield from _after(late, early, places)


def _after(late: Action, early: Action, places: Places) -> Iterator[str]:
    if early not in places:
        yield f"{late} appears without {early}"
    elif late not in places:
        yield f"{early} appears without {late}"
    elif places[early][1] > places[late][1]:
        yield f"rank {places[late][0]}: {late} comes before {early}"


def _check_messages(places: Places, wiring: Wiring) -> Iterator[str]:
    """Yield messages that are needed but not sent, sent but not received, or not needed."""
    needed: set[Action] = set()
    for action, (rank, _) in places.items():
        if action.kind not in COMPUTES:
            continue
        receives = [need for need in wiring.needs(action) if need.kind in RECVS]
        needed.update(receives)
        for receive in receives:
            if receive not in places:
                yield f"rank {rank}: {action} needs {receive}, which is never posted"
            if partner(receive) not in places:
                sender = wiring.ranks[receive.peer]
                yield f"rank {sender}: {partner(receive)}, needed by {action}, is missing"
    for action, (rank, _) in places.items():
        if action.kind in COMPUTE_OF and (action if action.kind in RECVS else partner(action)) not in needed:
            yield f"rank {rank}: {action} serves no link between ranks"


def _check_channels(orders: Sequence[Sequence[Action]], ranks: Sequence[int]) -> Iterator[str]:
    """Yield, per channel, the first place where the receives are not posted in the order of the sends."""
    sends: dict[Place, list[Action]] = defaultdict(list)
    posts: dict[Place, list[Action]] = defaultdict(list)
    for rank, order in enumerate(orders):
        for action in order:
            if action.kind in SENDS:
                sends[rank, ranks[action.peer]].append(partner(action))
            elif action.kind in RECVS:
                posts[ranks[action.peer], rank].append(action)
    for source, target in sorted(sends):
        for sent, posted in zip(sends[source, target], posts[source, target], strict=False):
            if sent != posted:
                yield (
                    f"rank {source} sends {partner(sent)} where rank {target} posts {posted}: a channel has one "
                    "order"
                )
                break


def _check_reduces(places: Places) -> Iterator[str]:
    """Yield stages that are reduced before their gradients are complete, or not reduced while others are."""
    reduced = {action.stage for action in places if action.kind is Kind.REDUCE}
    last: dict[int, Action] = {}
    for action, (_, index) in places.items():
        if action.kind in (Kind.B, Kind.W) and (
            action.stage not in last or index > places[last[action.stage]][1]
        ):
            last[action.stage] = action
    yield from (
        f"{Action(Kind.REDUCE, stage)} names a stage that does not exist"
        for stage in sorted(reduced - set(last))
    )
    if reduced:
        for stage in sorted(last):
            yield from _after(Action(Kind.REDUCE, stage), last[stage], places)


def _brief(numbers: Sequence[int]) -> str:
    text = ", ".join(map(str, numbers[:8])) or "none"
    return f"{text}, ..." if len(numbers) > 8 else text
