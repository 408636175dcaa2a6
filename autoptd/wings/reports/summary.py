"""Report the costs of a compiled model: memory of a rank, bytes on every link, work, bubble; and of its checkpoints.

In: a `Program` (its graphs are not needed). Out: `Summary` and `CheckpointCosts`, whose texts `autoptd show` prints.

    print(summarize(program))
    print(checkpoint_costs(program, bandwidth=273e9, mtbf=3.1))
    summarize(program).ranks[0].activation_bytes

Memory is that of plain AdamW: gradients and both moments in the parameter's dtype (plus a float32 gradient if
requested), and saved activations of the microbatches in flight at the peak of the simulated schedule, without allocator,
libraries and communicators. A checkpoint has the parameters as stored and AdamW's two moments, as `pm.save` writes them,
without buffers, step counts and headers. Seconds are the cost model's (`ir/machine.py`), not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from typing import Any

import torch

from autoptd.ir.machine import find_machine, machine_file
from autoptd.ir.mesh import AXES, BY_DEGREE, Mesh, base
from autoptd.ir.names import any_layer
from autoptd.ir.placement import itemsize
from autoptd.program.calls import expected_calls
from autoptd.program.pieces import checkpoint_bytes
from autoptd.program.program import Program
from autoptd.program.weighed import KNOWN
from autoptd.wings.reports.pictures import simulated_run
from autoptd.wings.viz.runs import Curve
from autoptd.wings.words import aligned, bytes_text, count_text, plural, seconds_text

# AdamW's state tensors with a parameter's shape.
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class RankCosts:
    """The memory of every rank of a pipeline rank in bytes, and the `seconds` and `flops` of its step."""

    pipeline_rank: int
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
    """The `sent_bytes` of a rank along a mesh axis in a step over a ring, in `calls`, on the busiest pipeline rank.

    `seconds` is the time of the slowest link of the group for them alone.
    """

    axis: str
    calls: int
    sent_bytes: int
    pipeline_rank: int
    is_between_nodes: bool
    seconds: float


@dataclass(frozen=True)
class Summary:
    """The costs of a program: see the module's docstring.

    `step_seconds`: the simulated pipeline. `bubble`: idle over ideal time (SC'21, 2.2). `weighed`: the plan over tp
    compared with known ones (`program/weighed.py`), if it was chosen freely. `remarks`: warnings.
    """

    mesh: Mesh
    v: int
    schedule: str
    num_microbatches: int
    rows: int
    parameters: int
    dtypes: tuple[str, ...]
    has_masters: bool
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
        """The idle time of the busiest rank in a step."""
        return self.step_seconds - self.step_seconds / (1 + self.bubble)

    def record(self) -> dict[str, Any]:
        """Return all numbers as plain data."""
        ranks = [{**asdict(rank), "total_bytes": rank.total_bytes} for rank in self.ranks]
        return {**asdict(self), "ranks": ranks, "idle_seconds": self.idle_seconds}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def summarize(program: Program) -> Summary:
    """Return the costs of a program."""
    named = program.plan.get("options", {}).get("machine")
    machine = find_machine(named)
    run = simulated_run(program)
    # Bytes over time, one curve per pipeline rank.
    peaks = list(map(_peak, run.memory))
    return Summary(
        mesh=program.mesh,
        v=program.v,
        schedule=program.schedule_name,
        num_microbatches=program.num_microbatches,
        rows=program.rows,
        parameters=sum(math.prod(spec.shape) for spec in program.params),
        dtypes=tuple(sorted({spec.use.dtype for spec in program.params})),
        has_masters=any(spec.has_master for spec in program.params),
        machine=_machine_name(named),
        ranks=tuple(_rank(program, rank, int(peak), run.busy[rank]) for rank, peak in enumerate(peaks)),
        traffic=tuple(_traffic(program, machine)),
        model_flops=program.model_flops,
        step_seconds=run.length,
        bubble=run.bubble,
        weighed=program.plan.get("weighed"),
        remarks=tuple(_remarks(program)),
    )


def _peak(curve: Curve) -> float:
    return max((amount for _, amount in curve), default=0.0)


def _machine_name(named: Any) -> str:
    if isinstance(named, str):
        # A machine may be requested by its GPU.
        file = machine_file(named)
        return file.stem if file else named
    return "a custom machine" if named else "the default machine"


def _remarks(program: Program) -> Iterator[str]:
    """Yield warnings: about buffers that `precision` rounds, and parameters that are updated in 16 bits."""
    if program.cast_buffers:
        names = ", ".join(dict.fromkeys(map(any_layer, program.cast_buffers)))
        yield (
            f"cast to 16 bits although they are not in checkpoints, since the model does not run otherwise: {names}. Rounded "
            "tables of angles or positions are wrong for long sequences: cast the values computed from them, in forward."
        )
    dtypes = {spec.storage.dtype for spec in program.params if spec.requires_grad}
    narrow = {dtype for dtype in dtypes if _itemsize(dtype) == 2}
    for dtype in sorted(narrow):
        # An update of less than half a unit in the last place is rounded away.
        lost = round(4 / torch.finfo(getattr(torch, dtype)).eps)
        yield (
            f"{dtype} parameters are updated directly, with moments in {dtype}: an update of less than "
            f"1/{lost} of a weight is lost. --precision bf16 (in Python precision=) steps float32 copies instead."
        )


def _rank(program: Program, pipeline_rank: int, activations: int, seconds: float) -> RankCosts:
    costs = program.costs
    held = [spec for spec in program.params if pipeline_rank in spec.owners(program.ranks)]
    stages = tuple(stage for stage, rank in enumerate(program.ranks) if rank == pipeline_rank)
    local_numel = [math.prod(spec.local_shape(program.mesh)) for spec in held]
    # Other ranks of the pipeline rank hold the same, except for padding.
    state = program.memory(program.mesh.at_stage(0, pipeline_rank))
    flops = sum(costs.flops_per_stage[stage] + costs.backward_flops_per_stage[stage] for stage in stages)
    return RankCosts(
        pipeline_rank,
        stages,
        parameters=sum(local_numel),
        parameter_bytes=state.parameters,
        gradient_bytes=state.gradients,
        # AdamW's two moments in the dtype of the storage, and separate storage.
        optimizer_bytes=state.moments + state.masters,
        activation_bytes=activations,
        flops=flops * program.num_microbatches,
        seconds=seconds,
    )


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def _traffic(program: Program, machine: Any) -> Iterator[Traffic]:
    """Yield the traffic per mesh axis of the busiest pipeline rank; sums over several axes count for the slowest."""
    mesh = program.mesh
    # Axis -> (bytes sent, calls, -pipeline rank): of equal ones, `max` takes the first rank.
    by_axis: dict[str, list[tuple[float, int, int]]] = {}
    for place in range(mesh.pipeline_ranks):
        # Axis -> [bytes sent, calls].
        sums: dict[str, list[float]] = {}
        # The first rank of each pipeline rank: the others send as much.
        for call, times in expected_calls(program, mesh.at_stage(0, place)).items():
            # An axis may be joint, the slowest first: "dp x tp".
            entry = sums.setdefault(base(call.axis.split(" x ")[0]), [0.0, 0.0])
            entry[0] += times * call.wire_bytes
            entry[1] += times
        for axis, (sent, calls) in sums.items():
            by_axis.setdefault(axis, []).append((sent, int(calls), -place))
    for axis in (row.name for row in BY_DEGREE.values()):
        if axis in by_axis:
            sent, calls, place = max(by_axis[axis])
            apart = _is_between_nodes(mesh, axis, machine.ranks_per_node)
            # By bandwidth, without latency: the number of calls is in another column.
            seconds = sent / (machine.network_bandwidth if apart else machine.link_bandwidth)
            yield Traffic(axis, calls, round(sent), -place, apart, seconds)


def _is_between_nodes(mesh: Mesh, axis: str, per_node: int) -> bool:
    """Tell whether any ranks that communicate along an axis are on different nodes: neighbours over pp, else groups."""
    groups = mesh.groups((axis,))
    # Ranks are numbered node by node: a group is on one node if its first and last rank are.
    pairs = [(group[0], group[-1]) for group in groups]
    if axis in mesh.stage_axes:
        # Messages only go to neighbours.
        pairs = list(chain.from_iterable(map(pairwise, groups)))
    return any(a // per_node != b // per_node for a, b in pairs)


def _lines(summary: Summary) -> Iterator[str]:
    mesh, m, b = summary.mesh, summary.num_microbatches, summary.rows
    samples = m * b * mesh.replicas
    yield (
        f"{count_text(summary.parameters)} parameters ({', '.join(summary.dtypes)}) on "
        f"{plural(mesh.size, 'rank')}: {mesh} v={summary.v}, {summary.schedule}, "
        f"{plural(m, 'microbatch')} of size {b} per replica, {plural(samples, 'sample')} a step"
    )
    yield f"Recipe: {_recipe(summary)}. Machine: {summary.machine}"
    yield ""
    yield "Memory of a rank (AdamW; activations at the fullest moment)"
    yield from _table(
        ("pipeline rank", "stages", "parameters", "bytes", "gradients", "optimizer", "activations", "total"),
        [_memory_row(first, last) for first, last in _runs(summary.ranks)],
    )
    yield from summary.remarks
    yield ""
    yield "Sent by one rank in a step"
    rows = [traffic_row(traffic) for traffic in summary.traffic]
    if rows:
        yield from _table(("over", "calls", "bytes", "links", "time alone", "pipeline rank"), rows)
    else:
        yield "  nothing"
    yield ""
    busy, total = max(rank.seconds for rank in summary.ranks), summary.model_flops
    yield f"Work: {count_text(total, 'FLOPs')} of matrix products in a step (forward and backward of the whole batch)"
    yield (
        f"Pipeline, by the cost model for {summary.machine}: {seconds_text(summary.step_seconds)}; the busiest rank "
        f"computes (and communicates over {mesh.value_text}) for {seconds_text(busy)}"
    )
    share = summary.idle_seconds / summary.step_seconds if summary.step_seconds else 0.0
    yield f"Bubble: {seconds_text(summary.idle_seconds)} a step, {share:.1%} of it ({summary.bubble:.1%} of the work)"
    if summary.weighed:
        yield ""
        yield f"{weighed_heading(mesh)}: {summary.weighed['found']}"
        yield from _table(*weighed_table(summary.weighed))


def _recipe(summary: Summary) -> str:
    """Describe the precision, and the bytes of a parameter on the first rank."""
    rank = summary.ranks[0]
    sizes = (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes)
    weight, gradient, moments = (nbytes / max(1, rank.parameters) for nbytes in sizes)
    total = f"{weight + gradient + moments:.3g} bytes a parameter"
    held = "float32 copy and moments" if summary.has_masters else "moments"
    parts = f"weight {weight:.3g}, gradient {gradient:.3g}, {held} {moments:.3g}"
    return f"AdamW in {', '.join(summary.dtypes)}, {total} ({parts})"


def traffic_row(traffic: Traffic) -> tuple[str, ...]:
    """Return the row of an axis: name, calls, bytes, links, time, pipeline rank."""
    return (
        f"{traffic.axis} ({AXES[traffic.axis].word})",
        str(traffic.calls),
        bytes_text(traffic.sent_bytes),
        "between nodes" if traffic.is_between_nodes else "within a node",
        seconds_text(traffic.seconds),
        str(traffic.pipeline_rank),
    )


def weighed_heading(mesh: Mesh) -> str:
    """Return the heading of `weighed_table`."""
    return f"Plan over {mesh.value_text} compared with known ones, for a rank and a microbatch"


def weighed_table(weighed: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the column names of a table of plans, and its rows."""
    names = (
        "sequence_parallel",
        "sent",
        "collectives",
        "predicted",
        "parameters",
        "of 1/t",
        "kept for backward",
    )
    rows: list[tuple[str, ...]] = []
    for key in ("auto", *KNOWN):
        # A known plan that the model does not allow is in `missing`.
        if plan := weighed.get(key):
            rows.append(
                (
                    "auto: this one" if key == "auto" else KNOWN[key],
                    bytes_text(plan["sent_bytes"]),
                    str(plan["collectives"]),
                    seconds_text(plan["seconds"]),
                    count_text(plan["parameters"]),
                    f"x {plan['over_least']:.2f}",
                    bytes_text(plan["saved_bytes"]),
                )
            )
    empty = [""] * (len(names) - 1)
    for key, why in weighed.get("missing", {}).items():
        rows.append((f"{KNOWN[key]}: {why}", *empty))
    return names, rows


def _runs(ranks: tuple[RankCosts, ...]) -> list[tuple[RankCosts, RankCosts]]:
    """Return the first and last of neighbours with the same memory: most inner pipeline ranks, in one row "1-6"."""
    runs = [[ranks[0]]]
    for before, after in pairwise(ranks):
        same = (after.parameters, after.total_bytes) == (before.parameters, before.total_bytes)
        if same:
            runs[-1].append(after)
        else:
            runs.append([after])
    return [(run[0], run[-1]) for run in runs]


def _memory_row(first: RankCosts, last: RankCosts) -> tuple[str, ...]:
    where, stages = f"{first.pipeline_rank}", _stages_text(first.stages)
    if first is not last:
        where, stages = f"{where}-{last.pipeline_rank}", f"{stages} and on"
    sizes = (
        first.parameter_bytes,
        first.gradient_bytes,
        first.optimizer_bytes,
        first.activation_bytes,
        first.total_bytes,
    )
    return where, stages, count_text(first.parameters), *map(bytes_text, sizes)


def _stages_text(stages: Sequence[int]) -> str:
    few = [*map(str, stages[:3]), "..."] if len(stages) > 4 else map(str, stages)
    return ", ".join(few)


def _table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield from (f"  {line}" for line in aligned([names, *rows]))


@dataclass(frozen=True)
class CheckpointCosts:
    """The bytes of a checkpoint; `bandwidth` in bytes/s and `mtbf` in hours are None if unknown."""

    weight_bytes: int
    moment_bytes: int
    bandwidth: float | None = None
    mtbf: float | None = None

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.moment_bytes

    @property
    def seconds(self) -> float | None:
        """The time to write it."""
        return self.total_bytes / self.bandwidth if self.bandwidth else None

    @property
    def interval_seconds(self) -> float | None:
        """Young's interval, if training stops during the write."""
        if self.seconds is None or self.mtbf is None:
            return None
        # As in `runtime/checkpoint/pace.py`.
        return math.sqrt(2 * self.seconds * 3600 * self.mtbf)

    def record(self) -> dict[str, Any]:
        """Return all numbers as plain data."""
        return {
            **asdict(self),
            "total_bytes": self.total_bytes,
            "seconds": self.seconds,
            "interval_seconds": self.interval_seconds,
        }

    def __str__(self) -> str:
        sizes = (self.total_bytes, self.weight_bytes, self.moment_bytes)
        total, weights, moments = (count_text(size, "B") for size in sizes)
        text = f"Checkpoint: {total} (weights {weights}, AdamW's moments {moments})"
        if self.bandwidth and self.seconds is not None:
            text += f", {seconds_text(self.seconds)} at {count_text(self.bandwidth, 'B/s')}"
        if self.interval_seconds is not None:
            minutes = self.interval_seconds / 60
            text += (
                f"; if training waits for it and fails every {self.mtbf:g} h, save every {minutes:.3g} min"
            )
        return text


def checkpoint_costs(
    program: Program, bandwidth: float | None = None, mtbf: float | None = None
) -> CheckpointCosts:
    """Return the costs of a checkpoint of a program."""
    keys = {
        spec.name: dict.fromkeys(MOMENTS, itemsize(spec.storage.dtype))
        for spec in program.params
        if spec.requires_grad
    }
    return CheckpointCosts(*checkpoint_bytes(program, keys), bandwidth, mtbf)
