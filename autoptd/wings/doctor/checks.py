"""Call every method of a group and every channel, compare the results with known ones, and time them.

In: a `World` whose channels connect neighboring stages. Out: the `Wrong` results that this rank saw, and a `Timed` per
group or channel, kind of call and size, the same on all ranks. All ranks make the same calls in the same order; channels
go link by link.

    checks = Checks(world)
    check_world(checks, links, counts=(1, 1021))
    checks.wrong                            # []: all right
    times = time_world(world, links, hosts=[0, 0, 1, 1], sizes=sizes_on(world.device))
    slow_ones(times)                        # those that take more than twice the median of their kind

All numbers are whole and small, so that bfloat16 holds them and their sums exactly, in any order. In a sum, one rank
adds to every even place, its *owner*, so that a wrong place identifies the rank; many ranks add to every odd place.
Times are measured as in nccl-tests: all groups along an axis work at the same time, as in training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch

from autoptd.ir.mesh import MESH_AXES
from autoptd.ir.types import wire_bytes
from autoptd.program.calls import joint_axis
from autoptd.runtime.world.faults import Call
from autoptd.runtime.world.processes import DistributedWorld
from autoptd.runtime.world.world import Group, World, in_rounds
from autoptd.wings.planner.measure import SIZES, repeated

Tensor = torch.Tensor
SUMMED_DTYPES = (torch.float32, torch.bfloat16)
MOVED_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
# The most ranks that add to an odd place: sums stay below 256, which bfloat16 holds.
MAX_ADDENDS = 60
# The period of the numbers, a prime, so that a piece in a wrong place differs.
PERIOD = 16_381
# The most elements of a tensor that is not summed.
MAX_SMALL = 1 << 14
# The most faults that a rank reports.
MAX_WRONG = 300
# Bytes of the small and of the large buffer.
SMALL = SIZES[0]
LARGE = {"cpu": 1 << 23, "cuda": 1 << 28}
# Calls that are timed; the fastest counts, as other work on a machine only adds.
SMALL_CALLS, LARGE_CALLS = 10, 4
# A group or channel is slow if it takes that many times the median of the others.
SLOW_FACTOR = 2.0


@dataclass(frozen=True)
class Part:
    """One rank's part of a call: its group, and the count, dtype and device of its tensor."""

    group: Group
    count: int
    dtype: torch.dtype
    device: torch.device
    site: str

    def share(self, count: int | None = None) -> Tensor:
        """Return the addend of this rank."""
        places = torch.arange(PERIOD, device="cpu")
        index, size = self.group.index, self.group.size
        alone = torch.where(places // 2 % size == index, 1 + places // 2 % 7, 0)
        together = torch.where((places + index) % size < MAX_ADDENDS, _addend(places, index), 0)
        return self._laid(torch.where(places % 2 == 0, alone, together), count)

    def total(self, count: int | None = None, op: str = "sum") -> Tensor:
        """Return the sum (`op="max"`: the maximum) of all shares."""
        places, size = torch.arange(PERIOD, device="cpu"), self.group.size
        # Zeros of other ranks are part of the maximum.
        least = 0 if op == "sum" or size > MAX_ADDENDS else -2
        together = torch.full_like(places, least)
        # `number` counts the ranks with (place + rank) % size < MAX_ADDENDS, which add to a place.
        for number in range(min(size, MAX_ADDENDS)):
            addend = _addend(places, (number - places) % size)
            together = together + addend if op == "sum" else torch.maximum(together, addend)
        return self._laid(torch.where(places % 2 == 0, 1 + places // 2 % 7, together), count)

    def _laid(self, pattern: Tensor, count: int | None) -> Tensor:
        return _laid(pattern, self.count if count is None else count, self.dtype, self.device)

    def own(self) -> Tensor:
        """Return the tensor of this rank if ranks only exchange numbers."""
        return message(self.group.ranks[self.group.index], 0, self.count, self.dtype, self.device)


class Result(NamedTuple):
    """The result of a call and the right one: the part of the rank at `position`, or a sum from `offset` on."""

    got: Tensor
    right: Tensor
    position: int = -1
    offset: int = 0


@dataclass(frozen=True)
class Wrong:
    """A wrong result of `what` on rank `seen_by` in the group `ranks`; `sources`: ranks whose part is wrong, if known."""

    what: str
    over: str
    ranks: tuple[int, ...]
    sources: tuple[int, ...]
    seen_by: int
    dtype: str
    text: str


@dataclass
class Checks:
    """The comparisons of one rank."""

    world: World
    count: int = 0
    # One entry for all sizes of a call.
    _found: dict[tuple[object, ...], Wrong] = field(default_factory=dict)

    @property
    def wrong(self) -> list[Wrong]:
        return list(self._found.values())

    def compare(self, what: str, over: str, ranks: Sequence[int], result: Result) -> None:
        """Compare a result with the right one."""
        self.count += 1
        got, right, position, offset = result
        is_alike = got.shape == right.shape and got.dtype == right.dtype
        if is_alike and torch.equal(got, right):
            return
        sources: tuple[int, ...] = () if position < 0 else (ranks[position],)
        text = f"{got.dtype} {list(got.shape)} instead of {right.dtype} {list(right.shape)}"
        if is_alike:
            places = (got != right).flatten().nonzero().flatten()
            first = int(places[0])
            text = (
                f"element {first} is {float(got.flatten()[first]):g}, not {float(right.flatten()[first]):g}"
            )
            if right.numel() > 1:
                text = f"{len(places)} of {right.numel()} elements; {text}"
            if position < 0:
                sources = _owners(places + offset, ranks)
        dtype = str(right.dtype).removeprefix("torch.")
        wrong = Wrong(what, over, tuple(ranks), sources, self.world.rank, dtype, text)
        if len(self._found) < MAX_WRONG:
            self._found.setdefault((what, over, wrong.ranks, sources, dtype), wrong)


def message(
    source: int, target: int, count: int, dtype: torch.dtype, device: torch.device, number: int = 0
) -> Tensor:
    """Return the tensor that `source` sends to `target` in its message `number`."""
    # With equal factors, ranks 251 apart would send the same numbers.
    factor = 3 + (source // 251 + 5 * (target // 251)) % 97
    values = (
        torch.arange(PERIOD, device="cpu") * factor + 17 * source + 29 * target + 101 * number
    ) % 251 - 125
    return _laid(values % 3 == 0 if dtype is torch.bool else values, count, dtype, device)


def _laid(pattern: Tensor, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `count` elements of a pattern, repeated as often as needed."""
    return pattern.to(device, dtype).repeat(-(-count // PERIOD))[:count]


def _addend(places: Tensor, index: int | Tensor) -> Tensor:
    return (7 * places + 13 * index) % 5 - 2


def _owners(places: Tensor, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks whose part of a sum is wrong; none if most seem to be, as the sum itself is wrong then."""
    places = places % PERIOD
    indices = (places[places % 2 == 0] // 2 % len(ranks)).unique().tolist()
    return tuple(ranks[index] for index in indices) if 2 * len(indices) <= max(len(ranks), 2) else ()


def _all_reduce(part: Part) -> Iterator[Result]:
    yield Result(part.group.all_reduce(part.share(), part.site), part.total())


def _maximum(part: Part) -> Iterator[Result]:
    yield Result(part.group.all_reduce(part.share(), part.site, "max"), part.total(op="max"))


def _in_place(part: Part) -> Iterator[Result]:
    """Sum a tensor whose strides are not in order."""
    count = 2 * part.count
    x = part.share(count).view(part.count, 2).t().clone().t()
    yield Result(part.group.all_reduce_(x, part.site).flatten(), part.total(count))


def _all_reduce_start(part: Part) -> Iterator[Result]:
    """Start two sums of different lengths, and wait for the later one first, to find exchanged results."""
    counts = part.count, part.count + 3
    pending = [part.group.all_reduce_start(part.share(count), part.site) for count in counts]
    for count, started in zip(reversed(counts), reversed(pending), strict=True):
        yield Result(started.wait(), part.total(count))


def _all_gather(part: Part) -> Iterator[Result]:
    yield from _gathered(part, part.group.all_gather(part.own().view(1, -1), 1, part.site).flatten())


def _all_gather_start(part: Part) -> Iterator[Result]:
    yield from _gathered(part, part.group.all_gather_start(part.own(), 0, part.site).wait())


def _all_gather_start_in_place(part: Part) -> Iterator[Result]:
    flat = torch.zeros(part.group.size * part.count, dtype=part.dtype, device=part.device)
    flat[part.group.index * part.count :][: part.count] = part.own()
    yield from _gathered(part, part.group.all_gather_start_(flat, part.site).wait())


def _gathered(part: Part, whole: Tensor) -> Iterator[Result]:
    for position, (got, rank) in enumerate(zip(whole.split(part.count), part.group.ranks, strict=True)):
        yield Result(got, message(rank, 0, part.count, part.dtype, part.device), position)


def _reduce_scatter(part: Part) -> Iterator[Result]:
    yield _scattered(part, lambda x: part.group.reduce_scatter(x.view(1, -1), 1, part.site).flatten())


def _reduce_scatter_start(part: Part) -> Iterator[Result]:
    yield _scattered(part, lambda x: part.group.reduce_scatter_start(x, 0, part.site).wait())


def _scattered(part: Part, scatter: Callable[[Tensor], Tensor]) -> Result:
    count, offset = part.count * part.group.size, part.count * part.group.index
    return Result(scatter(part.share(count)), part.total(count)[offset:][: part.count], offset=offset)


def _all_to_all(part: Part) -> Iterator[Result]:
    ranks, like = part.group.ranks, (part.count, part.dtype, part.device)
    mine = ranks[part.group.index]
    got = part.group.all_to_all([message(mine, other, *like) for other in ranks], part.site)
    for index, (piece, other) in enumerate(zip(got, ranks, strict=True)):
        yield Result(piece, message(other, mine, *like), index)


def _broadcast(part: Part) -> Iterator[Result]:
    for source in sorted({0, part.group.size - 1}):
        right = message(part.group.ranks[source], 0, part.count, part.dtype, part.device)
        yield Result(part.group.broadcast(part.own(), source, part.site), right, source)


def _gather_objects(part: Part) -> Iterator[Result]:
    objects = part.group.gather_objects(part.own().cpu(), part.site)
    yield from _gathered(part, torch.cat(objects).to(part.device))


METHODS: dict[str, tuple[tuple[torch.dtype, ...], Callable[[Part], Iterator[Result]]]] = {
    "all_reduce": (SUMMED_DTYPES, _all_reduce),
    "all_reduce max": (SUMMED_DTYPES, _maximum),
    "all_reduce_": (SUMMED_DTYPES, _in_place),
    "all_reduce_start": (SUMMED_DTYPES, _all_reduce_start),
    "all_gather": (MOVED_DTYPES, _all_gather),
    "all_gather_start": (MOVED_DTYPES, _all_gather_start),
    "all_gather_start_": (MOVED_DTYPES, _all_gather_start_in_place),
    "reduce_scatter": (SUMMED_DTYPES, _reduce_scatter),
    "reduce_scatter_start": (SUMMED_DTYPES, _reduce_scatter_start),
    "all_to_all": (MOVED_DTYPES, _all_to_all),
    "broadcast": (MOVED_DTYPES, _broadcast),
    "gather_objects": ((torch.float32,), _gather_objects),
}
# Calls with a part per rank, which are large with many ranks.
IN_PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather_objects")


def check_world(checks: Checks, links: Sequence[tuple[int, int]], counts: Sequence[int]) -> None:
    """Check the groups along every axis and several axes together, and the channels of all links between stages."""
    world = checks.world
    mesh = world.mesh
    groups = {}
    for axes in (*((axis,) for axis in MESH_AXES), mesh.value_axes, mesh.gradient_axes):
        # Groups along several axes may be one with a single axis, which is checked once.
        if name := joint_axis(mesh, axes):
            groups[name] = world.group(axes)
    for name, group in groups.items():
        world.at = f"doctor: group along {name}"
        check_group(checks, name, group, counts)
    world.at = "doctor: channels"
    for link in in_rounds(links):
        if world.pipeline_rank in link:
            _check_channel(checks, link, counts)


def check_group(checks: Checks, over: str, group: Group, counts: Sequence[int]) -> None:
    """Check all methods of a group."""
    world = checks.world
    for what, (dtypes, results) in METHODS.items():
        for dtype in dtypes:
            for count in _counts_of(dtype, counts):
                each = max(count // group.size, 1) if what.startswith(IN_PARTS) else count
                site = f"doctor: {what} of {each} {str(dtype).removeprefix('torch.')} over {over}"
                found = list(results(Part(group, each, dtype, world.device, site)))
                settle(world, site)
                for result in found:
                    checks.compare(what, over, group.ranks, result)


def _counts_of(dtype: torch.dtype, counts: Sequence[int]) -> list[int]:
    """Return the counts to try: only sums are large."""
    return [count for count in counts if count <= MAX_SMALL or dtype in SUMMED_DTYPES]


def _check_channel(checks: Checks, link: tuple[int, int], counts: Sequence[int]) -> None:
    """Check a channel with two messages of several tensors, to find one that arrives twice."""
    world, over = checks.world, over_stages(checks.world)
    sender, receiver = (peer(world, place) for place in link)
    site = f"doctor: message over {over} {sender} > {receiver}"
    for number in range(2):
        right = []
        for dtype in MOVED_DTYPES:
            for count in _counts_of(dtype, counts):
                right.append(message(sender, receiver, count, dtype, world.device, number))
        if world.rank == sender:
            # Not contiguous.
            spread = [torch.stack([x, x], dim=-1)[..., 0] for x in right]
            world.outgoing(receiver).send(spread, site).wait()
            settle(world, site)
            continue
        got = world.incoming(sender).receive([(x.shape, x.dtype) for x in right], site).wait()
        settle(world, site)
        for x, expected in zip(got, right, strict=True):
            checks.compare("message", over, (sender, receiver), Result(x, expected, 0))


def peer(world: World, pipeline_rank: int) -> int:
    """Return the rank of this rank's pipeline with a pipeline rank."""
    return world.mesh.at_stage(world.rank, pipeline_rank)


def over_stages(world: World) -> str:
    """Name the axes of messages between stages."""
    return joint_axis(world.mesh, world.mesh.stage_axes)


def settle(world: World, site: str) -> None:
    """Wait until the device has finished its work."""
    if world.device.type != "cuda":
        return
    if isinstance(world, DistributedWorld):
        # A call that hangs on the device blocks the host here, and the world's watch ends it.
        with world.call(Call("work on the device", site)):
            torch.cuda.synchronize(world.device)
    else:
        torch.cuda.synchronize(world.device)


@dataclass(frozen=True)
class Timed:
    """The seconds of a call of `nbytes`: a collective along `axis`, or the "message" of a channel."""

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
            # Without a barrier, fast pairs would overlap those of the next link.
            world.everyone().all_reduce(torch.ones(1, device=world.device), "doctor: next channels")
            if world.rank in pair:
                seconds = _time_message(world, *pair, nbytes)
                mine["message", over_stages(world), pair, nbytes] = seconds
    slowest: dict[tuple[str, str, tuple[int, ...], int], float] = {}
    for times in world.everyone().gather_objects(mine, "doctor: times"):
        for key, seconds in times.items():
            # A call takes as long as on its slowest rank.
            slowest[key] = max(seconds, slowest.get(key, 0.0))
    found = []
    for (kind, axis, ranks, nbytes), seconds in slowest.items():
        found.append(Timed(kind, axis, ranks, nbytes, seconds, len({hosts[rank] for rank in ranks})))
    return found


def slow_ones(times: Sequence[Timed]) -> list[tuple[Timed, float]]:
    """Return slow calls with a large buffer, one per place, and the median of the others of their kind."""
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
        # The lower median of its calls, so that one slow call does not count.
        factor, timed, usual = sorted(calls, key=lambda call: call[0])[(len(calls) - 1) // 2]
        if factor > SLOW_FACTOR:
            found.append((factor, timed, usual))
    return [(timed, usual) for _, timed, usual in sorted(found, key=lambda call: -call[0])]


# Method of a group -> its call with the whole buffer, or one rank's part of it.
COLLECTIVES: dict[str, Callable[[Group, torch.Tensor, torch.Tensor, str], Any]] = {
    "all_reduce": lambda group, whole, part, site: group.all_reduce(whole, site),
    "all_gather": lambda group, whole, part, site: group.all_gather(part, 0, site),
    "reduce_scatter": lambda group, whole, part, site: group.reduce_scatter(whole, 0, site),
    "all_to_all": lambda group, whole, part, site: group.all_to_all([part] * group.size, site),
    "broadcast": lambda group, whole, part, site: group.broadcast(whole, 0, site),
}


def _time_collective(world: World, group: Group, kind: str, nbytes: int) -> float:
    """Return the seconds of a call whose whole buffer has `nbytes`."""
    site = f"doctor: {kind} of {nbytes} bytes"
    count = max(nbytes // 4 // group.size, 1)
    whole = torch.zeros(count * group.size, device=world.device)
    part, number = whole[:count], torch.ones(1, device=world.device)

    def call() -> None:
        COLLECTIVES[kind](group, whole, part, site)
        settle(world, site)

    def meet() -> None:
        # Otherwise ranks would time their wait for the last one.
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
