"""A number or a list that a forward only adds to is worth a warning; one that is read anywhere, in any way, is refused."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.compat import tree_leaves
from autoptd.errors import TraceError
from autoptd.trace.watched import Watched, check_changes

X = torch.ones(2, 2)
CALLS = {"n": 0}


class Counts(nn.Module):
    """Calls `count(self)` in its forward, whose number scales the loss."""

    total = 0
    log: ClassVar[list[int]] = []

    def __init__(self, count: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.count, self.calls, self.seen, self.mean = nn.Linear(2, 2), count, 0, [0], 0.0
        self.history: list[Any] = []
        self.same = self.history

    def forward(self, x: Tensor) -> Tensor:
        factor = self.count(self)
        return self.layer(x).sum() * (1.0 if factor is None else factor)


def counted(model: Any) -> None:
    model.calls += 1


def of_its_class(model: Any) -> None:
    type(model).total += 1


def in_a_dict(model: Any) -> None:
    CALLS["n"] += 1
    model.seen[0] -= 2


def an_average(model: Any) -> None:
    model.mean = model.mean + 0.5
    model.calls = model.mean + 1


LOGS = [counted, of_its_class, in_a_dict, an_average]


def set_and(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def count(model: Any) -> Any:
        model.calls += 1
        return read(model)

    return count


READS: dict[str, Callable[[Any], Any]] = {
    "a branch": lambda self: 2.0 if self.calls > 30 else 1.0,
    "a factor": lambda self: self.calls * 0 + 1.0,
    "a truth": lambda self: 1.0 if self.calls else 2.0,
    "a text": lambda self: 1.0 if f"{self.calls}" != "31" else 2.0,
    "an index": lambda self: [1.0, 1.0, 1.0, 1.0, 1.0][self.calls],
    "a kind": lambda self: 1.0 if isinstance(self.calls, int) else 2.0,
    "by a copy": lambda self: 1.0 if copy.deepcopy(vars(self)["calls"]) < 30 else 2.0,
    "by another": lambda self: 1.0 if (lambda n: n + 1)(self.calls) < 30 else 2.0,
    "by a tensor": lambda self: torch.ones(()) + 0 * self.calls,
    "a key": lambda self: {31: 2.0}.get(self.calls, 1.0),
    "swallowed": lambda self: swallowed(self),
    "divided": lambda self: 1.0 + self.calls // 31,
}


def swallowed(model: Any) -> float:
    try:
        return 2.0 if model.calls > 30 else 1.0
    except Exception:
        return 1.0


def of_a_closure() -> Callable[[Any], Any]:
    kept: list[int] = []
    return lambda model: kept.append(1)


def of_a_helper(model: Any) -> None:
    (lambda log: log.append(model.calls))(model.history)


def by_the_class(model: Any) -> None:
    model.log.extend([1, 2])
    model.calls += 1


def in_place(model: Any) -> None:
    model.history += [1]


ADDED = {
    "an attribute": lambda model: model.history.append(model.layer.weight.detach()),
    "two names": lambda model: model.same.append(1),
    "a global": lambda model: LOG.append(1),
    "in a dict": lambda model: LOGS_BY_NAME["loss"].append(1),
    "a deque": lambda model: LAST.append(1),
    "a closure": of_a_closure(),
    "a helper": of_a_helper,
    "a class, and a number": by_the_class,
    "in place": in_place,
}
LOG: list[int] = []
LOGS_BY_NAME: dict[str, list[int]] = {"loss": []}
LAST: collections.deque[int] = collections.deque(maxlen=9)


def added_and(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def add(model: Any) -> Any:
        model.history.append(1)
        return read(model)

    return add


def as_tensors(model: Any) -> float:
    try:
        return float(torch.stack(model.history).sum())
    except TypeError:
        return 1.0


def matched(model: Any) -> float:
    match model.history:
        case [_, *_]:
            return 2.0
    return 1.0


def in_a_default(model: Any, log: list[int] = []) -> float:  # noqa: B006
    log.append(1)
    return 2.0 if len(log) > 30 else 1.0


LISTS_READ: dict[str, Callable[[Any], Any]] = {
    "a length": lambda model: 2.0 if len(model.history) > 30 else 1.0,
    "a truth": lambda model: 2.0 if model.history else 1.0,
    "an entry": lambda model: model.history[-1] * 1.0,
    "a loop": lambda model: [1.0 for _ in model.history][-1],
    "starred": lambda model: float([*model.history][-1]),
    "a sum": lambda model: 2.0 if sum(model.history) > 30 else 1.0,
    "by another name": lambda model: 2.0 if len(model.same) > 30 else 1.0,
    "by C, swallowed": as_tensors,
    "matched": matched,
    "in a tree": lambda model: float(len(tree_leaves({"log": (model.history,)}))),
    "a kind": lambda model: 2.0 if type(model.history) is list else 1.0,
    "a copy": lambda model: float(len(copy.copy(vars(model)["history"]))),
    "in a default": in_a_default,
    "of the class": lambda model: model.log.append(1) or float(len(model.log)),
}


def check(model: nn.Module) -> None:
    watched = Watched(model, None)
    watched(X)
    check_changes(watched, (X,), {})


@pytest.mark.parametrize("count", LOGS)
def test_what_only_logs_is_a_warning(count: Callable[[Any], None]) -> None:
    model = Counts(count)
    with pytest.warns(UserWarning, match=r"\(test_tally.py:\d+\): is counted by the forward"):
        check(model)
    assert (model.calls, model.mean, model.seen, CALLS["n"], Counts.total) == (0, 0.0, [0], 0, 0)


@pytest.mark.parametrize("kind", ADDED)
def test_a_list_that_is_only_added_to_is_a_warning(kind: str) -> None:
    model = Counts(ADDED[kind])
    with pytest.warns(UserWarning, match=r"\(test_tally.py:\d+\): is added to by the .*log in"):
        check(model)
    assert model.history is model.same and type(model.history) is list and type(Counts.log) is list
    assert not (model.history or LOG or LOGS_BY_NAME["loss"] or LAST or Counts.log)


@pytest.mark.parametrize("kind", LISTS_READ)
def test_a_list_that_is_read_is_refused(kind: str) -> None:
    with pytest.raises(TraceError, match=r"\(test_tally.py:\d+\): is changed by the forward"):
        check(Counts(added_and(LISTS_READ[kind])))


@pytest.mark.parametrize("kind", READS)
def test_what_is_read_is_refused(kind: str) -> None:
    with pytest.raises(TraceError, match=r"calls \(test_tally.py:\d+\): is changed by the forward"):
        check(Counts(set_and(READS[kind])))


def test_a_model_that_logs_trains() -> None:
    model = Counts(counted).double()
    x = torch.ones(4, 2, dtype=torch.float64)
    with pytest.warns(UserWarning, match="calls .*is counted"):
        pm = autoptd.parallelize(model, num_microbatches=2, backend="local", example_inputs=(x,))
    losses = [float(pm.step(x)) for _ in range(2)]
    assert losses == pytest.approx([float(model(x).detach())] * 2) and model.calls == 1
    pm.close()
