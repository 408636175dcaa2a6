"""Indices that count from zero are views: `mask[rows[:, None], keys]`, of `rows` and `keys` that are 0, 1, 2, ...

Masks are built so where a function of a position is applied to all positions at once (what torch.vmap makes of it). As an
index such tensors could be anything, and none of their dims could be split.

In: an `aten.index`. Out: the permute and view that it is, or the index as it was.

    rewrite_index(graph, node)      # mask[arange(4)[:, None, None], arange(8)] -> mask.view(4, 1, 8)
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.ir.notes import note, set_note, shape, value

aten = torch.ops.aten
LARGEST = 1 << 20  # entries of an index that is looked at


def rewrite_index(graph: Graph, node: Node) -> None:
    """Make views of an index that has, for every dim of its operand, all positions in order, each along a dim of its own."""
    x, indices = node.args[0], node.args[1]
    size, out = shape(x), shape(node)  # type: ignore[arg-type]
    if len(indices) != len(size) or any(one is None for one in indices):  # type: ignore[arg-type]
        return
    places = [_counted_along(one, n, len(out)) for one, n in zip(indices, size, strict=True)]  # type: ignore[arg-type, call-overload]
    taken = [place for place, n in zip(places, size, strict=True) if n != 1]
    if None in places or len(set(taken)) != len(taken) or math.prod(out) != math.prod(size):
        return
    order = sorted(range(len(size)), key=lambda dim: (places[dim], dim))
    with graph.inserting_before(node):
        moved = graph.call_function(aten.permute.default, (x, order))
    moved.meta["val"] = value(x).permute(order)  # type: ignore[arg-type]
    set_note(moved, replace(note(node), extra={}))
    node.target, node.args = aten.view.default, (moved, list(out))


def _counted_along(index: Node, size: int, ndim: int) -> int | None:
    """The dim, of `ndim` aligned from the right, along which `index` is 0, 1, ..., size - 1; None if it is anything else."""
    if value(index).dtype not in (torch.int64, torch.int32) or value(index).numel() != size or size > LARGEST:
        return None
    found = _evaluate(index, {})
    if found is None or not torch.equal(found.flatten(), torch.arange(size, dtype=found.dtype)):
        return None
    dims = [dim for dim, n in enumerate(found.shape) if n != 1]
    return ndim - found.dim() + dims[0] if len(dims) == 1 else 0 if size == 1 else None


def _evaluate(node: Node, known: dict[Node, Tensor | None]) -> Tensor | None:
    """The value of what is made from nothing but numbers; None where anything else is read, or a value is large."""
    if node not in known:
        known[node] = None
        one = value(node)
        if node.op == "call_function" and isinstance(one, Tensor) and one.numel() <= LARGEST:
            read = [_evaluate(arg, known) for arg in node.all_input_nodes]
            if all(arg is not None for arg in read):
                args, kwargs = map_arg((node.args, node.kwargs), lambda arg: known[arg])
                kwargs = {key: arg for key, arg in kwargs.items() if key not in ("device", "pin_memory", "layout")}
                with torch.device("cpu"):
                    known[node] = node.target(*args, **kwargs)
    return known[node]
