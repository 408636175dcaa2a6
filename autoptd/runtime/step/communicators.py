"""Derive the communicators of a program, and the groups of its stages.

In: a program. Out: `Communicators`, from which a world is created; groups by mesh axis or sub-axis.
"""

from __future__ import annotations

from autoptd.program.program import Program
from autoptd.runtime.params.parameters import owners
from autoptd.runtime.world.world import Communicators, Group, World


def communicators_of(program: Program) -> Communicators:
    """Return the communicators that `program` needs."""
    shared = {owners(program, spec) for spec in program.params}
    links = set()
    for crossing in program.crossings:
        source = program.rank_of_stage(crossing.source)
        for stage in crossing.targets:
            target = program.rank_of_stage(stage)
            # Ranks, not stages: with v > 1 several stages share a link, or a crossing stays on its rank.
            links |= {(source, target), (target, source)} if crossing.has_grad else {(source, target)}
    return Communicators(
        owners=tuple(sorted(ranks for ranks in shared if len(ranks) > 1)),
        links=tuple(sorted((source, target) for source, target in links if source != target)),
        sub_axes=program.sub_axes,
        joint=program.joint_axes,
    )


def groups_of(program: Program, world: World) -> dict[str, Group]:
    """Return the groups that a stage may communicate over, by mesh axis or sub-axis."""
    return {axis: world.group((axis,)) for axis in program.stage_axes}


__all__ = ["communicators_of", "groups_of"]
