"""Simulate a schedule: prove that it ends, and measure its bubble, idle time and memory.

In: orders, with or without transfers, and a time per forward, backward and message. Out: a `Simulation`, or a
PlanError that lists every fault, or the cycle of ranks in a deadlock.

What the proof says. A rank waits in F and B only. RECV posts a receive, SEND starts a send, and neither
waits. A message moves once its SEND and its RECV have both been issued *and* every earlier message of its
channel (directed pair of ranks) has moved: that is a rendezvous on an in-order communicator, so nothing here
relies on buffers in the transport or on tags. As every message is sent once and received once, waiting for
all sends at the end of the step ends too.

Moreover, all ranks issue their messages in one order: the run ends even if every rank completes each SEND and
RECV, over any communicator, before it starts the next action, including computations with collectives, as
tensor and data parallel ranks have those at the same places of one order. So the run ends on any transport
that starts operations in issue order (NCCL, whose kernels wait for room on the device; gloo, whose isend
completes when received).

    result = simulate(one_f_one_b(p=2, m=4))
    # result.makespan == 15, result.bubble == 0.25, result.peak_live == (2, 1)
    # result.spans[1][0] == (parse("F1.0"), 1, 2)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from operator import itemgetter

from autoptd.errors import InternalError, PlanError
from autoptd.ir.actions import RECVS, SCHEDULES, SENDS, Action, Kind, ranks_of_stages
from autoptd.schedule.action_ids import ActionIds
from autoptd.schedule.check import find_crossed, find_faults, guess_links
from autoptd.schedule.measure import Simulation
from autoptd.schedule.sweep import Sweep
from autoptd.schedule.wiring import Link, Wiring

LinkTimes = float | Mapping[tuple[int, int], float] | Callable[[int, int], float]
# Fields of an action: over a million actions, `map` with these is faster than attributes.
KIND, MICROBATCH = itemgetter(0), itemgetter(2)
# Faults printed per broken schedule: one slip can cause thousands.
MAX_FAULTS = 20


def simulate(
    orders: Sequence[Sequence[Action]],
    *,
    forward: float | Sequence[float] = 1,
    backward: float | Sequence[float] = 2,
    weight_gradient: float | Sequence[float] = 1,
    link: LinkTimes = 0,
    links: Sequence[Link] | None = None,
) -> Simulation:
    """Run `orders`, one per pipeline rank; raise PlanError if they are faulty or do not end.

    `forward` and `backward` are durations, one for all stages or one per stage; where W actions split the
    backward, each takes `weight_gradient` of it and B the rest. `link` is the duration of a message between
    ranks: one for all, or a function or mapping of (sending stage, receiving stage), where gradients take the
    time of (source, target) unless the mapping has (target, source) as well. Integers and Fractions give
    exact times. `links` are the links that the orders must serve; by default, those of the transfers in the
    orders, or the chain 0 -> 1 -> 2 ... if there are none (a value then moves once it is computed).
    """
    complete = Complete.of(orders, links)
    sweep = complete.run(forward, backward, weight_gradient, link)
    complete.check_messages()
    return Simulation(orders, sweep.starts, sweep.ends)


@dataclass(frozen=True)
class Complete:
    """Orders in which every rank runs exactly its actions; they can be run with any durations."""

    orders: Sequence[Sequence[Action]]
    links: Sequence[Link]
    ids: ActionIds
    rows: Sequence[Sequence[int]]

    @classmethod
    def of(cls, orders: Sequence[Sequence[Action]], links: Sequence[Link] | None = None) -> Complete:
        """Check the orders against `links`; PlanError if they do not serve them."""
        wanted = guess_links(orders) if links is None else links
        ids = find_ids(orders, wanted)
        rows = [ids.of(order) for order in orders] if ids else []
        if ids is None or not is_complete(ids, rows):
            raise _refusal(orders, wanted)
        return cls(orders, wanted, ids, rows)

    def run(
        self,
        forward: float | Sequence[float],
        backward: float | Sequence[float],
        weight_gradient: float | Sequence[float],
        link: LinkTimes = 0,
    ) -> Sweep:
        """Run all actions; PlanError if they do not end."""
        durations = _durations(self.ids, forward, backward, weight_gradient)
        sweep = Sweep(self.ids, self.orders, self.rows, durations, _link_time(link))
        if not sweep.to_the_end():
            raise _refusal(self.orders, self.links, sweep.deadlock)
        return sweep

    def check_messages(self) -> None:
        """Raise PlanError if ranks do not issue their messages in one order."""
        if not have_one_order(self.ids, self.rows):
            raise _refusal(self.orders, self.links, lambda: find_crossed(self.orders))


def find_ids(orders: Sequence[Sequence[Action]], links: Sequence[Link]) -> ActionIds | None:
    """Number the actions needed to serve `links`; None if stages or microbatches have no such ids."""
    ranks = ranks_of_stages(orders)
    stages_of_rank = {ranks.count(rank) for rank in range(len(orders))}
    # Every stage has a rank, and all ranks have equally many stages.
    if not ranks or -1 in ranks or len(stages_of_rank) > 1:
        return None
    if any(target >= len(ranks) for _, target, _ in links):
        return None
    microbatches = [set(map(MICROBATCH, order)) for order in orders]
    if min(map(min, microbatches)) < -1:
        return None
    # Rank 0 stands for all: a rank with other kinds is incomplete.
    kinds = set(map(KIND, orders[0]))
    return ActionIds(
        Wiring(links, ranks),
        m=1 + max(map(max, microbatches)),
        has_weights=Kind.W in kinds,
        has_transfers=not kinds.isdisjoint((*SENDS, *RECVS)),
        has_reduces=Kind.REDUCE in kinds,
    )


def is_complete(ids: ActionIds, rows: Sequence[Sequence[int]]) -> bool:
    """Tell whether every rank runs exactly its actions, each once."""
    for rank, row in enumerate(rows):
        expected = ids.expected(rank)
        if len(row) != len(expected) or set(row) != expected:
            return False
    return True


def have_one_order(ids: ActionIds, rows: Sequence[Sequence[int]]) -> bool:
    """Tell whether all messages move if every rank completes each transfer before it starts the next."""
    queues = _messages(ids, rows)
    at = [0] * len(queues)
    # Message -> the rank that has reached it and waits for its peer.
    here: dict[int, int] = {}
    runnable = list(range(len(queues)))
    while runnable:
        rank = runnable.pop()
        queue, place = queues[rank], at[rank]
        while place < len(queue):
            message = queue[place]
            # The first of the two ranks waits; the second advances both.
            if message not in here:
                here[message] = rank
                break
            other = here.pop(message)
            at[other] += 1
            runnable.append(other)
            place += 1
        at[rank] = place
    return all(place == len(queue) for place, queue in zip(at, queues, strict=True))


def _messages(ids: ActionIds, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, per rank, the ids of its messages in order. A message has the id of its RECV."""
    width = ids.width
    to_message: list[int | None] = [None] * len(ids.rows)
    for index, row in enumerate(ids.rows):
        if row[0] in SENDS or row[0] in RECVS:
            to_message[index] = ids.distance(row, ids.message(row))
    queues: list[list[int]] = []
    for order in rows:
        queues.append([])
        for number in order:
            distance = to_message[number // width]
            if distance is not None:
                queues[-1].append(number + distance)
    return queues


def _durations(
    ids: ActionIds,
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    weight_gradient: float | Sequence[float],
) -> dict[Kind, list[float]]:
    num_stages = len(ids.wiring.ranks)
    durations = {Kind.F: _per_stage(forward, num_stages), Kind.B: _per_stage(backward, num_stages)}
    if (Kind.W, 0, -1) in ids.row_of:
        durations[Kind.W] = _per_stage(weight_gradient, num_stages)
        rest = [whole - part for whole, part in zip(durations[Kind.B], durations[Kind.W], strict=True)]
        durations[Kind.B] = _per_stage(rest, num_stages)
    return durations


def _per_stage(duration: float | Sequence[float], num_stages: int) -> list[float]:
    values = [duration] * num_stages if isinstance(duration, Real) else list(duration)  # type: ignore[list-item, arg-type]
    if len(values) != num_stages or not all(value > 0 for value in values):  # type: ignore[operator]
        raise ValueError(f"durations {values}: must be positive, one for each of {num_stages} stages")
    return values  # type: ignore[return-value]


def _link_time(link: LinkTimes) -> Callable[[int, int], float]:
    """Return the duration of a message as a function of the stages that send and receive it."""

    def time_of(sender: int, receiver: int) -> float:
        if callable(link):
            time = link(sender, receiver)
        elif isinstance(link, Mapping):
            time = link[sender, receiver] if (sender, receiver) in link else link[receiver, sender]
        else:
            time = link
        if not time >= 0:
            raise ValueError(f"link time {time} from stage {sender} to stage {receiver} is negative")
        return time

    return time_of


def _refusal(
    orders: Sequence[Sequence[Action]], links: Sequence[Link], stuck: Callable[[], str] | None = None
) -> Exception:
    """Return the error for orders that are incomplete or stuck: their faults, else the text in `stuck`."""
    faults = find_faults(orders, links)
    if not faults and stuck is None:
        return InternalError(
            "schedule", f"the orders do not fit their {len(links)} links, for an unknown reason"
        )
    if not faults and stuck is not None:
        faults = [stuck()]
    more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
    fact = "; ".join(faults[:MAX_FAULTS] + more)
    remedy = "correct these entries (SEND, RECV and REDUCE may be left out), or use one of "
    remedy += ", ".join(SCHEDULES)
    return PlanError("schedule", fact, remedy)


# Longer schedules take over 30 ms per simulation.
MAX_ACTIONS = 10_000
# The simulation needs positive times.
MIN_SECONDS = 1e-12
MakespanOf = Callable[[Sequence[float], Sequence[float]], float]


def makespan_of(orders: Sequence[Sequence[Action]]) -> MakespanOf | None:
    """Return the makespan as a function of the seconds per stage and of the recomputation seconds.

    None for more than `MAX_ACTIONS` actions.
    """
    if sum(map(len, orders)) > MAX_ACTIONS:
        return None
    # Done once: it does not depend on durations.
    complete = Complete.of(orders)
    complete.check_messages()

    def makespan(stages: Sequence[float], again: Sequence[float]) -> float:
        third = [max(seconds, MIN_SECONDS) / 3 for seconds in stages]
        backward = [2 * seconds + more for seconds, more in zip(third, again, strict=True)]
        sweep = complete.run(third, backward, third)
        return max(ends[-1] for ends in sweep.ends)

    return makespan
