"""Write deviations and norms over the rows of inputs as sums over them, which are known before the first forward.

In: a normalised graph. Out: the same with `std`, `var` and p-norms over dim 0, of what depends on inputs alone, as
the sums that they are: replicas and microbatches add these up (`passes/batch_sums.py`).

    std = rewards.std()    ->    mean = rewards.mean(); ((rewards - mean) ** 2).sum() / (8 - 1), and its root
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.ir.notes import is_tensor, note, op_name, ops, set_note, shape, value
from autoptd.ir.operators.record import argument

aten = torch.ops.aten
DEVIATIONS = frozenset({"aten.std", "aten.var"})
NORMS = {"aten.linalg_vector_norm": "ord", "aten.norm": "p", "aten.linalg_norm": "ord"}


def write_as_sums(graph: Graph) -> None:
    """Rewrite `graph` in place."""
    for node in list(_over_rows_of_inputs(graph)):
        calls = _Calls(graph, node)
        dims = _dims(node)
        result = _deviation(calls, node, dims) if op_name(node) in DEVIATIONS else _norm(calls, node, dims)
        if result is None:
            continue
        node.replace_all_uses_with(calls.make(aten.to.dtype, result, value(node).dtype, is_cast=True))
        graph.erase_node(node)


def _over_rows_of_inputs(graph: Graph) -> Iterator[Node]:
    """Yield the operators in question: of inputs, of no parameter, over dim 0 among others."""
    found = [node for node in ops(graph) if op_name(node) in DEVIATIONS or op_name(node) in NORMS]
    if not found:
        return
    of_inputs: set[Node] = set()
    of_params: set[Node] = set()
    for node in graph.nodes:
        read = node.all_input_nodes
        if note(node).kind == "input" or not of_inputs.isdisjoint(read):
            of_inputs.add(node)
        if note(node).kind == "param" or not of_params.isdisjoint(read):
            of_params.add(node)
    for node in found:
        x: Any = node.args[0]
        is_real = is_tensor(node) and value(x).is_floating_point()
        if node in of_inputs and node not in of_params and is_real and 0 in _dims(node):
            yield node


def _dims(node: Node) -> list[int]:
    """Return the dims that an operator reduces."""
    x: Any = node.args[0]
    given = argument(node, "dim") if _has(node, "dim") else None
    given = [given] if isinstance(given, int) else given
    rank = len(shape(x))
    return [dim % rank for dim in given] if given else list(range(rank))


def _has(node: Node, name: str) -> bool:
    return any(arg.name == name for arg in node.target._schema.arguments)  # type: ignore[union-attr]


def _keeps(node: Node) -> bool:
    return _has(node, "keepdim") and bool(argument(node, "keepdim"))


def _deviation(calls: _Calls, node: Node, dims: list[int]) -> Node | None:
    x = calls.wide(node.args[0])
    if _has(node, "correction"):
        given = argument(node, "correction")
        correction = 1 if given is None else given
    else:
        correction = int(argument(node, "unbiased"))
    count = math.prod(shape(x)[dim] for dim in dims)
    mean = calls.make(aten.mean.dim, x, dims, True)
    apart = calls.make(aten.sub.Tensor, x, mean)
    total = calls.make(aten.sum.dim_IntList, calls.make(aten.mul.Tensor, apart, apart), dims, _keeps(node))
    result = calls.make(aten.div.Tensor, total, max(count - correction, 0))
    return calls.make(aten.sqrt.default, result) if op_name(node) == "aten.std" else result


def _norm(calls: _Calls, node: Node, dims: list[int]) -> Node | None:
    """Return a p-norm; None for the largest or smallest entry and the count of others, which are no sums of powers."""
    p = argument(node, NORMS[op_name(node)])
    is_of_matrix = op_name(node) == "aten.linalg_norm" and len(dims) > 1 and p is not None
    p = 2 if p is None else p
    if is_of_matrix or not isinstance(p, (int, float)) or not 0 < p < math.inf:
        return None
    x = calls.wide(node.args[0])
    powers = calls.make(aten.mul.Tensor, x, x) if p == 2 else calls.make(aten.abs.default, x)
    if p not in (1, 2):
        powers = calls.make(aten.pow.Tensor_Scalar, powers, p)
    total = calls.make(aten.sum.dim_IntList, powers, dims, _keeps(node))
    if p == 1:
        return total
    if p == 2:
        return calls.make(aten.sqrt.default, total)
    return calls.make(aten.pow.Tensor_Scalar, total, 1 / p)


class _Calls:
    """Makes nodes in front of `node`, which come from where it comes from."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node

    def wide(self, x: Any) -> Node:
        """Return `x` in float32 at least, as torch computes statistics."""
        dtype = torch.promote_types(value(x).dtype, torch.float32)
        return self.make(aten.to.dtype, x, dtype, is_cast=True)

    def make(self, target: Any, *args: Any, is_cast: bool = False) -> Node:
        if is_cast and value(args[0]).dtype == args[1]:
            return args[0]  # type: ignore[no-any-return]
        with self.graph.inserting_before(self.node):
            made = self.graph.call_function(target, args)
        with torch.no_grad():
            made.meta["val"] = target(*map_arg(args, value))
        set_note(made, replace(note(self.node), extra={}))
        return made


__all__ = ["write_as_sums"]
