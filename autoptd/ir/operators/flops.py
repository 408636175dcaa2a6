"""FLOPs and sizes of products that are not plain GEMMs.

In: a node, and a function that returns the shape of a node's value, global or local. Out: FLOPs, or (batch, m, n, k)
with the name of the kernel.
"""

from __future__ import annotations

import math

from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.layout import Sizes
from autoptd.ir.notes import local_shapes, note, tensor
from autoptd.ir.operators.record import Product, Size, argument, operands

HEAD = "linear_cross_entropy"


def einsum_flops(node: Node, shape: Size) -> int:
    """Count the forward FLOPs of a product of two factors or more, whose dims are all named; 0 for others."""
    terms = str(node.args[0]).replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands(node), strict=True):
        sizes |= zip(term, shape(operand), strict=False)
    return 2 * math.prod(sizes.values()) if len(terms) > 1 and "." not in "".join(terms) else 0


def attention_flops(node: Node, shape: Size) -> int:
    """Count the forward FLOPs of attention: both products in full, whatever the mask."""
    query, key, value = (shape(operand) for operand in operands(node)[:3])
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def attention_backward_flops(node: Node, shape: Size) -> int:
    """Count the backward FLOPs of attention: five products, as fused kernels compute the scores again."""
    query, key, value = (shape(operand) for operand in operands(node)[:3])
    is_needed = any(note(operand).needs_grad for operand in operands(node)[:3])
    return is_needed * 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def attention_product(node: Node, shape: Size) -> Product:
    """Return (batch, queries, keys, head_dim) and the kernel's name."""
    query, key = shape(operands(node)[0]), shape(operands(node)[1])
    is_causal = node.target is markers.causal_attention or argument(node, "is_causal")
    kind = "causal attention" if is_causal else "attention"
    return (math.prod(query[:-2]), query[-2], key[-2], query[-1]), kind


def expert_flops(node: Node, shape: Size) -> int:
    """Count the forward FLOPs of expert_mm: one matrix a row, and no padding of groups.

    A rank that has some of the experts has its part of the rows, on average.
    """
    x, weight = (shape(operand) for operand in operands(node)[:2])
    count, experts = 2 * x[0] * x[1] * weight[2], tensor(operands(node)[1]).shape[0]
    # Sizes may be letters of a formula.
    is_part = isinstance(weight[0], int) and weight[0] < experts
    return count * weight[0] // experts if is_part else count


def expert_product(node: Node, shape: Size) -> Product:
    """Return (1, rows, out, in), and the kernel's name."""
    x, weight = (shape(operand) for operand in operands(node)[:2])
    return (1, x[0], weight[2], x[1]), "experts"


def head_flops(node: Node, shape: Size) -> int:
    """Count the forward FLOPs of a head fused with its loss, whose forward also computes gradients."""
    x, _, weight, *_ = operands(node)
    return products(node) * 2 * math.prod(shape(x)) * shape(weight)[0]


def head_product(node: Node, shape: Size) -> Product:
    """Return (1, tokens, vocabulary, hidden) and the kernel's name."""
    x, _, weight, *_ = (shape(operand) for operand in operands(node))
    return (1, math.prod(x[:-1]), weight[0], x[-1]), "head with its loss"


def products(node: Node) -> int:
    """Count the matrix products in a node's forward per product of the model: a fused head also computes
    its gradients there.
    """
    if node.target is not markers.FUSED[HEAD]:
        return 1
    x, _, weight, *_ = operands(node)
    return 1 + note(x).needs_grad + note(weight).needs_grad


def local_groups(node: Node, sizes: Sizes) -> dict[str, int]:
    """Return the groups of a convolution that a rank has, where the channels are grouped."""
    x, weight = (local_shapes(operand, sizes)[0] for operand in operands(node)[:2])
    if argument(node, "groups") == 1:
        return {}
    return {"groups": x[len(x) - len(weight) + 1] // weight[1]}
