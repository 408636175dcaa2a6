"""Custom autograd functions: whose backward is the derivative of their forward, is traced; every other is one operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd import trace
from autoptd.errors import PlanError, TraceError
from autoptd.ir.machine import Machine
from autoptd.program.about import module_hashes
from tests.forks import finish, start
from tests.waits import LONG

X = torch.randn(4, 6)
WEIGHT = nn.Parameter(torch.randn(6))


class Net(nn.Module):
    def __init__(self, function: Any, *more: Any) -> None:
        super().__init__()
        self.layer, self.function, self.more = nn.Linear(6, 6), function, more

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.layer(x), *self.more).square().sum()


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * ctx.factor * x**2 * grad, None


class Split(torch.autograd.Function):
    """Of the newer kind: the context is filled apart."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.saved_tensors[0] * grad


@pytest.mark.parametrize("model", [Net(Cubed, 0.5), Net(Split)])
def test_a_true_derivative_is_traced(model: nn.Module) -> None:
    found = trace.capture(model, (X,), {}, None)
    trace.compare(model, None, found.graph, found.buffers, (X,), {})


def test_large_arguments_are_tried_in_small() -> None:
    model = Net(Cubed, 0.5)
    model.layer = nn.Linear(6, 1 << 12, device="meta")
    trace.capture(model, (torch.empty(1 << 11, 6, device="meta"),), {}, None)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Clipped(StraightThrough):
    """The derivative, but for large gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.clamp(-1e-3, 1e-3)


class Closed(StraightThrough):
    """Reads a parameter that its backward gives no gradient to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * WEIGHT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * WEIGHT


class Dirty(StraightThrough):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(1.0)


class Mean(StraightThrough):
    @staticmethod
    def forward(ctx: Any, x: Tensor, of: Any) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class Random(StraightThrough):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x + torch.rand_like(x)).round()


class RandomBackward(StraightThrough):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * torch.rand_like(grad)


class Scribbles(StraightThrough):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach().round_() * 2.0


SCALE = [2.0]


class Scaled(StraightThrough):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * SCALE[0]


class Reversed(StraightThrough):
    """Of domain adaptation: the gradient with another sign, and a number that is kept on the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return -ctx.factor * grad, None


class Chosen(StraightThrough):
    """Two results, of which one has no gradient; places that are saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        values, places = x.max(-1, keepdim=True)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places, x)
        return values, places

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:  # type: ignore[override]
        places, x = ctx.saved_tensors
        return torch.zeros_like(x).scatter_add_(-1, places, 0.5 * grad)


class Centred(StraightThrough):
    """Its backward takes the mean over all rows."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad - grad.mean(0)


class OfTwo(Net):
    def forward(self, x: Tensor) -> Tensor:
        values, places = self.function.apply(self.layer(x))
        return (values * (1 + places)).square().sum()


OWN = [
    Net(StraightThrough),
    Net(Reversed, 0.7),
    Net(Reversed, 3),
    Net(Mean, torch.zeros(2, dtype=torch.int64)),
    OfTwo(Chosen),
]


@pytest.mark.parametrize("model", OWN)
def test_a_backward_of_its_own_is_kept(model: nn.Module) -> None:
    found = trace.capture(model, (X,), {}, None)
    assert model.function in found.whole
    trace.compare(model, None, found.graph, found.buffers, (X,), {})


@pytest.mark.one_in(9)
@pytest.mark.parametrize("model", OWN[:3] + OWN[-1:])
def test_a_backward_of_its_own_on_every_rank(model: nn.Module) -> None:
    mesh = {"t": 2, "p": 1, "d": 2, "num_microbatches": 2}
    autoptd.verify(model, example_inputs=torch.randn(8, 6), steps=2, machine=Machine(latency=1e-9), **mesh)
    text = "\n".join(autoptd.compile(model, t=2, example_inputs=torch.randn(8, 6)).sources.values())
    assert f'rt.apply_function("{__name__}:{model.function.__name__}", ' in text


@pytest.mark.parametrize("function", [Centred, Clipped])
def test_a_backward_that_mixes_rows_is_refused_for_some_of_them(function: Any) -> None:
    with pytest.raises(PlanError, match=r"not linear|mixes the samples"):
        autoptd.compile(Net(function), d=2, num_microbatches=2, example_inputs=torch.randn(8, 6))
    # All rows at once: those of other replicas are gathered.
    mesh = {"d": 2} if function is Centred else {}
    autoptd.verify(Net(function), **mesh, num_microbatches=1, example_inputs=torch.randn(8, 6), steps=2)


@pytest.mark.parametrize(
    ("model", "fact"),
    [
        (Net(Dirty), "mark_dirty"),
        (Net(Mean, nn.Linear(2, 2)), "takes a Linear"),
        (Net(Random), "draws random numbers"),
        (Net(RandomBackward), "draws random numbers"),
        (Net(Scribbles), "writes into its arguments"),
        (Net(Scaled), "reads .*SCALE"),
    ],
)
def test_others_are_refused(model: nn.Module, fact: str) -> None:
    with pytest.raises(TraceError, match=fact) as caught:
        trace.capture(model, (X,), {}, None)
    assert model.function.__name__ in caught.value.site


def test_a_parameter_from_outside_is_refused() -> None:
    with pytest.raises(TraceError, match="not a registered parameter"):
        trace.capture(Net(Closed), (X,), {}, None)


def test_a_name_says_nothing_of_what_was_traced_before() -> None:
    """What a checkpoint knows of a module is the same in a process that has traced other models before."""

    def prints() -> dict[str, str]:
        return module_hashes(autoptd.compile(Net(StraightThrough), t=2, example_inputs=torch.randn(8, 6)))

    first = prints()
    # Another class of the same name, made by a function.
    other = type("StraightThrough", (StraightThrough,), {"__module__": "elsewhere"})
    autoptd.compile(Net(other), t=2, example_inputs=torch.randn(8, 6))
    autoptd.compile(Net(Reversed, 0.7), t=2, example_inputs=torch.randn(8, 6))
    assert prints() == first
    assert first != module_hashes(autoptd.compile(Net(Reversed, 0.7), t=2, example_inputs=torch.randn(8, 6)))


@pytest.mark.one_in(9)
@pytest.mark.parametrize("function", [StraightThrough, Chosen])
def test_a_saved_program_imports_it_in_a_new_process(tmp_path: Path, function: Any) -> None:
    model = OfTwo(function) if function is Chosen else Net(function)
    autoptd.compile(model, t=2, example_inputs=torch.randn(8, 6)).save(tmp_path)
    ((code, _, error),) = finish(start(tmp_path / "stage_0.py", 1, "--check"), LONG)
    assert code == 0, error


class Scaled(torch.autograd.Function):
    """Its last argument needs no gradient, and gets none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.saved_tensors[0], None


def test_a_tensor_without_gradient_has_none_to_compare() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return Scaled.apply(self.layer(x), torch.tensor(0.5)).square().sum()

    assert not trace.capture(Plain(), (X,), {}, None).whole
