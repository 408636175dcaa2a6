"""Write batch norm in training as the operators that it is made of: means over the batch, and updates of its statistics.

In: an exported graph, before its in-place operators become functional. Out: the same value of means, differences and products;
its running statistics, which torch's operator changes without saying so, are written by `copy_`. Replicas can then add up the
means (SyncBatchNorm). In eval mode, batch norm computes entry by entry and stays one operator.

    mean = x.mean([0, 2, 3], keepdim=True)
    y = (x - mean) * (centered.square().mean(...) + eps).rsqrt() * weight + bias
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from autoptd.ir.notes import BATCH_NORM, LAST_OF_NORM, note, shape, value
from autoptd.ir.operators.record import argument
from autoptd.trace.new_nodes import Maker

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)


def rewrite_batch_norms(graph: Graph) -> None:
    """Rewrite every batch norm that computes the statistics of its batch."""
    for node in graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        if argument(node, "training"):
            _rewrite(graph, node)


def _rewrite(graph: Graph, node: Node) -> None:
    extra = note(node).extra
    make, follow = Maker(node, extra={**extra, BATCH_NORM: node.name}), Maker(node, extra=extra)
    x, weight, bias, mean, var = node.args[:5]
    assert isinstance(x, Node)
    dtype = value(x).dtype
    # Statistics of half precision are computed, and kept, in single precision.
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
    # A cut of the model behind it is found there in eval mode, too, where it is one operator.
    note(result).extra[LAST_OF_NORM] = True
    node.replace_all_uses_with(result)
    count = math.prod(shape(x)[dim] for dim in dims)
    _follow(follow, mean, own_mean, argument(node, "momentum"), 1.0)
    # The variance that is kept is that of a sample.
    _follow(follow, var, own_var, argument(node, "momentum"), count / max(count - 1, 1))
    graph.erase_node(node)


def _follow(make: Maker, kept: Any, own: Node, momentum: float, factor: float) -> None:
    """Move a running statistic towards that of the batch."""
    if not isinstance(kept, Node):
        return
    own = make(aten.view.default, make(aten.detach.default, own), list(shape(kept)))
    own = make.cast(own, value(kept).dtype)
    if factor != 1:
        own = make(aten.mul.Tensor, own, factor)
    old = make(aten.mul.Tensor, kept, 1 - momentum)
    make(aten.copy_.default, kept, make(aten.add.Tensor, old, make(aten.mul.Tensor, own, momentum)))


__all__ = ["rewrite_batch_norms"]
