"""Measure this machine, and write its cluster file: products, memory, collectives and messages.

In: the number of ranks of one node. Out: a record for `cluster.read_cluster`, or a TOML file. GPUs are measured with
bf16 products and NCCL, CPUs with float32, one thread per rank, and gloo. It takes half a minute.

    autoptd measure mine.toml --ranks 2
    autoptd.predict(shape, "mine.toml", ...)

The fitted formulas: a product takes `2 m n k (1 + ramp / k) / rate` seconds, a collective `hops * latency + bytes on
the wire / bandwidth`; each has two numbers, fitted by least squares of relative errors. The network between nodes
cannot be measured on one node: it is a copy of the links in the node, with a remark.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autoptd.compat import gather_into
from autoptd.errors import PlanError

Record = dict[str, Any]
# Calls are timed together for at least this long, so that the wait at their end does not matter and a GPU draws the
# power of real work.
MIN_SECONDS = 0.05
RUNS = 5
# Bytes of a collective's or message's buffer.
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
# Rows and columns of the measured products.
SIDES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
# Names in software.toml.
SOFTWARE = {"cpu": "autoptd-cpu", "cuda": "autoptd"}
# The contracted dim k of the measured products.
DEPTHS = {"cpu": (32, 128, 512, 1024), "cuda": (128, 512, 2048, 8192)}


def measure_cluster(ranks: int = 2) -> Record:
    """Measure this machine; `ranks` processes take part in collectives (on GPUs, one each)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks < 1:
        fact = "at least one rank must be measured"
        raise PlanError(f"ranks={ranks}", fact, "1 rank, or 2 or more to measure links too")
    if device == "cuda" and ranks > torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise PlanError(f"ranks={ranks}", f"this machine has {count} GPUs", f"1 to {count}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        gpu = measure_compute(device)
    finally:
        torch.set_num_threads(threads)
    gpu["memory_bytes"] = memory_bytes(device, ranks)
    link = (
        measure_links(device, ranks) if ranks > 1 else {"bandwidth": gpu["memory_bandwidth"], "fraction": 1.0}
    )
    return {
        "source": f"measured on {torch.cuda.get_device_name() if device == 'cuda' else 'a CPU'} with {ranks} ranks",
        "gpus_per_node": ranks,
        "software": SOFTWARE[device],
        "gpu": gpu,
        "fast": link,
        "network": dict(link),
    }


def measure_compute(device: str) -> Record:
    """Measure products, copies and the launch of a small operator, on one device with one thread."""
    rate, ramp = fit_products(time_products(device, torch.bfloat16 if device == "cuda" else torch.float32))
    rate_32 = rate if device == "cpu" else fit_products(time_products(device, torch.float32))[0]
    # Written: a CPU would read unwritten memory from a single cached page of zeros.
    large = torch.randn(1 << (24 if device == "cpu" else 28), device=device)
    other, small = torch.empty_like(large), torch.zeros(8, device=device)
    copied = 2 * large.numel() * large.element_size() / seconds_of(lambda: other.copy_(large), device)
    return {
        "matrix_flops": rate,
        "float32_flops": rate_32,
        "memory_bandwidth": copied,
        "matrix_fraction": 1.0,
        "memory_fraction": 1.0,
        "ramp": ramp,
        "kernel_seconds": seconds_of(lambda: small.add_(1.0), device),
    }


def time_products(device: str, dtype: torch.dtype) -> list[tuple[int, int, float]]:
    """Time products [side, k] x [k, side]; return (multiply-adds, k, seconds) of each.

    Factors are random: ones draw less power.
    """
    found = []
    for side in SIDES[device]:
        for k in DEPTHS[device]:
            a, b = (torch.randn(shape, device=device, dtype=dtype) for shape in ((side, k), (k, side)))
            found.append((side * side * k, k, seconds_of(lambda a=a, b=b: a @ b, device)))  # type: ignore[misc]
    return found


def fit_products(timed: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """Fit the FLOP/s of an infinite product, and the k that reaches half of them (0 if k makes no difference)."""
    per_flop = np.array([seconds / (2 * count) for count, _, seconds in timed])
    slope, base = fit_line(np.array([1 / k for _, k, _ in timed]), per_flop)
    if base <= 0 or slope <= 0:
        return float(1 / np.median(per_flop)), 0.0
    return float(1 / base), float(slope / base)


def fit_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Fit (slope, base) of y = slope * x + base by least squares of relative errors."""
    columns = np.stack([x, np.ones_like(x)], axis=1) / y[:, None]
    slope, base = np.linalg.lstsq(columns, np.ones_like(y), rcond=None)[0]
    return float(slope), float(base)


def measure_links(device: str, ranks: int) -> Record:
    """Time all-gathers and messages of `ranks` processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(ranks, device, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        gathers, messages = torch.load(Path(folder) / "times.pt")
    hops = ranks - 1
    # A ring over n ranks sends (n - 1) / n of the result, in n - 1 hops.
    per_byte, start = fit_line(np.array(SIZES) * hops / ranks, np.array(gathers))
    _, message = fit_line(np.array(SIZES, dtype=float), np.array(messages))
    return {
        "bandwidth": 1 / max(per_byte, 1e-15),
        "fraction": 1.0,
        "latency": max(start, 0.0) / hops,
        "message": max(message, 0.0),
        "small_latency": max(start, 0.0) / hops,
    }


def _rank(rank: int, ranks: int, device: str, folder: str) -> None:
    """Run one process; rank 0 writes the times to a file."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
    )
    gathers, messages = [], []

    def median(call: Callable[[], Any]) -> float:
        return float(np.median(repeated(call, device, dist.barrier)))

    for nbytes in SIZES:
        part = torch.zeros(nbytes // 4 // ranks, device=device)
        parts, whole = part.new_empty(ranks, len(part)), torch.zeros(nbytes // 4, device=device)
        gathers.append(median(lambda part=part, parts=parts: _gather(parts, part)))  # type: ignore[misc]
        messages.append(median(lambda whole=whole: _bounce(rank, whole)) / 2)  # type: ignore[misc]
    if rank == 0:
        torch.save((gathers, messages), Path(folder) / "times.pt")
    dist.destroy_process_group()


def _gather(whole: torch.Tensor, part: torch.Tensor) -> None:
    """Run an all-gather as the runtime does."""
    work = gather_into(dist.group.WORLD, whole, part, is_async=False)  # type: ignore[arg-type]
    if work is not None:
        work.wait()


def _bounce(rank: int, value: torch.Tensor) -> None:
    """Send a message from rank 0 to 1 and back."""
    if rank == 0:
        dist.send(value, 1)
        dist.recv(value, 1)
    elif rank == 1:
        dist.recv(value, 0)
        dist.send(value, 0)


def repeated(call: Callable[[], Any], device: str, meet: Callable[[], Any], times: int = 10) -> list[float]:
    """Time calls that several ranks make equally often; they `meet` before each of them."""
    found = []
    for _ in range(times + 2):
        meet()
        _sync(device)
        start = time.perf_counter()
        call()
        _sync(device)
        found.append(time.perf_counter() - start)
    # The first two warm up.
    return found[2:]


def seconds_of(call: Callable[[], Any], device: str) -> float:
    """Return the seconds of a call: the fastest of several runs of many calls, as other work only adds."""

    def run(times: int) -> float:
        _sync(device)
        start = time.perf_counter()
        for _ in range(times):
            call()
        _sync(device)
        return time.perf_counter() - start

    run(2)
    times = 1
    while (took := run(times)) < MIN_SECONDS:
        times = max(2 * times, int(1.2 * times * MIN_SECONDS / max(took, 1e-7)))
    return min(run(times) for _ in range(RUNS)) / times


def _sync(device: str) -> None:
    """Wait for the kernels in flight, which run asynchronously."""
    if device == "cuda":
        torch.cuda.synchronize()


def memory_bytes(device: str, ranks: int) -> float:
    """Return the memory of a rank: a GPU's, or a share of the machine's."""
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks)


def to_toml(record: Record, remark: str = "") -> str:
    """Write a record of strings, numbers and tables of them as TOML."""
    tables = {name: value for name, value in record.items() if isinstance(value, dict)}
    lines = [f"# {remark}"] if remark else []
    lines += [f"{name} = {_value(value)}" for name, value in record.items() if name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value) if isinstance(value, int) else f"{value:.3e}"


REMARK = "[network] is a copy of [fast]: from one node, the links between nodes cannot be measured."
