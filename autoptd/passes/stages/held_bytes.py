"""Count the bytes that a rank holds for every operator of the backbone, and compare them with its memory.

In: a CONNECTED graph with its fusions found. Out: `Held`, per position of the backbone. The assumptions, which the
error for too little memory names:

- A trained parameter is held with its gradient and AdamW's state, in the dtypes and the parts of the request
  (ir/placement.py); a frozen one and a buffer once. It counts once on every rank that reads it.
- The bytes saved for backward are those of the program on one stage, which are exact except for the effects of a
  cut: a copy of the graph is localized and fused as if all of it were on one stage, and counted like the real stages
  (`passes/kept/keep.py`). A value counts where it is first saved, so a value that crosses is held by the stage that
  reads it. If a share of the layers is recomputed, every layer has its share of that.

    held = count_bytes(graph, backbone, ctx)
    sum(held.kept)        # bytes of parameters with their state that have one reader
    if excess_bytes(cut, ctx):
        raise too_full(max(ctx.needed_bytes(cut)), ctx, "the best cut found")
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.fusion import Groups
from autoptd.ir.kept import Rate
from autoptd.ir.layout import Sizes
from autoptd.ir.notes import copy_nodes, local_shapes, note, tensor
from autoptd.options import Options
from autoptd.passes.context import Context
from autoptd.passes.fusion.fuse import substitute
from autoptd.passes.group_rows import group_rows
from autoptd.passes.kept.keep import Holders, Keeper
from autoptd.passes.localize import localize
from autoptd.passes.stages.balance import Level
from autoptd.program.costs import Cut

GIB = 1 << 30


@dataclass(frozen=True)
class Held:
    """Per position: bytes held once, and those saved per microbatch; `shared`: (bytes, positions) of parameters
    with several readers.
    """

    kept: tuple[float, ...]
    levels: Sequence[Level]
    shared: tuple[tuple[float, tuple[int, ...]], ...]


def count_bytes(graph: Graph, backbone: Sequence[Node], ctx: Context) -> Held:
    """Count bytes per position of the backbone."""
    sizes, options = ctx.sizes, ctx.options
    order = {node: i for i, node in enumerate(backbone)}
    kept = [0.0] * len(backbone)
    shared: dict[tuple[int, ...], float] = {}
    # Positions of the backbone that read a node, directly or through nodes outside of it.
    readers: dict[Node, set[int]] = {}
    for node in reversed(graph.nodes):
        if node in order or node.op == "output":
            continue
        positions: set[int] = set()
        for user in node.users:
            positions |= {order[user]} if user in order else readers.get(user, set())
        readers[node] = positions
        if node.op == "placeholder" and note(node).kind in ("param", "buffer"):
            nbytes = _state_bytes(node, sizes, options)
            if len(positions) > 1:
                key = tuple(sorted(positions))
                shared[key] = shared.get(key, 0.0) + nbytes
            else:
                kept[min(positions, default=0)] += nbytes
    levels = _levels_of_request(graph, backbone, ctx)
    return Held(tuple(kept), levels, tuple((nbytes, key) for key, nbytes in sorted(shared.items())))


def _state_bytes(node: Node, sizes: Sizes, options: Options) -> float:
    count = math.prod(local_shapes(node, sizes)[0])
    itemsize = tensor(node).element_size()
    if not note(node).needs_grad:
        # With "use" a rank has a few layers at a time, which are working bytes.
        return count * itemsize / (options.sharing_ranks if options.scopes[0] == "use" else 1)
    return count * options.state_bytes(itemsize).total


def _levels_of_request(graph: Graph, backbone: Sequence[Node], ctx: Context) -> list[Level]:
    """Return the bytes that every operator of the backbone saves, and the seconds to recompute the others.

    With several prices for a kept byte, each is a level.
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


def _count(local: Graph, kept: Holders, length: int) -> Level:
    """Count bytes and seconds per operator of the backbone; other operators count with the one before them."""
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


def kept_bytes(graph: Graph, ctx: Context) -> int:
    """Return the bytes that a rank keeps per microbatch for the whole graph, at the layout's price of a byte."""
    keeper = Keeper(*_on_one_stage(graph, (), ctx))
    keeper.mark([_rate(ctx.byte_price)])
    return sum(storage.nbytes for storage in keeper.held().get(0, ()))


def _rate(price: float) -> Rate:
    return Rate(price, price, 0.0)


def _on_one_stage(graph: Graph, backbone: Sequence[Node], ctx: Context) -> tuple[Graph, Context]:
    """Return a LOCAL copy of a graph, all of it on one stage, and its context."""
    copy, copies = copy_nodes(graph)
    for node in copy.nodes:
        note(node).stages = (0,)
    for i, node in enumerate(backbone):
        note(copies[node]).position = i
    # The groups may be those of another copy: a node has the same name in all of them.
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


def read_from_outside(result: Node) -> set[Node]:
    """Return the operands of a fused operator; `result` is the last of the operators that it replaces."""
    inner: list[Node] = [result]
    outside: set[Node] = set()
    while inner:
        for operand in inner.pop().all_input_nodes:
            if note(operand).fused.is_inner:
                inner.append(operand)
            else:
                outside.add(operand)
    return outside


class TooFull(PlanError):
    """No cut leaves every rank within its memory: the fullest one exceeds it by `excess` bytes."""

    excess: float = 0.0


def excess_bytes(cut: Cut, ctx: Context) -> float:
    """Return the bytes by which the fullest rank exceeds its memory."""
    return max(max(ctx.needed_bytes(cut), default=0.0) - ctx.machine.memory, 0.0)


def too_full(needed: float, ctx: Context, which: str) -> TooFull:
    """Make the error for a rank that would hold more than its memory, with the options that are left to try."""
    fact = f"with {which}, the fullest rank takes {_size(needed)} and has {_size(ctx.machine.memory)}"
    parts = "parameters, gradients, AdamW's two moments; activations of the microbatches in flight"
    if ctx.working:
        parts += f"; up to {_size(max(ctx.working))} between operators"
    fact += f" ({parts})"
    options = ctx.options
    left = {
        "sequence_parallel='auto'": ctx.mesh.value_ranks > 1 and not options.sequence_parallel,
        "recompute='auto'": options.recompute.what != "auto",
        "zero=1 to 3": ctx.mesh.gradient_ranks > 1 and options.zero.stage in (0, 1, 2),
    }
    remedies = ["a larger t or p", "smaller microbatches (a larger num_microbatches)"]
    remedies += ["a schedule with fewer of them in flight (1f1b)", *(name for name in left if left[name])]
    error = TooFull("memory", fact, f"{', '.join(remedies)}, or more memory")
    error.excess = max(needed - ctx.machine.memory, 0.0)
    return error


def _size(nbytes: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes:,.0f} bytes"


def cut_of(ctx: Context) -> Cut:
    """Return the cut that the passes found, with saved bytes, and step seconds including recomputation."""
    cut = ctx.found.cut.with_kept(ctx.found.kept, ctx.live, ctx.ranks)
    if ctx.makespan is None:
        return replace(cut, makespan=max(cut.rank_seconds))
    stages = [own + links for own, links in zip(cut.seconds, cut.link_seconds, strict=True)]
    return replace(cut, makespan=ctx.makespan(stages, cut.again_seconds))
