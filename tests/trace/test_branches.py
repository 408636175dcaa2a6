"""Branches on the value of a tensor: taken where their outcome is known, refused where it is not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd import trace
from autoptd.errors import TraceError
from autoptd.ir.notes import op_name, ops
from tests.parity.models import MACHINE

X = torch.randn(4, 6)


class Net(nn.Module):
    def __init__(self, then: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(6, 6), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.layer(x))


def traced(then: Callable[[Any, Tensor], Tensor]) -> list[str]:
    found = trace.capture(Net(then), (X,), {}, None)
    return [op_name(node).removeprefix("aten.") for node in ops(found.graph)]


DRAWN: dict[str, tuple[Callable[[], Any], bool | None]] = {
    "gt 0": (lambda: torch.rand(1) > 0.0, True),
    "lt 0": (lambda: torch.rand([]) < 0, False),
    "not le 0": (lambda: not torch.rand([]) <= 0, True),
    "0 lt": (lambda: 0.0 < torch.rand(1), True),  # noqa: SIM300
    "lt 1": (lambda: torch.rand(1) < 1, True),
    "ge 1": (lambda: torch.ge(torch.rand_like(torch.ones(1)), 1.0), False),
    "below": (lambda: torch.rand(1).gt(-0.5), True),
    "half": (lambda: torch.rand(1) > 0.5, None),
    "16 bits": (lambda: torch.rand(1, dtype=torch.bfloat16) > 0, None),
    "changed": (lambda: torch.rand(1).sub_(0.5) > 0, None),
    "outcome changed": (lambda: (torch.rand(1) > 0).logical_not_(), None),
    "normal": (lambda: torch.randn(1) > 0, None),
}


@pytest.mark.parametrize(("draw", "is_true"), DRAWN.values(), ids=DRAWN)
def test_random_numbers_against_a_bound(draw: Callable[[], Any], is_true: bool | None) -> None:
    def then(net: Any, y: Tensor) -> Tensor:
        return (y * 2).sum() if draw() else y.sum()

    if is_true is None:
        with pytest.raises(TraceError, match=r"a random number decides a branch|becomes a Python number"):
            traced(then)
    else:
        assert ("mul" in traced(then)) == is_true


def test_random_numbers_that_decide_nothing_leave_the_masks_of_dropout_as_they_are() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = F.dropout(self.first(x), 0.3)
            if torch.rand(1) > 0.0:
                x = x + F.dropout(self.second(x), 0.5)
            return (x + torch.rand_like(x) - y).square().mean()

    x = torch.randn(4, 8)
    autoptd.verify(Dropped(), example_inputs=(x, x.flip(0)), machine=MACHINE, steps=2, t=2)


def raises_in_one(net: Any, y: Tensor) -> Tensor:
    if y.isnan().any():
        raise ValueError(f"no number in {y}")
    return y.sum()


def raises_in_a_loop(net: Any, y: Tensor) -> Tensor:
    for bound in (1e8, 1e9):
        if (y > bound).any() or (y < -bound).any():
            raise ValueError
    return y.sum()


# Compiled by itself: pytest writes the asserts of a test file in another way.
ASSERTS = """
def asserts(net, y):
    assert not y.isnan().any(), "no number"
    assert (y < 1e9).all()
    return y.sum()
"""
ASSERTING: dict[str, Any] = {}
exec(compile(ASSERTS, __file__, "exec"), ASSERTING)


def raises_otherwise(net: Any, y: Tensor) -> Tensor:
    if y.isfinite().all():
        return y.sum()
    raise ValueError


@pytest.mark.parametrize("then", [raises_in_one, raises_in_a_loop, ASSERTING["asserts"], raises_otherwise])
def test_checks_are_left_out_and_said(then: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.warns(UserWarning, match=r"test_branches\.py:\d+: raises on the values of a tensor"):
        assert traced(then) == ["linear", "sum"]


def test_checks_are_left_out_in_the_trace_of_another_number_of_rows() -> None:
    with pytest.warns(UserWarning, match="raises on the values"):
        first = trace.capture(Net(raises_in_one), (X,), {}, None)
        again = trace.capture_again(first, Net(raises_in_one), (X.repeat(2, 1),), {}, None)
    assert [op_name(node) for node in ops(again)] == [op_name(node) for node in ops(first.graph)]


def caught_here(net: Any, y: Tensor) -> Tensor:
    try:
        if (y > 0).any():
            raise ValueError
        return y.sum()
    except ValueError:
        return y.sum() * 2


def caught_above(net: Any, y: Tensor) -> Tensor:
    try:
        return raises_in_one(net, y)
    except Exception:
        return y.sum() * 2


def suppressed(net: Any, y: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        raises_in_one(net, y)
        y = y * 2
    return y.sum()


def both_go_on(net: Any, y: Tensor) -> Tensor:
    return y.sum() if (y > 0).any() else y.sum() * 2


@pytest.mark.parametrize("then", [caught_here, caught_above, suppressed, both_go_on])
def test_what_the_forward_goes_on_after_is_refused(then: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match=r"catches the exception|becomes a Python number"):
        traced(then)
