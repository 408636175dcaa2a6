"""Operators that cut, join or repeat: their entries are some of those of their operands, or all of them several times."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.fx import Node

from autoptd.ir.notes import op_name, shape, tensor, value
from autoptd.ir.operators.links import same_dim
from autoptd.ir.operators.record import EVERY, FIRST, Link, Member, Operator, argument, operands
from autoptd.ir.sizes import Sizes, local_shapes


def slice_links(node: Node) -> list[Link]:
    """slice: one of several pieces of a dim, all equal or not; with steps it needs its dim whole."""
    x = shape(operands(node)[0])
    dim, start, size = _piece(node)
    made = [same_dim(d) for d in range(len(x)) if d != dim]
    pieces = [_piece(user) for user in operands(node)[0].users if op_name(user) == "aten.slice"]
    others = {length for at, _, length in pieces if at == dim and length not in (size, x[dim])}
    has_steps = argument(node, "step") != 1
    if size == x[dim]:
        made.append(same_dim(dim))
    elif has_steps or size <= 1:
        made.append(Link(f"d{dim}", {0: Member((dim,))}, None, "an uneven slice needs it whole"))
    elif x[dim] % size == 0 and start % size == 0 and not others:
        made.append(Link(f"d{dim}", {0: Member((dim,), lead=x[dim] // size)}, Member((dim,))))
    else:
        made.append(Link(f"d{dim}", {0: Member((dim,))}, Member((dim,)), segment=(start, size)))
    return made


def _piece(node: Node) -> tuple[int, int, int]:
    """(dim, start, length) of what a slice takes."""
    x = shape(operands(node)[0])
    dim = argument(node, "dim") % len(x)
    start = argument(node, "start") or 0
    return dim, max(start + x[dim], 0) if start < 0 else min(start, x[dim]), shape(node)[dim]


def split_links(node: Node) -> list[Link]:
    """split and chunk: equal pieces correspond; unequal ones need the dim whole. The result stands for every piece."""
    x, pieces = shape(operands(node)[0]), value(node)
    dim = argument(node, "dim") % len(x)
    made = [same_dim(d) for d in range(len(x)) if d != dim]
    sizes = {int(piece.shape[dim]) for piece in pieces}
    if len(sizes) == 1:
        made.append(Link(f"d{dim}", {0: Member((dim,), lead=len(pieces))}, Member((dim,))))
    else:
        made.append(Link(f"d{dim}", {0: Member((dim,))}, None, "unequal pieces need it whole"))
    return made


def getitem_links(node: Node) -> list[Link]:
    """One piece of a split: dims in which the pieces are equal correspond."""
    sizes = [tuple(piece.shape) for piece in value(operands(node)[0])]
    if len({len(size) for size in sizes}) > 1:  # results of several kinds (embedding_bag)
        return []
    equal = [d for d in range(len(sizes[0])) if len({size[d] for size in sizes}) == 1]
    return [
        same_dim(d) if d in equal else Link(f"d{d}", {0: Member((d,))}, None, "unequal pieces need it whole")
        for d in range(len(sizes[0]))
    ]


def drop_dim_links(node: Node) -> list[Link]:
    """select and unbind: one dim disappears and must be whole, the others stay."""
    x = shape(operands(node)[0])
    dim = argument(node, "dim") % len(x)
    kept = [d for d in range(len(x)) if d != dim]
    made = [Link(f"d{d}", {0: Member((d,))}, Member((i,))) for i, d in enumerate(kept)]
    return [*made, Link(f"d{dim}", {0: Member((dim,))}, None, "a single index needs it whole")]


def cat_links(node: Node) -> list[Link]:
    """cat: equal pieces become a leading factor of the joined dim; unequal ones need it whole."""
    parts, ndim = operands(node), len(shape(node))
    dim = argument(node, "dim") % ndim
    made = [
        Link(f"d{d}", {k: Member((d,)) for k in range(len(parts))}, Member((d,)))
        for d in range(ndim)
        if d != dim
    ]
    sizes = {shape(part)[dim] for part in parts}
    piece = {k: Member((dim,)) for k in range(len(parts))}
    if len(sizes) == 1:
        return [*made, Link(f"d{dim}", piece, Member((dim,), lead=len(parts)))]
    singles = [Link(f"d{dim}", {k: one}, None, "unequal pieces need it whole") for k, one in piece.items()]
    return [*made, *singles]


def stack_links(node: Node) -> list[Link]:
    """stack: a new dim appears, the others stay."""
    ndim, count = len(shape(node)), len(operands(node))
    new = argument(node, "dim") % ndim
    kept = [d for d in range(ndim) if d != new]
    return [Link(f"d{d}", {k: Member((i,)) for k in range(count)}, Member((d,))) for i, d in enumerate(kept)]


def pad_links(node: Node) -> list[Link]:
    """pad: padded dims must be whole, the others stay."""
    before, after = shape(operands(node)[0]), shape(node)
    pads = node.args[1]
    padded = {len(after) - 1 - i // 2 for i, amount in enumerate(pads) if amount}  # type: ignore[arg-type]
    whole = [Link(f"d{d}", {0: Member((d,))}, None, "padding needs it whole") for d in sorted(padded)]
    return whole + [same_dim(d) for d in range(len(before)) if d not in padded]


def repeat_links(node: Node) -> list[Link]:
    """repeat_interleave(x, n, dim): n is a minor factor of the dim."""
    repeat, dim = node.args[1], argument(node, "dim")
    if dim is None:
        return []
    ndim = len(shape(node))
    grown = dim % ndim
    made = [same_dim(d) for d in range(ndim) if d != grown]
    if not isinstance(repeat, int):
        return made
    before = shape(operands(node)[0])[grown]
    return [
        *made,
        Link(f"d{grown}", {0: Member((grown,))}, Member((grown,), tail=repeat)),
        Link("repeat", {}, Member((grown,), lead=before)),
    ]


def tile_links(node: Node) -> list[Link]:
    """repeat: how often a dim is repeated becomes its leading factor."""
    before, after = shape(operands(node)[0]), shape(node)
    new = len(after) - len(before)
    made = []
    for d, size in enumerate(after):
        old = before[d - new] if d >= new else 1
        if old > 1:
            made.append(Link(f"d{d}", {0: Member((d - new,))}, Member((d,), lead=size // old)))
        if size > old:
            made.append(Link(f"times{d}", {}, Member((d,), tail=old)))
    return made


def local_bounds(node: Node, sizes: Sizes) -> dict[str, Any]:
    """Bounds of a dim that is split scale with it; a split dim is only ever sliced into equal pieces."""
    x = operands(node)[0]
    dim = argument(node, "dim") % tensor(x).dim()
    full, local = shape(x)[dim], local_shapes(x, sizes)[0][dim]
    if local == full:
        return {}
    start, end = argument(node, "start") or 0, argument(node, "end")
    bounds = {"start": start, "end": full if end is None else end}
    return {
        name: _bound(at, full) * local // full for name, at in bounds.items()
    }  # of a padded dim: all of it


def _bound(at: int, full: int) -> int:
    """A bound of a slice, counted from the beginning."""
    return min(max(at + full, 0) if at < 0 else at, full)


def local_split(name: str) -> Callable[[Node, Sizes], dict[str, Any]]:
    """The size of all pieces, or that of each."""

    def make(node: Node, sizes: Sizes) -> dict[str, Any]:
        dim = argument(node, "dim") % tensor(node).dim()
        pieces = [piece[dim] for piece in local_shapes(node, sizes)]
        return {name: pieces[0] if isinstance(argument(node, name), int) else pieces}

    return make


def local_repeats(node: Node, sizes: Sizes) -> dict[str, Any]:
    """How often each dim is repeated."""
    x, out = local_shapes(operands(node)[0], sizes)[0], local_shapes(node, sizes)[0]
    padded = (1,) * (len(out) - len(x)) + x
    return {"repeats": [after // before for before, after in zip(padded, out, strict=True)]}


def local_interleaved(node: Node, sizes: Sizes) -> dict[str, Any]:
    """How often each entry is repeated, where that is one number."""
    if not isinstance(argument(node, "repeats"), int):
        return {}
    x, out = (local_shapes(one, sizes)[0] for one in (operands(node)[0], node))
    return {"repeats": math.prod(out) // math.prod(x)}


SPLIT = Operator("", links=split_links, linear=FIRST, moves="pieces", text="torch.split")

OPERATORS = [
    # Pieces
    Operator(
        "aten.slice",
        links=slice_links,
        linear=FIRST,
        moves="part",
        sizes=("start", "end"),
        local_sizes=local_bounds,
        variable="part",
    ),
    Operator("aten.select", links=drop_dim_links, linear=FIRST, moves="part", text=".select"),
    replace(SPLIT, name="aten.split", sizes=("split_size",), local_sizes=local_split("split_size")),
    replace(SPLIT, name="aten.split_with_sizes", local_sizes=local_split("split_sizes")),
    replace(SPLIT, name="aten.chunk", text="torch.chunk"),
    replace(SPLIT, name="aten.unbind", links=drop_dim_links, text=".unbind"),
    Operator("getitem", links=getitem_links, linear=FIRST, moves="pieces", is_view=True),
    # Several entries for one, and several operands in one
    Operator("aten.repeat", links=tile_links, linear=FIRST, sizes=("repeats",), local_sizes=local_repeats),
    Operator(
        "aten.repeat_interleave",
        links=repeat_links,
        linear=FIRST,
        local_sizes=local_interleaved,
        text="torch.repeat_interleave",
    ),
    Operator("aten.cat", links=cat_links, linear=EVERY, keeps="nothing", text="torch.cat"),
    Operator("aten.stack", links=stack_links, linear=EVERY, text="torch.stack"),
    Operator("aten.pad", links=pad_links, text="F.pad"),
    Operator("aten.constant_pad_nd", links=pad_links),
]
