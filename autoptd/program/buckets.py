"""Which gradients are summed together: buckets, grouped by integers alone.

In: the parameters of a program, its schedule, the mesh. Out: for each pipeline rank the buckets of its parameters, in the order
in which their gradients become complete. The compiler lists them, the runtime makes them. Over which axes a gradient is summed
says the parameter (`ParamSpec.sums`, by the table in `ir/placement.py`); parameters with equal sums go together.

A sum over dp may start inside a backward, as soon as a bucket is complete: dp has no other calls there. Sums over tp and over
owners start after the last action: tensor ranks complete a bucket at different places of a backward, between whose own calls
over tp a sum would come in another order on each of them.

    for bucket in plan_buckets(program.params, program.orders, program.ranks, program.mesh, pp=0):
        print(bucket.site, [(step.axis, step.row.backward) for step in bucket.sums], bucket.owners)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoptd.ir.actions import Kind, Orders
from autoptd.ir.mesh import Mesh, Role
from autoptd.ir.placement import AxisConversion
from autoptd.program.specs import ParamSpec

BUCKET_BYTES = 100 * 2**20  # enough for the links between GPUs; a whole model of a CPU's size
# Of the axes whose sums may start inside a backward, proven by program/call_order.py.
EARLY = (Role.BATCH,)
GRADIENTS, TIED = "gradients ", "tied gradients "  # what the sites of these sums start with


@dataclass(frozen=True)
class BucketPlan:
    """Parameters whose gradients have one dtype and go through the same `sums`, one after the other, each of several ranks;
    along stages, of the pipeline ranks `owners`. `number` is the place of the first parameter in the program.
    """

    number: int
    params: tuple[ParamSpec, ...]
    sums: tuple[AxisConversion, ...]
    owners: tuple[int, ...]

    @property
    def early(self) -> tuple[AxisConversion, ...]:
        """The sums that may start inside a backward; the others wait until all actions are over."""
        return tuple(step for step in self.sums if step.role in EARLY)

    @property
    def late(self) -> tuple[AxisConversion, ...]:
        return tuple(step for step in self.sums if step.role not in (*EARLY, Role.STAGES))

    @property
    def tied(self) -> tuple[AxisConversion, ...]:
        """The sums over owners, the last ones."""
        return tuple(step for step in self.sums if step.role is Role.STAGES)

    @property
    def site(self) -> str:
        """What errors and records call its sums over mesh axes."""
        first, last = self.params[0].name, self.params[-1].name
        return f"{GRADIENTS}{first}" + (f" to {last}" if len(self.params) > 1 else "")

    @property
    def tied_site(self) -> str:
        """What errors and records call its sum over the owners."""
        return self.site.replace(GRADIENTS, TIED, 1)

    def nbytes(self, mesh: Mesh) -> int:
        return sum(spec.grad_bytes(mesh) for spec in self.params)


def plan_buckets(
    params: Sequence[ParamSpec],
    orders: Orders,
    ranks: Sequence[int],
    mesh: Mesh,
    pp: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[BucketPlan]:
    """Return the buckets of pipeline rank `pp` in the order in which their gradients become complete; `ranks` are the stages'.

    A bucket's parameters share the dtype of their gradients, sums and owner set and follow the program's order, so that all
    owners of a tied parameter make the same bucket of it.
    """
    position = {spec.name: i for i, spec in enumerate(params)}
    last_backward = {
        action.stage: i for i, action in enumerate(orders[pp]) if action.kind in (Kind.B, Kind.W)
    }

    def closes(spec: ParamSpec) -> int:
        return max(last_backward.get(stage, -1) for stage in spec.stages)

    runs: dict[tuple[object, ...], list[list[ParamSpec]]] = {}
    for spec in params:
        owners = spec.owners(ranks)
        if not spec.requires_grad or pp not in owners:
            continue
        # Tied ones are not grouped by `closes`, which differs from owner to owner.
        sums = tuple(step for step in spec.sums if _group_size(step, owners, mesh) > 1)
        key = (sums, owners, spec.storage.sum_dtype, closes(spec) if len(owners) == 1 else -1)
        lists = runs.setdefault(key, [[]])
        if lists[-1] and sum(one.grad_bytes(mesh) for one in [*lists[-1], spec]) > bucket_bytes:
            lists.append([])
        lists[-1].append(spec)
    plans = [
        BucketPlan(position[run[0].name], tuple(run), key[0], key[1])  # type: ignore[arg-type]
        for key, lists in runs.items()
        for run in lists
    ]
    # Backward goes from the last parameters of a stage to its first.
    return sorted(plans, key=lambda one: (max(map(closes, one.params)), -one.number))


def _group_size(step: AxisConversion, owners: Sequence[int], mesh: Mesh) -> int:
    return len(owners) if step.role is Role.STAGES else mesh.degree(step.axis)
