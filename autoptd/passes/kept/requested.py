"""Choose the values that backward computes again, from what the keyword `recompute` asks for.

In: a LOCAL graph, and what every operator saves. Out: a `Wish`: the storages that are dropped, and those that recipes read.

- *full*: of every layer, all but what the layer reads (Chen et al. 2016; Megatron's full recomputation); of "full:1/2" in the
  first half of each stage's layers: the last ones are kept, whose backward comes first.
- *selective*: the scores of attention and what is made of them, up to what multiplies the values (Korthikanti et al. 2022,
  section 5).
- globs: all that is saved of what these modules make, or operators in them (`*.mlp:gelu`).
- "auto": by value, at a price per byte (`by_value.py`).
- None: the modules that the model wraps in `torch.utils.checkpoint`, each in full."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir import markers
from autoptd.ir.kept import KeepPin
from autoptd.ir.names import is_within, layer_of
from autoptd.ir.notes import note, op_name, ops, value
from autoptd.ir.operators.table import is_listed, operator_of
from autoptd.ir.plan import nearest
from autoptd.ir.saved import SavedForBackward, Storage
from autoptd.options import Options
from autoptd.passes.hook_gemms import gather_again
from autoptd.passes.ops.costs import flops

__all__ = [
    "Gathered",
    "Pinned",
    "Wish",
    "by_stage",
    "choose",
    "find_gathered",
    "find_pinned",
    "groups_of_layers",
    "is_of",
    "is_repeatable",
    "label_of",
    "operands_of",
    "saved_by_maker",
]


SOFTMAX = ("aten.softmax", "masked_softmax")


class Wish(NamedTuple):
    """The values to drop, and the values to keep because recipes begin with them."""

    dropped: set[Storage]
    kept: set[Storage]


class Gathered(NamedTuple):
    """The memory of an input of linear layers that is kept as its shard and gathered again."""

    whole: Storage
    shard: Storage


def choose(graph: Graph, options: Options, checkpointed: Sequence[str], saved: SavedForBackward) -> Wish:
    """Return what `options.recompute` asks for; None, what the modules in `checkpointed` do."""
    asked, made = options.recompute.what, saved_by_maker(saved)
    wish = Wish(set(), set())
    share = options.recompute.full_share
    if share is not None or asked is None:
        groups = (
            _within(graph, checkpointed)
            if share is None
            else groups_of_layers(graph, share, options.recompute.num_layers)
        )
        for layers in groups:
            _add_in_full(layers, saved, made, wish)
        wish.dropped.difference_update(wish.kept)
        return wish
    for nodes in by_stage(graph).values():
        chosen = _scores(nodes) if asked == "selective" else _named(nodes, asked)
        wish.dropped.update(*(made.get(node, ()) for node in chosen))
        own = set(chosen)
        wish.dropped.update(each.whole for each in find_gathered(graph, saved) if each.shard.node in own)
    return wish


def find_gathered(graph: Graph, saved: SavedForBackward) -> list[Gathered]:
    """Return what is kept as its shard. Where the shard is not kept, either, recipes make the whole of it."""
    found = []
    for node in ops(graph):
        if gather_again(node):
            found.append(Gathered(saved.storage(node), saved.storage(node.all_input_nodes[0])))
    return found


def by_stage(graph: Graph) -> dict[int, list[Node]]:
    """Return the operators of every stage; without those that several stages compute, which are kept."""
    stages: dict[int, list[Node]] = {}
    for node in ops(graph):
        if len(note(node).stages) == 1 and value(node) is not None:
            stages.setdefault(note(node).stages[0], []).append(node)
    return stages


def operands_of(node: Node) -> list[Node]:
    """Return the operands that operators make."""
    return [arg for arg in node.all_input_nodes if arg.op == "call_function" and value(arg) is not None]


def is_repeatable(node: Node) -> bool:
    """Tell whether an operator gives the same once more; one that is not listed may have effects, and keeps its result."""
    if node.target is operator.getitem:
        return is_repeatable(node.args[0])  # type: ignore[arg-type]
    # What ranks compute together would take its reductions again.
    if node.target in markers.OVER_CLASSES.values():
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    # The masks of dropout are a marker's, and drawn by their place.
    is_known = node.target.namespace == "aten" or is_listed(node.target)
    return is_known and not operator_of(node).is_random


def saved_by_maker(saved: SavedForBackward) -> dict[Node, set[Storage]]:
    """Return what is saved of what every operator makes, by itself or others on its stage; without what is its own."""
    made: dict[Node, set[Storage]] = {}
    for node, storages in saved.of.items():
        for storage in storages:
            # What another stage saves was sent to it.
            is_here = not {*note(node).stages}.isdisjoint(note(storage.node).stages)
            if is_here and not storage.is_private:
                made.setdefault(storage.node, set()).add(storage)
    return made


def _within(graph: Graph, modules: Sequence[str]) -> Iterator[list[Node]]:
    """Yield the operators of every module, on every stage."""
    for nodes in by_stage(graph).values():
        for module in modules:
            yield [node for node in nodes if is_within(note(node).module, module)]


def groups_of_layers(graph: Graph, share: Fraction, together: int) -> Iterator[list[Node]]:
    """Yield the operators of every layer that is computed again in full, or of several that share a kept input."""
    for nodes in by_stage(graph).values():
        layers: dict[str, list[Node]] = {}
        for node in nodes:
            layer = layer_of(note(node).module)
            if layer.rpartition(".")[2].isdigit():
                layers.setdefault(layer, []).append(node)
        again = list(layers.values())[: math.ceil(share * len(layers))]
        for start in range(0, len(again), together):
            yield list(chain.from_iterable(again[start : start + together]))


def _add_in_full(
    layer: list[Node], saved: SavedForBackward, made: dict[Node, set[Storage]], wish: Wish
) -> None:
    own = set(layer)
    read_behind: set[Storage] = set()
    dropped: set[Storage] = set()
    for node in layer:
        dropped |= made.get(node, set())
        if any(user not in own for user in node.users):
            read_behind |= {each.storage for each in saved.values[node]}
        wish.kept.update(saved.storage(arg) for arg in operands_of(node) if arg not in own)
    wish.dropped.update(dropped - read_behind)


def _scores(nodes: list[Node]) -> list[Node]:
    """Return the scores of attention, and what is made of them up to what multiplies the values.

    They lie between two products without parameters, around a softmax.
    """
    found: set[Node] = set()
    own = set(nodes)
    for node in nodes:
        if op_name(node) not in SOFTMAX:
            continue
        before = _reached(node, lambda at: at.all_input_nodes, own)
        behind = _reached(node, lambda at: list(at.users), own)
        if any(map(_is_product, before)) and any(map(_is_product, behind)):
            # The first product makes the scores; the second is not one of them.
            found |= before | {at for at in behind if not _is_product(at)}
    return [node for node in nodes if node in found]


def _reached(node: Node, following: Callable[[Node], list[Node]], own: set[Node]) -> set[Node]:
    """Return the operators that are reached from one, up to products, these included."""
    reached: set[Node] = set()
    left = [node]
    while left:
        at = left.pop()
        if at in own and at not in reached:
            reached.add(at)
            # A mask has no gradient, and is not a score.
            if not flops(at):
                left += [each for each in following(at) if note(each).needs_grad]
    return reached


def _is_product(node: Node) -> bool:
    """Tell whether a node multiplies two computed values."""
    return bool(flops(node)) and not any(note(arg).kind == "param" for arg in node.all_input_nodes)


def _named(nodes: list[Node], globs: Sequence[str]) -> list[Node]:
    return [node for node in nodes if any(map(partial(is_of, node), globs))]


def is_of(node: Node, glob: str) -> bool:
    """Tell whether a glob names a node's module or an enclosing one, and after a colon its operator: `*.mlp:gelu`."""
    parts = note(node).module.split(".")
    paths = [".".join(parts[:k]) for k in range(1, len(parts) + 1)]
    # Names may hold what means something in a glob, and colons.
    if any(glob == path or fnmatchcase(path, glob) for path in paths):
        return True
    modules, colon, operators = glob.rpartition(":")
    if not colon or not fnmatchcase(label_of(node), operators):
        return False
    return any(modules == path or fnmatchcase(path, modules) for path in paths)


