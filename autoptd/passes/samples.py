"""Assign the samples of a batch: find which atom of the inputs' dim 0 they are, keep them apart, and check numbers.

In: a TRACED graph with named axes, and the context. Out: types over the batch, the dims of dropout masks that carry it, and
notes at operators that take numbers of the whole batch.

Rows that belong together, such as the chosen and rejected ones of a DPO batch, are `n x [2]` or, with `chunk(2, 0)`,
`2 x [n]`. Replicas and microbatches divide n, so that a microbatch has the rows i and i + B/2. Every atom is tried on a copy
of the graph; the batch is the first one that keeps groups apart.

A number in the graph that follows the number of rows (`loss / x.shape[0]`) would be wrong in a microbatch, so the graph is
compared with a second trace, of all rows of the batch.

    assign_samples(graph, axes, ctx)
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from autoptd.errors import PlanError
from autoptd.ir.notes import copy_graph, note, op_name, placeholders, shape, site, tensor, value
from autoptd.ir.operators.record import argument, operands
from autoptd.ir.operators.table import is_pointwise, operator_of
from autoptd.passes.axes.axes import Axes
from autoptd.passes.axes.constants import Constants
from autoptd.passes.context import Context
from autoptd.passes.solve.batch_types import (
    NUMBER_REMEDY,
    ONE_REMEDY,
    RULE_REMEDY,
    MixedSamples,
    RowGroups,
    assign_batch,
    place_rows,
)


def assign_samples(graph: Graph, axes: Axes, ctx: Context) -> None:
    """Fill the types over the batch of every node; PlanError if samples cannot be kept apart."""
    constants = Constants(ctx.buffers)
    atom = place_batch(graph, ctx)
    assign_batch(graph, axes, set(ctx.batched), ctx.pieces, constants, atom, mixes=ctx.mixes)
    place_rows(graph, set(ctx.batched), ctx.pieces, ctx.buffers, atom)
    if ctx.second is not None:
        check_literals(graph, ctx.second, constants, traces_all=ctx.traces_all)


def place_batch(graph: Graph, ctx: Context) -> int:
    """Return the atom of the inputs' dim 0 that replicas and microbatches divide; note its number of blocks.

    PlanError if no atom keeps the samples of several pieces apart; RowGroups if a microbatch has a part of a group.
    """
    inputs = [node for node in placeholders(graph, "input") if note(node).name in ctx.batched]
    most = max(inputs, key=lambda node: len(note(node).dims[0]), default=None)
    if most is None or len(note(most).dims[0]) < 2:
        return 0
    sizes = note(most).dims[0]
    # With one microbatch per replica, each must have whole groups of rows.
    tried = [atom for atom, size in enumerate(sizes) if not (ctx.mixes and size % ctx.pieces)]
    fits = (atom for atom in tried if _keeps_apart(graph, ctx, atom))
    atom = next(fits, None)
    if atom is None:
        # A single piece may mix samples.
        if ctx.pieces == 1:
            return 0
        raise MixedSamples(note(most).name, f"the model folds the batch dim into {sizes}", ONE_REMEDY)
    group = shape(most)[0] // sizes[atom]
    if ctx.rows % group:
        raise RowGroups(note(most).name, group, ctx.rows)
    for node in inputs:
        note(node).rows = replace(note(node).rows, blocks=math.prod(sizes[:atom]))
    return atom


def _keeps_apart(graph: Graph, ctx: Context, atom: int) -> bool:
    """Tell whether the types over the batch can be assigned if it is this atom of the inputs' dim 0."""
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


def check_literals(graph: Graph, whole: Graph, constants: Constants, *, traces_all: bool) -> None:
    """Compare a trace of some rows with that of the `whole` batch: sizes may differ in the dim of the batch, no other number.

    A literal that follows the batch size (`loss / x.shape[0]`) would be wrong in every microbatch: pointwise operators take
    that of the whole batch (not if the first trace has all rows already: `traces_all`). Constants may be computed from the
    batch size if the entries that other operators read are equal in both traces.
    """
    ours, theirs = list(graph.nodes), list(whole.nodes)
    if _wiring(whole) != _wiring(graph):
        raise PlanError("model", "its operators depend on the number of rows in the batch", RULE_REMEDY)
    # 2 rows in the trace and 32 in the batch: every batch dim must grow 16-fold, [b * s, h] too.
    batches = [(shape(a)[0], shape(b)[0]) for a, b in zip(ours, theirs, strict=True) if _is_batch(a)]
    growth = max((Fraction(whole_rows, rows) for rows, whole_rows in batches), default=Fraction(1))
    for node, other in zip(ours, theirs, strict=True):
        _check_made(node, other)
        # An operator that reads all rows, in a trace of all rows, has the numbers and sizes of one device.
        if node.op != "call_function" or note(node).rows.of_all:
            continue
        if constants.is_constant(node):
            _check_constant(node, other, constants)
            continue
        _check_growth(node, other, growth)
        if (not operator_of(node).sizes or _is_slice_elsewhere(node)) and _literals(node) != _literals(other):
            if _takes_numbers(node, other):
                if not traces_all:
                    same = dict(zip(theirs, ours, strict=True)).__getitem__
                    call = map_arg((other.args, other.kwargs), same)
                    note(node).rows = replace(note(node).rows, whole_call=call)
                continue
            raise PlanError(
                site(node),
                f"a number in {op_name(node)} is computed from the number of rows ({_literals(node)})",
                "use mean or sum reductions instead of dividing by the batch size",
            )


