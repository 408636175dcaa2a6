"""Constants of a traced graph: values that depend on neither inputs nor parameters, such as position ids and causal masks.

They are computed while compiling, to tell whether all their rows along the batch are equal, whether they depend on the number
of rows of the trace, and between which bounds their entries are. A large constant is not computed whole:

- A *window* of it is computed from windows of its operands: `call_of(piece)` returns the call that does so.

      call = call_of(Piece(mask, ((0, 1), (0, 1), (4096, 8192), (0, 32768))))     # arange(s)[:, None] >= arange(s)
      call.pieces                                                                 # [arange[4096:8192, None], arange[:]]
      call.run(values, piece.sizes)                                               # the entries, from those of the pieces

- Two windows that the same calls compute from equal operands are equal, and need not be computed.
- `bounds_of` returns the smallest and the largest entry that each tile of `TILE` entries in every dim may have: exactly for
  small values, else derived by the direction in which the operator depends on each operand. A mask that compares positions is
  decided except for the tiles on its edge.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from autoptd.ir.buffers import Buffers
from autoptd.ir.noise import is_draw
from autoptd.ir.notes import is_tensor, note, op_name, shape, value
from autoptd.ir.operators.moves import dim_order
from autoptd.ir.operators.record import argument
from autoptd.ir.operators.table import is_pointwise, operator_of

Window = tuple[tuple[int, int], ...]
# Values of at most this many entries are computed whole, and kept.
KEPT = 1 << 22
# Entries computed at a time: 128 MB of 8 bytes.
BLOCK = 1 << 24
# A value of more entries that can only be computed whole is not evaluated.
LARGEST = 1 << 28
TILE = 512
# Operators that are monotone only in bools.
OF_BOOLS = re.compile("logical|bitwise|__")
# Operators that choose between two values, and the index of the condition.
CHOOSES = {"aten.where": 0, "aten.masked_fill": 1}


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
    """How to compute the entries of a piece: `run` takes the values of `pieces`, and the sizes of the result.

    Calls with equal keys return equal results for equal values.
    """

    key: tuple[Any, ...]
    pieces: tuple[Piece, ...]
    run: Callable[[Sequence[Tensor], tuple[int, ...]], Tensor]


def whole(node: Node) -> Piece:
    return Piece(node, tuple((0, n) for n in shape(node)))


def call_of(piece: Piece) -> Call | None:
    """Return the call that computes a piece; None if there is no rule for its operator."""
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
    """Return the window of an operand that is broadcast to the result: dims are aligned from the right."""
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
    # The dims that are not of size 1 keep their order, and so their windows.
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
    # Like torch, clamp a start before the first entry to it.
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
    # The window is a triangle, too, with a diagonal that is shifted by the start of the window.
    rows, columns = piece.window[-2:]
    diagonal = argument(node, "diagonal") + rows[0] - columns[0]
    keep = torch.tril if op_name(node) == "aten.tril" else torch.triu
    inner = Piece(node.all_input_nodes[0], piece.window)
    return Call((op_name(node), diagonal), (inner,), lambda values, sizes: keep(values[0], diagonal))


def _filled(piece: Piece) -> Call:
    """Return the call of an operator that fills a tensor with one number."""
    node, number = piece.node, filling(piece.node)
    dtype = value(node).dtype
    return Call(("full", number, dtype), (), lambda values, sizes: torch.full(sizes, number, dtype=dtype))


def filling(node: Node) -> Any:
    """Return the number that `full`, `ones`, `zeros` or a variant of them fills a tensor with."""
    name = op_name(node)
    if "full" in name:
        return argument(node, "fill_value")
    return 1 if "ones" in name else 0


def on_device(target: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Call an operator on another device than that of the trace."""

    def moved(arg: Any) -> Any:
        if isinstance(arg, torch.device):
            return device
        return type(arg)(map(moved, arg)) if type(arg) in (list, tuple) else arg

    kwargs = {key: moved(arg) for key, arg in kwargs.items() if key not in ("pin_memory", "layout")}
    with torch.device(device):
        return target(*map(moved, args), **kwargs)


def key_of(node: Node) -> tuple[Any, ...]:
    return (str(node.target), str(map_arg((node.args, node.kwargs), lambda arg: None)))


