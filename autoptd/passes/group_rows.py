"""Sort rows by expert once for all expert matmuls of a layer, and restore their order once (LOCAL -> LOCAL).

In: a LOCAL graph whose expert matmuls take rows in token order. Out: the same values with one sort for all
matmuls that share expert choices; row-wise operators in between run on sorted rows. Where ranks have
different experts (type `E`), each rank continues with the rows of its experts only, whose number is known
only at run time.

    order, ends = rt.by_expert(ids, 8, tp)              # of the rows that chose experts of this rank
    rows = rt.take_rows(x, order, 2)                    # of two choices a token
    experts = rt.grouped_mm(rows, gate_up, ends)
    ...
    experts = rt.put_rows(experts, order, 16)           # among zeros: a partial sum over tp
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Graph, Node

from autoptd.errors import InternalError
from autoptd.ir import markers
from autoptd.ir.expert_mm import NAME
from autoptd.ir.notes import Note, Origin, note, op_name, ops, set_note, shape, site, value
from autoptd.ir.operators.record import operands
from autoptd.ir.operators.table import operator_of, rows_read
from autoptd.ir.types import E
from autoptd.passes.context import Context
from autoptd.passes.fusion.chain import erase_unread
from autoptd.passes.runner import CALLS, Form, graph_pass
from autoptd.passes.solve.experts import expert_table, rows_by_expert


@graph_pass(takes=Form.LOCAL, gives=Form.LOCAL, changes=(CALLS,))
def group_rows(graph: Graph, ctx: Context) -> None:
    """Rewrite all expert matmuls for sorted rows."""
    rows = rows_by_expert(graph)
    for node in ops(graph):
        if axis_of(node) and node not in rows:
            raise InternalError(site(node), "is by expert, but the choices of experts are unknown")
    for group in _groups(graph, rows):
        group.rewrite()


def axis_of(node: Node) -> str:
    """Return the axis over which a value has only the rows of a rank's experts; "" if there is none."""
    return next((axis for axis, kind in note(node).layout.types if kind == E), "")


@dataclass
class _Group:
    """The operators of a stage that run on the same sorted rows: `nodes`, in graph order."""

    graph: Graph
    axis: str
    nodes: list[Node] = field(default_factory=list)
    ids: Any = None
    order: Any = None
    ends: Any = None
    taken: dict[Node, Node] = field(default_factory=dict)

    def rewrite(self) -> None:
        """Sort before the first operator, and restore the order of values read outside of the group."""
        self._sort()
        inside = set(self.nodes)
        for node in self.nodes:
            self._enter(node, inside)
        for node in self.nodes:
            self._leave(node, inside)
        erase_unread(self.graph, list(self.taken))

    def _sort(self) -> None:
        # The first operator of every group reads the expert indices.
        first = self.nodes[0]
        self.ids = ids = operands(first)[-1]
        table = expert_table(first)
        if table is None:
            raise InternalError(site(first), "uses expert-sorted rows but is not an expert matmul")
        count, each = shape(table)[0], note(table).local.shapes[0][0]
        text = f"a rank's own rows: those of {each} of {count} experts" if self.axis else ""
        found = self._made(first, markers.by_expert, (ids, count), like=ids, reason=text)
        rows = note(ids).local.shapes[0]
        note(found).axis = self.axis
        found.meta["val"] = (value(ids), value(ids).new_empty(count))
        note(found).local = replace(note(found).local, shapes=[rows, (each,)])
        self.order = self._made(first, operator.getitem, (found, 0), like=ids, name="order")
        self.ends = self._made(first, operator.getitem, (found, 1), like=ids, name="ends")
        self.ends.meta["val"] = found.meta["val"][1]
        note(self.ends).local = replace(note(self.ends).local, shapes=[(each,)])

    def _enter(self, node: Node, inside: set[Node]) -> None:
        """Give an operator sorted rows for all its operands."""
        if op_name(node) == NAME:
            x, weight = node.args[:2]
            node.args = (x if x in inside else self._take(node, x), weight, self.ends)  # type: ignore[arg-type]
            node.target, node.kwargs = markers.grouped_mm, {}
            return
        if expert_table(node) is not None:
            node.target, node.args, node.kwargs = (
                markers.expert_rows,
                (operands(node)[0], self.order, self.ends),
                {},
            )
            return
        own = [operand for operand in operands(node) if operand in inside]
        for operand in rows_read(node, own) or ():
            if operand not in inside:
                node.replace_input_with(operand, self._take(node, operand))
        if self.axis and operator_of(node).text in (".reshape", ".expand"):
            # The number of rows is known only at run time.
            x, sizes = node.args
            node.args = (x, [-1, *sizes[1:]])  # type: ignore[misc, index]

    def _take(self, before: Node, x: Node) -> Node:
        """Return the rows of a value in the order of their experts."""
        if x not in self.taken:
            source, choices = _repeated(x)
            args = (source, self.order) if choices == 1 else (source, self.order, choices)
            made = self._made(before, markers.take_rows, args, like=x)
            # Record the model's operands: only the order of their rows has changed.
            self.taken[x] = made
        return self.taken[x]

    def _leave(self, node: Node, inside: set[Node]) -> None:
        """Restore the row order of a value for readers outside of the group."""
        outside = [user for user in node.users if user not in inside]
        if not outside:
            return
        count = note(self.ids).local.shapes[0][0]
        made = self._made(outside[0], markers.put_rows, (node, self.order, count), like=node)
        for user in outside:
            if note(user).conversion == "e_to_p":
                user.replace_all_uses_with(made)
                note(made).layout = note(user).layout
                self.graph.erase_node(user)
            else:
                user.replace_input_with(node, made)

    def _made(
        self,
        before: Node,
        target: Any,
        args: tuple[Any, ...],
        *,
        like: Node,
        reason: str = "",
        name: str = "",
    ) -> Node:
        """Insert an operator with the value and the note of another one, in the module of `before`."""
        with self.graph.inserting_before(before):
            made = self.graph.call_function(target, args)
        made.meta["val"] = value(like)
        record, near = note(like), note(self.nodes[0])
        set_note(
            made,
            Note(
                module=near.module,
                source=near.source,
                of_params=record.of_params,
                needs_grad=record.needs_grad,
                dims=record.dims,
                layout=record.layout,
                stages=near.stages,
                local=record.local,
                reason=reason,
                origin=Origin(name=name),
            ),
        )
        return made


