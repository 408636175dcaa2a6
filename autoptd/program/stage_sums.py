"""Describe how a stage's gradients are summed after the last microbatch, as lines of text.

In: the buckets of the stage's pipeline rank. Out: lines such as

    all-reduce 2 buckets of 3,145,728 B (12 gradients) over dp
    all-reduce 1 bucket of 4,096 B (4 gradients) over tp:(2)4, 4 of the ranks of tp
    reduce-scatter 1 bucket of 8,192 B (12 gradients) over dp; what it updates of them is gathered
    all-reduce 1 bucket of 131,072 B (transformer.wte.weight) over pipeline ranks 0, 3, which share it
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from autoptd.ir.mesh import Mesh, Role, base, is_sub_axis, joined, parts_of
from autoptd.ir.placement import AxisConversion
from autoptd.program.buckets import BucketPlan


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
    if plans[0].sharing_axes:
        parts.append("what it updates of them is gathered")
    return "; ".join(parts)


def _over(step: AxisConversion, plan: BucketPlan, is_one: bool, mesh: Mesh) -> str:
    """Name the ranks of a sum: `dp`, `over pipeline ranks 0, 3, which share it`."""
    if step.role is Role.STAGES:
        return f"over pipeline ranks {', '.join(map(str, plan.owners))}, which share {'it' if is_one else 'them'}"
    return _axis_text(step.axis, mesh)
