"""Choose where to cut a line of operators into stages, so that the busiest pipeline rank is least busy.

In: a `Line` (seconds and bytes of every operator, the values that may cross, the positions where it may be cut), and
the pipeline rank of every stage. Out: the chosen positions. With one stage per rank the answer is exact (dynamic
programming over positions). With several it is exact if all combinations can be tried; otherwise cuts are moved as
long as that helps, and `Cuts.bound` says how far the result could be from the best.

    place(Line(work=[1, 1, 1, 3], points=[0, 1, 2]), ranks=[0, 1]).chosen == (2,)

The busiest rank decides: with m microbatches a pipeline takes about m times its time per microbatch (SC'21, section
2.2). If the schedule can be simulated (`makespan_of`), the cuts around the best one are compared by its makespan.

The values that a rank keeps for backward have *levels*, from the fastest to the smallest. A rank takes the lowest
level at which it fits, mixed with the one below: at level 1.25, a quarter of its layers keep as much as at level 2,
the others as at level 1.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement

import numpy as np

Array = np.ndarray
# Times that differ by less than this factor are equal.
SLACK = 1 + 1e-9
# Weight of the pace of the chunks (`_score`), by simulation: within 2% of the best cut of small interleaved pipelines.
PACE = 0.25
# Up to this many combinations of cuts are all tried.
MAX_COMBINATIONS = 20_000
# Rounds of simulation around the best cuts, and cuts that are simulated in each.
MAX_ROUNDS, CUTS_PER_ROUND = 4, 16
# Up to this many boundaries, more moves are tried: larger ones, and two cuts at once.
MAX_BOUNDARIES_FOR_ALL_MOVES = 40
# (seconds of every stage, its seconds of recomputation) -> seconds of the schedule.
MakespanOf = Callable[[Sequence[float], Sequence[float]], float]


@dataclass(frozen=True)
class Value:
    """The result of operator `made`, read by operators `reads` (ascending); `seconds` to send or receive it."""

    made: int
    reads: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Level:
    """Per operator: bytes saved per microbatch in flight, and seconds to recompute the values that are not saved."""

    saved: Sequence[float]
    again: Sequence[float]


@dataclass(frozen=True)
class Line:
    """Operators in model order.

    - `work[i]`: seconds of operator i on one rank.
    - `points`: the operators after which the line may be cut, ascending; `values`: those that may cross.
    - `kept[i]`: bytes that a rank holds once for operator i (parameters and their state).
    - `levels`: the ways to save values of a microbatch, each with fewer bytes and more seconds than the one before.
    - `shared`: (bytes, operators) that a rank holds once if it has any of the operators (a tied weight).
    - `working`: bytes that every pipeline rank needs in addition, whatever its stages are.
    """

    work: Sequence[float]
    points: Sequence[int]
    values: Sequence[Value] = ()
    kept: Sequence[float] = ()
    levels: Sequence[Level] = ()
    shared: Sequence[tuple[float, tuple[int, ...]]] = ()
    working: Sequence[float] = ()


@dataclass(frozen=True)
class Cuts:
    """Cuts with their costs.

    - `chosen[k]`: the last operator of stage k.
    - per pipeline rank: `loads`, seconds (the largest cannot be below `bound`); `held`, bytes.
    - per stage: `saved`, bytes of a microbatch; `again`, seconds of recomputation; `links`, seconds of sends and
      receives.
    - `makespan`: seconds of the schedule, or of the busiest rank if it is not simulated.
    """

    chosen: tuple[int, ...]
    loads: tuple[float, ...]
    bound: float
    held: tuple[float, ...]
    saved: tuple[float, ...]
    again: tuple[float, ...]
    links: tuple[float, ...]
    makespan: float


def place(
    line: Line,
    ranks: Sequence[int],
    live: Sequence[Sequence[int]] = (),
    memory: float = np.inf,
    makespan_of: MakespanOf | None = None,
) -> Cuts | None:
    """Cut `line` into len(ranks) stages; None if that is impossible.

    `live` are moments of the schedule: the number of microbatches in flight on every stage of one rank. No rank may
    hold more than `memory` bytes.
    """
    if len(line.points) < len(ranks) - 1:
        return None
    table = Table(line, ranks, live, memory)
    if len(set(ranks)) < len(ranks):
        # With several stages per rank, the search begins at balanced stages: once by time and once by memory.
        starts = [_balance(table, [costs] * len(ranks)) for costs in (table.costs(), table.bytes_of(0.0))]
        ends = _improve(table, [start for start in starts if start is not None])
    else:
        needs = table.needs()
        by_need = {need: table.costs(need) for need in set(needs)}
        ends = _balance(table, [by_need[need] for need in needs])
    if ends is None or table.excess(ends) > 0.0:
        return None
    if makespan_of:
        ends = _simulated(table, ends, makespan_of)
    return _cuts(table, line, ends, makespan_of)


def evaluate(
    line: Line,
    ranks: Sequence[int],
    chosen: Sequence[int],
    live: Sequence[Sequence[int]] = (),
    memory: float = np.inf,
    makespan_of: MakespanOf | None = None,
) -> Cuts:
    """Return the costs of given cuts."""
    only = replace(line, points=tuple(chosen))
    table = Table(only, ranks, live, memory)
    return _cuts(table, only, np.arange(table.size), makespan_of)


def least_memory(line: Line, ranks: Sequence[int], live: Sequence[Sequence[int]] = ()) -> float:
    """Return the bytes of the fullest rank with the cuts that spread them best.

    This is exact for one stage per rank; with several, it is the best that the search finds.
    """
    table = Table(line, ranks, live, 0.0)
    ends = _balance(table, [table.bytes_of(peak) + working for peak, working in table.needs()])
    if ends is not None and len(set(ranks)) < len(ranks):
        ends = _improve(table, [ends])
    return float(table.held(ends).max()) if ends is not None else np.inf


def _cuts(table: Table, line: Line, ends: Array, makespan_of: MakespanOf | None) -> Cuts:
    again = table.again(ends)
    loads = table.per_rank(table.stages(ends) + again)
    has_chunks = len(set(table.ranks.tolist())) < len(table.ranks)
    # With one stage per rank the answer is the best; with several, none is better than equal shares of the work.
    bound = float(np.sum(line.work)) / len(loads) if has_chunks else float(loads.max())
    chosen = tuple(int(line.points[i - 1]) for i in ends[1:-1])
    numbers = (
        tuple(map(float, each)) for each in (table.held(ends), table.saved(ends), again, table.crossing(ends))
    )
    return Cuts(
        chosen, tuple(map(float, loads)), bound, *numbers, makespan=_makespan(table, ends, makespan_of)
    )


def _makespan(table: Table, ends: Array, makespan_of: MakespanOf | None) -> float:
    stages, again = table.stages(ends), table.again(ends)
    if makespan_of is None:
        return float(table.per_rank(stages + again).max())
    return makespan_of(stages.tolist(), again.tolist())


def _balance(table: Table, per_stage: Sequence[Array]) -> Array | None:
    """Find the boundaries that minimize the costliest stage, then the sum of squares (exact); None if there are none.

    `per_stage` has a table of costs for each stage, infinite for stages that are not allowed.
    """
    if table.size <= len(per_stage):
        return None
    even = table.even(len(per_stage))
    bound = max(stage[i, j] for stage, i, j in zip(per_stage, even, even[1:], strict=False))
    # costliest[j]: the least cost of the costliest stage, if the stages so far end at boundary j.
    costliest = np.full(table.size, np.inf)
    costliest[0] = 0.0
    for band in _bands(per_stage, bound):
        costliest = np.maximum(_before(costliest, band), band).min(1)
    if not np.isfinite(costliest[-1]):
        return None
    # The same for the sum of squares, with no stage above the limit; `starts` leads back to the boundaries.
    squares = np.full(table.size, np.inf)
    squares[0] = 0.0
    starts = []
    for band in _bands(per_stage, costliest[-1] * SLACK):
        sums = _before(squares, band) + np.square(band)
        starts.append(sums.argmin(1) - band.shape[1])
        squares = sums.min(1)
    ends = [table.size - 1]
    for start in reversed(starts):
        ends.append(ends[-1] + int(start[ends[-1]]))
    return np.array(ends[::-1])


def _bands(per_stage: Sequence[Array], limit: float) -> list[Array]:
    """Return for every stage its costs [j, k] from boundary j - width + k to boundary j, infinite above the limit."""
    # Stages often share a table.
    tables = {id(costs): costs for costs in per_stage}
    bands = {key: _band(costs, limit) for key, costs in tables.items()}
    return [bands[id(costs)] for costs in per_stage]


def _band(costs: Array, limit: float) -> Array:
    end = np.arange(len(costs))[:, None]
    # As long as the longest stage within the limit.
    width = max(1, int((end.T - np.where(costs <= limit, end, end.T).min(0)).max()))
    begin = end - width + np.arange(width)
    return np.where((begin >= 0) & (costs[begin, end] <= limit), costs[begin, end], np.inf)


def _before(values: Array, band: Array) -> Array:
    """Return the values [j, k] of boundaries j - width + k."""
    width = band.shape[1]
    padded = np.concatenate([np.full(width, np.inf), values[:-1]])
    return np.lib.stride_tricks.sliding_window_view(padded, width)


def _every(table: Table) -> Array | None:
    """Return all combinations of cuts, one per row; None if there are too many."""
    inner, cuts = table.size - 2, len(table.ranks) - 1
    if math.comb(inner, cuts) > MAX_COMBINATIONS:
        return None
    chosen = np.array(list(combinations(range(1, table.size - 1), cuts)))
    return np.pad(chosen, ((0, 0), (1, 1)), constant_values=((0, 0), (0, table.size - 1)))


def _improve(table: Table, starts: Sequence[Array]) -> Array:
    """Try all combinations if they are few; otherwise move cuts, from each start, as long as the score falls."""
    candidates = _every(table)
    if candidates is None:
        moves = _moves(len(table.ranks) + 1)
        # Layers of one kind balance alike by time and by memory.
        distinct = {tuple(ends): ends for ends in starts}.values()
        candidates = np.stack([_descend(table, ends, moves) for ends in distinct])
    return candidates[_best(_score(table, candidates))]  # type: ignore[no-any-return]


def _descend(table: Table, ends: Array, moves: Array) -> Array:
    score = _score(table, ends[None])[0]
    while True:
        tried = ends + moves
        tried = tried[_ascends(tried)]
        if not len(tried):
            return ends
        scores = _score(table, tried)
        best = _best(scores)
        if tuple(scores[best]) >= tuple(score):
            return ends
        ends, score = tried[best], scores[best]


def _ascends(ends: Array) -> Array:
    """Tell, per row, whether boundaries ascend."""
    return (ends[:, 1:] > ends[:, :-1]).all(1)  # type: ignore[no-any-return]


def _simulated(table: Table, ends: Array, makespan_of: MakespanOf) -> Array:
    """Return the cuts around `ends` with the least makespan: simulate those with the best scores, in a few rounds."""
    moves, makespans = _moves(len(ends)), {tuple(ends): _makespan(table, ends, makespan_of)}
    for _ in range(MAX_ROUNDS if len(moves) else 0):
        tried = ends + moves
        # Boundaries must ascend, and all ranks must fit.
        tried = tried[_ascends(tried)]
        tried = tried[table.excess(tried) == 0.0] if len(tried) else tried
        if not len(tried):
            break
        for row in tried[_order(_score(table, tried))[:CUTS_PER_ROUND]]:
            if tuple(row) not in makespans:
                makespans[tuple(row)] = _makespan(table, row, makespan_of)
        first = min(makespans, key=makespans.__getitem__)
        if makespans[first] * SLACK >= makespans[tuple(ends)]:
            break
        ends = np.array(first)
    return ends


def _moves(count: int) -> Array:
    """Return steps from `count` boundaries to others, one per row.

    Runs of neighboring cuts move by up to three positions either way; if cuts are few, any two move by one position.
    """
    inner, at = range(1, count - 1), np.arange(count)
    has_all = count <= MAX_BOUNDARIES_FOR_ALL_MOVES
    reaches = np.array([-3, -2, -1, 1, 2, 3] if has_all else [-1, 1])[:, None]
    ends = np.array(list(combinations_with_replacement(inner, 2))).reshape(-1, 2, 1, 1)
    runs = (reaches * ((at >= ends[:, 0]) & (at <= ends[:, 1]))).reshape(-1, count)
    pairs = []
    for first, last in combinations(inner, 2) if has_all else ():
        for a, b in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            step = np.zeros(count, dtype=int)
            step[first], step[last] = a, b
            pairs.append(step)
    return np.concatenate([runs, np.array(pairs, dtype=int).reshape(-1, count)])


def _order(scores: Array) -> Array:
    """Sort rows of scores, the first column first (lexsort begins with its last key)."""
    return np.lexsort(scores.T[::-1])


def _best(scores: Array) -> int:
    return int(_order(scores)[0])


def _score(table: Table, ends: Array) -> Array:
    """Return a row of scores per row of `ends`; the smallest, compared like tuples, is the best.

    Its columns: excess bytes; the busiest rank, plus a quarter of the pace of the chunks; the sum of the squares of
    the stages. The latter two are relative to all the work. Ranks run chunk c of neighboring microbatches at the same
    time, so the costliest stage of each chunk sets the pace.
    """
    stages = table.stages(ends) + table.again(ends)
    loads = table.per_rank(stages)
    chunks = len(table.ranks) // loads.shape[-1]
    pace = stages.reshape(*stages.shape[:-1], chunks, -1).max(-1).sum(-1)
    busiest = (loads.max(-1) + PACE * pace) / table.whole
    squares = (stages * stages).sum(-1) / table.whole**2
    # Rounded, so that the order of summation does not decide.
    return np.round(np.stack([table.excess(ends), busiest, squares], -1), 12)


class Table:
    """Costs of every stage between two boundaries; boundary 0 is the start of the line, the last one its end.

    A row of cuts is `ends`: stage k runs from boundary ends[k] to ends[k + 1]. Methods take one such row, or a
    batch of them (leading dims).
    """

    def __init__(
        self, line: Line, ranks: Sequence[int], live: Sequence[Sequence[int]], memory: float
    ) -> None:
        self.ranks, self.memory = np.asarray(ranks), memory
        # A rank also fits if it is off by rounding only.
        self.limit = memory * (1 + 1e-12)
        self.live = np.asarray(live, dtype=float).reshape(-1, len(ranks))
        # The first operator after every boundary.
        self.at = np.array([0, *(point + 1 for point in line.points), len(line.work)])
        self.work = self._sums_before(line.work)
        self.kept = self._sums_before(line.kept)
        levels = line.levels or [Level((), ())]
        # Without a bound every rank stays at the first level.
        levels = levels if np.isfinite(memory) else levels[:1]
        # Per level and boundary.
        self._saved = np.stack([self._sums_before(level.saved) for level in levels])
        self._again = np.stack([self._sums_before(level.again) for level in levels])
        self.whole = max(float(self.work[-1]), 1e-30)
        self.size = len(self.at)
        self.links = np.zeros((self.size, self.size))
        made = np.searchsorted(self.at, [value.made for value in line.values], side="right")
        read = np.searchsorted(self.at, [value.reads[-1] for value in line.values], side="right")
        for value, first, last in zip(line.values, made.tolist(), read.tolist(), strict=True):
            if first < last:
                self._add_value(value, first, last)
        self.shared = [(nbytes, self._has(readers)) for nbytes, readers in line.shared]
        self.working = np.asarray(line.working or np.zeros(int(self.ranks.max()) + 1), dtype=float)

    def even(self, count: int) -> Array:
        """Return boundaries of `count` stages with about equal seconds."""
        ends, number = (
            np.searchsorted(self.work, np.linspace(0, self.work[-1], count + 1)),
            np.arange(count + 1),
        )
        ends[-1] = self.size - 1
        ascending = np.maximum.accumulate(ends - number) + number
        return np.minimum(ascending, self.size - 1 - number[::-1])

    def _sums_before(self, of_operators: Sequence[float]) -> Array:
        """Sum over the operators before every boundary; a stage has the difference of two of these sums."""
        per_operator = of_operators if len(of_operators) else np.zeros(int(self.at[-1]))
        return np.concatenate([[0.0], np.cumsum(per_operator)])[self.at]

    def _add_value(self, value: Value, first: int, last: int) -> None:
        """Add the seconds of a value to every stage that sends or receives it.

        A stage that makes it and ends before its last reader sends it; a later stage with a reader receives it. The
        boundaries `first` to `last` - 1 lie between.
        """
        # Stages that begin before it is made and end before it is last read.
        self.links[:first, first:last] += value.seconds
        # Stages that begin after it is made, and reach the next reader from there.
        for i in range(first, last):
            reader = value.reads[bisect_left(value.reads, self.at[i])]
            self.links[i, bisect_right(self.at, reader) :] += value.seconds

    def _has(self, readers: tuple[int, ...]) -> Array:
        """Tell for every stage (i, j) whether it has one of these operators."""
        sums = np.zeros(int(self.at[-1]) + 1)
        sums[np.asarray(readers) + 1] = 1
        # counts[i]: how many of them lie before boundary i; a stage has one if the count grows.
        counts = np.cumsum(sums)[self.at]
        return counts[None, :] > counts[:, None]

    def costs(self, need: tuple[float, float] | None = None) -> Array:
        """Return the seconds [i, j] of the stage from boundary i to boundary j; infinite where j <= i.

        With `need`, the microbatches in flight and the working bytes of a rank that has no other stage, also
        infinite where the stage does not fit.
        """
        seconds = self.work[None, :] - self.work[:, None] + self.links
        again = self._again[:, None, :] - self._again[:, :, None]
        if need is None or np.isinf(self.memory):
            return self._forward(seconds + again[0])
        live, working = need
        held = np.stack([working + self.bytes_of(live, level) for level in range(len(again))])
        seconds = seconds + _at_level(again, _lowest_that_fits(held, self.memory))
        return self._forward(np.where(held[-1] <= self.limit, seconds, np.inf))

    def bytes_of(self, live: float, level: int = -1) -> Array:
        """Return the bytes [i, j] of the stage from i to j, with `live` microbatches in flight."""
        saved = self._saved[level]
        held = self.kept[None, :] - self.kept[:, None] + live * (saved[None, :] - saved[:, None])
        return self._forward(held + sum(nbytes * has for nbytes, has in self.shared))

    def _forward(self, table: Array) -> Array:
        """Forbid stages that do not run forward."""
        at = np.arange(self.size)
        table[at[:, None] >= at] = np.inf
        return table

    def needs(self) -> list[tuple[float, float]]:
        """Return for every stage the most microbatches in flight, and the working bytes of its rank."""
        peaks = self.live.max(0) if len(self.live) else np.zeros(len(self.ranks))
        return list(zip(peaks.tolist(), self.working[self.ranks].tolist(), strict=True))

    def stages(self, ends: Array) -> Array:
        """Return the seconds of every stage, without recomputation."""
        return np.diff(self.work[ends], axis=-1) + self.crossing(ends)  # type: ignore[no-any-return]

    def crossing(self, ends: Array) -> Array:
        """Return the seconds of sends and receives of every stage."""
        return self.links[ends[..., :-1], ends[..., 1:]]  # type: ignore[no-any-return]

    def again(self, ends: Array) -> Array:
        """Return the seconds of recomputation in every stage."""
        return self._of_stages(self._again, ends)

    def saved(self, ends: Array) -> Array:
        """Return the bytes that every stage saves per microbatch."""
        return self._of_stages(self._saved, ends)

    def levels(self, ends: Array) -> Array:
        """Return the level of every pipeline rank; the last one if not even that fits."""
        if len(self._saved) == 1:
            return np.zeros((*ends.shape[:-1], int(self.ranks.max()) + 1))
        once = self._once(ends)
        held = [once + self._in_flight(np.diff(saved[ends], axis=-1)) for saved in self._saved]
        return _lowest_that_fits(np.stack(held), self.memory)

    def held(self, ends: Array) -> Array:
        """Return the bytes of every pipeline rank at its fullest moment, with its working bytes."""
        return self._once(ends) + self._in_flight(self.saved(ends))  # type: ignore[no-any-return]

    def excess(self, ends: Array) -> Array:
        """Return the bytes by which the fullest rank exceeds its memory."""
        if np.isinf(self.memory):
            return np.zeros(ends.shape[:-1])
        return np.maximum(self.held(ends).max(-1) - self.limit, 0.0)  # type: ignore[no-any-return]

    def per_rank(self, stages: Array) -> Array:
        """Sum values of stages over the stages of every rank."""
        # A row per stage: much faster to add than columns.
        rows = np.ascontiguousarray(np.moveaxis(stages, -1, 0))
        sums = np.zeros((int(self.ranks.max()) + 1, *rows.shape[1:]))
        for rank, row in zip(self.ranks, rows, strict=True):
            sums[rank] += row
        return np.moveaxis(sums, 0, -1)

    def _of_stages(self, levels: Array, ends: Array) -> Array:
        of_stages = np.stack([np.diff(sums[ends], axis=-1) for sums in levels])
        if len(levels) == 1:
            return of_stages[0]  # type: ignore[no-any-return]
        return _at_level(of_stages, self.levels(ends)[..., self.ranks])

    def _once(self, ends: Array) -> Array:
        """Return the bytes that every rank needs regardless of the microbatches in flight."""
        once = self.per_rank(np.diff(self.kept[ends], axis=-1))
        once += self.working
        for nbytes, has in self.shared:
            once += nbytes * (self.per_rank(has[ends[..., :-1], ends[..., 1:]].astype(float)) > 0)
        return once

    def _in_flight(self, saved: Array) -> Array:
        """Return the bytes that every rank saves at its fullest moment, given those that stages save per microbatch."""
        most = np.zeros((*saved.shape[:-1], int(self.ranks.max()) + 1))
        for moment in self.live:
            # A moment has microbatches in flight on the stages of one rank only.
            rank = self.ranks[int(np.argmax(moment))]
            most[..., rank] = np.maximum(most[..., rank], saved @ moment)
        return most


def _lowest_that_fits(held: Array, memory: float) -> Array:
    """Return the lowest level at which bytes fit, interpolated between two levels; the last one if none does.

    `held[k]` are the bytes at level k.
    """
    fits = held <= memory
    first = np.where(fits.any(0), fits.argmax(0), len(held) - 1)
    above = np.take_along_axis(held, first[None], 0)[0]
    below = np.take_along_axis(held, np.maximum(first - 1, 0)[None], 0)[0]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.clip((below - memory) / (below - above), 0.0, 1.0)
    mixed = first - 1 + share
    return np.where((first == 0) | ~fits.any(0), first, mixed)  # type: ignore[no-any-return]


def _at_level(levels: Array, at: Array) -> Array:
    """Interpolate between levels, the first dim."""
    if len(levels) == 1:
        return levels[0]  # type: ignore[no-any-return]
    low = np.minimum(at.astype(int), len(levels) - 2)
    lower, upper = (np.take_along_axis(levels, (low + k)[None], 0)[0] for k in (0, 1))
    return lower + (at - low) * (upper - lower)  # type: ignore[no-any-return]
