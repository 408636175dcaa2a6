"""What a call is handed is looked at, unless the function changes nothing whatever that is."""

from __future__ import annotations

import heapq
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoptd.trace.calls import Harmless, handed_to


class Own:
    def method(self, value: Any) -> Any:
        return value


LOOKED_AT = [
    list.append,
    [].append,
    deque.append,
    dict.setdefault,
    dict.pop,
    {}.get,
    next,
    map,
    heapq.heappush,
]
LOOKED_AT += [setattr, getattr, vars, print, nn.functional.dropout, partial(next), torch.manual_seed, Own]
PASSED_OVER = [isinstance, len, super, dict.get, Tensor.view, nn.Linear(1, 1), Own.method, Own().method]


@pytest.mark.parametrize(
    "function", LOOKED_AT, ids=lambda function: getattr(function, "__name__", "a partial")
)
def test_what_may_change_is_looked_at(function: Any) -> None:
    known = Harmless()
    assert function not in known
    # Nor after others were looked up.
    assert all(other in known for other in PASSED_OVER) and function not in known


@pytest.mark.parametrize("function", PASSED_OVER, ids=lambda function: type(function).__name__)
def test_what_changes_nothing_is_passed_over(function: Any) -> None:
    assert function in Harmless()
    # As a longer look at what it is handed would find.
    assert not list(handed_to(function, [1, "text", torch.ones(1)]))
