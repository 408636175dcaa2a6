"""Cuts of tokens that move behind what is computed token by token: the same loss and gradients, and no large value is cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Interpreter
from torch.fx.graph_module import GraphModule

from autoptd import trace
from autoptd.ir.buffers import Buffers
from autoptd.ir.notes import note, op_name, ops, shape
from autoptd.ir.operators.record import operands
from autoptd.options import make_options
from autoptd.passes.context import Context
from autoptd.passes.tokens import shift
from autoptd.passes.tokens.shift import Cut
from tests.parity.models import VOCAB
from tests.parity.test_shift import GONE, LENGTH, SMALL, Shifting, call
from tests.passes.graphs import rewrite

Loss = Callable[[Any, Tensor, Tensor], Tensor]
# Of two samples, and of all: as they were, and as they are.
Traces = tuple[Graph, Graph, Graph, Graph]
# The first samples have labels: the mean of none is no number.
IDS, LABELS = (x.flip(0) for x in call())
INPUTS = (IDS, LABELS)


class Written(Shifting):
    """With a loss that is given."""

    def __init__(self, loss: Loss) -> None:
        super().__init__("mean")
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self, self.norm(self.embed(ids)), labels)


def rewritten(model: nn.Module, *inputs: Tensor, **options: Any) -> Traces:
    """Trace a model with two samples and with all of them, and rewrite both for ranks that divide tokens."""
    first = tuple(x[:2] for x in inputs)
    captured, before = (trace.capture(model, first, {}, None) for _ in range(2))
    whole = trace.capture(model, inputs, {}, None).graph
    ctx = Context(
        make_options(**{"c": 2, **options}),
        pieces=len(inputs[0]) // 2,
        batched=frozenset(name for name, _ in captured.inputs),
        whole=whole,
        buffers=Buffers(captured.buffers),
    )
    found = rewrite(captured.graph, ctx)
    assert found is not None
    return before.graph, captured.graph, whole, found


def text(graph: Graph) -> list[str]:
    return [f"{op_name(node)} {shape(node)} {node.args} {node.kwargs}" for node in ops(graph)]


def results(graph: Graph, model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Loss and gradients of what a graph computes."""
    model.zero_grad()
    values: dict[str, dict[str, Any]] = {
        "param": dict(model.named_parameters()),
        "buffer": dict(model.named_buffers()),
        "input": dict(zip(("ids", "labels"), inputs, strict=True)),
    }
    places = (node for node in graph.nodes if node.op == "placeholder")
    loss = Interpreter(GraphModule({}, graph)).run(*(values[note(x).kind][note(x).name] for x in places))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def is_equal(model: nn.Module, inputs: tuple[Tensor, ...], traces: Traces) -> bool:
    """Tell whether both traces give what they gave before."""
    rows = tuple(x[:2] for x in inputs)
    for before, after, given in ((*traces[:2], rows), (*traces[2:], inputs)):
        pairs = zip(results(before, model, given), results(after, model, given), strict=True)
        if not all(torch.allclose(ours, theirs, rtol=1e-10, atol=1e-13) for theirs, ours in pairs):
            return False
    return True


def cut_sizes(graph: Graph) -> list[int]:
    """How many numbers the values have that tokens are cut off from."""
    cuts = [node for node in ops(graph) if op_name(node) == "aten.slice" and note(node).of_params]
    return [math.prod(shape(operands(node)[0])) for node in cuts]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", GONE | SMALL)
def test_loss_and_gradients_are_equal(name: str) -> None:
    model = Shifting(name).double()
    traces = rewritten(model, *INPUTS)
    assert is_equal(model, INPUTS, traces)
    sizes = cut_sizes(traces[1])
    assert set(sizes) == (set() if name in GONE else {2 * LENGTH})


def scored(m: Any, x: Tensor) -> Tensor:
    """Probabilities of all tokens but the last; that of token 0 is zero."""
    unlikely = torch.arange(VOCAB) == 0
    return (m.head(x) - 2000 * unlikely)[:, :-1].softmax(-1)


def stays(m: Any, x: Tensor) -> Tensor:
    return m.head(x)[:, :-1].flatten(0, 1)


