"""Named axes: every dim of every tensor becomes an ordered product of atoms.

Refinements travel along the graph by unification: a view that folds `[b, s, 3*h*k]` into `[b, s, 3, h, k]` splits an atom of
the tensors before it, down to the parameter; a reshape back joins them. An incompatible refinement is not merged: the
operator where it happens then has no common letter there, and runs whole.

In: a TRACED graph. Out: `note(node).dims`, the atom sizes of every dim, and the letters of every operator:

    axes = Axes(graph);  axes.letters(node)     # [Letter(size=12, places={x: (2, 1), w: (0, 1)}, out=(2, 1)), ...]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from autoptd.ir.notes import note, shape, value
from autoptd.passes.links import Link, Member, operands
from autoptd.passes.rules import links
from autoptd.passes.unlisted import Unlisted, unlisted_links

Place = tuple[int, int]  # (dim, atom)


class Axis:
    """A factor of a dim. `parent` leads to the axis it was merged into, `parts` are its factors, major first."""

    __slots__ = ("parent", "parts", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parent: Axis | None = None
        self.parts: list[Axis] | None = None


@dataclass(frozen=True)
class Letter:
    """One way to split an operator: the atom that each operand and the result carry.

    `out` is None when the operator contracts it; `form` names the local computation of that contraction.
    """

    name: str
    size: int
    places: dict[Node, Place]
    out: Place | None
    form: str = ""


def resolve(axis: Axis) -> Axis:
    """The axis that `axis` was merged into; paths are halved on the way, or those along a residual stream would grow."""
    while axis.parent is not None:
        if axis.parent.parent is not None:
            axis.parent = axis.parent.parent
        axis = axis.parent
    return axis


def atoms(axes: Sequence[Axis]) -> list[Axis]:
    """The unsplit factors of a list of axes, in order."""
    found: list[Axis] = []
    for axis in axes:
        axis = resolve(axis)
        found += atoms(axis.parts) if axis.parts else [axis]
    return found


def unify(left: Sequence[Axis], right: Sequence[Axis]) -> None:
    """Make two factorisations of the same size agree, as far as they can."""
    a = [axis for axis in atoms(left) if axis.size != 1]
    b = [axis for axis in atoms(right) if axis.size != 1]
    while a and b:
        x, y = atoms([a.pop(0)]), atoms([b.pop(0)])
        if len(x) > 1 or len(y) > 1:  # split while we were at it
            a, b = x + a, y + b
            continue
        one, other = x[0], y[0]
        if one is other:
            continue
        if one.size == other.size:
            other.parent = one
        elif one.size % other.size == 0:
            major, minor = _split(one, other.size)
            other.parent = major
            a.insert(0, minor)
        elif other.size % one.size == 0:
            major, minor = _split(other, one.size)
            one.parent = major
            b.insert(0, minor)
        else:
            return  # incompatible: the operator's letters will disagree, and it runs whole there


def _split(axis: Axis, major: int) -> tuple[Axis, Axis]:
    axis.parts = [Axis(major), Axis(axis.size // major)]
    return axis.parts[0], axis.parts[1]


class Axes:
    """The axes of a whole graph, and what they say about each operator."""

    def __init__(self, graph: Graph) -> None:
        self._dims: dict[Node, list[list[Axis]]] = {}
        self._links: dict[Node, list[Link]] = {}
        self._unlisted: dict[Node, Unlisted] = {}  # operators without a row
        self._read: dict[Node, list[Node]] = {}  # operands as traced: later passes put conversions in between
        self._letters: dict[Node, list[Letter]] = {}
        for node in graph.nodes:
            if node.op != "output" and _has_tensor(node):
                self._dims[node] = [[Axis(size)] for size in shape(node)]
                if node.op == "call_function":
                    self._connect(node)
        for node in self._dims:
            note(node).dims = self.sizes(node)

    def sizes(self, node: Node) -> tuple[tuple[int, ...], ...]:
        """Atom sizes of every dim of a node's value; a dim of size 1 has none."""
        return tuple(tuple(axis.size for axis in self.atoms(node, dim)) for dim in range(len(self._dims[node])))

    def atoms(self, node: Node, dim: int) -> list[Axis]:
        return [axis for axis in atoms(self._dims[node][dim]) if axis.size != 1]

    def has(self, node: Node) -> bool:
        """Whether `node` is a value of the traced graph, whose dims have axes."""
        return node in self._dims

    def is_known(self, node: Node) -> bool:
        """False for an operator that has no row, and that nothing was found out about."""
        return node not in self._unlisted or bool(self._unlisted[node].links)

    def origin(self, node: Node) -> str:
        """Where the letters of an operator come from that has no row: "probed", "registered and probed"; "" for a row."""
        return self._unlisted[node].origin if node in self._unlisted else ""

    def refused(self, node: Node) -> str:
        """Why an operator without a row is not split at all."""
        return self._unlisted[node].refused if node in self._unlisted else ""

    def is_linear(self, node: Node) -> bool:
        """Whether partial sums of a gradient may go through the backward of `node`."""
        return node not in self._unlisted or self._unlisted[node].is_linear

    def letters(self, node: Node) -> list[Letter]:
        """All ways to split `node`, in a fixed order."""
        if node not in self._letters:
            links = [link for link in self._links.get(node, []) if not link.whole]
            self._letters[node] = [letter for link in links for letter in self._link_letters(node, link)]
        return self._letters[node]

    def whole_because(self, node: Node, operand: Node, place: Place) -> str:
        """Why `node` cannot be split along an atom of one of its operands."""
        read = self._read.get(node, [])
        for link in self._links.get(node, []):
            for i, member in link.operands.items():
                if read[i] is operand and place[0] in member.dims and link.whole:
                    return link.whole
        origin = self.origin(node)
        return f"{origin}: other values in pieces of this dim" if origin else "its rule does not keep this dim"

    def _connect(self, node: Node) -> None:
        found = links(node)
        if found is None:
            self._unlisted[node] = unlisted = unlisted_links(node)
            found, note(node).rule = unlisted.links, str(unlisted)
        self._links[node] = found
        read = self._read[node] = operands(node)
        for link in found:
            members = [(read[i], member) for i, member in link.operands.items()]
            if link.out is not None:
                members.append((node, link.out))
            if len(members) > 1:
                size = _inner_size(members[0])
                common = [Axis(size)]
                for tensor_node, member in members:
                    dims = [axis for d in member.dims for axis in self._dims[tensor_node][d]]
                    unify(dims, [Axis(member.lead), *common, Axis(member.tail)])

    def _link_letters(self, node: Node, link: Link) -> list[Letter]:
        read = self._read[node]
        members = [(read[i], member) for i, member in link.operands.items()]
        spelled = [self._spell(one, member) for one, member in members]
        out = self._spell(node, link.out) if link.out is not None else None
        every = [*spelled, out] if out is not None else spelled
        if not every or any(word is None for word in every):
            return []
        first = every[0]
        assert first is not None
        if any([axis for axis, _ in word or ()] != [axis for axis, _ in first] for word in every):
            return []  # the factorisations disagree
        made = []
        for i, (axis, _) in enumerate(first):
            places: dict[Node, Place] = {}
            clash = False
            for (one, _), word in zip(members, spelled, strict=True):
                assert word is not None
                clash |= places.setdefault(one, word[i][1]) != word[i][1]
            # Ranks own consecutive ids: of a vocabulary in several pieces only the first factor may be split.
            clash |= link.form.startswith("vocab_") and any(atom for _, atom in places.values())
            used_whole = any(read.count(one) > _count(link, read, one) for one in places)
            if not clash and not used_whole:
                made.append(Letter(link.name, axis.size, places, out[i][1] if out is not None else None, link.form))
        return made

    def _spell(self, node: Node, member: Member) -> list[tuple[Axis, Place]] | None:
        """The atoms of a member with their places, without its lead and tail; None if those do not fall on atoms."""
        word = [(axis, (dim, i)) for dim in member.dims for i, axis in enumerate(self.atoms(node, dim))]
        for factor, end in ((member.lead, 0), (member.tail, -1)):
            while factor > 1:
                if not word or factor % word[end][0].size:
                    return None
                factor //= word.pop(end)[0].size
        return word


def _count(link: Link, read: list[Node], node: Node) -> int:
    return sum(1 for i in link.operands if read[i] is node)


def _inner_size(member: tuple[Node, Member]) -> int:
    node, one = member
    return math.prod(shape(node)[d] for d in one.dims) // (one.lead * one.tail)


def _has_tensor(node: Node) -> bool:
    found = value(node)
    if isinstance(found, (tuple, list)):
        return bool(found) and isinstance(found[0], torch.Tensor)
    return isinstance(found, torch.Tensor)
