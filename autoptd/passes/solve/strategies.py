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
from autoptd.ir.machine import Machine
from autoptd.ir.notes import note, op_name, payload
from autoptd.ir.operators.record import operands
from autoptd.ir.operators.table import addends, linear_groups, operator_of
from autoptd.ir.types import I, P, R, S, ValueType, division_text, placement, shard_size
from autoptd.passes.axes.axes import Axes, Letter
from autoptd.passes.axes.padding import Padding
from autoptd.passes.ops.costs import compute_seconds, conversion_seconds, flops
from autoptd.passes.solve.shard_pins import Pins
from autoptd.passes.solve.sharing import Sharing

WHOLE = "whole on every rank"
EAGER = 10  # what a byte costs that every rank saves, in passes over a link, where Korthikanti's plan was asked for
NO_COLLECTIVE_FORMS = ("vocab_cross_entropy",)  # local forms that reduce inside: their result is I


@dataclass(frozen=True)
class Strategy:
    """One way to run an operator: the type of each operand (I for values without parameters), of the result, its cost."""

    needs: dict[Node, ValueType]
    gives: ValueType
    seconds: float
    why: str
    form: str = ""


class Part(Enum):
    """What an axis of the mesh may split, if its policy says so; the batch is none of it."""

    TOKENS = "the other dims of inputs: positions in a sequence, pixels"
    WEIGHTS = "all other dims: those of parameters, and what is made of them"


class Splitter:
    """What an axis of `degree` ranks may split: letters that they divide, and vocabularies, of the parts that it `may_split`.

    `batched` names the inputs whose dim 0 is the batch; `pins` hold parameters to what a plan says, `kept` all that is
    split without tokens to what it was there.
    """

    kept: KeptPlan | None = None

    def __init__(
        self,
        graph: Graph,
        axes: Axes,
        axis: str,
        degree: int,
        machine: Machine,
        batched: Collection[str],
        *,
        may_split: frozenset[Part],
        pins: Pins,
    ) -> None:
        self.axes, self.axis, self.degree, self.machine, self.pins = axes, axis, degree, machine, pins
        self.padding, self.sharing = Padding(graph, axes, degree), Sharing(graph, axes, degree)
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

    def is_plain(self, node: Node, kind: ValueType) -> bool:
        """Whether layers that hand on values like that of `node` as `kind` are easily read: whole, pending, or by tokens.

        With an R the sums of gradients stand behind norms, where no product can run beside them; a norm of another shard sums
        or gathers by itself.
        """
        if kind.kind != "S":
            return kind != R
        return any(id(self.axes.atoms(node, dim)[atom]) in self.tokens for dim, atom in kind.places)

    def letters(self, node: Node) -> list[Letter]:
        """The letters by which `node` may be split."""
        whole = [letter for letter in self.free_letters(node) if self.padding.divides(node, letter)]
        return whole + self.sharing.letters(node)

    def shards(self, node: Node) -> list[ValueType]:
        """The types in which a value may be stored in shards."""
        if Part.WEIGHTS not in self.may_split:
            return []
        places = [(dim, atom) for dim, sizes in enumerate(note(node).dims) for atom in range(len(sizes))]
        return [S(*at) for at in places if self.padding.divides_place(node, at)] + self.sharing.shards(node)

    def blocked(self, node: Node) -> list[Letter]:
        """The letters by which `node` would be split if t divided them; those that ranks can share are none of them."""
        shared = {axis for pair in self.sharing.pairs for axis in pair}
        free = [letter for letter in self.free_letters(node) if shared.isdisjoint(self.axes.ids_of(node, letter))]
        return [letter for letter in free if not self.padding.divides(node, letter)]

    def free_letters(self, node: Node) -> list[Letter]:
        """All letters but those that the axis may not split."""
        return [letter for letter in self.axes.letters(node) if self._may_split(self.axes.ids_of(node, letter))]

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
    return any(kind.kind == "S" for kind in (one.gives, *one.needs.values()))


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
    machine, t = splitter.machine, splitter.degree
    read = list(dict.fromkeys(operands(node)))
    seconds = compute_seconds(node, machine)
    in_full = seconds + (machine.redundant if flops(node) else 0.0)
    # Only matrix products are credited for a split: for the rest, splitting must not cost a collective but earns nothing
    # (sharding the residual stream to save on its adds would trade every all-reduce for two collectives).
    split_seconds = seconds / t if flops(node) else seconds

    def whole(one: Node, kind: ValueType = R) -> ValueType:
        return kind if note(one).of_params else I

    made = []
    for kind in (I, R) if splitter.axes.is_linear(node) else (I,):
        needs = {one: whole(one, kind) for one in read}
        made.append(Strategy(needs, kind, in_full, WHOLE))
    for letter in splitter.letters(node):
        needs = {one: letter.needs(one) if one in letter.places else whole(one) for one in read}
        if letter.form in NO_COLLECTIVE_FORMS:
            gives, seconds_here = I, split_seconds + 3 * machine.latency
        else:
            gives, seconds_here = letter.gives or P, split_seconds * (letter.copies if flops(node) else 1)
        if letter.out is None and not letter.form:
            needs |= dict.fromkeys(addends(node, set(letter.places)), P)  # one rank keeps the bias
        origin = splitter.axes.origin(node)
        why = (f"{origin}: " if origin else "") + _split_why(node, letter, t)
        form = letter.form if letter.out is None else ""
        made.append(Strategy(needs, gives, seconds_here, why, form))
    for group in linear_groups(node):
        if any(note(one).of_params for one in group):
            needs = {one: P if one in group else whole(one) for one in read}
            # A sum stays pending only where that saves something: half a latency decides against it where nothing is saved.
            pending = in_full + (machine.latency / 2 if operator_of(node).is_sum else 0.0)
            made.append(Strategy(needs, P, pending, "linear in a pending sum"))
    return made


