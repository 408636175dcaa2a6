"""Where a parameter is stored, where it is used, and what turns one into the other.

In: the layout in which the graph reads a parameter. Out: two `Placement`s, each a layout and a dtype: its
*storage*, which the optimizer steps, and its *use*, which stages compute with. Over every axis of the mesh
where the two types differ, a row of `CONVERSIONS` turns storage into use; the row's backward is what the
gradient goes through on its way from use to storage.

| axis | storage | use | gradient      | because                                                        |
|------|---------|-----|---------------|----------------------------------------------------------------|
| dp   | I       | R   | all-reduce    | every replica sees other samples (data parallelism)            |
| tp   | I       | I   | -             | every tensor rank computes all of it                           |
| tp   | I       | R   | all-reduce    | every tensor rank computes a partial sum                       |
| tp   | S       | S   | -             | a rank uses the shard that it stores                           |
| part of tp | I | R   | all-reduce    | the ranks of a sub-axis share a KV head, stored by each        |
| cp   | I       | R   | all-reduce    | every context rank sees other tokens; one sum with that of dp  |
| pp   | I       | R   | all-reduce    | tied: stages of several pipeline ranks, its *owners*, use it   |
| dp   | FLAT    | R   | reduce-scatter | ZeRO: the optimizer's state is divided over the replicas      |

All rows but the last communicate nothing in forward: stages compute with the storage itself. The last one is
an all-gather before the use (Rajbhandari et al. 2020, stage 1, "optimizer state partitioning"). Where `dp_shard`
ranks of dp hold one copy of the storage, it stands over the faster sub-axis of dp, and the row I -> R over the
slower one (hybrid sharding: "HSDP" in torch's words).

    storage, use = placements(Layout({"tp": R}), "float32", stages=(0, 3))
    [(step.axis, step.row.backward) for step in conversions(storage.layout, use.layout)]
    # [("dp", "all-reduce"), ("tp", "all-reduce"), ("pp", "all-reduce")]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autoptd.ir.layout import Layout
from autoptd.ir.mesh import AXES, Mesh, Role, role_of
from autoptd.ir.sub_axes import SubAxis, is_sub_axis, joined, parts_of
from autoptd.ir.types import CONVERSIONS, FLAT, Conversion, R, ValueType

# How often storage becomes use: once a step, or for every microbatch.
Scope = Literal["step", "microbatch"]
SUMS = frozenset({"all-reduce", "reduce-scatter"})
# Gradients are summed over replicas first, then over other tokens, then within a layer, then over the owners of a
# tied parameter.
ORDER_OF_SUMS = (Role.BATCH, Role.TOKENS, Role.VALUES, Role.STAGES)


@dataclass(frozen=True)
class Placement:
    """Where the parts of values lie, and their dtype; `grad_dtype` is that of their gradients, "" for the
    same.
    """

    layout: Layout
    dtype: str
    grad_dtype: str = ""

    @property
    def sum_dtype(self) -> str:
        """The dtype in which gradients add up, over microbatches and over ranks."""
        return self.grad_dtype or self.dtype


class AxisConversion(NamedTuple):
    """A row of `CONVERSIONS`, over one mesh axis or sub-axis; or over several, all of whose ranks sum at once."""

    axis: str
    row: Conversion

    @property
    def axes(self) -> tuple[str, ...]:
        return parts_of(self.axis)

    @property
    def role(self) -> Role:
        return role_of(self.axes[0])

    @property
    def is_sum(self) -> bool:
        """Whether its backward sums gradients."""
        return self.row.backward in SUMS


class Sharing(NamedTuple):
    """How the replicas share the storage of parameters: `over` is the axis or sub-axis that cuts it, "" for none.

    `axes` are all axes and sub-axes along which ranks have other samples, `over` among them.
    """

    axes: tuple[str, ...]
    over: str = ""


def sharing_of(mesh: Mesh, dp_shard: int = 1) -> Sharing:
    """Return how `dp_shard` neighbouring replicas share one copy of the storage; 1: every replica has its own."""
    axes = mesh.batch_axes
    if dp_shard == 1:
        return Sharing(axes)
    axis = axes[0]
    before = mesh.degree(axis) // dp_shard
    if before == 1:
        return Sharing(axes, axis)
    # Neighbours along dp hold the shards, so that the large sums run where links are fast.
    over = str(SubAxis(axis, before, dp_shard))
    return Sharing((*mesh.parts(axis, [over]), *axes[1:]), over)


# Every replica stores all of a parameter.
EVERY_REPLICA = Sharing(tuple(axis for axis in AXES if role_of(axis) is Role.BATCH))


def placements(
    layout: Layout, dtype: str, stages: Sequence[int], grad_dtype: str = "", sharing: Sharing = EVERY_REPLICA
) -> tuple[Placement, Placement]:
    """Return storage and use of a parameter that `stages` read in `layout`.

    Every owner of a tied parameter stores it. `grad_dtype` is that in which gradients add up, "" for the
    parameter's.
    """
    types = dict(layout.over_mesh)
    # R over an axis: its ranks have partial sums of the gradient.
    types |= dict.fromkeys(sharing.axes, R)
    if len(stages) > 1:
        types |= dict.fromkeys(_axes_of(Role.STAGES), R)
    use = Layout(types)
    # S is stored as it is used; R becomes I: what differs between the ranks is the gradient, which they sum.
    stored = dict(use.shards)
    if sharing.over:
        stored[sharing.over] = FLAT
    return Placement(Layout(stored), dtype, grad_dtype), Placement(use, dtype)


def conversions(storage: Layout, use: Layout) -> tuple[AxisConversion, ...]:
    """Return what turns storage into use, an entry per axis, in the order in which gradients go through
    it.
    """
    # Over an axis that neither names, both are I: there is nothing to convert.
    axes = {axis for layout in (storage, use) for axis, _ in layout.over_mesh}

    def place(axis: str) -> tuple[int, bool, str]:
        # Scattered before anything else is summed: the sums that follow are of a shard.
        return ORDER_OF_SUMS.index(role_of(axis)), not storage[axis].is_flat, axis

    ordered = sorted(axes, key=place)
    rows = [(axis, _row(storage[axis], use[axis])) for axis in ordered]
    return tuple(AxisConversion(axis, row) for axis, row in rows if row is not None)


# Roles of the axes over which one sum does: their ranks hold equal parameters, of other samples or tokens.
JOINED_SUMS = (Role.BATCH, Role.TOKENS)


def joined_sums(sums: Sequence[AxisConversion], mesh: Mesh) -> tuple[AxisConversion, ...]:
    """Return these sums with one all-reduce for all axes along which ranks have other samples or tokens."""
    found: list[AxisConversion] = []
    together: list[AxisConversion] = []
    for step in sums:
        is_joined = step.role in JOINED_SUMS and step.row.backward == "all-reduce"
        (together if is_joined and not is_sub_axis(step.axis) else found).append(step)
    if len(together) < 2:
        return tuple(sums)
    # Named as groups are: slowest first.
    axes = sorted((step.axis for step in together), key=mesh.axes.index, reverse=True)
    one = AxisConversion(joined(axes), together[0].row)
    # Behind what scatters, before the sums of other roles.
    before = [step for step in found if step.role in JOINED_SUMS]
    return (*before, one, *(step for step in found if step.role not in JOINED_SUMS))


def _row(storage: ValueType, use: ValueType) -> Conversion | None:
    return None if storage == use else CONVERSIONS[storage.kind, use.kind]


def _axes_of(role: Role) -> list[str]:
    return [axis for axis in AXES if role_of(axis) is role]


def itemsize(dtype: str) -> int:
    """Return the bytes of a number: 4 for "float32"."""
    # Options are read before torch is loaded, which takes seconds.
    import torch

    return int(getattr(torch, dtype).itemsize)
