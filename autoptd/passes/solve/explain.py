"""Explain how an operator or a parameter is split and why, with the price of every alternative.

In: the solver's answer, and the path of a module. Out: text. The price of an alternative is the cost of the best complete plan
with it, minus that of the chosen plan: seconds per microbatch, forward and backward, with memory priced in (`ir/machine.py`).
Repeated layers are decided together: the price is per layer, if all of them change.

    explain_split(ctx.found.assignments, "transformer.h.3.mlp.c_fc")
    # transformer.h.3.mlp.c_fc  linear (gpt.py:65)
    #   chosen    S(tp, dim 2: [3072])  column: 3072 = 4 x 768
    #   +61.2 us  P                     row: its input arrives sharded, 768 = 4 x 192
    #   product: 2*b*h*n3072*s FLOPs forward, 1/t of them on each rank: 9.66e+09
    #   reads aten.layer_norm as R: all-reduce backward, 8*b*h*s*(t - 1)/(W*t) + L seconds: 4.72e-05
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from autoptd.errors import PlanError
from autoptd.ir.layout import Layout, Step
from autoptd.ir.mesh import AXES
from autoptd.ir.notes import note, op_name
from autoptd.ir.types import CONVERSIONS, LOCAL_WORK
from autoptd.passes.ops.costs import flops
from autoptd.passes.solve.assignment import Assignment
from autoptd.passes.solve.problem import Alternative, Problem
from autoptd.passes.solve.symbols import Symbols

MAX_LINES = 8
KEPT_PLAN_REMARK = (
    "sequence_parallel=True: products and parameters stay split as they would be without it, and only operators between them "
    'may be split by tokens; "auto" may split everything differently'
)


@dataclass(frozen=True)
class Formula:
    """A cost as an expression in named sizes, with its subject, its unit, and the number that was minimized."""

    what: str
    expression: Any
    unit: str
    number: float

    def __str__(self) -> str:
        return f"{self.what} {self.expression} {self.unit}: {self.number:.3g}"


def formulas(assignment: Assignment, symbols: Symbols, node: Node) -> list[Formula]:
    """Return the cost of a matrix product, and of every conversion of its operands and its result."""
    assert assignment.splitter is not None
    strategies = assignment.strategies
    split = any(types.shards for types in strategies[node].needs.values())
    share = f", 1/{AXES[assignment.axis].degree} of them on each rank" if split else ", on every rank"
    costs = [Formula("product:", symbols.flops(node), f"FLOPs forward{share}", flops(node))]
    # (subject, value, the types in which it is read)
    reads = [(f"reads {_name(operand)}", operand, types) for operand, types in strategies[node].needs.items()]
    gives = [
        ("gives", node, strategy.needs[node]) for strategy in strategies.values() if node in strategy.needs
    ]
    # Readers that want the same type share one line.
    for what, value, types in dict.fromkeys(reads + gives):
        source = note(value).layout.over(assignment.axis)
        for target in assignment.route(value, types):
            path = assignment.splitter.path(source, target) or ()
            expression = sum(symbols.conversion(value, step) for step in path)
            number = assignment.cost(value, source, target)
            costs.append(Formula(_work(what, path, target), expression, "seconds", number))
            # A route of two steps is two lines: to the shared conversion, and on from there.
            source = target
    return costs


def _name(node: Node) -> str:
    return note(node).name or op_name(node).removeprefix("aten.")


def _work(what: str, path: Sequence[Step], target: Layout) -> str:
    """Describe a conversion: `reads layer_norm as R: all-reduce backward,`. Local work is shown if there is no collective."""
    local, collectives = [], []
    for step in path:
        row = CONVERSIONS[step.before.kind, step.after.kind]
        for kind, phase in ((row.forward, "forward"), (row.backward, "backward")):
            if kind in LOCAL_WORK:
                local.append(f"{kind} {phase}")
            elif kind != "none":
                collectives.append(f"{kind} {phase}")
    return f"{what} as {target.letter}: {', '.join(collectives or local) or 'nothing'},"


def explain_split(assignments: Mapping[str, Assignment], path: str, remark: str = "") -> str:
    """Explain the parameters and matrix products of the module at `path`, or one parameter.

    `assignments` are those of all axes. `remark` is about the whole plan, and comes last. Raises PlanError for a path
    without anything to split.
    """
    texts = []
    for assignment in assignments.values():
        if assignment.problem is not None:
            texts.append(_explain_axis(assignment, assignment.problem, path, remark))
    if not texts:
        degrees = ", ".join(f"{AXES[axis].degree}=1" for axis in assignments)
        return f"{path or 'the model'}: {degrees}, nothing is split\n"
    return "\n".join(texts)


def _explain_axis(assignment: Assignment, problem: Problem, path: str, remark: str) -> str:
    """Explain the decisions over one axis."""
    # With the dot, "h.1" does not include "h.10".
    within = [node for node in problem.variable if f"{_path(node)}.".startswith(f"{path}.")]
    if not within:
        near = difflib.get_close_matches(path, _known_paths(problem), n=3, cutoff=0.3)
        raise PlanError(
            path,
            f"no such module or parameter depends on {assignment.axis}",
            f"for example {', '.join(near)}",
        )
    main_nodes = [node for node in within if note(node).kind == "param" or flops(node)]
    assert assignment.splitter is not None
    symbols = Symbols(assignment.splitter, assignment.letters)
    lines, expressions = [], []
    # A module without weights or products shows its first operators.
    for node in main_nodes or within[:MAX_LINES]:
        lines += _lines(problem, node)
        for cost in formulas(assignment, symbols, node) if flops(node) else []:
            lines.append(f"  {cost}")
            expressions.append(cost.expression)
    if expressions:
        lines.append(f"where {symbols.legend(*expressions)}")
    if remark:
        lines.append(remark)
    if assignment.splitter.kept is not None:
        lines.append(KEPT_PLAN_REMARK)
    lines += assignment.splitter.remarks
    return "\n".join(lines) + "\n"


def _known_paths(problem: Problem) -> list[str]:
    """Return the paths of all parameters and modules of the problem, and of the modules around them."""
    paths: dict[str, None] = {}
    for node in problem.variable:
        names = _path(node).split(".")
        for i in range(1, len(names) + 1):
            paths[".".join(names[:i])] = None
    return list(paths)


def _path(node: Node) -> str:
    return note(node).name if note(node).kind == "param" else note(node).module


def _lines(problem: Problem, node: Node) -> list[str]:
    record = note(node)
    what = "parameter" if record.kind == "param" else op_name(node).removeprefix("aten.")
    lines = [f"{_path(node)}  {what}" + (f" ({record.source})" if record.source else "")]
    rows = []
    for alternative in problem.alternatives(node):
        strategy = alternative.strategy
        rows.append((_price_text(alternative), strategy.gives.text(record.dims), strategy.why))
    price_width = max(len(price) for price, _, _ in rows)
    types_width = max(len(types) for _, types, _ in rows)
    for price, types, why in rows[:MAX_LINES]:
        lines.append(f"  {price:{price_width}}  {types:{types_width}}  {why}")
    if len(rows) > MAX_LINES:
        lines.append(f"  and {len(rows) - MAX_LINES} more")
    return lines


def _price_text(alternative: Alternative) -> str:
    if alternative.is_chosen:
        return "chosen"
    if math.isnan(alternative.seconds):
        return "not found"
    return "impossible" if math.isinf(alternative.seconds) else f"+{1e6 * alternative.seconds:.3g} us"


__all__ = ["explain_split"]
