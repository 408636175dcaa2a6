"""Actions as integers, so that a schedule of a million actions is checked and simulated in about a second.

In: the wiring of the stages, m, and which kinds of actions there are besides F and B. Out: `ActionIds`, which
numbers every action of the schedule and tells, per *row*, what its actions do and wait for.

Terms. A row is a (kind, stage, peer): m actions that differ in their microbatch only. The id of an action is
`row * width + microbatch + 1`; the + 1 is for REDUCE, whose microbatch is -1. So an action and the one it
waits for are a fixed distance apart, whatever the microbatch: `id + distance`.

    wiring = Wiring([(0, 1, True)], ranks=(0, 1))
    ids = ActionIds(wiring, m=2, has_weights=False, has_transfers=False, has_reduces=False)
    ids.of([parse("F0.0"), parse("B0.1")])   # [1, 5]: the rows are F0, B0, F1, B1, and the width is 3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoptd.ir.actions import COMPUTES, SENDS, Action, Kind
from autoptd.schedule.wiring import Wiring, partner

# (kind, stage, peer)
Row = tuple[Kind, int, int]


class ActionIds:
    """The ids of all actions of a schedule; lists are indexed by row."""

    def __init__(
        self, wiring: Wiring, m: int, *, has_weights: bool, has_transfers: bool, has_reduces: bool
    ) -> None:
        self.wiring, self.width = wiring, m + 1
        kinds = COMPUTES if has_weights else (Kind.F, Kind.B)
        self.rows: list[Row] = []
        # The rank of each row.
        self.ranks: list[int] = []
        for stage, rank in enumerate(wiring.ranks):
            row = list(_rows(stage, kinds, wiring if has_transfers else None))
            self.rows += [*row, (Kind.REDUCE, stage, -1)] if has_reduces else row
            self.ranks += [rank] * (len(self.rows) - len(self.ranks))
        self.row_of = {row: number for number, row in enumerate(self.rows)}
        self.needs = [tuple(self._needs(row, has_transfers)) for row in self.rows]

    def of(self, order: Sequence[Action]) -> list[int]:
        """Return the id of every action; -1 for one that the schedule does not have."""
        width, row_of = self.width, self.row_of
        ids = []
        for kind, stage, microbatch, peer in order:
            row = row_of.get((kind, stage, peer))
            ids.append(-1 if row is None else row * width + microbatch + 1)
        return ids

    def expected(self, rank: int) -> set[int]:
        """Return the ids of all actions that `rank` must run."""
        expected: set[int] = set()
        for number, (kind, _, _) in enumerate(self.rows):
            if self.ranks[number] != rank:
                continue
            # The id for microbatch -1, which only REDUCE has.
            first = number * self.width
            if kind is Kind.REDUCE:
                expected.add(first)
            else:
                expected.update(range(first + 1, first + self.width))
        return expected

    def action(self, number: int) -> Action:
        """Return the action with this id."""
        kind, stage, peer = self.rows[number // self.width]
        return Action(kind, stage, number % self.width - 1, peer)

    def distance(self, row: Row, other: Row) -> int:
        """Return the step from the id of an action of `row` to that of `other` for the same microbatch."""
        return (self.row_of[other] - self.row_of[row]) * self.width

    def message(self, row: Row) -> Row:
        """Return the row of the receives that match a row of transfers."""
        if row[0] not in SENDS:
            return row
        receive = partner(Action(row[0], row[1], 0, row[2]))
        return receive.kind, receive.stage, receive.peer

    def _needs(self, row: Row, has_transfers: bool) -> Iterator[tuple[int, int]]:
        """Yield the dependencies of a computation: (distance, stage whose value arrives without a send, or
        -1).
        """
        kind, stage, _ = row
        if kind not in COMPUTES:
            return
        if kind is Kind.B:
            yield self.distance(row, (Kind.F, stage, -1)), -1
        for need in self.wiring.needs(Action(kind, stage, 0)):
            if need.kind in COMPUTES or has_transfers:
                yield self.distance(row, (need.kind, need.stage, need.peer)), -1
            else:
                yield self.distance(row, (kind, need.peer, -1)), need.peer


def _rows(stage: int, kinds: Sequence[Kind], wiring: Wiring | None) -> Iterator[Row]:
    """Yield the computations of a stage and, with `wiring`, their transfers."""
    for kind in kinds:
        yield kind, stage, -1
        if wiring is not None:
            for send in wiring.sends_after(Action(kind, stage, 0)):
                yield send.kind, stage, send.peer
            for need in wiring.needs(Action(kind, stage, 0)):
                if need.kind not in COMPUTES:
                    yield need.kind, stage, need.peer
