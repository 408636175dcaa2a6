"""What the entries of a large constant lie between, tile by tile, without computing them.

In: a piece of a constant. Out: the smallest and the largest entry that each tile of `TILE` entries in every dim may have: exact
for small values, and by the operator's direction in each operand for what is computed of them. A mask that compares positions
is decided so but for the tiles on its edge.

    found = bounds_of(constants, piece)     # arange(s)[:, None] >= arange(s): lo = hi = True below the diagonal, False above
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from autoptd.ir.notes import op_name, value
from autoptd.ir.operators.table import operator_of
from autoptd.passes.axes.constants import KEPT, Constants
from autoptd.passes.axes.pieces import Call, Piece, call_of

TILE = 512

OF_BOOLS = re.compile("logical|bitwise|__")  # what is monotone in bools, and in no other numbers
CHOOSES = {"aten.where": 0, "aten.masked_fill": 1}  # which operand is the condition


class Bounds(NamedTuple):
    """Of every tile."""

    lo: Tensor
    hi: Tensor


def bounds_of(constants: Constants, piece: Piece) -> Bounds | None:
    """The bounds of every tile of a constant that can be evaluated; None where an operator is met of which no row says them."""
    return _bounds(constants, piece, {})


def _bounds(constants: Constants, piece: Piece, known: dict[Piece, Bounds | None]) -> Bounds | None:
    if piece not in known:
        known[piece] = (
            _exact(constants.entries(piece)) if piece.numel <= KEPT else _derived(constants, piece, known)
        )
        if known[piece] is not None and any(x.is_floating_point() and x.isnan().any() for x in known[piece]):
            known[piece] = None
    return known[piece]


def _exact(x: Tensor) -> Bounds | None:
    if x.is_complex():
        return None
    lo = hi = x
    for dim in range(x.dim()):
        if x.shape[dim] > 1:
            lo = torch.cat([one.amin(dim, keepdim=True) for one in lo.split(TILE, dim)], dim)
            hi = torch.cat([one.amax(dim, keepdim=True) for one in hi.split(TILE, dim)], dim)
    return Bounds(lo, hi)


def _derived(constants: Constants, piece: Piece, known: dict[Piece, Bounds | None]) -> Bounds | None:
    call = call_of(piece)
    if call is None:
        return None
    read = [_bounds(constants, one, known) for one in call.pieces]
    if any(one is None for one in read):
        return None
    sizes = tuple(-(-n // TILE) for n in piece.sizes)
    return _combined(piece.node, call, [one for one in read if one is not None], sizes)


def _combined(node: Node, call: Call, read: Sequence[Bounds], sizes: tuple[int, ...]) -> Bounds | None:
    name, record = op_name(node), operator_of(node)
    if name in ("aten.tril", "aten.triu"):
        return _triangle(call, read[0], name == "aten.tril")
    if len([arg for arg in node.args if isinstance(arg, Node)]) != len(read) and not record.fills:
        return None  # reads an operand twice
    if name in CHOOSES:
        return _chosen(node, call, read, sizes)
    if name == "aten.eq" and len(read) == 2:
        (a, b), (c, d) = read
        return Bounds((a == b) & (c == d) & (a == c), (a <= d) & (c <= b))
    signs = (1,) * len(read) if record.moves or record.fills else record.monotone
    if len(signs) < len(read) or not _is_monotone(node, read):
        return None
    lo = [one.lo if sign > 0 else one.hi for one, sign in zip(read, signs, strict=False)]
    hi = [one.hi if sign > 0 else one.lo for one, sign in zip(read, signs, strict=False)]
    return Bounds(call.run(lo, sizes), call.run(hi, sizes))


def _is_monotone(node: Node, read: Sequence[Bounds]) -> bool:
    """Whether a row of the table holds for these arguments: small integers wrap around, and bits are no order."""
    record, dtypes = operator_of(node), [one.lo.dtype for one in read]
    made = value(node).dtype
    if record.moves == "cast":
        return (
            made.is_floating_point
            or made in dtypes
            or (made == torch.int64 and not dtypes[0].is_floating_point)
        )
    if OF_BOOLS.search(record.name):
        return all(dtype == torch.bool for dtype in dtypes)
    if record.name in ("aten.add", "aten.sub", "aten.neg"):
        first = isinstance(node.args[0], Node) and node.kwargs.get("alpha", 1) == 1
        return first and (made == torch.int64 or made.is_floating_point)
    return record.fills or isinstance(node.args[0], Node)


def _chosen(node: Node, call: Call, read: Sequence[Bounds], sizes: tuple[int, ...]) -> Bounds | None:
    """Of what a condition chooses: either one where the condition is open."""
    at = node.all_input_nodes.index(node.args[CHOOSES[op_name(node)]])  # type: ignore[arg-type]

    def run(condition: Tensor, which: str) -> Tensor:
        operands = [condition if i == at else getattr(one, which) for i, one in enumerate(read)]
        return call.run(operands, sizes)

    lo, hi = (([run(one, which) for one in read[at]]) for which in ("lo", "hi"))
    return Bounds(torch.minimum(*lo), torch.maximum(*hi))


def _triangle(call: Call, x: Bounds, is_lower: bool) -> Bounds:
    """Of a triangle of `x`, which is zero elsewhere; the last tiles may be shorter than they are taken for."""
    rows, columns = (TILE * torch.arange(n, device=x.lo.device) for n in x.lo.shape[-2:])
    nearest, farthest = (columns[None] - rows[:, None] + sign * (TILE - 1) for sign in (-1, 1))
    diagonal = call.key[1]
    keeps = farthest <= diagonal if is_lower else nearest >= diagonal
    clears = nearest > diagonal if is_lower else farthest < diagonal
    zero = torch.zeros((), dtype=x.lo.dtype, device=x.lo.device)
    lo, hi = torch.minimum(x.lo, zero), torch.maximum(x.hi, zero)
    return Bounds(
        *(
            torch.where(keeps, own, torch.where(clears, zero, any_))
            for own, any_ in zip(x, (lo, hi), strict=True)
        )
    )


__all__ = ["TILE", "Bounds", "bounds_of"]
