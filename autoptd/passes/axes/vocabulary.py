"""Which operators may hold shards of a vocabulary that t does not divide.

61 rows over 4 ranks are shards of 16, of which the last one ends in 3 rows of zeros. That is exact as long as nothing reads
the zeros: no sum runs over them, no value beside them depends on them, and their cotangent is exactly zero. So a letter of
such a size is split only where all of this holds:

- it is a vocabulary: rows that an embedding looks up, or classes of a cross-entropy. Both have a local form that knows the true
  size, and so have operators over classes (`runtime/ops/classes.py`). (Other dims of odd sizes stay whole: see `fallbacks.py`.)
- the operator is one of these, or keeps the letter and its record says so: its value and derivative at finite padding are
  finite, so that a cotangent of zero stays zero. An unknown or contracting reader gets the whole value instead: the
  conversions of `runtime/ops/shards.py` leave the padding behind.
- the vocabulary is a whole dim of every tensor that carries it.

    padding = Padding(graph, axes, t=4)
    padding.divides(node, letter)       # 4 ranks may split `node` by `letter`, evenly or padded
"""

from __future__ import annotations

from torch.fx import Graph, Node

from autoptd.ir.notes import note, op_name, ops
from autoptd.ir.operators.record import CLASSES, operands
from autoptd.ir.operators.table import operator_of
from autoptd.passes.axes.axes import Axes, Letter, Place


class Padding:
    """What `degree` ranks may split: letters that they divide, and vocabularies that they do not."""

    def __init__(self, graph: Graph, axes: Axes, degree: int) -> None:
        self.axes, self.degree = axes, degree
        self.vocabularies: set[int] = set()
        for node in ops(graph):
            for letter in axes.letters(node):
                if letter.form.startswith("vocab_"):
                    for operand, (dim, atom) in letter.places.items():
                        self.vocabularies.add(id(axes.atoms(operand, dim)[atom]))

    def divides(self, node: Node, letter: Letter) -> bool:
        """Tell whether `node` may be split by `letter` over t ranks, evenly or padded; not where it has no entries."""
        if letter.size % self.degree == 0:
            return letter.size > 0
        places = letter.everywhere(node)
        return all(self.may_pad(value, place) for value, place in places) and is_exact(node, letter)

    def may_pad(self, node: Node, place: Place) -> bool:
        """Tell whether the atom at `place` is a vocabulary, and all of its dim."""
        dim, atom = place
        return len(note(node).dims[dim]) == 1 and id(self.axes.atoms(node, dim)[atom]) in self.vocabularies

    def divides_place(self, node: Node, place: Place) -> bool:
        """Tell whether a value may be in shards of the atom at `place`, even or padded."""
        unit = self.axes.unit(node, place)
        return unit > 0 if unit % self.degree == 0 else self.may_pad(node, place)


def is_exact(node: Node, letter: Letter) -> bool:
    """Tell whether zeros at the end of the last shards of `letter` change nothing."""
    if letter.form.startswith(("vocab_", CLASSES)):
        return True
    # Nothing may be divided by the zeros of the padding.
    if op_name(node) == "aten.div" and any(divisor in letter.places for divisor in operands(node)[1:]):
        return False
    record = operator_of(node)
    return letter.out is not None and (record.is_finite or bool(record.moves))
