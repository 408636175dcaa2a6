"""Decompose batch norm in training into means over the batch, and updates of its running statistics.

In: an exported graph, before its in-place operators become functional. Out: the same value from means,
differences and products; the running statistics, which torch's operator changes although its schema does not
say so, are written by `copy_`. Replicas can then sum the means (SyncBatchNorm). In eval mode, batch norm is
pointwise and stays one operator.

    mean = x.mean([0, 2, 3], keepdim=True)
    y = (x - mean) * (centered.square().mean(...) + eps).rsqrt() * weight + bias

With `momentum=None` the statistics are averages over all steps. For that the module reads its counter as a
Python number, which cannot be traced: during tracing its momentum is a sentinel, which the rewrite replaces by
1 / counter.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from autoptd.errors import TraceError
from autoptd.ir.notes import note, op_name, shape, site, value
from autoptd.ir.operators.record import argument
from autoptd.trace.new_nodes import Maker

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# A momentum that no user would set.
CUMULATIVE = -1.25e300
COUNTER = "num_batches_tracked"


def mark_cumulative(model: nn.Module) -> None:
    """Set the momentum of batch norms whose statistics average over all steps to the sentinel."""
    for module in model.modules():
        if isinstance(module, NORMS) and module.momentum is None and module.training:
            module.momentum = CUMULATIVE


def rewrite_batch_norms(graph: Graph) -> None:
    """Rewrite every batch norm that computes the statistics of its batch."""
    for node in graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        if argument(node, "training"):
            _rewrite(graph, node)


def _rewrite(graph: Graph, node: Node) -> None:
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
        raise TraceError(site(node), fact, "a momentum")
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


__all__ = ["mark_cumulative", "rewrite_batch_norms"]
