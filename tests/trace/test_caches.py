"""What a forward changes of an object in a cache of a function is refused; tables there, and what somebody has set, are not."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import TraceError
from autoptd.trace.caches import held_in

BATCH = (torch.arange(32.0).view(8, 4) / 32, torch.arange(16.0).view(8, 2) / 16)


def of_a_batch(kept: types.SimpleNamespace, x: Tensor) -> Tensor:
    if kept.value is None:
        kept.value = x.detach().abs().mean()
    return x / kept.value


def counted(kept: types.SimpleNamespace, x: Tensor) -> Tensor:
    kept.n += 1
    return x * kept.n


def doubled(kept: Tensor, x: Tensor) -> Tensor:
    made = x * kept
    kept.mul_(2)
    return made


def appended(kept: list[int], x: Tensor) -> Tensor:
    kept.append(1)
    return x * len(kept)


STATE: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "a counter": (lambda: types.SimpleNamespace(n=0), counted),
    "a counter beside a table": (lambda: types.SimpleNamespace(n=0, table=torch.ones(2)), counted),
    "a list": (list, appended),
    "an iterator": (lambda: itertools.count(1), lambda kept, x: x * next(kept)),
    "a tensor in place": (lambda: torch.ones(2), doubled),
    "a value of the first batch": (lambda: types.SimpleNamespace(value=None), of_a_batch),
}
NONE: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "a table": (lambda: torch.linspace(1, 2, 2), lambda kept, x: x * kept),
    "tables": (lambda: (torch.ones(2), [torch.zeros(2)]), lambda kept, x: x * kept[0] + kept[1][0]),
    "settings": (lambda: types.SimpleNamespace(scale=1.0), lambda kept, x: x * kept.scale),
    "settings beside a table": (
        lambda: types.SimpleNamespace(scale=1.0, table=torch.ones(2)),
        lambda kept, x: x * kept.scale * kept.table,
    ),
    "an object for each": (lambda: object(), lambda kept, x: x * 2),
}


class Net(nn.Module):
    def __init__(self, cached: Any, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.cached, self.use = nn.Linear(4, 2), cached, use

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.use(self.cached(), self.linear(x)) - y).pow(2).mean()


def net(forms: Any, form: str, size: int | None) -> Net:
    make, use = forms[form]

    def cached() -> Any:
        return make()

    return Net(functools.lru_cache(size)(cached), use)


@pytest.mark.parametrize("form", STATE)
def test_what_a_forward_changes_of_what_is_cached_is_refused(form: str) -> None:
    with pytest.raises(TraceError, match="by the forward"):
        autoptd.compile(net(STATE, form, None), d=2, example_inputs=BATCH)


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("form", NONE)
def test_a_cache_that_is_only_read_is_none(form: str, size: int | None) -> None:
    model = net(NONE, form, size)
    # The loop may have set something, or run the model.
    model(*BATCH)
    if hasattr(model.cached(), "scale"):
        model.cached().scale = 3.0
    wanted = model(*BATCH).detach()
    pm = autoptd.parallelize(model, d=2, backend="local", example_inputs=BATCH)
    assert torch.allclose(pm.step(*BATCH), wanted) and torch.allclose(model(*BATCH), wanted)
    # Nothing of the trace is left.
    assert all(type(x) is Tensor for x in held_in(model.cached) if isinstance(x, Tensor))
    pm.close()


@pytest.mark.parametrize("size", [None, 2])
def test_results_of_a_cache_are_found(size: int | None) -> None:
    results = {"a": {"scale": 1.0}, "b": object()}
    cached = functools.lru_cache(size)(lambda name: results[name])
    for name in results:
        cached(name)
    found = held_in(cached)
    assert all(any(x is result for x in found) for result in results.values())
    assert not any(isinstance(x, dict) and x is not results["a"] for x in found)
