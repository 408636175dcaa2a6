"""Every call of a group and of a channel, with its result held against the right one.

In: a `World`. Out: the `Wrong`s that this rank saw, and how many results it looked at. All ranks make the
same calls in the same order; those of channels go link by link, in one order for all ranks, so that one at a
time is under way between two ranks.

    checks = Checks(world)
    check_group(checks, "tp", world.group(("tp",)), counts=(1, 1021))
    checks.wrong                            # [] : all right
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from autoptd.errors import RuntimeFault
from autoptd.program.calls import joint_axis
from autoptd.runtime.world.faults import Call
from autoptd.runtime.world.processes import DistributedWorld
from autoptd.runtime.world.world import Group, World, fault_site
from autoptd.wings.doctor.patterns import MOVED_DTYPES, SUMMED_DTYPES, find_difference, message, share, total

Tensor = torch.Tensor
# A rank remembers no more faults, each call of a group or channel once for a dtype.
MAX_WRONG = 300
# Seconds of asking without a pause: calls of microseconds are timed as well.
BRIEF = 0.05
# In a larger group every rank checks many parts: only two dtypes are tried there.
MANY_RANKS = 64
# Elements: of a larger count, each rank hands only its share of it into a gather.
MAX_WHOLE_ELEMENTS = 1 << 14


class Result(NamedTuple):
    """What a call gave, and what is right: the part of the rank at `position`, or a sum over `size` ranks
    from `offset` on.
    """

    got: Tensor
    expected: Tensor
    position: int = -1
    size: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Wrong:
    """A result that is not right on rank `seen_by`: `ranks` called `what`.

    `sources`: whose part is wrong, if known.
    """

    what: str
    over: str
    ranks: tuple[int, ...]
    sources: tuple[int, ...]
    seen_by: int
    dtype: str
    text: str


@dataclass
class Checks:
    """What one rank has looked at."""

    world: World
    count: int = 0
    wrong: list[Wrong] = field(default_factory=list)
    _noted: set[tuple[object, ...]] = field(default_factory=set)

    def hold(self, what: str, over: str, ranks: Sequence[int], result: Result) -> None:
        """Hold a result against the right one."""
        self.count += 1
        found = find_difference(result.got, result.expected, result.size, result.offset)
        if found is None:
            return
        sources = [ranks[index] for index in found.owners]
        if result.position >= 0:
            # A part of one rank, unlike a sum.
            sources = [ranks[result.position]]
        if result.size and 2 * len(sources) > max(result.size, 2):
            # The parts of most ranks look wrong: the sum itself is, not anybody's part.
            sources = []
        self.note(what, over, ranks, sources, str(result.expected.dtype).removeprefix("torch."), str(found))

    def note(
        self, what: str, over: str, ranks: Sequence[int], sources: Sequence[int], dtype: str, text: str
    ) -> None:
        """Remember what is wrong."""
        # One line for a fault, however many sizes and schedules show it.
        key = (what, over, tuple(ranks), tuple(sources), dtype)
        if key not in self._noted and len(self.wrong) < MAX_WRONG:
            self._noted.add(key)
            self.wrong.append(Wrong(what, over, tuple(ranks), tuple(sources), self.world.rank, dtype, text))


def settle(world: World, site: str) -> None:
    """Wait until the device has done what was queued: on CUDA a call that hangs would else block this process
    for ever.
    """
    if world.device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
        wait_until(world, site, event.query)


def wait_until(world: World, site: str, is_done: Callable[[], bool]) -> None:
    """Ask until it is done; RuntimeFault after the world's timeout, which names who is missing."""
    began = time.monotonic()

    def ask() -> None:
        # Asking instead of waiting: `event.synchronize()` on a device that hangs never returns.
        while not is_done():
            waited = time.monotonic() - began
            if waited > world.timeout:
                raise RuntimeError(f"not done after {world.timeout:g} s")
            if waited > BRIEF:
                time.sleep(1e-3)

    if isinstance(world, DistributedWorld):
        # Entered on the board, so that the fault names the ranks that are missing.
        with world.call(Call("work on the device", site)):
            ask()
        return
    try:
        ask()
    except RuntimeError as error:
        raise RuntimeFault(fault_site(world.rank, world.at), f"{site}: {error}", "raise --timeout") from error


