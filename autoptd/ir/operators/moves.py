"""Link functions of operators that move entries: views, pieces, joins, copies, lookups; and the local values of their
sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from autoptd.ir.layout import Sizes
from autoptd.ir.notes import local_shapes, note, op_name, shape, tensor, value
from autoptd.ir.operators.record import Link, Member, argument, operands, same_dim

# The same entries in other dims, or in another order


def reshape_links(node: Node) -> list[Link]:
    """Link a view: the smallest groups of dims with equal products correspond."""
    before, after = shape(operands(node)[0]), shape(node)
    links, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        left, right = [i], [j]
        product_in, product_out = before[i], after[j]
        # The smaller product takes in its next dim until both are equal.
        while product_in != product_out:
            if product_in < product_out:
                i += 1
                left.append(i)
                product_in *= before[i]
            else:
                j += 1
                right.append(j)
                product_out *= after[j]
        links.append(Link(f"d{left[0]}", {0: Member(tuple(left))}, Member(tuple(right))))
        i, j = i + 1, j + 1
    return links


def bits_links(node: Node) -> list[Link]:
    """Link x.view(dtype): the same bits; where entries get another size, those of the last dim are joined
    or cut.
    """
    before, after = shape(operands(node)[0]), shape(node)
    return [same_dim(d) for d in range(len(after)) if before[d] == after[d]]


def permute_links(node: Node) -> list[Link]:
    """Link transpose, t, permute: the dims in another order."""
    return [
        Link(f"d{source}", {0: Member((source,))}, Member((d,))) for d, source in enumerate(dim_order(node))
    ]


def dim_order(node: Node) -> list[int]:
    """Return, for every dim of the result of a transpose or permute, which dim of the operand it is."""
    ndim, name = len(shape(node)), op_name(node)
    order = list(range(ndim))
    if name == "aten.permute":
        order = [d % ndim for d in argument(node, "dims")]
    elif name in ("aten.t", "aten.numpy_T"):
        order = order[::-1]
    else:
        a, b = (int(dim) % ndim for dim in node.args[1:3])  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    return order


def expand_links(node: Node) -> list[Link]:
    """Link expand: kept dims correspond, new ones are free in the result."""
    before, after = shape(operands(node)[0]), shape(node)
    links = []
    for d, size in enumerate(after):
        source = d - len(after) + len(before)
        is_kept = source >= 0 and before[source] == size
        if size != 1:
            links.append(Link(f"d{d}", {0: Member((source,))} if is_kept else {}, Member((d,))))
    return links


def complex_links(node: Node) -> list[Link]:
    """Link view_as_complex and view_as_real: the last real dim holds the two parts."""
    return [same_dim(d) for d in range(min(len(shape(node)), len(shape(operands(node)[0]))))]


def local_unflatten(node: Node, sizes: Sizes) -> dict[str, Any]:
    """Return a rank's sizes of the dims that one dim becomes."""
    x = operands(node)[0]
    dim = argument(node, "dim") % tensor(x).dim()
    count = tensor(node).dim() - tensor(x).dim() + 1
    return {"sizes": list(local_shapes(node, sizes)[0][dim : dim + count])}


# Pieces


