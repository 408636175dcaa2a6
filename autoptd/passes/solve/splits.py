"""How operators and values may be split over a mesh axis.

In: a graph with named axes, the mesh, and the parts of the model that an axis may split. Out: a `Splitter`, which returns the
`Split`s of operators and the `Layout`s in which values may be stored. An operator is split

- by one letter over the whole axis, if its size divides over the ranks;
- by a vocabulary that does not divide, which is padded (`Padding`);
- by two letters over sub-axes (`Factors`), for example KV heads and the query heads of each;
- attention whose heads do not divide, by its queries (`divides_heads`).

    splitter = Splitter(graph, axes, "tp", mesh, machine, batched, may_split=frozenset({Part.WEIGHTS}), pins={})
    splitter.splits(linear)[0].needs(weight)    # tp: S(0, 0)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from enum import Enum
from functools import cache

from torch.fx import Graph, Node

from autoptd.ir.layout import Layout, Step, loss_over, steps
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh, Role, SubAxis
from autoptd.ir.noise import is_draw
from autoptd.ir.notes import note, op_name, ops, payload, shape
from autoptd.ir.operators.record import CLASSES, QUERIES, argument, operands
from autoptd.ir.operators.table import operator_of
from autoptd.ir.types import ZIGZAG, R, S, ValueType
from autoptd.passes.axes.axes import Axes, Letter, Place
from autoptd.passes.ops.costs import compute_seconds, flops
from autoptd.passes.solve.experts import rows_by_expert
from autoptd.passes.solve.shard_pins import Pins
from autoptd.passes.solve.ties import Strategy

# The extra price of a byte that every rank saves under Korthikanti's plan, in passes over a link: large enough that every value
# that can be split by tokens is.
EAGER = 10


ATTENTION = "aten.scaled_dot_product_attention"


@dataclass(frozen=True)
class Split:
    """One way to split an operator: `letters`, each with the mesh axis or sub-axis that cuts it, slowest first.

    Over the sub-axes `whole` the operator runs whole, with operands of type R. `order` is the order of the shards.
    """

    letters: tuple[tuple[str, Letter], ...]
    whole: tuple[str, ...] = ()
    order: str = ""

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(letter.name for _, letter in self.letters))

    @property
    def size(self) -> int:
        """The number of entries that are split over the ranks."""
        return math.prod(letter.size for _, letter in self.letters)

    @property
    def form(self) -> str:
        return self.letters[0][1].form

    @property
    def carriers(self) -> Collection[Node]:
        """The operands that are cut."""
        return self.letters[0][1].places.keys()

    @property
    def is_contracted(self) -> bool:
        return self.letters[0][1].out is None

    def signature(self, node: Node) -> tuple[Hashable, ...]:
        """Return all that the solver reads of this split of `node`, with operands as numbers."""
        place = {arg: i for i, arg in enumerate(node.all_input_nodes)}
        ways = []
        for axis, letter in self.letters:
            cut = tuple((place[arg], at) for arg, at in letter.places.items())
            ways.append((axis, letter.name, letter.size, cut, letter.out, letter.form))
        return self.whole, self.order, *ways

    def needs(self, operand: Node) -> Layout:
        """Return the types of an operand that is cut; over a sub-axis whose letter it lacks, it is R."""
        types = {}
        for axis, letter in self.letters:
            types[axis] = S(*letter.places[operand], self.order) if operand in letter.places else R
        return Layout(types | dict.fromkeys(self.whole, R))

    @property
    def gives(self) -> Layout | None:
        """The types of the result, None if the operator contracts the letters."""
        if self.is_contracted:
            return None
        types = {}
        for axis, letter in self.letters:
            types[axis] = S(*letter.out, self.order) if letter.out is not None else R
        return Layout(types | dict.fromkeys(self.whole, R))


class Part(Enum):
    """The parts of a model that a policy may let an axis split. The batch is neither, and is never split here."""

    TOKENS = "the other dims of inputs: positions in a sequence, pixels"
    WEIGHTS = "all other dims: those of parameters, and of values computed from them"


class Splitter:
    """What an axis of a mesh may split, of the parts in `may_split`.

    `batched` names the inputs whose dim 0 is the batch. `pins` fix how parameters are stored. `kept` is the plan without
    tokens that a plan with tokens must follow.
    """

    kept: KeptPlan | None = None
    # Whether all operators but attention have the tokens whole, on every axis.
    has_whole_tokens = False
    # Texts about the axis as a whole, and about whose sizes it divides, for reports.
    remarks: tuple[str, ...] = ()
    whose = ""

    def __init__(
        self,
        graph: Graph,
        axes: Axes,
        axis: str,
        mesh: Mesh,
        machine: Machine,
        batched: Collection[str],
        *,
        may_split: frozenset[Part],
        pins: Pins,
    ) -> None:
        self.axes, self.axis, self.mesh, self.machine, self.pins = axes, axis, mesh, machine, pins
        self.degree = mesh.degree(axis)
        # Every edge of every layer asks for the same few pairs of layouts.
        self._steps = cache(lambda source, target: steps(axis, source, target, mesh))
        self.padding = Padding(graph, axes, self.degree)
        self.factors = Factors(graph, axes, axis, mesh)
        batch: set[int] = set()
        others: set[int] = set()
        for node in graph.nodes:
            if note(node).kind != "input" or not axes.has(node):
                continue
            for dim, ids in enumerate(axes.ids(node)):
                is_batch = dim == 0 and note(node).name in batched
                (batch if is_batch else others).update(ids)
        self.classes = classes_of(graph, axes)
        # Classes, which a teacher's scores have as an input, are not tokens. Nor is an axis that is the batch of any input.
        self.tokens = others - batch - self.classes
        # The values with a row for each choice of an expert, if matrices may be split.
        self.expert_rows = rows_by_expert(graph) if Part.WEIGHTS in may_split else {}
        self.may_split = may_split
        self.batch, self.never_split = batch, set(batch)
        if Part.TOKENS not in may_split:
            self.never_split |= self.tokens

    @property
    def per_whole_byte(self) -> float:
        """The extra seconds for a saved byte that every rank saves."""
        return EAGER / self.machine.link_bandwidth if self.kept else 0.0

    def decides(self, node: Node) -> bool:
        """Tell whether the solver finds the types of a node; values that depend on no parameter are whole on every rank."""
        return note(node).of_params

    def is_as_wanted(self, node: Node, axes: Collection[int]) -> bool:
        """Tell whether an operator that is split along these named axes is split as well as by its heads."""
        return False

    def name_of(self, node: Node, split: Split) -> str:
        """Name a split, for reports."""
        return split.form if split.form == QUERIES else split.name

    def other_pieces(self, node: Node) -> int:
        """Return the number of pieces into which axes that are solved already cut a value."""
        return 1

    def nbytes(self, node: Node) -> float:
        """Return the bytes of a value that all ranks along the axis have together."""
        return payload(node) / self.other_pieces(node)

    def seconds(self, node: Node) -> float:
        """Return the seconds of an operator that the axis does not split."""
        return compute_seconds(node, self.machine)

    def split_seconds(self, node: Node, pieces: float) -> float:
        """Return the seconds of an operator that the axis splits."""
        # Only matrix products are credited for a split. Other operators must not cost a collective, but save nothing: sharding
        # the residual stream to save on its adds would trade every all-reduce for two collectives.
        return self.seconds(node) / (pieces if flops(node) else 1)

    def repeating(self, node: Node) -> float:
        """Return the extra price of an operator that every rank runs whole: a little for a repeated matrix product."""
        return self.machine.redundant if flops(node) else 0.0

    def may_convert(self, node: Node, path: list[Step]) -> bool:
        """Tell whether a value that other axes also cut may be converted by these steps."""
        return True

    def facts(self, node: Node) -> Hashable:
        """Return what distinguishes a value from others of its shape: the possible shards and the pin of a parameter."""
        if note(node).kind != "param":
            return ()
        return tuple(self.shards(node)), self.pins[node].where if node in self.pins else ""

    def ways(self, node: Node) -> tuple[Hashable, ...]:
        """Return signatures of the ways to split an operator, equal for operators that may be split alike."""
        return tuple(split.signature(node) for split in self.splits(node))

    @property
    def loss(self) -> Layout:
        """The type of the loss over the axis: whole, or a partial sum that the sums over samples complete, once a step."""
        return loss_over(self.axis)

    def over(self, kind: ValueType) -> Layout:
        """Return the layout with one type over the axis."""
        return Layout({self.axis: kind})

    def path(self, source: Layout, target: Layout) -> list[Step] | None:
        """Return the conversions over the axis from one layout to another, None if there are none."""
        return self._steps(source, target)

    def is_plain(self, node: Node, types: Layout) -> bool:
        """Tell whether layers that pass on values like `node` as `types` are easy to read: whole, P, or split by tokens.

        With R, gradients would be summed after norms, where no matrix product can overlap the collective; with shards of
        another dim, every norm would need its own collective.
        """
        if not types.shards:
            return types != self.over(R)
        split_axes = {id(self.axes.atoms(node, kind.dim)[kind.atom]) for _, kind in types.shards}
        return not split_axes.isdisjoint(self.tokens)

    def splits(self, node: Node) -> list[Split]:
        """Return the ways to split `node`: by one letter, then by two over sub-axes."""
        free = [letter for letter in self.free_letters(node) if self.padding.divides(node, letter)]
        splits = [Split(((self.axis, letter),), order=self._order(node, letter)) for letter in free]
        return splits + self.factors.splits(node)

    def _order(self, node: Node, letter: Letter) -> str:
        """Return the order of shards; attention has its own if no other operator splits tokens."""
        return order_of_queries(node, letter, self.degree) if self.has_whole_tokens else ""

    def divides_evenly(self, node: Node, dim: int) -> bool:
        """Tell whether a dim of a value is one atom that the ranks divide into equal parts."""
        return len(self.axes.atoms(node, dim)) == 1 and self.axes.unit(node, (dim, 0)) % self.degree == 0

    def shards(self, node: Node) -> list[Layout]:
        """Return the types in which a value may be stored in shards."""
        if Part.WEIGHTS not in self.may_split:
            return []
        layouts = []
        for dim, sizes in enumerate(note(node).dims):
            for atom in range(len(sizes)):
                if self.padding.divides_place(node, (dim, atom)):
                    layouts.append(self.over(S(dim, atom)))
        return layouts + self.factors.shards(node)

    def blocked(self, node: Node) -> list[Letter]:
        """Return the letters by which `node` would be split if t divided them, without those that sub-axes split."""
        # 2 KV heads over t=4 are not blocked: the pair with their query heads is split instead.
        factored = {axis for pair in self.factors.pairs for axis in pair}
        letters = []
        for letter in self.free_letters(node):
            is_factored = not factored.isdisjoint(letter.ids)
            if not is_factored and not self.padding.divides(node, letter):
                letters.append(letter)
        return letters

    def wanted_letters(self, node: Node) -> list[Letter]:
        """Return the letters of an operator that the axis would split if its ranks divided them."""
        return self.free_letters(node)

    def free_letters(self, node: Node) -> list[Letter]:
        """Return the letters of an operator that the axis may split, whether or not its ranks divide them."""
        return [letter for letter in self.axes.letters(node) if letter.size and self._is_free(node, letter)]

    def _is_free(self, node: Node, letter: Letter) -> bool:
        ids = letter.ids
        # Classes, but not the positions that attention's softmax runs over.
        is_allowed = not letter.form.startswith(CLASSES) or not self.classes.isdisjoint(ids)
        if letter.form == QUERIES:
            return self._splits_queries(node, ids) and has_places(node, letter)
        return is_allowed and self._may_split(ids)

    def _splits_queries(self, node: Node, ids: Collection[int]) -> bool:
        """Tell whether attention may be split by its queries: if no heads divide, though no other operator splits tokens.

        Blocks of tokens with separate attention do not count as heads, so the answer does not depend on whether tokens may
        be split.
        """

        def is_divided(letter: Letter) -> bool:
            ids = letter.ids
            is_head = self._may_split(ids) and self.tokens.isdisjoint(ids)
            return is_head and self.padding.divides(node, letter)

        is_possible = Part.WEIGHTS in self.may_split and self.batch.isdisjoint(ids)
        return (
            is_possible and not self.factors.splits(node) and not divides_heads(node, self.axes, is_divided)
        )

    def _may_split(self, ids: Collection[int]) -> bool:
        """Tell whether the axis may split dims that run along these named axes."""
        if Part.WEIGHTS not in self.may_split and not self.tokens.issuperset(ids):
            return False
        return self.never_split.isdisjoint(ids)


@dataclass(frozen=True)
class KeptPlan:
    """The plan without split tokens that Korthikanti's sequence parallelism starts from, and its splitter."""

    splitter: Splitter
    chosen: dict[Node, Strategy]

    def allows(self, node: Node, strategy: Strategy, without: list[Strategy]) -> bool:
        """Tell whether `node` may have a strategy in the plan that also splits tokens.

        A split matrix product and a parameter keep their split; all other operators may be split by tokens instead, or be
        whole. `without` are the strategies of the node if no tokens are split.
        """
        kept = self.chosen[node]
        if strategy == kept:
            return True
        if strategy.is_whole:
            # A split product may not become whole in exchange for split tokens; an add may.
            return not kept.is_split or not (flops(node) or note(node).kind == "param")
        return strategy not in without and not (flops(node) and kept.is_split)


