"""Rewrite indexing by counting indices (0, 1, 2, ...) as views, or as a gather if one index is arbitrary.

`mask[rows[:, None], keys]` with `rows` and `keys` that are 0, 1, 2, ... comes from applying a function of a
position to all positions at once (torch.vmap). `h[rows, last]` takes one entry of every row: the last token of
each sample. As general indices such tensors could hold anything, and none of their dims could be split.

In: an `aten.index`. Out: the equivalent permute and view, or gather, or the unchanged index.

    rewrite_index(node)             # mask[arange(4)[:, None, None], arange(8)] -> mask.view(4, 1, 8)
                                    # h[arange(4), last] -> h.gather(1, last[:, None, None].expand(4, 1,
                                    # 16)).view(4, 16)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from autoptd.ir.notes import shape, value
from autoptd.trace.new_nodes import Maker

aten = torch.ops.aten
# Larger indices are not evaluated.
MAX_ENTRIES = 1 << 20


def rewrite_index(node: Node) -> None:
    """Rewrite an index whose leading dims are counted, each along a separate dim, except for at most one."""
    x, indices = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    while indices and indices[-1] is None:
        indices.pop()
    size, out = shape(x), shape(node)  # type: ignore[arg-type]
    if not indices or None in indices:
        return
    # The dims that the indices, broadcast together, add to the result.
    met = out[: len(out) - (len(size) - len(indices))]
    places = [_counted_along(index, n, len(met)) for index, n in zip(indices, size, strict=False)]
    if None not in places:
        _index_to_view(node, [place for place in places if place is not None], met)
    elif places.count(None) == 1 and len(places) > 1:
        _index_to_gather(node, indices, places, met)


def _index_to_view(node: Node, places: list[int], met: Sequence[int]) -> None:
    """Replace an index that counts in all dims by a view: with separate dims every entry is taken once."""
    x, out = node.args[0], shape(node)
    size = shape(x)  # type: ignore[arg-type]
    taken = [place for place, n in zip(places, size, strict=False) if n != 1]
    if len(set(taken)) != len(taken) or math.prod(out) != math.prod(size):
        return
    order = [*sorted(range(len(places)), key=lambda dim: (places[dim], dim)), *range(len(places), len(size))]
    moved = Maker(node)(aten.permute.default, x, order)
    node.target, node.args = aten.view.default, (moved, list(out))


def _index_to_gather(node: Node, indices: list[Node], places: list[int | None], met: Sequence[int]) -> None:
    """Replace an index by a gather: one index is looked up, the others count along leading dims."""
    x, out, ids = node.args[0], shape(node), indices[places.index(None)]
    size = shape(x)  # type: ignore[arg-type]
    looked_up = places.index(None)
    counted = sorted(
        (dim for dim in range(len(places)) if dim != looked_up), key=lambda dim: (places[dim], dim)
    )
    kept = [size[dim] for dim in counted]
    is_counted = all(size[dim] == 1 or places[dim] == k for k, dim in enumerate(counted))
    if value(ids).dtype not in (torch.int64, torch.int32) or not is_counted or list(met[: len(kept)]) != kept:
        return

    make = Maker(node)

    def shaped(target: Any, ids: Node, *size: int) -> Node:
        return ids if shape(ids) == size else make(target, ids, list(size))

    order = [*counted, looked_up, *range(len(places), len(size))]
    rest, free = size[len(places) :], math.prod(met[len(kept) :])
    if order != list(range(len(size))):
        x = make(aten.permute.default, x, order)
    # gather does not support negative indices.
    from_end = make(aten.lt.Scalar, ids, 0)
    from_start = make(aten.add.Tensor, ids, size[looked_up])
    ids = make(aten.where.self, from_end, from_start, ids)
    ids = make.cast(ids, torch.int64)
    ids = shaped(aten.expand.default, ids, *met)
    ids = shaped(aten.reshape.default, ids, *kept, free, *[1] * len(rest))
    ids = shaped(aten.expand.default, ids, *kept, free, *rest)
    found = make(aten.gather.default, x, len(kept), ids)
    node.target, node.args = aten.view.default, (found, list(out))


def _counted_along(index: Node, size: int, ndim: int) -> int | None:
    """Return the dim, of `ndim` aligned from the right, along which `index` is 0 ... size - 1, else None."""
    if (
        value(index).dtype not in (torch.int64, torch.int32)
        or value(index).numel() != size
        or size > MAX_ENTRIES
    ):
        return None
    found = _evaluate(index, {})
    if found is None or not torch.equal(found.flatten(), torch.arange(size, dtype=found.dtype)):
        return None
    dims = [dim for dim, n in enumerate(found.shape) if n != 1]
    if len(dims) == 1:
        return ndim - found.dim() + dims[0]
    return 0 if size == 1 else None


def _evaluate(node: Node, known: dict[Node, Tensor | None]) -> Tensor | None:
    """Return the value of a node computed from literals only; None if it reads anything else, or is large."""
    if node not in known:
        known[node] = None
        known_value = value(node)
        if (
            node.op == "call_function"
            and isinstance(known_value, Tensor)
            and known_value.numel() <= MAX_ENTRIES
        ):
            read = [_evaluate(arg, known) for arg in node.all_input_nodes]
            if all(arg is not None for arg in read):
                args, kwargs = map_arg((node.args, node.kwargs), lambda arg: known[arg])
                kwargs = {
                    key: arg for key, arg in kwargs.items() if key not in ("device", "pin_memory", "layout")
                }
                known[node] = node.target(*args, **kwargs)
    return known[node]
