"""What a chart of a schedule shows: one run of a step, simulated or executed, as plain numbers.

In: spans and curves of memory, which the driver takes from a simulation or from a record. Out: `Run`, with
what can be read off them: idle shares, sends, the part of them that fits into a picture.

    run = Run("simulated", result.spans)
    run.end, run.bubble, run.idle[0]
    list(run.messages(program.orders))"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autoptd.ir.actions import COMPUTES, SENDS, Action, Kind

UNITS = (("us", 1e6), ("ms", 1e3), ("s", 1.0))
# Action, start, end.
Span = tuple[Action, float, float]
# (time, amount from then on), times ascending.
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Message:
    """One message between pipeline ranks: from the end of what makes it to the start of what reads it."""

    action: Action
    source: int
    # When what makes it begins.
    made: float
    sent: float
    target: int
    read: float


@dataclass(frozen=True)
class Run:
    """One step: per pipeline rank its actions, and what they hold for backward.

    Times are seconds, or multiples of a forward; `memory` is in bytes, or in microbatches of a chunk. `again`: of the time of
    a backward, by stage, what it takes to make again what was not kept.
    """

    name: str
    spans: Sequence[Sequence[Span]]
    in_seconds: bool = False
    memory: Sequence[Curve] = ()
    in_bytes: bool = False
    remark: str = ""
    again: Sequence[float] = ()

    @property
    def unit(self) -> str:
        """What people are told times in."""
        # Without a cost model, a step is told in the paper's unit.
        if not self.in_seconds:
            return "one forward = 1"
        return next((unit for unit, scale in UNITS if self.length * scale < 1000), "s")

    @property
    def scale(self) -> float:
        """How many of `unit` are one of `spans`."""
        return dict(UNITS).get(self.unit, 1.0)

    @cached_property
    def begin(self) -> float:
        return min((row[0][1] for row in self.spans if row), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last rank is done."""
        return max((end for row in self.spans for _, _, end in row), default=1.0)

    @property
    def length(self) -> float:
        return max(self.end - self.begin, 1e-12)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks were recorded: else nothing can be said about the bubble."""
        return all(self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Return how long each rank computes."""
        return tuple(map(_busy, self.spans))

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Return the share of the step in which each rank does not compute."""
        return tuple(max(0.0, 1 - busy / self.length) for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Idle over ideal time, where ideal is the busiest rank's own work (SC'21, section 2.2)."""
        ideal = max(self.busy, default=0.0)
        return (self.length - ideal) / ideal if ideal else 0.0

    @cached_property
    def chunks(self) -> dict[int, int]:
        """Return which model chunk of its rank every stage is."""
        chunks: dict[int, int] = {}
        for row in self.spans:
            # A rank's stages ascend with its chunks, whatever order they run in.
            stages = {action.stage for action, _, _ in row}
            chunks |= {stage: k for k, stage in enumerate(sorted(stages))}
        return chunks

    @property
    def kinds(self) -> set[Kind]:
        return {action.kind for row in self.spans for action, _, _ in row}

    def messages(
        self, orders: Sequence[Sequence[Action]], ranks: Sequence[int] | None = None
    ) -> Iterator[Message]:
        """Yield the messages of `orders` that go between two of `ranks` (all, if left out)."""
        # Where ranks are left out, so are their messages: a line that ends nowhere misleads.
        shown = set(range(len(self.spans)) if ranks is None else ranks)
        # Transfers are not timed: a message is drawn between the computations at its ends.
        place = {}
        for rank in sorted(shown):
            for action, start, end in self.spans[rank]:
                if action.kind in (Kind.F, Kind.B):
                    place[action] = (rank, start, end)
        for rank, order in enumerate(orders):
            for action in order if rank in shown else ():
                if action.kind not in SENDS:
                    continue
                kind = Kind.F if action.kind is Kind.SEND_F else Kind.B
                made = place.get(Action(kind, action.stage, action.microbatch))
                read = place.get(Action(kind, action.peer, action.microbatch))
                if made and read:
                    yield Message(action, made[0], made[1], made[2], read[0], read[1])


