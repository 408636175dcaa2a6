"""Copy the operators of a traced layer for others of its kind, in an exported graph.

In: a graph with an `autoptd::layer` for each call of a module that was not traced, the traced call of the second module of each
kind, and that of the last. Out: the graph of a full trace.

    copied = expand(exported.graph, traced, last, skipped)       # Unlike: the last one has called other operators
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.compat import OpOverload, tree_flatten
from autoptd.trace.layers.stand_in import LAYER, Metadata

to_dtype = torch.ops.aten.to.dtype


class Unlike(Exception):
    """Signal that modules of one kind have called different operators: all of them are to be traced."""


@dataclass
class Call:
    """Hold a traced call of a module: `operands` are the nodes of the tensors among its arguments, and of its parameters and
    buffers, `nodes` its operators, `outputs` the nodes of new tensors among its results.

    `x.to(dtype)` may return `x` itself, which has another node from then on: `moved` has these, by the position of the operand.
    """

    operands: list[Node]
    nodes: list[Node]
    outputs: list[Node]
    moved: dict[int, Node] = field(default_factory=dict)

    def mapped(self, nodes: Mapping[Node, Node]) -> Call:
        def of(part: list[Node]) -> list[Node]:
            return [nodes[one] for one in part]

        moved = {position: nodes[one] for position, one in self.moved.items()}
        return Call(of(self.operands), of(self.nodes), of(self.outputs), moved)

    def operands_of(self, other: Call) -> dict[Node, Node]:
        """Return the operands of `other` by those of this call; Unlike if one of them is two of the other's."""
        found: dict[Node, Node] = {}
        for one, its in zip(self.operands, other.operands, strict=True):
            if found.setdefault(one, its) is not its:
                raise Unlike
        return found


@dataclass
class Copied:
    """Hold a traced call, and those whose operators are copies of its."""

    traced: Call
    copies: list[Call]

    def mapped(self, nodes: Mapping[Node, Node]) -> Copied:
        return Copied(self.traced.mapped(nodes), [call.mapped(nodes) for call in self.copies])


class Traced(Protocol):
    """A traced call: its operators, None if they cannot be copied, and the path of its module."""

    call: Call | None
    path: str


class Skipped(NamedTuple):
    """Describe a module that was not run: its kind, its path, the nodes of its parameters and buffers."""

    kind: int
    path: str
    own: list[Node]


def is_copyable(node: Node) -> bool:
    """Tell whether a node is an operator of its operands alone, with tensors of known sizes."""
    if node.target is operator.getitem:
        return True
    return (
        isinstance(node.target, OpOverload)
        and not node.target._schema.is_mutable
        and node.target is not LAYER
    )


def expand(
    graph: Graph, traced: Mapping[int, Traced], last: Mapping[int, Traced], skipped: Mapping[int, Skipped]
) -> list[Copied]:
    """Replace every call of `autoptd::layer` by copies of operators.

    Unlike if the last module of a kind differs from the second. `traced` and `last` are by kind, `skipped` by the
    number of the call.
    """
    kinds, alive = {one.kind for one in skipped.values()}, set(graph.nodes)
    found: dict[int, Copied] = {}
    for kind in kinds:
        template, its = traced[kind].call, last[kind].call if kind in last else None
        if template is None or its is None:
            raise Unlike
        for call in (template, its):
            call.nodes = [one for one in call.nodes if one in alive]
            # No later operator reads a node that is gone.
            call.moved = {position: one for position, one in call.moved.items() if one in alive}
        _check_equal(template, its)
        found[kind] = Copied(template, [])
    for node in list(graph.nodes):
        if node.target is LAYER:
            kind, path, own = skipped[node.args[1]]  # type: ignore[index]
            copied, paths = found[kind], (traced[kind].path, path)
            calls = [call for one in found.values() for call in (one.traced, *one.copies)]
            copied.copies.append(_expanded(graph, node, own, copied.traced, paths, calls))
    # Those in a region of another mode are not in this graph.
    if sum(len(copied.copies) for copied in found.values()) != len(skipped):
        raise Unlike
    return list(found.values())


