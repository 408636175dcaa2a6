"""A stand-in for NCCL on the CPU: a process group whose operations run one after the other, in the order of their issue.

In: nothing; `register()` makes the backend "in_order" known to torch. What it shares with NCCL, and gloo does not:

- a synchronous collective hands out no Work;
- a device is one queue: an operation begins when all that this process issued before it, on whatever group, have ended.
  NCCL may do so (`NCCL_LAUNCH_ORDER_IMPLICIT`, or no room on the device for the kernels of a second communicator). What two
  processes issue in orders that do not fit together waits for ever: here until the timeout.

A send ends when it is received, as without buffers.

With `patience` it shares two more: the host goes on though an operation has not ended (after so many seconds, so that numbers
are right where nothing hangs), and an operation does not fail, whatever becomes of the peers, but hangs until `abort`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

Start = Callable[[], Any]  # starts the operation on gloo and returns its Work


class Issued:
    """An operation in the queue, asked like a Work of torch.distributed."""

    def __init__(self, start: Start, device: Device) -> None:
        self._start, self._device = start, device
        self._ended = threading.Event()
        self._fault: BaseException | None = None

    def run(self) -> None:
        if self._ended.is_set():
            return
        try:
            self._start().wait()
        except BaseException as exc:
            if self._device.patience is not None:
                self._ended.wait()
                return
            self._fault = exc
        self._ended.set()

    def end(self) -> None:
        self._ended.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._ended.wait(self._device.patience):
            self._device.patience = 0.0  # what is behind it will not end any sooner
        if self._fault is not None:
            raise self._fault
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()


class Device:
    """The one queue of this process."""

    def __init__(self, patience: float | None = None) -> None:
        self.patience, self.is_aborted = patience, False
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Issued] = SimpleQueue()
        self._all: list[Issued] = []
        threading.Thread(target=self._serve, name="device", daemon=True).start()

    def issue(self, start: Start) -> Issued:
        with self._lock:
            if self.is_aborted:
                raise RuntimeError("communicator was aborted")
            issued = Issued(start, self)
            self._all = [one for one in self._all if not one.is_completed()] + [issued]
            self._queue.put(issued)
            return issued

    def synchronize(self) -> None:
        """Wait as the host does for a number."""
        for one in self._all:
            one._ended.wait()

    def abort(self) -> None:
        with self._lock:
            self.is_aborted = True
            for one in self._all:
                one.end()

    def _serve(self) -> None:
        while True:
            self._queue.get().run()


class InOrderProbe:
    """A point in the queue: a stand-in for an event."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self._issued = self._device.issue(lambda: self)

    def wait(self) -> None:
        """What the queue does when it comes here."""

    def is_done(self) -> bool:
        return self._issued.is_completed()


class InOrderGroup(dist.ProcessGroup):
    """What `runtime/world/processes.py` calls, over a group of gloo's."""

    def __init__(self, device: Device, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._device, self._gloo = device, gloo

    def _issue(self, options: Any, start: Start) -> Issued | None:
        issued = self._device.issue(start)
        if options.asyncOp:
            return issued
        issued.wait()  # a stream of NCCL's would: there the host goes on
        return None

    def allreduce(self, tensors: Any, opts: Any) -> Issued | None:
        return self._issue(opts, lambda: self._gloo.allreduce(tensors, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Issued | None:
        return self._issue(opts, lambda: self._gloo.allgather(outputs, inputs, opts))

    def _allgather_base(self, output: Any, input: Any, opts: Any) -> Issued | None:
        return self._issue(opts, lambda: self._gloo._allgather_base(output, input, opts))

    all_gather_single = _allgather_base  # its name in later releases

    def broadcast(self, tensors: Any, opts: Any) -> Issued | None:
        return self._issue(opts, lambda: self._gloo.broadcast(tensors, opts))

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any) -> Issued | None:
        def start() -> Any:
            whole = input.clone()
            self._gloo.allreduce([whole], dist.AllreduceOptions()).wait()
            output.copy_(whole.view(self.size(), -1)[self.rank()])
            return self._gloo.barrier(dist.BarrierOptions())

        return self._issue(opts, start)

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(self, output: Any, input: Any, outs: Any, ins: Any, opts: Any) -> Issued | None:
        return self._issue(opts, lambda: self._gloo.alltoall_base(output, input, outs, ins, opts))

    all_to_all_single = alltoall_base  # its name in later releases

    def send(self, tensors: Any, target: int, tag: int) -> Issued:
        return self._device.issue(lambda: self._gloo.send(tensors, target, tag))

    def recv(self, tensors: Any, source: int, tag: int) -> Issued:
        return self._device.issue(lambda: self._gloo.recv(tensors, source, tag))

    def abort(self) -> None:
        self._device.abort()

    def getBackendName(self) -> str:
        return "in_order"

    @property
    def group_name(self) -> str:
        return c10d._world.pg_names[self]


def register(patience: float | None = None) -> Device:
    """Make the backend known, with a queue of this process."""
    device = Device(patience)

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> InOrderGroup:
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)  # type: ignore[call-arg, arg-type]
        return InOrderGroup(device, gloo, rank, size)

    if not hasattr(dist.Backend, "IN_ORDER"):
        dist.Backend.register_backend("in_order", make, devices=["cpu"])
    return device
