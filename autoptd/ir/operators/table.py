"""Look up operator records, and answer questions that combine a record with a node.

In: a node. Out: its record, or such an answer. Most operators are one line of letters, read like einsum and
aligned from the right, where `...` stands for any leading dims; a starred letter (`h*`) must stay whole. A
letter that is missing on the right is contracted: split along it, the result is P.

    Operator("aten.mm", "m k, k n -> m n")

Views, slices, splits and the like are computed from shapes (`views.py`). Pointwise operators are known by
torch's tag. An unknown operator has an empty record: see `passes/ops/unlisted.py`.

    operator_of(node).keeps         # "operands"
    is_view(node)
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.fx import Node

from autoptd.ir.notes import op_name
from autoptd.ir.operators import joins, lookups, pointwise, products, reductions, views
from autoptd.ir.operators.links import letter_links, pointwise_links
from autoptd.ir.operators.record import EVERY, Link, Operator, operands

FAMILIES = (products, views, joins, pointwise, reductions, lookups)
TABLE: dict[str, Operator] = {record.name: record for family in FAMILIES for record in family.OPERATORS}


def operator_of(node: Node) -> Operator:
    """Return the record of a node's overload, else of its operator, else an empty one with the name."""
    is_overload = isinstance(node.target, torch._ops.OpOverload)
    overload, name = _names(node.target) if is_overload else ("", op_name(node))
    return TABLE.get(overload) or TABLE.get(name) or _unknown(name)


@cache
def _names(overload: Any) -> tuple[str, str]:
    """Return ("aten.view.dtype", "aten.view") for that overload."""
    return str(overload), overload._schema.name.replace("::", ".")


@cache
def _unknown(name: str) -> Operator:
    return Operator(name)


def is_listed(overload: Any) -> bool:
    """Tell whether AutoPTD knows how to split an operator of torch's registry."""
    record = next((TABLE[name] for name in _names(overload) if name in TABLE), None)
    return (record is not None and record.is_split) or torch.Tag.pointwise in overload.tags


def links(node: Node) -> list[Link] | None:
    """Return the links of `node`, or None if it is unknown how to split it."""
    record = operator_of(node)
    if record.links:
        return record.links(node)
    if record.letters:
        return letter_links(node, record.letters)
    return pointwise_links(node) if is_pointwise(node) else None


def is_pointwise(node: Node) -> bool:
    """Tell whether each entry of the result depends only on the operands' entries at the same position."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or operator_of(node).links is pointwise_links


def is_view(node: Node) -> bool:
    """Tell whether the result shares the memory of an operand, by the record or by the schema."""
    known = operator_of(node).is_view
    if known is not None or not isinstance(node.target, torch._ops.OpOverload):
        return bool(known)
    return _shares_memory(node.target)


@cache
def _shares_memory(overload: Any) -> bool:
    """Tell whether the schema has a result that aliases an operand and is not written to."""
    aliases = [result.alias_info for result in overload._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def linear_groups(node: Node) -> list[tuple[Node, ...]]:
    """Return the groups of operands in which `node` is jointly linear, so that partial sums stay partial."""
    record, read = operator_of(node), operands(node)
    # A rounded quotient is not linear; a literal that is added would be added once per rank.
    if node.kwargs.get("rounding_mode") is not None or (record.is_sum and len(read) < 2):
        return []
    numbers = [tuple(range(len(read)))] if record.linear == EVERY else record.linear
    groups = []
    for group in numbers:
        if group[0] >= len(read):
            continue
        # An absent operand, such as a bias, takes no place.
        present = [i for i in group if i < len(read)]
        members = list(dict.fromkeys(read[i] for i in present))
        # x * x is linear in each factor but not in x: a tensor that is read outside of the group too does
        # not count.
        if sum(map(read.count, members)) == len(present):
            groups.append(tuple(members))
    return groups


def addends(node: Node, split: set[Node]) -> set[Node]:
    """Return the operands that are added to a contraction over the `split` ones (a bias): they must be
    partial sums like it.
    """
    joint: set[Node] = set()
    for group in linear_groups(node):
        if split & set(group):
            joint |= set(group)
    return joint - split


def says_shape(node: Node) -> bool:
    """Tell whether an operator that moves entries is given the shape of its result."""
    record = operator_of(node)
    return bool(record.moves and record.sizes and not record.local_sizes)


__all__ = [
    "TABLE",
    "addends",
    "is_listed",
    "is_pointwise",
    "is_view",
    "linear_groups",
    "links",
    "operator_of",
    "says_shape",
]