def _split_why(node: Node, letter: Letter, t: int) -> str:
    pieces = t // letter.copies
    each, padded = division_text(letter.size, pieces), ", padded" if letter.size % pieces else ""
    each += copies_text(letter.copies, t)
    if op_name(node) == "aten.linear" and letter.name in ("o", "i"):
        return f"column{padded}: {each}" if letter.name == "o" else f"row: its input arrives sharded, {each}"
    if operator_of(node).factors and (of_weights := {note(one).kind == "param" for one in letter.places}) != {False}:
        if letter.out is None:
            return f"row: its input arrives sharded, {each}"
        if of_weights == {True}:
            return f"column{padded}: {each}"
    return f"split by {letter.name}{padded}: {each}"


def copies_text(copies: int, t: int) -> str:
    """What is said of pieces that several of t ranks hold."""
    return f", {copies} of {t} ranks share each" if copies > 1 else ""


def parameter_strategies(node: Node, splitter: Splitter) -> list[Strategy]:
    """Stored whole with a whole gradient (I), whole with a gradient summed once per step (R), or sharded."""
    machine, t, nbytes = splitter.machine, splitter.degree, payload(node)
    keep = nbytes * machine.per_parameter_byte
    sum_once = conversion_seconds(I, R, nbytes, t, machine) / 8  # once per step, shared by its microbatches
    made = [
        Strategy({}, I, keep, "replicated"),
        Strategy({}, R, keep + sum_once, "replicated, gradient summed over tp"),
    ]
    for kind in splitter.shards(node):
        size, pieces = math.prod(note(node).dims[dim][atom] for dim, atom in kind.places), t // kind.copies
        padded = ", padded" if size % pieces else ""
        why = f"sharded{padded}: {division_text(size, pieces)}" + copies_text(kind.copies, t)
        stored = keep / size * shard_size(size, pieces) + (sum_once if kind.copies > 1 else 0.0)
        made.append(Strategy({}, kind, stored, why))
    return _pinned(node, made, splitter) if node in splitter.pins else made


def _pinned(node: Node, made: list[Strategy], splitter: Splitter) -> list[Strategy]:
    """The strategies of a parameter that its pin allows."""
    pin = splitter.pins[node]
    found = [one for one in made if (one.gives.dim if one.gives.kind == "S" else None) == pin.dim]
    if pin.layout is not None:
        found = [one for one in found if placement(note(node).dims, one.gives, splitter.degree) == pin.layout]
    if not found:
        sizes = " x ".join(map(str, note(node).dims[pin.dim or 0])) or "1"
        fact = f"{pin}: of {sizes}, t={splitter.degree} divides no factor"
        raise PlanError("plan: shard", fact, "another dim, or leave it out")
    return found
