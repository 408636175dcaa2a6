"""What a compiled model costs, in numbers: memory of a rank, bytes on every link, work, bubble.

In: a `Program` (its graphs are not needed). Out: `Summary`, whose text is what `autoptd show` prints.

    print(summarize(program))
    summarize(program).ranks[0].activation_bytes

Memory is that of plain AdamW: gradients and both moments in the parameter's dtype (a float32 gradient beside
it where that was asked for), and saved activations of the microbatches in flight at the fullest moment of the
simulated schedule; the allocator's, the libraries' and the communicators' come on top. Seconds are the cost
model's (`ir/machine.py`), not measured."""

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


@dataclass(frozen=True)
class RankCosts:
    """What every rank of a pipeline rank holds, in bytes.

    `seconds` are those that it computes in a step, of `flops`.
    """

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
    """What a rank sends along a mesh axis in a step, where a pipeline rank sends most: `sent_bytes` over a
    ring, in `calls`.

    `seconds` is what the slowest link of the group takes for them, if nothing runs beside.
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

    `step_seconds`: the simulated pipeline. `bubble`: idle over ideal time (SC'21, 2.2). `weighed`: the plan
    over tp beside the known ones (`program/weighed.py`), where it was chosen freely. `remarks`: what one
    should know before training.
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
        """How long the busiest rank waits in a step."""
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
        # Its full name: a machine of NVIDIA's may be asked for by its GPU.
        file = machine_file(named)
        return file.stem if file else named
    return "a machine of its own" if named else "the default machine"


def _remarks(program: Program) -> Iterator[str]:
    """Yield warnings: of buffers that `precision` rounds, and of parameters that are stored in 16 bits, as torch's
    optimizers step the parameter itself.
    """
    if program.cast_buffers:
        names = ", ".join(dict.fromkeys(map(any_layer, program.cast_buffers)))
        yield (
            f"cast to 16 bits although no checkpoint has them, as the model does not run without: {names}. Rounded tables of "
            "angles or positions are wrong where sequences are long: cast what is computed from them, in forward."
        )
    dtypes = {spec.storage.dtype for spec in program.params if spec.requires_grad}
    narrow = {dtype for dtype in dtypes if _itemsize(dtype) == 2}
    for dtype in sorted(narrow):
        # A change of less than half a unit in the last place is rounded away.
        lost = round(4 / torch.finfo(getattr(torch, dtype)).eps)
        yield (
            f"{dtype} parameters are stepped as they are, with moments in {dtype}: an update of less than "
            f"1/{lost} of a weight is lost. --precision bf16 (in Python precision=) steps float32 copies instead."
        )


def _rank(program: Program, pipeline_rank: int, activations: int, seconds: float) -> RankCosts:
    costs = program.costs
    held = [spec for spec in program.params if pipeline_rank in spec.owners(program.ranks)]
    stages = tuple(stage for stage, rank in enumerate(program.ranks) if rank == pipeline_rank)
    local_numel = [math.prod(spec.local_shape(program.mesh)) for spec in held]
    # The ranks beside the first one hold as much, but for the padding of what replicas share.
    state = program.memory(program.mesh.at_stage(0, pipeline_rank))
    flops = sum(costs.flops_per_stage[stage] + costs.backward_flops_per_stage[stage] for stage in stages)
    return RankCosts(
        pipeline_rank,
        stages,
        parameters=sum(local_numel),
        parameter_bytes=state.parameters,
        gradient_bytes=state.gradients,
        # AdamW's two moments, in the dtype of the storage, and the storage where it stands apart.
        optimizer_bytes=state.moments + state.masters,
        activation_bytes=activations,
        flops=flops * program.num_microbatches,
        seconds=seconds,
    )


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def _traffic(program: Program, machine: Any) -> Iterator[Traffic]:
    """Yield the traffic per mesh axis, of the pipeline rank that sends most.

    Sums over several axes count for the slowest.
    """
    mesh = program.mesh
    # Axis -> (bytes sent, calls, -pipeline rank): of equal ones, `max` takes the first rank.
    by_axis: dict[str, list[tuple[float, int, int]]] = {}
    for place in range(mesh.pipeline_ranks):
        # Axis -> [bytes sent, calls].
        sums: dict[str, list[float]] = {}
        # Of the first replica's first tensor rank: those beside it in the pipeline rank send as much.
        for call, times in expected_calls(program, mesh.at_stage(0, place)).items():
            # It may join several, the slowest first: "dp x tp".
            entry = sums.setdefault(base(call.axis.split(" x ")[0]), [0.0, 0.0])
            entry[0] += times * call.wire_bytes
            entry[1] += times
        for axis, (sent, calls) in sums.items():
            by_axis.setdefault(axis, []).append((sent, int(calls), -place))
    for axis in (row.name for row in BY_DEGREE.values()):
        if axis in by_axis:
            sent, calls, place = max(by_axis[axis])
            apart = _is_between_nodes(mesh, axis, machine.ranks_per_node)
            # By bandwidth alone, without latency: the number of calls stands beside it.
            seconds = sent / (machine.network_bandwidth if apart else machine.link_bandwidth)
            yield Traffic(axis, calls, round(sent), -place, apart, seconds)


def _is_between_nodes(mesh: Mesh, axis: str, per_node: int) -> bool:
    """Tell whether any two ranks that talk along an axis are on different nodes: neighbours over pp, else
    whole groups.
    """
    groups = mesh.groups((axis,))
    # Ranks are numbered node by node: a group is on one node if its first and last rank are.
    pairs = [(group[0], group[-1]) for group in groups]
    if axis in mesh.stage_axes:
        # Messages go to neighbours only: a pipeline over nodes may have most of its links within them.
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
    rows = [_traffic_row(traffic) for traffic in summary.traffic]
    if rows:
        yield from _table(("over", "calls", "bytes", "links", "time alone", "pipeline rank"), rows)
    else:
        yield "  nothing"
    yield ""
    # The largest of all pipeline ranks: the others wait for it.
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
    """Say in which precision training is, and what a rank holds of a parameter: that of the first rank."""
    rank = summary.ranks[0]
    sizes = (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes)
    weight, gradient, moments = (nbytes / max(1, rank.parameters) for nbytes in sizes)
    total = f"{weight + gradient + moments:.3g} bytes a parameter"
    held = "float32 copy and moments" if summary.has_masters else "moments"
    parts = f"weight {weight:.3g}, gradient {gradient:.3g}, {held} {moments:.3g}"
    return f"AdamW in {', '.join(summary.dtypes)}, {total} ({parts})"


def _traffic_row(traffic: Traffic) -> tuple[str, ...]:
    return (
        f"{traffic.axis} ({AXES[traffic.axis].word})",
        str(traffic.calls),
        bytes_text(traffic.sent_bytes),
        "between nodes" if traffic.is_between_nodes else "within a node",
        seconds_text(traffic.seconds),
        str(traffic.pipeline_rank),
    )


def weighed_heading(mesh: Mesh) -> str:
    """Return the heading of the plan beside the known ones."""
    return f"Plan over {mesh.value_text}, of a rank and a microbatch, beside the known ones"


def weighed_table(weighed: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return names of columns, and a row for every plan."""
    names = (
        "sequence_parallel",
        "sent",
        "collectives",
        "predicted",
        "parameters",
        "of a t-th",
        "kept for backward",
    )
    rows: list[tuple[str, ...]] = []
    for key in ("auto", *KNOWN):
        # A known plan that the model does not allow has no row: see `missing` below.
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
    # A plan that could not be weighed has its reason in the first column.
    empty = [""] * (len(names) - 1)
    for key, why in weighed.get("missing", {}).items():
        rows.append((f"{KNOWN[key]}: {why}", *empty))
    return names, rows


