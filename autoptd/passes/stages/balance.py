"""Choose where to cut a line of operators into stages, so that the busiest pipeline rank is least busy.

In: a `Line` (seconds and bytes of every operator, what crosses, the positions where it may be cut), and the pipeline rank of
every stage. Out: the chosen positions. With one stage per rank the answer is exact (dynamic programming over positions); with
several it is exact where all ways can be tried, else the best that moving cuts finds from there, and `Cuts.bound` says how
far that could be from the best.

    place(Line(work=[1, 1, 1, 3], points=[0, 1, 2]), ranks=[0, 1]).chosen == (2,)

The busiest rank decides: with m microbatches a pipeline takes about m times its time per microbatch (SC'21, section 2.2). Where
the schedule can be simulated (`finish`), the cuts around the best one are held against each other by that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

import numpy as np

Array = np.ndarray
SLACK = 1 + 1e-9
PACE = 0.25  # found by simulation: within 2% of the best cut of small interleaved pipelines
FEW = 20_000  # ways to cut that are simply all tried
NEAR, ROUNDS = 16, 4  # cuts around the best one that are simulated, so often
Finish = Callable[[Sequence[float]], float]  # seconds of every stage -> seconds of the schedule


@dataclass(frozen=True)
class Value:
    """What operator `made` makes and operators `reads` read, ascending: a stage takes `seconds` to send or to receive it."""

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

    `held`: bytes per pipeline rank; `finish`: seconds of the schedule, or of the busiest rank where it is not simulated.
    """

    chosen: tuple[int, ...]
    loads: tuple[float, ...]
    bound: float
    held: tuple[float, ...]
    finish: float

    @property
    def busiest(self) -> float:
        return max(self.loads)


