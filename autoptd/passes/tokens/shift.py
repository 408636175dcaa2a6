"""Keep tokens whole where losses shift labels (TRACED -> TRACED, where ranks divide tokens).

A model that shifts its labels itself cuts off the logits of the last token: the remaining tokens do not divide over
ranks. In: a TRACED graph, and the trace with all samples. Out: both, with the cut *after* the operators that compute
token by token. A cross-entropy that sums or averages absorbs it: it reads the logits of all tokens, and labels padded
with `ignore_index`.

    cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    cross_entropy(logits.flatten(0, 1), pad(labels[:, 1:], (0, 1), -100).flatten())

Before all other readers the cut has become small: one number per token, such as a loss per token or a log-probability
that was looked up. Other values of the tokens (labels, masks) are padded with zeros.

    log_softmax(logits[:, :-1], -1).gather(-1, labels[:, 1:, None]).mean()
    log_softmax(logits, -1).gather(-1, pad(labels[:, 1:], (0, 1))[..., None])[:, :-1].mean()

Readers get equal values, and the tokens that are cut off have a gradient of zero. It stays zero in operators whose
derivatives are finite: the cut moves past no other (no logarithm, no quotient by a padded value). If a fact is missing,
or the cut does not get smaller, everything stays unchanged, and `program.fallbacks` lists the values that are gathered.

    keep_tokens(graph, ctx)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.errors import InternalError
from autoptd.ir.notes import note, op_name, ops, payload, shape, site, value
from autoptd.ir.operators.record import argument, operands, set_arguments
from autoptd.ir.operators.table import operator_of
from autoptd.passes.axes.axes import Axes, Letter
from autoptd.passes.context import Context
from autoptd.passes.runner import CALLS, Form, divides_tokens, graph_pass
from autoptd.passes.solve.tokens import TokenSplitter
from autoptd.passes.tokens.attention_rewrites import second_trace
from autoptd.passes.tokens.both_traces import Maker, drop_unread, evaluate

# A cut leaves at least this share of the tokens: all work on the others is wasted.
LEAST_KEPT = 3 / 4
# A moved cut has at most this share of its former bytes.
MOST_CUT = 1 / 2
CROSS_ENTROPY = "aten.cross_entropy_loss"
MOVES = ("fold", "turn", "spread", "same", "cast")
# Operators whose values and derivatives are finite for all finite operands; a quotient only by one number for all
# tokens. Any operand of the first ones may be padded with zeros.
ENTRYWISE = (
    "add sub rsub mul masked_fill minimum maximum eq ne lt le gt ge logical_and logical_or logical_not"
)
ENTRYWISE += " bitwise_and bitwise_or bitwise_not __and__ __or__"
FINITE = "linear matmul mm addmm embedding gather where div neg abs square tanh sigmoid gelu relu silu clamp softmax"
FINITE += " log_softmax logsumexp layer_norm rms_norm sum mean amax amin argmax argmin cross_entropy_loss"
ENTRYWISE_OPS = frozenset(f"aten.{name}" for name in ENTRYWISE.split())
FINITE_OPS = frozenset(f"aten.{name}" for name in FINITE.split())
# Of the others, the operands that may be padded. (Not a condition: the value it then selects may be infinite.)
PADDED = {("aten.embedding", 1), ("aten.gather", 1), ("aten.where", 1), ("aten.where", 2), (CROSS_ENTROPY, 1)}


# `Axes` fills the dims in the notes of the graph that it reads.
@graph_pass(takes=Form.TRACED, gives=Form.TRACED, when=divides_tokens, changes=(CALLS, "dims", "rule"))
def keep_tokens(graph: Graph, ctx: Context) -> None:
    """Move cuts of tokens after the operators that compute token by token, in both traces."""
    if not any(map(_is_cut, ops(ctx.second or graph))):
        return
    whole = second_trace(graph, ctx)
    ours, theirs = list(graph.nodes), list(whole.nodes)
    # Traces of different operators are refused later.
    if list(map(_call, ours)) != list(map(_call, theirs)):
        return
    # In the trace with all samples: with a single sample, a folded dim [b * s] would look like one of tokens.
    regions = list(find_regions(whole, ctx))
    node_of = dict(zip(theirs, ours, strict=True))
    for region in regions:
        if whole is not graph:
            uncut(graph, region.renamed(node_of))
        uncut(whole, region)
    if regions:
        drop_unread(graph, whole)


def _call(node: Node) -> tuple[str, str]:
    return node.op, str(node.target)


@dataclass(frozen=True)
class Cut:
    """`length` of `size` tokens, from `start` on."""

    start: int
    length: int
    size: int


@dataclass(frozen=True)
class Place:
    """A dim of a value whose first factor or last factor is the tokens; both if it has no other."""

    dim: int
    is_first: bool
    is_last: bool


@dataclass
class Region:
    """The operators that will read all tokens, instead of those of a cut.

    - `sources`: the values that the slices cut, by slice.
    - `fills`: the slices and all operators of the region, in graph order, each with the numbers that pad its
      operands without parameters.
    - `readers`: for values of the region, their readers outside of it, which get the value cut.
    - `places`: where values have the tokens, including operands without parameters.
    """

    cut: Cut
    sources: dict[Node, Node]
    fills: dict[Node, dict[Node, int]] = field(default_factory=dict)
    readers: dict[Node, list[Node]] = field(default_factory=dict)
    places: dict[Node, Place] = field(default_factory=dict)

    def renamed(self, node_of: Mapping[Node, Node]) -> Region:
        """Return the region of another trace of the same model."""
        fills, readers = {}, {}
        for node, padded in self.fills.items():
            fills[node_of[node]] = {node_of[operand]: fill for operand, fill in padded.items()}
        for node, them in self.readers.items():
            readers[node_of[node]] = [node_of[reader] for reader in them]
        places = {node_of[node]: place for node, place in self.places.items()}
        sources = {node_of[node]: node_of[source] for node, source in self.sources.items()}
        return Region(self.cut, sources, fills, readers, places)


def find_regions(graph: Graph, ctx: Context) -> Iterator[Region]:
    """Yield the region that will read all tokens, for every cut that is worth it."""
    axes = Axes(graph)
    tokens = _tokens(axes, graph, ctx)
    slices: dict[int, list[Node]] = {}
    for node in filter(_is_cut, ops(graph)):
        dim = _dim_of(node)
        kept, before = axes.ids(node)[dim], axes.ids(operands(node)[0])[dim]
        if len(kept) == len(before) == 1 and before[0] in tokens:
            slices.setdefault(kept[0], []).append(node)
    done: set[Node] = set()
    for axis, cuts in slices.items():
        region = _Finder(axes, axis, cuts).find(graph)
        # A value that is cut a second time has other tokens by then.
        if region is not None and done.isdisjoint(region.sources.values()):
            done.update(region.fills)
            yield region


def _is_cut(node: Node) -> bool:
    """Tell whether a node cuts off a small part of a value that depends on parameters."""
    if op_name(node) != "aten.slice" or not note(node).of_params or argument(node, "step") != 1:
        return False
    cut = _cut_of(node)
    return LEAST_KEPT * cut.size <= cut.length < cut.size


def _dim_of(node: Node) -> int:
    return argument(node, "dim") % len(shape(node))


def _cut_of(node: Node) -> Cut:
    dim = _dim_of(node)
    size, start = shape(operands(node)[0])[dim], argument(node, "start") or 0
    return Cut(start + size if start < 0 else start, shape(node)[dim], size)


def _tokens(axes: Axes, graph: Graph, ctx: Context) -> set[int]:
    """Return the ids of the axes of tokens that ranks can divide."""
    found: set[int] = set()
    for axis in ctx.mesh.token_axes:
        splitter = TokenSplitter(
            graph, axes, axis, ctx.mesh, ctx.machine, ctx.batched, attention=ctx.options.context.attention
        )
        for node in filter(axes.has, graph.nodes):
            for dim in range(len(note(node).dims)):
                atoms = [atom for atom in axes.atoms(node, dim) if atom.size % splitter.degree == 0]
                found.update(splitter.tokens.intersection(map(id, atoms)))
    return found


class _Finder:
    """Find the operators that compute token by token downstream of `slices`, whose tokens are a separate axis."""

    def __init__(self, axes: Axes, axis: int, slices: list[Node]) -> None:
        self.axes, self.axis, self.slices = axes, axis, slices
        self.region = Region(_cut_of(slices[0]), {node: operands(node)[0] for node in slices})

    def find(self, graph: Graph) -> Region | None:
        """Return the region; None if it is not worth it, or slices leave different tokens."""
        region = self.region
        if len(set(map(_cut_of, self.slices))) > 1 or any(self._place(node) is None for node in self.slices):
            return None
        for node in ops(graph):
            fills = {} if node in region.sources else self._fills(node)
            if fills is not None:
                region.fills[node] = fills
        for node in region.fills:
            readers = [reader for reader in node.users if reader not in region.fills]
            # A loss that absorbs the cut has no tokens itself.
            if readers and self._place(node) is not None:
                region.readers[node] = readers
        if sum(map(payload, region.readers)) > MOST_CUT * sum(map(payload, region.sources)):
            return None
        for node in filter(self.axes.has, graph.nodes):
            place = self._place(node)
            if place is not None:
                region.places[node] = place
        return region

    def _fills(self, node: Node) -> dict[Node, int] | None:
        """Return the numbers that pad operands without parameters, if a node may read all tokens; None if it may not."""
        read = operands(node)
        if not any(operand in self.region.fills for operand in read) or not self.axes.has(node):
            return None
        letters = [letter for letter in self.axes.letters(node) if self.axis in letter.ids]
        if len(letters) != 1 or not (self._is_by_token(node, letters[0]) or _takes_cut(node, letters[0])):
            return None
        fills: dict[Node, int] = {}
        for number, operand in enumerate(read):
            if operand in self.region.fills or not self._has_tokens(operand):
                continue
            fill = _fill(node, number)
            if operand not in letters[0].places or note(operand).of_params or fill is None:
                return None
            if self._place(operand) is None or fills.setdefault(operand, fill) != fill:
                return None
        # Labels that the model itself computes are not padded, so they are not ignored.
        return None if letters[0].out is None and read[1] not in fills else fills

    def _is_by_token(self, node: Node, letter: Letter) -> bool:
        """Tell whether a node computes token by token, and nothing infinite for the tokens that are cut off."""
        name, place = op_name(node), self._place(node)
        if letter.out is None or letter.form or place is None:
            return False
        if name == "aten.slice":
            return _dim_of(node) != place.dim
        if name == "aten.div" and any(map(self._has_tokens, operands(node)[1:])):
            return False
        return operator_of(node).moves in MOVES or name in ENTRYWISE_OPS | FINITE_OPS

    def _has_tokens(self, node: Node) -> bool:
        return any(self.axis in ids for ids in self.axes.ids(node))

    def _place(self, node: Node) -> Place | None:
        """Return where a value has the tokens; None if it has none, or they are neither first nor last in a dim."""
        found = []
        for dim, ids in enumerate(self.axes.ids(node)):
            found += [Place(dim, atom == 0, atom == len(ids) - 1) for atom in _all(ids, self.axis)]
        return found[0] if len(found) == 1 and (found[0].is_first or found[0].is_last) else None


def _all(ids: list[int], axis: int) -> list[int]:
    return [atom for atom, each in enumerate(ids) if each == axis]


def _takes_cut(node: Node, letter: Letter) -> bool:
    """Tell whether a node is a cross-entropy that sums or averages over the labels that are not ignored."""
    return op_name(node) == CROSS_ENTROPY and letter.form == "token_loss"


def _fill(node: Node, number: int) -> int | None:
    """Return the number that pads an operand for the tokens that are cut off; None if none is safe."""
    name = op_name(node)
    if name not in ENTRYWISE_OPS and (name, number) not in PADDED:
        return None
    if name != CROSS_ENTROPY:
        return 0
    # A narrower dtype may not hold the ignored label.
    is_known = value(operands(node)[number]).dtype in (torch.int64, torch.int32)
    return argument(node, "ignore_index") if is_known else None


aten = torch.ops.aten
UNFLATTEN = "aten.unflatten"


def uncut(graph: Graph, region: Region) -> None:
    """Let the operators of a region read all tokens, in place; all of them keep their position and name."""
    editor = _Editor(graph, region)
    for node, fills in region.fills.items():
        if node not in region.sources:
            editor.read_all(node, fills)
    for node, readers in region.readers.items():
        # A slice is the cut already.
        if node not in region.sources:
            piece = editor.cut(node)
            for reader in readers:
                reader.replace_input_with(node, piece)


class _Editor:
    def __init__(self, graph: Graph, region: Region) -> None:
        self.graph, self.region = graph, region
        self.padded: dict[tuple[Node, int], Node] = {}

    def read_all(self, node: Node, fills: Mapping[Node, int]) -> None:
        """Let an operator read all tokens."""
        wanted = {x: self.pad(x, fill, node) for x, fill in fills.items()}
        self._read(node, {**self.region.sources, **wanted}, self._whole_shape(node))

    def pad(self, x: Node, fill: int, reader: Node) -> Node:
        """Return an operand without parameters padded to all tokens; of a view, its source is padded."""
        if (x, fill) not in self.padded:
            is_view = x.op == "call_function" and operator_of(x).moves in ("fold", "same")
            source = operands(x)[0] if is_view else x
            if source in self.region.places and source is not x:
                padded = self.pad(source, fill, reader)
                made = Maker(self.graph, reader, note(x)).make(x.target, *x.args, **x.kwargs)
                self._read(made, {source: padded}, self._whole_shape(x))
            else:
                made = self._pad(x, fill, reader)
            self.padded[x, fill] = made
        return self.padded[x, fill]

    def _pad(self, x: Node, fill: int, reader: Node) -> Node:
        cut, place = self.region.cut, self.region.places[x]
        about = replace(note(reader), of_params=False, needs_grad=False)
        maker = Maker(self.graph, reader, about)
        apart, dim = _unfold(maker, x, place, cut.length)
        # (left, right) of the last dim, then of the one before it, ...
        amounts = [0, 0] * (len(shape(apart)) - 1 - dim) + [cut.start, cut.size - cut.start - cut.length]
        return _fold(maker, maker.make(aten.constant_pad_nd.default, apart, amounts, fill), place)

    def cut(self, node: Node) -> Node:
        """Return the part of a value of the region that the slices left."""
        cut, place = self.region.cut, self.region.places[node]
        maker = Maker(self.graph, node.next, note(node))
        apart, dim = _unfold(maker, node, place, cut.size)
        piece = maker.make(aten.slice.Tensor, apart, dim, cut.start, cut.start + cut.length)
        note(piece).tokens = replace(note(piece).tokens, is_moved_cut=True)
        return _fold(maker, piece, place)

    def _read(self, node: Node, wanted: Mapping[Node, Node], size: tuple[int, ...]) -> None:
        """Let a node read other operands, and return a value of this shape."""
        node.args = map_arg(node.args, lambda arg: wanted.get(arg, arg))
        node.kwargs = map_arg(node.kwargs, lambda arg: wanted.get(arg, arg))
        # The sizes of an `unflatten` begin at its dim.
        first = argument(node, "dim") % len(shape(operands(node)[0])) if op_name(node) == UNFLATTEN else 0
        for name in operator_of(node).sizes:
            given = argument(node, name)
            sizes = [-1 if old == -1 else size[first + i] for i, old in enumerate(given)]
            set_arguments(node, {name: sizes})
        evaluate(node)
        if shape(node) != size:
            raise InternalError(
                site(node), f"{op_name(node)} of all tokens has the shape {shape(node)}, not {size}"
            )

    def _whole_shape(self, node: Node) -> tuple[int, ...]:
        """Return the shape of a value once it has all tokens."""
        size, place = list(shape(node)), self.region.places.get(node)
        if place is not None:
            size[place.dim] = size[place.dim] // self.region.cut.length * self.region.cut.size
        return tuple(size)


def _unfold(maker: Maker, x: Node, place: Place, count: int) -> tuple[Node, int]:
    """Return a view of a value whose `count` tokens are a separate dim, and that dim."""
    if place.is_first and place.is_last:
        return x, place.dim
    sizes = [count, -1] if place.is_first else [-1, count]
    return maker.make(aten.unflatten.int, x, place.dim, sizes), place.dim + place.is_last


def _fold(maker: Maker, x: Node, place: Place) -> Node:
    """Undo `_unfold`."""
    if place.is_first and place.is_last:
        return x
    return maker.make(aten.flatten.using_ints, x, place.dim, place.dim + 1)
