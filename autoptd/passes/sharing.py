"""Heads that ranks share: how t tensor ranks split grouped queries where there are fewer than t KV heads.

With 2 KV heads, 4 query heads for each and t = 4, no atom of 2 x 4 divides over the ranks, but the 8 query heads do: every rank
gets 2, and needs the one KV head that these look at. So the axis of the KV heads (*outer*) is cut into 2 pieces that 2 ranks
share, and the axis of the repeats (*inner*) into 2 more. Of a tensor that has both, a rank holds its own piece; of keys and
values it holds a copy of their head, whose gradient is a partial sum. Megatron repeats KV heads by hand for that.

An axis is shared where all of this holds: t is a multiple of its size, the rest divides the inner axis, an `expand`, a
`repeat_interleave` or grouped attention brings the inner axis in, and some value has both side by side, as the heads.

    sharing = Sharing(graph, axes, t=4)
    sharing.letters(sdpa)       # a Letter with `sharing` 2; q, k, v: S(1, 0) / S(1, 1), S(1, 0) x 2 copies, ...
    sharing.shards(q_weight)    # [S(0, 0) / S(0, 1)]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch.fx import Graph, Node

from autoptd.ir.notes import note, op_name, ops
from autoptd.ir.types import S, ValueType
from autoptd.passes.axes import Axes, Letter


class Sharing:
    """The shared axes of a graph over `t` ranks: `pairs` of (outer, inner), and into how many pieces the inner one is cut."""

    def __init__(self, graph: Graph, axes: Axes, t: int) -> None:
        self.axes, self.t = axes, t
        inputs = [node for node in graph.nodes if note(node).kind == "input" and axes.has(node)]
        of_inputs = {id(axis) for node in inputs for axis in _flat(axes, node)}
        known = [node for node in graph.nodes if axes.has(node)]
        neighbours = {pair for node in known for pair in self._neighbours(node)}
        self.pairs: dict[tuple[int, int], int] = {}
        for node in ops(graph):
            letters = axes.letters(node) if axes.has(node) else []
            for outer, inner in itertools.permutations(letters, 2):
                pair = self._axis(node, outer), self._axis(node, inner)
                is_free = pair in neighbours and of_inputs.isdisjoint(pair)
                if is_free and _brings(node, outer, inner) and self._divides(outer, inner):
                    self.pairs[pair] = t // outer.size

    def letters(self, node: Node) -> list[Letter]:
        """The ways to split `node` by a shared axis."""
        if not self.pairs or not self.axes.has(node) or not self.axes.is_linear(node):
            return []
        letters = self.axes.letters(node)
        of_axis = {self._axis(node, letter): letter for letter in letters}
        made = []
        for (first, second), sharing in self.pairs.items():
            outer, inner = of_axis.get(first), of_axis.get(second)
            if outer is None or outer.form or any(not note(one).of_params for one in outer.places):
                continue
            if op_name(node) == "aten.dropout" and inner is None:
                continue  # masks are numbered by the ranks' own pieces
            if inner is None and outer.out is not None:
                made.append(Letter(outer.name, outer.size, outer.places, outer.out, sharing=sharing))
            elif inner is not None and not inner.form and (outer.out is None) == (inner.out is None):
                if not set(inner.places) <= set(outer.places):
                    continue
                if outer.out is None and set(inner.places) != set(outer.places):
                    continue  # a contraction of copies would count them all
                both = Letter(
                    f"{outer.name}, {inner.name}" if outer.name != inner.name else outer.name,
                    outer.size * inner.size,
                    outer.places,
                    outer.out,
                    sharing=sharing,
                    inner=inner.places,
                    inner_out=inner.out,
                )
                made.append(both)
        return made

    def shards(self, node: Node) -> list[ValueType]:
        """The types of a stored value that is cut along a shared axis: with the inner one where it follows, or in copies."""
        if not self.pairs or not self.axes.has(node):
            return []
        found = []
        for dim in range(len(note(node).dims)):
            atoms = [id(axis) for axis in self.axes.atoms(node, dim)]
            for i, pair in enumerate(itertools.zip_longest(atoms, atoms[1:])):
                if pair in self.pairs:
                    found.append(S(dim, i, self.pairs[pair], (dim, i + 1)))
                else:
                    found += [S(dim, i, n) for (outer, _), n in self.pairs.items() if outer == atoms[i]][:1]
        return found

    def allows(self, node: Node, kind: ValueType) -> bool:
        """Whether the atoms that a type names are an axis that so many ranks share, and its inner one."""
        axes = [id(self.axes.atoms(node, dim)[atom]) for dim, atom in kind.places]
        return any(axes == list(pair[: len(axes)]) and n == kind.sharing for pair, n in self.pairs.items())

    def _neighbours(self, node: Node) -> Iterator[tuple[int, int]]:
        for dim in range(len(note(node).dims)):
            atoms = [id(axis) for axis in self.axes.atoms(node, dim)]
            yield from itertools.pairwise(atoms)

    def _axis(self, node: Node, letter: Letter) -> int:
        places = [*letter.places.items(), *([(node, letter.out)] if letter.out is not None else [])]
        one, (dim, atom) = places[0]
        return id(self.axes.atoms(one, dim)[atom])

    def _divides(self, outer: Letter, inner: Letter) -> bool:
        return 1 < outer.size < self.t and self.t % outer.size == 0 and inner.size % (self.t // outer.size) == 0


def _brings(node: Node, outer: Letter, inner: Letter) -> bool:
    """Whether `node` repeats what has the `outer` axis along the `inner` one."""
    if op_name(node) == "aten.scaled_dot_product_attention":
        return (outer.name, inner.name) == ("kv", "repeat")
    return not inner.places and bool(outer.places) and outer.out is not None


def _flat(axes: Axes, node: Node) -> list[object]:
    return [axis for dim in range(len(note(node).dims)) for axis in axes.atoms(node, dim)]