def slice_links(node: Node) -> list[Link]:
    """Link slice: one of several pieces of a dim, equal or not; every step-th entry, of all or of a part."""
    x = shape(operands(node)[0])
    dim, start, size = _piece(node)
    links = [same_dim(d) for d in range(len(x)) if d != dim]
    # Slices of the same tensor: q, k and v cut from one projection are equal pieces only if all of them are.
    pieces = [_piece(user) for user in operands(node)[0].users if op_name(user) == "aten.slice"]
    others = {length for d, _, length in pieces if d == dim and length not in (size, x[dim])}
    step = argument(node, "step")
    if size == x[dim]:
        links.append(same_dim(dim))
    # Every step-th entry of all: [2880 * 2] is seen as 2880 x 2, and the slice keeps the major factor.
    elif step > 1 and size > 1 and x[dim] == size * step:
        links.append(Link(f"d{dim}", {0: Member((dim,), tail=step)}, Member((dim,))))
    elif step != 1 or size <= 1:
        links.append(Link(f"d{dim}", {0: Member((dim,))}, None, "an uneven slice needs it whole"))
    # The k-th of n equal pieces: [3 * 768] is seen as 3 x 768, and the slice keeps the minor factor.
    elif x[dim] % size == 0 and start % size == 0 and not others:
        links.append(Link(f"d{dim}", {0: Member((dim,), lead=x[dim] // size)}, Member((dim,))))
    else:
        links.append(Link(f"d{dim}", {0: Member((dim,))}, Member((dim,)), segment=(start, size)))
    return links


def _piece(node: Node) -> tuple[int, int, int]:
    """Return (dim, start, length) of what a slice takes."""
    x = shape(operands(node)[0])
    dim = argument(node, "dim") % len(x)
    return dim, _bound(argument(node, "start") or 0, x[dim]), shape(node)[dim]


def _bound(bound: int, full: int) -> int:
    """Return a bound of a slice, counted from the beginning and within the dim."""
    return max(bound + full, 0) if bound < 0 else min(bound, full)


def local_bounds(node: Node, sizes: Sizes) -> dict[str, Any]:
    """Scale the bounds of a slice of a split dim, which is only sliced into equal pieces or with a step."""
    x = operands(node)[0]
    dim = argument(node, "dim") % tensor(x).dim()
    full, local = shape(x)[dim], local_shapes(x, sizes)[0][dim]
    if local == full:
        return {}
    start, end = argument(node, "start") or 0, argument(node, "end")
    if argument(node, "step") != 1:
        return {"start": _bound(start, full), "end": local}
    bounds = {"start": start, "end": full if end is None else end}
    # A padded dim is only ever taken whole: this gives the whole shard.
    return {name: _bound(bound, full) * local // full for name, bound in bounds.items()}


def split_links(node: Node) -> list[Link]:
    """Link split and chunk: equal pieces correspond; unequal ones need the dim whole.

    The result stands for every piece.
    """
    x, pieces = shape(operands(node)[0]), value(node)
    dim = argument(node, "dim") % len(x)
    links = [same_dim(d) for d in range(len(x)) if d != dim]
    sizes = {int(piece.shape[dim]) for piece in pieces}
    if len(sizes) == 1:
        links.append(Link(f"d{dim}", {0: Member((dim,), lead=len(pieces))}, Member((dim,))))
    else:
        links.append(Link(f"d{dim}", {0: Member((dim,))}, None, "unequal pieces need it whole"))
    return links


def local_split(name: str) -> Callable[[Node, Sizes], dict[str, Any]]:
    """Return a function that makes argument `name` the local size of all pieces, or a list of sizes."""

    def make(node: Node, sizes: Sizes) -> dict[str, Any]:
        dim = argument(node, "dim") % tensor(node).dim()
        pieces = [piece[dim] for piece in local_shapes(node, sizes)]
        return {name: pieces[0] if isinstance(argument(node, name), int) else pieces}

    return make


def getitem_links(node: Node) -> list[Link]:
    """Link one piece of a split: dims in which the pieces are equal correspond."""
    sizes = [tuple(piece.shape) for piece in value(operands(node)[0])]
    # Results of several kinds, as of embedding_bag.
    if len({len(size) for size in sizes}) > 1:
        return []
    links = []
    for d, lengths in enumerate(zip(*sizes, strict=True)):
        if len(set(lengths)) == 1:
            links.append(same_dim(d))
        else:
            links.append(Link(f"d{d}", {0: Member((d,))}, None, "unequal pieces need it whole"))
    return links


def drop_dim_links(node: Node) -> list[Link]:
    """Link select and unbind: one dim disappears and must be whole, the others stay."""
    x = shape(operands(node)[0])
    dim = argument(node, "dim") % len(x)
    kept = [d for d in range(len(x)) if d != dim]
    links = [Link(f"d{d}", {0: Member((d,))}, Member((i,))) for i, d in enumerate(kept)]
    return [*links, Link(f"d{dim}", {0: Member((dim,))}, None, "a single index needs it whole")]


# Joins and copies


def cat_links(node: Node) -> list[Link]:
    """Link cat: equal pieces become a leading factor of the joined dim; unequal ones need it whole."""
    parts, ndim = operands(node), len(shape(node))
    dim = argument(node, "dim") % ndim
    numbers = range(len(parts))
    links = []
    for d in range(ndim):
        if d != dim:
            links.append(Link(f"d{d}", dict.fromkeys(numbers, Member((d,))), Member((d,))))
    piece = Member((dim,))
    if len({shape(part)[dim] for part in parts}) == 1:
        return [*links, Link(f"d{dim}", dict.fromkeys(numbers, piece), Member((dim,), lead=len(parts)))]
    whole = "unequal pieces need it whole"
    return [*links, *(Link(f"d{dim}", {number: piece}, None, whole) for number in numbers)]


def stack_links(node: Node) -> list[Link]:
    """Link stack: a new dim appears, the others stay."""
    ndim, numbers = len(shape(node)), range(len(operands(node)))
    new = argument(node, "dim") % ndim
    links = []
    for i, d in enumerate(d for d in range(ndim) if d != new):
        links.append(Link(f"d{d}", dict.fromkeys(numbers, Member((i,))), Member((d,))))
    return links


def pad_links(node: Node) -> list[Link]:
    """Link pad: padded dims must be whole, the others stay."""
    before, after = shape(operands(node)[0]), shape(node)
    # (left, right) of the last dim, then of the one before it, ...
    amounts = node.args[1]
    padded = {len(after) - 1 - i // 2 for i, amount in enumerate(amounts) if amount}  # type: ignore[arg-type]
    whole = [Link(f"d{d}", {0: Member((d,))}, None, "padding needs it whole") for d in sorted(padded)]
    return whole + [same_dim(d) for d in range(len(before)) if d not in padded]


def tile_links(node: Node) -> list[Link]:
    """Link repeat: the number of copies becomes the leading factor of the dim."""
    before, after = shape(operands(node)[0]), shape(node)
    # New dims of the result, left of those of the operand.
    new = len(after) - len(before)
    links = []
    for d, size in enumerate(after):
        old = before[d - new] if d >= new else 1
        if old > 1:
            links.append(Link(f"d{d}", {0: Member((d - new,))}, Member((d,), lead=size // old)))
        if size > old:
            links.append(Link(f"times{d}", {}, Member((d,), tail=old)))
    return links


def local_repeats(node: Node, sizes: Sizes) -> dict[str, Any]:
    """Return how often a rank repeats each of its dims."""
    x, out = local_shapes(operands(node)[0], sizes)[0], local_shapes(node, sizes)[0]
    padded = (1,) * (len(out) - len(x)) + x
    return {"repeats": [after // before for before, after in zip(padded, out, strict=True)]}


def repeat_links(node: Node) -> list[Link]:
    """Link repeat_interleave(x, n, dim): n is a minor factor of the dim, as of KV heads that are repeated."""
    repeat, dim = node.args[1], argument(node, "dim")
    if dim is None:
        return []
    ndim = len(shape(node))
    grown = dim % ndim
    links = [same_dim(d) for d in range(ndim) if d != grown]
    # With a tensor of counts, the number of copies depends on its values.
    if not isinstance(repeat, int):
        return links
    before = shape(operands(node)[0])[grown]
    if outer := note(node).tokens.outer_heads:
        # Ranks of other axes split the heads `outer` ways; the rest, heads and copies, splits as one dim.
        inner = before // outer
        heads = Link("kv", {0: Member((grown,), tail=inner)}, Member((grown,), tail=inner * repeat))
        return links + [heads] * (outer > 1)
    links.append(Link(f"d{grown}", {0: Member((grown,))}, Member((grown,), tail=repeat)))
    # [heads] -> [heads x repeat]: `repeat` is a separate axis, which no operand has.
    links.append(Link("repeat", {}, Member((grown,), lead=before)))
    return links


def local_interleaved(node: Node, sizes: Sizes) -> dict[str, Any]:
    """Return how often a rank repeats each of its entries, where that is one number."""
    if not isinstance(argument(node, "repeats"), int):
        return {}
    x, out = local_shapes(operands(node)[0], sizes)[0], local_shapes(node, sizes)[0]
    return {"repeats": math.prod(out) // math.prod(x)}


# Entries that are looked up


def embedding_links(node: Node) -> list[Link]:
    """Link embedding(weight, ids): a split of the vocabulary gives partial sums of rows."""
    ndim = len(shape(operands(node)[1]))
    vocabulary = Link("vocabulary", {0: Member((0,))}, None, form="vocab_embedding")
    if argument(node, "scale_grad_by_freq") or argument(node, "sparse"):
        whole = "gradients by frequency and sparse gradients need all rows"
        vocabulary = Link("vocabulary", {0: Member((0,))}, None, whole)
    # ids [b, s] and weight [V, h] give [b, s, h].
    hidden = Link("h", {0: Member((1,))}, Member((ndim,)))
    return [vocabulary, hidden, *(Link(f"n{d}", {1: Member((d,))}, Member((d,))) for d in range(ndim))]


def gather_links(node: Node) -> list[Link]:
    """Link gather(x, dim, index): the other dims run together where they are equally long; `dim` of x is
    looked up.
    """
    x, index = (shape(operand) for operand in operands(node))
    dim = argument(node, "dim") % len(x) if x else 0
    links = [Link("looked up", {0: Member((dim,))}, None, "any entry may be looked up")] if x else []
    for d in range(len(index)):
        if d == dim:
            links.append(Link(f"d{d}", {1: Member((d,))}, Member((d,))))
        elif x[d] == index[d]:
            links.append(Link(f"d{d}", {0: Member((d,)), 1: Member((d,))}, Member((d,))))
        else:
            links.append(Link(f"d{d}", {0: Member((d,))}, None, "an uneven slice needs it whole"))
    return links


def scatter_links(node: Node) -> list[Link]:
    """Link scatter(x, dim, index, src or a number): the other dims run together where all are equally long."""
    sizes = [shape(operand) for operand in operands(node)]
    dim = argument(node, "dim") % max(1, len(sizes[0]))
    links = []
    for d in range(len(sizes[0])):
        members = dict.fromkeys(range(len(sizes)), Member((d,)))
        uneven = "" if len({size[d] for size in sizes}) == 1 else "an uneven slice needs it whole"
        whole = "any entry may be written" if d == dim else uneven
        links.append(Link(f"d{d}", {0: Member((d,))} if whole else members, Member((d,)), whole))
    return links


def index_links(node: Node) -> list[Link]:
    """Link x[:, ids] and index_select: one tensor of positions in one dim, looked up as in an embedding."""
    read = operands(node)
    if op_name(node) == "aten.index_select":
        dim = argument(node, "dim") % max(1, len(shape(read[0])))
    else:
        indexed = [d for d, index in enumerate(node.args[1]) if index is not None]  # type: ignore[arg-type, union-attr]
        # Several index tensors meet elementwise; a mask gives sizes that depend on its values.
        if len(indexed) != 1 or value(read[1]).dtype in (torch.bool, torch.uint8):
            return []
        dim = indexed[0]
    x, ids = (shape(operand) for operand in read)
    links = [Link("looked up", {0: Member((dim,))}, None, "any entry may be looked up")] if x else []
    for d in range(len(x)):
        if d != dim:
            # The dims of ids replace `dim`: later dims move.
            out_dim = d if d < dim else d - 1 + len(ids)
            links.append(Link(f"d{d}", {0: Member((d,))}, Member((out_dim,))))
    return links + [Link(f"n{d}", {1: Member((d,))}, Member((dim + d,))) for d in range(len(ids))]


def one_hot_links(node: Node) -> list[Link]:
    """Link one_hot(ids): the dims of ids run through; the last dim of the result is new."""
    return [same_dim(d) for d in range(len(shape(node)) - 1)]
