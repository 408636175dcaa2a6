"""What the program on one stage would save for backward, before it is cut.

In: a CONNECTED graph with its fusions found. Out: the bytes that a rank keeps of a microbatch, by the operator that makes them.

    bytes_of = saved_per_operator(graph, backbone, ctx)

A copy of the graph is made local and fused as if all of it were on one stage, and counted as the real stages are
(`passes/keep.py`). Where a share of the layers is computed again, every layer has its share of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.fx import Graph, Node

from autoptd.ir.notes import copy_nodes, note
from autoptd.ir.recompute import full_share
from autoptd.ir.saved import Storage
from autoptd.passes.context import Context
from autoptd.passes.fusion.chain import Groups
from autoptd.passes.fusion.fuse import substitute
from autoptd.passes.keep import kept_by_stage
from autoptd.passes.localize import localize

# Of `extra`: where in the backbone an operator of the copy comes from.
POSITION = "position"


def saved_per_operator(graph: Graph, backbone: Sequence[Node], ctx: Context) -> list[float]:
    """Return the bytes that every operator of the backbone leaves for backward."""
    share = full_share(ctx.options.recompute)
    if share is None or share == 1:
        return _count(_kept(graph, backbone, ctx), len(backbone))
    by_share = []
    for recompute, part in (("full", share), (None, 1 - share)):
        asked = replace(ctx, options=replace(ctx.options, recompute=recompute))
        counted = _count(_kept(graph, backbone, _with_groups(asked, _groups(ctx))), len(backbone))
        by_share.append([float(part) * nbytes for nbytes in counted])
    return [sum(each) for each in zip(*by_share, strict=True)]


def kept_bytes(graph: Graph, ctx: Context) -> int:
    """Return the bytes that a rank keeps of a microbatch of the whole graph."""
    return sum(storage.nbytes for storage in _kept(graph, (), ctx))


def _kept(graph: Graph, backbone: Sequence[Node], ctx: Context) -> set[Storage]:
    copy, copies = copy_nodes(graph)
    for node in copy.nodes:
        note(node).stages = (0,)
    for i, node in enumerate(backbone):
        note(copies[node]).extra[POSITION] = i
    # The groups may be those of another copy: a node has its name in all.
    groups = _groups(ctx)
    named = _Named({node.name: node for node in copy.nodes})
    chosen = tuple(group.on(named) for group in groups.chosen)
    here = _with_groups(ctx, replace(groups, chosen=chosen, refused=()))
    localize.run(copy, here)
    fused = substitute(copy, here)
    return kept_by_stage(fused, here).get(0, set())


class _Named(dict[Node, Node]):
    """The nodes of a graph, by nodes of the same names."""

    def __init__(self, by_name: Mapping[str, Node]) -> None:
        super().__init__()
        self._by_name = by_name

    def __missing__(self, node: Node) -> Node:
        return self._by_name[node.name]


def _groups(ctx: Context) -> Groups:
    return ctx.found.groups if ctx.found.has("groups") else Groups()


def _with_groups(ctx: Context, groups: Groups) -> Context:
    """Return a context like another, with findings of its own."""
    found = replace(ctx)
    found.found.groups = groups
    return found


def _count(kept: set[Storage], length: int) -> list[float]:
    counted = [0.0] * length
    for storage in kept:
        position = note(storage.node).extra.get(POSITION)
        if position is not None:
            counted[position] += storage.nbytes
    return counted


__all__ = ["kept_bytes", "saved_per_operator"]
