"""Decompose statistics over the rows of a batch into sums and maxima, which ranks and microbatches can combine.

`write_as_sums` rewrites `std`, `var`, norms, `softmax`, `logsumexp`, `max`, `min`, `any` and `all` over dim 0, of
values that depend only on inputs. These can be computed over all microbatches and replicas before the first forward
(`passes/over_batch.py`).

    std = rewards.std()        ->    mean = rewards.mean(); ((rewards - mean) ** 2).sum() / (8 - 1), and its root
    low = rewards.amin(0)      ->    -(-rewards).amax(0)

`rewrite_batch_norms` decomposes batch norm in training, in a graph whose in-place operators are not functional yet.
Replicas can then sum the means (SyncBatchNorm). The running statistics, which torch's operator changes although its
schema does not say so, are written by `copy_`. In eval mode batch norm is pointwise and stays one operator.

    mean = x.mean([0, 2, 3], keepdim=True)
    y = (x - mean) * (centered.square().mean(...) + eps).rsqrt() * weight + bias

With `momentum=None` the statistics are averages over all steps. For that the module reads its counter as a Python
number, which cannot be traced: during tracing its momentum is a sentinel, which the rewrite replaces by 1 / counter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from autoptd.errors import TraceError
from autoptd.ir.notes import note, op_name, ops, shape, site, value
from autoptd.ir.operators.record import argument, operands
from autoptd.trace.new_nodes import Maker

aten = torch.ops.aten
DEVIATIONS = frozenset({"aten.std", "aten.var"})
NORMS = {"aten.linalg_vector_norm": "ord", "aten.norm": "p", "aten.linalg_norm": "ord"}
LARGEST, SMALLEST = (
    frozenset({"aten.max", "aten.amax", "aten.any"}),
    frozenset({"aten.min", "aten.amin", "aten.all"}),
)
EXPONENTIALS = frozenset({"aten.softmax", "aten.log_softmax", "aten.logsumexp"})
# Operators with several results, and the operator that computes each one separately.
PAIRS = {
    "aten.std_mean": ("aten.std", "mean"),
    "aten.var_mean": ("aten.var", "mean"),
    "aten.aminmax": ("aten.amin", "aten.amax"),
    "aten.max": ("aten.amax", ""),
    "aten.min": ("aten.amin", ""),
}
WRITTEN = DEVIATIONS | NORMS.keys() | LARGEST | SMALLEST | EXPONENTIALS | PAIRS.keys()


def write_as_sums(graph: Graph) -> None:
    """Rewrite `graph` in place."""
    for node in list(_over_rows_of_inputs(graph)):
        if isinstance(value(node), torch.Tensor):
            _replace(graph, node, node, op_name(node))
            continue
        for item in list(node.users):
            if op_name(item) == "getitem" or item.target is operator.getitem:
                _replace(graph, item, node, PAIRS[op_name(node)][item.args[1]])  # type: ignore[index]
        # Positions of the largest entries remain: they cannot be combined over microbatches.
        if not node.users:
            graph.erase_node(node)


def _replace(graph: Graph, result: Node, node: Node, name: str) -> None:
    """Replace one result of an operator, the one `name` computes, by sums and maxima, if possible."""
    make, dims = Maker(node), _dims(node)
    if name in DEVIATIONS:
        made = _deviation(make, node, dims, name == "aten.std")
    elif name == "mean":
        made = make(aten.mean.dim, _wide(make, node.args[0]), dims, _keeps(node))
    elif name in LARGEST or name in SMALLEST:
        made = _extreme(make, node.args[0], dims, _keeps(node), is_largest=name in LARGEST)
    elif name in EXPONENTIALS:
        made = _exponential(make, node, dims, name)
    else:
        made = _norm(make, node, dims) if name in NORMS else None
    if made is None or made is result:
        return
    result.replace_all_uses_with(make.cast(made, value(result).dtype))
    graph.erase_node(result)


def _over_rows_of_inputs(graph: Graph) -> Iterator[Node]:
    """Yield the operators that depend on inputs, not on parameters, and reduce dim 0."""
    found = [node for node in ops(graph) if op_name(node) in WRITTEN and len(operands(node)) == 1]
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
        x = value(operands(node)[0])
        is_extreme = op_name(node) in LARGEST | SMALLEST or op_name(node) == "aten.aminmax"
        is_real = x.is_floating_point() or (is_extreme and not x.is_complex())
        if node in of_inputs and node not in of_params and is_real and x.dim() and 0 in _dims(node):
            yield node


def _dims(node: Node) -> list[int]:
    """Return the dims that an operator reduces."""
    x: Any = operands(node)[0]
    given = argument(node, "dim") if _has(node, "dim") else None
    given = [given] if isinstance(given, int) else given
    rank = len(shape(x))
    return [dim % rank for dim in given] if given else list(range(rank))


def _extreme(make: Maker, x: Any, dims: list[int], keeps: bool, *, is_largest: bool) -> Node:
    """Return the maxima, or the minima as maxima of the negated numbers; bools become numbers."""
    if not value(x).is_floating_point():
        # The smallest int64 is its own negation.
        x = make.cast(x, torch.float64)
    if is_largest:
        return make(aten.amax.default, x, dims, keeps)
    return make(aten.neg.default, make(aten.amax.default, make(aten.neg.default, x), dims, keeps))


def _exponential(make: Maker, node: Node, dims: list[int], name: str) -> Node:
    """Return a function of exponentials (softmax, logsumexp), with the maximum factored out."""
    x = _wide(make, node.args[0])
    largest = make(aten.amax.default, x, dims, True)
    if name == "aten.logsumexp":
        # With infinities, the maximum is the result.
        infinite = make(aten.isinf.default, largest)
        largest = make(aten.masked_fill.Scalar, largest, infinite, 0.0)
    apart = make(aten.sub.Tensor, x, largest)
    exponentials = make(aten.exp.default, apart)
    total = make(aten.sum.dim_IntList, exponentials, dims, True)
    if name == "aten.softmax":
        return make(aten.div.Tensor, exponentials, total)
    log = make(aten.log.default, total)
    if name == "aten.log_softmax":
        return make(aten.sub.Tensor, apart, log)
    result = make(aten.add.Tensor, largest, log)
    return result if _keeps(node) else make(aten.squeeze.dims, result, dims)


def _has(node: Node, name: str) -> bool:
    return any(arg.name == name for arg in node.target._schema.arguments)  # type: ignore[union-attr]


def _keeps(node: Node) -> bool:
    return _has(node, "keepdim") and bool(argument(node, "keepdim"))


def _wide(make: Maker, x: Any) -> Node:
    """Return `x` in float32 at least, as torch computes statistics."""
    return make.cast(x, torch.promote_types(value(x).dtype, torch.float32))


def _deviation(make: Maker, node: Node, dims: list[int], is_std: bool) -> Node:
    x = _wide(make, node.args[0])
    if _has(node, "correction"):
        given = argument(node, "correction")
        correction = 1 if given is None else given
    else:
        correction = int(argument(node, "unbiased"))
    count = math.prod(shape(x)[dim] for dim in dims)
    mean = make(aten.mean.dim, x, dims, True)
    apart = make(aten.sub.Tensor, x, mean)
    total = make(aten.sum.dim_IntList, make(aten.mul.Tensor, apart, apart), dims, _keeps(node))
    result = make(aten.div.Tensor, total, max(count - correction, 0))
    return make(aten.sqrt.default, result) if is_std else result


def _norm(make: Maker, node: Node, dims: list[int]) -> Node | None:
    """Return a p-norm; None for those of matrices."""
    p = argument(node, NORMS[op_name(node)])
    is_of_matrix = op_name(node) == "aten.linalg_norm" and len(dims) > 1 and p is not None
    p = 2 if p is None else p
    if is_of_matrix or not isinstance(p, (int, float)):
        return None
    x = _wide(make, node.args[0])
    if math.isinf(p):
        size = make(aten.abs.default, x)
        return _extreme(make, size, dims, _keeps(node), is_largest=p > 0)
    if p == 0:
        return make(aten.sum.dim_IntList, make(aten.ne.Scalar, x, 0), dims, _keeps(node))
    powers = make(aten.mul.Tensor, x, x) if p == 2 else make(aten.abs.default, x)
    if p not in (1, 2):
        powers = make(aten.pow.Tensor_Scalar, powers, p)
    total = make(aten.sum.dim_IntList, powers, dims, _keeps(node))
    if p == 1:
        return total
    if p == 2:
        return make(aten.sqrt.default, total)
    return make(aten.pow.Tensor_Scalar, total, 1 / p)


HALVES = (torch.float16, torch.bfloat16)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# A momentum that no user would set.
CUMULATIVE = -1.25e300
COUNTER = "num_batches_tracked"


def mark_cumulative(model: nn.Module) -> None:
    """Set the momentum of batch norms whose statistics average over all steps to the sentinel."""
    for module in model.modules():
        if isinstance(module, BATCH_NORMS) and module.momentum is None and module.training:
            module.momentum = CUMULATIVE


def rewrite_batch_norms(graph: Graph) -> None:
    """Rewrite every batch norm that computes the statistics of its batch."""
    for node in graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        if argument(node, "training"):
            _rewrite_batch_norm(graph, node)


def _rewrite_batch_norm(graph: Graph, node: Node) -> None:
    record = note(node)
    part = replace(record, origin=replace(record.origin, batch_norm=node.name))
    make, follow = Maker(node, about=part), Maker(node, about=record)
    x, weight, bias, mean, var = node.args[:5]
    assert isinstance(x, Node)
    dtype = value(x).dtype
    # Statistics of half-precision inputs are computed, and kept, in single precision.
    if dtype in HALVES:
        x = make.cast(x, torch.float32)
    dims = [dim for dim in range(len(shape(x))) if dim != 1]
    own_mean = make(aten.mean.dim, x, dims, True)
    centered = make(aten.sub.Tensor, x, own_mean)
    own_var = make(aten.mean.dim, make(aten.square.default, centered), dims, True)
    scale = make(aten.rsqrt.default, make(aten.add.Tensor, own_var, argument(node, "eps")))
    result = make(aten.mul.Tensor, centered, scale)
    sizes = [1, shape(x)[1], *[1] * (len(shape(x)) - 2)]
    for factor, target in ((weight, aten.mul.Tensor), (bias, aten.add.Tensor)):
        if isinstance(factor, Node):
            result = make(target, result, make(aten.view.default, factor, sizes))
    result = make.cast(result, dtype)
    # Lets a stage boundary after the norm be found in eval mode too, where the norm is one operator.
    note(result).origin = replace(note(result).origin, ends_norm=True)
    node.replace_all_uses_with(result)
    count = math.prod(shape(x)[dim] for dim in dims)
    momentum = argument(node, "momentum")
    if momentum == CUMULATIVE and isinstance(mean, Node):
        momentum = _share_of_step(follow, node)
    _follow(follow, mean, own_mean, momentum, 1.0)
    # The running variance is the unbiased one.
    _follow(follow, var, own_var, momentum, count / max(count - 1, 1))
    graph.erase_node(node)


def _share_of_step(make: Maker, node: Node) -> Node:
    """Return 1 / (steps so far); the module increments its counter just before the norm."""
    counted = node.prev
    while counted.op != "root" and not _is_count(counted):
        counted = counted.prev
    if counted.op == "root":
        fact = "a batch norm with momentum=None that does not count its batches"
        raise TraceError(site(node), fact, "set a momentum")
    return make(aten.reciprocal.default, make.cast(counted, torch.float64))


def _is_count(node: Node) -> bool:
    first: Any = node
    while op_name(first) in ("aten.add", "aten.add_"):
        first = first.args[0]
    return first is not node and note(first).name.endswith(COUNTER)


def _follow(make: Maker, kept: Any, own: Node, momentum: float | Node, factor: float) -> None:
    """Move a running statistic towards the batch's."""
    if not isinstance(kept, Node):
        return
    own = make(aten.view.default, make(aten.detach.default, own), list(shape(kept)))
    # A 16-bit statistic is rounded once per step.
    dtype = torch.promote_types(value(kept).dtype, value(own).dtype)
    own, old = make.cast(own, dtype), make.cast(kept, dtype)
    if factor != 1:
        own = make(aten.mul.Tensor, own, factor)
    rest = make(aten.rsub.Scalar, momentum, 1) if isinstance(momentum, Node) else 1 - momentum
    new = make(aten.add.Tensor, make(aten.mul.Tensor, old, rest), make(aten.mul.Tensor, own, momentum))
    make(aten.copy_.default, kept, make.cast(new, value(kept).dtype))
