"""How long calls take: of every group along an axis of the mesh, and of every channel.

In: a `World`. Out: seconds of this rank's groups and of the channels that it sends over. All groups along an
axis are timed at the same time, as in training; channels round by round, each rank in one channel at a time,
or one channel with the others quiet.

    time_groups(world, sizes)["tp", "all_reduce", 1 << 24]      # seconds: the fastest of a few
    time_links(world, rounds_of(world, links), sizes)[5, 1 << 24]      # to rank 5

What else runs on a machine only adds: so the fastest of a few is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoptd.ir.mesh import MESH_AXES
from autoptd.runtime.world.world import Group, World, in_rounds
from autoptd.wings.doctor.calls import peer, settle
from autoptd.wings.planner.measure import SIZES, repeated

# Bytes of the small and of the large buffer.
SMALL = SIZES[0]
LARGE = {"cpu": 1 << 23, "cuda": 1 << 28}
TIMES = {"small": 10, "large": 4}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
# (axis, kind, bytes) -> seconds
GroupTimes = dict[tuple[str, str, int], float]
# (target, bytes) -> seconds
LinkTimes = dict[tuple[int, int], float]
# (source, target) of a channel
Pair = tuple[int, int]


def sizes_on(device: torch.device) -> tuple[int, int]:
    """Return the bytes of the small and of the large buffer."""
    return SMALL, LARGE[device.type]


def time_groups(world: World, sizes: Sequence[int]) -> GroupTimes:
    """Time every kind of collective over this rank's groups along tp, dp and pp, in seconds."""
    found: GroupTimes = {}
    for axis in MESH_AXES:
        group = world.group((axis,))
        if group.size == 1:
            continue
        for kind in KINDS:
            for nbytes in sizes:
                call = _call(group, kind, nbytes, world)
                meet = _meeting(world, group)
                # They meet before each call: else the first to come would time its wait for the last.
                found[axis, kind, nbytes] = min(repeated(call, world.device.type, meet, _times(nbytes)))
    return found


def _times(nbytes: int) -> int:
    return TIMES["small" if nbytes <= SMALL else "large"]


def _meeting(world: World, group: Group) -> Callable[[], Any]:
    number = torch.ones(1, device=world.device)

    def meet() -> None:
        group.all_reduce(number, "doctor: meeting")
        settle(world, "doctor: meeting")

    return meet


def _call(group: Group, kind: str, nbytes: int, world: World) -> Callable[[], Any]:
    """One call of a group whose payload is `nbytes`: the whole, of which a gather or scatter has a part per
    rank.
    """
    site = f"doctor: {kind} of {nbytes} bytes"
    # float32 elements of a part.
    count = max(nbytes // 4 // group.size, 1)
    whole = torch.zeros(count * group.size, device=world.device)
    part = whole[:count]
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.all_reduce(whole, site),
        "broadcast": lambda: group.broadcast(whole, 0, site),
        "all_gather": lambda: group.all_gather(part, 0, site),
        "reduce_scatter": lambda: group.reduce_scatter(whole, 0, site),
        "all_to_all": lambda: group.all_to_all([part] * group.size, site),
    }

    def call() -> None:
        calls[kind]()
        settle(world, site)

    return call


def rounds_of(world: World, links: Sequence[tuple[int, int]]) -> list[list[Pair]]:
    """Return the channels of this rank's pipeline, by rank, in rounds in which each rank has one of them
    at most.
    """
    rounds: list[list[Pair]] = [[]]
    for source, target in in_rounds(links):
        pair = peer(world, source), peer(world, target)
        # A round is over where a rank comes up again: `in_rounds` puts disjoint links first.
        if any(not set(pair).isdisjoint(other) for other in rounds[-1]):
            rounds.append([])
        rounds[-1].append(pair)
    return rounds


def time_links(world: World, rounds: Sequence[Sequence[Pair]], sizes: Sequence[int]) -> LinkTimes:
    """Time a send with the receiver's answer, in seconds, over the channels of each round that this rank
    sends over.

    All ranks make as many rounds; what is in them may be different on ranks that have no channel between
    them.
    """
    found: LinkTimes = {}
    for pairs in rounds:
        # A barrier: without it, fast pairs would be timed beside the next round.
        world.everyone().all_reduce(torch.ones(1, device=world.device), "doctor: next round of channels")
        settle(world, "doctor: next round of channels")
        for source, target in pairs:
            if world.rank not in (source, target):
                continue
            for nbytes in sizes:
                seconds = min(_exchanges(world, source, target, nbytes))
                if world.rank == source:
                    found[target, nbytes] = seconds
    return found


def _exchanges(world: World, source: int, target: int, nbytes: int) -> list[float]:
    """Seconds of some messages from `source` to `target`, each with an answer of one number."""
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
    return repeated(call, world.device.type, lambda: None, _times(nbytes))


__all__ = ["KINDS", "GroupTimes", "LinkTimes", "Pair", "rounds_of", "sizes_on", "time_groups", "time_links"]
