"""What is kept and what is made again: the minimum cut against all choices, on random graphs."""

from __future__ import annotations

import random
from itertools import product
from math import inf

import pytest

from autoptd.passes.kept.by_value import Region, runs_again


def random_region(seed: int) -> Region:
    """Return a region in which operator i may read what the ones before it make, or values from outside."""
    draw = random.Random(seed)
    makes, reads, count = [], [], draw.randint(1, 3)
    outside = range(count)
    for _ in range(draw.randint(2, 9)):
        reads.append(tuple(draw.sample(range(count), draw.randint(1, min(3, count)))))
        made = draw.choice((1, 1, 1, 2))
        makes.append(tuple(range(count, count + made)))
        count += made
    own = range(len(outside), count)
    needed = frozenset(value for value in range(count) if draw.random() < 0.5)
    single = [made[0] for made in makes if len(made) == 1]
    return Region(
        makes=tuple(makes),
        reads=tuple(reads),
        seconds=tuple(draw.choice((0.0, 1.0, 2.0, 5.0, 20.0, inf)) for _ in makes),
        nbytes=tuple(draw.choice((1, 2, 4, 8)) for _ in range(count)),
        needed=needed,
        free=frozenset(value for value in [*outside, draw.choice(own)] if value in needed),
        never_kept=frozenset(value for value in single if value not in needed and draw.random() < 0.1),
    )


def outcome(region: Region, again: frozenset[int]) -> tuple[float, int] | None:
    """Return the seconds and the kept bytes where `again` run again; None where something cannot be there."""
    made = {value for i in again for value in region.makes[i]}
    wanted = region.needed.union(*(region.reads[i] for i in again))
    kept = wanted - made
    if any(region.seconds[i] == inf for i in again) or kept & region.never_kept:
        return None
    nbytes = sum(region.nbytes[value] for value in kept - region.free)
    return sum(region.seconds[i] for i in again), nbytes


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_the_choice_is_the_cheapest_of_all(first: int) -> None:
    for seed in range(first, first + 50):
        region = random_region(seed)
        choices = product((False, True), repeat=len(region.makes))
        all_outcomes = [
            outcome(region, frozenset(i for i, is_again in enumerate(bits) if is_again)) for bits in choices
        ]
        possible = [each for each in all_outcomes if each is not None]
        before = inf
        for price in (0.0, 0.3, 1.1, 2.7, 30.0):
            found = outcome(region, runs_again(region, price))
            assert found is not None, (seed, price)
            best = min(seconds + price * nbytes for seconds, nbytes in possible)
            assert found[0] + price * found[1] == pytest.approx(best, rel=1e-12, abs=1e-12), (seed, price)
            # More for a byte never keeps more of them.
            assert found[1] <= before, (seed, price)
            before = found[1]
