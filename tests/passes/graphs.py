"""Small models through the first stages of the compiler, for the tests of passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from autoptd import passes, trace
from autoptd.ir.machine import Machine, find_machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note, op_name, ops
from autoptd.passes.axes.axes import Axes
from autoptd.passes.solve.assign import Assignment

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


def annotate(
    model: nn.Module, *inputs: Tensor, t: int = 1, pieces: int = 1, machine: Machine | None = None
) -> tuple[Graph, Axes, Assignment]:
    """TRACED and ANNOTATED; the first dim of every input is the batch when there are several pieces."""
    captured = trace.capture(model, inputs, {}, None)
    doubled, batched = None, set()
    if pieces > 1:
        twice = tuple(torch.cat([one, one]) for one in inputs)
        doubled = trace.capture(model, twice, {}, None).graph
        batched = {name for name, _ in captured.inputs}
    axes, assignment = passes.annotate(
        captured.graph, doubled, captured.buffers, batched, pieces, Mesh(t=t), machine or find_machine(None)
    )
    return captured.graph, axes, assignment


def connect(
    model: nn.Module, *inputs: Tensor, t: int = 1, pieces: int = 1, machine: Machine | None = None
) -> tuple[Graph, Axes]:
    graph, axes, assignment = annotate(model, *inputs, t=t, pieces=pieces, machine=machine)
    passes.communicate(graph, assignment, pieces, Mesh(t=t))
    return graph, axes


def find(graph: Graph, name: str, index: int = 0) -> Node:
    """The index-th operator called `aten.{name}`, or the placeholder of that name."""
    same = [node for node in ops(graph) if op_name(node) in (name, f"aten.{name}")]
    return [*same, *(node for node in graph.nodes if node.op == "placeholder" and note(node).name == name)][index]


def dims_text(node: Node) -> str:
    """`2, 4, 3x6x2`: the atoms of every dim."""
    return ", ".join("x".join(map(str, atoms)) or "1" for atoms in note(node).dims)