def place(
    line: Line,
    ranks: Sequence[int],
    live: Sequence[Sequence[int]] = (),
    memory: float = np.inf,
    finish: Finish | None = None,
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
        starts = [_balance(table, table.costs(), np.inf), _balance(table, table.bytes_of(0.0), np.inf)]
        ends = _improve(table, [one for one in starts if one is not None])
    if ends is None or table.held(ends).max() > memory:
        return None
    return _told(table, line, _simulated(table, ends, finish) if finish else ends, finish)


def evaluate(
    line: Line,
    ranks: Sequence[int],
    chosen: Sequence[int],
    live: Sequence[Sequence[int]] = (),
    finish: Finish | None = None,
) -> Cuts:
    """The same numbers for cuts that were chosen elsewhere."""
    only = Line(line.work, tuple(chosen), line.values, line.kept, line.saved, line.shared)
    table = _Table(only, ranks, live, np.inf)
    return _told(table, only, np.arange(table.size), finish)


def least_memory(line: Line, ranks: Sequence[int], live: Sequence[Sequence[int]] = ()) -> float:
    """Bytes of the fullest rank where they are spread best: exact for one stage per rank, else the best that is found."""
    table = _Table(line, ranks, live, 0.0)
    peaks = table.peaks()
    per_stage = np.stack([table.bytes_of(float(one)) for one in peaks])
    ends = _balance(table, per_stage, np.inf)
    if ends is not None and len(set(ranks)) < len(ranks):
        ends = _improve(table, [ends])
    return float(table.held(ends).max()) if ends is not None else np.inf


def _told(table: _Table, line: Line, ends: Array, finish: Finish | None) -> Cuts:
    loads = table.per_rank(table.stages(ends))
    is_shared = len(set(table.ranks.tolist())) < len(table.ranks)
    bound = float(np.sum(line.work)) / len(loads) if is_shared else float(loads.max())
    chosen = tuple(int(line.points[i - 1]) for i in ends[1:-1])
    taken = finish(table.stages(ends).tolist()) if finish else float(loads.max())
    return Cuts(chosen, tuple(map(float, loads)), bound, tuple(map(float, table.held(ends))), taken)


class _Table:
    """Costs of every stage between two boundaries; boundary 0 is the start of the line, the last one its end."""

    def __init__(
        self, line: Line, ranks: Sequence[int], live: Sequence[Sequence[int]], memory: float
    ) -> None:
        self.ranks, self.memory = np.asarray(ranks), memory
        self.live = np.asarray(live, dtype=float).reshape(-1, len(ranks))
        self.at = at = np.array([0, *(point + 1 for point in line.points), len(line.work)])
        none = np.zeros(len(line.work))
        self.work, self.kept, self.saved = (
            np.concatenate([[0.0], np.cumsum(x if len(x) else none)])[at]
            for x in (line.work, line.kept, line.saved)
        )
        self.whole = max(float(self.work[-1]), 1e-30)
        self.size = len(at)
        self.links = np.zeros((self.size, self.size))
        for value in line.values:
            self._add_value(value)
        self.shared = [(nbytes, self._has(readers)) for nbytes, readers in line.shared]

    def _add_value(self, value: Value) -> None:
        """A stage that makes it and does not end before its last reader sends it, one that begins behind it receives it."""
        first, last = np.searchsorted(self.at, [value.made, value.reads[-1]], side="right")
        if first == last:
            return
        self.links[:first, first:last] += value.seconds
        for i in range(first, last):
            reader = value.reads[np.searchsorted(value.reads, self.at[i])]
            self.links[i, np.searchsorted(self.at, reader, side="right") :] += value.seconds

    def _has(self, readers: tuple[int, ...]) -> Array:
        """Whether the stage from boundary i to boundary j has one of these operators."""
        sums = np.zeros(int(self.at[-1]) + 1)
        sums[np.asarray(readers) + 1] = 1
        counts = np.cumsum(sums)[self.at]
        return counts[None, :] > counts[:, None]

    def costs(self) -> Array:
        """Seconds of the stage from boundary i to boundary j; infinite where j <= i."""
        return self._forward(self.work[None, :] - self.work[:, None] + self.links)

    def bytes_of(self, live: float) -> Array:
        """Bytes of the same, with `live` microbatches in flight."""
        held = self.kept[None, :] - self.kept[:, None] + live * (self.saved[None, :] - self.saved[:, None])
        return self._forward(held + sum(nbytes * has for nbytes, has in self.shared))

    def _forward(self, made: Array) -> Array:
        made[np.tril_indices(self.size)] = np.inf
        return made

    def peaks(self) -> Array:
        """Microbatches in flight on every stage at most."""
        return self.live.max(0) if len(self.live) else np.zeros(len(self.ranks))

    def stages(self, ends: Array) -> Array:
        """Seconds per stage when stage k runs from boundary ends[k] to ends[k + 1]; `ends` may be a batch of such rows."""
        return np.diff(self.work[ends], axis=-1) + self.links[ends[..., :-1], ends[..., 1:]]  # type: ignore[no-any-return]

    def held(self, ends: Array) -> Array:
        """Bytes per pipeline rank, at the fullest moment of each."""
        made = self.per_rank(np.diff(self.kept[ends], axis=-1))
        saved = np.diff(self.saved[ends], axis=-1)
        in_flight = np.zeros_like(made)
        for moment in self.live:
            rank = self.ranks[int(np.argmax(moment))]
            in_flight[..., rank] = np.maximum(in_flight[..., rank], saved @ moment)
        for nbytes, has in self.shared:
            made += nbytes * (self.per_rank(has[ends[..., :-1], ends[..., 1:]].astype(float)) > 0)
        return made + in_flight  # type: ignore[no-any-return]

    def excess(self, ends: Array) -> Array:
        """Bytes of the fullest rank beyond its memory."""
        if math.isinf(self.memory):
            return np.zeros(ends.shape[:-1])
        return np.maximum(self.held(ends).max(-1) - self.memory, 0.0)  # type: ignore[no-any-return]

    def per_rank(self, stages: Array) -> Array:
        made = np.zeros((*stages.shape[:-1], int(self.ranks.max()) + 1))
        for k, rank in enumerate(self.ranks):
            made[..., rank] += stages[..., k]
        return made


def _balance(table: _Table, costs: Array, memory: float) -> Array | None:
    """Boundaries for which the costliest stage is cheapest, of those the ones with the least sum of squares (exact).

    `costs` is one table for all stages, or one for each. No stage may hold more than `memory`.
    """
    count, peaks = len(table.ranks), table.peaks()
    per_stage = list(costs) if costs.ndim == 3 else [costs] * count
    if not math.isinf(memory):
        room = {peak: table.bytes_of(peak) <= memory for peak in set(peaks.tolist())}
        per_stage = [
            np.where(room[peak], one, np.inf) for one, peak in zip(per_stage, peaks.tolist(), strict=True)
        ]
    peak = np.full(table.size, np.inf)
    peak[0] = 0.0
    for stage in per_stage:
        peak = np.maximum(peak[:, None], stage).min(0)
    if not np.isfinite(peak[-1]):
        return None
    limit = peak[-1] * SLACK
    best = np.full(table.size, np.inf)
    best[0] = 0.0
    came = []
    for stage in per_stage:
        sums = best[:, None] + np.square(np.where(stage <= limit, stage, np.inf))
        came.append(sums.argmin(0))
        best = sums.min(0)
    ends = [table.size - 1]
    for choice in reversed(came):
        ends.append(int(choice[ends[-1]]))
    return np.array(ends[::-1])


def _every(table: _Table) -> Array | None:
    """All ways to cut, if they are few."""
    inner, cuts = table.size - 2, len(table.ranks) - 1
    if math.comb(inner, cuts) > FEW:
        return None
    chosen = np.array(list(combinations(range(1, table.size - 1), cuts)))
    return np.pad(chosen, ((0, 0), (1, 1)), constant_values=((0, 0), (0, table.size - 1)))


def _improve(table: _Table, starts: Sequence[Array]) -> Array:
    """The best of all ways where they are few; else move cuts, from each start, for as long as the score gets less."""
    every = _every(table)
    if every is None:
        every = np.stack([_descend(table, ends) for ends in starts])
    return every[_best(_score(table, every))]  # type: ignore[no-any-return]


def _descend(table: _Table, ends: Array) -> Array:
    moves = _moves(len(ends))
    score = _score(table, ends[None])[0]
    while True:
        tried = ends + moves
        tried = tried[(np.diff(tried, axis=1) > 0).all(1)]
        if not len(tried):
            return ends
        scores = _score(table, tried)
        at = _best(scores)
        if tuple(scores[at]) >= tuple(score):
            return ends
        ends, score = tried[at], scores[at]


def _simulated(table: _Table, ends: Array, finish: Finish) -> Array:
    """The cuts around `ends` that finish first: of those with the best scores, a few times over."""
    moves, known = _moves(len(ends)), {tuple(ends): finish(table.stages(ends).tolist())}
    for _ in range(ROUNDS if len(moves) else 0):
        tried = ends + moves
        tried = tried[(np.diff(tried, axis=1) > 0).all(1)]
        tried = tried[table.excess(tried) == 0.0] if len(tried) else tried
        if not len(tried):
            break
        near = tried[np.lexsort(_score(table, tried).T[::-1])[:NEAR]]
        known |= {tuple(one): finish(table.stages(one).tolist()) for one in near if tuple(one) not in known}
        first = min(known, key=known.__getitem__)
        if known[first] * SLACK >= known[tuple(ends)]:
            break
        ends = np.array(first)
    return ends


def _moves(count: int) -> Array:
    """Runs of neighbouring cuts by up to three positions either way; of few cuts also any two by one position each."""
    inner = range(1, count - 1)
    made = []
    for first, last in combinations_with_replacement(inner, 2):
        step = np.zeros(count, dtype=int)
        step[first : last + 1] = 1
        made += [step * reach for reach in ((-3, -2, -1, 1, 2, 3) if count <= 40 else (-1, 1))]
    for first, last in combinations(inner, 2) if count <= 40 else ():
        for a, b in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            step = np.zeros(count, dtype=int)
            step[first], step[last] = a, b
            made.append(step)
    return np.array(made, dtype=int).reshape(-1, count)


def _best(scores: Array) -> int:
    return int(np.lexsort(scores.T[::-1])[0])


def _score(table: _Table, ends: Array) -> Array:
    """Per row: bytes too many, the busiest rank with a quarter of the pace of the chunks, the stages' squares (as shares).

    Ranks run chunk c of neighbouring microbatches side by side, so the costliest stage of each chunk sets the pace.
    """
    stages = table.stages(ends)
    loads = table.per_rank(stages)
    chunks = len(table.ranks) // loads.shape[-1]
    pace = stages.reshape(*stages.shape[:-1], chunks, -1).max(-1).sum(-1)
    busiest = (loads.max(-1) + PACE * pace) / table.whole
    squares = (stages * stages).sum(-1) / table.whole**2
    return np.round(np.stack([table.excess(ends), busiest, squares], -1), 12)


__all__ = ["Cuts", "Line", "Value", "evaluate", "least_memory", "place"]
