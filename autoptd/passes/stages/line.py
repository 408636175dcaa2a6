"""The operators of a model in a line, and what every stage between two cuts of it would cost.

In: a `Line`: seconds and bytes of every operator, what crosses, the positions where it may be cut. Out: a `Table`, which prices
stages and whole rows of cuts with numpy.

What a rank keeps for backward has *levels*, from the fastest to the smallest. A rank takes the lowest level at which it fits,
mixed with the one below: at level 1.25 a quarter of what its layers keep is that of level 2, the rest that of level 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Value:
    """The result of operator `made`, read by operators `reads` (ascending): a stage takes `seconds` to send or receive it."""

    made: int
    reads: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Level:
    """Per operator: bytes kept for every microbatch in flight, and seconds to make in backward what is not kept."""

    saved: Sequence[float]
    again: Sequence[float]


@dataclass(frozen=True)
class Line:
    """Operators in model order.

    `work[i]`: seconds of operator i on one rank; `points`: operators behind which the line may be cut, ascending; `values`:
    what may cross. `kept[i]`: bytes that a rank holds for operator i once (parameters and their state); `levels`: what it may
    keep of every microbatch, each level fewer bytes and more seconds than the one before. `shared`: bytes that a rank holds
    once if it has any of some operators (a tied weight). `beside`: what every pipeline rank needs whatever its stages are.
    """

    work: Sequence[float]
    points: Sequence[int]
    values: Sequence[Value] = ()
    kept: Sequence[float] = ()
    levels: Sequence[Level] = ()
    shared: Sequence[tuple[float, tuple[int, ...]]] = ()
    beside: Sequence[float] = ()


class Table:
    """Costs of every stage between two boundaries; boundary 0 is the start of the line, the last one its end.

    A row of cuts is `ends`: stage k runs from boundary ends[k] to ends[k + 1]. Methods take one such row, or a batch of rows
    in its first dims.
    """

    def __init__(
        self, line: Line, ranks: Sequence[int], live: Sequence[Sequence[int]], memory: float
    ) -> None:
        self.ranks, self.memory = np.asarray(ranks), memory
        # Bytes that differ by rounding fit.
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
        for value in line.values:
            self._add_value(value)
        self.shared = [(nbytes, self._has(readers)) for nbytes, readers in line.shared]
        self.beside = np.asarray(line.beside or np.zeros(int(self.ranks.max()) + 1), dtype=float)

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

    def costs(self, need: tuple[float, float] | None = None) -> Array:
        """Return the seconds [i, j] of the stage from boundary i to boundary j; infinite where j <= i.

        Of a rank that has no other stage, with its microbatches in flight and the bytes that it needs beside: infinite too
        where it does not fit.
        """
        seconds = self.work[None, :] - self.work[:, None] + self.links
        again = self._again[:, None, :] - self._again[:, :, None]
        if need is None or np.isinf(self.memory):
            return self._forward(seconds + again[0])
        live, beside = need
        held = np.stack([beside + self.bytes_of(live, level) for level in range(len(again))])
        seconds = seconds + _at_level(again, _lowest_that_fits(held, self.memory))
        return self._forward(np.where(held[-1] <= self.limit, seconds, np.inf))

    def bytes_of(self, live: float, level: int = -1) -> Array:
        """Return the bytes [i, j] of the stage from i to j, with `live` microbatches in flight; at the last level."""
        saved = self._saved[level]
        held = self.kept[None, :] - self.kept[:, None] + live * (saved[None, :] - saved[:, None])
        return self._forward(held + sum(nbytes * has for nbytes, has in self.shared))

    def _forward(self, table: Array) -> Array:
        """Forbid stages that do not run forward."""
        table[np.tril_indices(self.size)] = np.inf
        return table

    def needs(self) -> list[tuple[float, float]]:
        """Return for every stage the most microbatches in flight, and the bytes that its rank needs beside."""
        peaks = self.live.max(0) if len(self.live) else np.zeros(len(self.ranks))
        return list(zip(peaks.tolist(), self.beside[self.ranks].tolist(), strict=True))

    def stages(self, ends: Array) -> Array:
        """Return the seconds of every stage, without recomputation."""
        return np.diff(self.work[ends], axis=-1) + self.crossing(ends)  # type: ignore[no-any-return]

    def crossing(self, ends: Array) -> Array:
        """Return the seconds in which every stage sends and receives."""
        return self.links[ends[..., :-1], ends[..., 1:]]  # type: ignore[no-any-return]

    def again(self, ends: Array) -> Array:
        """Return the seconds of recomputation in every stage."""
        return self._of_stages(self._again, ends)

    def saved(self, ends: Array) -> Array:
        """Return the bytes that every stage keeps of a microbatch."""
        return self._of_stages(self._saved, ends)

    def levels(self, ends: Array) -> Array:
        """Return the level of every pipeline rank; the last one where not even that fits."""
        if len(self._saved) == 1:
            return np.zeros((*ends.shape[:-1], int(self.ranks.max()) + 1))
        once = self._once(ends)
        held = [once + self._in_flight(np.diff(saved[ends], axis=-1)) for saved in self._saved]
        return _lowest_that_fits(np.stack(held), self.memory)

    def held(self, ends: Array) -> Array:
        """Return the bytes of every pipeline rank, at the fullest moment of each, with what it needs beside."""
        return self._once(ends) + self._in_flight(self.saved(ends))  # type: ignore[no-any-return]

    def excess(self, ends: Array) -> Array:
        """Return the bytes by which the fullest rank exceeds its memory."""
        if np.isinf(self.memory):
            return np.zeros(ends.shape[:-1])
        return np.maximum(self.held(ends).max(-1) - self.limit, 0.0)  # type: ignore[no-any-return]

    def per_rank(self, stages: Array) -> Array:
        """Sum what stages have over those of every rank."""
        sums = np.zeros((*stages.shape[:-1], int(self.ranks.max()) + 1))
        for k, rank in enumerate(self.ranks):
            sums[..., rank] += stages[..., k]
        return sums

    def _of_stages(self, levels: Array, ends: Array) -> Array:
        of_stages = np.stack([np.diff(sums[ends], axis=-1) for sums in levels])
        return _at_level(of_stages, self.levels(ends)[..., self.ranks])

    def _once(self, ends: Array) -> Array:
        """Return what every rank needs whatever is in flight."""
        once = self.per_rank(np.diff(self.kept[ends], axis=-1))
        once += self.beside
        for nbytes, has in self.shared:
            once += nbytes * (self.per_rank(has[ends[..., :-1], ends[..., 1:]].astype(float)) > 0)
        return once

    def _in_flight(self, saved: Array) -> Array:
        """Return what every rank keeps at its fullest moment, if stages save so much of a microbatch."""
        most = np.zeros((*saved.shape[:-1], int(self.ranks.max()) + 1))
        for moment in self.live:
            # A moment has microbatches in flight on the stages of one rank only.
            rank = self.ranks[int(np.argmax(moment))]
            most[..., rank] = np.maximum(most[..., rank], saved @ moment)
        return most


def _lowest_that_fits(held: Array, memory: float) -> Array:
    """Return the least level at which bytes fit, between two neighbours; the last one where none does.

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


__all__ = ["Array", "Level", "Line", "Table", "Value"]
