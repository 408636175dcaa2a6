"""Write costs as formulas: the functions that count them (`costs.py`) run on symbols instead of numbers.

In: the Splitter that the solver used, and letters for named axes. Out: sympy expressions, equal to the numbers that were
minimized. A size is written as the letter of its axis, or as `n` and the number if the axis has no letter:

| b | rows of the trace | a, g, r | heads; KV heads, and the query heads of each | W | bytes per second of a link |
|---|---|---|---|---|---|
| s | tokens | V | vocabulary | M | bytes per second of a rank's memory |
| h | width of an embedding | t | tensor ranks | L | latency of a collective, in seconds |

    symbols = Symbols(splitter, assignment.letters)
    symbols.flops(c_fc)                   # 2*b*h*n3072*s
    symbols.conversion(c_fc, step)        # L + 8*b*h*s*(t - 1)/(W*t)
    symbols.number(symbols.flops(c_fc))   # 9663676416
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import sympy
from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.layout import Step
from autoptd.ir.mesh import AXES
from autoptd.ir.notes import shape, tensor
from autoptd.passes.axes.axes import Axis
from autoptd.passes.ops.costs import conversion_seconds, flops
from autoptd.passes.solve.splits import Splitter

# A sympy expression: sympy has no type hints.
Expression = Any


class Symbols:
    """Symbols for the sizes of a graph, with their `values`."""

    def __init__(self, splitter: Splitter, letters: dict[int, str]) -> None:
        self.splitter, self.letters = splitter, letters
        machine = splitter.machine
        self.values: dict[Expression, float] = {}
        self.degree = self._symbol(AXES[splitter.axis].degree, splitter.degree)
        self.machine: Any = SimpleNamespace(
            link_bandwidth=self._symbol("W", machine.link_bandwidth),
            memory_bandwidth=self._symbol("M", machine.memory_bandwidth),
            latency=self._symbol("L", machine.latency),
        )

    def shape(self, node: Node) -> tuple[Expression, ...]:
        """Return the sizes of a value's dims."""
        # Conversions, inserted after the axes were named, have the shape of the converted value.
        node = markers.unconverted(node)
        if not self.splitter.axes.has(node):
            return tuple(map(sympy.Integer, shape(node)))
        dims = [self.splitter.axes.atoms(node, dim) for dim in range(len(shape(node)))]
        return tuple(math.prod(map(self._size, atoms), start=sympy.Integer(1)) for atoms in dims)

    def flops(self, node: Node) -> Expression:
        """Return the FLOPs that `costs.flops` counts."""
        return flops(node, self.shape)

    def conversion(self, node: Node, step: Step) -> Expression:
        """Return the seconds of one conversion step of a value, from `costs.conversion_seconds`."""
        pieces = step.others * self.splitter.other_pieces(node)
        nbytes = math.prod(self.shape(node)) * tensor(node).element_size() / pieces
        # A sub-axis has its own number of ranks, and no letter.
        degree = self.degree if step.axis == self.splitter.axis else self.splitter.mesh.degree(step.axis)
        return conversion_seconds(step.before, step.after, nbytes, degree, self.machine)

    def number(self, expression: Expression) -> float:
        """Evaluate an expression at the traced sizes."""
        return float(sympy.sympify(expression).subs(self.values))

    def legend(self, *expressions: Expression) -> str:
        """Return the values of the symbols in some expressions: `b = 2, h = 768, t = 4`."""
        used: set[Expression] = set()
        for expression in expressions:
            used |= sympy.sympify(expression).free_symbols
        return ", ".join(f"{symbol} = {self.values[symbol]:g}" for symbol in sorted(used, key=str))

    def _size(self, axis: Axis) -> Expression:
        letter = self.letters.get(id(axis), "n")
        plain = sympy.Symbol(letter, positive=True)
        # Of two vocabularies of different sizes, only the first is V; the second is V with its size.
        is_plain = letter != "n" and self.values.get(plain, axis.size) == axis.size
        return self._symbol(letter if is_plain else f"{letter}{axis.size}", axis.size)

    def _symbol(self, name: str, number: float) -> Expression:
        symbol = sympy.Symbol(name, positive=True)
        self.values[symbol] = number
        return symbol
