"""Prove which keys a constant attention mask hides, tile by tile, however large it is.

In: a mask that is combined with scores [..., queries, keys]. Out: whether it is causal, or a window (Mistral, Gemma: query i
sees the keys i - w + 1 to i), or leaves every query a key. Tiles that `bounds_of` decides are not computed; the others are, a
block of rows at a time. A mask without a proof is never treated as causal: it must be read.

    proves_causal(Masked(scores, mask), (4, 16, 32768, 32768), constants)    # 128 tiles of 512 x 512 are computed
    proves_window(Masked(scores, mask), (4, 16, 32768, 32768), constants)    # 4096
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.notes import op_name, shape, value
from autoptd.passes.axes.constants import BLOCK, TILE, Constants, Piece, Window, bounds_of, whole

# A score of this or less has zero weight compared with one that is not masked.
HIDDEN = -1e9
# A score that is lowered by at most this much keeps its digits.
SEEN = -100.0
# At most this many masks, of one head each, are examined.
MAX_MASKS = 64


@dataclass(frozen=True)
class Masked:
    """`scores` under a mask, which is added to them (`fill` is None), or sets them to `fill` where it equals `hides`."""

    scores: Any
    mask: Node
    fill: float | None = None
    hides: bool = True

    def is_right(self, lo: Tensor, hi: Tensor, seen: Tensor) -> Tensor:
        """Tell whether entries between `lo` and `hi` show a key where `seen`, and hide it elsewhere."""
        if self.fill is None:
            return torch.where(seen, (lo == 0) & (hi == 0), hi <= HIDDEN)
        # If True means hidden, the bounds of "is seen" are the negated ones, in reverse order.
        lo, hi = (~hi, ~lo) if self.hides else (lo, hi)
        return torch.where(seen, lo, ~hi)


def proves_causal(masked: Masked, size: tuple[int, ...], constants: Constants) -> bool:
    """Tell whether a mask of scores of `size` [..., queries, keys] hides exactly the keys after i from query i.

    Only a constant mask is examined, and hidden scores must be so low that their weight is 0.
    """
    return _can_be_window(masked, size, constants) and _is_window(masked, size[-1], constants)


def causal_keywords(node: Node, constants: Constants) -> dict[str, Any] | None:
    """Return the keywords, except mask and `is_causal`, of torch's attention if its mask is proven causal; else None."""
    found = _masked(node)
    return found[2] if found is not None and proves_causal(*found[:2], constants) else None


def window_of(node: Node, constants: Constants) -> int | None:
    """Return the number of keys that a query sees in torch's attention if its mask is proven to be a window; else None."""
    found = _masked(node)
    return proves_window(*found[:2], constants) if found is not None else None


def _masked(node: Node) -> tuple[Masked, tuple[int, ...], dict[str, Any]] | None:
    """Return the masked scores of torch's attention, their size, and the keywords except mask and `is_causal`."""
    if op_name(node) != "aten.scaled_dot_product_attention":
        return None
    q, k, _, *rest = node.args
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), rest, strict=False)) | node.kwargs
    mask = given.pop("attn_mask", None)
    if mask is None or given.pop("dropout_p", 0.0) or given.pop("is_causal", False):
        return None
    # A bool mask is True for keys that are seen; any other is added.
    fill = -math.inf if value(mask).dtype == torch.bool else None
    masked = Masked(node, mask, fill, hides=False)
    scale = given.get("scale")
    is_positive = scale is None or scale > 0
    size = (*shape(q)[:-1], shape(k)[-2])
    return (masked, size, given) if is_positive else None


def proves_window(masked: Masked, size: tuple[int, ...], constants: Constants) -> int | None:
    """Return the size of the window if each query sees that many keys up to its own, and no others; all keys if causal."""
    if not _can_be_window(masked, size, constants):
        return None
    # The last query sees a whole window.
    n = size[-1]
    last = constants.entries(next(_heads(masked.mask, constants, ((n - 1, n), (0, n))))).reshape(-1)
    window = int(masked.is_right(last, last, torch.ones_like(last, dtype=torch.bool)).sum())
    return window if window and _is_window(masked, window, constants) else None


