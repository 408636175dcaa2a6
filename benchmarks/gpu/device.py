"""The device that is measured: a CUDA device, or, so that the same code runs everywhere, this machine's processor.

Out: a `Device`, whose few methods are all that differs between the two. On a CPU times are those of the clock, "bytes
allocated" are those of live tensors, a second stream is no stream at all, and a captured graph is the function
itself.

    device = find_device()
    device.microseconds(lambda: a @ b)            # median
    with device.side_stream(): ...                # beside what runs meanwhile
"""

from __future__ import annotations

import gc
import re
import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from autoptd.compat import TorchDispatchMode
from benchmarks.lib.memory import peak_bytes

Run = Callable[[], object]
Site = tuple[str, str, int, str]  # file, function, line, text
NO_KERNEL = ("Memcpy", "Memset", "ProfilerStep", "Optimizer.")  # what is told of the device besides kernels
WARNED = "called a synchronizing CUDA operation"
WAITS = re.compile(r"aten\.(_local_scalar_dense|nonzero|equal|masked_select|unique\w*|_unique2)\.")


class Device:
    """The processor of this machine; `CudaDevice` is the real thing. `name` is what torch calls it."""

    name, is_cuda = "cpu", False

    def sync(self) -> None:
        """Wait until all that was started is done."""

    def microseconds(self, run: Run, seconds: float = 0.1) -> float:
        """The median time of a call, of as many as fit in `seconds`; at least three, after one that does not count."""
        times: list[float] = []
        run()
        begin = time.perf_counter()
        while len(times) < 3 or time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return 1e6 * statistics.median(times)

    def host_microseconds(self, run: Run, calls: int = 5) -> float:
        """How long a call keeps the host, the device's queue being empty as it begins: median."""
        times = []
        for _ in range(calls):
            self.sync()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        self.sync()
        return 1e6 * statistics.median(times)

    def allocated(self) -> int:
        """Bytes of all tensors that are alive."""
        gc.collect()
        with warnings.catch_warnings():  # looking at some objects of torch's warns
            warnings.simplefilter("ignore")
            storages = {
                one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in _live_tensors()
            }
        return sum(storages.values())

    def peak(self, run: Run) -> int:
        """Most bytes that a call allocates at once beyond those before it."""
        self.sync()
        found = peak_bytes(run)
        self.sync()
        return found

    def free(self) -> float:
        """Bytes that can still be allocated; no bound on a CPU."""
        return float("inf")

    def launches(self, run: Run) -> int:
        """Kernels that a call launches; on a CPU the operators of torch that it calls."""
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            run()
        return sum(one.name.startswith("aten::") for one in prof.events() or ())

    def waits(self, run: Run) -> dict[Site, int]:
        """Where, and how often, the host waits for the device; on a CPU: where it would, as far as operators tell."""
        found: Counter[Site] = Counter()
        with _Waiting(found):
            run()
        return dict(found)

    def side_stream(self, is_urgent: bool = False) -> AbstractContextManager[None]:
        """What is started inside runs beside the rest, after what was started before."""
        return nullcontext()

    def join(self) -> None:
        """Let what comes wait for the side stream."""

    def capture(self, run: Run) -> Run:
        """A CUDA graph of the call, which was made three times before."""
        return run

    def release(self) -> None:
        """Give memory back that nobody uses."""
        gc.collect()


class CudaDevice(Device):
    """The current CUDA device."""

    is_cuda = True

    def __init__(self) -> None:
        self.name = f"cuda:{torch.cuda.current_device()}"
        self._streams = {urgent: torch.cuda.Stream(priority=-1 if urgent else 0) for urgent in (False, True)}

    def sync(self) -> None:
        torch.cuda.synchronize()

    def microseconds(self, run: Run, seconds: float = 0.1) -> float:
        from triton.testing import do_bench

        return 1e3 * float(do_bench(run, warmup=25, rep=max(20, int(1e3 * seconds)), return_mode="median"))

    def allocated(self) -> int:
        gc.collect()
        self.sync()
        return torch.cuda.memory_allocated()

    def free(self) -> float:
        self.release()
        return float(torch.cuda.mem_get_info()[0])

    def launches(self, run: Run) -> int:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            run()
            self.sync()
        on_device = [one for one in prof.events() or () if one.device_type == DeviceType.CUDA]
        return sum(
            not getattr(one, "is_user_annotation", False) and not one.name.startswith(NO_KERNEL)
            for one in on_device
        )

    def waits(self, run: Run) -> dict[Site, int]:
        """As torch's sync debug mode warns of them; it does not know those inside of torch.distributed."""
        found: Counter[Site] = Counter()

        def note(message: Any, *_: Any, **__: Any) -> None:
            if WARNED in str(message):
                found[_site(str(message))] += 1

        self.sync()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return dict(found)

    @contextmanager
    def side_stream(self, is_urgent: bool = False) -> Iterator[None]:
        side = self._streams[is_urgent]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield

    def join(self) -> None:
        for side in self._streams.values():
            torch.cuda.current_stream().wait_stream(side)

    def capture(self, run: Run) -> Run:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def find_device() -> Device:
    return CudaDevice() if torch.cuda.is_available() else Device()


def ceilings(device: Device) -> dict[str, float]:
    """What the device does at this minute."""
    return {"GEMM FLOP/s": gemm_rate(device), "copy bytes/s": copy_rate(device)}


def gemm_rate(device: Device) -> float:
    """FLOP/s of a plain 8192^3 product in bf16, of random numbers: zeros run faster."""
    side = 8192 if device.is_cuda else 64
    a, b = (torch.randn(side, side, device=device.name).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    return (
        2 * side**3 / (1e-6 * device.microseconds(lambda: torch.mm(a, b, out=product), 0.2 * device.is_cuda))
    )


def copy_rate(device: Device) -> float:
    """Bytes/s of a large copy, those read and those written."""
    x = torch.randn((1 << 29) if device.is_cuda else (1 << 15), device=device.name).bfloat16()
    y = torch.empty_like(x)
    return 2 * x.nbytes / (1e-6 * device.microseconds(lambda: y.copy_(x), 0.1 * device.is_cuda))


def _live_tensors() -> list[torch.Tensor]:
    return [
        one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter) and not one.is_meta
    ]


class _Waiting(TorchDispatchMode):
    """Notes the operators whose result the host must wait for."""

    def __init__(self, found: Counter[Site]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if WAITS.match(f"{func}."):
            self.found[_site(str(func))] += 1
        return func(*args, **(kwargs or {}))


def _site(what: str) -> Site:
    """The innermost frame that is no torch code, and no code of this file."""
    for frame in reversed(traceback.extract_stack()):
        is_theirs = "/torch/" in frame.filename or frame.filename in (__file__, warnings.__file__)
        if not is_theirs and not frame.filename.startswith("<frozen"):
            return frame.filename, frame.name, frame.lineno or 0, (frame.line or what).strip()
    return "?", "?", 0, what
