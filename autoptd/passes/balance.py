"""Choose where to cut a line of operators into stages, so that the busiest pipeline rank is least busy.

In: a `Line` (seconds and bytes of every operator, the positions where it may be cut and what a crossing there costs), and the
pipeline rank of every stage. Out: the chosen positions. With one stage per rank the answer is exact (dynamic programming over
positions); with several it is exact where all ways can be tried, else the best that moving cuts finds from there, and
`Cuts.bound` says how far that could be from the best.

    place(Line(work=[1, 1, 1, 3], points=[0, 1, 2], crossing=[0, 0, 0]), ranks=[0, 1]).chosen == (2,)

The busiest rank decides: with m microbatches a pipeline takes about m times its time per microbatch (SC'21, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

import numpy as np

Array = np.ndarray
SLACK = 1 + 1e-9
PACE = 0.25  # found by simulation: within 2% of the best cut of small interleaved pipelines
FEW = 20_000  # ways to cut that are simply all tried


@dataclass(frozen=True)
class Line:
    """Operators in model order.

    `work[i]`: seconds of operator i on one rank; `points`: operators behind which the line may be cut, ascending; `crossing`:
    the seconds that a cut at each point costs the stages on both of its sides. `kept[i]` and `saved[i]`: bytes that a rank
    holds for operator i once (parameters and their state), and for every microbatch in flight.
    """

    work: Sequence[float]
    points: Sequence[int]
    crossing: Sequence[float]
    kept: Sequence[float] = ()
    saved: Sequence[float] = ()


@dataclass(frozen=True)
class Cuts:
    """`chosen[k]` is the last operator of stage k; `loads`: seconds per pipeline rank, of which none can be below `bound`."""

    chosen: tuple[int, ...]
    loads: tuple[float, ...]
    bound: float

    @property
    def busiest(self) -> float:
        return max(self.loads)


def place(line: Line, ranks: Sequence[int], live: Sequence[int] = (), memory: float = np.inf) -> Cuts | None:
    """Cut `line` into len(ranks) stages; None if there is no way to.

    `live[k]` is the number of microbatches in flight on stage k; no rank may hold more than `memory` bytes.
    """
    count = len(ranks)
    if len(line.points) < count - 1:
        return None
    table = _Table(line, ranks, live, memory)
    ends = _balance(table)
    if ends is None:
        return None
    if len(set(ranks)) < count:
        ends = _improve(table, ends)
    loads = table.per_rank(table.stages(ends))
    total = float(np.sum(line.work))
    bound = total / len(set(ranks)) if len(set(ranks)) < count else float(loads.max())
    return Cuts(tuple(int(line.points[i - 1]) for i in ends[1:-1]), tuple(map(float, loads)), bound)


class _Table:
    """Cost of every stage between two boundaries; boundary 0 is the start of the line, the last one its end."""

    def __init__(self, line: Line, ranks: Sequence[int], live: Sequence[int], memory: float) -> None:
        self.ranks, self.memory = np.asarray(ranks), memory
        self.live = np.asarray(live or [0] * len(ranks), dtype=float)
        at = np.array([0, *(point + 1 for point in line.points), len(line.work)])
        none = np.zeros(len(line.work))
        sums = [
            np.concatenate([[0.0], np.cumsum(x if len(x) else none)])[at] for x in (line.work, line.kept, line.saved)
        ]
        self.work, self.kept, self.saved = sums
        self.crossing = np.array([0.0, *line.crossing, 0.0])
        self.whole = max(float(self.work[-1]), 1e-30)
        self.size = len(at)

    def costs(self) -> Array:
        """Seconds of the stage from boundary i to boundary j; infinite where j <= i."""
        made = self.work[None, :] - self.work[:, None] + self.crossing[:, None] + self.crossing[None, :]
        made[np.tril_indices(self.size)] = np.inf
        return made  # type: ignore[no-any-return]

    def bytes_of(self, live: float) -> Array:
        saved = self.saved[None, :] - self.saved[:, None]
        return self.kept[None, :] - self.kept[:, None] + live * saved  # type: ignore[no-any-return]

    def stages(self, ends: Array) -> Array:
        """Seconds per stage when stage k runs from boundary ends[k] to ends[k + 1]; `ends` may be a batch of such rows."""
        return np.diff(self.work[ends], axis=-1) + self.crossing[ends[..., :-1]] + self.crossing[ends[..., 1:]]  # type: ignore[no-any-return]

    def fits(self, ends: Array) -> Array:
        """Whether every rank's bytes are within its memory."""
        held = np.diff(self.kept[ends], axis=-1) + self.live * np.diff(self.saved[ends], axis=-1)
        return self.per_rank(held).max(-1) <= self.memory  # type: ignore[no-any-return]

    def per_rank(self, stages: Array) -> Array:
        made = np.zeros((*stages.shape[:-1], int(self.ranks.max()) + 1))
        for k, rank in enumerate(self.ranks):
            made[..., rank] += stages[..., k]
        return made


def _balance(table: _Table) -> Array | None:
    """Boundaries for which the costliest stage is cheapest, of those the ones with the least sum of squares (exact)."""
    costs, count = table.costs(), len(table.ranks)
    share = table.memory * count**-1 * len(set(table.ranks.tolist()))  # of a rank with several stages: equal parts
    allowed = [np.where(table.bytes_of(live) <= share, costs, np.inf) for live in np.unique(table.live)]
    of_live = dict(zip(np.unique(table.live).tolist(), allowed, strict=True))
    per_stage = [of_live[live] for live in table.live.tolist()]
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
        sums = best[:, None] + np.where(stage <= limit, stage * stage, np.inf)
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


def _improve(table: _Table, ends: Array) -> Array:
    """The best of all ways where they are few; else move cuts for as long as the busiest rank, then the squares, gets less."""
    every = _every(table)
    if every is not None:
        return every[_best(_score(table, every))]  # type: ignore[no-any-return]
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
    return np.array(made)


def _best(scores: Array) -> int:
    return int(np.lexsort((scores[:, 1], scores[:, 0]))[0])


def _score(table: _Table, ends: Array) -> Array:
    """Per row: the busiest rank with a quarter of the pace of the chunks, then the stages' squares; shares of the whole work.

    Ranks run chunk c of neighbouring microbatches side by side, so the costliest stage of each chunk sets the pace.
    """
    stages = table.stages(ends)
    loads = table.per_rank(stages)
    chunks = len(table.ranks) // loads.shape[-1]
    pace = stages.reshape(*stages.shape[:-1], chunks, -1).max(-1).sum(-1)
    busiest = np.where(table.fits(ends), loads.max(-1) + PACE * pace, np.inf) / table.whole
    return np.round(np.stack([busiest, (stages * stages).sum(-1) / table.whole**2], -1), 12)


__all__ = ["Cuts", "Line", "place"]
