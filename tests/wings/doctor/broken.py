"""Channels and groups that are wrong or slow, in a world of threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from autoptd.ir.mesh import Mesh, parts_of
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Channel, Communicators, Group, Like, Pending
from autoptd.wings.doctor.report import MeshReport
from autoptd.wings.doctor.run import examine, links_of

COUNTS = (1, 1021)


def spoiled(x: torch.Tensor) -> torch.Tensor:
    """Return a copy with a wrong last element."""
    y = x.clone()
    last = y.flatten()[-1:]
    last.copy_(~last if y.dtype is torch.bool else last + 3)
    return y


class Instead(Group, Channel):
    """Delegates everything that a subclass does not override."""

    def __init__(self, right: Any) -> None:
        self._right = right
        for name in ("ranks", "index", "size"):
            if hasattr(right, name):
                setattr(self, name, getattr(right, name))

    def all_reduce(self, x: torch.Tensor, site: str, op: str = "sum") -> torch.Tensor:
        return self._right.all_reduce(x, site, op)

    def all_reduce_(self, *args: Any, **keys: Any) -> Any:
        return self._right.all_reduce_(*args, **keys)

    def all_gather(self, *args: Any, **keys: Any) -> Any:
        return self._right.all_gather(*args, **keys)

    def reduce_scatter(self, *args: Any, **keys: Any) -> Any:
        return self._right.reduce_scatter(*args, **keys)

    def all_to_all(self, *args: Any, **keys: Any) -> Any:
        return self._right.all_to_all(*args, **keys)

    def broadcast(self, *args: Any, **keys: Any) -> Any:
        return self._right.broadcast(*args, **keys)

    def all_reduce_start(self, *args: Any, **keys: Any) -> Any:
        return self._right.all_reduce_start(*args, **keys)

    def all_gather_start(self, *args: Any, **keys: Any) -> Any:
        return self._right.all_gather_start(*args, **keys)

    def all_gather_start_(self, *args: Any, **keys: Any) -> Any:
        return self._right.all_gather_start_(*args, **keys)

    def reduce_scatter_start(self, *args: Any, **keys: Any) -> Any:
        return self._right.reduce_scatter_start(*args, **keys)

    def gather_objects(self, obj: Any, site: str) -> list[Any]:
        return self._right.gather_objects(obj, site)

    def send(self, tensors: Sequence[torch.Tensor], site: str) -> Pending:
        return self._right.send(tensors, site)

    def receive(self, like: Sequence[Like], site: str) -> Pending:
        return self._right.receive(like, site)


class WrongChannel(Instead):
    """Spoils the last tensor of a message in `dtype`."""

    dtype = torch.bfloat16

    def send(self, tensors: Sequence[torch.Tensor], site: str) -> Pending:
        return self._right.send([spoiled(x) if x.dtype is self.dtype else x for x in tensors], site)


class SlowChannel(Instead):
    """Delays a large message."""

    def send(self, tensors: Sequence[torch.Tensor], site: str) -> Pending:
        if sum(x.nbytes for x in tensors) > 1 << 16:
            time.sleep(0.1)
        return self._right.send(tensors, site)


class WrongSum(Instead):
    """Hands in wrong numbers in float32."""

    def all_reduce(self, x: torch.Tensor, site: str, op: str = "sum") -> torch.Tensor:
        is_checked = x.dtype is torch.float32 and x.numel() > 1
        return self._right.all_reduce(x + x.sign() if is_checked else x, site, op)


class WrongGather(Instead):
    """Gets the part of rank 0 of the group wrong."""

    def all_gather(self, x: torch.Tensor, dim: int, site: str) -> torch.Tensor:
        whole = self._right.all_gather(x, dim, site).clone()
        first = whole.narrow(dim, 0, x.shape[dim])
        first.copy_(spoiled(first.contiguous()))
        return whole


class WrongScatter(Instead):
    """Gets a wrong sum from all."""

    def reduce_scatter(self, x: torch.Tensor, dim: int, site: str) -> torch.Tensor:
        return self._right.reduce_scatter(x, dim, site) + 1


class SlowGroup(Instead):
    """Is late in every collective."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
            time.sleep(0.03)
        return super().__getattribute__(name)


def examined(
    mesh: Mesh,
    groups: dict[tuple[int, str], type[Instead]] | None = None,
    channels: dict[tuple[int, int], type[Instead]] | None = None,
    sizes: Sequence[int] = (),
    counts: Sequence[int] = COUNTS,
) -> MeshReport:
    """Return what doctor finds on threads; `groups` are by rank and axis, `channels` by source and target."""
    links = links_of(mesh.p)
    shared = ThreadWorld(mesh, Communicators(links=links), timeout=60.0)
    for (rank, axis), kind in (groups or {}).items():
        ranks = mesh.group(rank, parts_of(axis))
        shared.worlds[rank].groups_here[ranks] = kind(shared.worlds[rank].groups_here[ranks])
    for (source, target), kind in (channels or {}).items():
        shared.worlds[source].channels_out[target] = kind(shared.worlds[source].channels_out[target])
    hosts = [0] * mesh.size
    reports = run_ranks(shared, lambda world: examine(world, links, hosts, counts, sizes))
    assert all(one == reports[0] for one in reports), "ranks found different things"
    return reports[0]
