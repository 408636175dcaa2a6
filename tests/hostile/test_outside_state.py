"""Python state that a forward keeps outside of its modules: a count is refused, a cache is made again where it is needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd import trace
from autoptd.errors import TraceError
from autoptd.trace.capture import capture

X, Y = (torch.randint(0, 16, (8, 6), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
COUNTS: dict[str, Any] = {"calls": 0}
SEEN: list[int] = []
NUMBERS, HOLDER = itertools.count(), SimpleNamespace(calls=0, table=None)
CALLS = (n for n in itertools.count())
TABLE: Tensor | None = None
TABLES: dict[int, Tensor] = {}


@pytest.fixture(autouse=True)
def traced_anew(traced_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that other tests have made says nothing about what is shared or kept here."""
    monkeypatch.setattr(trace, "capture", capture)


class Tally:
    calls = 0


def in_a_dict() -> int:
    COUNTS["calls"] += 1
    return int(COUNTS["calls"])


def in_a_list() -> int:
    SEEN.append(0)
    return len(SEEN)


def in_an_object() -> int:
    HOLDER.calls += 1
    return int(HOLDER.calls)


def in_a_class() -> int:
    Tally.calls += 1
    return Tally.calls


def in_a_default(calls: list[int] = [0]) -> int:  # noqa: B006
    calls[0] += 1
    return calls[0]


def in_an_attribute() -> int:
    in_an_attribute.calls = getattr(in_an_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return int(in_an_attribute.calls)  # type: ignore[attr-defined]


def of_an_iterator() -> int:
    return next(NUMBERS)


def of_a_generator() -> int:
    return next(CALLS)


def make_table(length: int) -> Tensor:
    return torch.linspace(0, 1, length, dtype=torch.float64)[:, None]


@lru_cache
def remembered(length: int) -> Tensor:
    return make_table(length)


def in_a_global(length: int) -> Tensor:
    global TABLE
    if TABLE is None:
        TABLE = make_table(length)
    return TABLE


def in_a_global_dict(length: int) -> Tensor:
    if length not in TABLES:
        TABLES[length] = make_table(length)
    return TABLES[length]


def held_by_an_object(length: int) -> Tensor:
    if HOLDER.table is None:
        HOLDER.table = make_table(length)
    return HOLDER.table


COUNTERS = [
    in_a_dict,
    in_a_list,
    in_an_object,
    in_a_class,
    in_a_default,
    in_an_attribute,
    of_an_iterator,
    of_a_generator,
]
CACHES = [remembered, in_a_global, in_a_global_dict, held_by_an_object]


class Net(nn.Module):
    """Adds what `extra` gives; a count has no effect on the first calls."""

    def __init__(self, extra: Callable[..., Any], counts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.head = nn.Embedding(16, 8).double(), nn.Linear(8, 16).double()
        self.extra, self.counts = extra, counts

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        added = 1.0 * (self.extra() > 1000) if self.counts else self.extra(x.shape[1])
        return F.cross_entropy(self.head(self.emb(x) + added).mT, y)


class Named(Net):
    """Reaches its helper by a global name."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.emb(x) + 1.0 * (in_a_dict() > 1000)).mT, y)


@pytest.mark.parametrize("counter", COUNTERS, ids=lambda one: one.__name__)
def test_a_count_outside_of_the_modules_is_refused(counter: Callable[..., int]) -> None:
    with pytest.raises(TraceError, match=r"is (changed|taken from) by the forward"):
        autoptd.parallelize(Net(counter, True), num_microbatches=2, backend="local", example_inputs=(X, Y))


def test_helpers_are_followed_by_their_names() -> None:
    with pytest.raises(TraceError, match=r"COUNTS\['calls'\] \(test_outside_state.py:\d+\): is changed by"):
        autoptd.parallelize(
            Named(in_a_list, True), num_microbatches=2, backend="local", example_inputs=(X, Y)
        )


@pytest.mark.parametrize("cache", CACHES, ids=lambda one: one.__name__)
def test_a_cache_outside_of_the_modules_keeps_nothing_of_the_trace(cache: Callable[..., Tensor]) -> None:
    model = Net(cache, False)
    pm = autoptd.parallelize(model, t=2, num_microbatches=2, backend="local", example_inputs=(X, Y))
    expected = float(model(X, Y))
    assert float(pm.step(X, Y)) == pytest.approx(expected, rel=1e-12)
    assert float(pm.eval_step(X, Y)) == pytest.approx(expected, rel=1e-12)
    pm.close()
