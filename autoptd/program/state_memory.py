"""Compute the ledger: the bytes that a rank holds for the model's parameters, by purpose.

In: parameters, a schedule and a rank. Out: bytes, padding included, as the runtime allocates them;
`pm.memory()` counts the same kinds on existing tensors. Activations are not included: `summarize(program)`
has their peak.

    state_memory(program.params, program.orders, program.mesh, rank=0).total
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from autoptd.ir.actions import Orders, ranks_of_stages
from autoptd.ir.mesh import Mesh
from autoptd.ir.placement import itemsize
from autoptd.program.buckets import BucketPlan, plan_buckets
from autoptd.program.specs import ParamSpec


@dataclass(frozen=True)
class StateMemory:
    """Bytes of a rank.

    parameters: tensors that stages compute with.
    gradients: buffers that accumulate the gradients of a step, and rounded copies for the user.
    masters: tensors that the optimizer steps, if stages compute with others.
    moments: optimizer state of the parameters' shapes; predictions assume AdamW's two.
    """

    parameters: int
    gradients: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        return sum(getattr(self, kind.name) for kind in fields(self))


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
        parameters=sum(plan.gathered_bytes(mesh) for plan in shared)
        + sum(spec.local_bytes(mesh) for spec in own),
        gradients=sum(plan.nbytes(mesh) for plan in plans)
        + sum(spec.local_bytes(mesh) for spec in trained if spec.has_main_grad),
        masters=sum(_range_bytes(plan, mesh) for plan in shared if plan.params[0].has_master)
        + _stored_bytes(masters, mesh),
        moments=2 * sum(_piece_bytes(plan, mesh, rank) for plan in shared) + 2 * _stored_bytes(trained, mesh),
    )


def _stored_bytes(specs: Sequence[ParamSpec], mesh: Mesh) -> int:
    return sum(math.prod(spec.local_shape(mesh)) * itemsize(spec.storage.dtype) for spec in specs)


def _range_bytes(plan: BucketPlan, mesh: Mesh) -> int:
    """Return the bytes of the range that a rank stores of a bucket, padding included."""
    return plan.numel(mesh) // plan.parts(mesh) * itemsize(plan.params[0].storage.dtype)


def _piece_bytes(plan: BucketPlan, mesh: Mesh, rank: int) -> int:
    """Return the bytes of the parameters in that range, without padding, which the optimizer does not step."""
    width = plan.numel(mesh) // plan.parts(mesh)
    start = mesh.group(rank, plan.sharing_axes).index(rank) * width
    elements = 0
    for place in plan.places(mesh):
        elements += max(0, min(place.end, start + width) - max(place.start, start))
    return elements * itemsize(plan.params[0].storage.dtype)


__all__ = ["StateMemory", "state_memory"]
