"""Give the reason of a conversion: in Megatron's terms, or as the cost of the alternative where the solver
chose by cost.

In: the solver's assignment over an axis, a conversion, and the first reader of the result. Out: the reason
shown in emitted files, dumps, tables and plots.

    Reasons(assignment)(c_fc_input, step, linear)     # "column-parallel input: gradient all-reduced over tp"
    Reasons(assignment)(c_proj_bias, step, linear)    # "bias added on tp rank 0 only"
    Reasons(assignment)(c_proj, step, add)            # "row-parallel output: partial sums all-reduced over tp"
"""

from __future__ import annotations

import math

from torch.fx import Node

from autoptd.ir.layout import Step
from autoptd.ir.notes import note
from autoptd.ir.operators.table import operator_of
from autoptd.ir.types import CONVERSIONS, ValueType
from autoptd.passes.reader_names import reader_name
from autoptd.passes.solve.assignment import Assignment
from autoptd.passes.solve.ties import Strategy

# Verbs for the effect of a collective on a value, or on its gradient.
DONE = {
    "all-reduce": "all-reduced",
    "all-gather": "all-gathered",
    "reduce-scatter": "reduce-scattered",
    "all-to-all": "exchanged",
}
# Operators that only pass a value on: the reason names the operator that computes with it.
PASSED_ON = ("fold", "turn", "pieces", "same", "cast")
# A cost too small to print.
MIN_SECONDS = 5e-8


class Reasons:
    """The reasons of the conversions of one assignment."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._axis = assignment.axis
        # Repeated layers begin with a sum from the embedding or from the previous layer: the reason must fit
        # both.
        self._entering = {*assignment.enters, *assignment.enters.values()}
        self._prices: dict[int, str] = {}

    def __call__(self, source: Node, step: Step, reader: Node) -> str:
        """Return why `step` is inserted between a value and its first reader."""
        after = step.after.kind
        if after == "R":
            return self._of_input(step, reader)
        if after == "P":
            return self._of_addend(source, step, reader)
        if step.before.kind == "P":
            return self._of_sum(source, step, reader)
        if after == "S":
            return self._of_shard(source, step, reader)
        return self._of_whole(source, step, reader)

    def _of_input(self, step: Step, reader: Node) -> str:
        """Return the reason for the whole input of a split operator, whose gradient is a partial sum."""
        what = (
            "column-parallel input"
            if self._why(reader).startswith("column")
            else f"input of a split {_name(reader)}"
        )
        row = CONVERSIONS[step.before.kind, step.after.kind]
        work = [DONE[row.forward]] if row.forward in DONE else []
        work += [f"gradient {DONE[row.backward]}"] if row.backward in DONE else []
        return f"{what}: {', '.join(work)} over {self._axis}"

    def _of_addend(self, source: Node, step: Step, reader: Node) -> str:
        """Return the reason for an operand of a pending sum, which must be added once."""
        if step.before.kind in ("S", "E"):
            return f"{_name(reader)} works on partial sums: a rank's part among zeros"
        if note(source).kind == "param" and operator_of(reader).factors:
            return f"bias added on {self._axis} rank 0 only"
        return f"added on {self._axis} rank 0 only, as {_name(reader)} works on partial sums"

    def _of_sum(self, source: Node, step: Step, reader: Node) -> str:
        """Return the reason for ending a partial sum."""
        why = "" if source in self._entering else self._why(source)
        if step.after.kind == "S":
            return f"partial sums reduce-scattered over {self._axis}: {self._of_shard(source, step, reader)}"
        if why.startswith("row"):
            return f"row-parallel output: partial sums all-reduced over {self._axis}"
        if why.startswith("split by vocabulary"):
            return f"vocabulary-parallel embedding: partial sums all-reduced over {self._axis}"
        return f"partial sums all-reduced over {self._axis} for {_name(reader)}"

    def _of_shard(self, source: Node, step: Step, reader: Node) -> str:
        """Return the reason for sharding a value, or for sharding it along another dim."""
        name = _name(reader)
        if self._is_by_tokens(source, step.after):
            return f"{'residual' if name == 'add' else name} is token-sharded"
        if self._is_by_tokens(source, step.before):
            return f"{name} needs all tokens"
        return f"{name} works on a shard"

    def _is_by_tokens(self, node: Node, kind: ValueType) -> bool:
        splitter = self._assignment.splitter
        if splitter is None or kind.kind != "S" or not splitter.axes.has(node):
            return False
        return id(splitter.axes.atoms(node, kind.dim)[kind.atom]) in splitter.tokens

    def _of_whole(self, source: Node, step: Step, reader: Node) -> str:
        """Return the reason for gathering a value: its reader has no alternative, or a more expensive one."""
        name = _name(reader)
        if CONVERSIONS[step.before.kind, step.after.kind].forward not in DONE:
            return f"{name} is computed in full on every {self._axis} rank"
        # A view could be split too, with the gather after it, so the alternative is that of the computing
        # operator.
        operand, user = _used(source, reader)
        problem = self._assignment.problem
        if problem is None or user not in problem.variable:
            return f"{name} is computed in full on every {self._axis} rank"
        variable = problem.variable[user]
        if variable not in self._prices:
            self._prices[variable] = self._priced(operand, user)
        return self._prices[variable]

    def _priced(self, source: Node, reader: Node) -> str:
        problem, name = self._assignment.problem, _name(reader)
        assert problem is not None

        def splits(strategy: Strategy) -> bool:
            return bool(strategy.needs[source].shards) if source in strategy.needs else False

        extra = problem.cheapest_with(reader, splits)
        if math.isinf(extra):
            return f"{name} cannot be split over {self._axis}"
        split = "vocabulary-parallel loss" if name == "loss" else f"split {name}"
        # NaN: the search for the best alternative was abandoned.
        if not extra >= MIN_SECONDS:
            return f"no slower than a {split}"
        return f"{1e6 * extra:.2g} us cheaper than a {split}"

    def _why(self, node: Node) -> str:
        strategy = self._assignment.strategies.get(node)
        return strategy.why if strategy else ""


def _used(operand: Node, reader: Node) -> tuple[Node, Node]:
    """Return the operator that computes with a value, past those that only rearrange it, and its operand."""
    while reader.op == "call_function" and operator_of(reader).moves in PASSED_ON and reader.users:
        operand, reader = reader, next(iter(reader.users))
    return operand, reader


def _name(reader: Node) -> str:
    name = reader_name(_used(reader, reader)[1])
    return "loss" if name in ("the loss", "cross_entropy_loss") else name
