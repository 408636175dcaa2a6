"""Everything that is checked on one mesh, by one rank; and what all ranks found, on each of them.

In: a `World`, whose groups and channels are those of `communicators_of_orders`. Out: a `MeshReport`, the same on all
ranks.

    orders = all_orders(mesh.pipeline_ranks)
    world = DistributedWorld(mesh, communicators_of_orders(mesh.pipeline_ranks, orders.values()), ...)
    report = examine(world, orders, hosts=[0, 0, 1, 1])
    report.wrong, report.slow
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from autoptd.ir.actions import Orders
from autoptd.ir.mesh import MESH_AXES, Mesh
from autoptd.program.calls import joint_axis
from autoptd.runtime.world.world import Group, World, in_rounds
from autoptd.wings.doctor.calls import Checks, Wrong, check_channels, check_group, over_stages
from autoptd.wings.doctor.slow import Slow, Timed, find_slow, is_slow, suspects_of
from autoptd.wings.doctor.timing import Pair, rounds_of, sizes_on, time_groups, time_links
from autoptd.wings.doctor.traffic import communicators_of_orders, play

# Elements of the tensors that calls are checked with.
COUNTS = (1, 1021, 1 << 20)
MAX_SUSPECTS = 6


@dataclass(frozen=True)
class MeshReport:
    """What all ranks found on one mesh: `checks` results were looked at.

    `times` are those of groups and channels.
    """

    mesh: Mesh
    schedules: tuple[str, ...]
    checks: int
    wrong: tuple[Wrong, ...]
    slow: tuple[Slow, ...]
    times: tuple[Timed, ...]


def examine(
    world: World,
    orders: Mapping[str, Orders],
    hosts: Sequence[int],
    *,
    counts: Sequence[int] = COUNTS,
    sizes: Sequence[int] | None = None,
) -> MeshReport:
    """Check, then time.

    `hosts` numbers the machine of every rank, `sizes` are the bytes that are timed (none: nothing is).
    """
    # Right results first: the times of calls that give wrong ones say nothing.
    checks = check_all(world, orders, counts)
    timed = sizes_on(world.device) if sizes is None else tuple(sizes)
    world.at = "doctor: times"
    times = _all_times(world, orders, hosts, timed) if timed else []
    slow = find_slow(times)
    if suspects := suspects_of(slow, times, MAX_SUSPECTS):
        # Timed beside others, a channel may share its card with them: it is slow if it is so alone, too.
        again = _time_alone(world, suspects, hosts, timed)
        slow = [link for link in slow if link.kind != "message" or is_slow(link, again)]
    world.at = "doctor: what was found"
    found = world.everyone().gather_objects((checks.count, checks.wrong), "doctor: what was found")
    wrong = list(chain.from_iterable(faults for _, faults in found))
    count = sum(count for count, _ in found)
    return MeshReport(world.mesh, tuple(orders), count, tuple(wrong), tuple(slow), tuple(times))


def check_all(world: World, orders: Mapping[str, Orders], counts: Sequence[int] = COUNTS) -> Checks:
    """Check every group, every channel, every schedule."""
    checks, stages = Checks(world), world.mesh.pipeline_ranks
    mesh = world.mesh
    along: dict[str, Group] = {}
    for axes in (*((axis,) for axis in MESH_AXES), mesh.value_axes, mesh.gradient_axes):
        name = joint_axis(mesh, axes)
        # Of several axes of which one alone has ranks, that one's was checked.
        if name and name not in along:
            along[name] = group = world.group(axes)
            world.at = f"doctor: group along {name}"
            check_group(checks, name, group, counts)
    communicators = communicators_of_orders(stages, orders.values())
    for owners in communicators.owners:
        world.at = "doctor: group of owners"
        # All stages are the group along pp, which was checked above.
        if world.pipeline_rank in owners and len(owners) < stages:
            check_group(checks, "owners", world.owners(owners), counts[:2])
    world.at = "doctor: channels"
    check_channels(checks, in_rounds(communicators.links), counts)
    for name, order in orders.items():
        play(checks, name, order)
    return checks


def _all_times(
    world: World, orders: Mapping[str, Orders], hosts: Sequence[int], sizes: Sequence[int]
) -> list[Timed]:
    """Time all groups and channels; of a group, its slowest rank counts."""
    communicators = communicators_of_orders(world.mesh.pipeline_ranks, orders.values())
    mine: list[tuple[tuple[str, str, tuple[int, ...], int], float]] = []
    for (axis, kind, nbytes), seconds in time_groups(world, sizes).items():
        mine.append(((kind, axis, world.group((axis,)).ranks, nbytes), seconds))
    for (target, nbytes), seconds in time_links(world, rounds_of(world, communicators.links), sizes).items():
        mine.append((("message", over_stages(world), (world.rank, target), nbytes), seconds))
    slowest: dict[tuple[str, str, tuple[int, ...], int], float] = {}
    for some in world.everyone().gather_objects(mine, "doctor: times"):
        for key, seconds in some:
            # A collective has taken as long as its slowest rank; of a channel there is one sender.
            slowest[key] = max(seconds, slowest.get(key, 0.0))
    times = []
    for (kind, axis, ranks, nbytes), seconds in slowest.items():
        count = len({hosts[rank] for rank in ranks})
        times.append(Timed(kind, axis, ranks, nbytes, seconds, count))
    return times


def _time_alone(
    world: World, pairs: Sequence[Pair], hosts: Sequence[int], sizes: Sequence[int]
) -> list[Timed]:
    """Time some channels one after the other, with all others quiet."""
    world.at = "doctor: times of single channels"
    links = time_links(world, [[pair] for pair in pairs], sizes)
    mine = [(world.rank, target, nbytes, seconds) for (target, nbytes), seconds in links.items()]
    times = []
    for source, target, nbytes, seconds in chain.from_iterable(
        world.everyone().gather_objects(mine, "doctor: times")
    ):
        count = len({hosts[source], hosts[target]})
        times.append(Timed("message", over_stages(world), (source, target), nbytes, seconds, count))
    return times


__all__ = ["MeshReport", "check_all", "examine"]
