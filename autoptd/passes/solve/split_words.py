"""Say in words how an operator is split: Megatron's rows and columns, or by what.

In: a node and its `Split`. Out: the reason that comments, pictures and `explain` show.

    why_split(node, split, "tokens", pieces=2, t=2)     # "split by tokens: 16 = 2 x 8"
"""

from __future__ import annotations

from torch.fx import Node

from autoptd.ir.notes import note, op_name
from autoptd.ir.operators.table import operator_of
from autoptd.ir.types import division_text
from autoptd.passes.solve.splits import Split


def why_split(node: Node, split: Split, name: str, pieces: int, t: int) -> str:
    """Return the reason of a split by `name`, into `pieces` among `t` ranks."""
    each, padded = division_text(split.size, pieces), ", padded" if split.size % pieces else ""
    each += alike_text(pieces, t)
    row, column = f"row: its input arrives sharded, {each}", f"column{padded}: {each}"
    # Megatron's words, for a reader who knows its paper: the weight's columns or rows in [in, out] order.
    if op_name(node) == "aten.linear" and split.name in ("o", "i"):
        return column if split.name == "o" else row
    # {False}: a product of two activations, as q k^T, which has no columns or rows of a weight.
    are_weights = {note(operand).kind == "param" for operand in split.carriers}
    if operator_of(node).factors and are_weights != {False}:
        if split.is_contracted:
            return row
        if are_weights == {True}:
            return column
    return f"split by {name}{padded}: {each}"


def alike_text(pieces: int, t: int) -> str:
    """Say how many ranks have the same piece, where there are fewer pieces than ranks."""
    return f", {t // pieces} of {t} ranks share each" if pieces < t else ""


__all__ = ["alike_text", "why_split"]
