"""What a model does with constants, buffers, names, modes and nested results is in its recorded graph."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoptd import trace
from autoptd.ir.notes import note, ops, placeholders
from autoptd.trace import compare
from tests.trace.test_results import Doubling

X = torch.linspace(-1.0, 2.0, 30, dtype=torch.float64).reshape(5, 6)
LOCK = threading.Lock()
Forward = Callable[["Net", Tensor], Tensor]


@torch.library.custom_op("autoptd_tests::nested", mutates_args=())
def nested(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x * 2, [x * 3, x * 4]


@nested.register_fake
def _(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(x), [torch.empty_like(x), torch.empty_like(x)]


class Net(nn.Module):
    """Two layers, a buffer named as a constant would be, and a counter."""

    def __init__(self, forward_of: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        self.lifted_tensor_0: Tensor
        self.seen: Tensor
        self.register_buffer("lifted_tensor_0", torch.full((6,), 3.0, dtype=torch.float64))
        self.register_buffer("seen", torch.ones(6, dtype=torch.float64))
        self.forward_of = forward_of

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_of(self, x).square().mean()


def a_constant_that_is_written(self: Net, x: Tensor) -> Tensor:
    scale = torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0, 3.0], dtype=torch.float64)
    scale[0] *= 3
    scale += 1
    return self.second(self.first(x)) * scale


def a_name_that_is_taken(self: Net, x: Tensor) -> Tensor:
    return self.first(x) * self.lifted_tensor_0 + torch.arange(6).double() + torch.tensor([1.0] * 6).double()


def a_buffer_written_in_two_regions(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    with torch.no_grad():
        self.seen.add_(h.sum(0))
    h = h * 2
    with torch.no_grad():
        self.seen[1:] *= 0.5
    return self.second(h) * self.seen


def a_buffer_written_after_a_region(self: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.seen += self.first(x).mean(0)
    h = self.second(x)
    self.seen.mul_(2)
    return h + self.seen


def itself_without_gradients(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    with torch.no_grad():
        scale = h.to(h.dtype).contiguous().mean()
    return self.second(h) * scale


FORWARDS = (a_constant_that_is_written, a_name_that_is_taken, a_buffer_written_in_two_regions)
FORWARDS += (a_buffer_written_after_a_region, itself_without_gradients)


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_the_graph_computes_what_the_model_does(forward: Forward) -> None:
    found = trace.capture(Net(forward), (X,), {}, None)
    compare(Net(forward), None, found.graph, found.buffers, (X,), {})


def test_results_in_a_list_of_results_are_found() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        a, (b, c) = torch.ops.autoptd_tests.nested(self.first(x))
        return a * b + c

    graph = trace.capture(Net(forward), (X,), {}, None).graph
    assert [str(node.target) for node in ops(graph)].count("autoptd_tests.nested.default") == 1


def test_a_mode_around_the_first_operator_is_not_that_of_the_others() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        x = x.float()
        with Doubling():
            x = x.sin().sin()
        return x.sin() * (2.0 if x.sin().dtype == x.dtype else 3.0)

    assert not any(3.0 in node.args for node in ops(trace.capture(Net(forward), (X,), {}, None).graph))


def test_a_forward_that_is_traced_again_has_ended_before() -> None:
    """What it sets, and sets back at its end, is as before; it would wait for its own lock."""

    def forward(self: Net, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.first):
            kind = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            assert LOCK.acquire(timeout=5.0)
            table = torch.zeros(5, 6)
            table[:, 1:] = x[:, 1:]
            LOCK.release()
            torch.set_default_dtype(kind)
            x = layer(table)
        return x

    kind = torch.get_default_dtype()
    found = trace.capture(Net(forward), (X,), {}, None)
    assert torch.get_default_dtype() == kind and not LOCK.locked()
    compare(Net(forward), None, found.graph, found.buffers, (X,), {})


def test_a_module_of_several_names_has_its_first() -> None:
    net = Net(lambda self, x: self.second(self.first(x)))
    net.zz = nn.ModuleList([net.first, net.second])
    graph = trace.capture(net, (X,), {}, None).graph
    assert {note(node).module for node in ops(graph)} == {"", "first", "second"}
    assert {note(node).name for node in placeholders(graph, "param")} == {
        f"{layer}.{name}" for layer in ("first", "second") for name in ("weight", "bias")
    }


def test_everything_of_torch_is_as_before() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    call, weight = nn.Module.__call__, (net := Net(forward)).first.weight
    with pytest.raises(KeyboardInterrupt):
        trace.capture(net, (X,), {}, None)
    assert nn.Module.__call__ is call and net.first.weight is weight
    assert not torch.compiler.is_exporting() and not torch.compiler.is_compiling()
