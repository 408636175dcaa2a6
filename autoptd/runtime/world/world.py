"""What a rank sees of the others: groups for collectives, channels for point-to-point, and faults.

A `World` is one rank's view; `threads.py` and `processes.py` each implement it. What is needed is said up
front (`Communicators`), so that every rank creates the same communicators in the same order. There is a group along
each axis of the mesh, and none of everyone: what all ranks have to know goes along one axis after the other
(`Hops`).

    whole = world.group(("tp",)).all_reduce(partial, "h.0.mlp")
    sent = world.outgoing(peer).send([x], "SEND_F2.1>3")
    (x,) = world.incoming(peer).receive([((4, 8), torch.float32)], "RECV_F3.1<2").wait()

Terms: the *site* of a call says what it is for (an emitted line, an action) and shows up in errors;
`world.at` is the action that the rank is executing. Calls of one group are made in the same order by all its
ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from autoptd.errors import InternalError
from autoptd.ir.mesh import MESH_AXES, Mesh
from autoptd.runtime.world.flags import FlagWatch

# Shape and dtype of a tensor to come.
Like = tuple[Sequence[int], torch.dtype]


@dataclass(frozen=True)
class Communicators:
    """The communicators a program uses beside those along the mesh axes.

    `owners` are sets of pipeline ranks that hold copies of one parameter; `links` are
    (source, target) pipeline ranks; `sub_axes` are those that values or parameters have types over;
    `joint` are axes and sub-axes along which ranks sum gradients together.
    """

    owners: tuple[tuple[int, ...], ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    sub_axes: tuple[str, ...] = ()
    joint: tuple[tuple[str, ...], ...] = ()

    def groups(self, mesh: Mesh) -> list[tuple[int, ...]]:
        """Rank sets of all groups of two ranks or more, each once, in the same order on every rank."""
        found: list[tuple[int, ...]] = []
        single = [(axis,) for axis in (*MESH_AXES, *self.sub_axes)]
        # Ranks within a layer gather what was sent in parts; those with other samples or tokens sum gradients.
        for axes in (*single, mesh.value_axes, mesh.gradient_axes, *self.joint):
            found += mesh.groups(axes)
        # One in each pipeline; that of all stages is the group along pp, which is made once.
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
    """Order links so that they connect soon, if each takes both its ranks for a while: in rounds of disjoint ones.

    Between neighbours these are four, however long the pipeline is: 0-1, 2-3, ..., then 1-2, 3-4, ..., then
    the same downwards.
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
    """Something started: `wait()` finishes it and returns its result (None for a send)."""

    @abstractmethod
    def wait(self) -> Any: ...

    @abstractmethod
    def is_done(self) -> bool:
        """Return whether `wait()` would return at once."""


class Done(Pending):
    """A Pending that had nothing to wait for."""

    def __init__(self, result: Any = None) -> None:
        self.result = result

    def wait(self) -> Any:
        return self.result

    def is_done(self) -> bool:
        return True


class Then(Pending):
    """Something started, whose result still passes through a function."""

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
    def all_to_all(self, parts: Sequence[torch.Tensor], site: str) -> list[torch.Tensor]:
        """Send `parts[i]` to rank i of the group; return what the others sent here, in group order."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor, source_index: int, site: str) -> torch.Tensor:
        """Return the `x` of one rank as a new tensor; the `x` of the others only says shape and dtype."""

    @abstractmethod
    def all_reduce_start(self, flat: torch.Tensor, site: str) -> Pending:
        """Start summing `flat` (contiguous) in place.

        It must not be touched before `wait()`, which returns it.
        """

    @abstractmethod
    def all_gather_start(self, x: torch.Tensor, dim: int, site: str) -> Pending:
        """Start `all_gather`; `x` must not be changed before `wait()`."""

    @abstractmethod
    def all_gather_start_(self, flat: torch.Tensor, site: str) -> Pending:
        """Start filling `flat` (1-d, contiguous) in place: of its equal ranges, the `index`-th is this rank's.

        It must not be touched before `wait()`, which returns it.
        """

    @abstractmethod
    def reduce_scatter_start(
        self, x: torch.Tensor, dim: int, site: str, sum_dtype: torch.dtype | None = None
    ) -> Pending:
        """Start `reduce_scatter`; `x` must not be changed before `wait()`.

        With `sum_dtype`, parts travel as they are, and are added up in that dtype, which the result has.
        """

    @abstractmethod
    def gather_objects(self, obj: Any, site: str) -> list[Any]:
        """Return every rank's object, in group order."""