def _busy(spans: Sequence[Span]) -> float:
    return sum(end - start for action, start, end in spans if action.kind in COMPUTES)


def meaning(action: Action) -> str:
    """Describe an action: `forward of stage 2, microbatch 1`."""
    names = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight gradients"}
    if action.kind not in names:
        return str(action)
    return f"{names[action.kind]} of stage {action.stage}, microbatch {action.microbatch}"


# Of more actions than these, only some ranks are written: viewers do not open larger files.
MAX_ACTIONS = 40_000
CATEGORIES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight gradients"}
Event = dict[str, Any]


def trace_json(runs: Sequence[Run], orders: Sequence[Sequence[Action]] = ()) -> str:
    """Return the trace. Times are microseconds; of a run without seconds, one unit is a millisecond.

    `otherData` says what was left out: of very long runs, all but the first and the last ranks.
    """
    events: list[str] = []
    left_out = {}
    for process, run in enumerate(runs, 1):
        ranks = _ranks(run)
        if len(ranks) < len(run.spans):
            # The first half of `ranks` are the first ranks, the second half the last ones.
            half = len(ranks) // 2
            left_out[run.name] = f"ranks {ranks[half - 1] + 1} to {ranks[half] - 1} are left out"
        events += [json.dumps(event, separators=(",", ":")) for event in _events(process, run, ranks, orders)]
    other = json.dumps({"written by": "AutoPTD", **left_out})
    joined = ",\n".join(events)
    return f'{{"displayTimeUnit":"ms","otherData":{other},"traceEvents":[\n{joined}\n]}}\n'


def _ranks(run: Run) -> list[int]:
    """Return all ranks, or as many of the first and of the last as fit."""
    count = len(run.spans)
    longest = max(map(len, run.spans), default=1)
    fit = max(2, MAX_ACTIONS // max(longest, 1))
    return list(range(count)) if count <= fit else [*range(fit // 2), *range(count - fit // 2, count)]


def _events(
    process: int, run: Run, ranks: Sequence[int], orders: Sequence[Sequence[Action]]
) -> Iterator[Event]:
    yield _name(process, 0, "process_name", run.name)
    for rank in ranks:
        yield _name(process, rank, "thread_name", f"pp rank {rank}")
        yield {
            "ph": "M",
            "pid": process,
            "tid": rank,
            "name": "thread_sort_index",
            "args": {"sort_index": rank},
        }
        for action, start, end in run.spans[rank]:
            yield {
                "ph": "X",
                "pid": process,
                "tid": rank,
                "name": str(action),
                "cat": CATEGORIES.get(action.kind, "communication"),
                "ts": _micros(run, start),
                "dur": round(_micros(run, end) - _micros(run, start), 3),
                "args": {"stage": action.stage, "microbatch": action.microbatch},
            }
        for time, amount in run.memory[rank] if run.memory else ():
            unit = "bytes" if run.in_bytes else "microbatches"
            name = f"held for backward, pp rank {rank}"
            yield {"ph": "C", "pid": process, "name": name, "ts": _micros(run, time), "args": {unit: amount}}
    for number, message in enumerate(run.messages(orders, ranks)):
        yield from _flow(process, number, run, message)


def _flow(process: int, number: int, run: Run, message: Message) -> Iterator[Event]:
    """Yield both ends of a message, each within its slice, where viewers look for it."""
    name = {
        "pid": process,
        "name": str(message.action),
        "cat": "message",
        "id": process * 10_000_000 + number,
    }
    yield {
        "ph": "s",
        "tid": message.source,
        "ts": _micros(run, message.made + 0.999 * (message.sent - message.made)),
        **name,
    }
    yield {"ph": "f", "bp": "e", "tid": message.target, "ts": _micros(run, message.read), **name}


def _name(process: int, rank: int, what: str, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": rank, "name": what, "args": {"name": name}}


def _micros(run: Run, time: float) -> float:
    """Return the microseconds since the run began."""
    return round((time - run.begin) * (1e6 if run.in_seconds else 1e3), 3)
