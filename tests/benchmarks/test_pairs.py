"""Turns and intervals of the benchmarks."""

from __future__ import annotations

import pytest

from benchmarks.lib.pairs import interval, ratio_of, take_turns


@pytest.mark.parametrize(
    ("count", "low", "high"), [(6, 0, 5), (15, 3, 11), (20, 5, 14), (100, 39, 60), (2000, 955, 1044)]
)
def test_an_interval_ends_at_the_order_statistics_of_the_tables(count: int, low: int, high: int) -> None:
    """95% by the sign test, ranks from 0: 1 and n at n=6, 4 and 12 at 15, 6 and 15 at 20, 40 and 61 at 100."""
    found = interval([float(i) for i in reversed(range(count))])
    assert (found.low, found.high) == (low, high)
    assert found.median == (count - 1) / 2


def test_a_ratio_is_that_of_neighbours() -> None:
    slow = [float(i) for i in range(1, 11)]
    assert ratio_of([2 * one for one in slow], slow) == (2.0, 2.0, 2.0)


def test_turns_change_their_order_and_none_is_lost() -> None:
    seen: list[str] = []
    turns = take_turns({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 4, warm_up=1)
    assert "".join(seen[:2]) == "ab"  # to warm up
    rounds = ["".join(seen[i : i + 2]) for i in range(2, len(seen), 2)]
    assert set(rounds) == {"ab", "ba"} and len(rounds) == 4
    assert {name: (len(one.wall), len(one.cpu)) for name, one in turns.items()} == {"a": (4, 4), "b": (4, 4)}
