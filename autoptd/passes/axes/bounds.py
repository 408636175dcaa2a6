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
from autoptd.passes.axes.constant_windows import Call, Piece, call_of
from autoptd.passes.axes.constants import KEPT, Constants

TILE = 512

# Operators that are monotone in bools, and in no other numbers.
OF_BOOLS = re.compile("logical|bitwise|__")
# Operators that choose between two values, and which operand is the condition.
CHOOSES = {"aten.where": 0, "aten.masked_fill": 1}


class Bounds(NamedTuple):
    """The smallest and the largest entry of every tile."""

    lo: Tensor
    hi: Tensor


def bounds_of(constants: Constants, piece: Piece) -> Bounds | None:
    """Return the bounds of every tile of a constant that can be evaluated; None if some operator has no rule for them."""
    return _bounds(constants, piece, {})


def _bounds(constants: Constants, piece: Piece, known: dict[Piece, Bounds | None]) -> Bounds | None:
    if piece not in known:
        is_small = piece.numel <= KEPT
        bounds = _exact(constants.entries(piece)) if is_small else _derived(constants, piece, known)
        # NaN compares with nothing.
        if bounds is not None and any(x.is_floating_point() and x.isnan().any() for x in bounds):
            bounds = None
        known[piece] = bounds
    return known[piece]


def _exact(x: Tensor) -> Bounds | None:
    if x.is_complex():
        return None
    lo = hi = x
    for dim in range(x.dim()):
        if x.shape[dim] > 1:
            lo = torch.cat([tile.amin(dim, keepdim=True) for tile in lo.split(TILE, dim)], dim)
            hi = torch.cat([tile.amax(dim, keepdim=True) for tile in hi.split(TILE, dim)], dim)
    return Bounds(lo, hi)


def _derived(constants: Constants, piece: Piece, known: dict[Piece, Bounds | None]) -> Bounds | None:
    call = call_of(piece)
    if call is None:
        return None
    read: list[Bounds] = []
    for operand in call.pieces:
        bounds = _bounds(constants, operand, known)
        if bounds is None:
            return None
        read.append(bounds)
    # The operator runs on one entry per tile: a comparison of positions costs (s / 512)^2 instead of s^2.
    tiles = tuple(-(-size // TILE) for size in piece.sizes)
    return _combined(piece.node, call, read, tiles)


def _combined(node: Node, call: Call, read: Sequence[Bounds], sizes: tuple[int, ...]) -> Bounds | None:
    name, record = op_name(node), operator_of(node)
    if name in ("aten.tril", "aten.triu"):
        return _triangle(call, read[0], name == "aten.tril")
    # An operand that is read twice has separate bounds in each place.
    if sum(isinstance(arg, Node) for arg in node.args) != len(read) and not record.fills:
        return None
    if name in CHOOSES:
        return _chosen(node, call, read, sizes)
    if name == "aten.eq" and len(read) == 2:
        (a, b), (c, d) = read
        # Certainly equal: both are one and the same number. Possibly equal: their ranges overlap.
        return Bounds((a == b) & (c == d) & (a == c), (a <= d) & (c <= b))
    signs = (1,) * len(read) if record.moves or record.fills else record.monotone
    if len(signs) < len(read) or not _is_monotone(node, read):
        return None
    least, largest = [], []
    for bounds, sign in zip(read, signs, strict=False):
        # Of an operand in which the operator falls, the largest entry gives the least result.
        lo, hi = bounds if sign > 0 else (bounds.hi, bounds.lo)
        least.append(lo)
        largest.append(hi)
    return Bounds(call.run(least, sizes), call.run(largest, sizes))


def _is_monotone(node: Node, read: Sequence[Bounds]) -> bool:
    """Tell whether a row of the table holds for these arguments: small integers wrap, bits have no order."""
    record, dtypes = operator_of(node), [bounds.lo.dtype for bounds in read]
    dtype = value(node).dtype
    if record.moves == "cast":
        is_widening = dtype == torch.int64 and not dtypes[0].is_floating_point
        return dtype.is_floating_point or dtype in dtypes or is_widening
    if OF_BOOLS.search(record.name):
        return all(operand_dtype == torch.bool for operand_dtype in dtypes)
    if record.name in ("aten.add", "aten.sub", "aten.neg"):
        is_plain = isinstance(node.args[0], Node) and node.kwargs.get("alpha", 1) == 1
        return is_plain and (dtype == torch.int64 or dtype.is_floating_point)
    return record.fills or isinstance(node.args[0], Node)


def _chosen(node: Node, call: Call, read: Sequence[Bounds], sizes: tuple[int, ...]) -> Bounds | None:
    """Return the bounds of a choice: those of either value where the condition may be both."""
    condition = node.all_input_nodes.index(node.args[CHOOSES[op_name(node)]])  # type: ignore[arg-type]
    if_least = list(read)
    if_most = list(read)
    if_least[condition] = Bounds(read[condition].lo, read[condition].lo)
    if_most[condition] = Bounds(read[condition].hi, read[condition].hi)
    lo, hi = [], []
    for operands in (if_least, if_most):
        lo.append(call.run([bounds.lo for bounds in operands], sizes))
        hi.append(call.run([bounds.hi for bounds in operands], sizes))
    return Bounds(torch.minimum(*lo), torch.maximum(*hi))


def _triangle(call: Call, x: Bounds, is_lower: bool) -> Bounds:
    """Return the bounds of a triangle of `x`, which is zero elsewhere.

    The last tiles may be shorter than `TILE`: to take them for whole ones is on the safe side.
    """
    rows, columns = (TILE * torch.arange(n, device=x.lo.device) for n in x.lo.shape[-2:])
    # Of a tile, the diagonals that its corners lie on.
    nearest, farthest = (columns[None] - rows[:, None] + sign * (TILE - 1) for sign in (-1, 1))
    diagonal = call.key[1]
    keeps = farthest <= diagonal if is_lower else nearest >= diagonal
    clears = nearest > diagonal if is_lower else farthest < diagonal
    # Tiles on the diagonal have both: entries of x and zeros.
    zero = torch.zeros((), dtype=x.lo.dtype, device=x.lo.device)
    on_edge_lo, on_edge_hi = torch.minimum(x.lo, zero), torch.maximum(x.hi, zero)
    lo = torch.where(keeps, x.lo, torch.where(clears, zero, on_edge_lo))
    hi = torch.where(keeps, x.hi, torch.where(clears, zero, on_edge_hi))
    return Bounds(lo, hi)


__all__ = ["TILE", "Bounds", "bounds_of"]
