"""Zero-bubble orders: each backward is split into B (input gradients) and W (weight gradients), and W fills
idle time.

Terms: p pipeline ranks, m microbatches; `ranks[s]` is the pipeline rank of stage s. A (stage, microbatch) is
*live* on its rank from its F to its W. Qi et al. 2023, "Zero Bubble Pipeline Parallelism": B goes first, as
the previous rank waits for it; W can wait, but holds memory. The orders below come from simulating the
pipeline in unit time (F, B and W take 1 each): every rank alternates forwards and backwards, and runs a W if
neither is ready or no more microbatches may be live.

    zb_h1(p=2, m=2)
    # rank 0: F0.0 F0.1 B0.0 W0.0 B0.1 W0.1
    # rank 1: F1.0 B1.0 F1.1 B1.1 W1.0 W1.1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from autoptd.errors import InternalError
from autoptd.ir.actions import Action, Kind, Orders


def zb_h1(p: int, m: int) -> Orders:
    """Run ZB-H1: 1F1B's memory (p microbatches live), a third of its bubble: (p-1) of the 3m units of work."""
    return play(range(p), m, max_live=p)


def zb_2p(p: int, m: int) -> Orders:
    """Run ZB-2P: twice the memory (2p-1 microbatches live).

    No rank is idle between its first action and its last.
    """
    return play(range(p), m, max_live=2 * p - 1)


def zbv(p: int, m: int) -> Orders:
    """Run ZBV: two stages per rank in a V, 1F1B's memory (2p half-size stages live), (p-1) of 6m units idle."""
    return play([*range(p), *reversed(range(p))], m, max_live=2 * p)


def play(ranks: Sequence[int], m: int, max_live: int) -> Orders:
    """Simulate a pipeline of stages on `ranks`, with at most `max_live` (stage, microbatch) live, and return
    each rank's actions.
    """
    game = _Game(ranks, m, max_live)
    game.to_the_end()
    return game.orders


class _Game:
    """The state of the simulation, advanced one unit of time after another."""

    def __init__(self, ranks: Sequence[int], m: int, max_live: int) -> None:
        self.ranks, self.m, self.max_live = ranks, m, max_live
        count = 1 + max(ranks)
        # Stages of each rank, last one first: other ranks wait longest for its backward.
        self.stages: list[list[int]] = [[] for _ in range(count)]
        for stage, rank in reversed(list(enumerate(ranks))):
            self.stages[rank].append(stage)
        self.orders: Orders = [[] for _ in range(count)]
        self.done: dict[Action, int] = {}
        # Forwards and backwards done by each stage.
        self.forwards, self.backwards = [0] * len(ranks), [0] * len(ranks)
        # Weight gradients that each rank may compute, oldest first.
        self.waiting: list[deque[Action]] = [deque() for _ in range(count)]
        self.live = [0] * count

    def to_the_end(self) -> None:
        """Advance until every stage has done F, B and W of every microbatch."""
        now = 0
        while len(self.done) < 3 * self.m * len(self.ranks):
            # All ranks choose by the state before this unit of time.
            chosen = [(rank, self._next(rank, now)) for rank in range(len(self.orders))]
            if not any(action for _, action in chosen):
                raise InternalError(
                    "zero_bubble",
                    f"deadlock: no rank can proceed with {self.max_live} microbatches in flight",
                )
            now += 1
            for rank, action in chosen:
                if action is not None:
                    self._take(rank, now, action)

    def _next(self, rank: int, now: int) -> Action | None:
        """Choose the next action of `rank`: forwards and backwards alternate, else a weight gradient."""
        forward = next((s for s in self.stages[rank] if self._can_forward(s, now)), None)
        backward = next((s for s in self.stages[rank] if self._can_backward(s, now)), None)
        has_room = self.live[rank] < self.max_live
        # As in 1F1B; two backwards in a row only if no forward may start.
        after_forward = not self.orders[rank] or self.orders[rank][-1].kind is Kind.F
        if backward is not None and (after_forward or forward is None or not has_room):
            return Action(Kind.B, backward, self.backwards[backward])
        if forward is not None and has_room:
            return Action(Kind.F, forward, self.forwards[forward])
        return self.waiting[rank][0] if self.waiting[rank] else None

    def _can_forward(self, stage: int, now: int) -> bool:
        number = self.forwards[stage]
        return number < self.m and (stage == 0 or self._is_done(Action(Kind.F, stage - 1, number), now))

    def _can_backward(self, stage: int, now: int) -> bool:
        number = self.backwards[stage]
        if number >= self.forwards[stage]:
            return False
        return stage == len(self.ranks) - 1 or self._is_done(Action(Kind.B, stage + 1, number), now)

    def _is_done(self, action: Action, now: int) -> bool:
        return self.done.get(action, now + 1) <= now

    def _take(self, rank: int, end: int, action: Action) -> None:
        self.orders[rank].append(action)
        self.done[action] = end
        if action.kind is Kind.F:
            self.forwards[action.stage] += 1
            self.live[rank] += 1
        elif action.kind is Kind.B:
            self.backwards[action.stage] += 1
            self.waiting[rank].append(Action(Kind.W, action.stage, action.microbatch))
        else:
            self.waiting[rank].popleft()
            self.live[rank] -= 1