def label_of(node: Node) -> str:
    """Return the name of an operator as globs have it: `gelu`, `linear`, `s_to_r` of a gather."""
    return note(node).conversion or op_name(node).removeprefix("aten.")


SITE = "plan: keep"
# A storage, and what a pin says of it.
Claim = tuple[Storage, str]


@dataclass
class Pinned:
    """The storages that pins keep, the shards among them, those that they drop; the gathers that are not repeated.

    `error` is the first of the pins that cannot be had.
    """

    kept: set[Storage] = field(default_factory=set)
    shards: set[Storage] = field(default_factory=set)
    again: set[Storage] = field(default_factory=set)
    gathers: list[Node] = field(default_factory=list)
    error: PlanError | None = None

    def of(self, wish: Wish) -> Wish:
        """Return a wish to which the pins have been applied."""
        return Wish((wish.dropped | self.again) - self.kept, (wish.kept - self.again) | self.shards)


def find_pinned(graph: Graph, saved: SavedForBackward, pins: Sequence[KeepPin]) -> Pinned:
    """Find what the pins name in a LOCAL graph.

    What they cannot have is left out: the cut is found on a graph in which more may be possible. `error` says what that is.
    """
    return _Finder(graph, saved).find(pins) if pins else Pinned()


class _Finder:
    """What pins say of the storages of a graph."""

    def __init__(self, graph: Graph, saved: SavedForBackward) -> None:
        self.graph = graph
        self.made = saved_by_maker(saved)
        self.gathered = find_gathered(graph, saved)
        self.pinned = Pinned()
        # What pins say of a storage, and the first of them.
        self.claimed: dict[Storage, tuple[str, KeepPin]] = {}

    def find(self, pins: Sequence[KeepPin]) -> Pinned:
        for pin in pins:
            nodes = [node for node in ops(self.graph) if is_of(node, pin.pattern)]
            claims = list(self._claims(nodes, pin.way))
            if not claims:
                self._fail(_nothing_kept(pin) if nodes else _no_such(pin, self.graph))
            for storage, way in claims:
                other = self.claimed.setdefault(storage, (way, pin))
                error = _conflict(storage, other, (way, pin)) or _impossible(storage, way, pin)
                if error is not None:
                    self._fail(error)
                else:
                    self._apply(storage, way)
        return self.pinned

    def _fail(self, error: PlanError) -> None:
        self.pinned.error = self.pinned.error or error

    def _claims(self, nodes: Sequence[Node], way: str) -> Iterator[Claim]:
        """Yield what a pin says of the values that some operators make: of those that are saved, and of shards."""
        own = set(nodes)
        if way == "shard":
            for each in self.gathered:
                if each.whole.node in own:
                    yield each.whole, way
                    yield each.shard, "whole"
            return
        for node in nodes:
            yield from ((storage, way) for storage in self.made.get(node, ()))
        yield from ((each.shard, way) for each in self.gathered if each.shard.node in own)

    def _apply(self, storage: Storage, way: str) -> None:
        wholes = [each.whole for each in self.gathered if each.shard == storage]
        if way == "again":
            # Of a shard that is not kept, recipes make the whole value.
            self.pinned.again.update(wholes or [storage])
            return
        self.pinned.kept.add(storage)
        if wholes:
            self.pinned.shards.add(storage)
        if way == "whole":
            self.pinned.gathers += [each.whole.node for each in self.gathered if each.whole == storage]