def _check_equal(one: Call, other: Call) -> None:
    """Raise Unlike if two calls have called different operators."""
    known = one.operands_of(other)
    if len(one.nodes) != len(other.nodes):
        raise Unlike
    for node, its in zip(one.nodes, other.nodes, strict=True):
        is_same = node.op == its.op and node.target is its.target
        if (
            not is_same
            or not _is_same(node.args, its.args, known)
            or not _is_same(node.kwargs, its.kwargs, known)
        ):
            raise Unlike
        if _described(node) != _described(its):
            raise Unlike
        known[node] = its
    moved = {position: known.get(node) for position, node in one.moved.items()}
    if [known.get(node) for node in one.outputs] != other.outputs or moved != other.moved:
        raise Unlike


def _is_same(one: Any, other: Any, known: Mapping[Node, Node]) -> bool:
    if isinstance(one, Node):
        return known.get(one, one) is other
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_is_same(one[key], other[key], known) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_is_same(*pair, known) for pair in zip(one, other, strict=True))
    return repr(one) == repr(other)


def _described(node: Node) -> Any:
    leaves = tree_flatten(node.meta.get("val"))[0]
    return [Metadata.of(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]


def _expanded(
    graph: Graph, node: Node, own: list[Node], traced: Call, paths: tuple[str, str], calls: list[Call]
) -> Call:
    """Replace one call of `autoptd::layer` by copies of the operators of `traced`; `own` are the nodes of its parameters and
    buffers, `paths` those of the two modules. The operands of other `calls` are replaced too.
    """

    def replace(old: Node, new: Node) -> None:
        old.replace_all_uses_with(new, lambda user: user > node)
        for other in calls:
            if other.nodes and other.nodes[0] > node:
                other.operands = [new if one is old else one for one in other.operands]

    call = Call([*node.args[0], *own], [], [])  # type: ignore[list-item, misc]
    known = traced.operands_of(call)
    with graph.inserting_before(node):
        for one in traced.nodes:
            args, kwargs = map_arg((one.args, one.kwargs), lambda operand: known.get(operand, operand))
            known[one] = made = graph.create_node(one.op, one.target, args, kwargs, name=one.name)
            made.meta = {**one.meta, "nn_module_stack": _moved(one.meta["nn_module_stack"], *paths)}
            call.nodes.append(made)
    for number, moved in traced.moved.items():
        call.moved[number] = known[moved]
        replace(call.operands[number], known[moved])
    read = {user.args[1]: user for user in list(node.users)}
    for position, output in enumerate(traced.outputs):
        if position in read:
            replace(read[position], known[output])
            graph.erase_node(read[position])
    graph.erase_node(node)
    # The full trace has no operator whose results nothing reads.
    for one, made in reversed(list(zip(traced.nodes, call.nodes, strict=True))):
        if one.users and not made.users:
            raise Unlike
    call.outputs = [known[output] for output in traced.outputs]
    _check_casts(call, own)
    return call


def _check_casts(call: Call, own: list[Node]) -> None:
    """Raise Unlike if a parameter is cast here, as by autocast, and read elsewhere too: a cast may be shared."""
    inside = {*call.nodes}
    for node in own:
        casts = [
            user for user in node.users if user.target is to_dtype and _described(user) != _described(node)
        ]
        if inside & {*casts} and not node.users.keys() <= inside:
            raise Unlike


def _moved(stack: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return the innermost module of a node, with the path of another one of its kind."""
    path, kind = list(stack.values())[-1]
    if not f"{path}.".startswith(f"model.{old}."):
        raise Unlike
    return {"": (f"model.{new}{path.removeprefix(f'model.{old}')}", kind)}
