"""What each pipeline rank sends and receives, added to an order of forwards and backwards.

In: orders of F, B and W, and the links between stages. Out: the same with SEND_F, RECV_F, SEND_B, RECV_B and REDUCE.

Terms. A *link* (source, target, has_grad) says that stage `target` reads values of the earlier stage `source` (not
always its neighbour), and that gradients flow back. One message carries all of that for one microbatch. A *channel* is
the directed pair of pipeline ranks that a message travels on; it delivers in order and knows no tags, as NCCL's
communicators. A RECV *posts* a receive and does not wait: the F or B that needs the message waits. A SEND never waits.

    add_transfers(one_f_one_b(p=2, m=1), links=[(0, 1, True)])
    # rank 0: RECV_B0.0<1 F0.0 SEND_F0.0>1 B0.0 REDUCE0
    # rank 1: RECV_F1.0<0 F1.0 B1.0 SEND_B1.0>0 REDUCE1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autoptd.errors import InternalError
from autoptd.ir.actions import COMPUTES, RECVS, SENDS, Action, Kind, Orders, ranks_of_stages

GRADIENTS = (Kind.B, Kind.W, Kind.SEND_B)  # what a stage is reduced after
Link = tuple[int, int, bool]  # source stage, target stage, has_grad
Channel = tuple[int, int]  # from rank, to rank
PARTNER = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.RECV_F: Kind.SEND_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.RECV_B: Kind.SEND_B,
}


def add_transfers(orders: Sequence[Sequence[Action]], links: Sequence[Link]) -> Orders:
    """Return the orders with every transfer that `links` ask for, and with the REDUCE of every stage, if there is none yet.

    Sends follow the computation that makes their value. Receives are posted one computation ahead of the one that
    waits for them, and on each channel in exactly the order in which its sender sends: a receiver that needs a message
    posts all earlier ones of that channel first. Links within a rank need no transfer.
    """
    wiring = Wiring(links, ranks_of_stages(orders))
    computes = [[action for action in order if action.kind in COMPUTES] for order in orders]
    channels: dict[Channel, Queue] = defaultdict(Queue)
    sends = {}  # (kind, stage) of a computation -> kind, peer and channel of the sends behind it
    for rank, order in enumerate(computes):
        for kind, stage, microbatch, _ in order:
            if (kind, stage) not in sends:
                made = wiring.sends_after(Action(kind, stage, 0))
                sends[kind, stage] = [
                    (PARTNER[one.kind], one.peer, channels[rank, wiring.ranks[one.peer]]) for one in made
                ]
            for receive, peer, channel in sends[kind, stage]:
                channel.append(Action(receive, peer, microbatch, stage))
    woven = [_weave(rank, order, wiring, channels) for rank, order in enumerate(computes)]
    if not has_reduces(orders):
        return add_reduces(woven)
    return [_keep_reduces(order, given) for order, given in zip(woven, orders, strict=True)]


def has_reduces(orders: Sequence[Sequence[Action]]) -> bool:
    """Whether the orders say when a stage is reduced."""
    return any(action.kind is Kind.REDUCE for order in orders for action in order)


def add_reduces(orders: Sequence[Sequence[Action]]) -> Orders:
    """Return the orders with the REDUCE of every stage behind its last B, W and SEND_B."""
    found: Orders = []
    for order in orders:
        last = {action.stage: index for index, action in enumerate(order) if action.kind in GRADIENTS}
        behind = {index: Action(Kind.REDUCE, stage) for stage, index in last.items()}
        found.append([])
        for index, action in enumerate(order):
            found[-1] += (action, behind[index]) if index in behind else (action,)
    return found


def _keep_reduces(order: list[Action], given: Sequence[Action]) -> list[Action]:
    """Put every REDUCE of `given` into `order`, behind the computation that it stands behind, and its sends."""
    behind: dict[Action | None, list[Action]] = defaultdict(list)
    latest = None
    for action in given:
        if action.kind is Kind.REDUCE:
            behind[latest].append(action)
        latest = action if action.kind in COMPUTES else latest
    found, latest = behind[None], None
    for action in order:
        if action.kind not in SENDS:
            found += behind.pop(latest, ())
        found.append(action)
        latest = action if action.kind in COMPUTES else latest
    return found + behind[latest]


class Queue:
    """The receives of a channel, in the order of their sends; those before `taken` have been posted."""

    def __init__(self) -> None:
        self.receives: list[Action] = []
        self.place: dict[Action, int] = {}
        self.taken = 0

    def append(self, receive: Action) -> None:
        self.place[receive] = len(self.receives)
        self.receives.append(receive)

    def take_up_to(self, receive: Action) -> list[Action]:
        """The receives up to this one that were not taken; one that nobody sends is for the simulation to report."""
        if receive not in self.place:
            return [receive]
        first, self.taken = self.taken, max(self.taken, self.place[receive] + 1)
        return self.receives[first : self.taken]


def partner(transfer: Action) -> Action:
    """Return the receive of a send, and the send of a receive."""
    return Action(PARTNER[transfer.kind], transfer.peer, transfer.microbatch, transfer.stage)


class Wiring:
    """The links, looked up by stage; links that are named twice are one (with gradient if one of them has it).

    `ranks` is the pipeline rank of every stage.
    """

    def __init__(self, links: Sequence[Link], ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.sources: dict[int, list[int]] = defaultdict(list)  # stage -> stages whose values it reads
        self.targets: dict[int, list[int]] = defaultdict(list)  # stage -> stages that read its values
        self.grad_sources: dict[int, list[int]] = defaultdict(list)  # stage -> stages it gives gradients to
        self.grad_targets: dict[int, list[int]] = defaultdict(list)  # stage -> stages it gets gradients from
        for source, target in sorted({(source, target) for source, target, _ in links}):
            if not 0 <= source < target:
                raise InternalError(f"link from stage {source} to stage {target}", "values flow to later stages only")
            self.sources[target].append(source)
            self.targets[source].append(target)
        for source, target in sorted({(source, target) for source, target, has_grad in links if has_grad}):
            self.grad_sources[target].append(source)
            self.grad_targets[source].append(target)

    def sends_after(self, action: Action) -> list[Action]:
        """Return the sends of what the computation `action` made; a W makes nothing that others need."""
        if action.kind is Kind.W:
            return []
        kind, peers = (
            (Kind.SEND_F, self.targets[action.stage])
            if action.kind is Kind.F
            else (Kind.SEND_B, self.grad_sources[action.stage])
        )
        return [
            Action(kind, action.stage, action.microbatch, peer)
            for peer in peers
            if not self.is_local(peer, action.stage)
        ]

    def is_local(self, stage: int, other: int) -> bool:
        """Whether both stages are on one rank."""
        return self.ranks[stage] == self.ranks[other]

    def needs(self, action: Action) -> list[Action]:
        """Return what the computation `action` waits for: receives, or computations of the same rank."""
        if action.kind is Kind.W:
            return [Action(Kind.B, action.stage, action.microbatch)]
        forward = action.kind is Kind.F
        peers = self.sources[action.stage] if forward else self.grad_targets[action.stage]
        receive = Kind.RECV_F if forward else Kind.RECV_B
        return [
            Action(receive, action.stage, action.microbatch, peer)
            if not self.is_local(peer, action.stage)
            else Action(action.kind, peer, action.microbatch)
            for peer in peers
        ]


def _weave(rank: int, computes: list[Action], wiring: Wiring, channels: dict[Channel, Queue]) -> list[Action]:
    """Return one rank's computations and transfers."""
    pairs = {(action.kind, action.stage): Action(action.kind, action.stage, 0) for action in computes}
    sends = {pair: [(one.kind, one.peer) for one in wiring.sends_after(action)] for pair, action in pairs.items()}
    needs = {
        pair: [
            (one.kind, one.peer, channels[wiring.ranks[one.peer], rank])
            for one in wiring.needs(action)
            if one.kind in RECVS
        ]
        for pair, action in pairs.items()
    }
    posts: list[list[Action]] = [[] for _ in computes]
    for index, (kind, stage, microbatch, _) in enumerate(computes):
        for receive, peer, channel in needs[kind, stage]:
            posts[max(index - 1, 0)] += channel.take_up_to(Action(receive, stage, microbatch, peer))  # one ahead
    order: list[Action] = []
    for index, action in enumerate(computes):
        kind, stage, microbatch, _ = action
        order += posts[index]
        order.append(action)
        for send, peer in sends[kind, stage]:
            order.append(Action(send, stage, microbatch, peer))
    return order
