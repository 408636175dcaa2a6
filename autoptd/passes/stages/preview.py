"""What the program on one stage would save for backward, before it is cut.

In: a CONNECTED graph with its fusions found. Out: the bytes that a rank keeps of a microbatch, by the operator that
makes them, and the seconds to make again what it does not keep.

    levels = kept_per_operator(graph, backbone, ctx)

A copy of the graph is made local and fused as if all of it were on one stage, and counted as the real stages are
(`passes/kept/keep.py`). Where a share of the layers is computed again, every layer has its share of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch.fx import Graph, Node

from autoptd.ir.fusion import Groups
from autoptd.ir.kept import Rate
from autoptd.ir.notes import copy_nodes, note
from autoptd.passes.context import Context
from autoptd.passes.fusion.fuse import substitute
from autoptd.passes.group_rows import group_rows
from autoptd.passes.kept.keep import Holders, Keeper
from autoptd.passes.localize import localize
from autoptd.passes.stages.line import Level


def kept_per_operator(graph: Graph, backbone: Sequence[Node], ctx: Context) -> list[Level]:
    """Return the bytes that every operator of the backbone leaves for backward, and the seconds to make the rest again.

    Of several prices for a kept byte each is a level.
    """
    share = ctx.options.recompute.full_share
    if share is None or share == 1:
        return _levels(graph, backbone, ctx)
    by_share = []
    for what, part in (("full", float(share)), (None, 1 - float(share))):
        options = replace(ctx.options, recompute=replace(ctx.options.recompute, what=what))
        asked = _with_groups(replace(ctx, options=options), _groups(ctx))
        (level,) = _levels(graph, backbone, asked)
        by_share.append((part * np.array(level.saved), part * np.array(level.again)))
    saved, again = (sum(parts) for parts in zip(*by_share, strict=True))
    return [Level(saved, again)]


def kept_bytes(graph: Graph, ctx: Context) -> int:
    """Return the bytes that a rank keeps of a microbatch of the whole graph, at the layout's price of a byte."""
    keeper = Keeper(*_on_one_stage(graph, (), ctx))
    keeper.mark([_rate(ctx.byte_price)])
    return sum(storage.nbytes for storage in keeper.held().get(0, ()))


def _levels(graph: Graph, backbone: Sequence[Node], ctx: Context) -> list[Level]:
    local, here = _on_one_stage(graph, backbone, ctx)
    keeper = Keeper(local, here)
    levels: list[Level] = []
    for price in ctx.byte_prices if keeper.is_by_value else (0.0,):
        keeper.mark([_rate(price)])
        level = _count(local, keeper.held().get(0, {}), len(backbone))
        if not levels or sum(level.saved) < sum(levels[-1].saved):
            levels.append(level)
    return levels


def _rate(price: float) -> Rate:
    return Rate(price, price, 0.0)


def _on_one_stage(graph: Graph, backbone: Sequence[Node], ctx: Context) -> tuple[Graph, Context]:
    """Return a LOCAL copy of a graph, all of it on one stage, and the context of that."""
    copy, copies = copy_nodes(graph)
    for node in copy.nodes:
        note(node).stages = (0,)
    for i, node in enumerate(backbone):
        note(copies[node]).position = i
    # The groups may be those of another copy: a node has its name in all.
    groups = _groups(ctx)
    named = _Named({node.name: node for node in copy.nodes})
    chosen = tuple(group.on(named) for group in groups.chosen)
    here = _with_groups(ctx, replace(groups, chosen=chosen, refused=()))
    localize.run(copy, here)
    fused = substitute(copy, here)
    group_rows.run(fused, here)
    return fused, here


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
    """Return a copy of a context with separate findings."""
    found = replace(ctx)
    found.found.groups = groups
    return found


def _count(local: Graph, kept: Holders, length: int) -> Level:
    """Count bytes and seconds at the operators of the backbone; what is none of these has the place of the one before it.

    A value counts where it is first saved: the stage that reads it holds it, not the one that sends it.
    """
    saved, again = [0.0] * length, [0.0] * length
    places: dict[Node, int] = {}
    place = 0
    for node in local.nodes:
        position = note(node).position
        place = places[node] = place if position is None else position
        again[place] += note(node).keep.again or 0.0
    for storage, holder in kept.items():
        saved[places[holder]] += storage.nbytes
    return Level(saved, again)


__all__ = ["kept_bytes", "kept_per_operator"]
