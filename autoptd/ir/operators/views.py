"""Operators that give the same entries in other dims, in another order or in another dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from autoptd.ir.notes import op_name, shape, tensor
from autoptd.ir.operators.links import pointwise_links, same_dim
from autoptd.ir.operators.record import FIRST, Link, Member, Operator, argument, operands
from autoptd.ir.sizes import Sizes, local_shapes


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


# Views by the order of their entries: the same order in other dims, and another order of the dims.
FOLD = Operator("", links=reshape_links, linear=FIRST, moves="fold")
TURN = Operator("", links=permute_links, linear=FIRST, moves="turn")

OPERATORS = [
    replace(FOLD, name="aten.view", sizes=("size",), text=".reshape", keeps_name=True),
    replace(FOLD, name="aten.reshape", sizes=("shape",), text=".reshape", keeps_name=True),
    replace(
        FOLD,
        name="aten._unsafe_view",
        sizes=("size",),
        is_view=True,
        text=".reshape",
        variable="view",
        keeps_name=True,
    ),
    replace(FOLD, name="aten.flatten", text=".flatten"),
    replace(FOLD, name="aten.unflatten", sizes=("sizes",), local_sizes=local_unflatten, text=".unflatten"),
    replace(FOLD, name="aten.squeeze", text=".squeeze"),
    replace(FOLD, name="aten.unsqueeze", text=".unsqueeze", keeps_name=True),
    Operator("aten.view.dtype", links=bits_links, text=".view", needs_contiguous=True, keeps_name=True),
    replace(TURN, name="aten.transpose", text=".transpose", keeps_name=True),
    replace(TURN, name="aten.permute", text=".permute", keeps_name=True),
    replace(TURN, name="aten.t", text=".t"),
    *(replace(TURN, name=f"aten.{name}") for name in ("numpy_T", "swapaxes", "swapdims")),
    Operator(
        "aten.expand",
        links=expand_links,
        linear=FIRST,
        moves="spread",
        sizes=("size",),
        text=".expand",
        keeps_name=True,
    ),
    # Copies and casts: those that the schema declares a view may be one.
    Operator(
        "aten.contiguous",
        links=pointwise_links,
        linear=FIRST,
        moves="same",
        is_view=False,
        text=".contiguous",
        keeps_name=True,
    ),
    Operator("aten.clone", links=pointwise_links, linear=FIRST, moves="same", keeps="nothing", text=".clone"),
    Operator(
        "aten.detach", links=pointwise_links, linear=FIRST, moves="same", cuts_gradient=True, text=".detach"
    ),
    Operator("aten.alias", moves="same"),
    Operator(
        "aten.to",
        links=pointwise_links,
        moves="cast",
        is_view=False,
        keeps="nothing",
        text=".to",
        keeps_name=True,
    ),
    Operator("aten._to_copy", moves="cast", keeps="nothing", variable="x"),
    Operator("aten.type_as", moves="cast", is_view=False),
    Operator("aten.view_as_complex", links=complex_links, needs_contiguous=True),
    Operator("aten.view_as_real", links=complex_links),
]