def leaves_keys(mask: Node, constants: Constants) -> bool:
    """Tell whether a mask [..., queries, keys] that is added to scores is known to leave every query a key."""
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
        # If the smallest entry of one tile is seen, each of its queries has a key.
        lo = bounds.lo.expand(*bounds.lo.shape[:-2], -(-piece.sizes[-2] // TILE), -1)
        open_rows = ~(lo.amax(-1) >= SEEN).flatten()
    for tile in open_rows.nonzero().flatten().tolist():
        rows = (tile * TILE, min((tile + 1) * TILE, piece.sizes[-2]))
        band = Piece(piece.node, (*piece.window[:-2], rows, piece.window[-1]))
        largest = constants.entries(band).amax(-1)
        if not bool((largest >= SEEN).all()):
            return False
    return True


def is_known(mask: Node, constants: Constants) -> bool:
    """Tell whether a mask is the same whole constant on every rank, and can be evaluated."""
    mask = _source(mask)
    stack, seen = [mask], {mask}
    while stack:
        node = stack.pop()
        if node.target in markers.MARKERS:
            return False
        stack += [operand for operand in node.all_input_nodes if operand not in seen]
        seen.update(node.all_input_nodes)
    return constants.can_evaluate(mask)


def _source(mask: Node) -> Node:
    """Return the constant whose first rows are the mask; all of its rows are equal."""
    while mask.target is markers.first_rows:
        mask = mask.args[0]  # type: ignore[assignment]
    return mask


def _heads(mask: Node, constants: Constants, window: Window | None = None) -> Iterator[Piece]:
    """Yield the `window` of the mask of every sample and every head, or of one if they are all equal."""
    mask = _source(mask)
    *lead, rows, keys = whole(mask).window
    # A mask that is expanded over samples and heads is examined once.
    counts = [1 if constants.has_equal_rows(mask, dim) else stop for dim, (_, stop) in enumerate(lead)]
    for place in product(*map(range, counts)):
        yield Piece(mask, (*((at, at + 1) for at in place), *(window or (rows, keys))))


def _can_be_window(masked: Masked, size: tuple[int, ...], constants: Constants) -> bool:
    """Tell whether a mask is square, has an entry for every query and key, hides enough, and can be evaluated."""
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
        constants.proofs[key] = len(heads) <= MAX_MASKS and all(
            _hides_all_but(masked, head, window, constants) for head in heads
        )
    return bool(constants.proofs[key])


def _hides_all_but(masked: Masked, piece: Piece, window: int, constants: Constants) -> bool:
    """Tell whether query i sees exactly the keys i - window + 1 to i; tiles on an edge of the window are computed."""
    n = piece.sizes[-1]
    tiles = -(-n // TILE)
    edges = TILE * torch.arange(tiles)
    # Distance of a tile's first query after its first key; within the tile it varies by up to TILE - 1.
    distance = edges[:, None] - edges[None]
    all_seen = (distance - (TILE - 1) >= 0) & (distance + TILE - 1 < window)
    none_seen = (distance + TILE - 1 < 0) | (distance - (TILE - 1) >= window)
    is_open = ~(all_seen | none_seen)
    bounds = bounds_of(constants, piece)
    if bounds is not None:
        lo, hi = (x.reshape(x.shape[-2:]).expand(tiles, tiles).cpu() for x in bounds)
        is_right = masked.is_right(lo, hi, all_seen)
        # Entries that are known exactly, and are wrong, refuse the mask.
        if bool(((lo == hi) & ~is_right & ~is_open).any()):
            return False
        is_open |= ~is_right
    else:
        is_open[:] = True
    return all(
        _is_right(masked, Piece(piece.node, part), window, constants) for part in _parts(piece, is_open)
    )


def _parts(piece: Piece, is_open: Tensor) -> Iterator[Window]:
    """Yield windows that cover the open tiles; neighbors in a row of tiles share one, up to `BLOCK` entries."""
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
    entries = constants.entries(piece).reshape(piece.sizes[-2:])
    queries, keys = (torch.arange(*span, device=entries.device) for span in piece.window[-2:])
    distance = queries[:, None] - keys[None]
    return bool(masked.is_right(entries, entries, (distance >= 0) & (distance < window)).all())


__all__ = [
    "HIDDEN",
    "SEEN",
    "Masked",
    "is_known",
    "leaves_keys",
    "proves_causal",
    "proves_window",
    "window_of",
]
