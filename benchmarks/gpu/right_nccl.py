"""Section 1, of torch.distributed with one process: NCCL on CUDA, gloo on a CPU.

What one GPU can show of many: groups of one, their calls, asynchronous ones and their streams, sends to itself in a
batch, calls within a captured graph, what ten communicators hold; a model trained as a process of a world of one; and
that what comes too late ends the process, and says so. Each check is a process of its own, as a default group is for
life, and a broken one for good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.device import Device, find_device
from benchmarks.gpu.rows import Found, Row, Setting

TIMEOUT = 5.0  # seconds that a call may take
SAME = 1e-5  # of losses of a float32 model, some of whose kernels on CUDA add up in any order
LATE = 90.0  # seconds that one takes which is too late
DEAD_AFTER = 75.0  # seconds by which its process must have ended


def start(timeout: float = 60.0) -> Device:
    """A default group of one process."""
    device = find_device()
    store = dist.TCPStore("127.0.0.1", 0, 1, True)  # of a free port, as a launcher makes it
    backend = "nccl" if device.is_cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=timeout))
    return device


def collectives() -> Found:
    """Every collective of a group of one hands back what it was given, synchronous and not, on this stream and on another."""
    device = start()
    from autoptd.compat import new_group
    from autoptd.ir.mesh import Mesh
    from autoptd.runtime.world.processes import DistributedGroup, DistributedWorld
    from autoptd.runtime.world.world import Communicators

    world = DistributedWorld(Mesh(), Communicators(), device=device.name, timeout=30.0)
    handle = new_group("a group of one", (0,), dist.get_backend(), timedelta(seconds=30), 4, "of one")
    assert handle is not None
    group = DistributedGroup(world, handle, (0,))
    x = torch.randn(1 << 10, device=device.name)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.all_reduce(x, "here"),
        "all_gather": lambda: group.all_gather(x, 0, "here"),
        "reduce_scatter": lambda: group.reduce_scatter(x, 0, "here"),
        "all_to_all": lambda: group.all_to_all([x], "here"),
        "broadcast": lambda: group.broadcast(x, 0, "here"),
        "all_reduce_start": lambda: group.all_reduce_start(x.clone(), "here").wait(),
        "all_gather_start": lambda: group.all_gather_start(x, 0, "here").wait(),
        "reduce_scatter_start": lambda: group.reduce_scatter_start(x, 0, "here").wait(),
    }
    wrong = [name for name, call in calls.items() if not torch.equal(_first(call()), x)]
    with device.side_stream(is_urgent=True):
        wrong += [
            f"{name} on another stream" for name, call in calls.items() if not torch.equal(_first(call()), x)
        ]
    device.join()
    times = {name: device.host_microseconds(call, 21) for name, call in calls.items()}
    device.sync()
    return {"ok": not wrong, "wrong": wrong, "host, us": times}


def _first(found: Any) -> torch.Tensor:
    return found[0] if isinstance(found, (list, tuple)) else found


def memory() -> Found:
    """What a communicator holds on the device: ten groups of one."""
    device = start()
    from autoptd.compat import new_group

    x = torch.ones(1, device=device.name)
    dist.all_reduce(x)
    before, count = device.free(), 10
    for number in range(count):
        handle = new_group(f"group {number}", (0,), dist.get_backend(), timedelta(seconds=30), 4, "of one")
        dist.all_reduce(x, group=handle)
    device.sync()
    held = (before - device.free()) / count if device.is_cuda else 0.0
    return {"ok": bool(x.item() == 1.0), "bytes of a group": held}


def sends() -> Found:
    """A batch of a send and a receive of the one process to itself; gloo knows no such thing."""
    device = start()
    if not device.is_cuda:
        return {"ok": True, "why": "not run: gloo sends nothing to itself"}
    x, y = torch.randn(1 << 20, device=device.name), torch.empty(1 << 20, device=device.name)
    for _ in range(3):
        y.zero_()
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, y, 0), dist.P2POp(dist.isend, x, 0)])
        for work in works:
            work.wait()
        if not torch.equal(x, y):
            return {"ok": False, "why": "what arrived is not what was sent"}
    return {"ok": True, "messages": 3}


def captured() -> Found:
    """A collective within a CUDA graph: what a captured stage would need."""
    device = start()
    x, out = torch.randn(1 << 10, device=device.name), torch.empty(1 << 10, device=device.name)

    def reduce() -> None:
        out.copy_(x)
        dist.all_reduce(out)

    replay = device.capture(reduce)
    x.fill_(3.0)
    replay()
    device.sync()
    return {"ok": bool((out == 3.0).all()), "is a graph": device.is_cuda}


def trained() -> Found:
    """A model as the only process of its world trains as with its rank in a thread; a NaN is one clear error."""
    device = start()
    import autoptd
    from benchmarks.gpu.models import NANOGPT, batch, build, toy
    from benchmarks.gpu.right_steps import replace

    shape = replace(toy(NANOGPT), b=4)
    model = build(shape, device.name, torch.float32)
    args, _ = batch(shape, device.name)
    losses = {}
    for backend in (dist.get_backend(), "local"):
        pm = autoptd.parallelize(
            model, backend=backend, example_inputs=args, num_microbatches=2, device=device.name
        )
        optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-2)
        losses[backend] = []
        for _ in range(4):
            losses[backend].append(pm.step(*args).item())
            optimizer.step()
            optimizer.zero_grad()
        if backend != "local":
            with torch.no_grad():
                next(iter(pm.parameters())).fill_(float("nan"))
            told = _error_of(lambda: [pm.step(*args) for _ in range(2)])  # noqa: B023 - called here; may be a step late
        pm.close()
    first, second = losses.values()
    ok = max(abs(a - b) for a, b in zip(first, second, strict=True)) <= SAME and "NaN" in told
    return {"ok": ok, "losses": first, "as a thread": second, "a NaN says": told[:200]}


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return "no error"


def comes_late() -> Found:
    """A sum behind a kernel that runs for much longer than the timeout: the process must end by itself, and say why."""
    device = start(timeout=TIMEOUT)
    x = torch.ones(4, device=device.name)
    if device.is_cuda:
        dist.all_reduce(x)  # connects
        device.sync()
        torch.cuda._sleep(int(2e9 * LATE))  # cycles, of a clock of about 2 GHz
        dist.all_reduce(x)
    else:
        dist.HashStore().wait(["never set"], timedelta(seconds=1.0))
    device.sync()
    return {"ok": False, "why": "it returned"}


CHECKS: dict[str, Callable[[], Found]] = {
    one.__name__: one for one in (collectives, memory, sends, captured, trained, comes_late)
}


def in_process(name: str, setting: Setting) -> Iterator[Found]:
    """Run one of the checks in a process of its own."""
    done = _run(name, setting)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        yield {
            "ok": False,
            "why": f"its process ended with {done.returncode}",
            "tail": (done.stdout + done.stderr)[-3000:],
        }
    else:
        yield json.loads(lines[-1])


def ends(setting: Setting) -> Iterator[Found]:
    """`comes_late` must fail, soon, and with words."""
    start_of_it = time.time()
    try:
        done = _run("comes_late", setting)
    except subprocess.TimeoutExpired as exc:
        told = [one.decode() if isinstance(one, bytes) else one or "" for one in (exc.stdout, exc.stderr)]
        yield {"ok": False, "why": f"hung for {DEAD_AFTER:.0f} s", "tail": "".join(told)[-3000:]}
        return
    seconds = time.time() - start_of_it
    words = [line for line in done.stderr.splitlines() if "imed out" in line or "imeout" in line]
    ok = done.returncode != 0 and bool(words)
    yield {
        "ok": ok,
        "status": done.returncode,
        "ended after, s": round(seconds, 1),
        "says": "\n".join(words)[:600],
    }


def _run(name: str, setting: Setting) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.right_nccl", name]
    limit = max(1.0, min(DEAD_AFTER, setting.left()))
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)


ROWS = [
    Row("NCCL: groups of one", partial(in_process, "collectives"), seconds=40, gigabytes=2),
    Row(
        "NCCL: a model as the only process",
        partial(in_process, "trained"),
        seconds=50,
        gigabytes=2,
        is_short=False,
    ),
    Row(
        "NCCL: sends to itself in a batch",
        partial(in_process, "sends"),
        seconds=40,
        gigabytes=2,
        is_short=False,
    ),
    Row(
        "NCCL: what comes too late ends the process",
        ends,
        seconds=DEAD_AFTER + 10,
        gigabytes=2,
        is_short=False,
    ),
    Row(
        "NCCL: a collective in a CUDA graph",
        partial(in_process, "captured"),
        seconds=40,
        gigabytes=2,
        is_short=False,
    ),
]

# Measured where no other process is on the device.
MEMORY = Row(
    "NCCL: memory of a communicator", partial(in_process, "memory"), seconds=40, gigabytes=8, is_short=False
)

if __name__ == "__main__":
    print(json.dumps(CHECKS[sys.argv[1]]()))
    sys.stdout.flush()
    os._exit(0)  # a default group is let go with the process
