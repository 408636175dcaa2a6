"""Define one rank's view of the others: groups for collectives, channels for point-to-point, and faults.

`threads.py` and `processes.py` each implement `World`. The communicators are declared up front
(`Communicators`), so that every rank creates the same ones in the same order. There is a group along each
mesh axis, but no group of all ranks: global communication goes along one axis after the other (`Hops`).

    whole = world.group(("tp",)).all_reduce(partial, "h.0.mlp")
    sent = world.outgoing(peer).send([x], "SEND_F2.1>3")
    (x,) = world.incoming(peer).receive([((4, 8), torch.float32)], "RECV_F3.1<2").wait()

Terms: the *site* of a call is the emitted line or the action that makes it, and appears in errors; `world.at`
is the action that the rank is executing. All ranks of a group make its calls in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from autoptd.errors import InternalError
from autoptd.ir.mesh import MESH_AXES, Mesh
from autoptd.runtime.world.flags import FlagWatch

# Shape and dtype of a tensor to be received.
Like = tuple[Sequence[int], torch.dtype]


@dataclass(frozen=True)
class Communicators:
    """The communicators of a program besides those along the mesh axes.

    `owners` are sets of pipeline ranks that hold copies of one parameter; `links` are
    (source, target) pipeline ranks; `sub_axes` are the sub-axes that types of values or parameters use;
    `joint` are axes and sub-axes along which ranks sum gradients together.
    """

    owners: tuple[tuple[int, ...], ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    sub_axes: tuple[str, ...] = ()
    joint: tuple[tuple[str, ...], ...] = ()

    def groups(self, mesh: Mesh) -> list[tuple[int, ...]]:
        """Return the rank sets of all groups of two ranks or more, each once, in the same order on every
        rank.
        """
        found: list[tuple[int, ...]] = []
        single = [(axis,) for axis in (*MESH_AXES, *self.sub_axes)]
        # Ranks of a layer gather scattered messages; ranks with different samples or tokens sum gradients.
        for axes in (*single, mesh.value_axes, mesh.gradient_axes, *self.joint):
            found += mesh.groups(axes)
        # One in each pipeline; the group of all its stages is the one along pp, which already exists.
        for pp_ranks in self.owners:
            found += sorted({owner_ranks(mesh, rank, pp_ranks) for rank in range(mesh.size)})
        return [ranks for ranks in dict.fromkeys(found) if len(ranks) > 1]

    def channels(self, mesh: Mesh) -> list[tuple[int, int]]:
        """Return (source rank, target rank) of all channels, in the same order on every rank: round by round."""
        found: list[tuple[int, int]] = []
        for source, target in in_rounds(self.links):
            # Rank k of a stage talks to rank k of the other one: the same replica and tensor rank.
            found += zip(mesh.ranks_at(source), mesh.ranks_at(target), strict=True)
        return found


def in_rounds(links: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Order links in rounds of disjoint ones, since connecting one occupies both its ranks.

    Links between neighbours take four rounds, however long the pipeline is: 0-1, 2-3, ..., then 1-2, 3-4,
    ..., then the same in the other direction.
    """
    rounds: list[list[tuple[int, int]]] = []
    for link in sorted(set(links), key=lambda link: (link[0] > link[1], min(link), max(link))):
        for links_of_round in rounds:
            if set(link).isdisjoint(chain.from_iterable(links_of_round)):
                links_of_round.append(link)
                break
        else:
            rounds.append([link])
    return list(chain.from_iterable(rounds))


