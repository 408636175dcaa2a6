"""Describe one run of a step, simulated or executed, as plain numbers, and write runs as a trace.

In: spans and curves of memory, from a simulation or a record. Out: `Run`, with its idle shares and messages; and JSON in
Chrome's trace event format for ui.perfetto.dev: a process per run, a track per rank, a slice per action, an arrow (flow)
per message, a counter per rank of the memory that it holds for backward.

    run = Run("simulated", result.spans)
    run.end, run.bubble, run.idle[0]
    Path("trace.json").write_text(trace_json([simulated, executed], program.orders))
"""

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
# The most actions that are written, as viewers do not open larger files: of longer runs the first and last ranks.
MAX_ACTIONS = 40_000
CATEGORIES = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight gradients"}
Event = dict[str, Any]


@dataclass(frozen=True)
class Message:
    """One message between pipeline ranks, from the end of the action that computes it to the start of its reader."""

    action: Action
    source: int
    # When the action that computes it begins.
    made: float
    sent: float
    target: int
    read: float


@dataclass(frozen=True)
class Run:
    """One step: the actions of each pipeline rank, and its memory for backward.

    Times are seconds, or multiples of a forward; `memory` is in bytes, or in microbatches of a chunk. `again`: the time of
    recomputation in a backward, by stage.
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
        """The unit in which times are shown; without a cost model, that of the paper."""
        if not self.in_seconds:
            return "one forward = 1"
        return next((unit for unit, scale in UNITS if self.length * scale < 1000), "s")

    @property
    def scale(self) -> float:
        """The factor from times of `spans` to `unit`."""
        return dict(UNITS).get(self.unit, 1.0)

    @cached_property
    def begin(self) -> float:
        return min((row[0][1] for row in self.spans if row), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last rank ends."""
        return max((end for row in self.spans for _, _, end in row), default=1.0)

    @property
    def length(self) -> float:
        return max(self.end - self.begin, 1e-12)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks were recorded: else the bubble is not known."""
        return all(self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(map(_busy, self.spans))

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """The share of the step in which each rank does not compute."""
        return tuple(max(0.0, 1 - busy / self.length) for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Idle over ideal time, which is the busiest rank's work (SC'21, section 2.2)."""
        ideal = max(self.busy, default=0.0)
        return (self.length - ideal) / ideal if ideal else 0.0

    @cached_property
    def chunks(self) -> dict[int, int]:
        """The number of every stage among the model chunks of its rank."""
        chunks: dict[int, int] = {}
        for row in self.spans:
            # A rank's stages ascend with its chunks.
            stages = {action.stage for action, _, _ in row}
            chunks |= {stage: k for k, stage in enumerate(sorted(stages))}
        return chunks

    @property
    def kinds(self) -> set[Kind]:
        return {action.kind for row in self.spans for action, _, _ in row}

    def messages(
        self, orders: Sequence[Sequence[Action]], ranks: Sequence[int] | None = None
    ) -> Iterator[Message]:
        """Yield the messages of `orders` between two of `ranks` (by default all)."""
        shown = set(range(len(self.spans)) if ranks is None else ranks)
        # Transfers are not timed: a message connects the computations at its ends.
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


def trace_json(runs: Sequence[Run], orders: Sequence[Sequence[Action]] = ()) -> str:
    """Return the trace. Times are microseconds; for a run without seconds, a forward is a millisecond.

    `otherData` lists the ranks of very long runs that are left out.
    """
    events: list[str] = []
    left_out = {}
    for process, run in enumerate(runs, 1):
        ranks = _ranks(run)
        if len(ranks) < len(run.spans):
            half = len(ranks) // 2
            left_out[run.name] = f"ranks {ranks[half - 1] + 1} to {ranks[half] - 1} are left out"
        events += [json.dumps(event, separators=(",", ":")) for event in _events(process, run, ranks, orders)]
    other = json.dumps({"written by": "AutoPTD", **left_out})
    joined = ",\n".join(events)
    return f'{{"displayTimeUnit":"ms","otherData":{other},"traceEvents":[\n{joined}\n]}}\n'


def _ranks(run: Run) -> list[int]:
    """Return all ranks, or equal numbers of the first and last ones."""
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
    """Yield both ends of a message, within the slices that it connects."""
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
