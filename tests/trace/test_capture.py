"""What a captured graph says: the loss, names, ties, sites; and that it computes what the model computes."""

from __future__ import annotations

import inspect
from functools import reduce
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph
from torch.utils._python_dispatch import TorchDispatchMode

from autoptd import trace
from autoptd.errors import TraceError
from autoptd.ir.notes import note, op_name, ops, placeholders
from autoptd.trace import Captured
from autoptd.trace.faithful import run_graph
from examples.gpt import GPT, GPTConfig

Tensor = torch.Tensor
X = torch.randn(4, 6)


class Net(nn.Module):
    """Two linear layers and whatever `forward_of` does with them."""

    def __init__(self, forward_of: Any = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.forward_of = forward_of

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_of(self, *args, **kwargs)


def captured(model: nn.Module, *args: Any, loss_fn: Any = None, **kwargs: Any) -> Captured:
    """Capture and hold the graph against the model: loss and every gradient."""
    found = trace.capture(model, args, kwargs, loss_fn)
    trace.compare(model, loss_fn, found.graph, found.buffers, args, kwargs)
    return found


def names(graph: Graph) -> list[str]:
    return [op_name(node).removeprefix("aten.") for node in ops(graph)]


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=16, block_size=8, n_layer=2, n_head=2, n_embd=8))


def ids(*size: int) -> Tensor:
    return torch.randint(16, size)


# Where the loss is.

RETURNS: dict[str, Any] = {
    "a scalar": lambda loss, x: loss,
    "(logits, loss)": lambda loss, x: (x, loss),
    "a list": lambda loss, x: [x, loss, None],
    "a dict": lambda loss, x: {"logits": x, "loss": loss},
    "a dict with other scalars": lambda loss, x: {"loss": loss, "norm": x.norm(), "other": x.sum()},
    "an object": lambda loss, x: SimpleNamespace(logits=x, loss=loss, accuracy=x.mean()),
}


@pytest.mark.parametrize("kind", RETURNS)
def test_the_loss_is_found(kind: str) -> None:
    def forward(self: Net, x: Tensor) -> Any:
        x = self.second(self.first(x).tanh())
        return RETURNS[kind](x.square().mean(), x)

    found = captured(Net(forward), X)
    assert names(found.graph) == ["linear", "tanh", "linear", "square", "mean"]  # other outputs are dropped


def test_no_loss() -> None:
    with pytest.raises(TraceError, match=r"no loss found.*\(4, 6\)") as caught:
        trace.capture(Net(lambda self, x: self.first(x)), (X,), {}, None)
    assert "loss_fn=" in caught.value.remedy


def test_two_losses_are_ambiguous() -> None:
    with pytest.raises(TraceError, match="2 scalars found, so the loss is ambiguous"):
        trace.capture(Net(lambda self, x: (self.first(x).mean(), self.second(x).mean())), (X,), {}, None)


def test_an_integer_is_no_loss() -> None:
    found = captured(Net(lambda self, x: (self.first(x).mean(), (x > 0).sum())), X)
    assert names(found.graph) == ["linear", "mean"]


def test_loss_fn_with_targets() -> None:
    found = captured(
        Net(lambda self, x: self.first(x)), X, loss_fn=F.cross_entropy, targets=torch.tensor([0, 1, 2, 5])
    )
    assert names(found.graph) == ["linear", "cross_entropy_loss"]
    assert [name for name, _ in found.inputs] == ["args", "targets"]


def test_loss_fn_without_targets() -> None:
    with pytest.raises(TraceError, match="no targets"):
        trace.capture(Net(lambda self, x: self.first(x)), (X,), {}, F.cross_entropy)


# Calls.


def test_keywords_and_positions_are_the_same_call() -> None:
    model, x, y = gpt(), ids(2, 8), ids(2, 8)
    by_place, by_name = captured(model, x, y), captured(model, idx=x, targets=y)
    assert names(by_place.graph) == names(by_name.graph)
    assert by_place.inputs == by_name.inputs == (("idx", 0), ("targets", 1))
    assert by_place.tree != by_name.tree


