"""Group gradients into buckets that are reduced together, by integers alone.

In: the parameters of a program, its schedule, the mesh. Out: for each pipeline rank the buckets of its
parameters, in the order in which their gradients become complete. The compiler lists them in the plan, and
the runtime allocates them. `ParamSpec.sums` has the axes over which a gradient is summed (by the table in
`ir/placement.py`); parameters with equal sums share buckets.

With ZeRO the first sum of a bucket is a reduce-scatter: the bucket is a flat buffer (`BucketPlan.places`),
and every rank along `sharing_axes` has an equal range of it, regardless of parameter boundaries.

A sum over dp, or over dp and cp together, may start inside a backward as soon as a bucket is complete, since
these ranks make no other calls there. If the model mixes samples they do, and the sum starts after the last
action. So do sums over tp, over cp alone, and over owners: tensor ranks complete a bucket at different points
of a backward, so the order relative to its other calls over tp would differ between ranks.

With buckets, the bytes of a rank's parameters, gradients and optimizer state are known: `state_memory`.

    for bucket in plan_buckets(program.params, program.orders, program.ranks, program.mesh, pipeline_rank=0):
        print(bucket.site, [(step.axis, step.row.backward) for step in bucket.sums], bucket.owners)"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from autoptd.ir.actions import BACKWARD, Action, Orders, ranks_of_stages
from autoptd.ir.mesh import AXES, Mesh, Role, base, is_sub_axis, joined, parts_of, role_of
from autoptd.ir.placement import AxisConversion, Scope, itemsize, joined_sums
from autoptd.program.gathers import Unit
from autoptd.program.specs import Collective, ParamSpec
from autoptd.program.state_memory import StateMemory

# Bytes of a bucket: enough for the full bandwidth of a link, but at most a quarter of a rank's gradients, so
# that most of them are reduced while backward continues.
SMALLEST, LARGEST, BUCKETS = 8 * 2**20, 100 * 2**20, 4
# Parameters of a sharded bucket begin at multiples of this many elements, 256 bytes in float32.
ALIGNMENT = 64
# Roles of the axes whose sums may start inside a backward; program/calls.py proves that they may.
EARLY = (Role.BATCH,)
# Prefixes of the sites of these sums.
GRADIENTS, TIED, UPDATED, GATHERED = "gradients ", "tied gradients ", "updated ", "parameters "


@dataclass(frozen=True)
class BucketPlan:
    """Parameters whose gradients share a dtype and the `sums`, which run in order.

    The sum along stages is over the pipeline ranks `owners`. `number` is the index of the first parameter in
    the program.
    """

    number: int
    params: tuple[ParamSpec, ...]
    sums: tuple[AxisConversion, ...]
    owners: tuple[int, ...]
    # Axes over which its ranks make other calls during actions.
    busy: frozenset[str] = frozenset()

    @property
    def early(self) -> tuple[AxisConversion, ...]:
        """The first sum, if it may start inside a backward; the others wait until all actions are done."""
        first = self.sums[:1]
        # Reduced at fixed places of the program, before and after other calls.
        if self.sum_scope != "step":
            return first
        return tuple(
            step for step in first if step.role in EARLY and self.busy.isdisjoint(map(base, step.axes))
        )

    @property
    def is_apart(self) -> bool:
        """Whether stages use its parameters in memory that exists only while they do."""
        return self.params[0].is_apart

    @property
    def unit(self) -> Unit:
        """The parameters that are gathered and freed together with it."""
        first = self.params[0]
        return Unit(first.stages, first.unit if first.scope == "use" else "", first.scope)

    @property
    def sum_scope(self) -> Scope:
        return self.params[0].sum_scope

    @property
    def late(self) -> tuple[AxisConversion, ...]:
        return tuple(step for step in self.sums[len(self.early) :] if step.role is not Role.STAGES)

    @property
    def tied(self) -> tuple[AxisConversion, ...]:
        """The sums over owners, the last ones."""
        return tuple(step for step in self.sums if step.role is Role.STAGES)

    @property
    def site(self) -> str:
        """The site of its sums over mesh axes, in errors and records."""
        first, last = self.params[0].name, self.params[-1].name
        return f"{GRADIENTS}{first}" if first == last else f"{GRADIENTS}{first} to {last}"

    @property
    def tied_site(self) -> str:
        """The site of its sum over owners, in errors and records."""
        return self.site.replace(GRADIENTS, TIED, 1)

    @property
    def gather_site(self) -> str:
        """The site of the gather of its parameters, after an update or for their uses, in errors and records."""
        return self.site.replace(GRADIENTS, GATHERED if self.is_apart else UPDATED, 1)

    @property
    def sharing_axes(self) -> tuple[str, ...]:
        """The axes and sub-axes whose ranks each have a range of the storage; () if every rank has all of it."""
        return self.params[0].sharing_axes

    def parts(self, mesh: Mesh) -> int:
        """Return the number of equal ranges in which ranks store it."""
        return math.prod(map(mesh.degree, self.sharing_axes))

    def places(self, mesh: Mesh) -> tuple[Place, ...]:
        """Return the position in the flat buffer of a rank's part of each parameter, in order."""
        alignment = ALIGNMENT if self.sharing_axes else 1
        places, end = [], 0
        for spec in self.params:
            start = _rounded_up(end, alignment)
            end = start + math.prod(spec.local_shape(mesh))
            places.append(Place(spec, start, end))
        return tuple(places)

    def numel(self, mesh: Mesh) -> int:
        """Return the elements of the flat buffer, including the padding that makes the ranges equal."""
        end = self.places(mesh)[-1].end
        return _rounded_up(end, self.parts(mesh) * ALIGNMENT) if self.sharing_axes else end

    def nbytes(self, mesh: Mesh) -> int:
        """Return the bytes of its gradients on one rank, before they are summed."""
        return self.numel(mesh) * itemsize(self.params[0].storage.sum_dtype)

    def summed_bytes(self, mesh: Mesh) -> list[int]:
        """Return the payload of every sum: after a reduce-scatter, only a rank's range is summed."""
        nbytes, payloads = self.nbytes(mesh), []
        for step in self.sums:
            if step.row.backward == "reduce-scatter":
                payloads.append(self.numel(mesh) * itemsize(self.scattered_dtype))
                nbytes //= mesh.degree(step.axis)
            else:
                payloads.append(nbytes)
        return payloads

    @property
    def scattered_dtype(self) -> str:
        """The dtype of the gradient reduce-scatter."""
        return self.params[0].wire_dtype or self.params[0].storage.sum_dtype

    def gathered_bytes(self, mesh: Mesh) -> int:
        """Return the bytes of the parameters gathered after an update, in the dtype of their use."""
        return self.numel(mesh) * itemsize(self.params[0].use.dtype) if self.sharing_axes else 0

    def used_bytes(self, mesh: Mesh) -> int:
        """Return the bytes of its parameters between steps, other than masters."""
        if not self.is_apart:
            return self.gathered_bytes(mesh)
        return 0 if self.params[0].has_master else self.range_bytes(mesh)

    def range_bytes(self, mesh: Mesh) -> int:
        """Return the bytes of the range that a rank stores of it, padding included."""
        return self.numel(mesh) // self.parts(mesh) * itemsize(self.params[0].storage.dtype)

    def piece_bytes(self, mesh: Mesh, rank: int) -> int:
        """Return the bytes of the parameters in that range, without padding, which the optimizer does not step."""
        width = self.numel(mesh) // self.parts(mesh)
        start = mesh.group(rank, self.sharing_axes).index(rank) * width
        elements = 0
        for place in self.places(mesh):
            elements += max(0, min(place.end, start + width) - max(place.start, start))
        return elements * itemsize(self.params[0].storage.dtype)


