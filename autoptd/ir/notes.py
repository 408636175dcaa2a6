"""What AutoPTD knows about one node of the graph: the record in `node.meta["autoptd"]`, read and written
here only.

note(node).module == "transformer.h.0.attn"        # the user's module that made the node
str(note(node).layout) == "batch: S(0, 0), tp: S(2, 1)"      # its types, once annotated
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.ir import markers
from autoptd.ir.facts import Draw, Fused, Gemm, Keep, Local, Origin, Rows, Tokens
from autoptd.ir.fallback import Fallback
from autoptd.ir.layout import Layout, typed_over
from autoptd.ir.types import Dims, ValueType

# Of `node.meta`.
KEY = "autoptd"
NO_TYPES = Layout()
NO_ORIGIN, NO_DRAW, NO_ROWS, NO_TOKENS = Origin(), Draw(), Rows(), Tokens()
NOT_FUSED, NO_SHAPES, NO_MARKS, NO_GEMM = Fused(), Local(), Keep(), Gemm()
# The fields of a note that are about its value alone.
OF_VALUE = "origin draw rows tokens fused local keep gemm is_owned reason position".split()


@dataclass
class Note:
    """Facts of one node; each stage of the compiler fills its own.

    trace:       `kind` ("param", "buffer", "input", "op", "output"), `name` of a placeholder in the model or
                 call, `module` path, `source` line and its `code`, `of_params` (depends on a parameter),
                 `needs_grad`
    annotate:    `rule` (where its letters come from, if not from the table of operators), `dims`, `layout` (a
                 type over every axis), `forms` (by axis: how a contraction of what is split is computed
                 locally), `why`, `fallback` (why it is not split as one would expect)
    communicate: `conversion` (name of the conversion a node performs), `axis` (the mesh axis or sub-axis over
                 which a node communicates, or finds its place in a whole value: then there may be several,
                 `sub_axes.joined`)
    cut:         `stages` that compute the node, ascending (the first one sends it); `stages_why`: why, where
                 that is not plain
    records:     what stages leave for later ones, a record each: see `ir/facts.py`; `is_owned`: a sum that may be made in
                 place (mark_owned); `reason`: what else there is to say about the node, for people; `position`: where in
                 the backbone an operator of a previewed stage comes from
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
    stages_why: str = ""
    origin: Origin = NO_ORIGIN
    draw: Draw = NO_DRAW
    rows: Rows = NO_ROWS
    tokens: Tokens = NO_TOKENS
    fused: Fused = NOT_FUSED
    local: Local = NO_SHAPES
    keep: Keep = NO_MARKS
    gemm: Gemm = NO_GEMM
    is_owned: bool = False
    reason: str = ""
    position: int | None = None

    def copy(self) -> Note:
        """Return a note with the same facts that can be changed by itself."""
        # `dataclasses.replace` takes ten times as long, and every node of every form of the graph is copied.
        made = object.__new__(Note)
        made.__dict__.update(self.__dict__)
        return made

    def bare(self) -> Note:
        """Return a note with the same facts, without the records: for another value that is made where this one is."""
        made = self.copy()
        made.__dict__.update(NO_RECORDS)
        return made


NO_RECORDS = {item.name: item.default for item in fields(Note) if item.name in OF_VALUE}


def note(node: Node) -> Note:
    """Return the record of `node`."""
    return node.meta[KEY]


def set_note(node: Node, record: Note) -> Note:
    node.meta[KEY] = record
    return record


def value(node: Node) -> Any:
    """Return the fake value of a node: a tensor, a tuple of tensors, or None."""
    return node.meta.get("val")


def tensor(node: Node) -> torch.Tensor:
    """Return the fake tensor of a node; of the first piece where the node yields several (split, chunk)."""
    fake = node.meta["val"]
    return fake[0] if isinstance(fake, (tuple, list)) else fake


def is_tensor(node: Node) -> bool:
    return isinstance(value(node), torch.Tensor)


def is_pair(node: Node) -> bool:
    """Tell whether `node` is a fused operator with two results, which its users take by getitem."""
    return node.target in markers.FUSED.values() and isinstance(value(node), tuple)


def shape(node: Node) -> tuple[int, ...]:
    return tuple(map(int, tensor(node).shape))


def payload(node: Node) -> int:
    """Return the bytes of a node's value, all pieces together."""
    fake = value(node)
    pieces = fake if isinstance(fake, (tuple, list)) else [fake]
    return sum(piece.numel() * piece.element_size() for piece in pieces if isinstance(piece, torch.Tensor))


def op_name(node: Node) -> str:
    """Return `aten.linear` for torch.ops.aten.linear.default; the function's own name for Python
    functions.
    """
    # Overloads share a name: "aten.view" is view.default and view.dtype.
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _overload_name(target)
    return getattr(target, "__name__", str(target))


@cache
def _overload_name(overload: torch._ops.OpOverload) -> str:
    return str(overload._schema.name).replace("::", ".")


def converted_types(node: Node) -> tuple[ValueType, ValueType]:
    """Return the types between which a conversion converts, over its axis."""
    axis, source = typed_over(note(node).axis), node.args[0]
    return note(source).layout[axis], note(node).layout[axis]  # type: ignore[arg-type]


def is_whole(node: Node) -> bool:
    """Tell whether neither the operands of a node nor its result are sharded: every tensor rank does all of
    its work.
    """
    return not any(note(read).layout.shards for read in (node, *node.all_input_nodes))


def site(node: Node) -> str:
    """Format where a node comes from, for messages: module, operator, source line."""
    record = note(node)
    where = f" ({record.source})" if record.source else ""
    name = record.name if node.op == "placeholder" else op_name(node)
    return f"{record.module or 'model'}: {name}{where}"


def row_blocks(node: Node) -> int:
    """Return of how many blocks of an input's dim 0 a microbatch has equal parts."""
    return note(node).rows.blocks


def placeholders(graph: Graph, kind: str) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == "placeholder" and note(node).kind == kind)


def ops(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == "call_function")


def output(graph: Graph) -> Node:
    return next(iter(reversed(graph.nodes)))


def copy_graph(graph: Graph) -> Graph:
    """Copy a graph; the records of the copy can be changed without touching the original's."""
    return copy_nodes(graph)[0]


def copy_nodes(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """Copy a graph; return the copy, and its node for every node of the original."""
    new = Graph()
    mapping: dict[Node, Node] = {}
    copy_of = mapping.__getitem__
    for node in graph.nodes:
        # Not `node_copy`: it looks through all arguments for symbols, of which there are none.
        copied = new.create_node(node.op, node.target, name=node.name, type_expr=node.type)
        copied.args, copied.kwargs = map_arg(node.args, copy_of), map_arg(node.kwargs, copy_of)
        # Meta shares no record: annotating the copy would change the original.
        copied.meta = dict(node.meta)
        if KEY in copied.meta:
            copied.meta[KEY] = copied.meta[KEY].copy()
        mapping[node] = copied
    return new, mapping
