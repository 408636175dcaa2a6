"""How values are kept for backward, pinned by hand: the entries of `keep` in a plan that have a pattern.

In: entries {"pattern": "*.mlp.gelu", "way": "again"}, and a LOCAL graph. A pattern is a glob of modules as `recompute=` has
them, or of operators in these: "*.mlp:gelu". It is about the saved activations that they make. Out: `Pinned`.

- *again*: backward computes the value again.
- *whole*: the value is kept, whatever `recompute` asks for. A gathered input of linear layers, too, instead of its shard.
- *shard*: of such an input the shard is kept, and gathered again; all else that the pattern names is left to `recompute`.

Without pins a gathered input is kept as its shard, and all other values as `recompute` says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.kept import KeepPin
from autoptd.ir.notes import note, op_name, ops
from autoptd.ir.plan import nearest
from autoptd.ir.saved import SavedForBackward, Storage
from autoptd.passes.kept.requested import Wish, find_gathered, is_of, is_repeatable, label_of, saved_by_maker

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


__all__ = ["Pinned", "find_pinned"]
