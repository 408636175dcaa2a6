"""What masks of attention hide: proven on their values, where they are constants, and by tiles, however large they are.

In: a mask as it meets the scores [..., queries, keys]. Out: whether it is causal, or a window (Mistral, Gemma: query i sees the
keys i - w + 1 to i), or leaves every query a key. Tiles of which `bounds` says all are not computed; of the others a
block of rows at a time. What is not proven is a mask that must be read: never causal.

    proves_causal(Masked(scores, mask), (4, 16, 32768, 32768), constants)    # 128 tiles of 512 x 512 are computed
    proves_window(Masked(scores, mask), (4, 16, 32768, 32768), constants)    # 4096
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.notes import value
from autoptd.passes.axes.bounds import TILE, bounds_of
from autoptd.passes.axes.constants import BLOCK, Constants
from autoptd.passes.axes.pieces import Piece, Window, whole

HIDDEN = -1e9  # a score of this or less has no weight beside one that is not masked
SEEN = -100.0  # a score that is lowered by no more keeps its digits
MOST_MASKS = 64  # of a head each, that are looked at


@dataclass(frozen=True)
class Masked:
    """`scores` by a mask: added to them (`fill` is None), or which sets them to `fill` where it is `hides`."""

    scores: Any
    mask: Node
    fill: float | None = None
    hides: bool = True

    def is_right(self, lo: Tensor, hi: Tensor, seen: Tensor) -> Tensor:
        """Whether entries between `lo` and `hi` let a key be `seen`, or hide it."""
        if self.fill is None:
            return torch.where(seen, (lo == 0) & (hi == 0), hi <= HIDDEN)
        lo, hi = (~hi, ~lo) if self.hides else (lo, hi)
        return torch.where(seen, lo, ~hi)


def proves_causal(masked: Masked, size: tuple[int, ...], constants: Constants) -> bool:
    """Whether a mask hides from query i of `size` [..., queries, keys] the keys after i, and nothing else.

    Only a mask of constants is looked at, and what it hides must be so low that its weight is 0.
    """
    return _can_be_window(masked, size, constants) and _is_window(masked, size[-1], constants)


def proves_window(masked: Masked, size: tuple[int, ...], constants: Constants) -> int | None:
    """How many keys a query sees, itself the last one, where a mask hides all others; of a causal one all keys."""
    if not _can_be_window(masked, size, constants):
        return None
    n = size[-1]
    last = constants.entries(next(_heads(masked.mask, constants, ((n - 1, n), (0, n))))).reshape(-1)
    window = int(masked.is_right(last, last, torch.ones_like(last, dtype=torch.bool)).sum())
    return window if window and _is_window(masked, window, constants) else None


def leaves_keys(mask: Node, constants: Constants) -> bool:
    """Whether a mask [..., queries, keys] that is added is known to leave every query a key."""
    if value(mask).dim() < 2 or not is_known(mask, constants):
        return False
    mask = _source(mask)
    key = ("leaves_keys", mask)
    if key not in constants.proofs:
        constants.proofs[key] = all(_leaves_keys(piece, constants) for piece in _heads(mask, constants))
    return bool(constants.proofs[key])


def _leaves_keys(piece: Piece, constants: Constants) -> bool:
    bounds = bounds_of(constants, piece)
    if bounds is None:
        open_rows = torch.ones(-(-piece.sizes[-2] // TILE), dtype=torch.bool)
    else:
        lo = bounds.lo.expand(*bounds.lo.shape[:-2], -(-piece.sizes[-2] // TILE), -1)
        open_rows = ~(lo.amax(-1) >= SEEN).flatten()
    for tile in open_rows.nonzero().flatten().tolist():
        rows = (tile * TILE, min((tile + 1) * TILE, piece.sizes[-2]))
        if not bool(
            (
                constants.entries(Piece(piece.node, (*piece.window[:-2], rows, piece.window[-1]))).amax(-1)
                >= SEEN
            ).all()
        ):
            return False
    return True


def is_known(mask: Node, constants: Constants) -> bool:
    """Whether a mask is the same whole constant on every rank, and can be looked at."""
    mask = _source(mask)
    stack, seen = [mask], {mask}
    while stack:
        node = stack.pop()
        if node.target in markers.MARKERS:
            return False
        stack += [one for one in node.all_input_nodes if one not in seen]
        seen.update(node.all_input_nodes)
    return constants.can_evaluate(mask)


def _source(mask: Node) -> Node:
    """The constant, all rows of which are equal, whose first rows a mask is."""
    while mask.target is markers.first_rows:
        mask = mask.args[0]  # type: ignore[assignment]
    return mask


def _heads(mask: Node, constants: Constants, window: Window | None = None) -> Iterator[Piece]:
    """The mask of every row of the batch and every head, one where they are all equal; of it, the `window`."""
    mask = _source(mask)
    *lead, rows, keys = whole(mask).window
    counts = [1 if constants.has_equal_rows(mask, dim) else stop for dim, (_, stop) in enumerate(lead)]
    for place in product(*map(range, counts)):
        yield Piece(mask, (*((at, at + 1) for at in place), *(window or (rows, keys))))


def _can_be_window(masked: Masked, size: tuple[int, ...], constants: Constants) -> bool:
    """Whether a mask says something of every query and key, as many of these as of those, and can be looked at."""
    mask = value(masked.mask)
    if size[-1] != size[-2] or tuple(mask.shape[-2:]) != size[-2:] or not is_known(masked.mask, constants):
        return False
    is_fill = masked.fill is not None and masked.fill <= HIDDEN and mask.dtype == torch.bool
    return is_fill or (masked.fill is None and mask.dtype != torch.bool)


def _is_window(masked: Masked, window: int, constants: Constants) -> bool:
    mask = _source(masked.mask)
    key = ("window", mask, masked.fill, masked.hides, window)
    if key not in constants.proofs:
        heads = list(_heads(mask, constants))
        constants.proofs[key] = len(heads) <= MOST_MASKS and all(
            _hides_all_but(masked, one, window, constants) for one in heads
        )
    return bool(constants.proofs[key])


def _hides_all_but(masked: Masked, piece: Piece, window: int, constants: Constants) -> bool:
    """Whether query i sees the keys i - window + 1 to i alone, by tiles; those on the edges of what it sees are computed."""
    n = piece.sizes[-1]
    tiles = -(-n // TILE)
    edges = TILE * torch.arange(tiles)
    behind = edges[:, None] - edges[None]  # of the first query of a tile behind its first key
    all_seen = (behind - (TILE - 1) >= 0) & (behind + TILE - 1 < window)
    none_seen = (behind + TILE - 1 < 0) | (behind - (TILE - 1) >= window)
    is_open = ~(all_seen | none_seen)
    bounds = bounds_of(constants, piece)
    if bounds is not None:
        lo, hi = (x.reshape(x.shape[-2:]).expand(tiles, tiles).cpu() for x in bounds)
        is_right = masked.is_right(lo, hi, all_seen)
        if bool(((lo == hi) & ~is_right & ~is_open).any()):
            return False
        is_open |= ~is_right
    else:
        is_open[:] = True
    return all(
        _is_right(masked, Piece(piece.node, part), window, constants) for part in _parts(piece, is_open)
    )


def _parts(piece: Piece, is_open: Tensor) -> Iterator[Window]:
    """Windows that cover the open tiles: of each row of tiles, neighbours at once."""
    rows, keys = piece.sizes[-2:]
    for i, row in enumerate(is_open.tolist()):
        j = 0
        while j < len(row):
            start = j
            while j < len(row) and row[j] and (j - start + 1) * TILE * TILE <= BLOCK:
                j += 1
            if j > start:
                yield (
                    *piece.window[:-2],
                    (i * TILE, min((i + 1) * TILE, rows)),
                    (start * TILE, min(j * TILE, keys)),
                )
            else:
                j += 1


def _is_right(masked: Masked, piece: Piece, window: int, constants: Constants) -> bool:
    found = constants.entries(piece).reshape(piece.sizes[-2:])
    queries, keys = (torch.arange(*place, device=found.device) for place in piece.window[-2:])
    behind = queries[:, None] - keys[None]
    return bool(masked.is_right(found, found, (behind >= 0) & (behind < window)).all())


__all__ = ["HIDDEN", "SEEN", "Masked", "is_known", "leaves_keys", "proves_causal", "proves_window"]
