"""The links of a pipeline, looked up by stage, and the two ends of a message.

In: the links between stages, and the pipeline rank of each stage. Out: the dependencies of a computation, and
the sends that follow it.

Terms. A *link* (source, target, has_grad) means that stage `target` reads values of the earlier stage
`source` (not always its neighbour), and whether gradients flow back. One message carries all of that for one
microbatch.

    Wiring([(0, 1, True)], ranks=(0, 1)).needs(parse("F1.0"))   # [RECV_F1.0<0]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autoptd.errors import InternalError
from autoptd.ir.actions import Action, Kind

# (source stage, target stage, has_grad)
Link = tuple[int, int, bool]
PARTNER = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.RECV_F: Kind.SEND_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.RECV_B: Kind.SEND_B,
}


def partner(transfer: Action) -> Action:
    """Return the receive of a send, and the send of a receive."""
    return Action(PARTNER[transfer.kind], transfer.peer, transfer.microbatch, transfer.stage)


class Wiring:
    """The links, looked up by stage; `ranks` is the pipeline rank of every stage.

    Duplicate links are merged (with gradient if one of them has it).
    """

    def __init__(self, links: Sequence[Link], ranks: Sequence[int]) -> None:
        self.ranks = ranks
        # Stage -> stages whose values it reads.
        self.sources: dict[int, list[int]] = defaultdict(list)
        # Stage -> stages that read its values.
        self.targets: dict[int, list[int]] = defaultdict(list)
        # Stage -> stages it gives gradients to.
        self.grad_sources: dict[int, list[int]] = defaultdict(list)
        # Stage -> stages it gets gradients from.
        self.grad_targets: dict[int, list[int]] = defaultdict(list)
        for source, target in sorted({(source, target) for source, target, _ in links}):
            if not 0 <= source < target:
                site = f"link from stage {source} to stage {target}"
                raise InternalError(site, "values must flow to later stages")
            self.sources[target].append(source)
            self.targets[source].append(target)
        for source, target in sorted({(source, target) for source, target, has_grad in links if has_grad}):
            self.grad_sources[target].append(source)
            self.grad_targets[source].append(target)

    def sends_after(self, action: Action) -> list[Action]:
        """Return the sends of the results of a computation; a W has none."""
        if action.kind is Kind.W:
            return []
        if action.kind is Kind.F:
            kind, peers = Kind.SEND_F, self.targets[action.stage]
        else:
            kind, peers = Kind.SEND_B, self.grad_sources[action.stage]
        remote = [peer for peer in peers if not self.is_local(peer, action.stage)]
        return [Action(kind, action.stage, action.microbatch, peer) for peer in remote]

    def is_local(self, stage: int, other: int) -> bool:
        """Tell whether both stages are on one rank."""
        return self.ranks[stage] == self.ranks[other]

    def needs(self, action: Action) -> list[Action]:
        """Return the dependencies of a computation: receives, or computations on the same rank."""
        if action.kind is Kind.W:
            return [Action(Kind.B, action.stage, action.microbatch)]
        forward = action.kind is Kind.F
        peers = self.sources[action.stage] if forward else self.grad_targets[action.stage]
        receive = Kind.RECV_F if forward else Kind.RECV_B
        needs = []
        for peer in peers:
            if self.is_local(peer, action.stage):
                needs.append(Action(action.kind, peer, action.microbatch))
            else:
                needs.append(Action(receive, action.stage, action.microbatch, peer))
        return needs
