"""The ways to run an operator, and to store a parameter, over a mesh axis: what the solver chooses from.

In: a node, and the `Splitter` that says what the axis may split. Out: `Strategy`s: the types of operands and result, seconds,
the reason.

    make_strategies(node, splitter)[0].why      # "whole on every rank"
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from torch.fx import Graph, Node

from autoptd.ir.expert_mm import NAME as EXPERT_MM
from autoptd.ir.layout import Layout, Step, loss_over, steps
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note, op_name, payload
from autoptd.ir.operators.record import CLASSES, QUERIES, operands
from autoptd.ir.operators.table import addends, linear_groups, operator_of
from autoptd.ir.types import I, P, R, S, ValueType, division_text, shard_size
from autoptd.passes.axes.axes import Axes, Letter
from autoptd.passes.axes.vocabulary import Padding
from autoptd.passes.ops.costs import compute_seconds, conversion_seconds, flops
from autoptd.passes.solve.classes import REDUCED_FORMS, REDUCTIONS, classes_of
from autoptd.passes.solve.experts import expert_ways, product_seconds, rows_by_expert
from autoptd.passes.solve.queries import divides_heads, has_places, order_of_queries, work_parts
from autoptd.passes.solve.shard_pins import Pins
from autoptd.passes.solve.split_words import alike_text, why_split
from autoptd.passes.solve.splits import Factors, Split
from autoptd.passes.solve.strategy import WHOLE, Strategy

# What a byte that every rank saves costs extra where Korthikanti's plan was asked for, in passes over a link: so much that
# whatever can be split by tokens is.
EAGER = 10
# The sum of a parameter's gradient happens once per step, and is shared by about this many microbatches.
MICROBATCHES_PER_STEP = 8


class Part(Enum):
    """What an axis of the mesh may split, if its policy says so. The batch is neither: it is never split here."""

    TOKENS = "the other dims of inputs: positions in a sequence, pixels"
    WEIGHTS = "all other dims: those of parameters, and what is made of them"


class Splitter:
    """What an axis of a mesh may split, of the parts that it `may_split`; never the batch.

    These are letters whose size its ranks, or those of two sub-axes (`splits.py`), divide, and vocabularies, which are
    padded. `batched` names the inputs whose dim 0 is the batch. `pins` fix how parameters are stored; `kept` is the plan
    without tokens that a plan with tokens must keep to.
    """

    kept: KeptPlan | None = None
    # Whether all but attention has the tokens whole, on every axis.
    has_whole_tokens = False

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
        # The same few pairs of layouts are asked for at every edge of every layer.
        self._paths: dict[tuple[Layout, Layout], list[Step] | None] = {}
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
        # An axis that is the batch of one input is so for all, wherever they have it.
        self.classes = classes_of(graph, axes)
        # Nor are classes tokens, which a teacher's scores have as well.
        self.tokens = others - batch - self.classes
        # What has a row for each choice of an expert, if matrices may be split.
        self.expert_rows = rows_by_expert(graph) if Part.WEIGHTS in may_split else {}
        self.may_split = may_split
        self.batch, self.never_split = batch, set(batch)
        if Part.TOKENS not in may_split:
            self.never_split |= self.tokens

    @property
    def per_whole_byte(self) -> float:
        """The extra seconds for a saved byte where every rank saves it."""
        return EAGER / self.machine.link_bandwidth if self.kept else 0.0

    def decides(self, node: Node) -> bool:
        """Tell whether a node has types to be found; what depends on no parameter is whole on every rank."""
        return note(node).of_params

    # For people: about the axis as a whole, and whose sizes it divides.
    remarks: tuple[str, ...] = ()
    whose = ""

    def is_as_wanted(self, node: Node, axes: Collection[int]) -> bool:
        """Tell whether an operator that is split along these named axes need not be split by its heads."""
        return False

    def name_of(self, node: Node, split: Split) -> str:
        """Return what a split is by, for people."""
        return split.form if split.form == QUERIES else split.name

    def other_pieces(self, node: Node) -> int:
        """Return in how many pieces axes that were solved before cut a value."""
        return 1

    def nbytes(self, node: Node) -> float:
        """Return the bytes of the value that the ranks along the axis have together."""
        return payload(node) / self.other_pieces(node)

    def seconds(self, node: Node) -> float:
        """Return the seconds of an operator, where the axis does not split it."""
        return compute_seconds(node, self.machine)

    def split_seconds(self, node: Node, pieces: float) -> float:
        """Return the seconds of an operator that the axis splits."""
        # Only matrix products are credited for a split: for the rest, splitting must not cost a collective but earns
        # nothing (sharding the residual stream to save on its adds would trade every all-reduce for two collectives).
        return self.seconds(node) / (pieces if flops(node) else 1)

    def repeating(self, node: Node) -> float:
        """Return the extra seconds of an operator that every rank runs whole."""
        # A matrix product that is repeated pays a little more.
        return self.machine.redundant if flops(node) else 0.0

    def may_convert(self, node: Node, path: list[Step]) -> bool:
        """Tell whether a value that other axes cut may be converted by these steps."""
        return True

    def facts(self, node: Node) -> list[Layout]:
        """Return all that tells a value from others of its shape: of what is stored, in which shards it may be."""
        return self.shards(node) if note(node).kind == "param" else []

    @property
    def loss(self) -> Layout:
        """The type of the loss over the axis: whole, or what the sums over samples add up, once a step."""
        return loss_over(self.axis)

    def over(self, kind: ValueType) -> Layout:
        """Return the layout with one type over the axis."""
        return Layout({self.axis: kind})

    def path(self, source: Layout, target: Layout) -> list[Step] | None:
        """Return the conversions over the axis from one layout to another (`ir/layout.py`), None where there are none."""
        key = source, target
        if key not in self._paths:
            self._paths[key] = steps(self.axis, source, target, self.mesh)
        return self._paths[key]

    def is_plain(self, node: Node, types: Layout) -> bool:
        """Tell whether layers that hand on values like that of `node` as `types` are easy to read: whole, P, or by tokens.

        With R, gradients would be summed behind norms, where no matrix product can overlap the collective; with shards of
        another dim, every norm would need a collective of its own.
        """
        if not types.shards:
            return types != self.over(R)
        split_axes = {id(self.axes.atoms(node, kind.dim)[kind.atom]) for _, kind in types.shards}
        return not split_axes.isdisjoint(self.tokens)

    def splits(self, node: Node) -> list[Split]:
        """Return the ways in which `node` may be split: by one letter, then by two over sub-axes."""
        free = [letter for letter in self.free_letters(node) if self.padding.divides(node, letter)]
        splits = [Split(((self.axis, letter),), order=self._order(node, letter)) for letter in free]
        return splits + self.factors.splits(node)

    def _order(self, node: Node, letter: Letter) -> str:
        """Return the order of shards: that of attention is its own where no other tokens are split."""
        return order_of_queries(node, letter, self.degree) if self.has_whole_tokens else ""

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
        # 2 KV heads over t=4 are no misfit: the pair with its query heads is split instead.
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
        """Return the letters of an operator that the axis may split, whether or not it divides them."""
        return [letter for letter in self.axes.letters(node) if letter.size and self._is_free(node, letter)]

    def _is_free(self, node: Node, letter: Letter) -> bool:
        ids = letter.ids
        # Not the positions that attention's softmax runs over.
        is_allowed = not letter.form.startswith(CLASSES) or not self.classes.isdisjoint(ids)
        if letter.form == QUERIES:
            return self._splits_queries(node, ids) and has_places(node, letter)
        return is_allowed and self._may_split(ids)

    def _splits_queries(self, node: Node, ids: Collection[int]) -> bool:
        """Tell whether attention may be split by tokens, though nothing else is: where no heads divide.

        Blocks of tokens with attention of their own are no heads: the answer is the same whether or not tokens may be split.
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
    """The plan without tokens that Korthikanti's sequence parallelism starts from, and the splitter it was found with."""

    splitter: Splitter
    chosen: dict[Node, Strategy]

    def allows(self, node: Node, strategy: Strategy, without: list[Strategy]) -> bool:
        """Tell whether a strategy is one for `node` in a plan that splits tokens, too.

        A split matrix product and a parameter keep their split; all others may be split by tokens instead, or be whole.
        `without` are the strategies of the node where no tokens are split.
        """
        kept = self.chosen[node]
        if strategy == kept:
            return True
        if strategy.is_whole:
            # A product that was split may not become whole for the tokens' sake; an add between may.
            return not kept.is_split or not (flops(node) or note(node).kind == "param")
        return strategy not in without and not (flops(node) and kept.is_split)


