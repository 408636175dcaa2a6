"""One pass over all actions of a schedule: each rank advances until it waits, and gets start and end times.

In: the ids of the actions (action_ids.py), which are complete and have one order per channel, and durations.
Out: start and end of every computation or, if they do not end, the ranks that wait for each other. Work is
linear in the number of actions. The result does not depend on the order in which ranks take turns, as
dependencies do not.

    sweep = Sweep(ids, orders, [ids.of(order) for order in orders], durations, lambda sender, receiver: 0)
    sweep.to_the_end()   # sweep.starts[rank], sweep.ends[rank]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from autoptd.ir.actions import COMPUTES, RECVS, SENDS, Action, Kind
from autoptd.schedule.action_ids import ActionIds, Row
from autoptd.schedule.wiring import partner

COMPUTE, SEND, RECEIVE, REDUCE = range(4)
# (distance to the needed id, travel time)
Need = tuple[int, float]
# Of a row of actions: (kind, duration, needs, channel number)
Plan = tuple[int, float, list[Need], int]


class Sweep:
    """A run in progress: each rank's clock and position, and the events so far."""

    def __init__(
        self,
        ids: ActionIds,
        orders: Sequence[Sequence[Action]],
        rows: Sequence[Sequence[int]],
        durations: Mapping[Kind, Sequence[float]],
        link_time: Callable[[int, int], float],
    ) -> None:
        self.ids, self.orders, self.rows = ids, orders, rows
        self.durations, self.link_time = durations, link_time
        ranks = range(len(orders))
        # Of computations, per rank.
        self.starts: list[list[float]] = [[] for _ in ranks]
        self.ends: list[list[float]] = [[] for _ in ranks]
        # Per rank, the index of its next action.
        self.at = [0 for _ in ranks]
        self.clock: list[float] = [0 for _ in ranks]
        # The id that a rank waits for, or -1.
        self.blocked = [-1 for _ in ranks]
        self.runnable = deque(ranks)
        # Id -> ranks that wait for it.
        self.waiting: dict[int, list[int]] = {}
        events = len(ids.rows) * ids.width
        # By id, when it ended: computations, and RECVs whose message has arrived.
        self.done: list[float | None] = [None] * events
        # By id of the RECV, when the first of its two sides was issued.
        self.half: list[float | None] = [None] * events
        # (from rank, to rank) -> number of the channel.
        self.channels: dict[tuple[int, int], int] = {}
        self.plans = [self._plan(row, needs) for row, needs in zip(ids.rows, ids.needs, strict=True)]
        # When the last message of a channel moved.
        self.free: list[float] = [0] * len(self.channels)

    def _plan(self, row: Row, needs: Sequence[tuple[int, int]]) -> Plan:
        """Return the facts that the sweep needs about a row of actions."""
        kind, stage, peer = row
        ranks, distance = self.ids.wiring.ranks, self.ids.distance
        if kind in COMPUTES:
            timed = []
            for step, source in needs:
                # A value without a send action moves from the other rank by itself.
                is_remote = source >= 0 and ranks[source] != ranks[stage]
                timed.append((step, self.link_time(source, stage) if is_remote else 0))
            return COMPUTE, self.durations[kind][stage], timed, -1
        if kind in SENDS:
            channel = self.channels.setdefault((ranks[stage], ranks[peer]), len(self.channels))
            made = Kind.F if kind is Kind.SEND_F else Kind.B, stage, -1
            found = [(distance(row, made), 0.0), (distance(row, self.ids.message(row)), 0.0)]
            return SEND, self.link_time(stage, peer), found, channel
        if kind in RECVS:
            channel = self.channels.setdefault((ranks[peer], ranks[stage]), len(self.channels))
            return RECEIVE, self.link_time(peer, stage), [], channel
        return REDUCE, 0, [], -1

    def to_the_end(self) -> bool:
        """Advance ranks until all are done (True) or stuck (False)."""
        while self.runnable:
            if not self._advance(self.runnable.popleft()):
                return False
        return all(number < 0 for number in self.blocked)

    def _advance(self, rank: int) -> bool:
        """Run `rank` until it is done or waits; False if an action comes before one that it needs."""
        row, width, plans = self.rows[rank], self.ids.width, self.plans
        done, half, free, waiting = self.done, self.half, self.free, self.waiting
        starts, ends, clock = self.starts[rank], self.ends[rank], self.clock[rank]
        for index in range(self.at[rank], len(row)):
            number = row[index]
            what, time, needs, channel = plans[number // width]
            if what == COMPUTE:
                start = clock
                for distance, travel in needs:
                    when = done[number + distance]
                    if when is None:
                        self.at[rank], self.clock[rank] = index, clock
                        self._block(rank, number + distance)
                        return True
                    if when + travel > start:
                        start = when + travel
                done[number] = clock = start + time
                starts.append(start)
                ends.append(clock)
            elif what == REDUCE:
                if not self._is_reduced_last(number):
                    return False
            else:
                if what == SEND:
                    if done[number + needs[0][0]] is None:
                        return False
                    # A message has the id of its RECV.
                    number += needs[1][0]
                issued = half[number]
                # The first side is issued: nothing has moved yet, and neither SEND nor RECV waits.
                if issued is None:
                    half[number] = clock
                    continue
                # The second side is issued. All earlier messages of the channel are matched, as both sides
                # issue in one order (`have_one_order`), so this one moves as soon as those have.
                begin = clock if clock > issued else issued
                if free[channel] > begin:
                    begin = free[channel]
                free[channel] = done[number] = begin + time
            if number in waiting:
                self._wake(number)
        self.at[rank] = len(row)
        return True

    def _block(self, rank: int, number: int) -> None:
        self.blocked[rank] = number
        self.waiting.setdefault(number, []).append(rank)

    def _wake(self, number: int) -> None:
        for rank in self.waiting.pop(number):
            self.blocked[rank] = -1
            self.runnable.append(rank)

    def _is_reduced_last(self, number: int) -> bool:
        """Tell whether the stage has run all its B and W when it is reduced."""
        width, rows = self.ids.width, self.ids.row_of
        stage = self.ids.rows[number // width][1]
        firsts = [rows[kind, stage, -1] * width + 1 for kind in (Kind.B, Kind.W) if (kind, stage, -1) in rows]
        return all(None not in self.done[first : first + width - 1] for first in firsts)

    def deadlock(self) -> str:
        """Describe where every blocked rank waits and for which rank, and one cycle."""
        owner: dict[int, int] = {}
        lines = []
        for rank, number in enumerate(self.blocked):
            if number >= 0:
                need = self.ids.action(number)
                owner[rank] = self.ids.wiring.ranks[need.peer if need.kind in RECVS else need.stage]
                what = f"message {partner(need)}" if need.kind in RECVS else str(need)
                where = self.orders[rank][self.at[rank]]
                lines.append(f"rank {rank} waits in {where} for {what} of rank {owner[rank]}")
        path = [min(owner)]
        # The rank that a blocked rank waits for is blocked too, as all others are done.
        while path[-1] not in path[:-1]:
            path.append(owner[path[-1]])
        circle = path[path.index(path[-1]) :]
        return f"deadlock: {'; '.join(lines)}; cycle of ranks: {' -> '.join(map(str, circle))}"
