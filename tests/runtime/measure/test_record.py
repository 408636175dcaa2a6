"""Records: kinds and bytes of every conversion and group method, phases, and nothing left when a record ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from autoptd import runtime as rt
from autoptd.ir.mesh import Mesh
from autoptd.ir.types import CONVERSIONS, LOCAL_KINDS
from autoptd.runtime.measure.cover import cover
from autoptd.runtime.measure.record import recording
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, World
from tests.runtime.step.test_executor import running, step
from tests.runtime.tied_model import Case, make_batch, make_model, make_program

WHOLE = 12 * 4 * 8  # bytes of the whole value
Noted = list[tuple[str, int, str]]


def noted_on(t: int, body: Any, *, waits: bool = False) -> list[Noted]:
    """What each of `t` tensor ranks makes known while it runs `body(group)`: (kind, payload, site)."""

    def run(world: World) -> Noted:
        found: Noted = []

        @contextmanager
        def note(kind: str, ranks: Sequence[int], payload: int, site: str) -> Iterator[None]:
            assert ranks == tuple(range(t))
            found.append((kind, payload, site))
            yield

        @contextmanager
        def note_wait(kind: str, ranks: Sequence[int], payload: int, site: str) -> Iterator[None]:
            found.append((f"wait of {kind}", payload, site))
            yield

        uncover = cover(world, note, wait=note_wait if waits else None)
        body(world.group(("tp",)))
        uncover()
        body(world.group(("tp",)))  # not noted
        return found

    return run_ranks(ThreadWorld(Mesh(t=t), Communicators(), timeout=20.0), run)


# Rows by expert are put back by `rt.put_rows`, and no rank sends any: tests/runtime/ops/test_experts.py.
@pytest.mark.parametrize(("source", "target"), [pair for pair in CONVERSIONS if "E" not in pair])
def test_a_conversion_makes_the_calls_of_its_row(source: str, target: str) -> None:
    row = CONVERSIONS[source, target]
    places = (0, 1) if "S" in (source, target) else ()

    def body(group: rt.Group) -> None:
        x = torch.ones(12, 4, dtype=torch.float64)
        x = (rt.take_shard(x, 0, 1, group.index, 2) if source == "S" else x).requires_grad_()
        getattr(rt, row.name)(x, group, *places, site="here").sum().backward()

    work = [(row.forward, "here"), (row.backward, "here backward")]
    expected = [(kind, WHOLE, site) for kind, site in work if kind not in LOCAL_KINDS]
    assert noted_on(2, body) == [expected, expected]


def test_within_one_dim_shards_are_gathered() -> None:
    def body(group: rt.Group) -> None:
        x = torch.ones(6, 4, dtype=torch.float64, requires_grad=True)
        rt.s_to_s(x, group, 0, 0, to_blocks=3, site="here").sum().backward()

    expected = [("all-gather", WHOLE, "here"), ("all-gather", WHOLE, "here backward")]
    assert noted_on(2, body) == [expected, expected]


def test_other_calls_of_a_group() -> None:
    def body(group: rt.Group) -> None:
        group.broadcast(torch.ones(3), 0, "b")
        group.gather_objects("anything", "o")
        group.all_reduce_start(torch.ones(5), "s").wait()
        group.all_reduce(torch.ones(7), site="m", op="max")
        group.all_gather_start(torch.ones(2), 0, "g").wait()
        group.reduce_scatter_start(torch.ones(6), 0, "r").wait()

    expected = [("broadcast", 12, "b"), ("objects", 0, "o"), ("all-reduce", 20, "s"), ("all-reduce", 28, "m")]
    expected += [("all-gather", 24, "g"), ("reduce-scatter", 24, "r")]
    assert noted_on(3, body) == [expected] * 3


def test_what_was_started_may_be_noted_where_it_is_waited_for() -> None:
    def body(group: rt.Group) -> None:
        pending = group.all_reduce_start(torch.ones(5), "s")
        assert torch.equal(group.all_reduce(torch.ones(7), "m"), torch.full((7,), 2.0))
        assert torch.equal(pending.wait(), torch.full((5,), 2.0)) and pending.is_done()

    expected = [("all-reduce", 20, "s"), ("all-reduce", 28, "m"), ("wait of all-reduce", 20, "s")]
    assert noted_on(2, body, waits=True) == [expected, expected]


def test_phases_stages_and_ends_of_a_program_written_by_hand() -> None:
    model, case = make_model(), Case(t=2, p=2, d=2, v=2, m=2, schedule="interleaved")
    program = make_program(case, model)
    with running(program, model) as ranks:
        with recording(ranks) as (recorded, record):
            step(recorded, program, make_batch())  # type: ignore[arg-type]
        calls = record.of(0)
        assert {(call.phase, call.stage) for call in calls if call.axis == "tp"} == {
            ("forward", 0),
            ("forward", 2),
            ("backward", 0),
            ("backward", 2),
            ("step", -1),  # sums of gradients of type R
        }
        assert {call.site for call in calls if call.kind == "send"} == {
            f"stage {a} to {b}" for a, b in [(0, 1), (0, 3), (2, 1), (2, 3)]
        }
        assert {call.phase for call in calls if call.site.startswith(("gradients", "tied"))} == {"step"}
        assert len({len(record.of(rank)) for rank in range(4)}) == 1  # all of a pipeline rank do the same
        before = len(record.collectives)
        step(ranks, program, make_batch())
        assert len(record.collectives) == before
        for rank in ranks.here:
            groups, channels = rank.world.communicators()
            assert not any("all_reduce" in vars(group) for group in groups)
            assert not any("send" in vars(channel) for channel in channels.values())