def _wiring(graph: Graph) -> list[tuple[Any, ...]]:
    """Return every node's operator and the places of the nodes that it reads, which a branch may pick."""
    places: dict[Node, int] = {}
    found = []
    for node in graph.nodes:
        read: list[int] = []
        map_arg((node.args, node.kwargs), lambda arg, read=read: read.append(places[arg]))
        found.append((node.op, str(node.target), *read))
        places[node] = len(places)
    return found


def _takes_numbers(node: Node, other: Node) -> bool:
    """Tell whether numbers of an operator may follow the batch size, as in `loss / x.shape[0]`.

    A pointwise operator treats every row alike, on any rank, and an operator on a partial sum over samples is linear in it.
    """
    pairs = zip(_literals(node), _literals(other), strict=True)
    # A value of a microbatch alone would need the numbers of that microbatch.
    if note(node).rows.of_microbatch:
        return False
    are_numbers = all(type(a) is type(b) and type(a) in (int, float) for a, b in pairs if a != b)
    return are_numbers and is_pointwise(node) and not operator_of(node).is_random


def _is_slice_elsewhere(node: Node) -> bool:
    """Tell whether a node slices another dim than the batch: then its bounds must not follow the batch size."""
    if op_name(node) != "aten.slice":
        return False
    x = operands(node)[0]
    batch = note(x).layout.batch
    return batch.kind != "S" or batch.dim != argument(node, "dim") % tensor(x).dim()


def _check_made(node: Node, other: Node) -> None:
    """Raise PlanError if a constant made in forward (`torch.tensor(x.shape[0])`) differs between the traces."""
    ours, theirs = _constant_of(node), _constant_of(other)
    if ours is None or theirs is None:
        return
    # A constant on the meta device has no values, but such a model cannot run either.
    has_values = not (ours.is_meta or theirs.is_meta)
    if node.users and all(note(reader).rows.of_all for reader in node.users):
        return
    if ours.shape != theirs.shape or (has_values and not torch.equal(ours, theirs)):
        reader = next(iter(node.users))
        raise PlanError(
            site(reader), "a constant is computed from the number of rows in the batch", NUMBER_REMEDY
        )


def _constant_of(node: Node) -> torch.Tensor | None:
    return note(node).origin.constant if note(node).kind == "buffer" else None


def _check_constant(node: Node, other: Node, constants: Constants) -> None:
    """Raise PlanError if the entries of a constant that other operators read depend on the number of rows."""
    readers = [user for user in node.users if not constants.is_constant(user) and user.op != "output"]
    readers = [user for user in readers if not note(user).rows.of_all]
    places = [note(user).rows.equal.get(node) for user in readers]
    if note(node).layout.batch.kind == "S" or not readers or not constants.follows_rows(node, other):
        return
    for place in dict.fromkeys(places):
        if place is not None and not constants.has_equal_rows(other, place[0]):
            fact = f"{site(node)} differs from row to row of the batch but does not come from the batch"
            raise PlanError(site(readers[0]), fact, "pass it to the model as an input")
        are_equal = constants.are_equal(node, other, None if place is None else place[0])
        if are_equal is None:
            fact = f"a constant of shape {shape(other)} follows the number of rows, and its values cannot be examined"
            remedy = "create it without the batch dim (it is broadcast), or pass it as an input"
            raise PlanError(site(node), f"{fact} (on meta, or too large)", remedy)
        if not are_equal:
            raise PlanError(
                site(node), "a constant is computed from the number of rows in the batch", NUMBER_REMEDY
            )


def _is_batch(node: Node) -> bool:
    return note(node).kind == "input" and note(node).layout.batch.kind == "S"


def _check_growth(node: Node, other: Node, growth: Fraction) -> None:
    """Check that a value is `growth` times as long in the dim that carries the batch, and equally long in all others.

    All dims of a sum over the batch must be equally long: if one followed the batch size, the rule would have contracted the
    wrong dim.
    """
    kind = note(node).layout.batch
    if value(node) is None or not isinstance(tensor(node), torch.Tensor):
        return
    wanted: list[int | Fraction] = list(shape(node))
    if kind.kind == "S":
        wanted[kind.dim] *= growth
    if tuple(wanted) != shape(other):
        raise PlanError(
            site(node),
            f"its shape {shape(node)} depends on the batch size, which its rules do not explain",
            RULE_REMEDY,
        )


def _literals(node: Node) -> list[Any]:
    """Return all arguments of a node that are not values of the graph."""
    literals: list[Any] = []
    map_aggregate(
        (node.args, node.kwargs), lambda arg: None if isinstance(arg, Node) else literals.append(arg)
    )
    return literals