def units_of(plans: Iterable[BucketPlan]) -> list[Unit]:
    """Return the units of the buckets whose parameters are gathered for their uses, in the model's order."""
    ordered = sorted((plan for plan in plans if plan.is_apart), key=lambda plan: plan.number)
    return list(dict.fromkeys(plan.unit for plan in ordered))


class Place(NamedTuple):
    """The elements `start` to `end` of a bucket's flat buffer that hold one rank's part of a parameter."""

    spec: ParamSpec
    start: int
    end: int


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def plan_buckets(
    params: Sequence[ParamSpec],
    orders: Orders,
    ranks: Sequence[int],
    mesh: Mesh,
    pipeline_rank: int,
    busy: Collection[str] = (),
) -> list[BucketPlan]:
    """Return the buckets of `pipeline_rank`, in the order in which their gradients become complete.

    A bucket has at most `usual_bytes`, unless a single parameter has more. `ranks` is the pipeline rank of
    every stage. The parameters of a bucket share the gradient dtype, sums and owners, and follow the
    program's order, so that all owners of a tied parameter put it in the same bucket. `busy` are the axes
    over which actions communicate, as found by `busy_axes`; they only affect when sums start.
    """
    return plan_each(params, orders, ranks, mesh, [pipeline_rank], busy)[0]


