"""Which dims are classes that ranks may divide: a vocabulary, not the positions that a softmax of attention runs over.

In: a graph and its axes. Out: the ids of the named axes that a softmax, or the like, runs over and that a layer's weight makes.

    classes_of(graph, axes)     # the vocabulary of `lm_head(x).log_softmax(-1)`
"""

from __future__ import annotations

from torch.fx import Graph, Node

from autoptd.ir.notes import note, ops
from autoptd.ir.operators.record import CLASSES, operands
from autoptd.ir.operators.table import operator_of
from autoptd.passes.axes.axes import Axes

# Local forms that reduce inside: their result is I.
REDUCED_FORMS = ("vocab_cross_entropy", "classes_logsumexp", "classes_argmax")
# Reductions of a value for each row, forward and backward, inside local forms.
REDUCTIONS = {"vocab_cross_entropy": 3, "classes_logsumexp": 2, "classes_argmax": 2}
REDUCTIONS |= {"classes_log_softmax": 3, "classes_softmax": 3}


def classes_of(graph: Graph, axes: Axes) -> set[int]:
    """Return the ids of named axes that a softmax, or the like, runs over and that a layer's weight makes."""
    scored: set[int] = set()
    made: set[int] = set()
    for node in ops(graph):
        if not axes.has(node):
            continue
        for letter in axes.letters(node):
            if letter.form.startswith(CLASSES):
                scored.update(letter.ids)
        for operand in operands(node) if operator_of(node).factors else ():
            if note(_moved(operand)).kind == "param":
                made.update(*axes.ids(operand))
    return scored & made


def _moved(node: Node) -> Node:
    """Return what a value is a view, a cast or a transpose of."""
    while node.op == "call_function" and operator_of(node).moves and operands(node):
        node = operands(node)[0]
    return node


__all__ = ["REDUCED_FORMS", "REDUCTIONS", "classes_of"]
