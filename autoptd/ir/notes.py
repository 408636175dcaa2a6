"""Facts about a node of a graph: its `Note`, kept in `node.meta["autoptd"]`, and questions about its value.

    note(node).module == "transformer.h.0.attn"                   # the user's module that made the node
    str(note(node).layout) == "batch: S(0, 0), tp: S(2, 1)"       # its types, once annotated

A note has one frozen record for each stage of the compiler that leaves facts for later ones. The stage replaces its
record, and a pass declares in its contract which records it may change (`passes/runner.py`):

    note(node).rows = replace(note(node).rows, is_largest=True)

Once a node has types, `local_shape` gives the shape of its value on one rank, in one microbatch:

    local_shape(node, Sizes(Mesh(t=2), traced_rows=2, rows=1, pieces=8))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.ir import markers
from autoptd.ir.layout import Layout, Sizes, typed_over
from autoptd.ir.types import Dims, I, ValueType, shard_size

# Of `node.meta`.
KEY = "autoptd"


@dataclass(frozen=True)
class Origin:
    """Trace: the origin of a value in the model's code.

    - `name`: the value's name in emitted files, where the code has none.
    - `piece`: the index of its name on the left side of an assignment to several names.
    - `constant`: the tensor that a placeholder stands for, unless that is a buffer of the model.
    - `without_grad`: the operator is in a region under no_grad; `ends_region`: it is the detach that `capture` puts
      after a region.
    - `batch_norm`: the batch norm in training that the operator is a part of; `ends_norm`: it is the last part.
    """

    name: str = ""
    piece: int | None = None
    constant: torch.Tensor | None = field(default=None, compare=False)
    without_grad: bool = False
    ends_region: bool = False
    batch_norm: str = ""
    ends_norm: bool = False


@dataclass(frozen=True)
class Draw:
    """Facts of an operator that draws random numbers.

    - `site`: its number in the model (trace).
    - `rows`: the type of the drawn numbers over the batch, S or I (annotate).
    - `inner_axis`: the axis that divides tokens within another axis' part (split_tokens).
    """

    site: int = -1
    rows: ValueType = I
    inner_axis: str | None = None


@dataclass(frozen=True)
class Rows:
    """Annotate: how a value depends on the rows of the batch.

    - `blocks`: the number of blocks in an input's dim 0; a microbatch has an equal part of each.
    - `of_microbatch`: only `autoptd.per_microbatch` reads it.
    - `of_all`: every replica has the value, computed from the rows of all of them.
    - `is_largest`: it is a maximum over rows; maxima of parts of the batch are combined by a maximum, not a sum.
    - `equal`: operands whose rows are all equal, with the place where they meet the batch.
    - `sums`: operands that are read as sums over the whole batch; `taken_whole`: those read with the rows of all replicas.
    - `whole_call`: (args, kwargs) of the operator for the rows of a whole step.
    - `counted_by`: the number of replicas that count the labels of a loss, if each has those of all rows (localize).
    - `round`: the round before the first forward in which a batch sum is computed (localize).
    """

    blocks: int = 1
    of_microbatch: bool = False
    of_all: bool = False
    is_largest: bool = False
    equal: Mapping[Node, tuple[int, int]] = field(default_factory=dict)
    sums: Sequence[Node] = ()
    taken_whole: Sequence[Node] = ()
    whole_call: tuple[Any, Any] | None = None
    counted_by: int = 1
    round: int = 0


@dataclass(frozen=True)
class Tokens:
    """Rewrites for ranks that divide tokens (`passes/tokens/`).

    - `is_moved_cut`: a cut of tokens that was moved to where there is little to cut.
    - `window`: the number of keys that a query sees under a mask, its own last; `reads_window`: that without the mask.
    - `outer_heads`: for copies of KV heads, the number of ranks of other axes that divide the heads.
    - `model_dims`: the atoms of a parameter without copies of KV heads.
    """

    is_moved_cut: bool = False
    window: int | None = None
    reads_window: int | None = None
    outer_heads: int = 0
    model_dims: Dims | None = None


@dataclass(frozen=True)
class Fused:
    """find_fusions: an operator that a fused one, named `what`, may replace; `is_inner`: nothing outside reads it."""

    what: str = ""
    is_inner: bool = False


@dataclass(frozen=True)
class Local:
    """localize: the shapes of a value's pieces on a rank, and the traced shape of the first."""

    shapes: Sequence[tuple[int, ...]] = ()
    traced: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Keep:
    """keep: whether a value is saved for backward.

    - `again`: the seconds of an operator that backward recomputes; `dropped`: the comment on a value that is not saved.
    - `whole`: a gather whose result is saved, not its shard.
    """

    again: float | None = None
    dropped: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Absorbed:
    """A conversion that became part of an operator."""

    conversion: str
    payload_bytes: int
    why: str


@dataclass(frozen=True)
class Gemm:
    """hook_gemms: conversions that are part of matrix products.

    - `absorbed`: the conversion that this product performs; `uses`: the number of products that read a gathered input,
      which is gathered again for backward; `overlaps`: backward's collective runs while another product is computed.
    """

    absorbed: Absorbed | None = None
    uses: int | None = None
    overlaps: bool = False