def owner_ranks(mesh: Mesh, rank: int, pp_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of the pipeline of `rank` at each of `pp_ranks`, ascending."""
    return tuple(sorted(mesh.at_stage(rank, place) for place in set(pp_ranks)))


class Pending(ABC):
    """A started operation: `wait()` finishes it and returns its result (None for a send)."""

    @abstractmethod
    def wait(self) -> Any: ...

    @abstractmethod
    def is_done(self) -> bool:
        """Return whether `wait()` would return at once."""


class Done(Pending):
    """A Pending that is already complete."""

    def __init__(self, result: Any = None) -> None:
        self.result = result

    def wait(self) -> Any:
        return self.result

    def is_done(self) -> bool:
        return True


class Then(Pending):
    """A started operation whose result is passed through a function."""

    def __init__(self, started: Pending, finish: Callable[[Any], Any]) -> None:
        self._started, self._finish = started, finish

    def wait(self) -> Any:
        return self._finish(self._started.wait())

    def is_done(self) -> bool:
        return self._started.is_done()


class Group(ABC):
    """One rank's handle on a set of ranks that communicate; `index` is this rank's position in `ranks`.

    Results never share memory with another rank's tensors. Nothing here is differentiable: see
    `conversions.py`.
    """

    def __init__(self, ranks: tuple[int, ...], index: int) -> None:
        self.ranks, self.index, self.size = ranks, index, len(ranks)

    @abstractmethod
    def all_reduce(self, x: torch.Tensor, site: str, op: str = "sum") -> torch.Tensor:
        """Return the sum (`op="max"`: the maximum) of `x` over the ranks: the same bits on all, a new tensor."""

    @abstractmethod
    def all_reduce_(self, x: torch.Tensor, site: str) -> torch.Tensor:
        """Sum `x` over the ranks in place, and return it."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor, dim: int, site: str) -> torch.Tensor:
        """Return every rank's `x`, joined along `dim` (not negative) in group order; shapes are equal."""

    @abstractmethod
    def reduce_scatter(self, x: torch.Tensor, dim: int, site: str) -> torch.Tensor:
        """Return part `index` of the sum of `x` over the ranks, of equal parts along `dim` (not negative)."""

    @abstractmethod
    def all_to_all(
        self, parts: Sequence[torch.Tensor], site: str, sizes: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Send `parts[i]` to rank i of the group; return what the others sent here, in group order.

        Parts have equal shapes, or are flat: then `sizes` has the elements that each rank sends here.
        """

    @abstractmethod
    def broadcast(self, x: torch.Tensor, source_index: int, site: str) -> torch.Tensor:
        """Return the `x` of one rank as a new tensor; of the others' `x` only shape and dtype are read."""

    @abstractmethod
    def all_reduce_start(self, flat: torch.Tensor, site: str) -> Pending:
        """Start summing `flat` (contiguous) in place.

        Do not access it before `wait()`, which returns it.
        """

    @abstractmethod
    def all_gather_start(self, x: torch.Tensor, dim: int, site: str) -> Pending:
        """Start `all_gather`; `x` must not be changed before `wait()`."""

    @abstractmethod
    def all_gather_start_(self, flat: torch.Tensor, site: str) -> Pending:
        """Start gathering into `flat` (1-d, contiguous) in place; this rank contributes range `index` of its
        equal ranges.

        Do not access it before `wait()`, which returns it.
        """

    @abstractmethod
    def reduce_scatter_start(
        self, x: torch.Tensor, dim: int, site: str, sum_dtype: torch.dtype | None = None
    ) -> Pending:
        """Start `reduce_scatter`; `x` must not be changed before `wait()`.

        With `sum_dtype`, parts are sent in their own dtype, and summed and returned in `sum_dtype`.
        """

    @abstractmethod
    def gather_objects(self, obj: Any, site: str) -> list[Any]:
        """Return every rank's object, in group order."""


class SoloGroup(Group):
    """The group of one rank: returns its inputs, at no cost."""

    def __init__(self, rank: int) -> None:
        super().__init__((rank,), 0)

    def all_reduce(self, x: torch.Tensor, site: str, op: str = "sum") -> torch.Tensor:
        return x

    def all_reduce_(self, x: torch.Tensor, site: str) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int, site: str) -> torch.Tensor:
        return x

    def reduce_scatter(self, x: torch.Tensor, dim: int, site: str) -> torch.Tensor:
        return x

    def all_to_all(
        self, parts: Sequence[torch.Tensor], site: str, sizes: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        return list(parts)

    def broadcast(self, x: torch.Tensor, source_index: int, site: str) -> torch.Tensor:
        return x

    def all_reduce_start(self, flat: torch.Tensor, site: str) -> Pending:
        return Done(flat)

    def all_gather_start(self, x: torch.Tensor, dim: int, site: str) -> Pending:
        return Done(x)

    def all_gather_start_(self, flat: torch.Tensor, site: str) -> Pending:
        return Done(flat)

    def reduce_scatter_start(
        self, x: torch.Tensor, dim: int, site: str, sum_dtype: torch.dtype | None = None
    ) -> Pending:
        return Done(x if sum_dtype is None else x.to(sum_dtype))

    def gather_objects(self, obj: Any, site: str) -> list[Any]:
        return [obj]


class Hops:
    """Several mesh axes as one group of ranks: a call is made along one axis after the other.

    Use it for small payloads: nothing is overlapped. All ranks must make the call, since each hop is a
    collective of the ranks along one axis.
    """

    def __init__(self, world: World, axes: Sequence[str]) -> None:
        # Fastest first.
        self._world, self._axes = world, [axis for axis in world.mesh.axes if axis in axes]
        self.ranks = world.mesh.group(world.rank, tuple(axes))
        self.index, self.size = self.ranks.index(world.rank), len(self.ranks)

    def all_reduce(self, x: torch.Tensor, site: str, op: str = "sum") -> torch.Tensor:
        """Return the sum (`op="max"`: the maximum) of `x` over the ranks."""
        for axis in self._axes:
            x = self._world.group((axis,)).all_reduce(x, site, op)
        return x

    def broadcast(self, x: torch.Tensor, site: str) -> torch.Tensor:
        """Return the `x` of the first rank; of the other ranks' `x` only shape and dtype are read."""
        for number, axis in enumerate(self._axes):
            later = self._axes[number + 1 :]
            # A rank that is not the first along a later axis gets it over that axis.
            if not any(self._world.coordinate[other] for other in later):
                x = self._world.group((axis,)).broadcast(x, 0, site)
        return x

    def gather_objects(self, obj: Any, site: str) -> list[Any]:
        """Return every rank's object, in the order of `ranks`."""
        objects = [obj]
        # With the fastest axis first, objects end up in ascending order of ranks.
        for axis in self._axes:
            gathered = self._world.group((axis,)).gather_objects(objects, site)
            objects = list(chain.from_iterable(gathered))
        return objects


class Channel(ABC):
    """Messages from one rank to another, in order; one end only sends, the other only receives."""

    @abstractmethod
    def send(self, tensors: Sequence[torch.Tensor], site: str) -> Pending:
        """Start sending; never blocks.

        The tensors must stay unchanged until `wait()`; the Pending keeps them alive.
        """

    @abstractmethod
    def receive(self, like: Sequence[Like], site: str) -> Pending:
        """Allocate buffers and post a receive; `wait()` returns the list of tensors."""

    def close(self) -> None:  # noqa: B027 - most channels hold nothing
        """Release the resources of the channel; nothing may be sent after that."""


class Mailbox:
    """Short texts and counts by key that processes leave for each other, without a collective.

    It is for one thread of this process that runs during training: nothing waits for another process, but a request does
    not return if the store's host does not answer.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def put(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def add(self, key: str) -> None:
        self._store.add(key, 1)

    def count(self, key: str) -> int:
        return int(self._store.add(key, 0))


class World(ABC):
    """One rank's view of all ranks; `at` is the text of the action being executed, set by the executor."""

    def __init__(self, rank: int, mesh: Mesh, device: torch.device, timeout: float) -> None:
        self.rank, self.mesh, self.device, self.timeout = rank, mesh, device, timeout
        self.coordinate = mesh.coordinate(rank)
        self.replica, self.pipeline_rank = mesh.replica_of(rank), mesh.pipeline_rank_of(rank)
        self.at = "start"
        # Set if ranks exchange flags along with the loss.
        self.flags: FlagWatch | None = None
        self._solo = SoloGroup(rank)
        # The groups returned by `group` so far.
        self._along: dict[tuple[str, ...], Group] = {}
        self._hops: dict[tuple[str, ...], Hops] = {}
        self.groups_here: dict[tuple[int, ...], Group] = {}
        self.channels_out: dict[int, Channel] = {}
        self.channels_in: dict[int, Channel] = {}

    def group(self, axes: tuple[str, ...]) -> Group:
        """Return the group of the ranks that differ from this one along `axes` only."""
        if axes not in self._along:
            self._along[axes] = self._group_of(self.mesh.group(self.rank, axes))
        return self._along[axes]

    def owners(self, pp_ranks: Sequence[int]) -> Group:
        """Return the group of the ranks of this rank's pipeline at `pp_ranks` (this rank's among them)."""
        return self._group_of(owner_ranks(self.mesh, self.rank, pp_ranks))

    def hops(self, axes: tuple[str, ...]) -> Hops:
        """Return the ranks that differ from this one along `axes` only, reached along one axis after the
        other.
        """
        if axes not in self._hops:
            self._hops[axes] = Hops(self, axes)
        return self._hops[axes]

    def leads(self, axes: Sequence[str]) -> bool:
        """Tell whether this rank is the first one along `axes`."""
        return not any(self.coordinate[axis] for axis in axes)

    def broadcast_from(self, source: int, x: torch.Tensor, axes: Sequence[str], site: str) -> torch.Tensor:
        """Return the `x` of rank `source` on the ranks that differ from it along `axes` only, one axis after the
        other; of the others' `x` only shape and dtype are read.
        """
        mesh = self.mesh
        for number, axis in enumerate(axes):
            later = axes[number + 1 :]
            # The line of the source first; then each of its ranks serves the line through it.
            if all(mesh.place(self.rank, other) == mesh.place(source, other) for other in later):
                x = self.group((axis,)).broadcast(x, mesh.place(source, axis), site)
        return x

    def everyone(self) -> Hops:
        """Return all ranks, reached along one axis after the other."""
        return self.hops(MESH_AXES)

    def outgoing(self, peer_rank: int) -> Channel:
        """Return the channel from this rank to global rank `peer_rank`."""
        return self._find(self.channels_out, peer_rank, f"channel {self.rank} -> {peer_rank}")

    def incoming(self, peer_rank: int) -> Channel:
        """Return the channel from global rank `peer_rank` to this rank."""
        return self._find(self.channels_in, peer_rank, f"channel {peer_rank} -> {self.rank}")

    @abstractmethod
    def report_fault(self, exc: BaseException) -> None:
        """Report to the other ranks that this one failed with `exc`, so that they raise it instead of its
        consequences.
        """

    @abstractmethod
    def raise_first_fault(self) -> None:
        """Raise the failure of another rank if one has been reported: results are then invalid."""

    def mark(self) -> None:  # noqa: B027 - most devices run in step with their host
        """Mark the work queued on the device so far, so that a hang before this point is detected."""

    def close(self) -> None:  # noqa: B027 - most worlds hold nothing
        """Release the resources of the world; no call may follow."""

    def mailbox(self, name: str) -> Mailbox:
        """Return the mailbox of this name that all processes of the world share."""
        return Mailbox(dist.HashStore())

    def communicators(self) -> tuple[list[Group], dict[int, Channel]]:
        """Return this rank's groups of two ranks or more, and the channels that it sends over, by peer."""
        return list(self.groups_here.values()), dict(self.channels_out)

    def _group_of(self, ranks: tuple[int, ...]) -> Group:
        # Not in the table: groups of one rank need no communicator and are not declared.
        if ranks == (self.rank,):
            return self._solo
        return self._find(self.groups_here, ranks, f"group of ranks {ranks}")

    def _find(self, table: dict[Any, Any], key: Any, what: str) -> Any:
        # Creating it here would hang, as only some ranks get here: all are created before the first step.
        if key not in table:
            raise InternalError(
                f"rank {self.rank} at {self.at}", f"the {what} was not declared in `Communicators`"
            )
        return table[key]


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one: Triton kernels and NCCL streams use the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def fault_site(rank: int, at: str) -> str:
    """Return the site of a RuntimeFault: the rank, and the action it was executing."""
    return f"rank {rank} at {at}"


def equal_parts(x: torch.Tensor, dim: int, parts: int, site: str) -> int:
    """Return the length of each of `parts` equal parts of `x` along `dim`."""
    if x.shape[dim] % parts:
        raise InternalError(site, f"dim {dim} of {list(x.shape)} does not divide into {parts} parts")
    return x.shape[dim] // parts


def fresh(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy that autograd does not know of: a collective may write to it."""
    # Within an autograd function there is nothing to detach from, and the call would cost time.
    if torch.is_grad_enabled():
        x = x.detach()
    return x.clone() if x.is_contiguous() else x.contiguous()


def in_place_of(gathered: torch.Tensor, dim: int) -> torch.Tensor:
    """Join gathered shards [t, ..., n, ...] along `dim`, to [..., t n, ...]: a view if the dims before it are 1."""
    count, *sizes = gathered.shape
    sizes[dim] *= count
    return gathered.movedim(0, dim).reshape(sizes)


def parts_first(x: torch.Tensor, dim: int, count: int, width: int) -> torch.Tensor:
    """Cut x [..., t n, ...] along `dim` into [t, ..., n, ...], contiguous: a view if the dims before it are 1."""
    return x.unflatten(dim, (count, width)).movedim(dim, 0).contiguous()


def as_real(x: torch.Tensor) -> torch.Tensor:
    """View complex numbers as pairs of real ones, which NCCL and gloo can add."""
    return torch.view_as_real(x) if x.is_complex() else x


def sum_in_order(parts: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Add up what the ranks sent, in the order of ranks and in `dtype`, by default that of the parts."""
    total = parts[0].to(dtype or parts[0].dtype, copy=True, memory_format=torch.contiguous_format)
    for part in parts[1:]:
        total += part
    return total
