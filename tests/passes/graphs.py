"""Small models through the first stages of the compiler, for the tests of passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from autoptd import passes, trace
from autoptd.ir.buffers import Buffers
from autoptd.ir.machine import Machine
from autoptd.ir.notes import note, op_name, ops
from autoptd.options import make_options
from autoptd.passes import Form, up_to
from autoptd.passes.axes.axes import Axes
from autoptd.passes.context import Context
from autoptd.passes.solve.assignment import Assignment

Tensor = torch.Tensor


class Net(nn.Module):
    """A model of named parameters (a size, or a tensor) and a forward that is a function of (self, *inputs)."""

    def __init__(self, forward: Callable[..., Any], **parameters: Any) -> None:
        super().__init__()
        self.function = forward
        for name, made in parameters.items():
            if isinstance(made, tuple):
                made = nn.Parameter(torch.randn(made, generator=torch.Generator().manual_seed(len(name))))
            setattr(self, name, made)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def traced(model: nn.Module, *inputs: Any) -> Graph:
    return trace.capture(model, inputs, {}, None).graph


def context(
    model: nn.Module, *inputs: Tensor, t: int = 1, pieces: int = 1, machine: Machine | None = None
) -> tuple[Graph, Context]:
    """A TRACED graph, and what passes are told; the first dim of every input is the batch when there are several pieces."""
    captured = trace.capture(model, inputs, {}, None)
    whole, batched = None, frozenset[str]()
    if pieces > 1:
        twice = tuple(torch.cat([one, one]) for one in inputs)
        whole = trace.capture(model, twice, {}, None).graph
        batched = frozenset(name for name, _ in captured.inputs)
    made = Context(
        options=make_options(t=t, machine=machine),
        pieces=pieces,
        batched=batched,
        whole=whole,
        buffers=Buffers(captured.buffers),
    )
    return captured.graph, made


def annotate(model: nn.Module, *inputs: Tensor, **keywords: Any) -> tuple[Graph, Axes, Assignment]:
    """ANNOTATED; keywords are those of `context`."""
    graph, ctx = context(model, *inputs, **keywords)
    run(graph, ctx, Form.ANNOTATED)
    return graph, ctx.found.axes, ctx.found.assignments["tp"]


def connect(model: nn.Module, *inputs: Tensor, **keywords: Any) -> tuple[Graph, Axes]:
    """CONNECTED, not verified; keywords are those of `context`."""
    graph, ctx = context(model, *inputs, **keywords)
    run(graph, ctx, Form.CONNECTED)
    return graph, ctx.found.axes


def rewrite(graph: Graph, ctx: Context) -> Graph | None:
    """Rewrite a TRACED graph for ranks that divide tokens; return the trace with all samples, rewritten alike."""
    run(graph, ctx, Form.TRACED)
    return ctx.second


def run(graph: Graph, ctx: Context, form: Form) -> None:
    """Run the passes up to a form in place, without their checks."""
    for each in up_to(form, passes.passes_for(ctx)):
        each(graph, ctx)


def find(graph: Graph, name: str, index: int = 0) -> Node:
    """The index-th operator called `aten.{name}`, or the placeholder of that name."""
    same = [node for node in ops(graph) if op_name(node) in (name, f"aten.{name}")]
    return [*same, *(node for node in graph.nodes if node.op == "placeholder" and note(node).name == name)][
        index
    ]


def dims_text(node: Node) -> str:
    """`2, 4, 3x6x2`: the atoms of every dim."""
    return ", ".join("x".join(map(str, atoms)) or "1" for atoms in note(node).dims)