# Rules by how an operator moves entries, else by its name; other operators must be pointwise.
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


class Constants:
    """The constants of the graphs of one model, evaluated on demand; `buffers` are the values of its buffers by name.

    `proofs` caches the answers of other modules about constants: every layer reads the same mask.
    """

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        self._buffers = buffers if isinstance(buffers, Buffers) else Buffers(buffers)
        self._device = self._buffers.device
        self._constant: dict[Node, bool] = {}
        self._can: dict[Node, bool] = {}
        self._values: dict[Node, torch.Tensor] = {}
        self._equal: dict[tuple[Node, int], bool] = {}
        self.proofs: dict[Hashable, Any] = {}

    def is_constant(self, node: Node) -> bool:
        """Tell whether a node is a buffer, or an operator that reads nothing but constants."""
        if node not in self._constant:
            # A dropout mask changes with every step.
            is_op = node.op == "call_function" and not is_draw(node)
            reads = is_op and all(self.is_constant(arg) for arg in node.all_input_nodes)
            self._constant[node] = reads or note(node).kind == "buffer"
        return self._constant[node]

    def has_equal_rows(self, node: Node, dim: int) -> bool:
        """Tell whether `node` is a constant operator whose entries along `dim` are all equal."""
        return node.op == "call_function" and self.is_constant(node) and self._has_equal_rows(node, dim)

    def _has_equal_rows(self, node: Node, dim: int) -> bool:
        if shape(node)[dim] == 1:
            return True
        if (node, dim) not in self._equal:
            self._equal[node, dim] = self._repeats(node, dim) or (
                self.can_evaluate(node) and self._are_same(_row(node, dim), whole(node))
            )
        return self._equal[node, dim]

    def _repeats(self, node: Node, dim: int) -> bool:
        """Tell whether rows are equal by construction.

        The first two must be computed by the same call, from operands that are the same, or whose rows are equal.
        """
        one, other = (call_of(_row(node, dim, k)) for k in (0, 1))
        if one is None or other is None or one.key != other.key:
            return False
        for a, b in zip(one.pieces, other.pieces, strict=True):
            differ = [at for at, (x, y) in enumerate(zip(a.window, b.window, strict=True)) if x != y]
            if len(differ) > 1 or (differ and not self._has_equal_rows(a.node, differ[0])):
                return False
        return True

    def are_equal(self, node: Node, other: Node, first_of: int | None = None) -> bool | None:
        """Compare two constants, or their first rows along dim `first_of`; None if their entries are unknown."""
        a, b = (whole(one) if first_of is None else _row(one, first_of) for one in (node, other))
        if a.sizes != b.sizes:
            return False
        if self._is_same_call(a, b, {}):
            return True
        if not (self.can_evaluate(node) and self.can_evaluate(other)):
            return None
        return self._are_same(a, b)

    def _is_same_call(self, a: Piece, b: Piece, known: dict[tuple[Piece, Piece], bool]) -> bool:
        """Tell whether two pieces are computed by the same call from equal operands, or are small and have equal entries."""
        if (a, b) not in known:
            is_small = a.numel <= KEPT and a.sizes == b.sizes
            known[a, b] = self._computes_same(a, b, known) or (
                is_small and all(map(self.can_evaluate, (a.node, b.node))) and self._are_same(a, b)
            )
        return known[a, b]

    def _computes_same(self, a: Piece, b: Piece, known: dict[tuple[Piece, Piece], bool]) -> bool:
        if a.sizes != b.sizes or a.node.op != b.node.op:
            return False
        if a.node.op == "placeholder":
            return note(a.node).name == note(b.node).name and a.window == b.window
        one, other = _call(a), _call(b)
        if one is None or other is None or one.key != other.key or len(one.pieces) != len(other.pieces):
            return False
        return all(self._is_same_call(x, y, known) for x, y in zip(one.pieces, other.pieces, strict=True))

    def _are_same(self, a: Piece, b: Piece) -> bool:
        """Compare entries, with `a` broadcast along its dims of size 1."""
        for window in blocks(b.window):
            own = tuple(map(_moved, window, b.window, a.window))
            found = self.entries(Piece(b.node, window))
            if not torch.equal(self.entries(Piece(a.node, own)).expand_as(found), found):
                return False
        return True

    def follows_rows(self, node: Node, other: Node) -> bool:
        """Tell whether any size or number in the computation of `node` differs from that of `other` in another trace."""
        # The two traces have the same operators, so their subgraphs are walked side by side.
        pairs, seen = [(node, other)], set()
        while pairs:
            ours, theirs = pairs.pop()
            if ours in seen:
                continue
            seen.add(ours)
            if value(ours) is not None and shape(ours) != shape(theirs):
                return True
            if key_of(ours) != key_of(theirs):
                return True
            pairs += list(zip(ours.all_input_nodes, theirs.all_input_nodes, strict=True))
        return False

    def evaluate(self, node: Node) -> torch.Tensor:
        """Return the value of a constant that can be evaluated."""
        return self.entries(whole(node))

    def entries(self, piece: Piece) -> torch.Tensor:
        """Return the entries of a piece of a constant that can be evaluated."""
        return self._entries(piece, {})

    def _entries(self, piece: Piece, known: dict[Piece, torch.Tensor]) -> torch.Tensor:
        node = piece.node
        if node.op == "placeholder":
            return _within(self._buffers[note(node).name], piece.window)
        if node in self._values:
            return _within(self._values[node], piece.window)
        # A small value is computed whole and kept; of a large one, only this window is computed.
        if piece not in known:
            call = call_of(piece) if _count(node) > KEPT else None
            if call is not None:
                read = [self._entries(operand, known) for operand in call.pieces]
                known[piece] = call.run(read, piece.sizes)
            else:
                known[piece] = _within(self._make(node, known), piece.window)
        return known[piece]

    def _make(self, node: Node, known: dict[Piece, torch.Tensor]) -> Any:
        """Compute all of a node; small values are kept."""

        def read(arg: Node) -> Any:
            return self._entries(whole(arg), known) if is_tensor(arg) else self._make(arg, known)

        made = on_device(node.target, *map_arg((node.args, node.kwargs), read), self._device)
        if is_tensor(node) and _count(node) <= KEPT:
            self._values[node] = made
        return made

    def can_evaluate(self, node: Node) -> bool:
        """Tell whether `node` is a constant that can be evaluated, at least a block at a time."""
        return self.is_constant(node) and self._can_evaluate(node)

    def _can_evaluate(self, node: Node) -> bool:
        """Return False if it reads a buffer without value (on meta), or a large value that can only be computed whole."""
        if node not in self._can:
            if node.op == "placeholder":
                self._can[node] = self._buffers.has_value(note(node).name)
            else:
                # Computed block by block, the node itself takes no memory.
                in_blocks = _count(node) > KEPT and call_of(whole(node)) is not None
                reads = node.all_input_nodes if in_blocks else [node, *node.all_input_nodes]
                is_small = in_blocks or all(_count(one) <= LARGEST for one in reads)
                self._can[node] = is_small and all(map(self._can_evaluate, node.all_input_nodes))
        return self._can[node]


