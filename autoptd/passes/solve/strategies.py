"""The ways to run an operator, and to store a parameter, over a mesh axis: the solver chooses among them.

In: a node, and a `Splitter`, which tells what the axis may split. Out: `Strategy`s, each with the types of operands and result,
seconds, and a reason in Megatron's terms, which comments, pictures and `explain` show.

    make_strategies(node, splitter)[0].why      # "whole on every rank"
"""

from __future__ import annotations

import math
from functools import partial

from torch.fx import Node

from autoptd.ir.expert_mm import NAME as EXPERT_MM
from autoptd.ir.layout import Layout
from autoptd.ir.notes import note, op_name
from autoptd.ir.operators.record import CLASSES, QUERIES, operands
from autoptd.ir.operators.table import addends, linear_groups, operator_of
from autoptd.ir.types import I, P, R, ValueType, division_text, shard_size
from autoptd.passes.ops.costs import conversion_seconds
from autoptd.passes.solve.experts import expert_strategies, product_seconds
from autoptd.passes.solve.splits import (
    REDUCED_FORMS,
    Split,
    Splitter,
    work_parts,
)
from autoptd.passes.solve.ties import WHOLE, Strategies, Strategy

# A parameter's gradient is summed once per step, and so for about this many microbatches.
MICROBATCHES_PER_STEP = 8


# The number of reductions of one value per row, in forward and backward, within local forms.
REDUCTIONS = {"vocab_cross_entropy": 3, "classes_logsumexp": 2, "classes_argmax": 2}
REDUCTIONS |= {"classes_log_softmax": 3, "classes_softmax": 3}


def strategies_of(splitter: Splitter, same: dict[Node, Node]) -> Strategies:
    """Return the strategies of all nodes over an axis, made on first use; `same`: see `Ties`."""
    return Strategies(partial(make_strategies, splitter=splitter), same)


def make_strategies(node: Node, splitter: Splitter) -> list[Strategy]:
    """Return all ways to run an operator, or to store a parameter, in a fixed order that breaks ties: whole ones first."""
    strategies = _every_strategy(node, splitter)
    if splitter.kept is None:
        return strategies
    without = _every_strategy(node, splitter.kept.splitter)
    return [strategy for strategy in strategies if splitter.kept.allows(node, strategy, without)]


def _every_strategy(node: Node, splitter: Splitter) -> list[Strategy]:
    if note(node).kind == "param":
        return parameter_strategies(node, splitter)
    return (
        _whole_strategies(node, splitter)
        + _split_strategies(node, splitter)
        + expert_strategies(node, splitter, splitter.expert_rows)
        + _pending_strategies(node, splitter)
    )


def _whole(operand: Node, splitter: Splitter, kind: ValueType = R) -> Layout:
    """Return the layout of a whole operand; a value that depends on no parameter has no gradient, and is I."""
    return splitter.over(kind if note(operand).of_params else I)


def _whole_strategies(node: Node, splitter: Splitter) -> list[Strategy]:
    # Backward of a linear operator may run on partial gradients, so its result may be R.
    kinds = (I, R) if splitter.axes.is_linear(node) and note(node).of_params else (I,)
    seconds = splitter.seconds(node) + splitter.repeating(node)
    strategies = []
    for kind in kinds:
        needs = {operand: _whole(operand, splitter, kind) for operand in operands(node)}
        strategies.append(Strategy(needs, splitter.over(kind), seconds, WHOLE))
    return strategies


def _split_strategies(node: Node, splitter: Splitter) -> list[Strategy]:
    machine = splitter.machine
    strategies = []
    for split in splitter.splits(node):
        needs = {operand: _whole(operand, splitter) for operand in operands(node)}
        # Operands without the letter stay whole, with partial gradients (R).
        needs |= {operand: split.needs(operand) for operand in operands(node) if operand in split.carriers}
        pieces = math.prod(splitter.mesh.degree(axis) for axis, _ in split.letters)
        seconds = splitter.split_seconds(node, work_parts(node, split.carriers, pieces))
        gives = split.gives or splitter.over(P)
        if op_name(node) == EXPERT_MM and node in splitter.expert_rows:
            seconds = product_seconds(node, splitter, needs, gives)
        if split.form in REDUCED_FORMS:
            gives = splitter.over(I)
        if split.is_contracted or split.form.startswith(CLASSES):
            # They reduce values that are small compared with the operand.
            seconds += REDUCTIONS.get(split.form, 0) * machine.latency
        if split.is_contracted and not split.form:
            # One rank adds the bias.
            needs |= dict.fromkeys(addends(node, set(split.carriers)), splitter.over(P))
        origin = splitter.axes.origin(node)
        why = why_split(node, split, splitter.name_of(node, split), pieces, splitter.degree)
        why = f"{origin}: {why}" if origin else why
        form = split.form if split.is_contracted or split.form.startswith((CLASSES, QUERIES)) else ""
        strategies.append(Strategy(needs, gives, seconds, why, form))
    return strategies


