"""Name the axes of a graph: every dim of every tensor is an ordered product of atoms, and operators share them.

In: a TRACED graph. Out: `note(node).dims`, the atom sizes of every dim, and the letters of every operator:

    axes = Axes(graph);  axes.letters(node)     # [Letter(size=12, places={x: (2, 1), w: (0, 1)}, out=(2, 1)), ...]

Refinements travel through the graph by unification (`unify`): a view of `[b, s, 3*h*k]` as `[b, s, 3, h, k]` splits an atom of
the tensors before it, up to the parameter; a reshape back joins them. An incompatible refinement is not merged: the operator
where it happens has no common letter there, and runs whole.

An axis is a product of factors, or a sum of *segments* of unequal sizes, which slices cut: the q, k and v of grouped queries
that one weight produces. Segments are split together, each along its first factor: a shard has a chunk of each.

    x = Axis(128);  q = find_segment(x, 0, 64);  k = find_segment(x, 64, 32)
    unify(q, [Axis(4), Axis(2), Axis(8)])     # heads x repeat x head_dim
    blocks(x)                                 # (64, 32, 32)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.noise import is_draw
from autoptd.ir.notes import note, ops, shape, value
from autoptd.ir.operators.record import CLASSES, Link, Member, operands, same_dim
from autoptd.ir.operators.table import links
from autoptd.ir.types import Segmented
from autoptd.passes.ops.unlisted import Unlisted, unlisted_links


class Axis:
    """A factor of a dim.

    `parent` leads to the axis that it was merged into, `parts` are its factors, major first, and `segments` its consecutive
    pieces of unequal sizes (q|k|v), each a list of factors.
    """

    __slots__ = ("parent", "parts", "segments", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parent: Axis | None = None
        self.parts: list[Axis] | None = None
        self.segments: list[list[Axis]] | None = None


# (dim, atom)
Place = tuple[int, int]


@dataclass(frozen=True)
class Letter:
    """One way to split an operator: the place of one atom in each operand that has it, and in the result.

    `out` is None if the operator contracts it; `form` names the local form of the operator, if it has one. With `has_segments`,
    a shard has a chunk of each segment, so the letter cannot be the samples of a microbatch. `ids` are those of the axes that
    it runs along: one, or one of the operand and one of the result.
    """

    name: str
    size: int
    places: dict[Node, Place]
    out: Place | None
    form: str = ""
    has_segments: bool = False
    ids: tuple[int, ...] = ()

    def everywhere(self, node: Node) -> list[tuple[Node, Place]]:
        """Return all places of the letter of the operator `node`: in its operands and in its result."""
        places = list(self.places.items())
        if self.out is not None:
            places.append((node, self.out))
        return places


class Axes:
    """The axes of a whole graph, and the letters of its operators.

    For every node: `_dims`, the axes of its dims; `_atoms`, their factors, once all operators are connected; `_links` of its
    operator; `_unlisted`, the result of probing an operator without a record; `_read`, its operands as traced (later passes
    insert conversions); `_pieces`, the factors that a slice takes, if it takes a segment.
    """

    def __init__(self, graph: Graph) -> None:
        self._dims: dict[Node, list[list[Axis]]] = {}
        self._links: dict[Node, list[Link]] = {}
        self._unlisted: dict[Node, Unlisted] = {}
        self._read: dict[Node, list[Node]] = {}
        self._letters: dict[Node, list[Letter]] = {}
        self._pieces: dict[Node, list[Axis]] = {}
        for node in graph.nodes:
            if node.op != "output" and _has_tensor(node):
                self._dims[node] = [[Axis(size)] for size in shape(node)]
                if node.op == "call_function":
                    self._connect(node)
        # Only now, as an operator at the end of the model may refine the first weight.
        self._atoms = {node: list(map(proper_atoms, dims)) for node, dims in self._dims.items()}
        self._drop_segments(graph)
        for node in self._dims:
            note(node).dims = self.sizes(node)

    def sizes(self, node: Node) -> tuple[tuple[int, ...], ...]:
        """Return the atom sizes of every dim of a node's value; a dim of size 1 has none."""
        dims = []
        for dim in range(len(self._dims[node])):
            atoms_of_dim = self.atoms(node, dim)
            dims.append(
                tuple(Segmented(blocks(axis)) if axis.segments else axis.size for axis in atoms_of_dim)
            )
        return tuple(dims)

    def unit(self, node: Node, place: Place) -> int:
        """Return the size that the number of ranks must divide for the atom at `place` to be split."""
        return unit(self.atoms(node, place[0])[place[1]])

    def atoms(self, node: Node, dim: int) -> list[Axis]:
        return self._atoms[node][dim]

    def ids(self, node: Node) -> list[list[int]]:
        """Return the ids of the axes of every dim of a node's value."""
        dims = []
        for dim in range(len(self._dims[node])):
            dims.append([id(axis) for axis in self.atoms(node, dim)])
        return dims

    def connected(self, graph: Graph) -> Axes:
        """Return these axes for the graph in its present form.

        Conversions have the axes of the value that they convert, and the letters of an operator are about the operands that it
        reads now.
        """
        now = copy(self)
        now._dims, now._atoms, now._links = dict(self._dims), dict(self._atoms), dict(self._links)
        now._read, now._letters = {}, {}
        for node in ops(graph):
            if node.target in (*markers.PLACED, markers.batch_sum):
                source = node.args[0]
                now._dims[node], now._atoms[node] = now._dims[source], now._atoms[source]
                now._links[node] = [same_dim(dim) for dim, size in enumerate(shape(node)) if size != 1]
            if node in now._dims:
                now._read[node] = operands(node)
        return now

    def has(self, node: Node) -> bool:
        """Tell whether the dims of a node have axes: those of the traced graph do."""
        return node in self._dims

    def is_known(self, node: Node) -> bool:
        """Return False for an operator without a record for which probing found no letters."""
        return node not in self._unlisted or bool(self._unlisted[node].links)

    def origin(self, node: Node) -> str:
        """Return the origin of the letters of an operator without a record: "probed", "registered and probed"; else ""."""
        return self._unlisted[node].origin if node in self._unlisted else ""

    def refused(self, node: Node) -> str:
        """Return the reason why an operator without a record is not split at all."""
        return self._unlisted[node].refused if node in self._unlisted else ""

    def is_linear(self, node: Node) -> bool:
        """Tell whether backward of `node` may run on partial sums of a gradient."""
        return node not in self._unlisted or self._unlisted[node].is_linear

    def letters(self, node: Node) -> list[Letter]:
        """Return all ways to split `node`, in a fixed order."""
        if node not in self._letters:
            letters: list[Letter] = []
            for link in self._links.get(node, []):
                if not link.whole:
                    letters += self._link_letters(node, link)
            self._letters[node] = letters
        return self._letters[node]

    def whole_because(self, node: Node, operand: Node, place: Place) -> str:
        """Return the reason why `node` cannot be split along an atom of one of its operands."""
        read = self._read.get(node, [])
        for link in self._links.get(node, []):
            for i, member in link.operands.items():
                if read[i] is operand and place[0] in member.dims and (link.whole or link.mixes):
                    return link.whole or link.mixes
                if read[i] is operand and place[0] in member.dims and link.segment is not None:
                    return "an uneven slice needs it whole"
        origin = self.origin(node)
        if origin:
            return f"{origin}: values differ in pieces of this dim"
        return "its rule does not keep this dim"

    def _connect(self, node: Node) -> None:
        """Unify the axes of an operator's operands and result along its links."""
        node_links = links(node)
        # Without a record: the user's rule, or the result of trying the operator on random numbers.
        if node_links is None:
            self._unlisted[node] = unlisted = unlisted_links(node)
            node_links, note(node).rule = unlisted.links, str(unlisted)
        self._links[node] = node_links
        read = self._read[node] = operands(node)
        for link in node_links:
            if link.segment is not None:
                self._connect_segment(node, link, link.segment)
                continue
            members = [(read[i], member) for i, member in link.operands.items()]
            if link.out is not None:
                members.append((node, link.out))
            if len(members) > 1:
                # One axis that all members have, between factors that only one has.
                first, member = members[0]
                size = math.prod(shape(first)[dim] for dim in member.dims)
                common = Axis(size // (member.lead * member.tail))
                for value_node, member in members:
                    axes: list[Axis] = []
                    for dim in member.dims:
                        axes += self._dims[value_node][dim]
                    unify(axes, [Axis(member.lead), common, Axis(member.tail)])

    def _connect_segment(self, node: Node, link: Link, segment: tuple[int, int]) -> None:
        """Cut the operand of a slice into segments, and unify the segment that it takes with its result."""
        source, dim = self._read[node][0], link.operands[0].dims[0]
        piece = find_segment(self._dims[source][dim][0], *segment)
        if piece is not None:
            self._pieces[node] = piece
            unify(piece, self._dims[node][dim])

    def _drop_segments(self, graph: Graph) -> None:
        """Keep segments in weights only: samples, tokens and vocabularies are split as one piece or not at all."""
        # The ids of the axes of values by their kind: "param", "input", "op", ...
        ids: dict[str, set[int]] = {"param": set(), "input": set()}
        vocabularies: set[int] = set()
        axes: dict[int, Axis] = {}
        for node, dims in self._dims.items():
            for dim in range(len(dims)):
                for axis in self.atoms(node, dim):
                    axes[id(axis)] = axis
                    ids.setdefault(note(node).kind, set()).add(id(axis))
        for node, node_links in self._links.items():
            for link in node_links:
                if link.form.startswith("vocab_"):
                    for i, member in link.operands.items():
                        for dim in member.dims:
                            vocabularies.update(map(id, self.atoms(self._read[node][i], dim)))
        segmented = ids["param"] - ids["input"] - vocabularies
        for key, axis in axes.items():
            # One rank alone could have segments whose first factors have no common divisor.
            if axis.segments and not (key in segmented and unit(axis) > 1):
                axis.segments = None

    def _segment_letters(self, node: Node, link: Link) -> list[Letter]:
        """Return the letter of a slice that takes one segment: the segmented atom of its operand, the first of its result."""
        source, dim = self._read[node][0], link.operands[0].dims[0]
        whole, piece = self.atoms(source, dim), proper_atoms(self._pieces.get(node, []))
        if len(whole) != 1 or not piece:
            return []
        # Segments are split along their first factors, so only a slice that begins with one has a letter.
        firsts = [atoms(segment)[0] for segment in whole[0].segments or ()]
        if not any(first is atoms(piece)[0] for first in firsts):
            return []
        # The result has other factors if a later operator could not agree with them.
        if list(map(id, piece)) != list(map(id, self.atoms(node, dim))):
            return []
        ids = id(whole[0]), id(piece[0])
        return [Letter(link.name, unit(whole[0]), {source: (dim, 0)}, (dim, 0), has_segments=True, ids=ids)]

    def _link_letters(self, node: Node, link: Link) -> list[Letter]:
        """Return a letter for every atom that all members of a link have."""
        if link.segment is not None:
            return self._segment_letters(node, link)
        read = self._read[node]
        nodes = [read[i] for i in link.operands]
        by_operand = [self._atoms_of(read[i], member) for i, member in link.operands.items()]
        by_member = list(by_operand)
        if link.out is not None:
            by_member.append(self._atoms_of(node, link.out))
        # The factorizations disagree if some end is within an atom, or some member has other axes.
        if not by_member or any(atoms_of_member is None for atoms_of_member in by_member):
            return []
        axes = [axis for axis, _ in by_member[0] or ()]
        for atoms_of_member in by_member:
            if [axis for axis, _ in atoms_of_member or ()] != axes:
                return []
        letters = []
        for i, axis in enumerate(axes):
            operand_places = [(atoms_of_operand or [])[i][1] for atoms_of_operand in by_operand]
            places = dict(zip(nodes, operand_places, strict=True))
            # An operand that is read twice must carry the letter in the same place.
            clash = any(places[operand] != at for operand, at in zip(nodes, operand_places, strict=True))
            # Ranks own consecutive ids, so only the first factor of a vocabulary may be split.
            clash |= link.form.startswith(("vocab_", CLASSES)) and any(atom for _, atom in operand_places)
            clash |= link.form.startswith(CLASSES) and bool(axis.segments)
            # An operand that is also read outside the link must be whole.
            clash |= any(read.count(operand) > nodes.count(operand) for operand in places)
            # Dropout masks are numbered in equal blocks.
            clash |= bool(axis.segments) and is_draw(node)
            if not clash:
                out = (by_member[-1] or [])[i][1] if link.out is not None else None
                has_segments, ids = bool(axis.segments), (id(axis),)
                letters.append(Letter(link.name, unit(axis), places, out, link.form, has_segments, ids))
        return letters

    def _atoms_of(self, node: Node, member: Member) -> list[tuple[Axis, Place]] | None:
        """Return the atoms of a member with their places, without its lead and tail; None if these end within an atom."""
        found: list[tuple[Axis, Place]] = []
        for dim in member.dims:
            found += [(axis, (dim, i)) for i, axis in enumerate(self.atoms(node, dim))]
        # Dims 0 and 1 of [2, 3, 4] with lead 2 have the atom 3.
        for factor, end in ((member.lead, 0), (member.tail, -1)):
            while factor > 1:
                if not found or factor % found[end][0].size:
                    return None
                factor //= found.pop(end)[0].size
        return found


def _has_tensor(node: Node) -> bool:
    result = value(node)
    if isinstance(result, (tuple, list)):
        return bool(result) and isinstance(result[0], torch.Tensor)
    return isinstance(result, torch.Tensor)


def resolve(axis: Axis) -> Axis:
    """Return the axis that `axis` was merged into."""
    # Halve the path on the way, which would grow with every layer along a residual stream.
    while axis.parent is not None:
        if axis.parent.parent is not None:
            axis.parent = axis.parent.parent
        axis = axis.parent
    return axis


def atoms(axes: Sequence[Axis]) -> list[Axis]:
    """Return the unsplit factors of a list of axes, in order, with those of size 1."""
    factors: list[Axis] = []
    for axis in axes:
        axis = resolve(axis)
        factors += atoms(axis.parts) if axis.parts else [axis]
    return factors


def proper_atoms(axes: Sequence[Axis]) -> list[Axis]:
    """Return the unsplit factors of a list of axes, in order, without those of size 1."""
    return [axis for axis in atoms(axes) if axis.size != 1]


def _size(axes: Sequence[Axis]) -> int:
    return math.prod(axis.size for axis in axes)


def unify(left: Sequence[Axis], right: Sequence[Axis]) -> None:
    """Make two factorizations of the same size agree, as far as possible.

    Factors are compared from the major end. Equal ones are merged; of unequal ones, the larger is split if the smaller
    divides it. From the first incompatible pair on, nothing changes: the letters of the operator disagree there, and it runs
    whole.
    """
    ours, theirs = proper_atoms(left), proper_atoms(right)
    while ours and theirs:
        mine, other = atoms([ours.pop(0)]), atoms([theirs.pop(0)])
        # One of them was split by an earlier step: continue with its factors.
        if len(mine) > 1 or len(other) > 1:
            ours, theirs = mine + ours, other + theirs
            continue
        a, b = mine[0], other[0]
        if a is b:
            continue
        if a.size == b.size:
            _merge(a, b)
        elif a.segments or b.segments:
            # A sum of segments has no factors.
            return
        elif a.size % b.size == 0:
            major, minor = _split(a, b.size)
            b.parent = major
            ours.insert(0, minor)
        elif b.size % a.size == 0:
            major, minor = _split(b, a.size)
            a.parent = major
            theirs.insert(0, minor)
        else:
            return


def _split(axis: Axis, major: int) -> tuple[Axis, Axis]:
    axis.parts = [Axis(major), Axis(axis.size // major)]
    return axis.parts[0], axis.parts[1]


def _merge(axis: Axis, other: Axis) -> None:
    """Merge two unsplit axes of equal size, if their segments agree."""
    if axis.segments and other.segments:
        if list(map(_size, axis.segments)) != list(map(_size, other.segments)):
            return
        for ours, theirs in zip(axis.segments, other.segments, strict=True):
            unify(ours, theirs)
    # Segments of one are those of both: a bias takes q|k|v from its weight.
    axis.segments = axis.segments or other.segments
    other.parent = axis


def find_segment(axis: Axis, start: int, length: int) -> list[Axis] | None:
    """Cut `axis` into segments so that a range is one of them, and return its factors; None if other factors prevent it."""
    whole = atoms([axis])
    if len(whole) != 1:
        return None
    axis = whole[0]
    segments = axis.segments if axis.segments is not None else [[Axis(axis.size)]]
    end, first = start + length, 0
    for i, segment in enumerate(segments):
        last = first + _size(segment)
        if first <= start and end <= last:
            if last - first > length:
                # Only a segment that nothing has split or merged yet can be cut.
                only = segment[0]
                if len(segment) != 1 or only.parts or only.parent is not None or only.segments:
                    return None
                cuts = [size for size in (start - first, length, last - end) if size]
                segments = [*segments[:i], *([Axis(size)] for size in cuts), *segments[i + 1 :]]
                i += start > first
            axis.segments = segments
            return segments[i]
        first = last
    return None


def unit(axis: Axis) -> int:
    """Return the size that the number of ranks must divide; for segments, the common divisor of their first factors."""
    if not axis.segments:
        return axis.size
    common = 0
    for segment in axis.segments:
        factors = proper_atoms(segment)
        common = math.gcd(common, unit(factors[0]) if factors else 1)
    return common


def blocks(axis: Axis) -> tuple[int, ...]:
    """Return the sizes of the blocks in order; every rank has a chunk of each."""
    if not axis.segments:
        return (axis.size,)
    sizes: list[int] = []
    for segment in axis.segments:
        first, *rest = proper_atoms(segment) or [Axis(1)]
        sizes += [block * _size(rest) for block in blocks(first)]
    return tuple(sizes)