def test_the_same_object_twice_is_two_inputs() -> None:
    model, x = gpt(), ids(2, 8)
    found = captured(model, x, x)
    inputs = list(placeholders(found.graph, "input"))
    assert [note(node).name for node in inputs] == ["idx", "targets"] and all(node.users for node in inputs)
    other = ids(2, 8)  # the graph tells them apart where the model does
    loss, _, _ = run_graph(found.graph, dict(model.named_parameters()), found.buffers, [x, other])
    assert torch.allclose(loss, model(x, other)[1])


def test_values_are_let_go_where_they_are_read_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """What backward keeps stays alone: of a model that just fits, no copy of every value would."""

    def forward(self: Net, x: Tensor) -> Tensor:
        first = self.first(x)
        return (first + reduce(lambda y, _: y.detach() + 1.0, range(30), first)).sum()

    model = Net(forward)
    found, alive, most = captured(model, X), WeakSet[Tensor](), []
    add = torch.ops.aten.add.Tensor

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **kwargs or {})
            if function is add:
                alive.add(made)
                most.append(len(alive))
            return made

    with Counted():
        run_graph(found.graph, dict(model.named_parameters()), found.buffers, [X])
    assert len(most) == 31 and max(most) <= 3


def test_the_example_is_not_written_to() -> None:
    x = X.clone()
    captured(Net(lambda self, x: self.first(x).mean()), x)
    assert torch.equal(x, X) and not x.requires_grad


def test_structured_inputs_are_named() -> None:
    def forward(self: Net, batch: dict[str, Tensor], scale: float) -> Tensor:
        return (self.first(batch["a"]) * batch["b"]).mean() * scale

    model = Net()
    model.forward = lambda batch, scale: forward(model, batch, scale)  # type: ignore[method-assign]
    found = trace.capture(model, ({"a": X, "b": X.clone()},), {"scale": 0.5}, None)
    assert found.inputs == (("batch_0", 0), ("batch_1", 1)) and found.constants == ((2, 0.5),)


def test_scalars_and_none_are_constants() -> None:
    found = captured(Net(lambda self, x, k, mask=None: (self.first(x) * k).mean()), X, 3, mask=None)
    assert found.constants == ((1, 3), (2, None)) and [leaf for _, leaf in found.inputs] == [0]


def test_an_input_that_is_not_read_stays() -> None:
    found = captured(Net(lambda self, x, unused: self.first(x).mean()), X, torch.randn(4))
    assert len(list(placeholders(found.graph, "input"))) == 2


# Names, ties and sites.


def test_tied_weights_are_one_parameter() -> None:
    found = captured(gpt(), ids(2, 8), ids(2, 8))
    assert found.aliases["transformer.wte.weight"] == ("transformer.wte.weight", "lm_head.weight")
    assert "lm_head.weight" not in found.aliases and len(found.parameters) == len(found.aliases)
    node = next(
        node for node in placeholders(found.graph, "param") if note(node).name == "transformer.wte.weight"
    )
    assert {op_name(user) for user in node.users} == {"aten.embedding", "aten.linear"}


def test_a_shared_layer_is_one_set_of_parameters() -> None:
    model = Net(lambda self, x: self.second(self.first(x)).mean())
    model.second = model.first
    found = captured(model, X)
    assert found.aliases["first.weight"] == ("first.weight", "second.weight")
    assert [note(node).name for node in placeholders(found.graph, "param")] == ["first.weight", "first.bias"]


def test_an_unused_parameter_has_no_node() -> None:
    found = captured(Net(lambda self, x: self.first(x).mean()), X)
    assert {note(node).name for node in placeholders(found.graph, "param")} == {"first.weight", "first.bias"}
    assert set(found.parameters) == {"first.weight", "first.bias", "second.weight", "second.bias"}


def test_a_frozen_parameter_carries_no_gradient() -> None:
    model = Net(lambda self, x: self.second(self.first(x)).mean())
    model.first.requires_grad_(False)
    found = captured(model, X)
    carries = {
        note(node).name or op_name(node): note(node).needs_grad
        for node in found.graph.nodes
        if node.op != "output"
    }
    assert not carries["first.weight"] and carries["second.weight"]
    first, second = (node for node in ops(found.graph) if op_name(node) == "aten.linear")
    assert not note(first).needs_grad and note(first).of_params and note(second).needs_grad


