"""Write runs of a step as a trace that ui.perfetto.dev and chrome://tracing open.

In: `Run`s, and the orders for their messages. Out: JSON text in Chrome's trace event format: a process per
run, a track per rank, a slice per action, an arrow (flow) per message, a counter per rank of what it holds
for backward.

    Path("trace.json").write_text(trace_json([simulated, executed], program.orders))
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from autoptd.ir.actions import Action, Kind
from autoptd.wings.viz.runs import Message, Run

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


__all__ = ["trace_json"]
