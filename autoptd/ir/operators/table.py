"""All records of operators, and what follows from them.

Most operators are one line of letters, read like einsum and aligned from the right, `...` standing for any leading dims:

    Operator("aten.mm", "m k, k n -> m n")            a letter missing on the right is contracted: split by it, the result is P
    Operator("aten.layer_norm", ...)                  a starred letter (h*) must stay whole

Views, slices, splits and the like are computed from shapes (`views.py`). Pointwise operators are known by torch's tag. What is
not known has an empty record here: see `passes/ops/unlisted.py`.

    operator_of(node).keeps         # "operands"
    is_view(node)
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.fx import Node

from autoptd.ir.notes import op_name
from autoptd.ir.operators import lookups, pieces, pointwise, products, reductions, views
from autoptd.ir.operators.links import letter_links, pointwise_links
from autoptd.ir.operators.record import EVERY, Link, Operator, operands

FAMILIES = (products, views, pieces, pointwise, reductions, lookups)
TABLE: dict[str, Operator] = {record.name: record for family in FAMILIES for record in family.OPERATORS}


def operator_of(node: Node) -> Operator:
    """Return what is known of the operator of a node, or of this overload; maybe nothing but its name."""
    overload, name = (
        _names(node.target) if isinstance(node.target, torch._ops.OpOverload) else ("", op_name(node))
    )
    return TABLE.get(overload) or TABLE.get(name) or _unknown(name)


@cache
def _names(overload: Any) -> tuple[str, str]:
    """("aten.view.dtype", "aten.view")."""
    return str(overload), overload._schema.name.replace("::", ".")


@cache
def _unknown(name: str) -> Operator:
    return Operator(name)


def is_listed(overload: Any) -> bool:
    """Whether it is known how an operator of torch's registry may be split."""
    record = next((TABLE[name] for name in _names(overload) if name in TABLE), None)
    return (record is not None and record.is_split) or torch.Tag.pointwise in overload.tags


def links(node: Node) -> list[Link] | None:
    """The links of `node`, or None when it is not known how it may be split."""
    record = operator_of(node)
    if record.links:
        return record.links(node)
    if record.letters:
        return letter_links(node, record.letters)
    return pointwise_links(node) if is_pointwise(node) else None


def is_pointwise(node: Node) -> bool:
    """Whether every entry of the result is made of the entries of the operands in its place."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or operator_of(node).links is pointwise_links


def is_view(node: Node) -> bool:
    """Whether the result shares the memory of an operand, by the record or by the schema."""
    known = operator_of(node).is_view
    if known is not None or not isinstance(node.target, torch._ops.OpOverload):
        return bool(known)
    return _shares_memory(node.target)


@cache
def _shares_memory(overload: Any) -> bool:
    """Whether a result is an alias of an operand that is not written to, as the schema says."""
    aliases = [result.alias_info for result in overload._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def linear_groups(node: Node) -> list[tuple[Node, ...]]:
    """Groups of operands in which `node` is jointly linear: it maps their partial sums to a partial sum."""
    record, read = operator_of(node), operands(node)
    if node.kwargs.get("rounding_mode") is not None or (record.is_sum and len(read) < 2):
        return []
    wanted = [tuple(range(len(read)))] if record.linear == EVERY else record.linear
    groups = [[i for i in group if i < len(read)] for group in wanted if group[0] < len(read)]
    # x * x is linear in each factor but not in x: a tensor that is read outside of the group as well does not count
    found = [(group, list(dict.fromkeys(read[i] for i in group))) for group in groups]
    return [tuple(ones) for group, ones in found if sum(map(read.count, ones)) == len(group)]


def addends(node: Node, split: set[Node]) -> set[Node]:
    """Operands that are added to a contraction over the `split` ones (a bias): they must be partial sums like it."""
    joint = [group for group in linear_groups(node) if split & set(group)]
    return {one for group in joint for one in group} - split


def says_shape(node: Node) -> bool:
    """Whether an operator that moves entries is given the shape of its result."""
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
