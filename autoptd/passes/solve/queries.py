"""Attention whose heads t does not divide: every tensor rank has some of its queries, and all keys and values.

In: an operator of attention, and which of its letters an axis divides. Out: whether the axis splits its queries, though
no other tokens; and the order in which its ranks have them. 6 heads over t=4 would be computed by all ranks otherwise. A
rank takes its queries from whole ones, which sends nothing; the results are gathered.

    if not divides_heads(attention, axes, is_divided): ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch.fx import Node

from autoptd.ir.mesh import Mesh, Role
from autoptd.ir.notes import op_name, shape
from autoptd.ir.operators.record import QUERIES, argument, operands
from autoptd.ir.types import ZIGZAG
from autoptd.passes.axes.axes import Axes, Letter

ATTENTION = "aten.scaled_dot_product_attention"


def divides_heads(node: Node, axes: Axes, is_divided: Callable[[Letter], bool]) -> bool:
    """Tell whether a letter that queries and results have is divided: heads, or the queries of each KV head."""
    q = operands(node)[0]
    letters = (letter for letter in axes.letters(node) if letter.out is not None and q in letter.places)
    return any(letter.form != QUERIES and is_divided(letter) for letter in letters)


def has_places(node: Node, letter: Letter) -> bool:
    """Tell whether a rank knows the places of its queries, of its part of a `letter`.

    Causal ones are counted in chunks of all queries, not of each of several blocks.
    """
    assert letter.out is not None
    return letter.out[1] == 0 or not argument(node, "is_causal")


def may_be_by_queries(node: Node, mesh: Mesh) -> bool:
    """Tell whether ranks may split attention by its queries, of which a result is [batch, heads, queries, size].

    They do if they divide tokens, or where they do not divide heads.
    """
    if mesh.token_axes:
        return True
    return len(shape(node)) == 4 and any(
        shape(node)[1] % mesh.degree(axis) for axis in mesh.axes_of(Role.VALUES)
    )


def order_of_queries(node: Node, letter: Letter, ranks: int) -> str:
    """Return the order in which `ranks` have queries where nothing else is split by them.

    Zigzag if they are causal and there are two equal pieces for each rank: then all have as many keys to read.
    """
    is_uneven = letter.form == QUERIES and argument(node, "is_causal")
    return ZIGZAG if is_uneven and letter.size % (2 * ranks) == 0 else ""


def work_parts(node: Node, cut: Collection[Node], pieces: int) -> float:
    """Return in how many parts ranks divide the work of an operator, of which they have `pieces` of the operands in `cut`.

    Of attention, ranks that have parts of the values alone repeat all scores: half of its work.
    """
    if op_name(node) != ATTENTION or operands(node)[0] in cut:
        return pieces
    return 2 / (1 + 1 / pieces)


__all__ = ["ATTENTION", "divides_heads", "has_places", "may_be_by_queries", "order_of_queries", "work_parts"]
