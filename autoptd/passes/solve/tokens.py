"""What context-parallel ranks may split: tokens everywhere, and heads of operators that need all tokens.

In: a CONNECTED graph, whose values already have types over tp, and whose conversions over tp are ordinary operators. Out: a
`Splitter` over cp.

- *Tokens* are the dims of inputs that are neither the batch nor multiplied by a weight, and the sequences of attention.
- An operator that reads tokens and cannot be split by them (attention, a scan) may be split by another letter, its *heads*,
  and so may all operators without weights around it. Parameters are whole: their gradients are summed over cp.

Both tp and cp may cut a dim. For tokens, tp cuts the part of a cp rank; for heads, cp cuts the part of a tp rank. The inner
part can be converted while the outer one stays, and not the other way around.

    splitter = TokenSplitter(graph, axes.connected(graph), "cp", mesh, machine, batched, attention="auto")
    splitter.splits(attention)      # by its heads
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator
from dataclasses import replace

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.layout import Layout, Step
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import AXES, Mesh, base
from autoptd.ir.notes import converted_types, note, op_name, ops, shape
from autoptd.ir.operators.record import CLASSES, QUERIES, argument, operands
from autoptd.ir.operators.table import operator_of
from autoptd.ir.types import S, ValueType
from autoptd.passes.axes.axes import Axes, Letter, Place
from autoptd.passes.ops.costs import compute_seconds, conversion_price, converted_bytes, flops
from autoptd.passes.solve.splits import ATTENTION, EAGER, Part, Split, Splitter, dependents, has_places

GATHERED_REMEDY = "nothing: right, but slower; or a form that keeps tokens apart"
# Most models shift their labels by cutting logits.
SHIFTED_REMEDY = "labels that are shifted and padded with the label -100, and whole logits"
# The extra price, in seconds, of an operator that all ranks repeat and that could be split. Users request c so that ranks have
# parts of all activations, and repeating a small operator saves far less than a millisecond.
REPEATED = 1e-3


class TokenSplitter(Splitter):
    """What the ranks along cp may split of a graph; `axes` are those of the graph with its conversions."""

    def __init__(
        self,
        graph: Graph,
        axes: Axes,
        axis: str,
        mesh: Mesh,
        machine: Machine,
        batched: Collection[str],
        *,
        attention: str,
    ) -> None:
        super().__init__(
            graph, axes, axis, mesh, machine, batched, may_split=frozenset({Part.TOKENS}), pins={}
        )
        # KV heads that several ranks share are read whole, of all tokens.
        self.factors.pairs = {}
        self.context = attention
        # About the solution over several axes together, for reports.
        self.joint_text = ""
        # The order of the shards of tokens: see `split_tokens.choose_order`.
        self.order = ""
        self.of_inputs = dependents(graph)
        self.tokens = (self.tokens | self._sequences(graph)) - self._of_weights(graph)
        self.tokens -= self.padding.vocabularies
        self.heads = self._find_heads(graph)

    def _sequences(self, graph: Graph) -> set[int]:
        """Return the axes of the sequences of attention; sequences of patches are not dims of an input."""
        found: set[int] = set()
        for node in ops(graph):
            if op_name(node) == ATTENTION:
                for operand in operands(node)[:3]:
                    found.update(self.axes.ids(operand)[-2])
        return found - self.never_split

    def _of_weights(self, graph: Graph) -> set[int]:
        """Return the axes of parameters that are factors of a product: they are not tokens, even if an input has them."""
        found: set[int] = set()
        for node in ops(graph):
            if flops(node) or op_name(node).startswith("aten.conv"):
                for operand in filter(self._is_weight, _factors(node)):
                    for ids in self.axes.ids(operand):
                        found.update(ids)
        return found

    def _is_weight(self, node: Node) -> bool:
        return note(node).of_params and node not in self.of_inputs

    def multiplies_activations(self, node: Node) -> bool:
        """Tell whether an operator is a product of two activations, such as attention."""
        return bool(flops(node)) and not any(map(self._is_weight, _factors(node)))

    def _find_heads(self, graph: Graph) -> set[int]:
        """Return the axes by which operators may be split that read tokens and cannot be split by them."""
        found: set[int] = set()
        for node in ops(graph):
            if not self.axes.has(node) or node not in self.of_inputs or not note(node).of_params:
                continue
            is_product = self.multiplies_activations(node)
            if not is_product and (not self.reads_tokens(node) or self._is_by_tokens(node)):
                continue
            for letter in self.axes.letters(node):
                # Both factors of a product have its heads. A letter of one factor alone is the size of a head.
                is_shared = len(letter.places) > 1 or _is_of_queries(node, letter) or not is_product
                ids = letter.ids
                if letter.out is not None and letter.places and is_shared and self.tokens.isdisjoint(ids):
                    found.update(ids)
        return found - self.never_split - self.padding.vocabularies

    def reads_tokens(self, node: Node) -> bool:
        """Tell whether an operand has a dim of tokens."""
        return any(not self.tokens.isdisjoint(_flat(self.axes.ids(read))) for read in operands(node))

    def _is_by_tokens(self, node: Node) -> bool:
        letters = self.axes.letters(node)
        return any(self.tokens.issuperset(letter.ids) for letter in letters)

    def splits(self, node: Node) -> list[Split]:
        """Return the ways to split `node`; tokens with 2c equal pieces are in the `order` of this graph."""
        splits = super().splits(node)
        return [replace(split, order=self._order_of(split)) for split in splits] if self.order else splits

    def _order_of(self, split: Split) -> str:
        is_token = all(self.tokens.issuperset(letter.ids) for _, letter in split.letters)
        return self.order if is_token and self._divides(split.size) else ""

    def _divides(self, size: int) -> bool:
        """Tell whether every rank can have two equal pieces."""
        return size % (2 * self.degree) == 0

    def has_pieces(self, node: Node, gives: Layout) -> bool:
        """Tell whether every rank can have two equal pieces of the atoms that `gives` shards."""
        return all(self._divides(note(node).dims[kind.dim][kind.atom]) for _, kind in gives.shards)

    def free_letters(self, node: Node) -> list[Letter]:
        """Return the letters of an operator that cp may split, whether or not its ranks divide them."""
        return [letter for letter in self.wanted_letters(node) if self._is_nested(node, letter)]

    def blocked(self, node: Node) -> list[Letter]:
        """Return the letters by which `node` would be split if c divided them, with the sizes that other axes leave of them."""
        letters = []
        for letter in self.wanted_letters(node):
            if not (self._is_nested(node, letter) and self.padding.divides(node, letter)):
                letters.append(replace(letter, size=letter.size // self._most_cut(node, letter)))
        return letters

    def wanted_letters(self, node: Node) -> list[Letter]:
        return [letter for letter in self.axes.letters(node) if self._is_wanted(node, letter)]

    def _is_wanted(self, node: Node, letter: Letter) -> bool:
        ids = letter.ids
        if not self.never_split.isdisjoint(ids) or letter.form.startswith(("vocab_", CLASSES)):
            return False
        if node.target is markers.convert and not self._keeps_outer(node, letter):
            return False
        if self.tokens.issuperset(ids):
            # Positions of causal queries are counted along one axis.
            is_cut = (
                letter.form == QUERIES and self._most_cut(node, letter) > 1 and argument(node, "is_causal")
            )
            if is_cut or (letter.form == QUERIES and not has_places(node, letter)):
                return False
            # Ulysses splits attention by heads only.
            return not (self.context == "ulysses" and self.multiplies_activations(node))
        is_asked = self.context == "all_gather" and self.multiplies_activations(node)
        if not self.heads.issuperset(ids) or is_asked:
            return False
        return not any(map(self._is_weight, operands(node) if flops(node) else letter.places))

    def _is_nested(self, node: Node, letter: Letter) -> bool:
        """Tell whether cp may cut the part of a letter that other axes leave."""
        cut = self._most_cut(node, letter)
        return cut == 1 or letter.size % (cut * self.degree) == 0

    def _most_cut(self, node: Node, letter: Letter) -> int:
        """Return the number of pieces into which other axes cut a letter."""
        cutting = [self._cutting(*each) for each in letter.everywhere(node)]
        return max(math.prod(map(self.mesh.degree, axes)) for axes in cutting) if any(cutting) else 1

    def _cutting(self, value: Node, place: Place) -> list[str]:
        """Return the other axes that cut an atom, in any order of shards."""
        shards = note(value).layout.shards
        return [axis for axis, kind in shards if (kind.dim, kind.atom) == place and base(axis) != self.axis]

    def axes_of_tokens(self, graph: Graph) -> list[str]:
        """Return the other axes that cut tokens anywhere."""
        found: dict[str, None] = {}
        for node in ops(graph):
            if self.axes.has(node):
                for axis, kind in self._others(node).shards:
                    if self.is_token(node, (kind.dim, kind.atom)):
                        found[base(axis)] = None
        return list(found)

    def _others(self, value: Node) -> Layout:
        layout = note(value).layout
        return Layout({axis: kind for axis, kind in layout.over_mesh if base(axis) != self.axis})

    def _keeps_outer(self, node: Node, letter: Letter) -> bool:
        """Tell whether a conversion over another axis does not change an outer part of a dim that cp cuts.

        cp has the outer part of tokens. Of all other dims, it has the inner part, and the outer part must stay.
        """
        source, place = next(iter(letter.places.items()))
        if self.is_token(node, place):
            return True
        before, after = (self._others(value)[note(node).axis] for value in (source, node))
        return S(*place) not in (before, after)

    def gathered(self, node: Node, operand: Node) -> bool:
        """Tell whether an operator reads all tokens of a value whose tokens are sharded."""
        is_part = any(self.is_token(operand, (kind.dim, kind.atom)) for _, kind in self._own(operand).shards)
        return is_part and note(node).of_params and node.target is not markers.convert

    def _own(self, value: Node) -> Layout:
        return note(value).layout.over(self.axis)

    def inner_of(self, node: Node, kind: ValueType) -> str:
        """Return the axis with the inner part of an atom that cp and another axis cut."""
        while not self.axes.has(node):
            node = node.args[0]  # type: ignore[assignment]
        is_token = self.is_token(node, (kind.dim, kind.atom))
        return next(iter(self._given), "") if is_token else self.axis

    def inner_axis(self, node: Node) -> str:
        """Return the axis with the inner part of an atom that cp also cuts; "" if there is no such atom."""
        for _, kind in self._own(node).shards:
            place = kind.dim, kind.atom
            for axis in self._cutting(node, place):
                return base(axis) if self.is_token(node, place) else self.axis
        return ""

    def may_convert(self, node: Node, path: list[Step]) -> bool:
        """Tell whether no other axis has an inner part of the atoms that are converted."""
        kinds: set[ValueType] = {kind for step in path for kind in (step.before, step.after)}
        places = [(kind.dim, kind.atom) for kind in kinds if kind.kind == "S"]
        return not any(self.is_token(node, place) and any(self._cutting(node, place)) for place in places)

    def is_token(self, node: Node, place: Place) -> bool:
        return self.axes.ids(node)[place[0]][place[1]] in self.tokens

    def decides(self, node: Node) -> bool:
        """Tell whether the solver finds the types of a node.

        Among values that depend on no parameter, it does so for conversions over tp: cp slices before them.
        """
        return note(node).of_params or node.target in markers.PLACED

    def is_as_wanted(self, node: Node, axes: Collection[int]) -> bool:
        return not self.tokens.isdisjoint(axes)

    def name_of(self, node: Node, split: Split) -> str:
        (_, letter), *_ = split.letters
        return "tokens" if self.tokens.issuperset(letter.ids) else split.name

    def other_pieces(self, node: Node) -> int:
        return self._others(node).pieces(self.mesh)

    def split_seconds(self, node: Node, pieces: float) -> float:
        # A conversion over tp converts the part that cp leaves of a value.
        return (
            self.seconds(node) / pieces
            if node.target is markers.convert
            else super().split_seconds(node, pieces)
        )

    def seconds(self, node: Node) -> float:
        if node.target is markers.convert:
            kinds, nbytes = converted_types(node), converted_bytes(node, self.mesh)
            return conversion_price(*kinds, nbytes, self.mesh.degree(note(node).axis), self.machine)
        # Only the operands have a contracted letter.
        pieces = max(map(self.other_pieces, (node, *node.all_input_nodes)))
        return compute_seconds(node, self.machine) / pieces

    def repeating(self, node: Node) -> float:
        extra = super().repeating(node)
        is_activation = note(node).of_params and node in self.of_inputs
        # KV heads are gathered before they are repeated, not after.
        return extra + (REPEATED if is_activation and not is_repeat(node) and self.splits(node) else 0.0)

    @property
    def whose(self) -> str:  # type: ignore[override]
        """Name the ranks whose part is divided, if other axes also divide a layer."""
        words = [AXES[axis].word for axis in self._given]
        return f" of a {' and '.join(words)} rank" if words else ""

    @property
    def _given(self) -> list[str]:
        """The other axes whose ranks share the values of a layer."""
        return [axis for axis in self.mesh.value_axes if axis != self.axis and self.mesh.degree(axis) > 1]

    @property
    def remarks(self) -> tuple[str, ...]:  # type: ignore[override]
        """Describe the prices that are not seconds, and the order in which axes were solved."""
        remarks = [
            f"over {self.axis}, an operator that all ranks repeat and could split counts {1e6 * REPEATED:,.0f} us more"
        ]
        if self.joint_text:
            remarks.append(self.joint_text)
        elif self._given:
            first = ", ".join(self._given)
            remarks.append(
                f"solved over {first} first, then over {self.axis}: solving both together may be cheaper"
            )
        if self.order:
            pieces = f"rank i of {self.degree} has pieces i and {2 * self.degree - 1} - i"
            remarks.append(f"tokens in {self.order} order: of {2 * self.degree} pieces, {pieces}")
        return tuple(remarks)

    @property
    def per_whole_byte(self) -> float:
        return EAGER / self.machine.link_bandwidth

    def facts(self, node: Node) -> Hashable:
        return note(node).layout


def is_repeat(node: Node) -> bool:
    """Tell whether an operator repeats its operand, or is the reshape after that."""
    return operator_of(node).moves in ("spread", "fold") or op_name(node).startswith("aten.repeat")


def _is_of_queries(node: Node, letter: Letter) -> bool:
    """Tell whether a letter of attention is query heads that share keys and values."""
    return op_name(node) == ATTENTION and letter.name in ("repeat", f"b{len(shape(node)) - 3}")


def _factors(node: Node) -> list[Node]:
    """Return the factors of a product; for attention, without the mask, which is added and may be learned."""
    read = operands(node)
    return read[:3] if op_name(node) == ATTENTION else read


def _flat(dims: list[list[int]]) -> Iterator[int]:
    return (each for ids in dims for each in ids)


__all__ = ["GATHERED_REMEDY", "SHIFTED_REMEDY", "TokenSplitter", "is_repeat"]
