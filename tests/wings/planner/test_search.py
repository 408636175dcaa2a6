"""The search gives what evaluating everything gives, whatever the model says.

Placements and divisors by brute force.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.wings.planner.search import (
    OUT_OF_MEMORY,
    ROUNDING,
    Array,
    Columns,
    Configs,
    CostModel,
    Found,
    divisors,
    placements,
    search,
    take,
    unique_rows,
)

CELLS = st.lists(st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 8, 16])] * 3), min_size=1, max_size=5)


@dataclass(frozen=True)
class Random:
    """Configs with random bytes, variants with random seconds, few different ones so that there are ties, and
    a loose bound.
    """

    seed: int
    count: int
    loose: float

    capacity_bytes: float = 6.0

    def _draw(self, name: int, size: int) -> np.ndarray:
        return np.random.default_rng([self.seed, name]).integers(1, 10, size).astype(float)

    def configs(self) -> Configs:
        reason = np.random.default_rng([self.seed, 4]).integers(-3, 2, self.count)
        return Configs({"a": np.arange(self.count)[::-1].copy()}, ("first", "second"), np.maximum(reason, -1))

    def memory_bytes(self, configs: Columns) -> Array:
        return self._draw(0, self.count)[configs["a"]]

    def _widths(self) -> np.ndarray:
        return np.random.default_rng([self.seed, 3]).integers(0, 4, self.count)

    def _table(self) -> np.ndarray:
        return self._draw(1, 4 * self.count).reshape(self.count, 4)

    def least_seconds(self, configs: Columns) -> Array:
        return self._table().min(axis=1)[configs["a"]] * self.loose

    def variants(self, configs: Columns) -> tuple[np.ndarray, Columns]:
        widths = self._widths()[configs["a"]]
        where = np.repeat(np.arange(len(widths)), widths)
        return where, {"x": np.array([x for width in widths for x in range(width)], dtype=np.int64)}

    def seconds(self, candidates: Columns) -> Array:
        return self._table()[candidates["a"], candidates["x"]]


def everything(model: CostModel, keep: int) -> list[tuple[float, ...]]:
    """Seconds and columns of the best, by evaluating and sorting all that fits."""
    configs = model.configs()
    columns = take(configs.columns, np.flatnonzero(configs.reason < 0))
    if not len(next(iter(columns.values()))):
        return []
    where, added = model.variants(columns)
    candidates = {**take(columns, where), **added}
    held = model.memory_bytes(candidates) if len(where) else np.zeros(0)
    rows = zip(model.seconds(candidates), *candidates.values(), strict=True)
    return sorted(row for row, size in zip(rows, held, strict=True) if size <= model.capacity_bytes)[:keep]


def is_bounded(model: CostModel) -> bool:
    """Whether no candidate is faster than the bound of its config."""
    configs = model.configs()
    columns = take(configs.columns, np.flatnonzero(configs.reason < 0))
    where, added = model.variants(columns)
    seconds = model.seconds({**take(columns, where), **added}) if len(where) else np.zeros(0)
    return (
        bool(np.all(model.least_seconds(columns)[where] * (1 - ROUNDING) <= seconds)) if len(where) else True
    )


def as_rows(found: Found) -> list[tuple[float, ...]]:
    return list(zip(found.seconds, *found.columns.values(), strict=True))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 400), st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 12))
def test_search_is_exact(seed: int, count: int, loose: float, keep: int) -> None:
    model = Random(seed, count, loose)
    found = search(model, keep, at_once=4)
    assert as_rows(found) == as_rows(search(model, keep)) == everything(model, keep)
    assert found.fitting + sum(found.rejected.values()) == found.configs == count
    assert 0 <= found.bounded <= found.fitting


def test_a_bound_saves_work() -> None:
    tight, loose = (search(Random(1, 3000, bound), 1, at_once=64) for bound in (1.0, 0.0))
    assert as_rows(tight) == as_rows(loose)
    assert tight.evaluated < loose.evaluated
    assert (loose.bounded, tight.bounded > 0) == (0, True)
    assert tight.rejected[OUT_OF_MEMORY] > 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 8, 16])] * 3), min_size=1, max_size=5),
    st.sampled_from([1, 4, 6, 8]),
)
def test_placements(configs: list[tuple[int, ...]], domain: int) -> None:
    """All ways to fill a domain, no way twice."""
    where, inside = placements([np.array(column) for column in zip(*configs, strict=True)], domain)
    expected = []
    for index, config in enumerate(configs):
        if np.prod(config) <= domain:
            expected.append((index, *config))
            continue
        for ways in itertools.product(*(range(1, domain + 1) for _ in config)):
            if np.prod(ways) == domain and all(n % way == 0 for n, way in zip(config, ways, strict=True)):
                expected.append((index, *ways))
    assert sorted(zip(where, *inside, strict=True)) == sorted(expected)


def test_divisors() -> None:
    assert [divisors(n) for n in (1, 12, 49, 97)] == [[1], [1, 2, 3, 4, 6, 12], [1, 7, 49], [1, 97]]


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1, max_size=20))
def test_unique_rows(rows: list[tuple[int, int]]) -> None:
    """Also where the columns together are wider than an integer."""
    a, b = (np.array(column) for column in zip(*(rows + rows), strict=True))
    unique, back = unique_rows({"a": a, "b": b}, ("a", "absent", "b"))
    assert list(zip(unique["a"][back], unique["b"][back], strict=True)) == rows + rows
    assert len(unique["a"]) == len(set(rows))