def _groups(graph: Graph, rows: dict[Node, Node]) -> Iterator[_Group]:
    """Yield the groups of a graph, by expert choices, stages, axis, and the rows that a rank has."""
    between = _between(graph, rows)
    groups: dict[Any, _Group] = {}
    for node in ops(graph):
        if node in between or axis_of(node):
            part = tuple(shard for shard in note(node).layout.shards if shard[1].dim == 0)
            key = rows[node], note(node).stages, axis_of(node), part
            groups.setdefault(key, _Group(graph, axis_of(node))).nodes.append(node)
    yield from groups.values()


def _between(graph: Graph, rows: dict[Node, Node]) -> set[Node]:
    """Return the expert matmuls and all nodes between two of them with the same choices and stages."""
    found = {node for node in ops(graph) if op_name(node) == NAME}
    left = list(found)
    while left:
        node = left.pop()
        for operand in operands(node):
            is_like = rows.get(operand) is rows[node] and note(operand).stages == note(node).stages
            if is_like and operand not in found:
                found.add(operand)
                left.append(operand)
    # Include the pieces of these values.
    return found | {user for node in found for user in node.users if op_name(user) == "getitem"}


def _repeated(x: Node) -> tuple[Node, int]:
    """Return y and k if x is y with every row repeated k times, else x and 1."""
    chain: Sequence[Any] = _chain(x, ("aten.reshape", "aten.expand", "aten.unsqueeze"))
    if not chain or chain[2].args[1] != 1:
        return x, 1
    source, wide = chain[2].args[0], chain[1]
    rows, choices, *rest = shape(wide)
    is_repeat = shape(source) == (rows, *rest) and shape(x) == (rows * choices, *rest)
    return (source, choices) if is_repeat else (x, 1)


def _chain(x: Node, names: Sequence[str]) -> list[Node]:
    """Return x and its producers if they are operators with these names; else an empty list."""
    chain: list[Node] = []
    node: Any = x
    for name in names:
        if not isinstance(node, Node) or op_name(node) != name or note(node).stages != note(x).stages:
            return []
        chain.append(node)
        node = node.args[0]
    return chain


__all__ = ["axis_of", "group_rows"]
