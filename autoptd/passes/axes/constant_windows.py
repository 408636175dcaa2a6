"""Parts of large constants, computed from parts of what they are made of: the window of a result, pushed up its own subgraph.

In: a node and a window, one range of entries for every dim. Out: the call that gives just these entries, of windows of the
node's operands; None for an operator of which no row says how.

    call = call_of(Piece(mask, ((0, 1), (0, 1), (4096, 8192), (0, 32768))))     # of arange(s)[:, None] >= arange(s)
    call.pieces                                                                 # [arange[4096:8192, None], arange[:]]
    call.run(values, piece.sizes)                                               # the entries, from those of the pieces
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from autoptd.ir.notes import op_name, shape, value
from autoptd.ir.operators.moves import dim_order
from autoptd.ir.operators.record import argument
from autoptd.ir.operators.table import is_pointwise, operator_of

Window = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Piece:
    """The entries of a node within a window."""

    node: Node
    window: Window

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.window)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Call:
    """The way to compute the entries of a piece: `run` takes the values of `pieces`, and the sizes of the result.

    Calls with equal keys give the same result for the same values.
    """

    key: tuple[Any, ...]
    pieces: tuple[Piece, ...]
    run: Callable[[Sequence[Tensor], tuple[int, ...]], Tensor]


def whole(node: Node) -> Piece:
    return Piece(node, tuple((0, n) for n in shape(node)))


def call_of(piece: Piece) -> Call | None:
    """Return the call that computes a piece; None for an operator without a rule."""
    node = piece.node
    if node.op != "call_function" or not isinstance(value(node), Tensor):
        return None
    record = operator_of(node)
    if record.fills:
        return _filled(piece)
    row = MOVES.get(record.moves) or ROWS.get(op_name(node), _pointwise)
    return row(piece)


def _pointwise(piece: Piece) -> Call | None:
    node, read = piece.node, piece.node.all_input_nodes
    tags = getattr(node.target, "tags", ())
    is_known = len(read) == 1 if operator_of(node).moves in ("same", "cast") else is_pointwise(node)
    if not is_known or not read or torch.Tag.nondeterministic_seeded in tags:
        return None
    pieces = tuple(Piece(arg, _broadcast(piece.window, shape(arg))) for arg in read)

    def run(values: Sequence[Tensor], sizes: tuple[int, ...]) -> Tensor:
        known = dict(zip(read, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), lambda arg: known[arg])
        return on_device(node.target, args, kwargs, values[0].device)  # type: ignore[no-any-return]

    return Call(key_of(node), pieces, run)


def _broadcast(window: Window, size: tuple[int, ...]) -> Window:
    """Return the window of an operand that the result broadcasts: dims are aligned from the right."""
    own = window[len(window) - len(size) :]
    return tuple((0, 1) if n == 1 else place for place, n in zip(own, size, strict=True))


def _expand(piece: Piece) -> Call:
    x = piece.node.all_input_nodes[0]
    inner = Piece(x, _broadcast(piece.window, shape(x)))
    return Call(("expand",), (inner,), lambda values, sizes: values[0].expand(sizes))


def _view(piece: Piece) -> Call | None:
    """Return the call of a view that only adds and removes dims of size 1; None for any other."""
    x = piece.node.all_input_nodes[0]
    size, out = shape(x), shape(piece.node)
    if [n for n in size if n != 1] != [n for n in out if n != 1]:
        return None
    # Dims of size 1 come and go; the others keep their order, and so their windows.
    kept = iter([place for place, n in zip(piece.window, out, strict=True) if n != 1])
    window = tuple((0, 1) if n == 1 else next(kept) for n in size)
    return Call(("view",), (Piece(x, window),), lambda values, sizes: values[0].reshape(sizes))


def _permute(piece: Piece) -> Call:
    x = piece.node.all_input_nodes[0]
    order = dim_order(piece.node)
    window = [(0, 0)] * len(order)
    for place, dim in zip(piece.window, order, strict=True):
        window[dim] = place
    return Call(
        ("permute", *order), (Piece(x, tuple(window)),), lambda values, sizes: values[0].permute(order)
    )


def _slice(piece: Piece) -> Call | None:
    node = piece.node
    x = node.all_input_nodes[0]
    dim = argument(node, "dim") % len(shape(x))
    if argument(node, "step") != 1:
        return None
    start = argument(node, "start") or 0
    size = shape(x)[dim]
    # As torch does: what lies before the first entry begins with it.
    start = max(0, start + size) if start < 0 else min(start, size)
    window = tuple((a + start, b + start) if at == dim else (a, b) for at, (a, b) in enumerate(piece.window))
    return Call(("slice",), (Piece(x, window),), lambda values, sizes: values[0])


def _select(piece: Piece) -> Call:
    node = piece.node
    x = node.all_input_nodes[0]
    dim, index = node.args[1] % len(shape(x)), node.args[2] % shape(x)[node.args[1]]  # type: ignore[operator, index]
    window = (*piece.window[:dim], (index, index + 1), *piece.window[dim:])
    return Call(("select", dim), (Piece(x, window),), lambda values, sizes: values[0].squeeze(dim))


def _triangle(piece: Piece) -> Call:
    node = piece.node
    # The window is a triangle too, whose diagonal is shifted by the start of the window.
    rows, columns = piece.window[-2:]
    diagonal = argument(node, "diagonal") + rows[0] - columns[0]
    keep = torch.tril if op_name(node) == "aten.tril" else torch.triu
    inner = Piece(node.all_input_nodes[0], piece.window)
    return Call((op_name(node), diagonal), (inner,), lambda values, sizes: keep(values[0], diagonal))


def _filled(piece: Piece) -> Call:
    """Return the call of an operator that fills in one number."""
    node, number = piece.node, filling(piece.node)
    dtype = value(node).dtype
    return Call(("full", number, dtype), (), lambda values, sizes: torch.full(sizes, number, dtype=dtype))


def filling(node: Node) -> Any:
    """Return the number that `full`, `ones`, `zeros` and their variants fill in."""
    name = op_name(node)
    if "full" in name:
        return argument(node, "fill_value")
    return 1 if "ones" in name else 0


def on_device(target: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Call an operator on another device than the graph was traced for."""

    def moved(arg: Any) -> Any:
        if isinstance(arg, torch.device):
            return device
        return type(arg)(map(moved, arg)) if type(arg) in (list, tuple) else arg

    kwargs = {key: moved(arg) for key, arg in kwargs.items() if key not in ("pin_memory", "layout")}
    with torch.device(device):
        return target(*map(moved, args), **kwargs)


def key_of(node: Node) -> tuple[Any, ...]:
    return (str(node.target), str(map_arg((node.args, node.kwargs), lambda arg: None)))


# By how an operator moves entries; of others, a row by name, and what computes entry by entry.
MOVES: dict[str, Callable[[Piece], Call | None]] = {
    "same": _pointwise,
    "cast": _pointwise,
    "fold": _view,
    "turn": _permute,
    "spread": _expand,
}
ROWS: dict[str, Callable[[Piece], Call | None]] = {
    "aten.tril": _triangle,
    "aten.triu": _triangle,
    "aten.slice": _slice,
    "aten.select": _select,
}

__all__ = ["Call", "Piece", "Window", "call_of", "filling", "key_of", "on_device", "whole"]
