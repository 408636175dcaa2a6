"""Links of views, repetitions and pieces: operators that only move, cut, join or repeat entries (`dim_links.py`)."""

from __future__ import annotations

from torch.fx import Node

from autoptd.ir.notes import op_name, shape, value
from autoptd.passes.ops.dim_links import Link, Member, argument, operands, same_dim


def reshape_links(node: Node) -> list[Link]:
    """A view: the smallest groups of dims with equal products correspond."""
    before, after = shape(operands(node)[0]), shape(node)
    made, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        left, right = [i], [j]
        product_in, product_out = before[i], after[j]
        while product_in != product_out:
            if product_in < product_out:
                i += 1
                left.append(i)
                product_in *= before[i]
            else:
                j += 1
                right.append(j)
                product_out *= after[j]
        made.append(Link(f"d{left[0]}", {0: Member(tuple(left))}, Member(tuple(right))))
        i, j = i + 1, j + 1
    return made


def bits_links(node: Node) -> list[Link]:
    """x.view(dtype): the same bits; where entries get another size, those of the last dim are joined or cut."""
    before, after = shape(operands(node)[0]), shape(node)
    return [same_dim(d) for d in range(len(after)) if before[d] == after[d]]


def permute_links(node: Node) -> list[Link]:
    """transpose, t, permute: the dims in another order."""
    ndim, name = len(shape(node)), op_name(node)
    order = list(range(ndim))
    if name == "aten.permute":
        order = [d % ndim for d in node.args[1]]  # type: ignore[operator, union-attr]
    elif name in ("aten.t", "aten.numpy_T"):
        order = order[::-1]
    else:
        a, b = node.args[1] % ndim, node.args[2] % ndim  # type: ignore[operator]
        order[a], order[b] = order[b], order[a]
    return [Link(f"d{source}", {0: Member((source,))}, Member((d,))) for d, source in enumerate(order)]


def expand_links(node: Node) -> list[Link]:
    """expand: kept dims correspond, new ones are free in the result."""
    before, after = shape(operands(node)[0]), shape(node)
    made = []
    for d, size in enumerate(after):
        source = d - len(after) + len(before)
        same = source >= 0 and before[source] == size
        if size != 1:
            made.append(Link(f"d{d}", {0: Member((source,))} if same else {}, Member((d,))))
    return made


def repeat_links(node: Node) -> list[Link]:
    """repeat_interleave(x, n, dim): n is a minor factor of the dim."""
    repeat, dim = node.args[1], argument(node, 2, "dim")
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


def complex_links(node: Node) -> list[Link]:
    """view_as_complex and view_as_real: the last real dim holds the two parts."""
    return [same_dim(d) for d in range(min(len(shape(node)), len(shape(operands(node)[0]))))]


def slice_links(node: Node) -> list[Link]:
    """slice: one of several pieces of a dim, all equal or not; with steps it needs its dim whole."""
    x = shape(operands(node)[0])
    dim, start, size = _piece(node)
    made = [same_dim(d) for d in range(len(x)) if d != dim]
    pieces = [_piece(user) for user in operands(node)[0].users if op_name(user) == "aten.slice"]
    others = {length for at, _, length in pieces if at == dim and length not in (size, x[dim])}
    has_steps = argument(node, 4, "step", 1) != 1
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
    dim = argument(node, 1, "dim", 0) % len(x)
    start = argument(node, 2, "start", 0) or 0
    return dim, max(start + x[dim], 0) if start < 0 else min(start, x[dim]), shape(node)[dim]


def split_links(node: Node) -> list[Link]:
    """split and chunk: equal pieces correspond; unequal ones need the dim whole. The result stands for every piece."""
    x, pieces = shape(operands(node)[0]), value(node)
    dim = argument(node, 2, "dim", 0) % len(x)
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
    dim = argument(node, 1, "dim", 0) % len(x)
    kept = [d for d in range(len(x)) if d != dim]
    made = [Link(f"d{d}", {0: Member((d,))}, Member((i,))) for i, d in enumerate(kept)]
    return [*made, Link(f"d{dim}", {0: Member((dim,))}, None, "a single index needs it whole")]


def stack_links(node: Node) -> list[Link]:
    """stack: a new dim appears, the others stay."""
    ndim, count = len(shape(node)), len(operands(node))
    new = argument(node, 1, "dim", 0) % ndim
    kept = [d for d in range(ndim) if d != new]
    return [Link(f"d{d}", {k: Member((i,)) for k in range(count)}, Member((d,))) for i, d in enumerate(kept)]


def cat_links(node: Node) -> list[Link]:
    """cat: equal pieces become a leading factor of the joined dim; unequal ones need it whole."""
    parts, ndim = operands(node), len(shape(node))
    dim = argument(node, 1, "dim", 0) % ndim
    made = [Link(f"d{d}", {k: Member((d,)) for k in range(len(parts))}, Member((d,))) for d in range(ndim) if d != dim]
    sizes = {shape(part)[dim] for part in parts}
    piece = {k: Member((dim,)) for k in range(len(parts))}
    if len(sizes) == 1:
        return [*made, Link(f"d{dim}", piece, Member((dim,), lead=len(parts)))]
    singles = [Link(f"d{dim}", {k: one}, None, "unequal pieces need it whole") for k, one in piece.items()]
    return [*made, *singles]


def pad_links(node: Node) -> list[Link]:
    """pad: padded dims must be whole, the others stay."""
    before, after = shape(operands(node)[0]), shape(node)
    pads = node.args[1]
    padded = {len(after) - 1 - i // 2 for i, amount in enumerate(pads) if amount}  # type: ignore[arg-type]
    whole = [Link(f"d{d}", {0: Member((d,))}, None, "padding needs it whole") for d in sorted(padded)]
    return whole + [same_dim(d) for d in range(len(before)) if d not in padded]
