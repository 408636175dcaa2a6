"""Make one operator of attention that a model writes out (TRACED -> TRACED, where ranks divide queries).

In: a TRACED graph, and the trace with all samples that it is compared with. Out: both, in which torch's attention stands in
the place of scale, mask, softmax and product with the values, by the pattern of fused operators (`fusion/attention.py`). A
rank's queries are then split from the keys of all ranks as in a model that calls it, a causal mask is not made, and no scores
are kept: written out, a rank keeps [b, heads, s/c, s] of them. Where a fact is missing, all stays as it is.

    raise_attention(graph, ctx)
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch.fx import Graph, Node

from autoptd.ir.fusion import Group, Swapped
from autoptd.ir.notes import note, op_name, ops, shape
from autoptd.passes.axes.constants import Constants
from autoptd.passes.context import Context
from autoptd.passes.fusion.attention import PRODUCTS, attention
from autoptd.passes.runner import CALLS, Form, divides_values, graph_pass
from autoptd.passes.solve.queries import may_be_by_queries
from autoptd.passes.tokens.both_traces import divides_queries, drop_unread, second_trace
from autoptd.passes.tokens.token_regions import Maker

aten = torch.ops.aten


@graph_pass(takes=Form.TRACED, gives=Form.TRACED, when=divides_values, changes=(CALLS,))
def raise_attention(graph: Graph, ctx: Context) -> None:
    """Rewrite the attention of both traces where both have it."""
    if not divides_queries(graph, ctx):
        return
    whole, constants = second_trace(graph, ctx), Constants(ctx.buffers)
    is_found = False
    for node, same in zip(list(ops(graph)), list(ops(whole)), strict=False):
        if not may_be_by_queries(node, ctx.mesh):
            continue
        groups = [_written_out(one, constants) for one in dict.fromkeys((node, same))]
        if all(group is not None for group in groups) and len({_facts(group) for group in groups}) == 1:
            is_found = True
            for group in groups:
                _replace(group)
    if is_found:
        drop_unread(graph, whole)


def _written_out(node: Node, constants: Constants) -> Group | None:
    """Return the attention that ends in a product, of which nothing else reads a part."""
    found = attention(node, constants) if op_name(node) in PRODUCTS else None
    if not isinstance(found, Group):
        return None
    # What reads nothing is a literal tensor, as `aten.full`: it simply stays for its other readers.
    inner = [member for member in found.members if member is not node and member.all_input_nodes]
    is_own = all(reader in found.members for member in inner for reader in member.users)
    return found if is_own else None


def _facts(group: Group | None) -> Hashable:
    assert group is not None
    kinds = tuple(type(operand) for operand in group.operands)
    return kinds, tuple(sorted(group.keywords.items()))


def _replace(group: Group | None) -> None:
    assert group is not None
    node, (q, k, v, mask) = group.result, group.operands
    maker = Maker(node.graph, node, note(node))
    if isinstance(k, Swapped):
        k = maker.make(aten.transpose.int, k.node, -2, -1)
    keywords = dict(group.keywords)
    arguments = (q, k, v, mask, 0.0, keywords.pop("causal"))
    assert isinstance(q, Node)
    # torch's own scale needs not be said.
    if math.isclose(keywords["scale"], shape(q)[-1] ** -0.5, rel_tol=1e-15):
        keywords.pop("scale")
    node.replace_all_uses_with(maker.make(aten.scaled_dot_product_attention.default, *arguments, **keywords))


__all__ = ["raise_attention"]
