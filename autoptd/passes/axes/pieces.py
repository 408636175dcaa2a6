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
from autoptd.passes.ops.dim_links import argument

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
    """What gives the entries of a piece: `run` of the values of `pieces`. Calls with one `key` compute the same of the same."""

    key: tuple[Any, ...]
    pieces: tuple[Piece, ...]
    run: Callable[[Sequence[Tensor], tuple[int, ...]], Tensor]  # of the values of the pieces, and the sizes to give


def whole(node: Node) -> Piece:
    return Piece(node, tuple((0, n) for n in shape(node)))


def call_of(piece: Piece) -> Call | None:
    """The call that computes a piece; None where no row knows."""
    node = piece.node
    if node.op != "call_function" or not isinstance(value(node), Tensor):
        return None
    row = ROWS.get(op_name(node), _pointwise)
    return row(piece)


def _pointwise(piece: Piece) -> Call | None:
    node, read = piece.node, piece.node.all_input_nodes
    tags = getattr(node.target, "tags", ())
    is_known = len(read) == 1 if op_name(node) in SAME else torch.Tag.pointwise in tags or op_name(node) in UNTAGGED
    if not is_known or not read or torch.Tag.nondeterministic_seeded in tags:
        return None
    pieces = tuple(Piece(arg, _broadcast(piece.window, shape(arg))) for arg in read)

    def run(values: Sequence[Tensor], sizes: tuple[int, ...]) -> Tensor:
        known = dict(zip(read, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), lambda arg: known[arg])
        return on_device(node.target, args, kwargs, values[0].device)  # type: ignore[no-any-return]

    return Call(key_of(node), pieces, run)


def _broadcast(window: Window, size: tuple[int, ...]) -> Window:
    """The window of an operand, aligned from the right, of which the result repeats dims of size 1."""
    own = window[len(window) - len(size) :]
    return tuple((0, 1) if n == 1 else place for place, n in zip(own, size, strict=True))


def _expand(piece: Piece) -> Call:
    x = piece.node.all_input_nodes[0]
    inner = Piece(x, _broadcast(piece.window, shape(x)))
    return Call(("expand",), (inner,), lambda values, sizes: values[0].expand(sizes))


def _view(piece: Piece) -> Call | None:
    """Of views, those that add and remove dims of size 1 alone."""
    x = piece.node.all_input_nodes[0]
    size, out = shape(x), shape(piece.node)
    if [n for n in size if n != 1] != [n for n in out if n != 1]:
        return None
    kept = iter([place for place, n in zip(piece.window, out, strict=True) if n != 1])
    window = tuple((0, 1) if n == 1 else next(kept) for n in size)
    return Call(("view",), (Piece(x, window),), lambda values, sizes: values[0].reshape(sizes))


def _permute(piece: Piece) -> Call:
    x = piece.node.all_input_nodes[0]
    ndim = len(shape(x))
    order = list(range(ndim))
    if op_name(piece.node) == "aten.permute":
        order = [dim % ndim for dim in piece.node.args[1]]  # type: ignore[union-attr, operator]
    elif ndim > 1:
        a, b = (0, 1) if op_name(piece.node) == "aten.t" else (dim % ndim for dim in piece.node.args[1:3])  # type: ignore[operator]
        order[a], order[b] = order[b], order[a]
    window = [(0, 0)] * ndim
    for place, dim in zip(piece.window, order, strict=True):
        window[dim] = place
    return Call(("permute", *order), (Piece(x, tuple(window)),), lambda values, sizes: values[0].permute(order))


def _slice(piece: Piece) -> Call | None:
    node = piece.node
    x = node.all_input_nodes[0]
    dim = argument(node, 1, "dim", 0) % len(shape(x))
    if argument(node, 4, "step", 1) != 1:
        return None
    start = argument(node, 2, "start", 0) or 0
    start = min(start + shape(x)[dim] if start < 0 else start, shape(x)[dim])
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
    rows, columns = piece.window[-2:]
    diagonal = argument(node, 1, "diagonal", 0) + rows[0] - columns[0]
    keep = torch.tril if op_name(node) == "aten.tril" else torch.triu
    inner = Piece(node.all_input_nodes[0], piece.window)
    return Call((op_name(node), diagonal), (inner,), lambda values, sizes: keep(values[0], diagonal))


def _filled(piece: Piece) -> Call:
    """Every entry is one number."""
    node, number = piece.node, filling(piece.node)
    dtype = value(node).dtype
    return Call(("full", number, dtype), (), lambda values, sizes: torch.full(sizes, number, dtype=dtype))


def filling(node: Node) -> Any:
    """The number that `full`, `ones`, `zeros` and their kin fill in."""
    name = op_name(node)
    if "full" in name:
        return argument(node, 2 if "new_full" in name else 1, "fill_value", 0)
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


SAME = ("aten.clone", "aten.alias", "aten.detach", "aten.to", "aten._to_copy", "aten.contiguous")
UNTAGGED = ("aten.__and__", "aten.__or__", "aten.__xor__", "aten.where")  # pointwise, though torch does not say so
FILLED = ("aten.full", "aten.ones", "aten.zeros", "aten.full_like", "aten.ones_like", "aten.zeros_like")
FILLED = (*FILLED, "aten.new_full", "aten.new_ones", "aten.new_zeros")
VIEWS = ("aten.view", "aten.reshape", "aten._unsafe_view", "aten.unsqueeze", "aten.squeeze")

ROWS: dict[str, Callable[[Piece], Call | None]] = {
    **dict.fromkeys(SAME, _pointwise),
    **dict.fromkeys(FILLED, _filled),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(("aten.permute", "aten.transpose", "aten.t"), _permute),
    **dict.fromkeys(("aten.tril", "aten.triu"), _triangle),
    "aten.expand": _expand,
    "aten.slice": _slice,
    "aten.select": _select,
}

__all__ = ["Call", "Piece", "Window", "call_of", "filling", "key_of", "on_device", "whole"]
