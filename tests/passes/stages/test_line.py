"""What a rank keeps by levels: the lowest at which it fits, mixed with the one below, beside sums written out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.passes.stages.balance import Level, Line, Table, place


def levels_of(saved: list[int], shares: list[float]) -> list[Level]:
    """Levels that keep less and less of the same, and take a second more for each byte less."""
    found = []
    for share in shares:
        kept = [share * nbytes for nbytes in saved]
        found.append(Level(kept, [nbytes - left for nbytes, left in zip(saved, kept, strict=True)]))
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_bytes_and_seconds_of_ranks(data: st.DataObject) -> None:
    size, ranks = data.draw(st.sampled_from([(4, [0, 1]), (6, [0, 1, 0, 1]), (5, [0, 1, 1, 0])]))
    saved = [data.draw(st.integers(0, 9)) for _ in range(size)]
    kept = [data.draw(st.integers(0, 9)) for _ in range(size)]
    levels = levels_of(saved, [1.0, 0.5, 0.1])
    live = [[(rank == one) * data.draw(st.integers(1, 3)) for rank in ranks] for one in (0, 1)]
    memory = data.draw(st.integers(0, 60))
    table = Table(Line([1.0] * size, range(size - 1), (), kept, levels), ranks, live, memory)
    cuts = sorted(data.draw(st.permutations(range(1, size)))[: len(ranks) - 1])
    ends = np.array([0, *cuts, size])
    stages = [slice(a, b) for a, b in pairwise(ends)]
    again, held = table.again(ends), table.held(ends)
    for rank in (0, 1):
        mine = [k for k, each in enumerate(ranks) if each == rank]
        once = sum(sum(kept[stages[k]]) for k in mine)
        most = sum(live[rank][k] * sum(saved[stages[k]]) for k in mine)
        room = memory - once
        # Bytes and seconds are exchanged at one rate here, so that any mix of levels is on one line.
        share = 1.0 if most <= max(room, 0) else max(room / most, 0.1)
        assert held[rank] == pytest.approx(once + share * most)
        seconds = sum(again[k] for k in mine)
        assert seconds == pytest.approx((1 - share) * sum(sum(saved[stages[k]]) for k in mine))
    assert (table.excess(ends) > 0) == (max(held) > memory * (1 + 1e-9))


def test_a_rank_that_makes_values_again_gets_fewer_layers() -> None:
    """Twelve equal layers; the first rank has three times as many microbatches in flight, and room for one layer of each."""
    line = Line([1.0] * 12, range(11), levels=[Level([1.0] * 12, [0.0] * 12), Level([0.0] * 12, [0.5] * 12)])
    live = [(3, 0), (0, 1)]
    free, bound = place(line, [0, 1], live), place(line, [0, 1], live, memory=6.0)
    assert free is not None and free.chosen == (5,) and not any(free.again)
    assert bound is not None and bound.chosen == (4,) and max(bound.held) <= 6.0
    # The first has five layers, of which two can be kept for three microbatches; the second has seven, and keeps six.
    assert bound.again == pytest.approx((1.5, 0.5)) and bound.loads == pytest.approx((6.5, 7.5))
    least = place(Line(line.work, line.points, levels=line.levels[:1]), [0, 1], live, memory=6.0)
    assert least is None or max(least.loads) >= max(bound.loads)
