"""Dropout and residual sum as one operator, with the bias of the GEMM before them (SC'21, section 4.2).

The bias of a row-split GEMM counts once; as part of the GEMM it is zero on all ranks but one. It moves behind the sum over the
ranks here, where it is added as it is.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.fusion import Found, Refusal
from autoptd.ir.notes import note, op_name, value
from autoptd.passes.fusion.chain import Chain, is_op, orders, same_dtype


def bias_dropout_add(node: Node) -> Found:
    """Match residual + dropout(x), where x may be the sum over tp of partial products with a bias."""
    if op_name(node) != "aten.add":
        return None
    for drop, residual in orders(node):
        if not is_op(drop, "aten.dropout") or not isinstance(residual, Node) or len(drop.users) > 1:
            continue
        chain = Chain(node)
        chain.members.add(drop)
        x = drop.args[0]
        if value(residual).shape != value(x).shape:
            return Refusal("bias_dropout_add", node, "the residual has another shape")
        if not same_dtype(node, x, residual):
            return Refusal("bias_dropout_add", node, "its parts have several dtypes")
        moved = _row_bias(x)
        bias = None
        if moved is not None:
            chain.members |= {x, moved}
            # Before its conversion, the bias itself.
            bias = moved.args[2].args[0]
        return replace(chain.group("bias_dropout_add", x, bias, residual), literals=drop)
    return None


def _row_bias(x: Node) -> Node | None:
    """Return the row-split GEMM whose sum over tp is `x`, if it has a bias that one rank adds."""
    if x.target is not markers.convert or note(x).conversion != "p_to_i" or len(x.users) > 1:
        return None
    product = x.args[0]
    if not is_op(product, "aten.linear") or len(product.args) < 3 or len(product.users) > 1:
        return None
    bias = product.args[2]
    if not isinstance(bias, Node) or len(bias.users) > 1:
        return None
    # Whole on every rank, made a partial sum: the "one rank keeps it" of the table.
    is_moved = bias.target is markers.convert and note(bias).conversion == "i_to_p"
    return product if is_moved else None
