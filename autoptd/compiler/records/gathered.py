"""Say in emitted files which parameters are gathered for their uses, and when.

In: the buckets of a stage. Out: lines for the end of its file, and for the calls of layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from autoptd.ir.mesh import Mesh, joined
from autoptd.ir.names import star
from autoptd.ir.placement import slowest_first
from autoptd.program.buckets import BucketPlan
from autoptd.program.gathers import Unit


def stage_gathers(plans: Iterable[BucketPlan], mesh: Mesh) -> list[str]:
    """Describe the gathers of the parameters of a stage, one line for all that are alike."""
    # {(what, bytes, axis, when): number of units}
    alike = Counter[tuple[str, int, str, str]]()
    for unit, own in _by_unit(plans).items():
        alike[_name(unit, own), *_size(own, mesh), WHEN[unit.scope, bool(unit.layer)]] += 1
    lines = []
    for (what, nbytes, axis, when), count in alike.items():
        layers, each = (f" ({count} layers)", " each") if count > 1 else ("", "")
        lines.append(f"{what}{layers}: all-gather of {nbytes:,} B{each} over {axis}, {when}")
    return lines


def _name(unit: Unit, plans: Sequence[BucketPlan]) -> str:
    if unit.layer:
        return star(unit.layer)
    names = [spec.name for plan in plans for spec in plan.params]
    others = names[0] if len(names) == 1 else f"{len(names)} parameters"
    return f"{others} of no layer" if unit.scope == "use" else others


# By scope, and whether it is a layer.
WHEN: dict[tuple[str, bool], str] = {
    ("use", True): "for every forward and backward",
    ("use", False): "whenever the rank turns to this stage",
    ("run", False): "whenever the rank turns to this stage",
    ("step", False): "once a step",
}


def gathered_layers(plans: Iterable[BucketPlan], mesh: Mesh) -> dict[str, str]:
    """Say of each layer how its parameters arrive, for the line that calls it."""
    found = {}
    for unit, own in _by_unit(plans).items():
        nbytes, axis = _size(own, mesh)
        if unit.layer:
            found[unit.layer] = (
                f"AG over {axis} fwd and bwd, {nbytes:,} B: its parameters, a layer ahead; freed after it"
            )
    return found


def _by_unit(plans: Iterable[BucketPlan]) -> dict[Unit, list[BucketPlan]]:
    found: dict[Unit, list[BucketPlan]] = {}
    for plan in sorted(plans, key=lambda plan: plan.number):
        if plan.is_apart:
            found.setdefault(plan.unit, []).append(plan)
    return found


def _size(plans: Sequence[BucketPlan], mesh: Mesh) -> tuple[int, str]:
    """Return the bytes of a unit, and the axes over which it is gathered."""
    axes = slowest_first(plans[0].sharing_axes, mesh)
    return sum(plan.gathered_bytes(mesh) for plan in plans), joined(axes)
