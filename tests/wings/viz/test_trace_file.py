"""The trace: what Chrome's trace event format asks for, a track per rank, an arrow per message."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

import pytest

from autoptd.ir.actions import SENDS, parse
from autoptd.schedule import add_transfers, interleaved, one_f_one_b, simulate
from autoptd.wings.viz import Run, trace_json

REQUIRED = {  # by phase: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    "X": {"pid", "tid", "name", "cat", "ts", "dur"},
    "M": {"pid", "tid", "name", "args"},
    "C": {"pid", "name", "ts", "args"},
    "s": {"pid", "tid", "name", "cat", "ts", "id"},
    "f": {"pid", "tid", "name", "cat", "ts", "id", "bp"},
}
ORDERS = add_transfers(interleaved(2, 2, 4), [(k, k + 1, True) for k in range(3)])


def events(runs: list[Run], orders=ORDERS) -> list[dict[str, Any]]:
    return json.loads(trace_json(runs, orders))["traceEvents"]


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    result = simulate(ORDERS)
    executed = [[(action, 0.5 + 0.001 * a, 0.5 + 0.001 * b) for action, a, b in row] for row in result.spans]
    return [
        Run("simulated", result.spans, memory=result.memory(1).curves),
        Run("executed", executed, in_seconds=True),
    ]


def test_every_event_has_what_the_format_asks_for(runs: list[Run]) -> None:
    found = events(runs)
    assert {one["ph"] for one in found} == set(REQUIRED)
    for one in found:
        assert set(one) >= REQUIRED[one["ph"]], one
        assert all(
            one.get(key, 0) >= 0 and isinstance(one.get(key, 0), (int, float)) for key in ("ts", "dur")
        )
    assert json.loads(trace_json(runs, ORDERS))["displayTimeUnit"] == "ms"


def test_a_process_per_run_and_a_track_per_rank_with_its_actions_in_order(runs: list[Run]) -> None:
    found = events(runs)
    names = {(one["pid"], one["args"]["name"]) for one in found if one["name"] == "process_name"}
    assert names == {(1, "simulated"), (2, "executed")}
    tracks = {(one["pid"], one["tid"]): one["args"]["name"] for one in found if one["name"] == "thread_name"}
    assert tracks == {(pid, rank): f"pp rank {rank}" for pid in (1, 2) for rank in (0, 1)}
    for pid, run in enumerate(runs, 1):
        for rank, row in enumerate(run.spans):
            slices = [one for one in found if one["ph"] == "X" and (one["pid"], one["tid"]) == (pid, rank)]
            assert [one["name"] for one in slices] == [str(action) for action, _, _ in row]
            ends = [0.0, *(one["ts"] + one["dur"] for one in slices)]
            assert all(end <= one["ts"] + 1e-3 for end, one in zip(ends, slices, strict=False))


def test_times_are_microseconds_from_the_first_action_on(runs: list[Run]) -> None:
    first = [next(one for one in events(runs) if one["ph"] == "X" and one["pid"] == pid) for pid in (1, 2)]
    assert [one["ts"] for one in first] == [0.0, 0.0]
    assert [one["dur"] for one in first] == [pytest.approx(1000.0), pytest.approx(1000.0)]


def test_every_message_is_a_pair_of_ends_within_slices(runs: list[Run]) -> None:
    found = events(runs)
    ends = defaultdict(dict)
    for one in found:
        if one["ph"] in "sf":
            assert one["ph"] not in ends[one["id"]]
            ends[one["id"]][one["ph"]] = one
    sent = Counter(str(action) for order in ORDERS for action in order if action.kind in SENDS)
    assert sent and Counter(pair["s"]["name"] for pair in ends.values()) == sent + sent  # in both runs
    slices = [one for one in found if one["ph"] == "X"]
    for pair in ends.values():
        action = parse(pair["s"]["name"])
        for one, stage in ((pair["s"], action.stage), (pair["f"], action.peer)):
            (around,) = [
                other
                for other in slices
                if (other["pid"], other["tid"]) == (one["pid"], one["tid"])
                and other["ts"] <= one["ts"] < other["ts"] + other["dur"]
            ]
            assert around["args"] == {"stage": stage, "microbatch": action.microbatch}
        assert pair["s"]["ts"] <= pair["f"]["ts"]


def test_what_is_held_is_a_counter_that_ends_at_zero(runs: list[Run]) -> None:
    counted = defaultdict(list)
    for one in events(runs):
        if one["ph"] == "C":
            counted[one["name"]].append(one["args"]["microbatches"])
    assert set(counted) == {"held for backward, pp rank 0", "held for backward, pp rank 1"}
    assert all(row[-1] == 0 and max(row) > 0 for row in counted.values())


def test_very_long_runs_keep_the_first_and_the_last_ranks_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoptd.wings.viz.runs.MAX_ACTIONS", 80)
    orders = one_f_one_b(8, 10)
    record = json.loads(trace_json([Run("simulated", simulate(orders).spans)], orders))
    ranks = {one["tid"] for one in record["traceEvents"] if one["ph"] == "X"}
    assert ranks == {0, 1, 6, 7} and record["otherData"]["simulated"] == "ranks 2 to 5 are left out"


def test_same_input_same_bytes(runs: list[Run]) -> None:
    assert trace_json(runs, ORDERS) == trace_json(runs, ORDERS)