def _no_such(pin: KeepPin, graph: Graph) -> PlanError:
    known: dict[str, None] = {}
    for node in ops(graph):
        module = re.sub(r"\b\d+\b", "*", note(node).module)
        known |= dict.fromkeys((module, f"{module}:{label_of(node)}"))
    names = [name for name in known if (":" in name) == (":" in pin.pattern)]
    return PlanError(SITE, f"no module is called {pin.pattern}", nearest(pin.pattern, names))


def _nothing_kept(pin: KeepPin) -> PlanError:
    if pin.way == "shard":
        fact = f"{pin}: nothing there is gathered for linear layers alone"
        return PlanError(SITE, fact, "sequence_parallel=True, which has such values; or leave it out")
    fact = f"{pin}: backward needs nothing of what is made there"
    return PlanError(SITE, fact, "leave it out; program.explain lists what is kept for backward")


def _conflict(storage: Storage, one: tuple[str, KeepPin], other: tuple[str, KeepPin]) -> PlanError | None:
    if one[0] == other[0]:
        return None
    return PlanError(SITE, f"{one[1]}, and {other[1]}", f"one of them for {_name(storage.node)}")


def _impossible(storage: Storage, way: str, pin: KeepPin) -> PlanError | None:
    """Return why a value cannot be made again, if it is to be."""
    maker = storage.node
    if way != "again":
        return None
    if len(note(maker).stages) > 1:
        fact = f"{pin}: {_name(maker)} is computed by stages {', '.join(map(str, note(maker).stages))}"
        return PlanError(SITE, fact, "a narrower pattern, or another cut")
    if not is_repeatable(maker):
        fact = f"{pin}: {_name(maker)} may have effects or draw random numbers, and runs once"
        return PlanError(
            SITE, fact, "a narrower pattern; autoptd.register_rule for a function of its operands"
        )
    return None


def _name(node: Node) -> str:
    return ": ".join(filter(None, (note(node).module, op_name(node))))
