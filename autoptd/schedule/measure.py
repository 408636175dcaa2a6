"""What a schedule costs, read from the spans of its computations: finish, bubble, waits, live microbatches, bytes over time.

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

# What, start, end.
Span = tuple[Action, float, float]
# Start, end.
Gap = tuple[float, float]
# (time, bytes from then on), times ascending.
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Memory:
    """Bytes of activations per pipeline rank: the curve over time, and its highest point."""

    curves: tuple[Curve, ...]

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        return tuple(max((nbytes for _, nbytes in curve), default=0) for curve in self.curves)


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs, in the unit of the durations given; `starts` and `ends` are those of each rank's computations."""

    orders: Sequence[Sequence[Action]] = field(repr=False)
    starts: Sequence[Sequence[float]] = field(repr=False)
    ends: Sequence[Sequence[float]] = field(repr=False)

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Per rank, its computations with start and end, in order."""
        computes = ([action for action in order if action.kind in COMPUTES] for order in self.orders)
        return tuple(
            tuple(zip(row, starts, ends, strict=True))
            for row, starts, ends in zip(computes, self.starts, self.ends, strict=True)
        )

    @cached_property
    def finish(self) -> float:
        """When the last rank is done."""
        return max(row[-1] for row in self.ends)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        rows = zip(self.starts, self.ends, strict=True)
        return tuple(sum(end - start for start, end in zip(*row, strict=True)) for row in rows)

    @cached_property
    def bubble(self) -> float:
        """The idle share over ideal time of SC'21, section 2.2, where ideal is the busiest rank's own work."""
        ideal = max(self.busy)
        return (self.finish - ideal) / ideal

    @cached_property
    def idle(self) -> tuple[tuple[Gap, ...], ...]:
        """Per rank, from when to when it waits: before its first computation, between two, and after its last."""
        rows = zip(self.starts, self.ends, strict=True)
        return tuple(_gaps(starts, ends, self.finish) for starts, ends in rows)

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """Per rank, the largest number of (stage, microbatch) whose F has begun and whose B (W, if any) has not ended."""
        return tuple(int(peak) for peak in self.memory(1).peaks)

    def memory(
        self, activation_bytes: float | Sequence[float], until_w: float | Sequence[float] | None = None
    ) -> Memory:
        """Bytes that forwards keep for their backwards: `activation_bytes` of a microbatch, one or per stage.

        They are there from the start of F to the end of B; where W actions split the backward, `until_w` of them (all, if
        left out) to the end of W.
        """
        whole = _per_stage(activation_bytes, self.spans)
        late = whole if until_w is None else _per_stage(until_w, self.spans)
        return Memory(tuple(_curve(row, whole, late) for row in self.spans))


def _gaps(starts: Sequence[float], ends: Sequence[float], finish: float) -> tuple[Gap, ...]:
    return tuple((end, start) for end, start in zip([0, *ends], [*starts, finish], strict=True) if start > end)


def _curve(row: Sequence[Span], whole: Sequence[float], late: Sequence[float]) -> Curve:
    """Spans of a rank do not overlap, so what is freed at an end is gone before the next start takes anything."""
    has_weights = any(action.kind is Kind.W for action, _, _ in row)
    nbytes: float = 0
    points: list[tuple[float, float]] = []
    for action, start, end in row:
        stage = action.stage
        if action.kind is Kind.F:
            when, change = start, whole[stage]
        elif action.kind is Kind.B:
            when, change = end, late[stage] - whole[stage] if has_weights else -whole[stage]
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
