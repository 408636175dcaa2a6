"""What a compiled model costs, in numbers: memory of a rank, bytes on every link, work, bubble.

In: a `Program` (its graphs are not needed). Out: `Summary`, whose text is what `autoptd show` prints.

    print(summarize(program))
    summarize(program).ranks[0].activation_bytes

Memory is that of plain AdamW: gradients and both moments in the parameter's dtype (a float32 gradient beside it where
that was asked for), and what backward keeps of the microbatches in flight at the fullest moment of the simulated schedule; the
allocator's, the libraries' and the communicators' come on top. Seconds are the cost model's (`ir/machine.py`), not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from autoptd.ir.machine import find_machine
from autoptd.ir.mesh import Coordinate, Mesh
from autoptd.program.calls import expected_calls
from autoptd.program.program import Program
from autoptd.program.weighed import KNOWN
from autoptd.reports.pictures import simulated_run
from autoptd.viz.words import bytes_text, count_text

AXES = {"tp": "tensor", "pp": "pipeline", "dp": "data"}
WEIGHED = "Plan over tp, of a rank and a microbatch, beside the known ones"


@dataclass(frozen=True)
class RankCosts:
    """What every rank of pipeline rank `pp` holds, in bytes; `seconds` are those that it computes in a step, of `flops`."""

    pp: int
    stages: tuple[int, ...]
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    flops: int
    seconds: float

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


@dataclass(frozen=True)
class Traffic:
    """What a rank sends along a mesh axis in a step, where a pipeline rank sends most: `sent_bytes` over a ring, in `calls`.

    `seconds` is what the slowest link of the group takes for them, if nothing runs beside.
    """

    axis: str
    calls: int
    sent_bytes: int
    pp: int
    is_between_nodes: bool
    seconds: float


@dataclass(frozen=True)
class Summary:
    """See the module's docstring; `step_seconds` is the simulated pipeline, `bubble` idle over ideal time (SC'21, 2.2),
    `weighed` the plan over tp beside those that are known (`program/weighed.py`), where it was chosen freely; `remarks`
    what one should know before training.
    """

    mesh: Mesh
    v: int
    schedule: str
    num_microbatches: int
    rows: int
    parameters: int
    dtypes: tuple[str, ...]
    machine: str
    ranks: tuple[RankCosts, ...]
    traffic: tuple[Traffic, ...]
    model_flops: int
    step_seconds: float
    bubble: float
    weighed: dict[str, Any] | None = None
    remarks: tuple[str, ...] = ()

    @property
    def idle_seconds(self) -> float:
        """How long the busiest rank waits in a step."""
        return self.step_seconds - self.step_seconds / (1 + self.bubble)

    def record(self) -> dict[str, Any]:
        """All numbers as plain data."""
        ranks = [{**asdict(one), "total_bytes": one.total_bytes} for one in self.ranks]
        return {**asdict(self), "ranks": ranks, "idle_seconds": self.idle_seconds}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def summarize(program: Program) -> Summary:
    """Return the costs of a program."""
    machine = find_machine(program.plan.get("options", {}).get("machine"))
    run = simulated_run(program)
    peaks = [max((amount for _, amount in curve), default=0.0) for curve in run.memory]
    named = program.plan.get("options", {}).get("machine")
    return Summary(
        mesh=program.mesh,
        v=program.v,
        schedule=program.schedule_name,
        num_microbatches=program.num_microbatches,
        rows=program.rows,
        parameters=sum(math.prod(one.shape) for one in program.params),
        dtypes=tuple(sorted({one.dtype for one in program.params})),
        machine=named if isinstance(named, str) else "a machine of its own" if named else "the default machine",
        ranks=tuple(_rank(program, pp, int(peaks[pp]), run.busy[pp]) for pp in range(program.mesh.p)),
        traffic=tuple(_traffic(program, machine)),
        model_flops=3 * program.costs.total_flops * program.num_microbatches * program.mesh.d,
        step_seconds=run.length,
        bubble=run.bubble,
        weighed=program.plan.get("weighed"),
        remarks=tuple(_remarks(program)),
    )


def _remarks(program: Program) -> Iterator[str]:
    """What is trained in 16 bits has no float32 copy: torch's optimizers step the parameter itself."""
    narrow = {one.dtype for one in program.params if one.requires_grad and _itemsize(one.dtype) == 2}
    for dtype in sorted(narrow):
        # Of less than half a unit in the last place, nothing stays.
        lost = round(4 / torch.finfo(getattr(torch, dtype)).eps)
        yield (
            f"{dtype} parameters are stepped as they are, with moments in {dtype}: an update of less than 1/{lost} of a weight "
            "is lost. Train in float32, or keep float32 copies of the parameters, step those, and copy them back."
        )