STAYS: dict[str, Loss] = {
    "a logarithm of all classes": lambda m, x, y: -(scored(m, x) * (scored(m, x) + 1e-9).log()).mean(),
    "half of the tokens": lambda m, x, y: F.cross_entropy(
        m.head(x)[:, : LENGTH // 2].flatten(0, 1), y[:, LENGTH // 2 :].flatten()
    ),
    "every second token": lambda m, x, y: F.cross_entropy(m.head(x)[:, ::2].flatten(0, 1), y[:, ::2].flatten()),
    "one token": lambda m, x, y: F.cross_entropy(m.head(x)[:, -1], y[:, -1]),
    "labels of the model's own": lambda m, x, y: F.cross_entropy(
        stays(m, x), m.head(x.tanh())[:, :-1].argmax(-1).flatten(), reduction="sum"
    ),
    "other tokens": lambda m, x, y: (m.head(x)[:, 1:] - m.head(x)[:, :-1]).square().mean(),
    "a sum of earlier tokens": lambda m, x, y: F.cross_entropy(
        m.head(x)[:, :-1].cumsum(1).flatten(0, 1), y[:, 1:].flatten()
    ),
    "a quotient": lambda m, x, y: F.cross_entropy(
        (m.head(x)[:, :-1] / x[:, :-1, :1]).flatten(0, 1), y[:, 1:].flatten()
    ),
    "tokens that are drawn": lambda m, x, y: F.cross_entropy(
        F.dropout(m.head(x)[:, :-1], 0.1).flatten(0, 1), y[:, 1:].flatten()
    ),
    "several samples in a row": lambda m, x, y: F.cross_entropy(
        m.head(x).flatten(0, 1)[:-1], y.flatten()[1:]
    ),
    "infinite where it is not chosen": lambda m, x, y: F.cross_entropy(
        torch.where((y[:, 1:] != 3).unsqueeze(-1), m.head(x)[:, :-1], -torch.inf).flatten(0, 1), y[:, 1:].flatten()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_what_is_not_known_to_be_equal_stays(name: str) -> None:
    before, after, whole, all_rows = rewritten(Written(STAYS[name]).double(), *INPUTS)
    assert text(before) == text(after) and text(whole) == text(all_rows)


def test_one_device_computes_as_before() -> None:
    before, after, whole, all_rows = rewritten(Shifting("mean"), *INPUTS, c=1, t=2)
    assert text(before) == text(after) and text(whole) == text(all_rows)


def looked_up(m: Any, x: Tensor, labels: Tensor) -> Tensor:
    known = labels[:, 1:].clamp(min=1)
    return -scored(m, x).gather(-1, known.unsqueeze(-1)).log().mean()


def test_a_logarithm_of_what_is_cut_off_would_be_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The label that pads is token 0, whose probability is zero: its derivative times zero is no number."""
    model = Written(looked_up).double()
    traces = rewritten(model, *INPUTS)
    assert is_equal(model, INPUTS, traces) and cut_sizes(traces[1]) == [2 * LENGTH]
    monkeypatch.setattr(shift, "FINITE_OPS", shift.FINITE_OPS | {"aten.log"})
    assert not is_equal(model, INPUTS, rewritten(model, *INPUTS))


def moved(cut: Cut) -> Cut:
    """A cut whose tokens begin elsewhere."""
    return replace(cut, start=cut.size - cut.length - cut.start)


@pytest.mark.parametrize("name", ["mean", "of hidden states", "log-probabilities", "the next three tokens"])
def test_a_cut_of_other_tokens_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right = shift._cut_of
    monkeypatch.setattr(shift, "_cut_of", lambda node: moved(right(node)))
    model = Shifting(name).double()
    assert not is_equal(model, INPUTS, rewritten(model, *INPUTS))


@pytest.mark.parametrize("name", ["mean", "sum", "class weights", "smoothed", "a token earlier"])
def test_a_label_that_pads_and_counts_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(shift, "_fill", lambda node, number: 1)
    model = Shifting(name).double()
    assert not is_equal(model, INPUTS, rewritten(model, *INPUTS))
