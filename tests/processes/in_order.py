"""A stand-in for NCCL on the CPU: a process group whose operations run one after the other, in the order of their issue.

In: nothing; `register()` makes the backend "in_order" known to torch. What it shares with NCCL, and gloo does not:

- a synchronous collective hands out no Work;
- a device is one queue: an operation begins when all that this process issued before it, on whatever group, have ended.
  NCCL may do so (`NCCL_LAUNCH_ORDER_IMPLICIT`, or no room on the device for the kernels of a second communicator). What two
  processes issue in orders that do not fit together waits for ever: here until the timeout.

A send ends when it is received, as without buffers.
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

    def __init__(self, start: Start) -> None:
        self._start, self._ended = start, threading.Event()
        self._fault: BaseException | None = None

    def run(self) -> None:
        try:
            self._start().wait()
        except BaseException as exc:
            self._fault = exc
        self._ended.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._ended.wait()
        if self._fault is not None:
            raise self._fault
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()


class Device:
    """The one queue of this process."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Issued] = SimpleQueue()
        threading.Thread(target=self._serve, name="device", daemon=True).start()

    def issue(self, start: Start) -> Issued:
        issued = Issued(start)
        self._queue.put(issued)
        return issued

    def _serve(self) -> None:
        while True:
            self._queue.get().run()


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

    def getBackendName(self) -> str:
        return "in_order"

    @property
    def group_name(self) -> str:
        return c10d._world.pg_names[self]


def register() -> None:
    """Make the backend known, with a queue of this process."""
    device = Device()

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> InOrderGroup:
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)  # type: ignore[call-arg, arg-type]
        return InOrderGroup(device, gloo, rank, size)

    if not hasattr(dist.Backend, "IN_ORDER"):
        dist.Backend.register_backend("in_order", make, devices=["cpu"])