def blocks(window: Window) -> Iterator[Window]:
    """Yield windows of at most `BLOCK` entries that cover a window, in order."""
    if Piece(None, window).numel <= BLOCK:  # type: ignore[arg-type]
        yield window
        return
    # Cut the first dim with more than one entry, and pieces that are still too large along the next.
    cut = max(range(len(window)), key=lambda dim: (window[dim][1] - window[dim][0] > 1, -dim))
    start, stop = window[cut]
    others = math.prod(b - a for dim, (a, b) in enumerate(window) if dim != cut)
    step = max(1, BLOCK // others)
    for first in range(start, stop, step):
        yield from blocks((*window[:cut], (first, min(stop, first + step)), *window[cut + 1 :]))


def _row(node: Node, dim: int, index: int = 0) -> Piece:
    window = whole(node).window
    return Piece(node, (*window[:dim], (index, index + 1), *window[dim + 1 :]))


def _within(x: torch.Tensor, window: Window) -> torch.Tensor:
    return x[tuple(slice(*place) for place in window)] if isinstance(x, torch.Tensor) else x


def _count(node: Node) -> int:
    """Count the entries of a value; for an expand, which is a view, those of its operand."""
    stored = node.all_input_nodes[0] if op_name(node) == "aten.expand" else node
    return math.prod(shape(stored)) if is_tensor(stored) else 0


def _call(piece: Piece) -> Call | None:
    """Return the call that computes a piece; without a rule, only a whole node, from its whole operands."""
    node = piece.node
    call = call_of(piece)
    if call is not None or piece != whole(node) or not all(map(is_tensor, node.all_input_nodes)):
        return call
    return Call(key_of(node), tuple(map(whole, node.all_input_nodes)), lambda values, sizes: values[0])


def _moved(part: tuple[int, int], of: tuple[int, int], to: tuple[int, int]) -> tuple[int, int]:
    """Return the range in `to` that corresponds to `part` of `of`; all of `to` if that is one entry, which is broadcast."""
    start = to[0] - of[0]
    return to if to[1] - to[0] == 1 else (part[0] + start, part[1] + start)


class Bounds(NamedTuple):
    """The smallest and the largest entry of every tile."""

    lo: Tensor
    hi: Tensor


def bounds_of(constants: Constants, piece: Piece) -> Bounds | None:
    """Return the bounds of every tile of a constant that can be evaluated; None if there is no rule for some operator."""
    return _bounds(constants, piece, {})


def _bounds(constants: Constants, piece: Piece, known: dict[Piece, Bounds | None]) -> Bounds | None:
    if piece not in known:
        is_small = piece.numel <= KEPT
        bounds = _exact(constants.entries(piece)) if is_small else _derived(constants, piece, known)
        # Every comparison with NaN is false.
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
        return _triangle_bounds(call, read[0], name == "aten.tril")
    # An operand that is read twice has separate bounds in each place.
    if sum(isinstance(arg, Node) for arg in node.args) != len(read) and not record.fills:
        return None
    if name in CHOOSES:
        return _chosen(node, call, read, sizes)
    if name == "aten.eq" and len(read) == 2:
        (a, b), (c, d) = read
        # Certainly equal: both ranges are the same single number. Possibly equal: the ranges overlap.
        return Bounds((a == b) & (c == d) & (a == c), (a <= d) & (c <= b))
    signs = (1,) * len(read) if record.moves or record.fills else record.monotone
    if len(signs) < len(read) or not _is_monotone(node, read):
        return None
    least, largest = [], []
    for bounds, sign in zip(read, signs, strict=False):
        # Where the operator decreases in an operand, the largest entry gives the smallest result.
        lo, hi = bounds if sign > 0 else (bounds.hi, bounds.lo)
        least.append(lo)
        largest.append(hi)
    return Bounds(call.run(least, sizes), call.run(largest, sizes))


def _is_monotone(node: Node, read: Sequence[Bounds]) -> bool:
    """Tell whether the operator is monotone for these arguments: small integers wrap, and bits have no order."""
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
    """Return the bounds of a choice: if the condition may be both, those of both values."""
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


def _triangle_bounds(call: Call, x: Bounds, is_lower: bool) -> Bounds:
    """Return the bounds of a triangle of `x`, which is zero elsewhere.

    The last tiles may be shorter than `TILE`; treating them as whole ones only widens the bounds.
    """
    rows, columns = (TILE * torch.arange(n, device=x.lo.device) for n in x.lo.shape[-2:])
    # The diagonals of the corners of each tile.
    nearest, farthest = (columns[None] - rows[:, None] + sign * (TILE - 1) for sign in (-1, 1))
    diagonal = call.key[1]
    keeps = farthest <= diagonal if is_lower else nearest >= diagonal
    clears = nearest > diagonal if is_lower else farthest < diagonal
    # Tiles on the diagonal have both entries of x and zeros.
    zero = torch.zeros((), dtype=x.lo.dtype, device=x.lo.device)
    on_edge_lo, on_edge_hi = torch.minimum(x.lo, zero), torch.maximum(x.hi, zero)
    lo = torch.where(keeps, x.lo, torch.where(clears, zero, on_edge_lo))
    hi = torch.where(keeps, x.hi, torch.where(clears, zero, on_edge_hi))
    return Bounds(lo, hi)
