"""How operators and values may be split over a mesh axis: by one letter over all of it, or by two over its sub-axes.

In: a graph with named axes, and the mesh. Out: `Split`s of operators, and `Layout`s of stored values.

With 2 KV heads, 4 query heads for each and t = 4, neither size of 2 x 4 can be divided among the ranks alone, but the 8
query heads can: every rank gets 2, and needs the one KV head that these attend to. So tp is seen as 2 x 2 ranks: the axis of
the KV heads (*outer*) is cut over the slow sub-axis, the axis of the repeats (*inner*) over the fast one. What has both is
sharded over both; keys and values, which have no repeats, are R over the fast one: equal there, with a partial gradient.
(In Megatron the user repeats the KV heads by hand.)

A pair of axes is cut like this if all of these hold: t is a multiple of the outer size; the rest divides the inner size; an
`expand`, a `repeat_interleave` or grouped attention brings the inner axis in; and some value has both side by side.

    factors = Factors(graph, axes, "tp", Mesh(t=4))
    factors.splits(sdpa)[0].needs(k)    # tp:(1)2: S(1, 0), tp:(2)2: R
    factors.shards(q_weight)            # [tp:(1)2: S(0, 0), tp:(2)2: S(0, 1)]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass

from torch.fx import Graph, Node

from autoptd.ir.layout import Layout
from autoptd.ir.mesh import Mesh, SubAxis
from autoptd.ir.noise import is_draw
from autoptd.ir.notes import note, op_name, ops
from autoptd.ir.types import R, S
from autoptd.passes.axes.axes import Axes, Letter


@dataclass(frozen=True)
class Split:
    """One way to split an operator: `letters` with the mesh axis or sub-axis that cuts each, slowest first.

    Over the sub-axes `whole` the operator runs whole, with operands of type R. `order` is that of the shards.
    """

    letters: tuple[tuple[str, Letter], ...]
    whole: tuple[str, ...] = ()
    order: str = ""

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(letter.name for _, letter in self.letters))

    @property
    def size(self) -> int:
        """How many entries are split over the ranks."""
        return math.prod(letter.size for _, letter in self.letters)

    @property
    def form(self) -> str:
        return self.letters[0][1].form

    @property
    def carriers(self) -> Collection[Node]:
        """The operands that are cut."""
        return self.letters[0][1].places.keys()

    @property
    def is_contracted(self) -> bool:
        return self.letters[0][1].out is None

    def needs(self, operand: Node) -> Layout:
        """Return the types of an operand that is cut; over a sub-axis whose letter it does not have, it is R."""
        types = {}
        for axis, letter in self.letters:
            types[axis] = S(*letter.places[operand], self.order) if operand in letter.places else R
        return Layout(types | dict.fromkeys(self.whole, R))

    @property
    def gives(self) -> Layout | None:
        """The types of the result, None when the operator contracts what is split."""
        if self.is_contracted:
            return None
        types = {}
        for axis, letter in self.letters:
            types[axis] = S(*letter.out, self.order) if letter.out is not None else R
        return Layout(types | dict.fromkeys(self.whole, R))


class Factors:
    """The two sub-axes of `axis` that each pair (outer, inner) of a graph's axes is cut over: `pairs`, by axis ids."""

    def __init__(self, graph: Graph, axes: Axes, axis: str, mesh: Mesh) -> None:
        self.axes, self.mesh, degree = axes, mesh, mesh.degree(axis)
        # By (id of the outer axis, id of the inner one).
        self.pairs: dict[tuple[int, int], tuple[str, str]] = {}
        free_pairs = _neighbours(graph, axes)
        for node in ops(graph):
            letters = axes.letters(node) if axes.has(node) else []
            for outer, inner in itertools.permutations(letters, 2):
                pair = outer.ids[0], inner.ids[0]
                if pair in free_pairs and _brings(node, outer, inner) and _divides(outer, inner, degree):
                    slow, fast = SubAxis(axis, 1, outer.size), SubAxis(axis, outer.size, degree // outer.size)
                    self.pairs[pair] = str(slow), str(fast)

    def splits(self, node: Node) -> list[Split]:
        """Return the ways to split `node` over sub-axes."""
        if not self.pairs or not self.axes.has(node) or not self.axes.is_linear(node):
            return []
        of_axis = {letter.ids[0]: letter for letter in self.axes.letters(node)}
        splits = []
        for (outer, inner), sub_axes in self.pairs.items():
            split = _split(of_axis[outer], of_axis.get(inner), *sub_axes) if outer in of_axis else None
            if split is None or not all(note(operand).of_params for operand in split.carriers):
                continue
            # The elements of a dropout mask are numbered in the whole value: a rank must know where its piece lies.
            if is_draw(node) and not self._is_chunk(node, split):
                continue
            splits.append(split)
        return splits

    def shards(self, node: Node) -> list[Layout]:
        """Return the types of a stored value that is cut along an outer axis, and along the inner one if it follows."""
        if not self.pairs or not self.axes.has(node):
            return []
        sub_axes_of_outer: dict[int, tuple[str, str]] = {}
        for (outer, _), sub_axes in self.pairs.items():
            sub_axes_of_outer.setdefault(outer, sub_axes)
        layouts = []
        for dim, axes in enumerate(self.axes.ids(node)):
            # (heads, repeat), (repeat, head_dim), (head_dim, None).
            for i, pair in enumerate(itertools.zip_longest(axes, axes[1:])):
                if pair in self.pairs:
                    slow, fast = self.pairs[pair]
                    layouts.append(Layout({slow: S(dim, i), fast: S(dim, i + 1)}))
                elif axes[i] in sub_axes_of_outer:
                    slow, fast = sub_axes_of_outer[axes[i]]
                    layouts.append(Layout({slow: S(dim, i), fast: R}))
        return layouts

    def _is_chunk(self, node: Node, split: Split) -> bool:
        """Tell whether a rank's piece of the result is one chunk of the dims from the outer axis on."""
        return split.gives is not None and split.gives.is_chunk(note(node).dims)


def _neighbours(graph: Graph, axes: Axes) -> set[tuple[int, int]]:
    """Return the pairs of axes that lie side by side in a dim: (KV heads, repeat), (repeat, head size).

    Those of inputs, samples and tokens, are left out: tensor ranks do not divide them.
    """
    of_inputs: set[int] = set()
    pairs: set[tuple[int, int]] = set()
    for node in graph.nodes:
        if not axes.has(node):
            continue
        for ids in axes.ids(node):
            pairs.update(itertools.pairwise(ids))
            if note(node).kind == "input":
                of_inputs.update(ids)
    return {pair for pair in pairs if of_inputs.isdisjoint(pair)}


def _divides(outer: Letter, inner: Letter, degree: int) -> bool:
    return 1 < outer.size < degree and degree % outer.size == 0 and inner.size % (degree // outer.size) == 0


def _split(outer: Letter, inner: Letter | None, slow: str, fast: str) -> Split | None:
    """Return the split by both letters, or None.

    Where the operator does not have the inner one, it runs whole over the fast sub-axis. Then it may not contract the outer
    one: the sum over the ranks would count equal parts twice.
    """
    if outer.form or (inner is None and outer.out is None):
        return None
    if inner is None:
        return Split(((slow, outer),), (fast,))
    is_within = inner.places.keys() <= outer.places.keys()
    if outer.out is None:
        is_within = inner.places.keys() == outer.places.keys()
    if inner.form or (outer.out is None) != (inner.out is None) or not is_within:
        return None
    return Split(((slow, outer), (fast, inner)))


def _brings(node: Node, outer: Letter, inner: Letter) -> bool:
    """Tell whether `node` repeats its operand with the `outer` axis along the `inner` one."""
    if op_name(node) == "aten.scaled_dot_product_attention":
        return (outer.name, inner.name) == ("kv", "repeat")
    return not inner.places and bool(outer.places) and outer.out is not None
