"""What stands out among times, on numbers."""

from __future__ import annotations

import pytest

from autoptd.wings.doctor.slow import Timed, find_slow, is_slow, suspects_of

MIB = 1 << 20


def link(source: int, target: int, seconds: float, nbytes: int = MIB, hosts: int = 1) -> Timed:
    return Timed("message", "pp", (source, target), nbytes, seconds, hosts)


def test_the_slow_pair_is_named_and_those_between_nodes_are_not() -> None:
    times = [link(rank, rank + 4, 0.010 + 0.001 * rank) for rank in range(4)] + [link(4, 0, 0.05)]
    times += [link(rank, rank + 8, 0.2, hosts=2) for rank in range(4)]
    (slow,) = find_slow(times)
    assert slow.ranks == (4, 0) and slow.others == 4 and slow.usual == pytest.approx(0.0115)
    assert suspects_of([slow], times, 6) == [(4, 0), (0, 4)], "and one to compare with"


def test_of_two_the_slower_one_is_named() -> None:
    assert [one.ranks for one in find_slow([link(0, 1, 0.01), link(1, 0, 0.03)])] == [(1, 0)]
    assert find_slow([link(0, 1, 0.01), link(1, 0, 0.015)]) == []
    assert find_slow([link(0, 1, 0.01)]) == []


def test_small_messages_may_wait_for_the_processor() -> None:
    usual = [link(rank, rank + 1, 300e-6, 4096) for rank in range(5)]
    assert find_slow([*usual, link(5, 6, 900e-6, 4096)]) == []
    assert [one.ranks for one in find_slow([*usual, link(5, 6, 5e-3, 4096)])] == [(5, 6)]
    assert find_slow([link(rank, rank + 1, 1e-6 + 2e-5 * (rank == 3), 4096) for rank in range(5)]) == [], (
        "microseconds"
    )


def test_many_pairs_are_compared_with_their_median() -> None:
    times = [link(rank, rank + 100, 0.01 + 1e-5 * (rank % 7)) for rank in range(100)] + [link(7, 300, 0.04)]
    assert [one.ranks for one in find_slow(times)] == [(7, 300)]


def group(kind: str, ranks: tuple[int, ...], seconds: float) -> Timed:
    return Timed(kind, "tp", ranks, MIB, seconds, 1)


def test_a_group_is_slow_in_most_of_its_calls_or_not_at_all() -> None:
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    usual = [group(kind, ranks, 0.01) for kind in kinds for ranks in ((0, 1), (2, 3))]
    one_hiccup = [group(kind, (4, 5), 0.5 if kind == "broadcast" else 0.01) for kind in kinds]
    assert find_slow([*usual, *one_hiccup]) == []
    (slow,) = find_slow([*usual, *(group(kind, (4, 5), 0.03) for kind in kinds)])
    assert slow.ranks == (4, 5) and slow.axis == "tp" and slow.factor == pytest.approx(3)


def test_what_is_not_slow_alone_is_not_slow() -> None:
    (slow,) = find_slow([*(link(rank, rank + 1, 0.01) for rank in range(4)), link(4, 5, 0.05)])
    assert is_slow(slow, [link(4, 5, 0.04), link(0, 1, 0.01)])
    assert not is_slow(slow, [link(4, 5, 0.011), link(0, 1, 0.01)])
    assert is_slow(slow, [])


def test_bandwidth_is_what_a_rank_sends() -> None:
    assert link(0, 1, 0.5).bandwidth == 2 * MIB
    assert group("all_reduce", (0, 1, 2, 3), 1.0).bandwidth == 2 * MIB * 3 / 4
    assert group("all_gather", (0, 1, 2, 3), 1.0).bandwidth == MIB * 3 / 4
    assert group("all_to_all", (0, 1, 2, 3), 1.0).bandwidth == MIB * 3 / 4
