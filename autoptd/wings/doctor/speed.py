"""Latency and bandwidth of every group along an axis of the mesh, and of every channel, as nccl-tests measures them.

In: a `World`. Out: a `Timed` per group or channel, kind of call and size, the same on all ranks. All groups along an axis
work at the same time, as in training; channels take turns, so that each rank uses one at a time.

    times = time_world(world, links, hosts=[0, 0, 1, 1], sizes=sizes_on(world.device))
    slow_ones(times)                        # those that take more than twice the median of their kind
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from autoptd.ir.mesh import MESH_AXES
from autoptd.ir.types import wire_bytes
from autoptd.runtime.world.world import Group, World, in_rounds
from autoptd.wings.doctor.checks import over_stages, peer, settle
from autoptd.wings.planner.measure import SIZES, repeated

# Bytes of the small and of the large buffer.
SMALL = SIZES[0]
LARGE = {"cpu": 1 << 23, "cuda": 1 << 28}
# Calls that are timed, of which the fastest counts: other work on a machine only adds.
SMALL_CALLS, LARGE_CALLS = 10, 4
# A group or channel is slow that takes so many times the median of the others.
SLOW_FACTOR = 2.0


@dataclass(frozen=True)
class Timed:
    """The seconds that a call of `nbytes` took: of a collective along `axis`, or of the "message" of a channel."""

    kind: str
    axis: str
    ranks: tuple[int, ...]
    nbytes: int
    seconds: float
    # The number of machines that the ranks are on.
    hosts: int

    @property
    def bandwidth(self) -> float:
        """Bytes/s that a rank sends over a ring (nccl-tests' busbw), or through a channel."""
        name = {"message": "send"}.get(self.kind, self.kind.replace("_", "-"))
        # For all_to_all, `nbytes` is one rank's part.
        payload = self.nbytes * (len(self.ranks) if self.kind == "all_to_all" else 1)
        return wire_bytes(name, payload, len(self.ranks)) / self.seconds


def sizes_on(device: torch.device) -> tuple[int, int]:
    """Return the bytes of the small and of the large buffer."""
    return SMALL, LARGE[device.type]


def time_world(
    world: World, links: Sequence[tuple[int, int]], hosts: Sequence[int], sizes: Sequence[int]
) -> list[Timed]:
    """Time all groups and channels; `hosts` numbers the machine of every rank."""
    mine: dict[tuple[str, str, tuple[int, ...], int], float] = {}
    for axis in MESH_AXES:
        group = world.group((axis,))
        for kind, nbytes in [(kind, nbytes) for kind in COLLECTIVES for nbytes in sizes if group.size > 1]:
            mine[kind, axis, group.ranks, nbytes] = _time_collective(world, group, kind, nbytes)
    for link in in_rounds(links):
        pair = peer(world, link[0]), peer(world, link[1])
        for nbytes in sizes:
            # Without a barrier, fast pairs would be timed next to those of the following link.
            world.everyone().all_reduce(torch.ones(1, device=world.device), "doctor: next channels")
            if world.rank in pair:
                seconds = _time_message(world, *pair, nbytes)
                mine["message", over_stages(world), pair, nbytes] = seconds
    slowest: dict[tuple[str, str, tuple[int, ...], int], float] = {}
    for times in world.everyone().gather_objects(mine, "doctor: times"):
        for key, seconds in times.items():
            # A call has taken as long as on its slowest rank.
            slowest[key] = max(seconds, slowest.get(key, 0.0))
    found = []
    for (kind, axis, ranks, nbytes), seconds in slowest.items():
        found.append(Timed(kind, axis, ranks, nbytes, seconds, len({hosts[rank] for rank in ranks})))
    return found


def slow_ones(times: Sequence[Timed]) -> list[tuple[Timed, float]]:
    """Return what is slow with a large buffer, and the median of the others of its kind; one call for each place."""
    alike: dict[tuple[object, ...], list[Timed]] = defaultdict(list)
    for timed in times:
        if timed.nbytes > SMALL:
            alike[timed.kind, timed.axis, timed.nbytes, len(timed.ranks), timed.hosts].append(timed)
    factors: dict[tuple[object, ...], list[tuple[float, Timed, float]]] = defaultdict(list)
    for some in alike.values():
        usual = median(timed.seconds for timed in some)
        for timed in some:
            if len(some) == 2:
                usual = min(other.seconds for other in some)
            factor = timed.seconds / usual
            factors[timed.kind == "message", timed.axis, timed.ranks].append((factor, timed, usual))
    found = []
    for calls in factors.values():
        # The lower median of its calls: one unlucky collective does not make a group slow.
        factor, timed, usual = sorted(calls, key=lambda call: call[0])[(len(calls) - 1) // 2]
        if factor > SLOW_FACTOR:
            found.append((factor, timed, usual))
    return [(timed, usual) for _, timed, usual in sorted(found, key=lambda call: -call[0])]


# By method of a group: the call with the whole buffer, and with one rank's part of it.
COLLECTIVES: dict[str, Callable[[Group, torch.Tensor, torch.Tensor, str], Any]] = {
    "all_reduce": lambda group, whole, part, site: group.all_reduce(whole, site),
    "all_gather": lambda group, whole, part, site: group.all_gather(part, 0, site),
    "reduce_scatter": lambda group, whole, part, site: group.reduce_scatter(whole, 0, site),
    "all_to_all": lambda group, whole, part, site: group.all_to_all([part] * group.size, site),
    "broadcast": lambda group, whole, part, site: group.broadcast(whole, 0, site),
}


def _time_collective(world: World, group: Group, kind: str, nbytes: int) -> float:
    """Return the seconds of a call whose payload is `nbytes`: the whole buffer."""
    site = f"doctor: {kind} of {nbytes} bytes"
    count = max(nbytes // 4 // group.size, 1)
    whole = torch.zeros(count * group.size, device=world.device)
    part, number = whole[:count], torch.ones(1, device=world.device)

    def call() -> None:
        COLLECTIVES[kind](group, whole, part, site)
        settle(world, site)

    def meet() -> None:
        # Otherwise the first rank to come would time its wait for the last one.
        group.all_reduce(number, "doctor: meeting")
        settle(world, "doctor: meeting")

    return min(repeated(call, world.device.type, meet, _calls(nbytes)))


def _time_message(world: World, source: int, target: int, nbytes: int) -> float:
    """Return the seconds of a message from `source` to `target` and an answer of one number."""
    site = f"doctor: {nbytes} bytes from rank {source} to rank {target}"
    payload = torch.zeros(nbytes, dtype=torch.uint8, device=world.device)
    answer = torch.ones(1, device=world.device)

    def send() -> None:
        sent = world.outgoing(target).send([payload], site)
        world.incoming(target).receive([(answer.shape, answer.dtype)], site).wait()
        settle(world, site)
        sent.wait()

    def receive() -> None:
        world.incoming(source).receive([(payload.shape, payload.dtype)], site).wait()
        settle(world, site)
        world.outgoing(source).send([answer], site).wait()

    call = send if world.rank == source else receive
    return min(repeated(call, world.device.type, lambda: None, _calls(nbytes)))


def _calls(nbytes: int) -> int:
    return SMALL_CALLS if nbytes <= SMALL else LARGE_CALLS


__all__ = ["SMALL", "Timed", "sizes_on", "slow_ones", "time_world"]
