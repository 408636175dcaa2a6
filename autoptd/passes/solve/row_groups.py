"""Find the rows of a batch that belong together: pairs of neighbours, or a row and that with the same place in the other half.

In: a graph with named axes, the inputs that carry the batch. Out: which atom of their dim 0 the batch is, noted at them. The
rows of a DPO batch, chosen and rejected, are `n x [2]` or, of `chunk(2, 0)`, `2 x [n]`: replicas and microbatches divide n, so
that a microbatch has the rows i and i + B/2. Every atom is tried on a copy of the graph; the first that keeps groups apart is
it.

    place_batch(graph, ctx)     # 1: the second atom of 2 x [n]
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.notes import copy_graph, note, placeholders, shape
from autoptd.passes.axes.axes import Axes
from autoptd.passes.axes.constants import Constants
from autoptd.passes.context import Context
from autoptd.passes.solve.batch_types import ONE_REMEDY, MixedSamples, assign_batch
from autoptd.passes.solve.literals import check_literals


class RowGroups(PlanError):
    """A microbatch of `rows` has no whole number of the groups of rows that the model takes together; users get a PlanError."""

    def __init__(self, site: str, group: int, rows: int) -> None:
        self.group = group
        fact = f"the model takes {group} rows together, and a microbatch has {rows}"
        super().__init__(site, fact, f"num_microbatches= for a multiple of {group} rows in each microbatch")


def place_batch(graph: Graph, ctx: Context) -> int:
    """Return the atom of the inputs' dim 0 that replicas and microbatches divide; note the blocks that it has.

    PlanError where none keeps the samples apart, and there are several pieces; RowGroups where they hold no whole group.
    """
    inputs = [node for node in placeholders(graph, "input") if note(node).name in ctx.batched]
    most = max(inputs, key=lambda node: len(note(node).dims[0]), default=None)
    if most is None or len(note(most).dims[0]) < 2:
        return 0
    sizes = note(most).dims[0]
    # With one microbatch nothing else can give way: a replica has whole groups, or those of another atom.
    tried = [atom for atom, size in enumerate(sizes) if not (ctx.mixes and size % ctx.pieces)]
    fits = (atom for atom in tried if _keeps_apart(graph, ctx, atom))
    atom = next(fits, None)
    if atom is None:
        # One piece may mix whatever it likes.
        if ctx.pieces == 1:
            return 0
        raise MixedSamples(note(most).name, f"the model folds the batch dim into {sizes}", ONE_REMEDY)
    group = shape(most)[0] // sizes[atom]
    if ctx.rows % group:
        raise RowGroups(note(most).name, group, ctx.rows)
    _note_blocks(inputs, math.prod(sizes[:atom]))
    return atom


def _note_blocks(inputs: list[Node], blocks: int) -> None:
    for node in inputs:
        note(node).rows = replace(note(node).rows, blocks=blocks)


def _keeps_apart(graph: Graph, ctx: Context, atom: int) -> bool:
    """Tell whether the types of the batch can be assigned where it is an atom of the inputs' dim 0."""
    trial, constants = copy_graph(graph), Constants(ctx.buffers)
    try:
        assign_batch(
            trial, Axes(trial), set(ctx.batched), max(ctx.pieces, 2), constants, atom, mixes=ctx.mixes
        )
        if ctx.second is not None:
            check_literals(trial, ctx.second, constants, traces_all=ctx.traces_all)
    except PlanError:
        return False
    return True


__all__ = ["RowGroups", "place_batch"]
