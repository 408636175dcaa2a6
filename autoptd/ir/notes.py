"""What AutoPTD knows about one node of the graph: the record in `node.meta["autoptd"]`, read and written here only.

note(node).module == "transformer.h.0.attn"        # the user's module that made the node
str(note(node).layout) == "batch: S(0, 0), tp: S(2, 1)"      # its types, once annotated
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.fallback import Fallback
from autoptd.ir.layout import Layout
from autoptd.ir.types import Dims, ValueType

KEY = "autoptd"
NO_TYPES = Layout()


@dataclass
class Note:
    """Facts of one node; each stage of the compiler fills its own.

    trace:       `kind` ("param", "buffer", "input", "op", "output"), `name` of a placeholder in the model or call,
                 `module` path, `source` line and its `code`, `of_params` (depends on a parameter), `needs_grad`
    annotate:    `rule` (where its letters come from, if not from the table of operators), `dims`, `layout` (a type over every
                 axis), `forms` (by axis: how a contraction of what is split is computed locally), `why`, `fallback`
                 (why it is not split as one would expect)
    communicate: `conversion` (name of the conversion a node performs)
                 `axis`: the mesh axis or sub-axis over which a node communicates, or finds its place in a whole value
    cut:         `stages` that compute the node, ascending (the first one sends it); `placement`: why, where that is not plain
    """

    kind: str = "op"
    name: str = ""
    module: str = ""
    source: str = ""
    code: str = ""
    of_params: bool = False
    needs_grad: bool = False
    rule: str = ""
    dims: Dims = ()
    layout: Layout = NO_TYPES
    forms: Mapping[str, str] = field(default_factory=dict)
    conversion: str = ""
    axis: str = ""
    why: str = ""
    fallback: Fallback | None = None
    stages: tuple[int, ...] = ()
    placement: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Absorbed:
    """A conversion that became part of an operator: `note(node).extra["absorbed"]`."""

    conversion: str
    payload_bytes: int
    why: str


def note(node: Node) -> Note:
    """Return the record of `node`."""
    return node.meta[KEY]


def set_note(node: Node, record: Note) -> Note:
    node.meta[KEY] = record
    return record


def value(node: Node) -> Any:
    """The fake value of a node: a tensor, a tuple of tensors, or None."""
    return node.meta.get("val")


def tensor(node: Node) -> torch.Tensor:
    """The fake tensor of a node; of the first piece where the node yields several (split, chunk)."""
    found = node.meta["val"]
    return found[0] if isinstance(found, (tuple, list)) else found


def is_tensor(node: Node) -> bool:
    return isinstance(value(node), torch.Tensor)


def is_pair(node: Node) -> bool:
    """Whether `node` is a fused operator with two results, which readers take by getitem."""
    return node.target in markers.FUSED.values() and isinstance(value(node), tuple)


def shape(node: Node) -> tuple[int, ...]:
    return tuple(int(size) for size in tensor(node).shape)


def payload(node: Node) -> int:
    """Bytes of the value of a node, all pieces together."""
    found = value(node)
    pieces = found if isinstance(found, (tuple, list)) else [found]
    return sum(one.numel() * one.element_size() for one in pieces if isinstance(one, torch.Tensor))


def op_name(node: Node) -> str:
    """`aten.linear` for torch.ops.aten.linear.default; the function's own name for Python functions."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).replace("::", ".")
    return getattr(target, "__name__", str(target))


def converted_types(node: Node) -> tuple[ValueType, ValueType]:
    """The types between which a conversion converts, over its axis."""
    axis, source = note(node).axis, node.args[0]
    return note(source).layout[axis], note(node).layout[axis]  # type: ignore[arg-type]


def is_whole(node: Node) -> bool:
    """Whether neither what an operator reads nor what it gives is sharded: at t > 1 every tensor rank does all of its work."""
    return not any(note(one).layout.shards for one in (node, *node.all_input_nodes))


def site(node: Node) -> str:
    """Where a node comes from, for messages: module, operator, source line."""
    record = note(node)
    where = f" ({record.source})" if record.source else ""
    name = record.name if node.op == "placeholder" else op_name(node)
    return f"{record.module or 'model'}: {name}{where}"


def placeholders(graph: Graph, kind: str) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == "placeholder" and note(node).kind == kind)


def ops(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == "call_function")


def output(graph: Graph) -> Node:
    return next(iter(reversed(graph.nodes)))


def copy_graph(graph: Graph) -> Graph:
    """A copy whose records can be changed without touching the original's."""
    return copy_nodes(graph)[0]


def copy_nodes(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """A copy, and which node of it is which of the original's."""
    new = Graph()
    mapping: dict[Node, Node] = {}
    for node in graph.nodes:
        made = new.node_copy(node, lambda old: mapping[old])
        made.meta = dict(node.meta)
        if KEY in made.meta:
            made.meta[KEY] = replace(made.meta[KEY], extra=dict(made.meta[KEY].extra))
        mapping[node] = made
    return new, mapping
