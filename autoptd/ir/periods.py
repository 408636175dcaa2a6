"""Find what is repeated in a list of operators: layers, or groups of layers that alternate.

In: operators in order, a signature of each (equal for operators that may be the same in two layers), and the values that are
needed afterwards. Out: `Period`s. No name of a module is looked at.

Terms. A *period* of `length` operators comes `count` times. An operand of one of them is *inner* (made in the same period),
*carried* (made in the period before; in the first one, any value from before the repeat), or *outer* (a placeholder, or a
value from before the repeat; it may be another one in every period: a layer's weights, the mask of its kind).

    (one,) = find_periods(body, signature, results=set())
    one.operands[3][1]          # of operator 3 in a period, operand 1: Operand("outer", nodes=(h.0.weight, h.1.weight, ...))
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from torch.fx import Node

SHORTEST = 3  # operators of a period
LENGTHS = 16  # lengths that are tried: the commonest distances between an operator
BACK = 12  # and the ones before it that equal it


@dataclass(frozen=True)
class Operand:
    """What an operator of a period reads: `index` is where an inner or carried value stands, `nodes` one per period."""

    kind: str
    index: int = -1
    nodes: tuple[Node, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether every period reads the same outer value."""
        return all(node is self.nodes[0] for node in self.nodes)


@dataclass(frozen=True)
class Period:
    """`count` periods of `length` operators from index `start` of a list.

    `operands` has the distinct operands of every operator of a period; `carried` maps the index of a carried value to the value
    that the first period reads in its place.
    """

    start: int
    length: int
    count: int
    operands: tuple[tuple[Operand, ...], ...]
    carried: dict[int, Node]

    @property
    def stop(self) -> int:
        return self.start + self.length * self.count

    @property
    def saved(self) -> int:
        """Operators that need not be written, or decided, once more."""
        return self.length * (self.count - 1)


Agree = Callable[[Node, Node], bool]
Rank = Callable[[Period], tuple[int, ...] | None]


def find_periods(
    body: Sequence[Node],
    signature: Sequence[Hashable],
    results: Collection[Node],
    agree: Agree = lambda one, other: True,
    rank: Rank = lambda period: (),
) -> list[Period]:
    """The repeats that save most, none within another, in order.

    `agree` may refuse two operators of equal signature. `rank` chooses among the places where a period can begin, least first
    (a place is refused by None).
    """
    found = _Finder(body, signature, results, agree, rank).find(0, len(body))
    return sorted(found, key=lambda one: one.start)


class _Finder:
    def __init__(
        self,
        body: Sequence[Node],
        signature: Sequence[Hashable],
        results: Collection[Node],
        agree: Agree,
        rank: Rank,
    ) -> None:
        self.body, self.results, self.agree, self.rank = list(body), set(results), agree, rank
        number: dict[Hashable, int] = {}
        self.signature = [number.setdefault(one, len(number)) for one in signature]
        self.position = {node: i for i, node in enumerate(self.body)}
        self.last_use = [
            max((self.position.get(user, -1) for user in node.users), default=-1) for node in self.body
        ]
        for node in self.results & self.position.keys():
            self.last_use[self.position[node]] = len(self.body)

    def find(self, low: int, high: int) -> list[Period]:
        """The best repeat in body[low:high], and what is repeated before and after it."""
        best: Period | None = None
        for length in self._lengths(low, high):
            for first, last in self._runs(length, low, high):
                # A period saves at most what the run has beside its first one.
                if best is None or last - first > best.saved:
                    found = self._best_start(length, first, last)
                    if found and (best is None or found.saved > best.saved):
                        best = found
        if best is None:
            return []
        return [*self.find(low, best.start), best, *self.find(best.stop, high)]

    def _lengths(self, low: int, high: int) -> list[int]:
        """Distances between equal operators, the commonest first."""
        last: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=BACK))
        distances: Counter[int] = Counter()
        for i in range(low, high):
            distances.update(i - one for one in last[self.signature[i]])
            last[self.signature[i]].append(i)
        return [length for length, _ in distances.most_common(LENGTHS) if length >= SHORTEST]

    def _runs(self, length: int, low: int, high: int) -> list[tuple[int, int]]:
        """Ranges in which every operator equals the one a period later: at least one period long."""
        runs, first = [], low
        for i in range(low, high - length + 1):
            if i + length == high or self.signature[i] != self.signature[i + length]:
                if i - first >= length:
                    runs.append((first, i))
                first = i + 1
        return runs

    def _best_start(self, length: int, first: int, last: int) -> Period | None:
        """The repeat in a run, begun where fewest values are carried on."""
        width = {
            start: sum(use >= start + length for use in self.last_use[start : start + length])
            for start in range(first, min(first + length, last - length) + 1)
        }
        best: tuple[tuple[int, ...], Period] | None = None
        for start in width:
            if width[start] == min(width.values()):
                found = self._build(start, length, (last + length - start) // length)
                ranked = self.rank(found) if found else None
                if found and ranked is not None:
                    score = (*ranked, -found.count, start)
                    best = min(best or (score, found), (score, found), key=lambda one: one[0])
        return best[1] if best else None

    def _build(self, start: int, length: int, count: int) -> Period | None:
        """The repeat with as many periods as agree, at least two."""
        told = [self._describe(start, start + k * length, length) for k in range(count)]
        agreed = 1
        while agreed < count and self._agrees(told[1], told[agreed], start, length, agreed):
            agreed += 1
        if agreed < 2 or not self._agrees(told[1], told[0], start, length, 0):
            return None
        carried: dict[int, Node] = {}
        operands: list[tuple[Operand, ...]] = []
        for j, slots in enumerate(told[1] or ()):
            made = []
            for s, (kind, index, _) in enumerate(slots):
                nodes = tuple(told[k][j][s][2] for k in range(agreed))  # type: ignore[index]
                if kind == "carried" and carried.setdefault(index, nodes[0]) is not nodes[0]:
                    return None
                made.append(Operand(kind, index, nodes if kind == "outer" else ()))
            operands.append(tuple(made))
        stop = start + length * agreed
        final = stop - length
        for i in range(start, stop):
            if self.last_use[i] >= stop and (i < final or i - final not in carried):
                return None  # something else is read afterwards than what goes from period to period
        return Period(start, length, agreed, tuple(operands), carried)

    def _describe(self, start: int, low: int, length: int) -> list[list[tuple[str, int, Node]]] | None:
        """(kind, index, node) of every operand of the period that begins at `low`; None when it reads an older period."""
        told = []
        for node in self.body[low : low + length]:
            slots = []
            for arg in node.all_input_nodes:
                at = self.position.get(arg, -1)
                if at >= low:
                    slots.append(("inner", at - low, arg))
                elif at < start:
                    slots.append(("outer", -1, arg))
                elif at >= low - length:
                    slots.append(("carried", at - low + length, arg))
                else:
                    return None
            told.append(slots)
        return told

    def _agrees(
        self,
        model: list[list[tuple[str, int, Node]]] | None,
        other: list[list[tuple[str, int, Node]]] | None,
        start: int,
        length: int,
        k: int,
    ) -> bool:
        """Whether period k is like the second one; in the first one, carried values come from outside."""
        if model is None or other is None:
            return False
        for j, (slots, theirs) in enumerate(zip(model, other, strict=True)):
            for (kind, index, _), (other_kind, other_index, _) in zip(slots, theirs, strict=True):
                if k == 0 and kind == "carried":
                    kind, index = "outer", -1
                if (kind, index) != (other_kind, other_index):
                    return False
            if not self.agree(self.body[start + length + j], self.body[start + k * length + j]):
                return False
        return True
