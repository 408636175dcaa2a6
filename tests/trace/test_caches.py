"""What a forward changes of an object in a cache of a function is refused; tables there, and what somebody has set, are not."""

from __future__ import annotations

import copy
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
from autoptd.trace import watched
from autoptd.trace.changes import Cache, held_in

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


@pytest.mark.parametrize("size", [None, 2, 8])
def test_results_of_a_cache_are_found(size: int | None) -> None:
    """They alone: its keys are not, nor is the dict that finds them, which nobody must put back."""
    results: dict[Any, Any] = {"a": {"scale": 1.0}, 2: object(), (3,): {}}
    cached = functools.lru_cache(size)(lambda name, **more: results[name])
    assert held_in(cached) == []
    for name in results:
        cached(name, more=1)
    kept = list(results.values())[-(size or 3) :]
    assert [id(x) for x in held_in(cached)] == [id(x) for x in kept]


def test_a_cache_that_is_full_may_be_filled() -> None:
    """Of one entry: a trace takes out another one's, and leaves none of its own."""
    one_table(5)
    cache = Cache(one_table, "")
    one_table(6)
    assert cache.is_filled() and one_table.cache_info().currsize == 1
    trains_like_itself(using(lambda self, x: x * one_table(x.shape[1])))
    for _ in range(2):
        trains_like_itself(using(TABLES["a property of another name"]))


def test_what_a_function_does_once_is_not_kept() -> None:
    """As a logger's `warning_once`: a second trial of the model would cost every compilation of a Hugging Face model time."""
    once = functools.lru_cache(None)(lambda text: None)
    cache = Cache(once, "")
    once("deprecated")
    assert not cache.is_filled()


def test_weights_are_what_they_were_where_a_trial_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[1].weight = nn.Parameter(model[0].weight.data.view(2, 3))  # another parameter of the same memory
    before = [p.detach().clone() for p in model.parameters()]
    real, calls = Tensor.mul_, list[Any]()

    def mul_(x: Tensor, factor: float) -> Tensor:
        calls.append(factor)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(x, factor)

    monkeypatch.setattr(Tensor, "mul_", mul_)
    with pytest.raises(KeyboardInterrupt), watched._other_weights(model):
        pass
    assert calls[2:] == [2, 0.5, 0.5]
    assert all(torch.equal(p, x) for p, x in zip(model.parameters(), before, strict=True))


def table(length: int) -> Tensor:
    return torch.linspace(1, 2, length)


one_table, any_table = functools.lru_cache(1)(table), functools.lru_cache(None)(table)


class Cached(nn.Module):
    """A table that is made once, in each of the ways in which models keep one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    @property
    @functools.cache  # noqa: B019
    def of_property(self) -> Tensor:
        return table(2)

    other_name = property(functools.lru_cache(1)(torch.no_grad()(lambda self: table(2))))

    @functools.cached_property
    def cached(self) -> Tensor:
        return table(2)

    @functools.lru_cache  # noqa: B019
    def of_method(self, length: int) -> Tensor:
        return table(length)

    @functools.cached_property
    def of_weights(self) -> Tensor:
        return self.linear.weight.detach().sum(1)

    @functools.lru_cache  # noqa: B019
    def of_weights_by_key(self, power: int) -> Tensor:
        return self.linear.weight.detach().sum(1) ** power

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.use(self, self.linear(x)) - y).pow(2).mean()

    use: Callable[[Any, Tensor], Tensor]


TABLES: dict[str, Callable[[Cached, Tensor], Tensor]] = {
    "a property": lambda self, x: x * self.of_property,
    "a property of another name": lambda self, x: x * self.other_name,
    "a cached property": lambda self, x: x * self.cached,
    "a method": lambda self, x: x * self.of_method(x.shape[1]),
    "mapped": lambda self, x: x * next(map(any_table, [x.shape[1]])),
    "another of one": lambda self, x: x * one_table(x.shape[1]) * one_table(x.shape[1] + 2).sum(),
}
WEIGHTS: dict[str, Callable[[Cached, Tensor], Tensor]] = {
    "a cached property": lambda self, x: x * self.of_weights,
    "a method": lambda self, x: x * self.of_weights_by_key(1),
}


def using(use: Callable[[Cached, Tensor], Tensor], *, is_warm: bool = False) -> Cached:
    torch.manual_seed(0)
    model = Cached()
    model.use = use
    if is_warm:
        model(*BATCH)
    return model


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("way", TABLES)
def test_a_table_is_made_once_in_any_way(way: str, is_warm: bool) -> None:
    trains_like_itself(using(TABLES[way], is_warm=is_warm))


def trains_like_itself(model: Cached) -> None:
    """And no fake tensor stays in it."""
    pm = autoptd.parallelize(model, d=2, backend="local", example_inputs=BATCH)
    model = copy.deepcopy(model)
    ours, theirs = pm.optimizer(torch.optim.SGD, lr=0.5), torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        wanted = model(*BATCH)
        wanted.backward()
        assert torch.allclose(pm.step(*BATCH), wanted.detach())
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    pm.close()


@pytest.mark.parametrize("way", WEIGHTS)
def test_what_is_made_of_weights_once_is_refused(way: str) -> None:
    """A trace would make it of the weights of every step. The remedy is a buffer."""
    model = using(WEIGHTS[way])
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(TraceError, match=r"of_weights.*computed from the weights.*register_buffer"):
        autoptd.compile(model, d=2, example_inputs=BATCH)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    model = using(lambda self, x: x * self.kept)
    model.register_buffer("kept", model.linear.weight.detach().sum(1))
    trains_like_itself(model)


def test_a_cache_may_stand_next_to_buffers_that_count() -> None:
    """Calls that look for a cache leave them as they were."""
    model = using(TABLES["a cached property"])
    model.norm = nn.BatchNorm1d(2)
    model.use = lambda self, x: self.norm(x) * self.cached
    pm = autoptd.parallelize(model, d=2, num_microbatches=1, backend="local", example_inputs=BATCH)
    wanted = model(*BATCH)
    assert torch.allclose(pm.step(*BATCH), wanted.detach())
    assert int(pm.state_dict()["norm.num_batches_tracked"]) == 1 == int(model.norm.num_batches_tracked)
    pm.close()