def check_group(checks: Checks, over: str, group: Group, counts: Sequence[int]) -> None:
    """Check all methods of a group, for every dtype and number of elements."""
    world = checks.world
    for what, (dtypes, make) in METHODS.items():
        for dtype in dtypes if group.size <= MANY_RANKS else dtypes[:2]:
            for count in _counts(counts, dtype):
                # So that the whole, not each rank's part of it, has the large count.
                in_parts = what.startswith(("all_gather", "reduce_scatter", "all_to_all"))
                length = count // group.size if in_parts and count > MAX_WHOLE_ELEMENTS else count
                site = f"doctor: {what} of {length} {str(dtype).removeprefix('torch.')} over {over}"
                results = list(make(group, length, dtype, world.device, site))
                settle(world, site)
                for result in results:
                    checks.hold(what, over, group.ranks, result)
    objects = group.gather_objects(("rank", group.index), f"doctor: gather_objects over {over}")
    for index, obj in enumerate(objects):
        checks.count += 1
        if obj != ("rank", index):
            text = f"got {obj!r:.40}"
            checks.note("gather_objects", over, group.ranks, [group.ranks[index]], "objects", text)


def _counts(counts: Sequence[int], dtype: torch.dtype) -> Sequence[int]:
    """The sizes of a dtype: large ones of those that activations and gradients have."""
    if dtype in (torch.float32, torch.bfloat16):
        return counts
    return [count for count in counts if count <= MAX_WHOLE_ELEMENTS]


Make = Callable[[Group, int, torch.dtype, torch.device, str], Iterator[Result]]


def _all_reduce(
    group: Group, count: int, dtype: torch.dtype, device: torch.device, site: str
) -> Iterator[Result]:
    got = group.all_reduce(share(group.index, group.size, count, dtype, device), site)
    yield Result(got, total(group.size, count, dtype, device), size=group.size)


def _maximum(
    group: Group, count: int, dtype: torch.dtype, device: torch.device, site: str
) -> Iterator[Result]:
    got = group.all_reduce(share(group.index, group.size, count, dtype, device), site, "max")
    yield Result(got, total(group.size, count, dtype, device, "max"), size=group.size)


def _all_reduce_start(
    group: Group, count: int, dtype: torch.dtype, device: torch.device, site: str
) -> Iterator[Result]:
    """Two at once, and the later one is waited for first."""
    lengths = (count, count + 3)
    # Of two lengths, so that results that were exchanged show.
    flats = [share(group.index, group.size, length, dtype, device).clone() for length in lengths]
    pending = [group.all_reduce_start(flat, site) for flat in flats]
    for length, sum_ in reversed(list(zip(lengths, pending, strict=True))):
        yield Result(sum_.wait(), total(group.size, length, dtype, device), size=group.size)


def _in_place(
    group: Group, count: int, dtype: torch.dtype, device: torch.device, site: str
) -> Iterator[Result]:
    """As it is, and of a tensor whose strides are not in order."""
    for rows in (1, 2):
        x = share(group.index, group.size, rows * count, dtype, device).view(count, rows).t().clone().t()
        got = group.all_reduce_(x, site)
        yield Result(got.flatten(), total(group.size, rows * count, dtype, device), size=group.size)


def _all_gather(
    group: Group, count: int, dtype: torch.dtype, device: torch.device, site: str
) -> Iterator[Result]:
    """Along the first dim, and along the second one of two."""
    for dim in (0, 1) if count <= MAX_WHOLE_ELEMENTS else (0,):
        yield from _gathered(group, group.all_gather(_own(group, count, dtype, device, dim), dim, site), dim)


def _all_gather_start(
    group: Group, count: int, dtype: torch.dtype, device: torch.device, site: str
) -> Iterator[Result]:
    for dim in (0, 1) if count <= MAX_WHOLE_ELEMENTS else (0,):
        pending = group.all_gather_start(_own(group, count, dtype, device, dim), dim, site)
        yield from _gathered(group, pending.wait(), dim)


def _own(group: Group, count: int, dtype: torch.dtype, device: torch.device, dim: int = 0) -> Tensor:
    """What this rank hands in: [count], or [2, count] to be joined along its second dim."""
    x = message(group.ranks[group.index], 0, (dim + 1) * count, dtype, device)
    return x.view(2, count) if dim else x


def _gathered(group: Group, whole: Tensor, dim: int) -> Iterator[Result]:
    width = whole.shape[dim] // group.size
    for position, rank in enumerate(group.ranks):
        part = whole.narrow(dim, position * width, width).flatten()
        yield Result(part, message(rank, 0, part.numel(), part.dtype, part.device), position)


def _whole(group: Group, count: int, dtype: torch.dtype, device: torch.device, dim: int) -> Tensor:
    """What is to be scattered: [size * count], or [2, size * count]."""
    x = share(group.index, group.size, (dim + 1) * count * group.size, dtype, device)
    return x.view(2, -1) if dim else x


