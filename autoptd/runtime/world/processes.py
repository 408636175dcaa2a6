"""Run ranks as processes on torch.distributed: NCCL on CUDA, gloo on CPU.

In: the mesh, the `Communicators` of a program, and a default process group, or the environment that torchrun
sets. Out: this process's `World`. All ranks create all groups in one order, including groups they are not in,
since torch may split them from the communicator of the default group (`device_id=`); the names of groups do
not depend on other groups of a process.

    world = DistributedWorld(Mesh(t=2, p=2), communicators, timeout=300.0)
    world.group(("tp",)).all_reduce(x, "h.0.mlp")

| group | for |
|---|---|
| tp | only the collectives of layers, which are on the critical path |
| dp | sums of gradients, counts of labels, the loss |
| up | along pp: sends to higher ranks, and traffic outside the schedule (norms, objects, initial values) |
| down | along pp: sends to lower ranks |
| owners | sums over the pipeline ranks that hold a tied parameter |

NCCL creates a communicator for each communicating pair of a group and runs its operations in order, so the
two directions use different groups.

No wait is longer than `timeout`. On gloo the call then fails. On NCCL calls do not fail: a wait blocks the
stream, and the host at its next synchronization. There a thread watches the device (`device_watch.py`): after
`timeout`, or once another rank has published a fault, it prints the first fault and aborts the groups, so
that the host continues and raises it. NCCL's own watchdog, which ends the process without our message, has a
longer timeout and is the last resort.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from autoptd.compat import default_store, gather_into, new_group, scatter_into
from autoptd.errors import InternalError, PlanError
from autoptd.ir.mesh import Mesh
from autoptd.runtime.world.device_watch import PROBES, WATCHDOG_MARGIN, DeviceWatch, abort_groups
from autoptd.runtime.world.devices import process_device
from autoptd.runtime.world.faults import Call, FaultBoard, WaitingCall, meet
from autoptd.runtime.world.gloo import SendWatcher, end_waits
from autoptd.runtime.world.recorder import describe, set_defaults
from autoptd.runtime.world.rendezvous import (
    count_world,
    default_backend,
    init_default_group,
    leave_default_group,
    own_place,
    stop_telling,
    store_from_env,
    store_of_group,
    use_default_group,
)
from autoptd.runtime.world.world import (
    Channel,
    Communicators,
    Done,
    Group,
    Like,
    Mailbox,
    Pending,
    Then,
    World,
    as_real,
    equal_parts,
    fresh,
    in_place_of,
    parts_first,
    sum_in_order,
)

Tensor = torch.Tensor
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# Seconds to wait for aborts.
ABORT_LIMIT = 10.0
# SMs that a waiting send or receive may occupy on CUDA: by default NCCL uses up to 32 within a node.
P2P_CTAS = 4


class DistributedWorld(World):
    """This process's view of all ranks. Creating it is a collective of all processes."""

    def __init__(
        self,
        mesh: Mesh,
        communicators: Communicators,
        device: str | None = None,
        timeout: float = 300.0,
        backend: str | None = None,
    ) -> None:
        target = process_device(device, backend)
        self.backend = backend or default_backend(target)
        if target.type == "cuda":
            # Before the process group: NCCL binds a communicator to the current device.
            torch.cuda.set_device(target)
        makes_default = not dist.is_initialized()
        self._group_limit = timedelta(seconds=timeout + (WATCHDOG_MARGIN if self.backend in PROBES else 0.0))
        set_defaults()
        rank, size = own_place()
        if size != mesh.size:
            raise PlanError(
                f"world size {size}",
                f"the mesh {mesh} has {mesh.size} ranks",
                f"start {mesh.size} processes (torchrun --nproc-per-node), or change t, p, d",
            )
        super().__init__(rank, mesh, target, timeout)
        base = store_of_group(timeout) if makes_default else default_store()
        self._number = count_world(base, self.rank)
        store = dist.PrefixStore(f"autoptd {self._number}", base)
        self.is_closed = False
        self._handles: list[dist.ProcessGroup] = []
        # Gloo may end a process by SIGABRT without a message, so calls are noted where others can read them.
        is_gloo, stop = self.backend == "gloo", partial(end_waits, self._handles, self.rank)
        self.board = FaultBoard(store, self, notes_calls=is_gloo, end_waits=stop if is_gloo else None)
        self.board.recorder.groups = self._handles
        self._watch: DeviceWatch | None = None
        stop_telling()
        words = store_from_env(timeout) if makes_default else base
        meet(self.board, self, words)
        if makes_default:
            init_default_group(self.backend, base, self._group_limit)
        use_default_group()
        with self.call(Call("the creation of groups", "start")):
            self._connect(communicators)
        if make_probe := PROBES.get(self.backend):
            self._watch = DeviceWatch(
                self.board, self, make_probe, lambda: abort_groups(self._handles, ABORT_LIMIT)
            )

    def report_fault(self, exc: BaseException) -> None:
        self.board.report(exc)

    def raise_first_fault(self) -> None:
        self.board.raise_first()

    def mark(self) -> None:
        if self._watch is not None:
            self._watch.mark()

    def mailbox(self, name: str) -> Mailbox:
        store = dist.PrefixStore(f"autoptd {self._number} {name}", default_store())
        # Over a new connection, for another thread.
        return Mailbox(store.clone())  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the default process group if only this world still uses it; the ranks should have finished together."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._watch is not None:
            self._watch.close()
        self.board.close()
        for channel in self.channels_out.values():
            channel.close()
        leave_default_group()

    def call(self, call: Call) -> WaitingCall:
        """Return a context for a call that others take part in."""
        return WaitingCall(self.board, call)

    def _connect(self, communicators: Communicators) -> None:
        """Create all groups and channels in the order of `communicators`, and let them connect."""
        along_pp = set(self.mesh.groups(self.mesh.stage_axes))
        handles: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for number, ranks in enumerate(communicators.groups(self.mesh)):
            ctas, what = P2P_CTAS if ranks in along_pp else None, describe(self.mesh, communicators, ranks)
            if (handle := self._communicator(f"group {number}", ranks, ctas, what)) is not None:
                handles[ranks] = handle
        down: dist.ProcessGroup | None = None
        for ranks in sorted(along_pp):
            if len(ranks) > 1:
                # Created by all processes; those outside the group get None.
                what = f"{describe(self.mesh, communicators, ranks)}, downwards"
                handle = self._communicator(f"down {ranks[0]}", ranks, P2P_CTAS, what)
                if handle is not None:
                    down = handle
        for ranks, handle in handles.items():
            self.groups_here[ranks] = DistributedGroup(self, handle, ranks)
            # NCCL connects at the first use: use all groups but `down`, which is for pairs, in one order.
            dist.all_reduce(torch.ones(1, device=self.device), group=handle)
        up = handles.get(self.mesh.group(self.rank, self.mesh.stage_axes))
        for source, target in communicators.channels(self.mesh):
            # Connecting a channel blocks both ends: `channels` returns disjoint pairs in rounds.
            if self.rank in (source, target):
                self._open(source, target, up if source < target else down)

    def _open(self, source: int, target: int, handle: dist.ProcessGroup | None) -> None:
        """Create this rank's end of a channel, and send one element through it."""
        if handle is None:
            raise InternalError(f"channel {source} -> {target}", "its ranks are not in the same pipeline")
        # NCCL creates a pair's communicator at its first message: do it now, not during the first step.
        channel, warm = DistributedChannel(self, handle, source, target), torch.ones(1, device=self.device)
        if self.rank == source:
            self.channels_out[target] = channel
            dist.send(warm, target, group=handle)
        else:
            self.channels_in[source] = channel
            dist.recv(warm, source, group=handle)

    def _communicator(
        self, number: str, ranks: tuple[int, ...], max_ctas: int | None, what: str
    ) -> dist.ProcessGroup | None:
        name = f"autoptd {self._number} {number}"
        handle = new_group(name, ranks, self.backend, self._group_limit, max_ctas, what)
        if handle is not None:
            # Aborted together after a fault.
            self._handles.append(handle)
        return handle


