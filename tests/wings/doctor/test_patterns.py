"""Numbers with known sums: exact in every dtype, in any order; a wrong one tells its owner."""

from __future__ import annotations

import pytest
import torch

from autoptd.wings.doctor.patterns import MOVED_DTYPES, SUMMED_DTYPES, find_difference, message, share, total

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("dtype", SUMMED_DTYPES, ids=str)
def test_sums_are_exact_in_any_order(size: int, dtype: torch.dtype) -> None:
    shares = [share(index, size, 2000, dtype, CPU) for index in range(size)]
    for order in (range(size), reversed(range(size)), torch.randperm(size).tolist()):
        added, largest = torch.zeros(2000, dtype=dtype), torch.full((2000,), -100).to(dtype)
        for index in order:
            added += shares[index]
            largest = torch.maximum(largest, shares[index])
        assert torch.equal(added, total(size, 2000, dtype, CPU))
        assert torch.equal(largest, total(size, 2000, dtype, CPU, "max"))


@pytest.mark.parametrize("size", [2, 5, 700])
def test_every_rank_owns_places_and_is_told_by_them(size: int) -> None:
    expected = total(size, 3000, torch.float32, CPU)
    for index in {0, 1, size - 1}:
        mine = share(index, size, 3000, torch.float32, CPU)
        found = find_difference(expected + mine, expected, size)
        assert found is not None and found.owners == (index,)
        part = find_difference((expected + mine)[1400:], expected[1400:], size, offset=1400)
        assert part is not None and part.owners == (index,)


def test_a_difference_says_where_and_what() -> None:
    got = torch.arange(5.0)
    assert find_difference(got, got.clone()) is None
    assert (
        str(find_difference(got, torch.tensor([0.0, 1, 7, 3, 9]))) == "2 of 5 elements; element 2 is 2, not 7"
    )
    assert find_difference(torch.full((1,), float("nan")), torch.ones(1)) is not None
    assert find_difference(got, got.double()) is not None and find_difference(got[1:], got) is not None


@pytest.mark.parametrize("dtype", MOVED_DTYPES, ids=str)
def test_messages_differ_by_ends_and_number(dtype: torch.dtype) -> None:
    ends = [(0, 1, 0), (1, 0, 0), (0, 1, 1), (0, 2, 0), (251, 1, 0), (3000, 3008, 0)]
    made = [message(source, target, 3000, dtype, CPU, number) for source, target, number in ends]
    for place, one in enumerate(made):
        assert all(not torch.equal(one, other) for other in made[place + 1 :])
        assert torch.equal(one, one.double().to(dtype)), "exact"
        assert not torch.equal(one[:1024], one[1024:2048]), "a piece that lands elsewhere does not fit"