def plan_each(
    params: Sequence[ParamSpec],
    orders: Orders,
    ranks: Sequence[int],
    mesh: Mesh,
    pipeline_ranks: Sequence[int],
    busy: Collection[str] = (),
) -> list[list[BucketPlan]]:
    """Return the buckets of several pipeline ranks; see `plan_buckets`."""
    most = usual_bytes(params, mesh)
    held: dict[int, list[tuple[int, ParamSpec, tuple[int, ...]]]] = {}
    for number, spec in enumerate(params):
        owners = spec.owners(ranks)
        for owner in owners if spec.requires_grad or spec.is_apart else ():
            held.setdefault(owner, []).append((number, spec, owners))
    return [_plan(held.get(one, []), orders[one], mesh, most, frozenset(busy)) for one in pipeline_ranks]


def _plan(
    held: Sequence[tuple[int, ParamSpec, tuple[int, ...]]],
    order: Sequence[Action],
    mesh: Mesh,
    most: int,
    busy: frozenset[str],
) -> list[BucketPlan]:
    """Return the buckets of a pipeline rank, given the numbers, parameters and owners that it holds."""
    last_backward = {stage: i for i, (kind, stage, _, _) in enumerate(order) if kind in BACKWARD}

    def completed(spec: ParamSpec) -> int:
        """Return the index of the last action that adds to the gradient."""
        return max(last_backward.get(stage, -1) for stage in spec.stages)

    # {(sums, owners, dtypes, completed): [(bytes, number of the first, parameters of one bucket), ...]}
    runs: dict[tuple[object, ...], list[tuple[int, int, list[ParamSpec]]]] = {}
    for number, spec, owners in held:
        # Types are over all mesh axes, also those of one rank.
        steps = spec.sums if spec.requires_grad else ()
        sums = joined_sums([step for step in steps if _group_size(step, owners, mesh) > 1], mesh)
        # Tied ones are not grouped by when they complete, which differs from owner to owner.
        dtypes = (spec.storage.sum_dtype, spec.storage.dtype, spec.use.dtype, spec.wire_dtype)
        # They are gathered, or their gradients reduced, at other times.
        apart = (
            () if spec.is_whole else (spec.sharing_axes, spec.stages, spec.scope, spec.sum_scope, spec.unit)
        )
        key = (sums, owners, dtypes, completed(spec) if len(owners) == 1 else -1, spec.requires_grad, apart)
        lists, nbytes = runs.setdefault(key, []), spec.grad_bytes(mesh)
        if lists and lists[-1][0] + nbytes <= most:
            before, first, run = lists[-1]
            run.append(spec)
            lists[-1] = before + nbytes, first, run
        else:
            lists.append((nbytes, number, [spec]))
    plans = [
        BucketPlan(first, tuple(run), key[0], key[1], busy)  # type: ignore[arg-type]
        for key, lists in runs.items()
        for _, first, run in lists
    ]
    # Backward goes from the last parameters of a stage to its first.
    return sorted(plans, key=lambda plan: (max(map(completed, plan.params)), -plan.number))


def state_memory(params: Sequence[ParamSpec], orders: Orders, mesh: Mesh, rank: int) -> StateMemory:
    """Return the bytes that `rank` holds for a program's parameters in training with AdamW."""
    place, ranks = mesh.pipeline_rank_of(rank), ranks_of_stages(orders)
    held = [spec for spec in params if place in spec.owners(ranks)]
    plans = plan_buckets(params, orders, ranks, mesh, place)
    shared = [plan for plan in plans if plan.parts(mesh) > 1]
    apart = {spec.name for plan in shared for spec in plan.params}
    own = [spec for spec in held if spec.name not in apart]
    trained = [spec for spec in own if spec.requires_grad]
    masters = [spec for spec in own if spec.has_master]
    return StateMemory(
        parameters=sum(plan.used_bytes(mesh) for plan in shared)
        + sum(spec.local_bytes(mesh) for spec in own),
        gradients=_gradient_bytes(plans, mesh, [stage for stage, at in enumerate(ranks) if at == place])
        + sum(spec.local_bytes(mesh) for spec in trained if spec.has_main_grad),
        masters=sum(plan.range_bytes(mesh) for plan in shared if plan.params[0].has_master)
        + _stored_bytes(masters, mesh),
        moments=2 * sum(plan.piece_bytes(mesh, rank) for plan in shared if plan.params[0].requires_grad)
        + 2 * _stored_bytes(trained, mesh),
    )


