"""Hold the numbers and constants of a trace against the number of rows: what follows it would be wrong in a microbatch.

In: a graph with the types of the batch, and a second trace with the rows of the whole batch. Out: a note at every operator
that takes the numbers of the whole batch; PlanError for what else follows its size.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.errors import PlanError
from autoptd.ir.notes import (
    note,
    op_name,
    shape,
    site,
    tensor,
    value,
)
from autoptd.ir.operators.record import argument, operands
from autoptd.ir.operators.table import is_pointwise, operator_of
from autoptd.passes.axes.constants import Constants
from autoptd.passes.solve.batch_types import NUMBER_REMEDY, RULE_REMEDY


def check_literals(graph: Graph, whole: Graph, constants: Constants, *, traces_all: bool) -> None:
    """Compare traces of T rows and of the whole batch: sizes may differ where the batch is, any other number may not.

    A literal that follows the batch size (`loss / x.shape[0]`) would be wrong in every microbatch: what computes entry by
    entry takes that of the whole batch (`traces_all`: the first trace has all of its rows). Constants may be computed from
    it as long as what the rest of the model reads of them is the same in both traces.
    """
    ours, theirs = list(graph.nodes), list(whole.nodes)
    if [(n.op, str(n.target)) for n in ours] != [(n.op, str(n.target)) for n in theirs]:
        raise PlanError("model", "its operators depend on the number of rows in the batch", RULE_REMEDY)
    # 2 rows in the trace and 32 in the batch: every batch dim must grow 16-fold, [b * s, h] too.
    batches = [(shape(a)[0], shape(b)[0]) for a, b in zip(ours, theirs, strict=True) if _is_batch(a)]
    growth = max((Fraction(whole_rows, rows) for rows, whole_rows in batches), default=Fraction(1))
    for node, other in zip(ours, theirs, strict=True):
        _check_made(node, other)
        # What is made of all rows, in a trace of all rows, has the numbers and sizes of one device.
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


def _takes_numbers(node: Node, other: Node) -> bool:
    """Tell whether numbers of an operator may follow the batch size, as in `loss / x.shape[0]`.

    What computes entry by entry does the same to every row, wherever that is, and what keeps a sum over samples pending is
    linear in it.
    """
    pairs = zip(_literals(node), _literals(other), strict=True)
    # What is of a microbatch would need that one's numbers.
    if note(node).rows.of_microbatch:
        return False
    are_numbers = all(type(a) is type(b) and type(a) in (int, float) for a, b in pairs if a != b)
    return are_numbers and is_pointwise(node) and not operator_of(node).is_random


def _is_slice_elsewhere(node: Node) -> bool:
    """Tell whether a node slices another dim than the batch: its bounds may not follow the batch size at all."""
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
    """Raise PlanError if what the rest of the model reads of a constant depends on the number of rows."""
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
            fact = f"a constant of shape {shape(other)} follows the number of rows, and its values cannot be looked at"
            remedy = "make it without the batch dim (it is broadcast), or pass it as an input"
            raise PlanError(site(node), f"{fact} (on meta, or too large)", remedy)
        if not are_equal:
            raise PlanError(
                site(node), "a constant is computed from the number of rows in the batch", NUMBER_REMEDY
            )


def _is_batch(node: Node) -> bool:
    return note(node).kind == "input" and note(node).layout.batch.kind == "S"


def _check_growth(node: Node, other: Node, growth: Fraction) -> None:
    """Check that a value is `growth` times as long in the dim where it carries the batch, and as long in all others.

    A sum over the batch has no such dim: were any of its dims the batch's, its rule would have taken another for the batch.
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
            f"its shape {shape(node)} depends on the batch size in a way no rule explains",
            RULE_REMEDY,
        )


def _literals(node: Node) -> list[Any]:
    """Return all arguments of a node that are not values of the graph."""
    literals: list[Any] = []

    def visit(arg: Any) -> None:
        if isinstance(arg, (list, tuple)):
            for item in arg:
                visit(item)
        elif isinstance(arg, dict):
            visit(list(arg.values()))
        elif not isinstance(arg, Node):
            literals.append(arg)

    visit(node.args)
    visit(node.kwargs)
    return literals


__all__ = ["check_literals"]
