"""Choose where to cut a line of operators into stages, so that the busiest pipeline rank is least busy.

In: a `Line` (seconds and bytes of every operator, what crosses, the positions where it may be cut), and the pipeline rank of
every stage. Out: the chosen positions. With one stage per rank the answer is exact (dynamic programming over positions). With
several it is exact where all combinations can be tried; otherwise cuts are moved for as long as that helps, and `Cuts.bound`
says how far the result could be from the best.

    place(Line(work=[1, 1, 1, 3], points=[0, 1, 2]), ranks=[0, 1]).chosen == (2,)

The busiest rank decides: with m microbatches a pipeline takes about m times its time per microbatch (SC'21, section 2.2). Where
the schedule can be simulated (`makespan_of`), the cuts around the best one are compared by its makespan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

import numpy as np

Array = np.ndarray
# Times that differ by less than this factor are equal.
SLACK = 1 + 1e-9
# Weight of the pace of the chunks (`_score`). Found by simulation: within 2% of the best cut of small interleaved pipelines.
PACE = 0.25
# So many combinations of cuts are simply all tried.
MAX_COMBINATIONS = 20_000
# Rounds of simulation around the best cuts, and cuts that are simulated in each.
MAX_ROUNDS, CUTS_PER_ROUND = 4, 16
# Of few cuts, more moves are tried: further ones, and two cuts at once.
MAX_BOUNDARIES_FOR_ALL_MOVES = 40
# Seconds of every stage -> seconds of the schedule.
MakespanOf = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Value:
    """The result of operator `made`, read by operators `reads` (ascending): a stage takes `seconds` to send or receive it."""

    made: int
    reads: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Line:
    """Operators in model order.

    `work[i]`: seconds of operator i on one rank; `points`: operators behind which the line may be cut, ascending; `values`:
    what may cross. `kept[i]` and `saved[i]`: bytes that a rank holds for operator i once (parameters and their state), and
    for every microbatch in flight. `shared`: bytes that a rank holds once if it has any of some operators (a tied weight).
    """

    work: Sequence[float]
    points: Sequence[int]
    values: Sequence[Value] = ()
    kept: Sequence[float] = ()
    saved: Sequence[float] = ()
    shared: Sequence[tuple[float, tuple[int, ...]]] = ()


@dataclass(frozen=True)
class Cuts:
    """`chosen[k]` is the last operator of stage k; `loads`: seconds per pipeline rank, of which none can be below `bound`.

    `held`: bytes per pipeline rank; `makespan`: seconds of the schedule, or of the busiest rank where it is not simulated.
    """

    chosen: tuple[int, ...]
    loads: tuple[float, ...]
    bound: float
    held: tuple[float, ...]
    makespan: float

    @property
    def busiest(self) -> float:
        return max(self.loads)


def place(
    line: Line,
    ranks: Sequence[int],
    live: Sequence[Sequence[int]] = (),
    memory: float = np.inf,
    makespan_of: MakespanOf | None = None,
) -> Cuts | None:
    """Cut `line` into len(ranks) stages; None if there is no way to.

    `live` are moments of the schedule: the number of microbatches in flight on every stage, of one rank each. No rank may hold
    more than `memory` bytes.
    """
    if len(line.points) < len(ranks) - 1:
        return None
    table = _Table(line, ranks, live, memory)
    ends = _balance(table, table.costs(), memory)
    if len(set(ranks)) < len(ranks):
        # Several stages per rank: the balanced stages are only where the search begins, once by time and once by memory.
        starts = [_balance(table, table.costs(), np.inf), _balance(table, table.bytes_of(0.0), np.inf)]
        ends = _improve(table, [start for start in starts if start is not None])
    if ends is None or table.held(ends).max() > memory:
        return None
    if makespan_of:
        ends = _simulated(table, ends, makespan_of)
    return _cuts(table, line, ends, makespan_of)


def evaluate(
    line: Line,
    ranks: Sequence[int],
    chosen: Sequence[int],
    live: Sequence[Sequence[int]] = (),
    makespan_of: MakespanOf | None = None,
) -> Cuts:
    """Return the loads and bytes of cuts that were chosen elsewhere."""
    only = Line(line.work, tuple(chosen), line.values, line.kept, line.saved, line.shared)
    table = _Table(only, ranks, live, np.inf)
    return _cuts(table, only, np.arange(table.size), makespan_of)


def least_memory(line: Line, ranks: Sequence[int], live: Sequence[Sequence[int]] = ()) -> float:
    """Return the bytes of the fullest rank with the cuts that spread them best.

    Exact for one stage per rank; with several, the best that the search finds.
    """
    table = _Table(line, ranks, live, 0.0)
    peaks = table.peaks()
    per_stage = np.stack([table.bytes_of(float(peak)) for peak in peaks])
    ends = _balance(table, per_stage, np.inf)
    if ends is not None and len(set(ranks)) < len(ranks):
        ends = _improve(table, [ends])
    return float(table.held(ends).max()) if ends is not None else np.inf


def _cuts(table: _Table, line: Line, ends: Array, makespan_of: MakespanOf | None) -> Cuts:
    loads = table.per_rank(table.stages(ends))
    has_chunks = len(set(table.ranks.tolist())) < len(table.ranks)
    # With one stage per rank the answer is the best one; with several, none is better than equal shares of all the work.
    bound = float(np.sum(line.work)) / len(loads) if has_chunks else float(loads.max())
    chosen = tuple(int(line.points[i - 1]) for i in ends[1:-1])
    seconds = makespan_of(table.stages(ends).tolist()) if makespan_of else float(loads.max())
    return Cuts(chosen, tuple(map(float, loads)), bound, tuple(map(float, table.held(ends))), seconds)


class _Table:
    """Costs of every stage between two boundaries; boundary 0 is the start of the line, the last one its end."""

    def __init__(
        self, line: Line, ranks: Sequence[int], live: Sequence[Sequence[int]], memory: float
    ) -> None:
        self.ranks, self.memory = np.asarray(ranks), memory
        self.live = np.asarray(live, dtype=float).reshape(-1, len(ranks))
        # The first operator behind every boundary.
        self.at = np.array([0, *(point + 1 for point in line.points), len(line.work)])
        self.work = self._sums_before(line.work)
        self.kept = self._sums_before(line.kept)
        self.saved = self._sums_before(line.saved)
        self.whole = max(float(self.work[-1]), 1e-30)
        self.size = len(self.at)
        self.links = np.zeros((self.size, self.size))
        for value in line.values:
            self._add_value(value)
        self.shared = [(nbytes, self._has(readers)) for nbytes, readers in line.shared]

    def _sums_before(self, of_operators: Sequence[float]) -> Array:
        """Sum the operators before every boundary; a stage has the difference of two of these."""
        per_operator = of_operators if len(of_operators) else np.zeros(int(self.at[-1]))
        return np.concatenate([[0.0], np.cumsum(per_operator)])[self.at]

    def _add_value(self, value: Value) -> None:
        """Add the seconds of a value to every stage that sends or receives it.

        A stage that makes it and ends before its last reader sends it; one that begins behind it and has a reader receives it.
        """
        first, last = np.searchsorted(self.at, [value.made, value.reads[-1]], side="right")
        if first == last:
            return
        # Stages that begin before it is made and end before it is last read.
        self.links[:first, first:last] += value.seconds
        # Stages that begin behind it, and reach the next reader from there.
        for i in range(first, last):
            reader = value.reads[np.searchsorted(value.reads, self.at[i])]
            self.links[i, np.searchsorted(self.at, reader, side="right") :] += value.seconds

    def _has(self, readers: tuple[int, ...]) -> Array:
        """Tell for every stage (i, j) whether it has one of these operators."""
        sums = np.zeros(int(self.at[-1]) + 1)
        sums[np.asarray(readers) + 1] = 1
        # counts[i]: how many of them lie before boundary i; a stage has one if the count grows.
        counts = np.cumsum(sums)[self.at]
        return counts[None, :] > counts[:, None]

    def costs(self) -> Array:
        """Return the seconds [i, j] of the stage from boundary i to boundary j; infinite where j <= i."""
        return self._forward(self.work[None, :] - self.work[:, None] + self.links)

    def bytes_of(self, live: float) -> Array:
        """Return the bytes [i, j] of the stage from i to j, with `live` microbatches in flight."""
        held = self.kept[None, :] - self.kept[:, None] + live * (self.saved[None, :] - self.saved[:, None])
        return self._forward(held + sum(nbytes * has for nbytes, has in self.shared))

    def _forward(self, table: Array) -> Array:
        """Forbid stages that do not run forward."""
        table[np.tril_indices(self.size)] = np.inf
        return table

    def peaks(self) -> Array:
        """Return the most microbatches in flight on every stage."""
        return self.live.max(0) if len(self.live) else np.zeros(len(self.ranks))

    def stages(self, ends: Array) -> Array:
        """Return the seconds of every stage; stage k runs from boundary ends[k] to ends[k + 1].

        `ends` is one such row, or a batch of rows in its first dims; so it is in all methods.
        """
        return np.diff(self.work[ends], axis=-1) + self.links[ends[..., :-1], ends[..., 1:]]  # type: ignore[no-any-return]

    def held(self, ends: Array) -> Array:
        """Return the bytes of every pipeline rank, at the fullest moment of each."""
        once = self.per_rank(np.diff(self.kept[ends], axis=-1))
        saved = np.diff(self.saved[ends], axis=-1)
        in_flight = np.zeros_like(once)
        for moment in self.live:
            # A moment has microbatches in flight on the stages of one rank only.
            rank = self.ranks[int(np.argmax(moment))]
            in_flight[..., rank] = np.maximum(in_flight[..., rank], saved @ moment)
        for nbytes, has in self.shared:
            once += nbytes * (self.per_rank(has[ends[..., :-1], ends[..., 1:]].astype(float)) > 0)
        return once + in_flight  # type: ignore[no-any-return]

    def excess(self, ends: Array) -> Array:
        """Return the bytes by which the fullest rank exceeds its memory."""
        if math.isinf(self.memory):
            return np.zeros(ends.shape[:-1])
        return np.maximum(self.held(ends).max(-1) - self.memory, 0.0)  # type: ignore[no-any-return]

    def per_rank(self, stages: Array) -> Array:
        """Sum what stages have over those of every rank."""
        sums = np.zeros((*stages.shape[:-1], int(self.ranks.max()) + 1))
        for k, rank in enumerate(self.ranks):
            sums[..., rank] += stages[..., k]
        return sums


def _balance(table: _Table, costs: Array, memory: float) -> Array | None:
    """Find the boundaries with the cheapest costliest stage, of those the ones with the least sum of squares (exact).

    `costs` is one table for all stages, or one for each. No stage may hold more than `memory`; None if that is impossible.
    """
    count, peaks = len(table.ranks), table.peaks()
    per_stage = list(costs) if costs.ndim == 3 else [costs] * count
    if not math.isinf(memory):
        has_room = {peak: table.bytes_of(peak) <= memory for peak in set(peaks.tolist())}
        for k, peak in enumerate(peaks.tolist()):
            per_stage[k] = np.where(has_room[peak], per_stage[k], np.inf)
    # costliest[j]: the least cost of the costliest stage, if the stages so far end at boundary j.
    costliest = np.full(table.size, np.inf)
    costliest[0] = 0.0
    for stage in per_stage:
        costliest = np.maximum(costliest[:, None], stage).min(0)
    if not np.isfinite(costliest[-1]):
        return None
    limit = costliest[-1] * SLACK
    # The same again for the sum of squares, with no stage above the limit; `starts` leads back to the boundaries.
    squares = np.full(table.size, np.inf)
    squares[0] = 0.0
    starts = []
    for stage in per_stage:
        sums = squares[:, None] + np.square(np.where(stage <= limit, stage, np.inf))
        starts.append(sums.argmin(0))
        squares = sums.min(0)
    ends = [table.size - 1]
    for start in reversed(starts):
        ends.append(int(start[ends[-1]]))
    return np.array(ends[::-1])


def _every(table: _Table) -> Array | None:
    """Return all combinations of cuts, a row each; None if they are too many."""
    inner, cuts = table.size - 2, len(table.ranks) - 1
    if math.comb(inner, cuts) > MAX_COMBINATIONS:
        return None
    chosen = np.array(list(combinations(range(1, table.size - 1), cuts)))
    return np.pad(chosen, ((0, 0), (1, 1)), constant_values=((0, 0), (0, table.size - 1)))


def _improve(table: _Table, starts: Sequence[Array]) -> Array:
    """Try all combinations where they are few; otherwise move cuts, from each start, for as long as the score falls."""
    candidates = _every(table)
    if candidates is None:
        candidates = np.stack([_descend(table, ends) for ends in starts])
    return candidates[_best(_score(table, candidates))]  # type: ignore[no-any-return]


def _descend(table: _Table, ends: Array) -> Array:
    moves = _moves(len(ends))
    score = _score(table, ends[None])[0]
    while True:
        tried = ends + moves
        tried = tried[(np.diff(tried, axis=1) > 0).all(1)]
        if not len(tried):
            return ends
        scores = _score(table, tried)
        best = _best(scores)
        if tuple(scores[best]) >= tuple(score):
            return ends
        ends, score = tried[best], scores[best]


def _simulated(table: _Table, ends: Array, makespan_of: MakespanOf) -> Array:
    """Return the cuts around `ends` with the least makespan: those with the best scores are simulated, a few times over."""
    moves, makespans = _moves(len(ends)), {tuple(ends): makespan_of(table.stages(ends).tolist())}
    for _ in range(MAX_ROUNDS if len(moves) else 0):
        tried = ends + moves
        # Boundaries must ascend, and all ranks must fit.
        tried = tried[(np.diff(tried, axis=1) > 0).all(1)]
        tried = tried[table.excess(tried) == 0.0] if len(tried) else tried
        if not len(tried):
            break
        for row in tried[_order(_score(table, tried))[:CUTS_PER_ROUND]]:
            if tuple(row) not in makespans:
                makespans[tuple(row)] = makespan_of(table.stages(row).tolist())
        first = min(makespans, key=makespans.__getitem__)
        if makespans[first] * SLACK >= makespans[tuple(ends)]:
            break
        ends = np.array(first)
    return ends


def _moves(count: int) -> Array:
    """Return steps from `count` boundaries to others, a row each.

    Runs of neighbouring cuts move by up to three positions either way; of few cuts also any two by one position each.
    """
    inner = range(1, count - 1)
    has_all = count <= MAX_BOUNDARIES_FOR_ALL_MOVES
    reaches = (-3, -2, -1, 1, 2, 3) if has_all else (-1, 1)
    moves = []
    for first, last in combinations_with_replacement(inner, 2):
        step = np.zeros(count, dtype=int)
        step[first : last + 1] = 1
        moves += [step * reach for reach in reaches]
    for first, last in combinations(inner, 2) if has_all else ():
        for a, b in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            step = np.zeros(count, dtype=int)
            step[first], step[last] = a, b
            moves.append(step)
    return np.array(moves, dtype=int).reshape(-1, count)


def _order(scores: Array) -> Array:
    """Sort rows of scores, the first column first (lexsort begins with its last key)."""
    return np.lexsort(scores.T[::-1])


def _best(scores: Array) -> int:
    return int(_order(scores)[0])


def _score(table: _Table, ends: Array) -> Array:
    """Return a row per row of `ends`; the least, compared like tuples, is the best.

    Its columns: bytes too many; the busiest rank, plus a quarter of the pace of the chunks; the sum of the squares of the
    stages. The latter two are shares of all the work. Ranks run chunk c of neighbouring microbatches at the same time, so the
    costliest stage of each chunk sets the pace.
    """
    stages = table.stages(ends)
    loads = table.per_rank(stages)
    chunks = len(table.ranks) // loads.shape[-1]
    pace = stages.reshape(*stages.shape[:-1], chunks, -1).max(-1).sum(-1)
    busiest = (loads.max(-1) + PACE * pace) / table.whole
    squares = (stages * stages).sum(-1) / table.whole**2
    # Rounded, so that sums in another order do not decide.
    return np.round(np.stack([table.excess(ends), busiest, squares], -1), 12)


__all__ = ["Cuts", "Line", "Value", "evaluate", "least_memory", "place"]
