"""Named axes: every dim of every tensor becomes an ordered product of atoms.

Refinements travel along the graph by unification: a view that folds `[b, s, 3*h*k]` into `[b, s, 3, h, k]` splits an atom of
the tensors before it, down to the parameter; a reshape back joins them. An incompatible refinement is not merged: the
operator where it happens then has no common letter there, and runs whole.

In: a TRACED graph. Out: `note(node).dims`, the atom sizes of every dim, and the letters of every operator:

    axes = Axes(graph);  axes.letters(node)     # [Letter(size=12, places={x: (2, 1), w: (0, 1)}, out=(2, 1)), ...]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from autoptd.ir.notes import note, op_name, shape, value
from autoptd.ir.operators.record import Link, Member, operands
from autoptd.ir.operators.table import links
from autoptd.ir.types import Segmented
from autoptd.passes.axes.axis import Axis, atoms, blocks, find_segment, is_useful, unify, unit
from autoptd.passes.ops.unlisted import Unlisted, unlisted_links

Place = tuple[int, int]  # (dim, atom)


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
    has_segments: bool = False  # a shard is a chunk of each segment: not so a microbatch's rows

    def everywhere(self, node: Node) -> list[tuple[Node, Place]]:
        """Where `node`, the operator, has the letter: in operands, and in its result."""
        return [*self.places.items(), *([(node, self.out)] if self.out is not None else [])]


class Axes:
    """The axes of a whole graph, and what they say about each operator."""

    def __init__(self, graph: Graph) -> None:
        self._dims: dict[Node, list[list[Axis]]] = {}
        self._links: dict[Node, list[Link]] = {}
        self._unlisted: dict[Node, Unlisted] = {}  # operators without a row
        self._read: dict[Node, list[Node]] = {}  # operands as traced: later passes put conversions in between
        self._letters: dict[Node, list[Letter]] = {}
        self._pieces: dict[Node, list[Axis]] = {}  # what a slice takes, where that is a segment
        for node in graph.nodes:
            if node.op != "output" and _has_tensor(node):
                self._dims[node] = [[Axis(size)] for size in shape(node)]
                if node.op == "call_function":
                    self._connect(node)
        self._drop_segments(graph)
        for node in self._dims:
            note(node).dims = self.sizes(node)

    def sizes(self, node: Node) -> tuple[tuple[int, ...], ...]:
        """Atom sizes of every dim of a node's value; a dim of size 1 has none."""
        every = [self.atoms(node, dim) for dim in range(len(self._dims[node]))]
        return tuple(
            tuple(Segmented(blocks(axis)) if axis.segments else axis.size for axis in dim) for dim in every
        )

    def unit(self, node: Node, place: Place) -> int:
        """What the number of ranks that split the atom at `place` must divide."""
        return unit(self.atoms(node, place[0])[place[1]])

    def atoms(self, node: Node, dim: int) -> list[Axis]:
        return [axis for axis in atoms(self._dims[node][dim]) if axis.size != 1]

    def ids(self, node: Node) -> list[list[int]]:
        """The axes of every dim of a node's value, by their ids."""
        return [[id(axis) for axis in self.atoms(node, dim)] for dim in range(len(self._dims[node]))]

    def ids_of(self, node: Node, letter: Letter) -> list[int]:
        """The ids of the axes that carry a letter of `node`, of operands and result."""
        return [id(self.atoms(one, dim)[atom]) for one, (dim, atom) in letter.everywhere(node)]

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
                if read[i] is operand and place[0] in member.dims and link.segment is not None:
                    return "an uneven slice needs it whole"
        origin = self.origin(node)
        return (
            f"{origin}: other values in pieces of this dim" if origin else "its rule does not keep this dim"
        )

    def _connect(self, node: Node) -> None:
        found = links(node)
        if found is None:
            self._unlisted[node] = unlisted = unlisted_links(node)
            found, note(node).rule = unlisted.links, str(unlisted)
        self._links[node] = found
        read = self._read[node] = operands(node)
        for link in found:
            members = [(read[i], member) for i, member in link.operands.items()]
            if link.segment is not None:
                dim = link.operands[0].dims[0]
                piece = find_segment(self._dims[read[0]][dim][0], *link.segment)
                if piece is not None:
                    self._pieces[node] = piece
                    unify(piece, self._dims[node][dim])
                continue
            if link.out is not None:
                members.append((node, link.out))
            if len(members) > 1:
                size = _inner_size(members[0])
                common = [Axis(size)]
                for tensor_node, member in members:
                    dims = [axis for d in member.dims for axis in self._dims[tensor_node][d]]
                    unify(dims, [Axis(member.lead), *common, Axis(member.tail)])

    def _drop_segments(self, graph: Graph) -> None:
        """Segments are for weights: what inputs carry (rows, tokens), and vocabularies, are split as a whole or not at all."""
        kept: dict[str, set[int]] = {"param": set(), "input": set(), "vocab": set()}
        every: dict[int, Axis] = {}
        for node, dims in self._dims.items():
            for dim in range(len(dims)):
                found = {id(axis): axis for axis in self.atoms(node, dim)}
                every |= found
                kept.setdefault(note(node).kind, set()).update(found)
        for node, links_of in self._links.items():
            for link in links_of:
                if link.form.startswith("vocab_"):
                    for i, member in link.operands.items():
                        kept["vocab"].update(
                            id(axis) for d in member.dims for axis in self.atoms(self._read[node][i], d)
                        )
        for key, axis in every.items():
            if axis.segments and not (
                is_useful(axis) and key in kept["param"] and key not in kept["input"] | kept["vocab"]
            ):
                axis.segments = None

    def _segment_letters(self, node: Node, link: Link) -> list[Letter]:
        """A slice that is one segment: by the segmented atom of its operand, and the first factor of the piece."""
        source, dim = self._read[node][0], link.operands[0].dims[0]
        whole, piece = (
            self.atoms(source, dim),
            [one for one in atoms(self._pieces.get(node, [])) if one.size != 1],
        )
        if len(whole) != 1 or not any(
            piece and atoms(one)[0] is atoms(piece)[0] for one in whole[0].segments or ()
        ):
            return []
        if [id(one) for one in piece] != [id(one) for one in self.atoms(node, dim)]:
            return []  # the factorisations disagree
        return [Letter(link.name, unit(whole[0]), {source: (dim, 0)}, (dim, 0), has_segments=True)]

    def _link_letters(self, node: Node, link: Link) -> list[Letter]:
        if link.segment is not None:
            return self._segment_letters(node, link)
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
            clash |= (
                bool(axis.segments) and op_name(node) == "aten.dropout"
            )  # masks are numbered in equal blocks
            if not clash and not used_whole:
                to = out[i][1] if out is not None else None
                made.append(Letter(link.name, unit(axis), places, to, link.form, bool(axis.segments)))
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
