"""Choose the values that backward recomputes, as `recompute` and the pins of a plan request it.

In: a LOCAL graph, and what every operator saves. Out: a `Wish`: the storages to drop, and those that recipes
read; `Pinned` changes it as the plan says.

`recompute`:

- *full*: in every layer, all but its inputs (Chen et al. 2016; Megatron's full recomputation); with "full:1/2" in
  the first half of each stage's layers. The last ones are kept, whose backward comes first.
- *selective*: the scores of attention and all values computed from them, up to the product with the values
  (Korthikanti et al. 2022, section 5).
- globs: all saved values of these modules, or of operators in them (`*.mlp:gelu`).
- "auto": by value, at a price per byte (`by_value.py`).
- None: the modules that the model wraps in `torch.utils.checkpoint`, each in full.

An entry of `keep` in a plan, {"pattern": "*.mlp.gelu", "way": "again"}, is about the saved values of the operators
that its pattern names:

- *again*: backward recomputes the value.
- *whole*: the value is kept, whatever `recompute` asks for; a gathered input of linear layers, too, instead of
  its shard.
- *shard*: of such an input the shard is kept, and gathered again; everything else that the pattern names is left
  to `recompute`.

Without pins, a gathered input is kept as its shard (`gather_again`).
"""

from __future__ import annotations

import math
import operator
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
from autoptd.ir.kept import KeepPin, SavedForBackward, Storage
from autoptd.ir.layout import BATCH, typed_over
from autoptd.ir.names import any_layer, is_within, layer_of
from autoptd.ir.notes import note, op_name, ops, tensor, value
from autoptd.ir.operators.table import is_listed, operator_of
from autoptd.ir.plan import nearest
from autoptd.options import Options
from autoptd.passes.ops.costs import flops

SITE = "plan: keep"
SOFTMAX = ("aten.softmax", "masked_softmax")
# Keywords of an addmm that is a linear.
PLAIN_KWARGS: dict[str, object] = {"alpha": 1, "beta": 1}
# A storage, and the way that a pin gives for it.
Claim = tuple[Storage, str]


class Wish(NamedTuple):
    """The storages to drop, and those to keep because recipes begin with them."""

    dropped: set[Storage]
    kept: set[Storage]


class Gathered(NamedTuple):
    """An input of linear layers that is kept as its shard and gathered again."""

    whole: Storage
    shard: Storage


def choose(graph: Graph, options: Options, checkpointed: Sequence[str], saved: SavedForBackward) -> Wish:
    """Return what `options.recompute` asks for; for None, what the modules in `checkpointed` do."""
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
        wish.dropped.update(pair.whole for pair in find_gathered(graph, saved) if pair.shard.node in own)
    return wish


def _within(graph: Graph, modules: Sequence[str]) -> Iterator[list[Node]]:
    """Yield the operators of every module, on every stage."""
    for nodes in by_stage(graph).values():
        for module in modules:
            yield [node for node in nodes if is_within(note(node).module, module)]


def groups_of_layers(graph: Graph, share: Fraction, together: int) -> Iterator[list[Node]]:
    """Yield the operators of every layer that is recomputed in full, or of several that share a kept input."""
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
    read_outside: set[Storage] = set()
    dropped: set[Storage] = set()
    for node in layer:
        dropped |= made.get(node, set())
        if any(user not in own for user in node.users):
            read_outside |= {value.storage for value in saved.values[node]}
        wish.kept.update(saved.storage(arg) for arg in operands_of(node) if arg not in own)
    wish.dropped.update(dropped - read_outside)


def _scores(nodes: list[Node]) -> list[Node]:
    """Return the scores of attention, and all values computed from them up to the product with the values.

    They lie between two products without parameters, around a softmax.
    """
    found: set[Node] = set()
    own = set(nodes)
    for node in nodes:
        if op_name(node) not in SOFTMAX:
            continue
        before = _reached(node, lambda at: at.all_input_nodes, own)
        after = _reached(node, lambda at: list(at.users), own)
        if any(map(_is_product, before)) and any(map(_is_product, after)):
            # The first product makes the scores; the second is not one of them.
            found |= before | {at for at in after if not _is_product(at)}
    return [node for node in nodes if node in found]


def _reached(node: Node, following: Callable[[Node], list[Node]], own: set[Node]) -> set[Node]:
    """Return the operators that are reached from `node`, up to and including products."""
    reached: set[Node] = set()
    left = [node]
    while left:
        at = left.pop()
        if at in own and at not in reached:
            reached.add(at)
            # A mask has no gradient, and is not a score.
            if not flops(at):
                left += [neighbor for neighbor in following(at) if note(neighbor).needs_grad]
    return reached


