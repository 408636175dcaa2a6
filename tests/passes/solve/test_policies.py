"""What an axis may split is its policy's to say: weights, tokens, or both."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autoptd import passes
from autoptd.ir.machine import Machine
from autoptd.ir.notes import note, op_name, ops, placeholders
from autoptd.ir.types import S
from autoptd.options import Options
from autoptd.passes.annotate import Policy, policies
from autoptd.passes.axes.axes import Axes
from autoptd.passes.communicate import check_axes
from autoptd.passes.context import Context
from autoptd.passes.ops.costs import flops
from autoptd.passes.samples import assign_samples
from autoptd.passes.solve.splits import Part
from tests.passes.graphs import Net, context

# Bytes that are saved for backward are dear: whatever may be split is.
MACHINE = Machine(latency=1e-12, per_saved_byte=1e-6)


def feed_forward(self: Net, x: torch.Tensor) -> torch.Tensor:
    y = F.linear(F.gelu(F.linear(x, self.up)), self.down)
    return F.layer_norm(x + y, (16,)).square().mean()


def test_tp_splits_weights() -> None:
    assert policies(Context(Options(t=2))) == (Policy("tp", frozenset({Part.WEIGHTS})),)


@pytest.mark.parametrize(("asked", "keeps"), [(True, True), ("auto", False)])
def test_sequence_parallelism_lets_tp_split_tokens(asked: bool | str, keeps: bool) -> None:
    (policy,) = policies(Context(Options(t=2, sequence_parallel=asked)))
    assert policy == Policy("tp", frozenset(Part), keeps_products=keeps)


@pytest.mark.parametrize(
    "may_split", [{Part.TOKENS}, {Part.WEIGHTS}, set(Part)], ids=["tokens", "weights", "both"]
)
def test_an_axis_splits_what_its_policy_says(may_split: set[Part]) -> None:
    """With tokens alone every rank has all weights, and its own positions of what is made of them: context parallelism."""
    model = Net(feed_forward, up=(64, 16), down=(16, 64))
    graph, ctx = context(model, torch.randn(4, 8, 16), t=2, pieces=2, machine=MACHINE)
    ctx.found.axes, ctx.found.assignments = Axes(graph), {}
    assign_samples(graph, ctx.found.axes, ctx)
    Policy("tp", frozenset(may_split)).assign(graph, ctx.found.axes, ctx)
    products = [note(node).layout["tp"] for node in ops(graph) if flops(node)]
    weights = [note(node).layout["tp"] for node in placeholders(graph, "param")]
    passes.communicate(graph, ctx)
    check_axes(graph, ctx)
    if may_split == {Part.TOKENS}:
        assert products == [S(1, 0), S(1, 0)] and not any(kind.kind == "S" for kind in weights)
    else:
        assert all(kind.kind == "S" for kind in weights)
    norms = [note(node).layout["tp"] for node in ops(graph) if op_name(node) == "aten.layer_norm"]
    assert (norms == [S(1, 0)]) == (Part.TOKENS in may_split)