def make_strategies(node: Node, splitter: Splitter) -> list[Strategy]:
    """Return all ways to run an operator, or to store a parameter, in a fixed order: whole ones first.

    The order breaks ties of the solver.
    """
    strategies = _every_strategy(node, splitter)
    if splitter.kept is None:
        return strategies
    without = _every_strategy(node, splitter.kept.splitter)
    return [strategy for strategy in strategies if splitter.kept.allows(node, strategy, without)]


def _every_strategy(node: Node, splitter: Splitter) -> list[Strategy]:
    if note(node).kind == "param":
        return parameter_strategies(node, splitter)
    return (
        _whole_strategies(node, splitter)
        + _split_strategies(node, splitter)
        + [Strategy(*way) for way in expert_ways(node, splitter, splitter.expert_rows)]
        + _pending_strategies(node, splitter)
    )


def _whole(operand: Node, splitter: Splitter, kind: ValueType = R) -> Layout:
    """Return the layout of a whole operand; what depends on no parameter has no gradient and is I."""
    return splitter.over(kind if note(operand).of_params else I)


def _whole_strategies(node: Node, splitter: Splitter) -> list[Strategy]:
    # Backward of a linear operator may run on partial gradients: then its result may be R.
    kinds = (I, R) if splitter.axes.is_linear(node) and note(node).of_params else (I,)
    seconds = splitter.seconds(node) + splitter.repeating(node)
    strategies = []
    for kind in kinds:
        needs = {operand: _whole(operand, splitter, kind) for operand in operands(node)}
        strategies.append(Strategy(needs, splitter.over(kind), seconds, WHOLE))
    return strategies