def _rank(program: Program, pp: int, activations: int, seconds: float) -> RankCosts:
    costs = program.costs
    held = [one for one in program.params if pp in one.owners(program.ranks)]
    trained = [one for one in held if one.requires_grad]
    stages = tuple(stage for stage, rank in enumerate(program.ranks) if rank == pp)
    # A sum beside the gradient.
    extra = [one for one in trained if one.grad_dtype and _itemsize(one.dtype) < 8]
    flops = sum(costs.flops_per_stage[stage] + costs.backward_flops_per_stage[stage] for stage in stages)
    return RankCosts(
        pp,
        stages,
        parameters=sum(math.prod(one.local_shape(program.mesh)) for one in held),
        parameter_bytes=sum(one.local_bytes(program.mesh) for one in held),
        gradient_bytes=sum(one.local_bytes(program.mesh) for one in trained)
        + sum(one.local_bytes(program.mesh) // _itemsize(one.dtype) * _itemsize(one.grad_dtype) for one in extra),
        optimizer_bytes=2 * sum(one.local_bytes(program.mesh) for one in trained),
        activation_bytes=activations,
        flops=flops * program.num_microbatches,
        seconds=seconds,
    )


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def _traffic(program: Program, machine: Any) -> Iterator[Traffic]:
    """Per mesh axis, of the pipeline rank that sends most; sums over several axes count for the slower one, dp."""
    found: dict[str, list[tuple[float, int, int]]] = {}
    for pp in range(program.mesh.p):
        sums: dict[str, list[float]] = {}
        for call, times in expected_calls(program, program.mesh.rank(Coordinate(pp=pp))).items():
            axis = next((one for one in ("dp", "pp", "tp") if one in call.axis), "tp")
            entry = sums.setdefault(axis, [0.0, 0.0])
            entry[0] += times * call.wire_bytes
            entry[1] += times
        for axis, (sent, calls) in sums.items():
            found.setdefault(axis, []).append((sent, int(calls), -pp))
    for axis in AXES:
        if axis in found:
            sent, calls, pp = max(found[axis])
            apart = _is_between_nodes(program.mesh, axis, machine.ranks_per_node)
            seconds = sent / (machine.network_bandwidth if apart else machine.link_bandwidth)
            yield Traffic(axis, calls, round(sent), -pp, apart, seconds)


def _is_between_nodes(mesh: Mesh, axis: str, per_node: int) -> bool:
    """Whether any two ranks that talk along an axis are on different nodes: neighbours over pp, whole groups else."""
    groups = mesh.groups((axis,))
    if axis in mesh.stage_axes:
        return any(a // per_node != b // per_node for group in groups for a, b in pairwise(group))
    return any(group[0] // per_node != group[-1] // per_node for group in groups)


def _lines(one: Summary) -> Iterator[str]:
    mesh, m, b = one.mesh, one.num_microbatches, one.rows
    yield (
        f"{count_text(one.parameters)} parameters ({', '.join(one.dtypes)}) on {mesh.size} rank{'s'[: mesh.size > 1]}: "
        f"{mesh} v={one.v}, {one.schedule}, {m} microbatch{'es' if m > 1 else ''} of {b} row{'s'[: b > 1]} per replica, "
        f"{m * b * mesh.d} row{'s'[: m * b * mesh.d > 1]} a step"
    )
    yield ""
    yield "Memory of a rank (AdamW; activations at the fullest moment)"
    yield from _table(
        ("pipeline rank", "stages", "parameters", "bytes", "gradients", "optimizer", "activations", "total"),
        [_memory_row(first, last) for first, last in _runs(one.ranks)],
    )
    yield from one.remarks
    yield ""
    yield "Sent by one rank in a step"
    rows: list[tuple[str, ...]] = [
        (
            f"{one.axis} ({AXES[one.axis]})",
            str(one.calls),
            bytes_text(one.sent_bytes),
            "between nodes" if one.is_between_nodes else "within a node",
            seconds_text(one.seconds),
            str(one.pp),
        )
        for one in one.traffic
    ]
    if rows:
        yield from _table(("over", "calls", "bytes", "links", "alone takes", "pipeline rank"), rows)
    else:
        yield "  nothing"
    yield ""
    busy, total = max(rank.seconds for rank in one.ranks), one.model_flops
    yield f"Work: {count_text(total)}FLOPs of matrix products in a step (forward and backward of the whole batch)"
    yield (
        f"Pipeline, as the cost model has it for {one.machine}: {seconds_text(one.step_seconds)}, of which the busiest rank "
        f"computes (over tp, communicates) {seconds_text(busy)}"
    )
    share = one.idle_seconds / one.step_seconds if one.step_seconds else 0.0
    yield f"Bubble: {seconds_text(one.idle_seconds)} a step, {share:.1%} of it ({one.bubble:.1%} of the work)"
    if one.weighed:
        yield ""
        yield f"{WEIGHED}: {one.weighed['found']}"
        yield from _table(*weighed_table(one.weighed))


def weighed_table(weighed: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Names of columns, and a row for every plan over tp."""
    names = (
        "sequence_parallel",
        "sent over tp",
        "collectives",
        "predicted",
        "parameters",
        "of a t-th",
        "kept for backward",
    )
    rows: list[tuple[str, ...]] = [
        (
            "auto: this one" if key == "auto" else KNOWN[key],
            bytes_text(one["sent_bytes"]),
            str(one["collectives"]),
            seconds_text(one["seconds"]),
            count_text(one["parameters"]),
            f"x {one['over_least']:.2f}",
            bytes_text(one["saved_bytes"]),
        )
        for key in ("auto", *KNOWN)
        if (one := weighed.get(key))
    ]
    rows += [(f"{KNOWN[key]}: {why}", *[""] * (len(names) - 1)) for key, why in weighed.get("missing", {}).items()]
    return names, rows


def _runs(ranks: tuple[RankCosts, ...]) -> list[tuple[RankCosts, RankCosts]]:
    """Neighbours that hold the same amounts, as (first, last)."""
    runs = [[ranks[0]]]
    for before, after in pairwise(ranks):
        same = (after.parameters, after.total_bytes) == (before.parameters, before.total_bytes)
        if same:
            runs[-1].append(after)
        else:
            runs.append([after])
    return [(run[0], run[-1]) for run in runs]


def _memory_row(one: RankCosts, last: RankCosts) -> tuple[str, ...]:
    where = f"{one.pp}" if one is last else f"{one.pp}-{last.pp}"
    stages = ", ".join(map(str, one.stages if len(one.stages) < 5 else one.stages[:3])) + ", ..." * (
        len(one.stages) > 4
    )
    sizes = (one.parameter_bytes, one.gradient_bytes, one.optimizer_bytes, one.activation_bytes, one.total_bytes)
    return (where, stages if one is last else f"{stages} and on", count_text(one.parameters), *map(bytes_text, sizes))


def seconds_text(seconds: float) -> str:
    """`12.3 ms`: three significant digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    # The last unit takes everything.
    raise AssertionError


def _table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in (names, *rows):
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


__all__ = ["WEIGHED", "RankCosts", "Summary", "Traffic", "seconds_text", "summarize", "weighed_table"]
