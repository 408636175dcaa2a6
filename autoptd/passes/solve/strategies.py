"""The ways to run an operator and to store a parameter over tp, with what each costs: what the solver chooses from.

In: a node, and the `Splitter` that says what tp may split. Out: `Strategy`s: types of operands and result, seconds, the reason.

    make_strategies(node, splitter)[0].why      # "whole on every rank"
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.layout import Layout
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note, op_name, payload
from autoptd.ir.operators.record import operands
from autoptd.ir.operators.table import addends, linear_groups, operator_of
from autoptd.ir.steps import Step, steps
from autoptd.ir.types import I, P, R, S, ValueType, division_text, shard_size
from autoptd.passes.axes.axes import Axes, Letter
from autoptd.passes.axes.padding import Padding
from autoptd.passes.ops.costs import compute_seconds, conversion_seconds, flops
from autoptd.passes.solve.shard_pins import Pins
from autoptd.passes.solve.splits import Factors, Split

WHOLE = "whole on every rank"
EAGER = 10  # what a byte costs that every rank saves, in passes over a link, where Korthikanti's plan was asked for
NO_COLLECTIVE_FORMS = ("vocab_cross_entropy",)  # local forms that reduce inside: their result is I


@dataclass(frozen=True)
class Strategy:
    """One way to run an operator: the types of each operand (I for values without parameters), of the result, its cost."""

    needs: dict[Node, Layout]
    gives: Layout
    seconds: float
    why: str
    form: str = ""


class Part(Enum):
    """What an axis of the mesh may split, if its policy says so; the batch is none of it."""

    TOKENS = "the other dims of inputs: positions in a sequence, pixels"
    WEIGHTS = "all other dims: those of parameters, and what is made of them"


class Splitter:
    """What an axis of a mesh may split: letters that its ranks or those of two sub-axes (`splits.py`) divide, and
    vocabularies, of the parts that it `may_split`; never the batch.

    `batched` names the inputs whose dim 0 is the batch; `pins` hold parameters to what a plan says, `kept` all that is
    split without tokens to what it was there.
    """

    kept: KeptPlan | None = None

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
        self._paths: dict[tuple[Layout, Layout], list[Step] | None] = {}
        self.padding, self.factors = Padding(graph, axes, self.degree), Factors(graph, axes, axis, mesh)
        of_inputs: dict[bool, set[int]] = {True: set(), False: set()}
        for node in graph.nodes:
            if note(node).kind == "input" and axes.has(node):
                for dim, ids in enumerate(axes.ids(node)):
                    of_inputs[dim == 0 and note(node).name in batched].update(ids)
        self.tokens = of_inputs[False] - of_inputs[True]
        self.may_split = may_split
        self.never_split = of_inputs[True] | (set() if Part.TOKENS in may_split else self.tokens)

    @property
    def per_whole_byte(self) -> float:
        """What a saved byte costs more where every rank saves it."""
        return EAGER / self.machine.link_bandwidth if self.kept else 0.0

    def over(self, kind: ValueType) -> Layout:
        """The layout of one type over the axis."""
        return Layout({self.axis: kind})

    def path(self, source: Layout, target: Layout) -> list[Step] | None:
        """The conversions over the axis from one layout to another: `ir/steps.py`."""
        key = source, target
        if key not in self._paths:
            self._paths[key] = steps(self.axis, source, target, self.mesh)
        return self._paths[key]

    def is_plain(self, node: Node, types: Layout) -> bool:
        """Whether layers that hand on values like that of `node` as `types` are easily read: whole, pending, or by tokens.

        With an R the sums of gradients stand behind norms, where no product can run beside them; a norm of another shard sums
        or gathers by itself.
        """
        if not types.shards:
            return types != self.over(R)
        return any(id(self.axes.atoms(node, kind.dim)[kind.atom]) in self.tokens for _, kind in types.shards)

    def splits(self, node: Node) -> list[Split]:
        """The ways in which `node` may be split."""
        free = [letter for letter in self.free_letters(node) if self.padding.divides(node, letter)]
        return [Split(((self.axis, letter),)) for letter in free] + self.factors.splits(node)

    def shards(self, node: Node) -> list[Layout]:
        """The types in which a value may be stored in shards."""
        if Part.WEIGHTS not in self.may_split:
            return []
        places = [(dim, atom) for dim, sizes in enumerate(note(node).dims) for atom in range(len(sizes))]
        divided = [at for at in places if self.padding.divides_place(node, at)]
        return [self.over(S(*at)) for at in divided] + self.factors.shards(node)

    def blocked(self, node: Node) -> list[Letter]:
        """The letters by which `node` would be split if t divided them; those that sub-axes split are none of them."""
        factored = {axis for pair in self.factors.pairs for axis in pair}
        free = [
            letter
            for letter in self.free_letters(node)
            if factored.isdisjoint(self.axes.ids_of(node, letter))
        ]
        return [letter for letter in free if not self.padding.divides(node, letter)]

    def free_letters(self, node: Node) -> list[Letter]:
        """All letters but those that the axis may not split."""
        return [
            letter for letter in self.axes.letters(node) if self._may_split(self.axes.ids_of(node, letter))
        ]

    def _may_split(self, ids: Collection[int]) -> bool:
        """Whether the axis may split what runs along these named axes."""
        if Part.WEIGHTS not in self.may_split and not self.tokens.issuperset(ids):
            return False
        return self.never_split.isdisjoint(ids)


@dataclass(frozen=True)
class KeptPlan:
    """What is split without tokens, by what splitter, and how: the plan that Korthikanti's sequence parallelism starts from."""

    splitter: Splitter
    chosen: dict[Node, Strategy]

    def allows(self, node: Node, one: Strategy, without: list[Strategy]) -> bool:
        """Whether `node` may be run like `one`; `without` are the ways in which it may where no tokens are split.

        A split matrix product, and a parameter, keep their split; all others may be split by tokens instead, or be whole.
        """
        kept = self.chosen[node]
        if one == kept or is_whole(one):
            return one == kept or not is_split(kept) or not (flops(node) or note(node).kind == "param")
        return one not in without and not (flops(node) and is_split(kept))


