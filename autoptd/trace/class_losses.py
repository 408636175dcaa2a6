"""Decompose losses over classes: cross entropy with class probabilities as targets, and `F.nll_loss`.

In: a node of either, in a TRACED graph. Out: the same value from log_softmax, gather, products and sums; these
have letter rules, so samples and classes may be split. (`cross_entropy_loss` of logits and labels stays one
operator.)

    rewrite_soft_labels(node)    # -(logits.log_softmax(1) * probabilities).sum(1).mean()
    rewrite_nll(node)            # -log_p.gather(1, labels) over those that are not ignored, by their number
"""

from __future__ import annotations

import torch
from torch.fx import Node

from autoptd.ir.notes import shape, value
from autoptd.ir.operators.record import argument
from autoptd.trace.new_nodes import Maker, put

aten = torch.ops.aten


def has_soft_labels(node: Node) -> bool:
    """Tell whether the targets of a cross_entropy_loss are class probabilities."""
    return bool(value(node.args[1]).is_floating_point())  # type: ignore[arg-type]


def rewrite_soft_labels(node: Node) -> None:
    """Rewrite a cross_entropy_loss of class probabilities; a mean divides by samples, not class weights."""
    make = Maker(node)
    logits, targets = node.args[:2]
    dim = min(1, len(shape(logits)) - 1)  # type: ignore[arg-type]
    classes, smoothing = shape(logits)[dim], argument(node, "label_smoothing")  # type: ignore[arg-type]
    if smoothing:
        targets = make(aten.mul.Tensor, targets, 1 - smoothing)
        targets = make(aten.add.Tensor, targets, smoothing / classes)
    product = make(aten.mul.Tensor, make(aten.log_softmax.int, logits, dim), targets)
    weight = argument(node, "weight")
    if weight is not None:
        behind = [1] * (len(shape(logits)) - 1 - dim)  # type: ignore[arg-type]
        product = make(aten.mul.Tensor, product, make(aten.view.default, weight, [classes, *behind]))
    loss = make(aten.neg.default, make(aten.sum.dim_IntList, product, [dim]))
    reduction = argument(node, "reduction")
    if reduction:
        loss = make((aten.mean.default, aten.sum.default)[reduction - 1], loss)
    put(node, loss)


def rewrite_nll(node: Node) -> None:
    """Rewrite an nll_loss of any values; a mean divides by the number, or weight, of labels not ignored."""
    make = Maker(node)
    x, labels = node.args[:2]
    dim = min(1, len(shape(x)) - 1)  # type: ignore[arg-type]
    ignored = make(aten.eq.Scalar, labels, argument(node, "ignore_index"))
    known = make(aten.masked_fill.Scalar, labels, ignored, 0)
    picked = make(aten.gather.default, x, dim, make(aten.unsqueeze.default, known, dim))
    loss = make(aten.neg.default, make(aten.squeeze.dims, picked, [dim]))
    counted = make(aten.logical_not.default, ignored)
    weight = argument(node, "weight")
    if weight is not None:
        counted = make(aten.masked_fill.Scalar, make(aten.index.Tensor, weight, [known]), ignored, 0.0)
        loss = make(aten.mul.Tensor, loss, counted)
    loss = make(aten.masked_fill.Scalar, loss, ignored, 0.0)
    reduction = argument(node, "reduction")
    if reduction:
        loss = make(aten.sum.default, loss)
    if reduction == 1:
        loss = make(aten.div.Tensor, loss, make(aten.sum.default, counted))
    put(node, loss)


__all__ = ["has_soft_labels", "rewrite_nll", "rewrite_soft_labels"]