class DistributedGroup(Group):
    """A group over one communicator of torch.distributed."""

    def __init__(self, world: DistributedWorld, handle: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
        super().__init__(ranks, ranks.index(world.rank))
        self._world, self.handle = world, handle
        # Number of calls so far; the same on all ranks.
        self._count = 0
        self._reductions = {name: _reduction(op, is_async=False) for name, op in OPS.items()}
        self._async_sum = _reduction(dist.ReduceOp.SUM, is_async=True)

    def all_reduce(self, x: Tensor, site: str, op: str = "sum") -> Tensor:
        return self._all_reduce(fresh(x), site, op)

    def all_reduce_(self, x: Tensor, site: str) -> Tensor:
        if x.is_contiguous():
            return self._all_reduce(x, site)
        return x.copy_(self._all_reduce(x.contiguous(), site))

    def _all_reduce(self, y: Tensor, site: str, op: str = "sum") -> Tensor:
        """Sum a contiguous tensor in place."""
        # The method of the group takes a third of the time of `dist.all_reduce`.
        with self._call("all_reduce", site, y):
            work = self.handle.allreduce([as_real(y)], self._reductions[op])
            # NCCL returns no work here: the sum is queued on the current stream.
            if work is not None:
                work.wait()
        return y

    def all_gather(self, x: Tensor, dim: int, site: str) -> Tensor:
        x = x.detach().contiguous()
        gathered = x.new_empty((self.size, *x.shape))
        with self._call("all_gather", site, x):
            work = gather_into(self.handle, gathered, x, is_async=False)
            if work is not None:
                work.wait()
        return in_place_of(gathered, dim)

    def reduce_scatter(self, x: Tensor, dim: int, site: str) -> Tensor:
        if self._world.backend == "gloo":
            # Not by the public method: a recording would count both.
            return self._scatter_start(x, dim, site).wait()  # type: ignore[no-any-return]
        parts = parts_first(x.detach(), dim, self.size, equal_parts(x, dim, self.size, site))
        mine = torch.empty_like(parts[0])
        with self._call("reduce_scatter", site, mine):
            work = scatter_into(self.handle, mine, parts, is_async=False)
            if work is not None:
                work.wait()
        return mine

    def all_to_all(
        self, parts: Sequence[Tensor], site: str, sizes: Sequence[int] | None = None
    ) -> list[Tensor]:
        if sizes is not None:
            sent = torch.cat([part.detach() for part in parts])
            received = sent.new_empty(sum(sizes))
            # Ranks send different numbers of bytes: these are not compared.
            with self._call("all_to_all", site):
                dist.all_to_all_single(received, sent, sizes, list(map(len, parts)), group=self.handle)
            return list(received.split(list(sizes)))
        sent = torch.stack([part.detach() for part in parts])
        received = torch.empty_like(sent)
        with self._call("all_to_all", site, sent):
            dist.all_to_all_single(received, sent, group=self.handle)
        return list(received)

    def broadcast(self, x: Tensor, source_index: int, site: str) -> Tensor:
        y = fresh(x)
        with self._call("broadcast", site, y):
            dist.broadcast(y, self.ranks[source_index], group=self.handle)
        return y

    def all_reduce_start(self, flat: Tensor, site: str) -> Pending:
        return self._sum_start("all_reduce_start", flat, site)

    def _sum_start(self, kind: str, flat: Tensor, site: str) -> Pending:
        with self._call(kind, site, flat) as call:
            work = self.handle.allreduce([as_real(flat.detach())], self._async_sum)
        return _Works(self._world, [work], flat, call)

    def all_gather_start(self, x: Tensor, dim: int, site: str) -> Pending:
        x = x.detach().contiguous()
        gathered = x.new_empty((self.size, *x.shape))
        with self._call("all_gather_start", site, x) as call:
            work = gather_into(self.handle, gathered, x, is_async=True)
        return Then(
            _Works(self._world, [work], gathered, call, kept=[x]), lambda whole: in_place_of(whole, dim)
        )

    def reduce_scatter_start(
        self, x: Tensor, dim: int, site: str, sum_dtype: torch.dtype | None = None
    ) -> Pending:
        return self._scatter_start(x, dim, site, sum_dtype)

    def _scatter_start(self, x: Tensor, dim: int, site: str, sum_dtype: torch.dtype | None = None) -> Pending:
        parts = parts_first(x.detach(), dim, self.size, equal_parts(x, dim, self.size, site))
        # gloo's own takes as long as an all-reduce; instead each part is sent to the rank that sums it.
        if self._world.backend == "gloo" or sum_dtype is not None:
            received = torch.empty_like(parts)
            with self._call("reduce_scatter_start", site, parts) as call:
                real = as_real(received), as_real(parts)
                work = dist.all_to_all_single(*real, group=self.handle, async_op=True)
            works = _Works(self._world, [work], received, call, kept=[parts])
            return Then(works, partial(sum_in_order, dtype=sum_dtype))
        mine = torch.empty_like(parts[0])
        with self._call("reduce_scatter_start", site, mine) as call:
            work = scatter_into(self.handle, mine, parts, is_async=True)
        return _Works(self._world, [work], mine, call, kept=[parts])

    def all_gather_start_(self, flat: Tensor, site: str) -> Pending:
        width = equal_parts(flat, 0, self.size, site)
        own = flat.detach().narrow(0, self.index * width, width)
        # NCCL gathers in place; with gloo input and output must not overlap.
        own = own.clone() if self._world.backend == "gloo" else own
        with self._call("all_gather_start_", site, own) as call:
            work = gather_into(self.handle, flat.detach(), own, is_async=True)
        return _Works(self._world, [work], flat, call, kept=[own])

    def gather_objects(self, obj: Any, site: str) -> list[Any]:
        objects: list[Any] = [None] * self.size
        with self._call("gather_objects", site):
            dist.all_gather_object(objects, obj, group=self.handle)
        return objects

    def _call(self, kind: str, site: str, x: Tensor | None = None) -> WaitingCall:
        """Return a context for the next call of this group, with `x` as this rank's input."""
        self._count += 1
        return self._world.call(Call(kind, site, self.ranks, self._count, -1 if x is None else x.nbytes))


class DistributedChannel(Channel):
    """One direction between two ranks, over the group of that direction."""

    def __init__(self, world: DistributedWorld, handle: dist.ProcessGroup, source: int, target: int) -> None:
        self._world, self.handle, self._source, self._target = world, handle, source, target
        self._sends = SendWatcher(f"sends of rank {source} to rank {target}")

    def send(self, tensors: Sequence[Tensor], site: str) -> Pending:
        kept = [x.detach().contiguous() for x in tensors]
        if not kept:
            return Done()
        with self._world.call(Call("send", site)) as call:
            works: list[Any] = [dist.isend(x, self._target, group=self.handle) for x in kept]
        if self._world.backend == "gloo":
            # Gloo's work does not report its completion: see `gloo.py`.
            works, kept = [self._sends.add(works, kept)], []
        return _Works(self._world, works, None, call, kept)

    def receive(self, like: Sequence[Like], site: str) -> Pending:
        buffers = [torch.empty(tuple(shape), dtype=dtype, device=self._world.device) for shape, dtype in like]
        if not buffers:
            return Done(buffers)
        with self._world.call(Call("receive", site)) as call:
            works = [dist.irecv(x, self._source, group=self.handle) for x in buffers]
        return _Works(self._world, works, buffers, call)

    def close(self) -> None:
        self._sends.close()


class _Works(Pending):
    """Pending operations of torch.distributed; `kept` keeps their inputs alive until they complete."""

    def __init__(
        self,
        world: DistributedWorld,
        works: Sequence[Any],
        result: Any,
        call: Call,
        kept: Sequence[Tensor] = (),
    ) -> None:
        self._world, self._works, self._result, self._kept = world, list(works), result, list(kept)
        self._call = call

    def wait(self) -> Any:
        if self._works:
            # If the wait fails because of another rank, that rank's fault is raised.
            with self._world.call(self._call):
                for work in self._works:
                    work.wait()
            self._works, self._kept = [], []
        return self._result

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _reduction(op: Any, *, is_async: bool) -> Any:
    options = dist.AllreduceOptions()
    # On CUDA this chooses between NCCL's stream and the current one.
    options.reduceOp, options.asyncOp = op, is_async
    return options
