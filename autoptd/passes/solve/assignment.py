"""The solver's answers, for later passes: the decisions over each axis, and the conversions of values that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from autoptd.ir.layout import Layout, loss_over
from autoptd.ir.notes import note
from autoptd.passes.solve.minimize import Answer
from autoptd.passes.solve.problem import Problem, Solved
from autoptd.passes.solve.ties import Strategy

PICOSECONDS_PER_MICROSECOND = 1e6
# The seconds of converting a value from one layout to another.
Seconds = Callable[[Node, Layout, Layout], float]


@dataclass
class Assignment:
    """The solver's answer over one axis: a strategy per node, and the data to follow and to explain it.

    - `shared_conversions`: the type to which a value with several readers is converted once.
    - `entries`: the types in which repeated layers begin with a value from before them; `enters`: what the second layer
      reads instead of such a value.
    - `cost`: the seconds of a conversion; `price`: what the solver paid for it.
    - `problem`: the minimized problem, and the `splitter` that it was made with; None for an axis of one rank.
    - `letters`: the letters of named axes in formulas (`symbols.py`).
    """

    axis: str
    strategies: dict[Node, Strategy] = field(default_factory=dict)
    shared_conversions: dict[Node, Layout] = field(default_factory=dict)
    cost: Seconds = lambda *_: 0.0
    price: Seconds = lambda *_: 0.0
    problem: Problem | None = None
    # A `Splitter`, which is not imported: later passes, and their context, build on answers and not on the solver.
    splitter: Any = None
    letters: dict[int, str] = field(default_factory=dict)
    entries: dict[Node, Layout] = field(default_factory=dict)
    enters: dict[Node, Node] = field(default_factory=dict)

    def needs(self, reader: Node, operand: Node) -> Layout:
        """Return the types in which `reader` needs `operand`: I if it has no strategy."""
        if reader.op == "output":
            return loss_over(self.axis)
        if reader not in self.strategies:
            return Layout()
        return self.strategies[reader].needs[operand]

    def route(self, operand: Node, target: Layout) -> list[Layout]:
        """Return the types to which `operand` is converted, one after the other, to reach `target`.

        The route starts with the entry, if there is one, and goes through the shared conversion if that is cheaper.
        """
        own = note(operand).layout.over(self.axis)
        source = self.entries.get(operand, own)
        # At most own type -> entry -> shared conversion -> the reader's type, less steps that change nothing.
        path = [source] if source != own else []
        shared = self.shared_conversions.get(operand)
        if shared is not None and shared not in (source, target):
            # The same comparison as in the solver's table (`Variables`): both must take the same route.
            direct, onward = self.price(operand, source, target), self.price(operand, shared, target)
            if onward < direct:
                return [*path, shared, target]
        return [*path, target] if target != source else path


@dataclass(frozen=True)
class Joint:
    """The joint answer over the axes of weights and of tokens; `answer` has its cost, in picoseconds."""

    answer: Answer
    of_weights: Solved
    of_tokens: dict[Node, Strategy]

    @property
    def text(self) -> str:
        """Describe the cost of both axes together, that of solving one first, and whether less is possible."""
        answer, orders = self.answer, []
        for axis, cost in answer.sequential.items():
            more = f"+{100 * (cost / answer.cost - 1):.2f}%" if math.isfinite(cost) else "no plan"
            orders.append(f"{axis} first {more}")
        proof = f"at most {100 * answer.gap:.2g}% above the least"
        if answer.is_exact:
            proof = "exact, no other plan costs less"
        price = f"{answer.cost / PICOSECONDS_PER_MICROSECOND:.6g} us"
        return f"over {' and '.join(answer.sequential)} together {price}: {proof}; {', '.join(orders)}"