def test_every_operator_has_its_module_and_line() -> None:
    found = captured(gpt(), ids(2, 8), ids(2, 8))
    every = list(ops(found.graph))
    assert all(note(node).source.startswith("gpt.py:") and note(node).code for node in every)
    modules = {note(node).module for node in every}
    assert {"transformer.wte", "transformer.h.1.attn.c_attn", "lm_head", ""} <= modules
    product = next(node for node in every if note(node).module == "transformer.h.0.mlp.c_fc")
    line = int(note(product).source.split(":")[1])
    source = inspect.getsource(inspect.getmodule(GPT)).splitlines()[line - 1]  # type: ignore[arg-type]
    assert source.strip() == note(product).code and "c_fc" in source


def test_buffers_and_constants_keep_their_values() -> None:
    model = Net(lambda self, x: (self.first(x) * self.scale + self.shift + torch.tensor([1.0] * 6)).mean())
    model.register_buffer("scale", torch.full((6,), 2.0))
    model.register_buffer("shift", torch.full((6,), 3.0), persistent=False)
    found = captured(model, X)
    assert {float(value[0]) for value in found.buffers.values()} == {1.0, 2.0, 3.0}
    assert {"scale", "shift"} < set(found.buffers) and found.persistent == {"scale"}


def test_what_is_normalised_away() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.0).to(torch.float32).float().narrow(1, 0, 3)
        assert x.shape[1] == 3
        losses = [x.mean(), x.square().mean()]
        return sum(losses)  # type: ignore[return-value]

    found = captured(Net(forward), X)
    assert names(found.graph) == ["linear", "slice", "mean", "square", "mean", "add"]


def test_no_operator_names_a_device() -> None:
    found = captured(Net(lambda self, x: (self.first(x) + torch.arange(6, device=x.device)).mean()), X)
    assert not [node for node in ops(found.graph) if "device" in node.kwargs]


def test_weights_on_meta_are_captured() -> None:
    with torch.device("meta"):
        model, x = gpt(), torch.zeros(2, 8, dtype=torch.long)
    meta = trace.capture(model, (x, x), {}, None)
    real = trace.capture(gpt(), (ids(2, 8), ids(2, 8)), {}, None)
    wanted = [
        name for name in names(real.graph) if name != "contiguous"
    ]  # what is contiguous depends on the kernel
    assert [name for name in names(meta.graph) if name != "contiguous"] == wanted


def test_training_mode_is_kept() -> None:
    model = Net(lambda self, x: F.dropout(self.first(x), 0.5, self.training).mean())
    assert names(captured(model.eval(), X).graph) == ["linear", "mean"]
    assert not model.training


def test_data_of_a_parameter_is_read_without_gradient() -> None:
    found = captured(Net(lambda self, x: F.linear(self.first(x), self.second.weight.data).sum()), X)
    assert "detach" in names(found.graph)


def set_parameter(net: Any, x: Tensor) -> Tensor:
    net.first.weight.data = net.first.weight * 0.5
    return net.first(x).sum()


def set_activation(net: Any, x: Tensor) -> Tensor:
    x = net.first(x)
    x.data = x * 2
    return x.sum()


@pytest.mark.parametrize("forward", [set_parameter, set_activation])
def test_data_that_the_forward_sets_is_refused(forward: Any) -> None:
    with pytest.raises(TraceError, match=r"test_capture\.py:\d+.*has its data replaced by the forward"):
        trace.capture(Net(forward), (X,), {}, None)


def writes_to_an_activation(net: Any, x: Tensor) -> Tensor:
    x = net.first(x).add_(1)
    return (x * x._version).sum()


def writes_to_a_parameter_in_vain(net: Any, x: Tensor) -> Tensor:
    try:
        return (net.first(x) * net.first.weight._version).sum()
    except BaseException:
        return net.first(x).sum()


@pytest.mark.parametrize("forward", [writes_to_an_activation, writes_to_a_parameter_in_vain])
def test_numbers_of_writes_that_the_forward_reads_are_refused(forward: Any) -> None:
    with pytest.raises(
        TraceError, match=r"test_capture\.py:\d+.*has its number of writes read by the forward"
    ):
        trace.capture(Net(forward), (X,), {}, None)