class SoloGroup(Group):
    """The group of one rank: hands everything back as it came, at no cost."""

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

    def all_to_all(self, parts: Sequence[torch.Tensor], site: str) -> list[torch.Tensor]:
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
    """Several axes of the mesh as one group of ranks: a call is made along one axis after the other.

    For few bytes, as it is not overlapped. Calls of ranks with equal coordinates elsewhere meet, so all ranks
    make them.
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
        """Return the `x` of the first rank; the `x` of the others only says shape and dtype."""
        for number, axis in enumerate(self._axes):
            later = self._axes[number + 1 :]
            # A rank that is not the first along a later axis gets it over that axis.
            if not any(self._world.coordinate[other] for other in later):
                x = self._world.group((axis,)).broadcast(x, 0, site)
        return x

    def gather_objects(self, obj: Any, site: str) -> list[Any]:
        """Return every rank's object, in the order of `ranks`."""
        objects = [obj]
        # The fastest axis first: so objects end up in ascending order of ranks.
        for axis in self._axes:
            gathered = self._world.group((axis,)).gather_objects(objects, site)
            objects = list(chain.from_iterable(gathered))
        return objects


class Channel(ABC):
    """Messages from one rank to another, in order; each end uses its own method only."""

    @abstractmethod
    def send(self, tensors: Sequence[torch.Tensor], site: str) -> Pending:
        """Start sending; never blocks.

        The tensors must stay unchanged until `wait()`; the Pending keeps them alive.
        """

    @abstractmethod
    def receive(self, like: Sequence[Like], site: str) -> Pending:
        """Allocate buffers and post a receive; `wait()` returns the list of tensors."""

    def close(self) -> None:  # noqa: B027 - most channels hold nothing
        """Give back what the channel holds; nothing may be sent after that."""


class World(ABC):
    """One rank's view of all ranks; `at` is the text of the action being executed, set by the executor."""

    def __init__(self, rank: int, mesh: Mesh, device: torch.device, timeout: float) -> None:
        self.rank, self.mesh, self.device, self.timeout = rank, mesh, device, timeout
        self.coordinate = mesh.coordinate(rank)
        self.replica, self.pipeline_rank = mesh.replica_of(rank), mesh.pipeline_rank_of(rank)
        self.at = "start"
        # While ranks have more to tell each other than the loss.
        self.flags: FlagWatch | None = None
        self._solo = SoloGroup(rank)
        # `group`, once asked for.
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
        """Tell the other ranks that this one failed with `exc`, so that they show it instead of its
        consequences.
        """

    @abstractmethod
    def raise_first_fault(self) -> None:
        """Raise what another rank failed with, if this one knows of it: its numbers are then not to be handed
        out.
        """

    def mark(self) -> None:  # noqa: B027 - most devices cannot be behind their host
        """Say that the device is to come as far as it was told to until now: it is asked whether it did."""

    def close(self) -> None:  # noqa: B027 - most worlds hold nothing
        """Give back what the world holds; no call may follow."""

    def communicators(self) -> tuple[list[Group], dict[int, Channel]]:
        """Return this rank's groups of two ranks or more, and the channels that it sends over, by peer."""
        return list(self.groups_here.values()), dict(self.channels_out)

    def _group_of(self, ranks: tuple[int, ...]) -> Group:
        # Not in the table: nobody announces groups of one rank, which need no communicator.
        if ranks == (self.rank,):
            return self._solo
        return self._find(self.groups_here, ranks, f"group of ranks {ranks}")

    def _find(self, table: dict[Any, Any], key: Any, what: str) -> Any:
        # Made here, only some ranks would make it, and hang: all communicators exist before the first step.
        if key not in table:
            raise InternalError(
                f"rank {self.rank} at {self.at}", f"the {what} was not announced in `Communicators`"
            )
        return table[key]


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one: Triton's kernels and NCCL's streams go there, whatever the caller made
    current.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def fault_site(rank: int, at: str) -> str:
    """Name the site of a RuntimeFault: which rank, and what it was executing."""
    return f"rank {rank} at {at}"


def equal_parts(x: torch.Tensor, dim: int, parts: int, site: str) -> int:
    """Return the lengths of so many equal parts of `x` along `dim`."""
    if x.shape[dim] % parts:
        raise InternalError(site, f"dim {dim} of {list(x.shape)} does not divide into {parts} parts")
    return x.shape[dim] // parts
