"""Constants of a traced graph: values that depend on neither inputs nor parameters (position ids, causal masks).

They can be computed while compiling, and so be asked what they are: whether all their rows along the batch are equal, and
whether they change with the number of rows of the trace. Of a large one only parts are computed, a block at a time, and what
follows from how it is computed needs no values at all.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autoptd.ir.buffers import Buffers
from autoptd.ir.noise import is_draw
from autoptd.ir.notes import is_tensor, note, op_name, shape, value
from autoptd.passes.axes.constant_windows import Call, Piece, Window, call_of, key_of, on_device, whole

# Entries of a value that is computed whole, and kept.
KEPT = 1 << 22
# Entries computed at a time: 128 MB of 8 bytes.
BLOCK = 1 << 24
# Entries of a value that can only be computed whole; a larger one is not evaluated.
LARGEST = 1 << 28


class Constants:
    """The constants of the graphs of one model, evaluated on demand; `buffers` are the model's values by name.

    `proofs` caches the answers of other modules about constants: every layer asks about the same mask.
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
            # A dropout mask differs from step to step.
            is_op = node.op == "call_function" and not is_draw(node)
            reads = is_op and all(self.is_constant(arg) for arg in node.all_input_nodes)
            self._constant[node] = reads or note(node).kind == "buffer"
        return self._constant[node]

    def has_equal_rows(self, node: Node, dim: int) -> bool:
        """Tell whether `node` is a constant operator whose entries along `dim` are all the same."""
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
        """Tell whether rows are equal because of how they are computed.

        The first two must be computed alike, from operands that are the same, or whose own rows are equal.
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
        """Compare the entries of two constants, or of their first rows along dim `first_of`; None if they are unknown."""
        a, b = (whole(one) if first_of is None else _row(one, first_of) for one in (node, other))
        if a.sizes != b.sizes:
            return False
        if self._is_same_call(a, b, {}):
            return True
        if not (self.can_evaluate(node) and self.can_evaluate(other)):
            return None
        return self._are_same(a, b)

    def _is_same_call(self, a: Piece, b: Piece, known: dict[tuple[Piece, Piece], bool]) -> bool:
        """Tell whether two pieces are computed alike from equal operands; small ones need only have equal entries."""
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
        """Compare entries, those of `a` repeated along dims where it has one."""
        for window in blocks(b.window):
            own = tuple(map(_moved, window, b.window, a.window))
            found = self.entries(Piece(b.node, window))
            if not torch.equal(self.entries(Piece(a.node, own)).expand_as(found), found):
                return False
        return True

    def follows_rows(self, node: Node, other: Node) -> bool:
        """Tell whether anything that `node` is computed from differs in a size or a number from the other trace."""
        # The two traces have the same operators, so their subgraphs are walked side by side.
        pairs, seen = [(node, other)], set()
        while pairs:
            ours, theirs = pairs.pop()
            if ours in seen:
                continue
            seen.add(ours)
            if value(ours) is not None and shape(ours) != shape(theirs):
                return True
            if _literals(ours) != _literals(theirs):
                return True
            pairs += list(zip(ours.all_input_nodes, theirs.all_input_nodes, strict=True))
        return False

    def evaluate(self, node: Node) -> torch.Tensor:
        """Return the value of a constant that can be evaluated."""
        return self.entries(whole(node))

    def entries(self, piece: Piece) -> torch.Tensor:
        """Return the entries of a constant that can be evaluated, within a window."""
        return self._entries(piece, {})

    def _entries(self, piece: Piece, known: dict[Piece, torch.Tensor]) -> torch.Tensor:
        node = piece.node
        if node.op == "placeholder":
            return _within(self._buffers[note(node).name], piece.window)
        if node in self._values:
            return _within(self._values[node], piece.window)
        # A small value is computed whole and kept; of a large one, only what this window needs.
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
        """Tell whether `node` is a constant that can be evaluated while compiling, at least a block at a time."""
        return self.is_constant(node) and self._can_evaluate(node)

    def _can_evaluate(self, node: Node) -> bool:
        """Return False where a buffer has no value (meta), or where a large value could only be computed whole."""
        if node not in self._can:
            if node.op == "placeholder":
                self._can[node] = self._buffers.has_value(note(node).name)
            else:
                # Block by block the node itself takes no memory: only its operands must be computable.
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
    # Cut the first dim that has more than one entry, and what is still too large along the next.
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
    """Count the entries of a value; an expand is a view, and allocates no memory."""
    stored = node.all_input_nodes[0] if op_name(node) == "aten.expand" else node
    return math.prod(shape(stored)) if is_tensor(stored) else 0


def _call(piece: Piece) -> Call | None:
    """Return the call that computes a piece; without a rule, only all of a node from all of its operands."""
    node = piece.node
    call = call_of(piece)
    if call is not None or piece != whole(node) or not all(map(is_tensor, node.all_input_nodes)):
        return call
    return Call(key_of(node), tuple(map(whole, node.all_input_nodes)), lambda values, sizes: values[0])


def _moved(part: tuple[int, int], of: tuple[int, int], to: tuple[int, int]) -> tuple[int, int]:
    """Return the range that lies in `to` as `part` lies in `of`; all of `to` if that is one entry, which is broadcast."""
    start = to[0] - of[0]
    return to if to[1] - to[0] == 1 else (part[0] + start, part[1] + start)


def _literals(node: Node) -> str:
    return str(map_arg((node.args, node.kwargs), lambda arg: None))