def _pending_strategies(node: Node, splitter: Splitter) -> list[Strategy]:
    seconds = splitter.seconds(node) + splitter.repeating(node)
    # Half a latency keeps sums from staying pending where that saves nothing.
    if operator_of(node).is_sum:
        seconds += splitter.machine.latency / 2
    strategies = []
    # Adds and scaling may run on partial sums; the all-reduce comes later, or once for several sums (the two branches of a
    # parallel residual).
    for group in linear_groups(node):
        if any(note(operand).of_params for operand in group):
            needs = {operand: _whole(operand, splitter) for operand in operands(node)}
            needs |= dict.fromkeys(group, splitter.over(P))
            strategies.append(Strategy(needs, splitter.over(P), seconds, "linear in a pending sum"))
    return strategies


def parameter_strategies(node: Node, splitter: Splitter) -> list[Strategy]:
    """Return the ways to store a parameter: whole (I), whole with a gradient that is summed once per step (R), or sharded."""
    machine, mesh, nbytes = splitter.machine, splitter.mesh, splitter.nbytes(node)
    keep = nbytes * machine.per_parameter_byte

    def sum_once(types: Layout) -> float:
        """Return the seconds of the sums of a gradient, per microbatch."""
        part, seconds = nbytes / types.pieces(mesh), 0.0
        for axis, kind in types.types:
            if kind == R:
                seconds += conversion_seconds(I, R, part, mesh.degree(axis), machine) / MICROBATCHES_PER_STEP
        return seconds

    # I comes first: on equal price, no gradient needs a sum.
    strategies = [Strategy({}, splitter.over(I), keep, "replicated")]
    summed = splitter.over(R)
    strategies.append(
        Strategy({}, summed, keep + sum_once(summed), f"replicated, gradient summed over {splitter.axis}")
    )
    for types in splitter.shards(node):
        size = math.prod(note(node).dims[kind.dim][kind.atom] for _, kind in types.shards)
        pieces = types.pieces(mesh)
        padded = ", padded" if size % pieces else ""
        why = f"sharded{padded}: {division_text(size, pieces)}" + alike_text(pieces, splitter.degree)
        seconds = keep / size * shard_size(size, pieces) + sum_once(types)
        strategies.append(Strategy({}, types, seconds, why))
    return _pinned(node, strategies, splitter) if node in splitter.pins else strategies


def _pinned(node: Node, strategies: list[Strategy], splitter: Splitter) -> list[Strategy]:
    """Return the strategies of a parameter that its pin allows; PlanError if there are none."""
    pin, dims = splitter.pins[node], note(node).dims
    allowed = [strategy for strategy in strategies if pin.allows(strategy.gives, dims, splitter.mesh)]
    if not allowed:
        raise pin.refused(dims, splitter.degree)
    return allowed


def why_split(node: Node, split: Split, name: str, pieces: int, t: int) -> str:
    """Return the reason of a split by `name` into `pieces` over `t` ranks: "split by tokens: 16 = 2 x 8"."""
    each, padded = division_text(split.size, pieces), ", padded" if split.size % pieces else ""
    each += alike_text(pieces, t)
    row, column = f"row: its input arrives sharded, {each}", f"column{padded}: {each}"
    # Megatron's terms, as in its paper: the weight's columns or rows in [in, out] order.
    if op_name(node) == "aten.linear" and split.name in ("o", "i"):
        return column if split.name == "o" else row
    # {False}: a product of two activations, such as q k^T, without columns or rows of a weight.
    are_weights = {note(operand).kind == "param" for operand in split.carriers}
    if operator_of(node).factors and are_weights != {False}:
        if split.is_contracted:
            return row
        if are_weights == {True}:
            return column
    return f"split by {name}{padded}: {each}"


def alike_text(pieces: int, t: int) -> str:
    """Tell how many ranks have the same piece, if there are fewer pieces than ranks."""
    return f", {t // pieces} of {t} ranks share each" if pieces < t else ""
