"""Where a dropout's value carries the rows of the batch: its mask is numbered by them.

In: a graph whose batch types are assigned. Out: `note(node).extra["rows"]` of every dropout, an S or I. A step that is one
piece has no batch types, and yet must draw the masks of every other division of the batch: they are assigned on a copy. A
model that mixes samples has one division only, and no rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.notes import copy_graph, note, op_name, ops, shape, site
from autoptd.ir.types import I, ValueType
from autoptd.passes.axes.axes import Axes
from autoptd.passes.axes.constants import Constants
from autoptd.passes.solve.batch import assign_batch

MOST_COLUMNS = 1 << 32  # the numbers that a mask can tell apart


def place_rows(graph: Graph, batched: set[str], pieces: int, buffers: Mapping[str, torch.Tensor]) -> None:
    """Fill `rows` of every dropout in `graph`; `batched` are the inputs that carry the batch."""
    found = [node for node in ops(graph) if op_name(node) == "aten.dropout"]
    if not found:
        return
    for node, kind in zip(found, _types(graph, found, batched, pieces, buffers), strict=True):
        note(node).extra["rows"] = kind if kind.kind == "S" else I
        columns = math.prod(shape(node)) // (
            _size(note(node).dims[kind.dim], kind.atom) if kind.kind == "S" else 1
        )
        if columns > MOST_COLUMNS:
            fact = (
                f"{columns:,} elements per row of the batch are more than the 2**32 that a mask tells apart"
            )
            raise PlanError(site(node), fact, "dropout on a smaller value, or p=0")


def _size(atoms: tuple[int, ...], atom: int) -> int:
    return atoms[atom] if atoms else 1  # a dim of size 1 has no atoms


def _types(
    graph: Graph, found: list[Node], batched: set[str], pieces: int, buffers: Mapping[str, torch.Tensor]
) -> list[ValueType]:
    if pieces > 1:
        return [note(node).layout.batch for node in found]
    trial = copy_graph(graph)
    copies = dict(zip(graph.nodes, trial.nodes, strict=True))
    try:
        assign_batch(trial, Axes(trial), batched, 2, Constants(buffers))
    except PlanError:
        return [I for _ in found]
    return [note(copies[node]).layout.batch for node in found]