def _split_strategies(node: Node, splitter: Splitter) -> list[Strategy]:
    machine = splitter.machine
    strategies = []
    for split in splitter.splits(node):
        needs = {operand: _whole(operand, splitter) for operand in operands(node)}
        # Those that have the letter; all others stay whole, with partial gradients (R).
        needs |= {operand: split.needs(operand) for operand in operands(node) if operand in split.carriers}
        pieces = math.prod(splitter.mesh.degree(axis) for axis, _ in split.letters)
        seconds = splitter.split_seconds(node, work_parts(node, split.carriers, pieces))
        gives = split.gives or splitter.over(P)
        if op_name(node) == EXPERT_MM and node in splitter.expert_rows:
            seconds = product_seconds(node, splitter, needs, gives)
        if split.form in REDUCED_FORMS:
            gives = splitter.over(I)
        if split.is_contracted or split.form.startswith(CLASSES):
            # Of values that are small beside its operand.
            seconds += REDUCTIONS.get(split.form, 0) * machine.latency
        if split.is_contracted and not split.form:
            # One rank adds the bias.
            needs |= dict.fromkeys(addends(node, set(split.carriers)), splitter.over(P))
        origin = splitter.axes.origin(node)
        why = why_split(node, split, splitter.name_of(node, split), pieces, splitter.degree)
        why = f"{origin}: {why}" if origin else why
        form = split.form if split.is_contracted or split.form.startswith((CLASSES, QUERIES)) else ""
        strategies.append(Strategy(needs, gives, seconds, why, form))
    return strategies


def _pending_strategies(node: Node, splitter: Splitter) -> list[Strategy]:
    seconds = splitter.seconds(node) + splitter.repeating(node)
    # A sum stays pending only where that saves something: half a latency decides against it where nothing is saved.
    if operator_of(node).is_sum:
        seconds += splitter.machine.latency / 2
    strategies = []
    # A pending sum goes through adds and scaling; its all-reduce comes later, or once for several (the two
    # branches of a parallel residual).
    for group in linear_groups(node):
        if any(note(operand).of_params for operand in group):
            needs = {operand: _whole(operand, splitter) for operand in operands(node)}
            needs |= dict.fromkeys(group, splitter.over(P))
            strategies.append(Strategy(needs, splitter.over(P), seconds, "linear in a pending sum"))
    return strategies


def parameter_strategies(node: Node, splitter: Splitter) -> list[Strategy]:
    """Return the ways to store a parameter.

    They are: whole with a whole gradient (I), whole with a gradient summed once per step (R), or sharded.
    """
    machine, mesh, nbytes = splitter.machine, splitter.mesh, splitter.nbytes(node)
    keep = nbytes * machine.per_parameter_byte

    def sum_once(types: Layout) -> float:
        """Return the seconds of the sums of a gradient, per microbatch."""
        part, seconds = nbytes / types.pieces(mesh), 0.0
        for axis, kind in types.types:
            if kind == R:
                seconds += conversion_seconds(I, R, part, mesh.degree(axis), machine) / MICROBATCHES_PER_STEP
        return seconds

    # I first: on equal price, no gradient needs a sum.
    strategies = [Strategy({}, splitter.over(I), keep, "replicated")]
    summed = splitter.over(R)
    strategies.append(
        Strategy({}, summed, keep + sum_once(summed), f"replicated, gradient summed over {splitter.axis}")
    )
    for types in splitter.shards(node):
        size = math.prod(note(node).dims[kind.dim][kind.atom] for _, kind in types.shards)
        pieces = types.pieces(mesh)
        padded = ", padded" if size % pieces else ""
        why = f"sharded{padded}: {division_text(size, pieces)}" + alike_text(pieces, splitter.degree)
        seconds = keep / size * shard_size(size, pieces) + sum_once(types)
        strategies.append(Strategy({}, types, seconds, why))
    return _pinned(node, strategies, splitter) if node in splitter.pins else strategies


def _pinned(node: Node, strategies: list[Strategy], splitter: Splitter) -> list[Strategy]:
    """Return those strategies of a parameter that its pin allows; PlanError where there are none."""
    pin, dims = splitter.pins[node], note(node).dims
    allowed = [strategy for strategy in strategies if pin.allows(strategy.gives, dims, splitter.mesh)]
    if not allowed:
        raise pin.refused(dims, splitter.degree)
    return allowed
