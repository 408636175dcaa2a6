"""Run a schedule on paper: prove that it ends, and measure its bubble, its live microbatches and its chart.

In: orders, with or without transfers, and a time per forward, backward and message. Out: a `Simulation`, or a
PlanError that lists every fault, or shows who waits for whom in a deadlock.

What the proof says. A rank waits in F and B only. RECV posts a receive, SEND starts a send, and neither waits. A
message moves once its SEND and its RECV have both been issued *and* every earlier message of its channel (directed
pair of ranks) has moved: that is a rendezvous on an in-order communicator, so nothing here relies on buffers in the
transport or on tags. An order that ends here therefore ends on any transport which starts sends and receives without
blocking the caller and gives each channel a communicator of its own (NCCL with one group per direction; gloo, whose
isend completes only when received). As every message is sent once and received once, waiting for all sends at the end
of the step ends too.

    result = simulate(one_f_one_b(p=2, m=4))
    # result.finish == 15.0, result.bubble == 0.25, result.peak_live == (2, 1)
    # result.spans[1][0] == (parse("F1.0"), 1.0, 2.0)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from autoptd.errors import PlanError
from autoptd.ir.actions import COMPUTES, RECVS, SENDS, Action, Kind, ranks_of_stages
from autoptd.schedule.check import find_faults, guess_links, has_transfers
from autoptd.schedule.transfers import Link, Wiring, partner

Span = tuple[Action, float, float]  # what, start, end
SHOWN = 20  # faults printed of a broken schedule: one slip can cause thousands


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs, in the unit of the durations given.

    `finish` is the time when the last rank is done, `spans` the computations of each rank. `bubble` is finish / ideal
    - 1, where ideal is the busiest rank's own work: the idle share over ideal time of SC'21, section 2.2. `peak_live`
    is, per rank, the largest number of (stage, microbatch) pairs whose forward has begun and whose backward (or W, where
    there is one) has not ended.
    """

    finish: float
    bubble: float
    spans: tuple[tuple[Span, ...], ...]
    peak_live: tuple[int, ...]


def simulate(
    orders: Sequence[Sequence[Action]],
    *,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    weight_gradient: float | Sequence[float] = 1.0,
    link: float = 0.0,
    links: Sequence[Link] | None = None,
) -> Simulation:
    """Run `orders`, one per pipeline rank; raise PlanError if they are faulty or do not end.

    `forward` and `backward` are durations, one for all stages or one per stage; where W actions split the backward, each
    takes `weight_gradient` of it and B the rest. `link` is the duration of a message between ranks. `links` are the links
    that the orders must serve. Left out, they are those of the transfers in the orders, or the chain 0 -> 1 -> 2 ... where
    there are none (values then move by themselves as soon as they are made).
    """
    wanted = guess_links(orders) if links is None else links
    faults = find_faults(orders, wanted)
    if faults:
        more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        _refuse("; ".join(faults[:SHOWN] + more))
    num_stages = 1 + max(action.stage for order in orders for action in order)
    durations = {Kind.F: _per_stage(forward, num_stages), Kind.B: _per_stage(backward, num_stages)}
    if any(action.kind is Kind.W for order in orders for action in order):
        durations[Kind.W] = _per_stage(weight_gradient, num_stages)
        rest = [whole - part for whole, part in zip(durations[Kind.B], durations[Kind.W], strict=True)]
        durations[Kind.B] = _per_stage(rest, num_stages)
    run = _Run(orders, Wiring(wanted, ranks_of_stages(orders)), durations, link, has_transfers(orders))
    run.to_the_end()
    return _measure(run.spans)


