"""The cost of a simulated schedule: makespan, bubble, idle time, live microbatches, bytes over time.

result = simulate(one_f_one_b(p=2, m=2))
# result.idle[1] == ((0, 1), (7, 9)): rank 1 waits for its first forward, and for rank 0's last backward
# result.memory(activation_bytes=100).peaks == (200, 100)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real

from autoptd.ir.actions import COMPUTES, Action, Kind

# (action, start, end)
Span = tuple[Action, float, float]
# (start, end)
Gap = tuple[float, float]
# (time, bytes from then on), times ascending.
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Memory:
    """Activation bytes per pipeline rank: the curve over time, and its peak."""

    curves: tuple[Curve, ...]

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        return tuple(map(_peak, self.curves))


@dataclass(frozen=True)
class Simulation:
    """The cost of a schedule, in the unit of the given durations.

    `starts` and `ends` are those of each rank's computations.
    """

    orders: Sequence[Sequence[Action]] = field(repr=False)
    starts: Sequence[Sequence[float]] = field(repr=False)
    ends: Sequence[Sequence[float]] = field(repr=False)

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Per rank, its computations with start and end, in order."""
        spans = []
        for order, starts, ends in zip(self.orders, self.starts, self.ends, strict=True):
            computes = [action for action in order if action.kind in COMPUTES]
            spans.append(tuple(zip(computes, starts, ends, strict=True)))
        return tuple(spans)

    @cached_property
    def makespan(self) -> float:
        """The time at which the last rank finishes."""
        return max(row[-1] for row in self.ends)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The compute time of each rank."""
        return tuple(map(_busy, self.starts, self.ends))

    @cached_property
    def bubble(self) -> float:
        """The idle share over ideal time (SC'21, section 2.2); the ideal time is the busiest rank's compute
        time.
        """
        ideal = max(self.busy)
        return (self.makespan - ideal) / ideal

    @cached_property
    def idle(self) -> tuple[tuple[Gap, ...], ...]:
        """Per rank, the intervals in which it waits: before, between and after its computations."""
        rows = zip(self.starts, self.ends, strict=True)
        return tuple(_gaps(starts, ends, self.makespan) for starts, ends in rows)

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """Per rank, the peak number of (stage, microbatch) pairs whose F has begun and whose B (or W) has not
        ended.
        """
        return tuple(int(peak) for peak in self.memory(1).peaks)

    def memory(
        self, activation_bytes: float | Sequence[float], until_w: float | Sequence[float] | None = None
    ) -> Memory:
        """Return the bytes saved for backward: `activation_bytes` per microbatch, one number or one per
        stage.

        They are held from the start of F to the end of B; where W actions split the backward, `until_w` of
        them (default: all) are held to the end of W.
        """
        whole = _per_stage(activation_bytes, self.spans)
        late = whole if until_w is None else _per_stage(until_w, self.spans)
        return Memory(tuple(_curve(row, whole, late) for row in self.spans))


def _peak(curve: Curve) -> float:
    return max((nbytes for _, nbytes in curve), default=0)


def _busy(starts: Sequence[float], ends: Sequence[float]) -> float:
    return sum(end - start for start, end in zip(starts, ends, strict=True))


def _gaps(starts: Sequence[float], ends: Sequence[float], makespan: float) -> tuple[Gap, ...]:
    # A gap begins where a computation ended (or at 0), and ends where the next one starts.
    gaps = zip([0, *ends], [*starts, makespan], strict=True)
    return tuple((begin, end) for begin, end in gaps if end > begin)


def _curve(row: Sequence[Span], whole: Sequence[float], late: Sequence[float]) -> Curve:
    """Return bytes over time.

    Spans of a rank do not overlap: bytes freed at the end of one are gone before the next one starts.
    """
    has_weights = any(action.kind is Kind.W for action, _, _ in row)
    nbytes: float = 0
    points: list[tuple[float, float]] = []
    for action, start, end in row:
        stage = action.stage
        if action.kind is Kind.F:
            when, change = start, whole[stage]
        elif action.kind is Kind.B:
            # A delayed weight gradient still needs `late`.
            freed = whole[stage] - late[stage] if has_weights else whole[stage]
            when, change = end, -freed
        else:
            when, change = end, -late[stage]
        nbytes += change
        if change:
            points.append((when, nbytes))
    return tuple(points)


def _per_stage(value: float | Sequence[float], spans: Sequence[Sequence[Span]]) -> list[float]:
    num_stages = 1 + max(action.stage for row in spans for action, _, _ in row)
    values = [value] * num_stages if isinstance(value, Real) else list(value)  # type: ignore[list-item, arg-type]
    if len(values) != num_stages:
        raise ValueError(f"{len(values)} byte counts given, but there are {num_stages} stages")
    return values  # type: ignore[return-value]
