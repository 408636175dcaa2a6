"""Find the repeats in a list of operators: layers, or groups of layers that alternate.

In: operators in order, a signature of each (equal for operators that may correspond in two layers), and the
values that are needed afterwards. Out: `Period`s. Names of modules play no role.

Terms. A *period* of `length` operators repeats `count` times. An operand of one of them is *inner* (made in
the same period), *carried* (made in the previous period; in the first one, any value from before the repeat),
or *outer* (a placeholder, or a value from before the repeat, possibly a different one in every period: a
layer's weights, the mask for its kind).

    (period,) = find_periods(body, signature, results=set())
    # Of operator 3 in a period, operand 1:
    period.operands[3][1]          # Operand("outer", nodes=(h.0.weight, h.1.weight, ...))
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from torch.fx import Node

# The minimum number of operators in a period.
MIN_OPERATORS = 3
# The lengths that are tried: the most frequent distances between equal operators, ...
MAX_LENGTHS = 16
# ... for each operator, to at most this many before it.
MAX_BACK = 12


@dataclass(frozen=True)
class Operand:
    """An operand of a period's operator: `index` locates an inner or carried value, `nodes` has one entry per
    period.
    """

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

    `operands` has the distinct operands of every operator of a period; `carried` maps the index of a carried
    value to the value that the first period reads instead.
    """

    start: int
    length: int
    count: int
    operands: tuple[tuple[Operand, ...], ...]
    carried: dict[int, Node]

    @property
    def stop(self) -> int:
        """Index of the first operator after the last period."""
        return self.start + self.length * self.count

    @property
    def saved(self) -> int:
        """Number of operators that need not be written, or decided, again."""
        return self.length * (self.count - 1)


# (kind, index, node) of every operand of every operator of one period.
Slots = list[list[tuple[str, int, Node]]]

Agree = Callable[[Node, Node], bool]
Rank = Callable[[Period], tuple[int, ...] | None]


def find_periods(
    body: Sequence[Node],
    signature: Sequence[Hashable],
    results: Collection[Node],
    agree: Agree = lambda operator, other: True,
    rank: Rank = lambda period: (),
) -> list[Period]:
    """Find the non-nested repeats that save most, in order.

    `agree` may reject two operators of equal signature. `rank` chooses among the possible starts of a period,
    least first (None rejects a place).
    """
    periods = _Finder(body, signature, results, agree, rank).find(0, len(body))
    return sorted(periods, key=lambda period: period.start)


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
        # Small numbers for signatures, which may be slow to hash.
        number: dict[Hashable, int] = {}
        self.signature = [number.setdefault(key, len(number)) for key in signature]
        self.position = {node: i for i, node in enumerate(self.body)}
        # The position of the last operator that reads each value; the end if it is a result.
        self.last_use = []
        for node in self.body:
            uses = [self.position.get(user, -1) for user in node.users]
            self.last_use.append(len(self.body) if node in self.results else max(uses, default=-1))

    def find(self, low: int, high: int) -> list[Period]:
        """Find the best repeat in body[low:high], then those before and after it."""
        best: Period | None = None
        for length in self._lengths(low, high):
            for first, last in self._runs(length, low, high):
                # At most, a period saves the whole run but its first period.
                if best is None or last - first > best.saved:
                    period = self._best_start(length, first, last)
                    if period and (best is None or period.saved > best.saved):
                        best = period
        if best is None:
            return []
        return [*self.find(low, best.start), best, *self.find(best.stop, high)]

    def _lengths(self, low: int, high: int) -> list[int]:
        """Return distances between equal operators, most frequent first."""
        last: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=MAX_BACK))
        distances: Counter[int] = Counter()
        for i in range(low, high):
            equal_before = last[self.signature[i]]
            distances.update(i - j for j in equal_before)
            equal_before.append(i)
        return [length for length, _ in distances.most_common(MAX_LENGTHS) if length >= MIN_OPERATORS]

    def _runs(self, length: int, low: int, high: int) -> list[tuple[int, int]]:
        """Return ranges, at least one period long, in which every operator equals the one a period later."""
        runs, first = [], low
        for i in range(low, high - length + 1):
            if i + length == high or self.signature[i] != self.signature[i + length]:
                if i - first >= length:
                    runs.append((first, i))
                first = i + 1
        return runs

    def _best_start(self, length: int, first: int, last: int) -> Period | None:
        """Return the repeat in a run that starts where the fewest values are carried over."""
        width = {}
        for start in range(first, min(first + length, last - length) + 1):
            stop = start + length
            width[start] = sum(use >= stop for use in self.last_use[start:stop])
        best: tuple[tuple[int, ...], Period] | None = None
        for start in width:
            if width[start] > min(width.values()):
                continue
            period = self._build(start, length, (last + length - start) // length)
            rank = self.rank(period) if period else None
            if period and rank is not None:
                score = (*rank, -period.count, start)
                if best is None or score < best[0]:
                    best = score, period
        return best[1] if best else None

    def _build(self, start: int, length: int, count: int) -> Period | None:
        """Return the repeat with as many periods as agree, at least two."""
        periods = [self._describe(start, start + k * length, length) for k in range(count)]
        agreed = 1
        while agreed < count and self._agrees(periods[1], periods[agreed], start, length, agreed):
            agreed += 1
        # The second period is the model: in the first one, carried values come from outside.
        if agreed < 2 or not self._agrees(periods[1], periods[0], start, length, 0):
            return None
        carried: dict[int, Node] = {}
        operands: list[tuple[Operand, ...]] = []
        for j, slots in enumerate(periods[1] or ()):
            read = []
            for s, (kind, index, _) in enumerate(slots):
                nodes = tuple(periods[k][j][s][2] for k in range(agreed))  # type: ignore[index]
                # A carried value stands for one value in the first period, wherever it is read.
                if kind == "carried" and carried.setdefault(index, nodes[0]) is not nodes[0]:
                    return None
                read.append(Operand(kind, index, nodes if kind == "outer" else ()))
            operands.append(tuple(read))
        stop = start + length * agreed
        final = stop - length
        for i in range(start, stop):
            # After a loop, only the carried values can be read.
            if self.last_use[i] >= stop and (i < final or i - final not in carried):
                return None
        return Period(start, length, agreed, tuple(operands), carried)

    def _describe(self, start: int, low: int, length: int) -> Slots | None:
        """Return the operands of the period that starts at `low`; None if it reads an older period."""
        described: Slots = []
        for node in self.body[low : low + length]:
            slots = []
            for operand in node.all_input_nodes:
                position = self.position.get(operand, -1)
                if position >= low:
                    slots.append(("inner", position - low, operand))
                elif position < start:
                    slots.append(("outer", -1, operand))
                elif position >= low - length:
                    slots.append(("carried", position - low + length, operand))
                else:
                    return None
            described.append(slots)
        return described

    def _agrees(self, model: Slots | None, other: Slots | None, start: int, length: int, k: int) -> bool:
        """Tell whether a period is like the second one, the `model`."""
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