def is_split(one: Strategy) -> bool:
    """Whether ranks do, or store, different parts of something."""
    return any(types.shards for types in (one.gives, *one.needs.values()))


def is_whole(one: Strategy) -> bool:
    """Whether every rank does, or stores, all of it."""
    return one.gives.is_whole and not is_split(one)


def make_strategies(node: Node, splitter: Splitter) -> list[Strategy]:
    """All ways to run an operator, or to store a parameter, in a fixed order: whole ones first."""
    made = _every_strategy(node, splitter)
    if splitter.kept is None:
        return made
    without = _every_strategy(node, splitter.kept.splitter)
    return [one for one in made if splitter.kept.allows(node, one, without)]


def _every_strategy(node: Node, splitter: Splitter) -> list[Strategy]:
    if note(node).kind == "param":
        return parameter_strategies(node, splitter)
    machine = splitter.machine
    read = list(dict.fromkeys(operands(node)))
    seconds = compute_seconds(node, machine)
    in_full = seconds + (machine.redundant if flops(node) else 0.0)

    def whole(one: Node, kind: ValueType = R) -> Layout:
        return splitter.over(kind if note(one).of_params else I)

    made = []
    for kind in (I, R) if splitter.axes.is_linear(node) else (I,):
        needs = {one: whole(one, kind) for one in read}
        made.append(Strategy(needs, splitter.over(kind), in_full, WHOLE))
    for split in splitter.splits(node):
        needs = {one: split.needs(one) if one in split.carriers else whole(one) for one in read}
        pieces = math.prod(splitter.mesh.degree(axis) for axis, _ in split.letters)
        # Only matrix products are credited for a split: for the rest, splitting must not cost a collective but earns nothing
        # (sharding the residual stream to save on its adds would trade every all-reduce for two collectives).
        seconds_here, gives = seconds / pieces if flops(node) else seconds, split.gives or splitter.over(P)
        if split.form in NO_COLLECTIVE_FORMS:
            gives, seconds_here = splitter.over(I), seconds_here + 3 * machine.latency
        if split.is_contracted and not split.form:
            # One rank keeps the bias.
            needs |= dict.fromkeys(addends(node, set(split.carriers)), splitter.over(P))
        origin = splitter.axes.origin(node)
        why = (f"{origin}: " if origin else "") + _split_why(node, split, pieces, splitter.degree)
        form = split.form if split.is_contracted else ""
        made.append(Strategy(needs, gives, seconds_here, why, form))
    for group in linear_groups(node):
        if any(note(one).of_params for one in group):
            needs = {one: splitter.over(P) if one in group else whole(one) for one in read}
            # A sum stays pending only where that saves something: half a latency decides against it where nothing is saved.
            pending = in_full + (machine.latency / 2 if operator_of(node).is_sum else 0.0)
            made.append(Strategy(needs, splitter.over(P), pending, "linear in a pending sum"))
    return made