class Factors:
    """Pairs (outer, inner) of named axes that are cut over two sub-axes of a mesh axis: `pairs`, by their ids.

    With 2 KV heads and 4 query heads for each, t = 4 ranks cannot divide the KV heads, but they can divide the 8 query heads:
    every rank gets 2 of them, and needs the one KV head that they attend to. So tp is treated as 2 x 2 ranks: the axis of KV
    heads (*outer*) is cut over the slow sub-axis, the axis of repeats (*inner*) over the fast one. Values with both are
    sharded over both; keys and values, which have no repeats, are R over the fast one: equal, with a partial gradient. (In
    Megatron, the user repeats the KV heads by hand.)

    A pair is cut like this if t is a multiple of the outer size, the quotient divides the inner size, an `expand`, a
    `repeat_interleave` or grouped attention introduces the inner axis, and the two are adjacent in some value.

        factors.splits(sdpa)[0].needs(k)    # tp:(1)2: S(1, 0), tp:(2)2: R
        factors.shards(q_weight)            # [tp:(1)2: S(0, 0), tp:(2)2: S(0, 1)]
    """

    def __init__(self, graph: Graph, axes: Axes, axis: str, mesh: Mesh) -> None:
        self.axes, self.mesh, degree = axes, mesh, mesh.degree(axis)
        # By (id of the outer axis, id of the inner one).
        self.pairs: dict[tuple[int, int], tuple[str, str]] = {}
        free_pairs = _neighbors(graph, axes)
        for node in ops(graph):
            letters = axes.letters(node) if axes.has(node) else []
            for outer, inner in itertools.permutations(letters, 2):
                pair = outer.ids[0], inner.ids[0]
                if pair in free_pairs and _brings(node, outer, inner) and _divides(outer, inner, degree):
                    slow, fast = SubAxis(axis, 1, outer.size), SubAxis(axis, outer.size, degree // outer.size)
                    self.pairs[pair] = str(slow), str(fast)

    def splits(self, node: Node) -> list[Split]:
        """Return the ways to split `node` over sub-axes."""
        if not self.pairs or not self.axes.has(node) or not self.axes.is_linear(node):
            return []
        of_axis = {letter.ids[0]: letter for letter in self.axes.letters(node)}
        splits = []
        for (outer, inner), sub_axes in self.pairs.items():
            split = _split(of_axis[outer], of_axis.get(inner), *sub_axes) if outer in of_axis else None
            if split is None or not all(note(operand).of_params for operand in split.carriers):
                continue
            # The elements of a dropout mask are numbered in the whole value: a rank must know the position of its piece.
            if is_draw(node) and not self._is_chunk(node, split):
                continue
            splits.append(split)
        return splits

    def shards(self, node: Node) -> list[Layout]:
        """Return the layouts of a stored value that is cut along an outer axis, and along the inner one if it follows."""
        if not self.pairs or not self.axes.has(node):
            return []
        sub_axes_of_outer: dict[int, tuple[str, str]] = {}
        for (outer, _), sub_axes in self.pairs.items():
            sub_axes_of_outer.setdefault(outer, sub_axes)
        layouts = []
        for dim, axes in enumerate(self.axes.ids(node)):
            # (heads, repeat), (repeat, head_dim), (head_dim, None).
            for i, pair in enumerate(itertools.zip_longest(axes, axes[1:])):
                if pair in self.pairs:
                    slow, fast = self.pairs[pair]
                    layouts.append(Layout({slow: S(dim, i), fast: S(dim, i + 1)}))
                elif axes[i] in sub_axes_of_outer:
                    slow, fast = sub_axes_of_outer[axes[i]]
                    layouts.append(Layout({slow: S(dim, i), fast: R}))
        return layouts

    def _is_chunk(self, node: Node, split: Split) -> bool:
        """Tell whether a rank's piece of the result is one contiguous chunk, from the outer axis on."""
        return split.gives is not None and split.gives.is_chunk(note(node).dims)


def _neighbors(graph: Graph, axes: Axes) -> set[tuple[int, int]]:
    """Return the pairs of axes that are adjacent in a dim: (KV heads, repeat), (repeat, head size).

    Axes of inputs, which are samples and tokens, are left out: tensor ranks do not divide them.
    """
    of_inputs: set[int] = set()
    pairs: set[tuple[int, int]] = set()
    for node in graph.nodes:
        if not axes.has(node):
            continue
        for ids in axes.ids(node):
            pairs.update(itertools.pairwise(ids))
            if note(node).kind == "input":
                of_inputs.update(ids)
    return {pair for pair in pairs if of_inputs.isdisjoint(pair)}


def _divides(outer: Letter, inner: Letter, degree: int) -> bool:
    return 1 < outer.size < degree and degree % outer.size == 0 and inner.size % (degree // outer.size) == 0


def _split(outer: Letter, inner: Letter | None, slow: str, fast: str) -> Split | None:
    """Return the split by both letters, or None.

    An operator without the inner one runs whole over the fast sub-axis. Then it may not contract the outer one: the sum over
    the ranks would count equal parts twice.
    """
    if outer.form or (inner is None and outer.out is None):
        return None
    if inner is None:
        return Split(((slow, outer),), (fast,))
    is_within = inner.places.keys() <= outer.places.keys()
    if outer.out is None:
        is_within = inner.places.keys() == outer.places.keys()
    if inner.form or (outer.out is None) != (inner.out is None) or not is_within:
        return None
    return Split(((slow, outer), (fast, inner)))


def _brings(node: Node, outer: Letter, inner: Letter) -> bool:
    """Tell whether `node` repeats its operand with the `outer` axis along the `inner` one."""
    if op_name(node) == "aten.scaled_dot_product_attention":
        return (outer.name, inner.name) == ("kv", "repeat")
    return not inner.places and bool(outer.places) and outer.out is not None


class Padding:
    """Letters that `degree` ranks may split: those that they divide, and vocabularies that they do not.

    61 rows over 4 ranks are shards of 16, and the last one ends in 3 rows of zeros. That is exact as long as nothing reads the
    zeros: no sum runs over them, no other entry depends on them, and their cotangent is exactly zero. So an operator is
    split by a letter of such a size only if

    - the letter is a vocabulary: rows that an embedding looks up, or classes of a cross-entropy. Both have local forms that
      know the true size, and so have operators over classes (`runtime/ops/classes.py`). Other dims stay whole: see
      `fallbacks.py`.
    - the operator is one of these, or keeps the letter and its record says that its value and derivative are finite at finite
      padding, so that a cotangent of zero stays zero. An unknown or contracting reader gets the whole value instead: the
      conversions in `runtime/ops/shards.py` drop the padding.
    - the vocabulary is a whole dim of every tensor that has it.
    """

    def __init__(self, graph: Graph, axes: Axes, degree: int) -> None:
        self.axes, self.degree = axes, degree
        self.vocabularies: set[int] = set()
        for node in ops(graph):
            for letter in axes.letters(node):
                if letter.form.startswith("vocab_"):
                    for operand, (dim, atom) in letter.places.items():
                        self.vocabularies.add(id(axes.atoms(operand, dim)[atom]))

    def divides(self, node: Node, letter: Letter) -> bool:
        """Tell whether `node` may be split by `letter`, evenly or padded; never if it has no entries."""
        if letter.size % self.degree == 0:
            return letter.size > 0
        places = letter.everywhere(node)
        return all(self.may_pad(value, place) for value, place in places) and is_exact(node, letter)

    def may_pad(self, node: Node, place: Place) -> bool:
        """Tell whether the atom at `place` is a vocabulary that fills its dim."""
        dim, atom = place
        return len(note(node).dims[dim]) == 1 and id(self.axes.atoms(node, dim)[atom]) in self.vocabularies

    def divides_place(self, node: Node, place: Place) -> bool:
        """Tell whether a value may be sharded along the atom at `place`, evenly or padded."""
        unit = self.axes.unit(node, place)
        return unit > 0 if unit % self.degree == 0 else self.may_pad(node, place)


def is_exact(node: Node, letter: Letter) -> bool:
    """Tell whether zeros at the end of the last shards of `letter` change nothing."""
    if letter.form.startswith(("vocab_", CLASSES)):
        return True
    # The zeros of the padding must not be divisors.
    if op_name(node) == "aten.div" and any(divisor in letter.places for divisor in operands(node)[1:]):
        return False
    record = operator_of(node)
    return letter.out is not None and (record.is_finite or bool(record.moves))


# Local forms that reduce over the ranks: their result is I.
REDUCED_FORMS = ("vocab_cross_entropy", "classes_logsumexp", "classes_argmax")


def dependents(graph: Graph) -> set[Node]:
    """Return the inputs, and all values that depend on them."""
    found: set[Node] = set()
    for node in graph.nodes:
        if note(node).kind == "input" or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def classes_of(graph: Graph, axes: Axes) -> set[int]:
    """Return the ids of the named axes that a softmax or a similar operator runs over, and that the weight of a layer produces.

    This is the vocabulary of `lm_head(x).log_softmax(-1)`, and not the positions that a softmax of attention runs over.
    """
    scored: set[int] = set()
    made: set[int] = set()
    for node in ops(graph):
        if not axes.has(node):
            continue
        for letter in axes.letters(node):
            if letter.form.startswith(CLASSES):
                scored.update(letter.ids)
        for operand in operands(node) if operator_of(node).factors else ():
            if note(_moved(operand)).kind == "param":
                made.update(*axes.ids(operand))
    return scored & made


def _moved(node: Node) -> Node:
    """Return the value that `node` is a view, a cast or a transpose of."""
    while node.op == "call_function" and operator_of(node).moves and operands(node):
        node = operands(node)[0]
    return node


def divides_heads(node: Node, axes: Axes, is_divided: Callable[[Letter], bool]) -> bool:
    """Tell whether a letter that both queries and results have is divided: heads, or the query heads of each KV head.

    6 heads over t=4 are not, and all ranks would compute all of them. Then every tensor rank takes some of the queries, and all
    keys and values. It slices its queries from whole ones, which sends nothing; the results are gathered.
    """
    q = operands(node)[0]
    letters = (letter for letter in axes.letters(node) if letter.out is not None and q in letter.places)
    return any(letter.form != QUERIES and is_divided(letter) for letter in letters)


def has_places(node: Node, letter: Letter) -> bool:
    """Tell whether a rank knows the positions of the queries in its part of `letter`.

    For a causal mask, positions are counted in chunks of all queries, not of each of several blocks.
    """
    assert letter.out is not None
    return letter.out[1] == 0 or not argument(node, "is_causal")


def may_be_by_queries(node: Node, mesh: Mesh) -> bool:
    """Tell whether ranks may split attention, whose result is [batch, heads, queries, size], by its queries.

    They may if they divide tokens, or do not divide the heads.
    """
    if mesh.token_axes:
        return True
    return len(shape(node)) == 4 and any(
        shape(node)[1] % mesh.degree(axis) for axis in mesh.axes_of(Role.VALUES)
    )


def order_of_queries(node: Node, letter: Letter, ranks: int) -> str:
    """Return the order in which `ranks` have queries if no other operator is split by them.

    Zigzag for a causal mask, if every rank can have two equal pieces: then all ranks read equally many keys.
    """
    is_uneven = letter.form == QUERIES and argument(node, "is_causal")
    return ZIGZAG if is_uneven and letter.size % (2 * ranks) == 0 else ""


def work_parts(node: Node, cut: Collection[Node], pieces: int) -> float:
    """Return into how many parts ranks divide the work of an operator, if they have `pieces` of the operands in `cut`.

    In attention, ranks that have parts of the values alone repeat all scores, which are half of the work.
    """
    if op_name(node) != ATTENTION or operands(node)[0] in cut:
        return pieces
    return 2 / (1 + 1 / pieces)