@dataclass(frozen=True)
class Fallback:
    """An operator that is not split as expected: `site` is its module, `fact` the reason, `remedy` the way to
    split it.

    `flops` are forward FLOPs of whole tensors that every tensor rank repeats because of it; 0 if it is split
    in another way.
    """

    site: str
    op: str
    fact: str
    remedy: str
    flops: int = 0


def divisors(sizes: Iterable[int]) -> list[int]:
    """Return all numbers that divide at least one of `sizes`, ascending."""
    return sorted({k for size in sizes for k in range(1, size + 1) if size % k == 0})


NO_TYPES = Layout()
NO_ORIGIN, NO_DRAW, NO_ROWS, NO_TOKENS = Origin(), Draw(), Rows(), Tokens()
NOT_FUSED, NO_SHAPES, NO_MARKS, NO_GEMM = Fused(), Local(), Keep(), Gemm()
# The fields of a note that are about its value alone.
OF_VALUE = "origin draw rows tokens fused local keep gemm is_owned reason position".split()


@dataclass
class Note:
    """Facts of one node; each stage of the compiler fills its own.

    trace:       `kind` ("param", "buffer", "input", "op", "output"), `name` of a placeholder in the model or call,
                 `module` path, `source` line and its `code`, `of_params` (depends on a parameter), `needs_grad`
    annotate:    `rule` (the source of its letters, if not the table of operators), `dims`, `layout` (a type over every
                 axis), `forms` (by axis: the local form of a contraction over a split dim), `why`, `fallback` (the
                 reason why it is not split as expected)
    communicate: `conversion` (name of the conversion that a node performs), `axis` (the mesh axis or sub-axis over which
                 it communicates, or finds its place in a whole value; several of them are `mesh.joined`)
    cut:         `stages` that compute the node, ascending (the first one sends it); `stages_why`: the reason, unless
                 it is obvious
    records:     `origin` to `gemm`, one for each stage, for later stages; `is_owned`: a sum that may be made in place
                 (mark_owned); `reason`: a further remark for people; `position`: the place in the backbone of an
                 operator of a previewed stage
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


def site(node: Node) -> str:
    """Format where a node comes from, for messages: module, operator, source line."""
    record = note(node)
    where = f" ({record.source})" if record.source else ""
    name = record.name if node.op == "placeholder" else op_name(node)
    return f"{record.module or 'model'}: {name}{where}"


def row_blocks(node: Node) -> int:
    """Return the number of blocks in an input's dim 0 that each microbatch has an equal part of."""
    return note(node).rows.blocks


def converted_types(node: Node) -> tuple[ValueType, ValueType]:
    """Return the types between which a conversion converts, over its axis."""
    axis, source = typed_over(note(node).axis), node.args[0]
    return note(source).layout[axis], note(node).layout[axis]  # type: ignore[arg-type]


def is_whole(node: Node) -> bool:
    """Tell whether neither the operands of a node nor its result are sharded: every tensor rank does all of
    its work.
    """
    return not any(note(read).layout.shards for read in (node, *node.all_input_nodes))


def local_shapes(node: Node, sizes: Sizes) -> list[tuple[int, ...]]:
    """Return the local shape of each piece of a node's value (one, for a tensor)."""
    fake, layout = value(node), note(node).layout
    # Several atoms of one dim may be cut, each by another axis.
    cuts: dict[int, int] = {}
    for dim, _, pieces in layout.cuts(sizes.mesh):
        cuts[dim] = cuts.get(dim, 1) * pieces
    batch = layout.batch
    shapes = []
    for piece in fake if isinstance(fake, (tuple, list)) else [fake]:
        local = list(map(int, piece.shape))
        dims = range(len(local))
        # [2 * s, h] in a trace of 2 rows is [s, h] for one row, whatever else is folded into the dim.
        if batch.kind == "S" and batch.dim in dims:
            local[batch.dim] //= sizes.rows_divisor
        for dim, pieces in cuts.items():
            if dim in dims:
                local[dim] = shard_size(local[dim], pieces)
        shapes.append(tuple(local))
    return shapes


def local_shape(node: Node, sizes: Sizes) -> tuple[int, ...]:
    """Return the local shape of a node's (first) value."""
    return local_shapes(node, sizes)[0]


def placeholders(graph: Graph, kind: str) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == "placeholder" and note(node).kind == kind)


def ops(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == "call_function")


def ops_of_stages(graph: Graph) -> dict[int, list[Node]]:
    """Return the operators that every stage computes, in the order of the graph."""
    stages: dict[int, list[Node]] = defaultdict(list)
    for node in ops(graph):
        for stage in note(node).stages:
            stages[stage].append(node)
    return stages


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
        # Not `node_copy`: it searches all arguments for symbols, and there are none.
        copied = new.create_node(node.op, node.target, name=node.name, type_expr=node.type)
        # Assigning an attribute of a node is slow: not where nothing changes.
        copied.args = map_arg(node.args, copy_of)
        if node.kwargs:
            copied.kwargs = map_arg(node.kwargs, copy_of)
        # Meta shares no record: annotating the copy would change the original.
        copied.meta.update(node.meta)
        if KEY in copied.meta:
            copied.meta[KEY] = copied.meta[KEY].copy()
        mapping[node] = copied
    return new, mapping
