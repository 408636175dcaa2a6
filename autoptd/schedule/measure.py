"""What a schedule costs, read from the spans of its computations: makespan, bubble, waits, live microbatches,
bytes over time.

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
    """Bytes of activations per pipeline rank: the curve over time, and its highest point."""

    curves: tuple[Curve, ...]

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        return tuple(map(_peak, self.curves))


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs, in the unit of the durations given.

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
        """When the last rank is done."""
        return max(row[-1] for row in self.ends)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(map(_busy, self.starts, self.ends))

    @cached_property
    def bubble(self) -> float:
        """The idle share over ideal time of SC'21, section 2.2, where ideal is the busiest rank's own
        work.
        """
        ideal = max(self.busy)
        return (self.makespan - ideal) / ideal

    @cached_property
    def idle(self) -> tuple[tuple[Gap, ...], ...]:
        """Per rank, from when to when it waits: before its first computation, between two, and after its
        last.
        """
        rows = zip(self.starts, self.ends, strict=True)
        return tuple(_gaps(starts, ends, self.makespan) for starts, ends in rows)

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """Per rank, the largest number of (stage, microbatch) whose F has begun and whose B (W, if any) has
        not ended.
        """
        return tuple(int(peak) for peak in self.memory(1).peaks)

    def memory(
        self, activation_bytes: float | Sequence[float], until_w: float | Sequence[float] | None = None
    ) -> Memory:
        """Return the bytes that forwards keep for their backwards: `activation_bytes` of a microbatch, one or
        per stage.

        They are there from the start of F to the end of B; where W actions split the backward, `until_w` of
        them (all, if left out) to the end of W.
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

    Spans of a rank do not overlap: what is freed at an end is gone before the next start.
    """
    has_weights = any(action.kind is Kind.W for action, _, _ in row)
    nbytes: float = 0
    points: list[tuple[float, float]] = []
    for action, start, end in row:
        stage = action.stage
        if action.kind is Kind.F:
            when, change = start, whole[stage]
        elif action.kind is Kind.B:
            # A weight gradient that runs later still needs `late`.
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
        raise ValueError(f"{len(values)} numbers of bytes: one for each of {num_stages} stages is needed")
    return values  # type: ignore[return-value]