def _is_product(node: Node) -> bool:
    """Tell whether a node multiplies two computed values."""
    return bool(flops(node)) and not any(note(arg).kind == "param" for arg in node.all_input_nodes)


def _named(nodes: list[Node], globs: Sequence[str]) -> list[Node]:
    return [node for node in nodes if any(map(partial(_is_of, node), globs))]


def _is_of(node: Node, glob: str) -> bool:
    """Tell whether a glob names a node's module or an enclosing one, or its operator in these: `*.mlp:gelu`."""
    parts = note(node).module.split(".")
    paths = [".".join(parts[:k]) for k in range(1, len(parts) + 1)]
    # A module's name may contain characters that are special in a glob, and colons.
    if any(glob == path or fnmatchcase(path, glob) for path in paths):
        return True
    modules, colon, operators = glob.rpartition(":")
    if not colon or not fnmatchcase(_label(node), operators):
        return False
    return any(modules == path or fnmatchcase(path, modules) for path in paths)


def _label(node: Node) -> str:
    """Return the name of an operator in globs: `gelu`, `linear`, `s_to_r` for a gather."""
    return note(node).conversion or op_name(node).removeprefix("aten.")


def by_stage(graph: Graph) -> dict[int, list[Node]]:
    """Return the operators of every stage, without those that several stages compute: these are kept."""
    stages: dict[int, list[Node]] = {}
    for node in ops(graph):
        if len(note(node).stages) == 1 and value(node) is not None:
            stages.setdefault(note(node).stages[0], []).append(node)
    return stages


def operands_of(node: Node) -> list[Node]:
    """Return the operands that are results of operators."""
    return [arg for arg in node.all_input_nodes if arg.op == "call_function" and value(arg) is not None]


def is_repeatable(node: Node) -> bool:
    """Tell whether an operator gives the same result when run again.

    An operator that is not listed may have effects, so its result is kept.
    """
    if node.target is operator.getitem:
        return is_repeatable(node.args[0])  # type: ignore[arg-type]
    # An operator that ranks compute together would repeat its reductions.
    if node.target in markers.OVER_CLASSES.values():
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    # Dropout is a marker, whose masks are drawn by position.
    is_known = node.target.namespace == "aten" or is_listed(node.target)
    return is_known and not operator_of(node).is_random


def saved_by_maker(saved: SavedForBackward) -> dict[Node, set[Storage]]:
    """Return, for every operator, its results that it or others on its stage save; without private storages."""
    made: dict[Node, set[Storage]] = {}
    for node, storages in saved.of.items():
        for storage in storages:
            # A value that another stage saves was sent there.
            is_here = not {*note(node).stages}.isdisjoint(note(storage.node).stages)
            if is_here and not storage.is_private:
                made.setdefault(storage.node, set()).add(storage)
    return made


def find_gathered(graph: Graph, saved: SavedForBackward) -> list[Gathered]:
    """Return the values that are kept as shards. If a shard is not kept either, recipes make the whole value."""
    found = []
    for node in ops(graph):
        if gather_again(node):
            found.append(Gathered(saved.storage(node), saved.storage(node.all_input_nodes[0])))
    return found


def gather_again(node: Node) -> list[Node]:
    """Return the GEMMs that read `node` if it gathers shards (S -> R) only for them, so that backward needs
    only the shards.
    """
    if node.target is not markers.convert or note(node).conversion != "s_to_r" or node.kwargs.get("size"):
        return []
    # Rows of other replicas are gathered once, in forward only.
    if typed_over(note(node).axis) == BATCH:
        return []
    # The list grows during iteration: the readers of a reshape follow those of the value.
    gemms, reads = [], [(node, user) for user in node.users]
    for source, user in reads:
        operands = gemm_operands(user)
        if operands is not None and operands[0] is source and source not in operands[1:]:
            gemms.append(user)
        # The result of `rt.all_gather_again` can be reshaped, and nothing else.
        elif operator_of(user).text == ".reshape" and tensor(user).shape[-1] == tensor(source).shape[-1]:
            reads += [(user, reader) for reader in user.users]
        else:
            return []
    # A recomputed value is computed once for all uses in backward; a plan may pin that it is kept whole.
    if note(node).keep.again is not None or note(node).keep.whole or not weight_gradients(gemms):
        return []
    if any(note(gemm).stages != note(node).stages for gemm in gemms):
        return []
    return gemms


def weight_gradients(gemms: Sequence[Node]) -> int:
    """Count the GEMMs whose weight needs a gradient."""
    return sum(note(gemm_operands(gemm)[1]).needs_grad for gemm in gemms)  # type: ignore[index]