class _Run:
    """A run in progress: each rank's clock and place, and what has happened so far."""

    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        wiring: Wiring,
        durations: dict[Kind, list[float]],
        link: float,
        with_transfers: bool,
    ) -> None:
        self.orders, self.wiring, self.durations, self.link = orders, wiring, durations, link
        self.with_transfers = with_transfers
        ranks = range(len(orders))
        self.at = [0 for _ in ranks]  # index of the next action
        self.clock = [0.0 for _ in ranks]
        self.spans: list[list[Span]] = [[] for _ in ranks]
        self.done: dict[Action, float] = {}  # computations and received messages -> when
        self.half: dict[Action, float] = {}  # RECV of messages sent but not posted, or posted but not sent -> when
        self.free: dict[tuple[int, int], float] = {}  # channel -> when its last message has moved
        self.waiting: dict[Action, list[int]] = {}  # what ranks are blocked for
        self.blocked: list[Action | None] = [None for _ in ranks]
        self.runnable = deque(ranks)

    def to_the_end(self) -> None:
        """Advance ranks until all are done; work is linear in the number of actions."""
        while self.runnable:
            self._advance(self.runnable.popleft())
        if any(self.blocked):
            _refuse(self._deadlock())

    def _advance(self, rank: int) -> None:
        """Run `rank` until it is done or blocked."""
        order = self.orders[rank]
        while self.at[rank] < len(order):
            action = order[self.at[rank]]
            if action.kind in COMPUTES:
                missing = self._compute(rank, action)
                if missing:
                    self.blocked[rank] = missing
                    self.waiting.setdefault(missing, []).append(rank)
                    return
            elif action.kind is not Kind.REDUCE:
                self._transfer(rank, action)
            self.at[rank] += 1

    def _compute(self, rank: int, action: Action) -> Action | None:
        """Run a computation, or return what it still waits for."""
        start = self.clock[rank]
        for need in self._needs(action):
            if need not in self.done:
                return need
            start = max(start, self.done[need] + self._travel(need, rank))
        end = start + self.durations[action.kind][action.stage]
        self.clock[rank] = end
        self.spans[rank].append((action, start, end))
        self._happened(action, end)
        return None

    def _needs(self, action: Action) -> list[Action]:
        needs = self.wiring.needs(action)
        if self.with_transfers:
            return needs
        return [Action(action.kind, one.peer, one.microbatch) if one.kind in RECVS else one for one in needs]

    def _travel(self, need: Action, rank: int) -> float:
        """Time from `need` to `rank` where no transfer was spelled out: a RECV has its time included."""
        return self.link if need.kind in COMPUTES and self.wiring.ranks[need.stage] != rank else 0.0

    def _transfer(self, rank: int, action: Action) -> None:
        """Issue a send or a receive; the message moves when the other side has been issued too."""
        sends = action.kind in SENDS
        receive = partner(action) if sends else action
        now = self.clock[rank]
        if receive not in self.half:
            self.half[receive] = now
            return
        other = self.wiring.ranks[action.peer]
        channel = (rank, other) if sends else (other, rank)
        # Both sides issue in one order (check.py), so all earlier messages of this channel are matched by now.
        arrival = max(now, self.half.pop(receive), self.free.get(channel, 0.0)) + self.link
        self.free[channel] = arrival
        self._happened(receive, arrival)

    def _happened(self, action: Action, when: float) -> None:
        self.done[action] = when
        for rank in self.waiting.pop(action, ()):
            self.blocked[rank] = None
            self.runnable.append(rank)

    def _deadlock(self) -> str:
        """Say where every blocked rank waits, for what and whom, and show one circle."""
        owner: dict[int, int] = {}
        lines = []
        for rank, need in enumerate(self.blocked):
            if need:
                owner[rank] = self.wiring.ranks[need.peer if need.kind in RECVS else need.stage]
                what = f"message {partner(need)}" if need.kind in RECVS else str(need)
                lines.append(
                    f"rank {rank} waits in {self.orders[rank][self.at[rank]]} for {what} of rank {owner[rank]}"
                )
        path = [min(owner)]
        while path[-1] not in path[:-1]:  # whoever a blocked rank waits for is blocked too, as all others are done
            path.append(owner[path[-1]])
        circle = path[path.index(path[-1]) :]
        return f"deadlock: {'; '.join(lines)}; the circle is rank {' -> '.join(map(str, circle))}"


def _measure(spans: list[list[Span]]) -> Simulation:
    finish = max(end for row in spans for _, _, end in row)
    ideal = max(sum(end - start for _, start, end in row) for row in spans)
    return Simulation(finish, finish / ideal - 1, tuple(map(tuple, spans)), tuple(_peak_live(row) for row in spans))


def _peak_live(row: list[Span]) -> int:
    live = peak = 0
    last = Kind.W if any(action.kind is Kind.W for action, _, _ in row) else Kind.B
    for action, _, _ in row:
        live += (action.kind is Kind.F) - (action.kind is last)
        peak = max(peak, live)
    return peak


def _per_stage(duration: float | Sequence[float], num_stages: int) -> list[float]:
    values = [float(duration)] * num_stages if isinstance(duration, (int, float)) else [float(one) for one in duration]
    if len(values) != num_stages or not all(one > 0 for one in values):
        raise ValueError(f"durations {values}: one positive number for each of {num_stages} stages is needed")
    return values


def _refuse(fact: str) -> None:
    raise PlanError("schedule", fact, "correct these entries, or take one of the schedules gpipe, 1f1b, interleaved")
