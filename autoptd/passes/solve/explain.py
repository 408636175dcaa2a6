"""Why an operator or a parameter is split as it is, and what every other way would have cost.

In: the solver's answer, and the path of a module. Out: text. An alternative's price is that of the best whole plan which has
it, less that of the chosen plan: seconds per microbatch, forward and backward, with memory priced in (`ir/machine.py`). Layers
that repeat are decided together, so the price is that of one of them if all change alike.

    explain_split(assignment, "transformer.h.3.mlp.c_fc")
    # transformer.h.3.mlp.c_fc  linear (gpt.py:65)
    #   chosen    S(tp, dim 2: [3072])  column: 3072 = 4 x 768
    #   +61.2 us  P                     row: its input arrives sharded, 768 = 4 x 192
    #   product: 2*b*h*n3072*s FLOPs forward, a t-th of them on each rank: 9.66e+09
    #   reads aten.layer_norm as R: all-reduce backward, 8*b*h*s*(t - 1)/(W*t) + L seconds: 4.72e-05
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.fx import Node

from autoptd.errors import PlanError
from autoptd.ir.layout import Layout
from autoptd.ir.notes import note, op_name
from autoptd.ir.steps import Step
from autoptd.ir.types import CONVERSIONS
from autoptd.passes.ops.costs import flops
from autoptd.passes.solve.assign import Assignment, Problem
from autoptd.passes.solve.eliminate import TableTooLarge, minimize
from autoptd.passes.solve.strategies import Strategy
from autoptd.passes.solve.symbols import Symbols
from autoptd.program.calls import LOCAL_WORK

SHOWN = 8
KEPT = (
    "sequence_parallel=True: what tp splits without it stays split; only what stands between may be split by tokens. "
    '"auto" may split all of it otherwise'
)


@dataclass(frozen=True)
class Alternative:
    """A strategy of a node, and what the best plan with it costs more than the chosen plan, in seconds per microbatch."""

    strategy: Strategy
    seconds: float
    is_chosen: bool


def alternatives(problem: Problem, node: Node) -> list[Alternative]:
    """All strategies of `node`, the chosen first, then by price: infinite where no plan has it, nan where none was found."""
    variable = problem.variable[node]
    alike = Counter(problem.variable.values())[variable]
    least = problem.price(problem.answer)
    found = []
    for i, strategy in enumerate(problem.strategies[node]):
        more = 0.0
        if i != problem.answer[variable]:
            only = np.full(problem.choices[variable], math.inf)
            only[i] = 0.0
            try:
                answer = minimize(problem.choices, [*problem.factors, ((variable,), only)])
            except TableTooLarge:
                more = math.nan
            else:
                more = (problem.price(answer) - least) * 1e-12 / alike if answer[variable] == i else math.inf
        found.append(Alternative(strategy, more, i == problem.answer[variable]))
    return sorted(found, key=lambda one: (not one.is_chosen, math.isnan(one.seconds), one.seconds))


@dataclass(frozen=True)
class Formula:
    """A cost as an expression in named sizes: what it is of, its unit, and the number that was minimised."""

    what: str
    expression: Any
    unit: str
    number: float

    def __str__(self) -> str:
        return f"{self.what} {self.expression} {self.unit}: {self.number:.3g}"


def formulas(assignment: Assignment, symbols: Symbols, node: Node) -> list[Formula]:
    """What a matrix product costs, and every conversion of what it reads and gives."""
    assert assignment.splitter is not None
    split = any(types.shards for types in assignment.strategies[node].needs.values())
    share = ", a t-th of them on each rank" if split else ", on every rank"
    found = [Formula("product:", symbols.flops(node), f"FLOPs forward{share}", flops(node))]
    reads = [(f"reads {_name(one)}", one, types) for one, types in assignment.strategies[node].needs.items()]
    gives = [("gives", node, one.needs[node]) for one in assignment.strategies.values() if node in one.needs]
    for what, value, types in dict.fromkeys(reads + gives):
        source = note(value).layout.over(assignment.axis)
        for target in assignment.route(value, types):
            path = assignment.splitter.path(source, target) or ()
            expression = sum(symbols.conversion(value, step) for step in path)
            number = assignment.cost(value, source, target)
            found.append(Formula(_work(what, path, target), expression, "seconds", number))
            source = target
    return found


def _name(node: Node) -> str:
    return note(node).name or op_name(node).removeprefix("aten.")


def _work(what: str, path: Sequence[Step], target: Layout) -> str:
    """`reads layer_norm as R: all-reduce backward,`."""
    rows = [CONVERSIONS[step.before.kind, step.after.kind] for step in path]
    kinds = [
        (kind, phase)
        for row in rows
        for kind, phase in ((row.forward, "forward"), (row.backward, "backward"))
    ]
    kinds = [(kind, phase) for kind, phase in kinds if kind != "none"]
    far = [(kind, phase) for kind, phase in kinds if kind not in LOCAL_WORK]
    shown = ", ".join(f"{kind} {phase}" for kind, phase in far or kinds)
    return f"{what} as {target.letter}: {shown or 'nothing'},"


def explain_split(assignment: Assignment, path: str, remark: str = "") -> str:
    """Return what was decided for the parameters and matrix products of the module at `path` (or one parameter), and why.

    `remark` is said of the whole plan, at the end.
    """
    problem = assignment.problem
    if problem is None:
        return f"{path}: t=1, nothing is split\n"
    words = [_path(node).split(".") for node in problem.variable]
    named = {".".join(parts[:i]): None for parts in words for i in range(1, len(parts) + 1)}
    here = [node for node in problem.variable if _path(node) == path or _path(node).startswith(f"{path}.")]
    if not here:
        near = difflib.get_close_matches(path, named, n=3, cutoff=0.3)
        raise PlanError(path, "no such module or parameter depends on tp", f"for example {', '.join(near)}")
    told = [node for node in here if note(node).kind == "param" or flops(node)] or here[:SHOWN]
    assert assignment.splitter is not None
    symbols = Symbols(assignment.splitter, assignment.letters)
    lines, shown = [], []
    for node in told:
        costs = formulas(assignment, symbols, node) if flops(node) else []
        lines += [*_lines(problem, node), *(f"  {one}" for one in costs)]
        shown += [one.expression for one in costs]
    legend = [f"where {symbols.legend(*shown)}"] if shown else []
    remarks = [remark] if remark else []
    if assignment.splitter.kept is not None:
        remarks.append(KEPT)
    return "\n".join([*lines, *legend, *remarks]) + "\n"


def _path(node: Node) -> str:
    return note(node).name if note(node).kind == "param" else note(node).module


def _lines(problem: Problem, node: Node) -> list[str]:
    record = note(node)
    what = "parameter" if record.kind == "param" else op_name(node).removeprefix("aten.")
    lines = [f"{_path(node)}  {what}" + (f" ({record.source})" if record.source else "")]
    rows = [
        (_price(one), one.strategy.gives.text(record.dims), one.strategy.why)
        for one in alternatives(problem, node)
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines += [f"  {price:{widths[0]}}  {kind:{widths[1]}}  {why}" for price, kind, why in rows[:SHOWN]]
    return [*lines, f"  and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else lines


def _price(one: Alternative) -> str:
    if one.is_chosen:
        return "chosen"
    if math.isnan(one.seconds):
        return "not found"
    return "impossible" if math.isinf(one.seconds) else f"+{1e6 * one.seconds:.3g} us"


__all__ = ["Alternative", "alternatives", "explain_split"]
