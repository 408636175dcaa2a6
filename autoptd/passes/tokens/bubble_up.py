"""Make masks and tables of positions local: move slices before the operators that compute the sliced value (CONNECTED ->
CONNECTED).

In: a graph with conversions over every axis. Out: the same, but a rank computes only its own part of values that depend
on no parameter, if less is sliced that way. Without context-parallel ranks nothing changes. A mask of documents, of all
tokens by all tokens, is computed by every rank for its own queries only; rotary tables for its own positions.

    mask = rows == keys                         # [b, s, s]         rows = rt.i_to_s(rows, cp, 1)
    mask = rt.i_to_s(mask, cp, 1)               # [b, s/c, s]       mask = rows == keys                  # [b, s/c, s]

Labels stay whole up to their loss, which counts the valid labels of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.layout import Layout, Step
from autoptd.ir.mesh import Mesh
from autoptd.ir.noise import is_draw
from autoptd.ir.notes import converted_types, is_tensor, note, op_name, ops, shape
from autoptd.ir.operators.record import operands
from autoptd.ir.types import I, S, ValueType
from autoptd.passes.axes.axes import Axes, Letter
from autoptd.passes.communicate import check_tokens, convert_before
from autoptd.passes.context import Context
from autoptd.passes.reader_names import reader_name
from autoptd.passes.runner import CALLS, Form, divides_tokens, graph_pass

# The loss whose labels are counted whole.
COUNTS = "aten.cross_entropy_loss"


@graph_pass(
    takes=Form.CONNECTED,
    gives=Form.CONNECTED,
    when=divides_tokens,
    changes=(CALLS, "layout"),
    ensures=check_tokens,
)
def bubble_up_slices(graph: Graph, ctx: Context) -> None:
    """Move slices over the axes of tokens towards inputs and constants."""
    for axis in ctx.mesh.token_axes:
        found = _Local(graph, ctx.found.axes.connected(graph), axis)
        for region in found.regions():
            if sum(map(_entries, found.sliced_for(region))) < sum(map(_entries, found.given_by(region))):
                _make_local(graph, region, found, ctx.mesh)


class _Local:
    """The values that a rank may compute in part: `kinds`, the type of each, and `letters`, how it is split."""

    def __init__(self, graph: Graph, axes: Axes, axis: str) -> None:
        self.axis, self.axes = axis, axes
        self.kinds: dict[Node, ValueType] = {}
        self.letters: dict[Node, Letter] = {}
        for node in reversed(list(ops(graph))):
            asked = {self._asked(reader, node) for reader in node.users}
            kind = asked.pop() if len(asked) == 1 else None
            if kind is not None and self._may_be_local(node) and (letter := self._letter(node, kind)):
                self.kinds[node], self.letters[node] = kind, letter

    def _asked(self, reader: Node, node: Node) -> ValueType | None:
        """Return the part of a value that a reader needs; None for all of it."""
        if self.is_slice(reader):
            is_counted = any(op_name(user) == COUNTS for user in _read_by(reader))
            return None if is_counted else note(reader).layout[self.axis]
        if reader not in self.letters or node not in self.letters[reader].places:
            return None
        return S(*self.letters[reader].places[node], self.kinds[reader].order)

    def is_slice(self, node: Node) -> bool:
        if node.target is not markers.convert or note(node).axis != self.axis:
            return False
        before, after = converted_types(node)
        return before == I and after.kind == "S"

    def _may_be_local(self, node: Node) -> bool:
        # Random numbers are numbered in the whole value.
        is_own = is_tensor(node) and not note(node).of_params and not is_draw(node)
        # A tuple is not sliced: the pieces of a split, the values and indices of a maximum.
        values = node, *operands(node)
        is_whole = all(is_tensor(value) and note(value).layout[self.axis] == I for value in values)
        return is_own and is_whole and node.target not in markers.MARKERS

    def _letter(self, node: Node, kind: ValueType) -> Letter | None:
        """Return the letter that splits a value into this type."""
        for letter in self.axes.letters(node):
            if letter.out == (kind.dim, kind.atom) and letter.places and not letter.form:
                return letter
        return None

    def regions(self) -> list[list[Node]]:
        """Return the groups of values that are made local together or not at all, in graph order."""
        region_of: dict[Node, list[Node]] = {}
        for node in reversed(self.kinds):
            region = [node]
            for operand in self.letters[node].places:
                if operand in self.kinds and node not in region_of[operand]:
                    region = [*region_of[operand], *region]
                region_of |= dict.fromkeys(region, region)
            region_of[node] = region
        order = {node: i for i, node in enumerate(reversed(self.kinds))}
        every = {id(region): region for region in region_of.values()}.values()
        return [sorted(region, key=order.__getitem__) for region in every]

    def sliced_for(self, region: list[Node]) -> list[Node]:
        """Return the values whose parts a region reads."""
        read = (operand for node in region for operand in self.letters[node].places)
        return [operand for operand in dict.fromkeys(read) if operand not in self.kinds]

    def given_by(self, region: list[Node]) -> list[Node]:
        """Return the values of a region that are sliced now."""
        return [node for node in region if any(map(self.is_slice, node.users))]


def _read_by(node: Node) -> Iterator[Node]:
    """Yield the readers of a value, or of it converted over other axes."""
    for reader in node.users:
        if reader.target is markers.convert:
            yield from _read_by(reader)
        else:
            yield reader


def _entries(node: Node) -> int:
    return math.prod(shape(node))


def _make_local(graph: Graph, region: list[Node], found: _Local, mesh: Mesh) -> None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in region:
        kind = found.kinds[node]
        for operand, place in found.letters[node].places.items():
            if operand not in found.kinds:
                part = _slice(graph, operand, S(*place, kind.order), node, found, order, mesh)
                node.replace_input_with(operand, part)
        for reader in filter(found.is_slice, list(node.users)):
            reader.replace_all_uses_with(node)
            graph.erase_node(reader)
        note(node).layout = note(node).layout.having(found.axis, kind)


def _slice(
    graph: Graph,
    source: Node,
    kind: ValueType,
    reader: Node,
    found: _Local,
    order: dict[Node, int],
    mesh: Mesh,
) -> Node:
    """Return a part of `source` before a reader: one slice for all readers of that part."""
    slices = [user for user in source.users if found.is_slice(user) and note(user).layout[found.axis] == kind]
    if slices and order[slices[0]] < order[reader]:
        return slices[0]
    made = convert_before(graph, source, found.axis, Layout({found.axis: kind}), reader, mesh, _why)
    order[made] = order[reader]
    for old in slices:
        old.replace_all_uses_with(made)
        graph.erase_node(old)
    return made


def _why(source: Node, step: Step, reader: Node) -> str:
    return f"{reader_name(reader)} is computed for this rank's tokens only"