def gemm_operands(node: Node) -> tuple[Node, Node, Node | None] | None:
    """Return (input, weight, bias) of a linear, or of an addmm that is one; None for anything else."""
    if op_name(node) == "aten.linear":
        x, weight, *rest = node.args
        # A matrix-vector product, as in value heads, is left to autograd.
        if tensor(weight).dim() == 1:
            return None
        return x, weight, (rest[0] if rest else None)  # type: ignore[return-value]
    is_plain = all(PLAIN_KWARGS.get(key) == given for key, given in node.kwargs.items())
    if op_name(node) == "aten.addmm" and is_plain:
        bias, x, weight = node.args
        return (x, weight, bias) if tensor(bias).dim() == 1 else None  # type: ignore[return-value, arg-type]
    return None


@dataclass
class Pinned:
    """The storages that pins keep (`shards` among them) and drop, and the gathers that are not repeated.

    `error` is the first of the pins that cannot be followed.
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

    A pin that cannot be followed is left out: the cut is found on a graph in which more may be possible. `error`
    has the reason.
    """
    return _Finder(graph, saved).find(pins) if pins else Pinned()


class _Finder:
    """Apply pins to the storages of a graph, one after the other."""

    def __init__(self, graph: Graph, saved: SavedForBackward) -> None:
        self.graph = graph
        self.made = saved_by_maker(saved)
        self.gathered = find_gathered(graph, saved)
        self.pinned = Pinned()
        # The way of a storage, and the first pin that gives it.
        self.claimed: dict[Storage, tuple[str, KeepPin]] = {}

    def find(self, pins: Sequence[KeepPin]) -> Pinned:
        for pin in pins:
            nodes = [node for node in ops(self.graph) if _is_of(node, pin.pattern)]
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
        """Yield the claims of a pin on the results of these operators: on saved ones, and on shards."""
        own = set(nodes)
        if way == "shard":
            for pair in self.gathered:
                if pair.whole.node in own:
                    yield pair.whole, way
                    yield pair.shard, "whole"
            return
        for node in nodes:
            yield from ((storage, way) for storage in self.made.get(node, ()))
        yield from ((pair.shard, way) for pair in self.gathered if pair.shard.node in own)

    def _apply(self, storage: Storage, way: str) -> None:
        wholes = [pair.whole for pair in self.gathered if pair.shard == storage]
        if way == "again":
            # If a shard is not kept, recipes make the whole value.
            self.pinned.again.update(wholes or [storage])
            return
        self.pinned.kept.add(storage)
        if wholes:
            self.pinned.shards.add(storage)
        if way == "whole":
            self.pinned.gathers += [pair.whole.node for pair in self.gathered if pair.whole == storage]


def _no_such(pin: KeepPin, graph: Graph) -> PlanError:
    known: dict[str, None] = {}
    for node in ops(graph):
        module = any_layer(note(node).module)
        known |= dict.fromkeys((module, f"{module}:{_label(node)}"))
    names = [name for name in known if (":" in name) == (":" in pin.pattern)]
    return PlanError(SITE, f"no module is called {pin.pattern}", nearest(pin.pattern, names))


def _nothing_kept(pin: KeepPin) -> PlanError:
    if pin.way == "shard":
        fact = f"{pin}: no value there is gathered for linear layers alone"
        return PlanError(SITE, fact, "sequence_parallel=True, which has such values; or leave it out")
    fact = f"{pin}: backward needs no value that is computed there"
    return PlanError(SITE, fact, "leave it out; program.explain lists the values that are kept for backward")


def _conflict(storage: Storage, one: tuple[str, KeepPin], other: tuple[str, KeepPin]) -> PlanError | None:
    if one[0] == other[0]:
        return None
    return PlanError(SITE, f"{one[1]}, and {other[1]}", f"one of them for {_name(storage.node)}")


def _impossible(storage: Storage, way: str, pin: KeepPin) -> PlanError | None:
    """Return why a value cannot be recomputed, if it is to be."""
    maker = storage.node
    if way != "again":
        return None
    if len(note(maker).stages) > 1:
        fact = f"{pin}: {_name(maker)} is computed by stages {', '.join(map(str, note(maker).stages))}"
        return PlanError(SITE, fact, "a narrower pattern, or another cut")
    if not is_repeatable(maker):
        fact = f"{pin}: {_name(maker)} may have effects or draw random numbers, and runs once"
        remedy = "a narrower pattern; autoptd.register_rule for a function of its operands"
        return PlanError(SITE, fact, remedy)
    return None


def _name(node: Node) -> str:
    return ": ".join(filter(None, (note(node).module, op_name(node))))
