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
from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.layout import Step
from autoptd.ir.mesh import AXES
from autoptd.ir.notes import note, op_name, ops, shape, tensor
from autoptd.ir.operators.record import QUERIES, operands
from autoptd.passes.axes.axes import Axis
from autoptd.passes.ops.costs import conversion_seconds, flops
from autoptd.passes.solve.splits import Splitter, dependents

HEADS, KV_HEADS, REPEAT = "heads", "KV heads", "query heads per KV head"
LETTERS = {HEADS: "a", KV_HEADS: "g", REPEAT: "r"}
COUNTED = (HEADS, KV_HEADS, REPEAT)


def axis_nouns(graph: Graph, splitter: Splitter) -> dict[int, str]:
    """Return the names of axes, by their ids: heads, KV heads, query heads per KV head.

    Heads are batch dims of a product of two activations, and not tokens.
    """
    found: dict[int, str] = {}
    activations = {node for node in dependents(graph) if note(node).of_params}
    for node in ops(graph):
        if not flops(node) or any(operand not in activations for operand in operands(node)[:2]):
            continue
        # The axes of each letter. Two axes are those of grouped queries: KV heads, then the query heads of each.
        groups: dict[str, list[int]] = {}
        for letter in splitter.wanted_letters(node):
            is_of_both = len(letter.places) > 1 and letter.form != QUERIES
            if letter.out is not None and (is_of_both or letter.name == "repeat"):
                groups.setdefault(letter.name, []).append(letter.ids[0])
        for name, (first, *others) in groups.items():
            found.setdefault(first, _noun_of_heads(name, is_grouped=bool(others)))
            for axis in others:
                found.setdefault(axis, REPEAT)
    return found


def _noun_of_heads(letter: str, *, is_grouped: bool) -> str:
    if letter == "repeat":
        return REPEAT
    return KV_HEADS if is_grouped or letter == "kv" else HEADS


# A sympy expression: sympy has no type hints.
Expression = Any


def name_axes(graph: Graph, splitter: Splitter, nouns: dict[int, str]) -> dict[int, str]:
    """Return the letters of the axes of an ANNOTATED graph, by their ids; `nouns` are those of `axis_nouns`."""
    # Later entries win: an axis that is both heads and tokens, in a model that folds them, is tokens.
    letters = {axis: LETTERS[noun] for axis, noun in nouns.items()}
    for node in ops(graph):
        if op_name(node) == "aten.embedding":
            letters |= {id(axis): "h" for axis in splitter.axes.atoms(node, len(shape(node)) - 1)}
    letters |= dict.fromkeys(splitter.padding.vocabularies, "V")
    letters |= dict.fromkeys(splitter.tokens, "s")
    letters |= dict.fromkeys(splitter.never_split - splitter.tokens, "b")
    return letters


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