def _split_why(node: Node, split: Split, pieces: int, t: int) -> str:
    each, padded = division_text(split.size, pieces), ", padded" if split.size % pieces else ""
    each += alike_text(pieces, t)
    if op_name(node) == "aten.linear" and split.name in ("o", "i"):
        return f"column{padded}: {each}" if split.name == "o" else f"row: its input arrives sharded, {each}"
    if operator_of(node).factors and (
        of_weights := {note(one).kind == "param" for one in split.carriers}
    ) != {False}:
        if split.is_contracted:
            return f"row: its input arrives sharded, {each}"
        if of_weights == {True}:
            return f"column{padded}: {each}"
    return f"split by {split.name}{padded}: {each}"


def alike_text(pieces: int, t: int) -> str:
    """What is said of fewer pieces than ranks."""
    return f", {t // pieces} of {t} ranks share each" if pieces < t else ""


def parameter_strategies(node: Node, splitter: Splitter) -> list[Strategy]:
    """Stored whole with a whole gradient (I), whole with a gradient summed once per step (R), or sharded."""
    machine, mesh, nbytes = splitter.machine, splitter.mesh, payload(node)
    keep = nbytes * machine.per_parameter_byte

    def sum_once(types: Layout) -> float:
        """Seconds of the sums of a gradient: once per step, shared by its microbatches."""
        pending = [axis for axis, kind in types.types if kind == R]
        part = nbytes / types.pieces(mesh)
        return sum(conversion_seconds(I, R, part, mesh.degree(axis), machine) / 8 for axis in pending)

    made = [Strategy({}, splitter.over(I), keep, "replicated")]
    summed = splitter.over(R)
    made.append(Strategy({}, summed, keep + sum_once(summed), "replicated, gradient summed over tp"))
    for types in splitter.shards(node):
        size = math.prod(note(node).dims[kind.dim][kind.atom] for _, kind in types.shards)
        pieces = types.pieces(mesh)
        padded = ", padded" if size % pieces else ""
        why = f"sharded{padded}: {division_text(size, pieces)}" + alike_text(pieces, splitter.degree)
        made.append(Strategy({}, types, keep / size * shard_size(size, pieces) + sum_once(types), why))
    return _pinned(node, made, splitter) if node in splitter.pins else made


def _pinned(node: Node, made: list[Strategy], splitter: Splitter) -> list[Strategy]:
    """The strategies of a parameter that its pin allows."""
    pin, dims = splitter.pins[node], note(node).dims
    wanted = set() if pin.dim is None else {pin.dim}
    found = [one for one in made if one.gives.sharded_dims == wanted]
    if pin.layout is not None:
        found = [one for one in found if one.gives.element_layout(dims, splitter.mesh) == pin.layout]
    if not found:
        sizes = " x ".join(map(str, dims[pin.dim or 0])) or "1"
        fact = f"{pin}: of {sizes}, t={splitter.degree} divides no factor"
        raise PlanError("plan: shard", fact, "another dim, or leave it out")
    return found
