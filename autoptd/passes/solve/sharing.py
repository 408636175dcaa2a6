"""Heads that ranks share: how t tensor ranks split grouped queries where there are fewer than t KV heads.

With 2 KV heads, 4 query heads for each and t = 4, no atom of 2 x 4 divides over the ranks, but the 8 query heads do: every rank
gets 2, and needs the one KV head that these look at. So the axis of the KV heads (*outer*) is cut into 2 pieces that 2 ranks
share, and the axis of the repeats (*inner*) into 2 more. Of a tensor that has both, a rank holds its own piece; of keys and
values it holds a copy of their head, whose gradient is a partial sum. Megatron repeats KV heads by hand for that.

An axis is shared where all of this holds: t is a multiple of its size, the rest divides the inner axis, an `expand`, a
`repeat_interleave` or grouped attention brings the inner axis in, and some value has both side by side, as the heads.

    sharing = Sharing(graph, axes, degree=4)
    sharing.letters(sdpa)       # a Letter with `sharing` 2; q, k, v: S(1, 0) / S(1, 1), S(1, 0) x 2 copies, ...
    sharing.shards(q_weight)    # [S(0, 0) / S(0, 1)]
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from torch.fx import Graph, Node

from autoptd.ir.notes import note, op_name, ops
from autoptd.ir.types import S, ValueType
from autoptd.passes.axes.axes import Axes, Letter


class Sharing:
    """The shared axes of a graph: `pairs` of (outer, inner), and into how many pieces `degree` ranks cut the inner one."""

    def __init__(self, graph: Graph, axes: Axes, degree: int) -> None:
        self.axes, self.degree = axes, degree
        known = [node for node in graph.nodes if axes.has(node)]
        of_inputs = {axis for node in known if note(node).kind == "input" for dim in axes.ids(node) for axis in dim}
        neighbours = {pair for node in known for dim in axes.ids(node) for pair in itertools.pairwise(dim)}
        self.pairs: dict[tuple[int, int], int] = {}
        for node in ops(graph):
            letters = axes.letters(node) if axes.has(node) else []
            for outer, inner in itertools.permutations(letters, 2):
                pair = axes.ids_of(node, outer)[0], axes.ids_of(node, inner)[0]
                is_free = pair in neighbours and of_inputs.isdisjoint(pair)
                if is_free and _brings(node, outer, inner) and self._divides(outer, inner):
                    self.pairs[pair] = degree // outer.size

    def letters(self, node: Node) -> list[Letter]:
        """The ways to split `node` by a shared axis."""
        if not self.pairs or not self.axes.has(node) or not self.axes.is_linear(node):
            return []
        of_axis = {self.axes.ids_of(node, letter)[0]: letter for letter in self.axes.letters(node)}
        made = [
            _shared(of_axis[outer], of_axis.get(inner), sharing)
            for (outer, inner), sharing in self.pairs.items()
            if outer in of_axis
        ]
        found = [one for one in made if one is not None and all(note(operand).of_params for operand in one.places)]
        # Masks are numbered in the whole value: a rank must know where its piece lies.
        return [one for one in found if op_name(node) != "aten.dropout" or _is_consecutive(node, one)]

    def shards(self, node: Node) -> list[ValueType]:
        """The types of a stored value that is cut along a shared axis: with the inner one where it follows, or in copies."""
        if not self.pairs or not self.axes.has(node):
            return []
        found = []
        for dim, axes in enumerate(self.axes.ids(node)):
            for i, pair in enumerate(itertools.zip_longest(axes, axes[1:])):
                if pair in self.pairs:
                    found.append(S(dim, i, self.pairs[pair], (dim, i + 1)))
                else:
                    found += [S(dim, i, n) for (outer, _), n in self.pairs.items() if outer == axes[i]][:1]
        return found

    def allows(self, node: Node, kind: ValueType) -> bool:
        """Whether the atoms that a type names are an axis that so many ranks share, and its inner one."""
        axes = [self.axes.ids(node)[dim][atom] for dim, atom in kind.places]
        return any(axes == list(pair[: len(axes)]) and n == kind.sharing for pair, n in self.pairs.items())

    def _divides(self, outer: Letter, inner: Letter) -> bool:
        return (
            1 < outer.size < self.degree
            and self.degree % outer.size == 0
            and inner.size % (self.degree // outer.size) == 0
        )


def _shared(outer: Letter, inner: Letter | None, sharing: int) -> Letter | None:
    """The split by a shared axis: with the letter of the inner one, or, where the operator has none, in copies.

    Copies are not contracted: their sum would count each of them.
    """
    if outer.form or (inner is None and outer.out is None):
        return None
    if inner is None:
        return replace(outer, sharing=sharing)
    is_within = (
        set(inner.places) <= set(outer.places) if outer.out is not None else inner.places.keys() == outer.places.keys()
    )
    if inner.form or (outer.out is None) != (inner.out is None) or not is_within:
        return None
    name = f"{outer.name}, {inner.name}" if outer.name != inner.name else outer.name
    size = outer.size * inner.size
    return replace(outer, name=name, size=size, sharing=sharing, inner=inner.places, inner_out=inner.out)


def _is_consecutive(node: Node, letter: Letter) -> bool:
    """Whether a rank's piece of the result is one chunk of the dims from the shared axis on."""
    order = [(dim, atom) for dim, atoms in enumerate(note(node).dims) for atom in range(len(atoms))]
    return letter.out in order and letter.inner_out in order[order.index(letter.out) + 1 :][:1]


def _brings(node: Node, outer: Letter, inner: Letter) -> bool:
    """Whether `node` repeats what has the `outer` axis along the `inner` one."""
    if op_name(node) == "aten.scaled_dot_product_attention":
        return (outer.name, inner.name) == ("kv", "repeat")
    return not inner.places and bool(outer.places) and outer.out is not None
