"""Find the dim of a dropout's value that carries the batch: its mask is numbered by sample.

In: a graph whose batch types are assigned. Out: `note(node).draw.rows` of every dropout, an S or I.

A step of one piece (one microbatch, one replica) has no batch types, but must draw the same masks as a step of several: types
are assigned on a copy of the graph. What is made of all rows at once is numbered as a whole, and gets I.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.noise import is_draw
from autoptd.ir.notes import copy_graph, note, ops, shape, site
from autoptd.ir.types import I, ValueType
from autoptd.passes.axes.axes import Axes
from autoptd.passes.axes.constants import Constants
from autoptd.passes.solve.batch_types import assign_batch

# A mask has 32 bits for the number of an element within a sample.
MAX_COLUMNS = 1 << 32


def place_rows(
    graph: Graph, batched: set[str], pieces: int, buffers: Mapping[str, torch.Tensor], atom: int = 0
) -> None:
    """Fill `rows` of every dropout in `graph`; `batched` are the inputs that carry the batch, as `atom` of their dim 0.

    Raises PlanError for a dropout with too many elements per sample.
    """
    dropouts = [node for node in ops(graph) if is_draw(node)]
    if not dropouts:
        return
    kinds = _batch_types(graph, dropouts, batched, pieces, buffers, atom)
    for node, kind in zip(dropouts, kinds, strict=True):
        rows = 1
        note(node).draw = replace(note(node).draw, rows=I)
        if kind.kind == "S":
            rows = _size(note(node).dims[kind.dim], kind.atom)
            # Where rows are numbered within a half, every dropout's must be.
            if atom and not kind.atom:
                fact = f"its rows are not in {note(node).dims[kind.dim]}, as those of the inputs are"
                raise PlanError(
                    site(node), fact, "neighbouring rows in pairs, view(-1, 2), in place of halves"
                )
            note(node).draw = replace(note(node).draw, rows=kind)
        columns = math.prod(shape(node)) // rows
        if columns > MAX_COLUMNS:
            fact = (
                f"{columns:,} elements per row of the batch are more than the 2**32 that a mask tells apart"
            )
            raise PlanError(site(node), fact, "dropout on a smaller value, or p=0")


def _size(atoms: tuple[int, ...], atom: int) -> int:
    # A dim of size 1 has no atoms.
    return atoms[atom] if atoms else 1


def _batch_types(
    graph: Graph,
    dropouts: list[Node],
    batched: set[str],
    pieces: int,
    buffers: Mapping[str, torch.Tensor],
    atom: int,
) -> list[ValueType]:
    if pieces > 1:
        return [note(node).layout.batch for node in dropouts]
    # As several replicas would have it: a model that mixes samples is run in one microbatch.
    for mixes in (False, True):
        trial = copy_graph(graph)
        copies = dict(zip(graph.nodes, trial.nodes, strict=True))
        try:
            assign_batch(trial, Axes(trial), batched, 2, Constants(buffers), atom, mixes=mixes)
        except PlanError:
            continue
        return [note(copies[node]).layout.batch for node in dropouts]
    return [I] * len(dropouts)
