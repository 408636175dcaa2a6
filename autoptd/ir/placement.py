"""The storage and the use of a parameter, and the conversions between them.

In: the layout in which the graph reads a parameter. Out: two `Placement`s, each a layout and a dtype: its
*storage*, which the optimizer steps, and its *use*, which stages compute with. Over every axis of the mesh
where the two types differ, a row of `CONVERSIONS` turns storage into use; the row's backward turns the
gradient of the use into that of the storage.

| axis | storage | use | gradient      | because                                                        |
|------|---------|-----|---------------|----------------------------------------------------------------|
| dp   | I       | R   | all-reduce    | every replica sees other samples (data parallelism)            |
| tp   | I       | I   | -             | every tensor rank computes all of it                           |
| tp   | I       | R   | all-reduce    | every tensor rank computes a partial sum                       |
| tp   | S       | S   | -             | a rank uses the shard that it stores                           |
| part of tp | I | R   | all-reduce    | the ranks of a sub-axis share a KV head, stored by each        |
| cp   | I       | R   | all-reduce    | every context rank sees other tokens; one sum with that of dp  |
| pp   | I       | R   | all-reduce    | tied: stages of several pipeline ranks, its *owners*, use it   |
| dp, cp | FLAT  | R   | reduce-scatter | ZeRO: the ranks that sum a gradient divide the optimizer's state   |

All rows but the last communicate nothing in forward: stages compute with the storage itself. The last one is
an all-gather before the use (Rajbhandari et al. 2020, stage 1, "optimizer state partitioning"). If `dp_shard`
ranks share one copy of the storage, they are neighbours: the row is over cp and the faster sub-axis of dp, or
over that of cp, and the row I -> R over the slower ones (hybrid sharding, torch's "HSDP").

    storage, use = placements(Layout({"tp": R}), "float32", stages=(0, 3))
    [(step.axis, step.row.backward) for step in conversions(storage.layout, use.layout)]
    # [("dp", "all-reduce"), ("tp", "all-reduce"), ("pp", "all-reduce")]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from autoptd.errors import PlanError
from autoptd.ir.layout import Layout
from autoptd.ir.mesh import AXES, Mesh, Role, SubAxis, base, joined, parts_of, role_of
from autoptd.ir.types import CONVERSIONS, FLAT, Conversion, R, ValueType

# How often storage becomes use: once per update of the parameters; or, with ZeRO's stage 3, once per step, per run of
# actions of one stage, or per forward and backward of a layer. Gradients are reduced as often, but once a step for
# "update".
Scope = Literal["update", "step", "run", "use"]
SUMS = frozenset({"all-reduce", "reduce-scatter"})
# Gradients are summed over replicas first, then over context ranks, then within a layer, then over the owners
# of a tied parameter.
ORDER_OF_SUMS = (Role.BATCH, Role.TOKENS, Role.VALUES, Role.STAGES)


@dataclass(frozen=True)
class Placement:
    """A layout and a dtype; `grad_dtype` is the dtype of gradients, "" for the same."""

    layout: Layout
    dtype: str
    grad_dtype: str = ""

    @property
    def sum_dtype(self) -> str:
        """The dtype in which gradients are accumulated over microbatches and ranks."""
        return self.grad_dtype or self.dtype


class AxisConversion(NamedTuple):
    """A row of `CONVERSIONS` over one mesh axis or sub-axis, or over several whose ranks all sum at once."""

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
    """How ranks share the storage of parameters: `over` are the axes and sub-axes that cut it.

    `axes` are all axes and sub-axes along which ranks have different samples or tokens, including `over`.
    """

    axes: tuple[str, ...]
    over: tuple[str, ...] = ()


def sharing_of(mesh: Mesh, count: int = 1) -> Sharing:
    """Return the sharing in which `count` neighbours that sum a gradient share one copy of the storage; 1:
    each has its own.
    """
    axes: list[str] = []
    over: list[str] = []
    # Neighbours hold the shards, so that the large sums use fast links.
    for axis in mesh.gradient_axes:
        degree = mesh.degree(axis)
        size = math.gcd(count, degree)
        part = axis if size == degree else str(SubAxis(axis, degree // size, size))
        axes += mesh.parts(axis, [part]) if size > 1 else [axis]
        over += [part] if size > 1 else []
        # 1 if it is a part of this axis; the rest continues along the next, slower one.
        count //= size
    return Sharing(tuple(axes), tuple(over))


def check_sharing(mesh: Mesh, count: int) -> None:
    """Raise PlanError unless `count` neighbours can share storage: a part of the fastest axis, or all of it
    and a part of the next.
    """
    whole = 1
    counts: list[int] = []
    for axis in mesh.gradient_axes:
        degree = mesh.degree(axis)
        counts += [whole * size for size in range(1, degree + 1) if degree % size == 0]
        whole *= degree
    if count not in counts:
        ranks = mesh.product_text(sorted(mesh.gradient_axes, reverse=True))
        several = f", such as {', '.join(map(str, sorted({*counts} - {1})))}"
        remedy = f"a divisor of {whole}{several if len(mesh.gradient_axes) > 1 else ''}"
        raise PlanError(f"dp_shard={count}", f"does not divide {ranks} into groups of neighbours", remedy)


# Every replica stores a full copy of its parameters.
EVERY_REPLICA = Sharing(tuple(axis for axis in AXES if role_of(axis) is Role.BATCH))


def placements(
    layout: Layout, dtype: str, stages: Sequence[int], grad_dtype: str = "", sharing: Sharing = EVERY_REPLICA
) -> tuple[Placement, Placement]:
    """Return storage and use of a parameter that `stages` read in `layout`.

    Every owner of a tied parameter stores it. `grad_dtype` is the dtype in which gradients are accumulated,
    "" for the parameter's.
    """
    types = dict(layout.over_mesh)
    # R over an axis: its ranks have partial sums of the gradient, of other tokens if stages split these.
    for part in sharing.axes:
        if role_of(part) is Role.BATCH:
            types[part] = R
        elif layout[base(part)] == R:
            types.pop(base(part), None)
            types[part] = R
    if len(stages) > 1:
        types |= dict.fromkeys(_axes_of(Role.STAGES), R)
    use = Layout(types)
    # S is stored in the layout of its use; R becomes I: only the gradient differs between the ranks, which sum it.
    stored = dict(use.shards)
    stored |= {part: FLAT for part in sharing.over if types.get(part) == R}
    return Placement(Layout(stored), dtype, grad_dtype), Placement(use, dtype)


def conversions(storage: Layout, use: Layout) -> tuple[AxisConversion, ...]:
    """Return the conversions from storage to use, one per axis, in the order in which gradients pass through
    them.
    """
    # Over an axis that neither names, both are I: nothing to convert.
    axes = {axis for layout in (storage, use) for axis, _ in layout.over_mesh}

    def place(axis: str) -> tuple[bool, int, str]:
        # Scattered before anything else is summed, so that the following sums are of a shard.
        return not storage[axis].is_flat, ORDER_OF_SUMS.index(role_of(axis)), axis

    ordered = sorted(axes, key=place)
    rows = [(axis, _row(storage[axis], use[axis])) for axis in ordered]
    return tuple(AxisConversion(axis, row) for axis, row in rows if row is not None)


# Roles of the axes that one sum can cover: their ranks hold equal parameters, and other samples or tokens.
JOINED_SUMS = (Role.BATCH, Role.TOKENS)


def joined_sums(sums: Sequence[AxisConversion], mesh: Mesh) -> tuple[AxisConversion, ...]:
    """Merge the sums over all axes of other samples or tokens that have the same conversion."""
    found: list[AxisConversion] = []
    for row, steps in groupby(sums, key=lambda step: step.row if step.role in JOINED_SUMS else None):
        alike = list(steps)
        if row is None or len(alike) < 2:
            found += alike
        else:
            # Named like groups: slowest first.
            found.append(AxisConversion(joined(slowest_first((step.axis for step in alike), mesh)), row))
    return tuple(found)


def slowest_first(axes: Iterable[str], mesh: Mesh) -> list[str]:
    """Return axes and sub-axes in the order in which texts name a group along several."""
    return sorted(axes, key=lambda axis: mesh.axes.index(base(axis)), reverse=True)


def _row(storage: ValueType, use: ValueType) -> Conversion | None:
    return None if storage == use else CONVERSIONS[storage.kind, use.kind]


def _axes_of(role: Role) -> list[str]:
    return [axis for axis in AXES if role_of(axis) is role]


def itemsize(dtype: str) -> int:
    """Return the bytes of a number: 4 for "float32"."""
    # Imported here: options are parsed before torch is loaded, which takes seconds.
    import torch

    return int(getattr(torch, dtype).itemsize)


class StateBytes(NamedTuple):
    """Bytes per element of a trained parameter."""

    parameter: float
    gradient: float
    master: float
    # AdamW's two moments.
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameter + self.gradient + self.master + self.optimizer


def bytes_per_element(
    use: int,
    storage: int,
    sums: int,
    *,
    has_master: bool = False,
    has_main_grad: bool = False,
    parts: int = 1,
    gradient_parts: int = 1,
    parameter_parts: int = 1,
) -> StateBytes:
    """Count the bytes that a rank holds per element of a parameter, by purpose, in AdamW's terms.

    | recipe                | parameter | gradient | master | moments | sum, k replicas |
    |-----------------------|-----------|----------|--------|---------|-----------------|
    | float32               | 4         | 4        | -      | 8       | 16              |
    | float32, zero=1       | 4         | 4        | -      | 8 / k   | 8 + 8 / k       |
    | precision="bf16"      | 2         | 4        | 4      | 8       | 18              |
    | precision="bf16", zero=1 | 2      | 4        | 4 / k  | 8 / k   | 6 + 12 / k      |
    | precision="bf16", zero=2 | 2      | 4 / k    | 4 / k  | 8 / k   | 2 + 16 / k      |
    | precision="bf16", zero=3 | 0      | 4 / k    | 4 / k  | 8 / k   | 16 / k          |

    `use`, `storage` and `sums` are the sizes of the dtypes in which stages compute, the optimizer steps and gradients
    accumulate. `has_main_grad`: there is a gradient in the dtype of the parameter, too. `parts`: the number of ranks that
    divide the optimizer's state, and `gradient_parts` and `parameter_parts` of those that divide gradients and parameters:
    stages use copies of the masters of divided parameters.
    """
    gradient = (sums + (use if has_main_grad else 0)) / gradient_parts
    parameter = 0 if has_master and parameter_parts > 1 else use / parameter_parts
    return StateBytes(parameter, gradient, storage / parts if has_master else 0, 2 * storage / parts)
