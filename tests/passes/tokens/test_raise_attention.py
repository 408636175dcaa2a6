"""Attention that a model writes out is one operator where ranks divide tokens: the same numbers, and no scores are kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

import autoptd
from autoptd import trace
from autoptd.ir.buffers import Buffers
from autoptd.ir.notes import op_name, ops, shape
from autoptd.options import Options
from autoptd.passes.context import Context
from autoptd.passes.fusion import attention as pattern
from tests.parity.models import VOCAB
from tests.passes.graphs import rewrite

LENGTH, WIDTH, HEADS = 24, 16, 4
SIZE = WIDTH // HEADS
ATTENTION = "aten.scaled_dot_product_attention"
# From queries, keys and values [b, heads, s, size] to [b, s, heads, size].
Form = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(SIZE)


def filled(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = scores(q, k).masked_fill(m.seen[:LENGTH, :LENGTH] == 0, float("-inf"))
    return (hidden.softmax(-1) @ v).transpose(1, 2)


def where(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    least = torch.full([], torch.finfo(q.dtype).min, dtype=q.dtype)
    return (torch.where(m.seen.bool(), scores(q, k), least).softmax(-1) @ v).transpose(1, 2)


def added(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of another scale than torch's, which is in the queries already."""
    mask = torch.triu(torch.full((LENGTH, LENGTH), -1e30, dtype=q.dtype), 1)
    product = (0.3 * q) @ k.transpose(2, 3) + mask
    return (product.softmax(-1) @ v).transpose(1, 2)


def cast(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax in float32, as transformers has it."""
    hidden = scores(q, k).masked_fill(m.seen == 0, float("-inf"))
    return (hidden.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


def distant(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask that is added and hides nothing."""
    places = torch.arange(LENGTH)
    far = -0.1 * (places[:, None] - places).abs().to(q.dtype)
    return ((scores(q, k) + far).softmax(-1) @ v).transpose(1, 2)


def plain(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(scores(q, k).softmax(-1), v).transpose(1, 2)


def permuted(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys that were never [b, heads, s, size]."""
    turned = k.permute(0, 1, 3, 2)
    return ((q @ turned * 0.5).softmax(-1) @ v).transpose(1, 2)


def read_elsewhere(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1)
    return (weights @ v).transpose(1, 2) + 0.01 * weights.sum()


def viewed(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A view of the product, whose entries torch's operator may order otherwise."""
    product = plain(m, q, k, v).transpose(1, 2)
    return product.view(-1, LENGTH, SIZE).unflatten(0, (-1, HEADS)).transpose(1, 2)


def by_data(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of the batch: it may hide all keys of a query."""
    hides = torch.where(m.padding, -1e30, 0.0).to(q.dtype)[:, None, None]
    return ((scores(q, k) + hides).softmax(-1) @ v).transpose(1, 2)


def learned(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((scores(q, k) + m.bias).softmax(-1) @ v).transpose(1, 2)


RAISED: dict[str, Form] = {
    form.__name__: form for form in (filled, where, added, cast, distant, plain, permuted, viewed)
}
LEFT: dict[str, Form] = {form.__name__: form for form in (read_elsewhere, by_data, learned)}


class Written(nn.Module):
    """Two layers of attention that is written out."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.embed, self.qkv = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.bias = nn.Parameter(torch.randn(HEADS, 1, LENGTH))
        self.register_buffer("seen", torch.ones(LENGTH, LENGTH).tril())
        self.padding = torch.empty(0)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, self.padding = self.embed(ids), ids == 1
        for _ in range(2):
            q, k, v = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            x = x + self.out(self.form(self, q, k, v).reshape(x.shape))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def call() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(0, VOCAB, (4, LENGTH), generator=generator) for _ in range(2))
    labels[0, :5] = -100
    return ids, labels


def rewritten(model: nn.Module) -> tuple[Graph, Graph]:
    """The trace with all samples, as it was and as it is."""
    inputs = call()
    captured = trace.capture(model, tuple(x[:2] for x in inputs), {}, None)
    before, whole = (trace.capture(model, inputs, {}, None).graph for _ in range(2))
    ctx = Context(
        Options(c=2),
        pieces=2,
        batched=frozenset(name for name, _ in captured.inputs),
        whole=whole,
        buffers=Buffers(captured.buffers),
    )
    found = rewrite(captured.graph, ctx)
    assert found is not None
    return before, found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", RAISED.values(), ids=RAISED)
def test_it_is_one_operator_without_scores(form: Form) -> None:
    program = autoptd.compile(
        Written(form).double(), example_inputs=call(), c=2, context="all_gather", num_microbatches=1
    )
    graph = program.graphs["ANNOTATED"]
    assert sum(op_name(node) == ATTENTION for node in ops(graph)) == 2
    # No scores, and no causal mask.
    squares = [node for node in ops(graph) if shape(node).count(LENGTH) > 1]
    assert bool(squares) == (form is distant) and all(len(shape(node)) == 2 for node in squares)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("form", RAISED.values(), ids=RAISED)
def test_the_numbers_are_those_of_one_device(form: Form, order: str) -> None:
    asked: dict[str, Any] = {"c": 2, "context": "all_gather", "token_order": order}
    autoptd.verify(Written(form).double(), example_inputs=call(), steps=2, **asked)


@pytest.mark.parametrize("form", LEFT.values(), ids=LEFT)
def test_what_is_not_known_to_be_the_same_stays(form: Form) -> None:
    program = autoptd.compile(Written(form).double(), example_inputs=call(), c=2, num_microbatches=1)
    assert not any(op_name(node) == ATTENTION for node in ops(program.graphs["ANNOTATED"]))


@pytest.mark.one_in(9)
@pytest.mark.parametrize("form", LEFT.values(), ids=LEFT)
def test_what_stays_has_the_numbers_of_one_device(form: Form) -> None:
    autoptd.verify(Written(form).double(), example_inputs=call(), c=2, t=2, steps=2)


def test_both_traces_have_it() -> None:
    before, after = rewritten(Written(filled).double())
    assert sum(op_name(node) == ATTENTION for node in ops(after)) == 2
    assert not any(op_name(node) == ATTENTION for node in ops(before))


def test_without_context_parallel_ranks_nothing_changes() -> None:
    program = autoptd.compile(Written(filled).double(), example_inputs=call(), t=2, num_microbatches=1)
    assert not any(op_name(node) == ATTENTION for node in ops(program.graphs["ANNOTATED"]))


@pytest.mark.thorough
def test_a_window_taken_for_causal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof that is wrong is seen by `verify`."""

    def window(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = m.seen.tril() * m.seen.triu(-4).T.triu(-4)
        hidden = scores(q, k).masked_fill(seen.triu(-4) == 0, float("-inf"))
        return (hidden.softmax(-1) @ v).transpose(1, 2)

    model = Written(window).double()
    autoptd.verify(model, example_inputs=call(), c=2, context="all_gather", steps=2)
    monkeypatch.setattr(pattern, "proves_causal", lambda *_: True)
    with pytest.raises(autoptd.InternalError, match="differs"):
        autoptd.verify(model, example_inputs=call(), c=2, context="all_gather", steps=2)