def _scattered(group: Group, got: Tensor, dim: int) -> Iterator[Result]:
    whole = total(group.size, got.numel() * group.size, got.dtype, got.device)
    # Along the second dim places are out of order: whose part is wrong cannot be told.
    if dim:
        yield Result(got, whole.view(2, -1).chunk(group.size, dim=1)[group.index])
        return
    offset = group.index * got.numel()
    yield Result(got, whole[offset : offset + got.numel()], size=group.size, offset=offset)


def _reduce_scatter(
    group: Group, count: int, dtype: torch.dtype, device: torch.device, site: str
) -> Iterator[Result]:
    for dim in (0, 1) if count <= MAX_WHOLE_ELEMENTS else (0,):
        yield from _scattered(
            group, group.reduce_scatter(_whole(group, count, dtype, device, dim), dim, site), dim
        )


def _reduce_scatter_start(
    group: Group, count: int, dtype: torch.dtype, device: torch.device, site: str
) -> Iterator[Result]:
    for dim in (0, 1) if count <= MAX_WHOLE_ELEMENTS else (0,):
        pending = group.reduce_scatter_start(_whole(group, count, dtype, device, dim), dim, site)
        yield from _scattered(group, pending.wait(), dim)


def _all_to_all(
    group: Group, count: int, dtype: torch.dtype, device: torch.device, site: str
) -> Iterator[Result]:
    mine = group.ranks[group.index]
    parts = group.all_to_all([message(mine, other, count, dtype, device) for other in group.ranks], site)
    for index, part in enumerate(parts):
        yield Result(part, message(group.ranks[index], mine, count, dtype, device), index)


def _broadcast(
    group: Group, count: int, dtype: torch.dtype, device: torch.device, site: str
) -> Iterator[Result]:
    for source in dict.fromkeys((0, group.size - 1)):
        got = group.broadcast(_own(group, count, dtype, device), source, site)
        yield Result(got, message(group.ranks[source], 0, count, dtype, device), source)


# By method of `Group`: the dtypes to try, and what makes the call and its expected results.
METHODS: dict[str, tuple[tuple[torch.dtype, ...], Make]] = {
    "all_reduce": (SUMMED_DTYPES, _all_reduce),
    "all_reduce_": (SUMMED_DTYPES, _in_place),
    "all_reduce max": (SUMMED_DTYPES, _maximum),
    "all_reduce_start": (SUMMED_DTYPES, _all_reduce_start),
    "all_gather": (MOVED_DTYPES, _all_gather),
    "all_gather_start": (MOVED_DTYPES, _all_gather_start),
    "reduce_scatter": (SUMMED_DTYPES, _reduce_scatter),
    "reduce_scatter_start": (SUMMED_DTYPES, _reduce_scatter_start),
    "all_to_all": (MOVED_DTYPES, _all_to_all),
    "broadcast": (MOVED_DTYPES, _broadcast),
}


def peer(world: World, pipeline_rank: int) -> int:
    """Return the rank at another place of this rank's pipeline."""
    return world.mesh.at_stage(world.rank, pipeline_rank)


def over_stages(world: World) -> str:
    """Name the axes along which messages between stages go."""
    return joint_axis(world.mesh, world.mesh.stage_axes)


def check_channels(checks: Checks, links: Sequence[tuple[int, int]], counts: Sequence[int]) -> None:
    """Check every channel with two messages of several tensors, one of them not contiguous.

    Links one by one, in order.
    """
    world, over = checks.world, over_stages(checks.world)
    for source, target in links:
        if world.pipeline_rank not in (source, target):
            continue
        site = f"doctor: message over {over} {source} > {target}"
        sender, receiver = peer(world, source), peer(world, target)
        # The second message is different: a first one that arrives twice shows.
        for number in range(2):
            wanted = [
                message(sender, receiver, count, dtype, world.device, number)
                for dtype in MOVED_DTYPES
                for count in _counts(counts, dtype)
            ]
            if world.rank == sender:
                # A tensor that is not contiguous is sent.
                spread = [torch.stack([x, x], dim=-1)[..., 0] for x in wanted]
                world.outgoing(receiver).send(spread, site).wait()
                settle(world, site)
                continue
            got = world.incoming(sender).receive([(x.shape, x.dtype) for x in wanted], site).wait()
            settle(world, site)
            for x, expected in zip(got, wanted, strict=True):
                checks.hold("message", over, (sender, receiver), Result(x, expected, 0))


__all__ = [
    "METHODS",
    "Checks",
    "Wrong",
    "check_channels",
    "check_group",
    "over_stages",
    "peer",
    "settle",
    "wait_until",
]
