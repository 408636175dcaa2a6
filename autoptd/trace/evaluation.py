"""Put a model in eval mode, and compare its trace there with training without dropout.

In: the TRACED graphs of one model in training and in eval mode. Out: whether they are equal. They are compared
operator by operator, from the inputs to the loss; a dropout counts as its operand. (Attention with dropout is
decomposed in training and stays one operator in evaluation: not equal.)

    with evaluating(model):
        evaluated = capture(model, ...)
    is_training_without_dropout(trained, evaluated.graph, trained_buffers, evaluated.buffers)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.ir.buffers import same_entries
from autoptd.ir.notes import note, op_name, output, value
from autoptd.trace.draws import NAME as DROPOUT

Buffers = Mapping[str, torch.Tensor]
Numbers = dict[object, int]


@contextmanager
def seen_as_evaluation() -> Iterator[None]:
    """Make `torch.is_grad_enabled()` return False to the model, while torch traces with gradients."""
    real = torch.is_grad_enabled

    def is_grad_enabled() -> bool:
        asks = str(sys._getframe(1).f_globals.get("__name__"))
        return real() and asks.partition(".")[0] in ("torch", "autoptd")

    torch.is_grad_enabled = is_grad_enabled  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.is_grad_enabled = real


def modes_of(model: nn.Module) -> dict[nn.Module, bool]:
    """Return whether each module is in training mode."""
    return {module: module.training for module in model.modules()}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode temporarily, and let it see gradients as disabled."""
    with in_modes(dict.fromkeys(model.modules(), False)), seen_as_evaluation():
        yield


@contextmanager
def in_modes(modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Set the training modes of these modules temporarily, and restore them."""
    before = {module: module.training for module in modes}
    for module, mode in modes.items():
        module.training = mode
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def is_training_without_dropout(trained: Graph, evaluated: Graph, before: Buffers, after: Buffers) -> bool:
    """Tell whether two graphs are the same except for dropouts.

    `before` and `after` are the values of their buffers.
    """
    numbers: Numbers = {}
    results = [number_values(graph, numbers, passed_over=DROPOUT) for graph in (trained, evaluated)]
    if results[0][output(trained).args[0]] != results[1][output(evaluated).args[0]]:  # type: ignore[index]
        return False
    return all(_is_equal(x, after[name]) for name, x in before.items() if name in after)


def number_values(
    graph: Graph, numbers: Numbers, passed_over: str = "", constants: Mapping[str, object] | None = None
) -> dict[Node, int]:
    """Number the values of a graph; equal computations get equal numbers in all graphs that share `numbers`.

    The operator `passed_over` gets its operand's number; `constants` are keys for the content of unnamed tensors.
    """
    own: dict[Node, int] = {}
    for node in graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), lambda arg: ("value", own[arg]))
        if node.op == "output":
            break
        if node.op == "placeholder":
            name = note(node).name
            how: object = (note(node).kind, (constants or {}).get(name, name), _sizes(node))
        elif op_name(node) == passed_over:
            own[node] = own[node.args[0]]  # type: ignore[index]
            continue
        else:
            how = (str(node.target), repr(args), repr(kwargs), _sizes(node))
        own[node] = numbers.setdefault(how, len(numbers))
    return own


def _sizes(node: Node) -> tuple[object, ...]:
    found = value(node)
    pieces = found if isinstance(found, (tuple, list)) else [found]
    return tuple((tuple(piece.shape), piece.dtype) for piece in pieces if isinstance(piece, torch.Tensor))


def _is_equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Tell whether two buffers hold the same values; on meta only their shapes can be compared."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return x is y or x.is_meta or y.is_meta or same_entries(x, y.to(x.device))