def _runs(ranks: tuple[RankCosts, ...]) -> list[tuple[RankCosts, RankCosts]]:
    """Return neighbours that hold the same amounts, as (first, last)."""
    # The inner pipeline ranks of most models hold the same: "1-6" instead of six rows.
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
    # Interleaved, a rank has v of them.
    few = [*map(str, stages[:3]), "..."] if len(stages) > 4 else map(str, stages)
    return ", ".join(few)


def _table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield from (f"  {line}" for line in aligned([names, *rows]))


# The tensors that AdamW keeps of a parameter's shape.
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class CheckpointCosts:
    """`bandwidth` is in bytes a second, `mtbf` in hours; None where nobody said."""

    weight_bytes: int
    moment_bytes: int
    bandwidth: float | None = None
    mtbf: float | None = None

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.moment_bytes

    @property
    def seconds(self) -> float | None:
        """How long the storage takes to write it."""
        return self.total_bytes / self.bandwidth if self.bandwidth else None

    @property
    def interval_seconds(self) -> float | None:
        """Young's interval, where training stops for all of the write."""
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
    """Return what a checkpoint of a program is."""
    keys = {
        spec.name: dict.fromkeys(MOMENTS, itemsize(spec.storage.dtype))
        for spec in program.params
        if spec.requires_grad
    }
    return CheckpointCosts(*checkpoint_bytes(program, keys), bandwidth, mtbf)