def _gradient_bytes(plans: Sequence[BucketPlan], mesh: Mesh, stages: Sequence[int]) -> int:
    """Return the bytes of whole gradients at once, and of the ranges that are left of others; of a rank with `stages`."""
    trained = [plan for plan in plans if plan.params[0].requires_grad]
    total = sum(plan.nbytes(mesh) for plan in trained if plan.sum_scope == "step")
    largest: dict[object, int] = {}
    for plan in trained:
        if plan.sum_scope != "step":
            total += plan.nbytes(mesh) // plan.parts(mesh)
            # With "run" those of a stage are complete together, else of one bucket.
            here = tuple(stage for stage in stages if stage in plan.params[0].stages)
            run: object = here if plan.sum_scope == "run" else plan
            largest[run] = largest.get(run, 0) + plan.nbytes(mesh)
    return total + max(largest.values(), default=0)


def _stored_bytes(specs: Sequence[ParamSpec], mesh: Mesh) -> int:
    return sum(math.prod(spec.local_shape(mesh)) * itemsize(spec.storage.dtype) for spec in specs)


def busy_axes(collectives: Iterable[Collective]) -> tuple[str, ...]:
    """Return the axes along which ranks have different samples, but still communicate during actions."""
    in_actions = {call.axis for call in collectives if call.scope == "microbatch" and call.axis in AXES}
    return tuple(sorted(axis for axis in in_actions if role_of(axis) in EARLY))


def usual_bytes(params: Sequence[ParamSpec], mesh: Mesh) -> int:
    """Return the bytes of a bucket, equal on all ranks, since owners of a tied parameter share its bucket."""
    held = sum(spec.grad_bytes(mesh) for spec in params if spec.requires_grad) // mesh.pipeline_ranks
    return min(max(held // BUCKETS, SMALLEST), LARGEST)


def _group_size(step: AxisConversion, owners: Sequence[int], mesh: Mesh) -> int:
    return len(owners) if step.role is Role.STAGES else mesh.degree(step.axis)


def stage_sums(buckets: Sequence[BucketPlan], stage: int, mesh: Mesh) -> list[str]:
    """Describe the sums of the gradients of stage `stage`, one line for all over the same ranks."""
    # Buckets with the same collectives share a line, as a stage may have dozens.
    alike: dict[tuple[tuple[AxisConversion, ...], tuple[int, ...]], list[BucketPlan]] = {}
    for plan in buckets:
        if plan.sums and any(stage in spec.stages for spec in plan.params):
            alike.setdefault((plan.sums, plan.owners), []).append(plan)
    return [_line(plans, mesh) for plans in alike.values()]


def _axis_text(axis: str, mesh: Mesh) -> str:
    if not is_sub_axis(axis):
        return axis
    whole = joined(base(part) for part in parts_of(axis))
    return f"{axis}, {mesh.degree(axis)} of the ranks of {whole}"


def _line(plans: Sequence[BucketPlan], mesh: Mesh) -> str:
    specs = [spec for plan in plans for spec in plan.params]
    # The first sum sends all of the bucket, in the wire dtype.
    size = sum(plan.summed_bytes(mesh)[0] for plan in plans)
    what = specs[0].name if len(specs) == 1 else f"{len(specs)} gradients"
    count = f"{len(plans)} bucket{'s'[: len(plans) > 1]} of {size:,} B ({what})"
    parts: list[str] = []
    # In execution order: over dp inside of backwards, then over tp, then over the owners.
    for kind, steps in groupby(plans[0].sums, key=lambda step: step.row.backward):
        over = [_over(step, plans[0], len(specs) == 1, mesh) for step in steps]
        # After the first kind of sum, a rank has a range of the buckets.
        text = ", then ".join(over)
        text = text if text.startswith("over") else f"over {text}"
        parts.append(f"{kind} {'its range' if parts else count} {text}")
    if plans[0].sharing_axes and not plans[0].is_apart:
        parts.append("what it updates of them is gathered")
    return "; ".join(parts)


def _over(step: AxisConversion, plan: BucketPlan, is_one: bool, mesh: Mesh) -> str:
    """Name the ranks of a sum: `dp`, `over pipeline ranks 0, 3, which share it`."""
    if step.role is Role.STAGES:
        return f"over pipeline ranks {', '.join(map(str, plan.owners))}, which share {'it' if is_one else 'them'}"
    return _axis_text(step.axis, mesh)
