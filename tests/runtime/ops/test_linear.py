"""`rt.linear` against `F.linear`: values and gradients with every hook, and what must not be lost on the way."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoptd import runtime as rt
from autoptd.ir.mesh import Mesh
from autoptd.runtime.ops.linear import Deferred, WeightGemm
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, Pending, SoloGroup, World


def add_to_grad(gemm: WeightGemm) -> None:
    a, b = gemm.factors()
    gemm.weight.grad = a @ b if gemm.weight.grad is None else gemm.weight.grad + a @ b


def normal(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def strided() -> Tensor:
    return torch.randn(6, 5, 3, dtype=torch.float64).transpose(0, 2).requires_grad_()


INPUTS: dict[str, Callable[[], Tensor]] = {
    "one dim": lambda: normal(6),
    "two dims": lambda: normal(4, 6),
    "three dims": lambda: normal(2, 4, 6),
    "strided": strided,
    "no rows": lambda: normal(0, 6),
    "without gradient": lambda: normal(2, 4, 6, grad=False),
}


@pytest.mark.parametrize("wgrad", ["autograd", "at once", "deferred"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("name", INPUTS)
def test_values_and_gradients_are_those_of_f_linear(
    name: str, is_transposed: bool, has_bias: bool, wgrad: str
) -> None:
    torch.manual_seed(0)
    x, bias = INPUTS[name](), normal(3) if has_bias else None
    weight = normal(*((6, 3) if is_transposed else (3, 6)))
    deferred = Deferred()
    taken = {"autograd": None, "at once": add_to_grad, "deferred": deferred}[wgrad]
    operands = [one for one in (x, weight, bias) if one is not None and one.requires_grad]
    results = []
    for run in (
        lambda: F.linear(x, weight.t() if is_transposed else weight, bias),
        lambda: rt.linear(x, weight, bias, wgrad=taken, transposed=is_transposed),
    ):
        for one in operands:
            one.grad = None
        y = run()
        (y * y.detach().cos()).sum().backward()
        for gemm in deferred.take():
            add_to_grad(gemm)
        results.append([y.detach(), *(one.grad for one in operands)])
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-14)


def test_a_frozen_weight_has_no_gemm_and_keeps_no_input() -> None:
    deferred, x, weight = Deferred(), normal(4, 6), normal(3, 6, grad=False)
    y = rt.linear(x * 2, weight, wgrad=deferred)
    assert y.grad_fn is not None and y.grad_fn.saved_tensors[0] is None
    y.sum().backward()
    assert deferred.take() == [] and weight.grad is None
    torch.testing.assert_close(x.grad, 2 * weight.sum(0).expand(4, 6))


def test_without_gradients_it_is_f_linear() -> None:
    x, weight = normal(4, 6), normal(3, 6)
    with torch.no_grad():
        assert torch.equal(rt.linear(x, weight, wgrad=Deferred()), F.linear(x, weight))


class Told(Pending):
    def __init__(self, events: list[str], x: Tensor) -> None:
        self.events, self.x = events, x

    def wait(self) -> Tensor:
        self.events.append("wait")
        return self.x

    def is_done(self) -> bool:
        return True


class Telling(SoloGroup):
    """A group that tells when a reduction starts and when it is waited for."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(0)
        self.events = events

    def all_reduce_start(self, flat: Tensor, site: str) -> Pending:
        assert flat.is_contiguous()
        self.events.append(f"start {site}")
        return Told(self.events, flat)


def test_the_reduction_runs_beside_the_weight_gemm() -> None:
    events: list[str] = []
    y = rt.linear(
        strided(),
        normal(2, 6),
        overlap=Telling(events),
        wgrad=lambda gemm: events.append("GEMM"),
        site="c_fc",
    )
    y.sum().backward()
    assert events == ["start c_fc backward", "GEMM", "wait"]


@pytest.mark.parametrize("has_gradient", [True, False])
def test_overlap_sums_the_input_gradient_and_nothing_else(has_gradient: bool) -> None:
    torch.manual_seed(0)  # values are drawn here: rank threads share the generator
    inputs, weights, biases = normal(3, 4, 6, grad=False), normal(2, 2, 6, grad=False), normal(2, grad=False)

    def on_rank(world: World) -> list[list[Tensor | None]]:
        group, results = world.group(("tp",)), []
        for overlap in (False, True):
            x = inputs.clone().requires_grad_(has_gradient)
            weight, bias = weights[world.rank].clone().requires_grad_(), biases.clone().requires_grad_()
            y = (
                rt.linear(x, weight, bias, overlap=group)
                if overlap
                else F.linear(rt.i_to_r(x, group), weight, bias)
            )
            (y * y.detach()).sum().backward()
            results.append([y.detach(), x.grad, weight.grad, bias.grad])
        return results

    for plain, hooked in run_ranks(ThreadWorld(Mesh(t=2), Communicators()), on_rank):
        for found, wanted in zip(hooked, plain, strict=True):
            assert (found is None) == (wanted is None)
            if wanted is not None:
                torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_what_waits_for_w_is_not_given_away_as_a_gradient() -> None:
    """The gradient of y is that of `offset` too: autograd must not make it `offset.grad`, and later add to it in place."""
    deferred = Deferred()
    x, weight, offset = normal(4, 6), normal(3, 6), normal(4, 3)
    wanted = torch.zeros_like(weight)
    for scale in (1.0, 10.0):
        factor = torch.full((4, 3), scale, dtype=torch.float64)
        ((rt.linear(x, weight, wgrad=deferred) + offset) * factor).sum().backward()
        wanted += factor.t() @ x.detach()
    for gemm in deferred.take():
        add_to_grad(gemm)
    torch.testing.assert_close(weight.grad, wanted)


def test_a_gemm_that_ran_is_let_go() -> None:
    deferred, x = Deferred(), normal(4, 6)
    used = x * 2
    seen = weakref.ref(used)
    rt.linear(used, normal(3, 6), wgrad=deferred).sum().backward()
    del used
    gemms = deferred.take()
    assert len(gemms) == 1 and seen() is not None
    del gemms
    assert seen() is None
