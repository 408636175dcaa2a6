"""A rank that fails or dies where calls wait on the device: the other one says who it was, comes out, and keeps no number.

Two real processes on the stand-in for NCCL of `in_order.py`, with tensor parallelism: after two good microbatches of a step
rank 1 leaves, and rank 0's host goes on to where it waits for its device.
"""

from __future__ import annotations

import io
import os
import signal
import time
import traceback
from contextlib import redirect_stderr
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoptd.ir.actions import Action, Kind
from autoptd.runtime.params.optimizer import make_optimizer
from autoptd.runtime.step.launch import ProcessRank, Rank
from autoptd.runtime.step.microbatches import cut
from autoptd.runtime.world import device_watch
from autoptd.runtime.world.device_watch import PROBES, WATCHDOG_MARGIN
from tests.forks import CONTEXT
from tests.ports import free_port
from tests.processes.in_order import InOrderProbe, register
from tests.runtime.tied_model import Case, make_batch, make_model, make_program
from tests.waits import LONG, wait_until

pytestmark = pytest.mark.processes

VICTIM, LAST = 1, "F0.1"  # who leaves, and in which action
TIMEOUT = 2.0  # seconds, in the step in which it does


def serve(rank: int, port: int, how: str, waits_in: str, out: Any) -> None:
    """The life of a process, which ends without waiting for anybody."""
    try:
        out.put((rank, run(rank, port, how, waits_in)))
    except BaseException:
        out.put((rank, traceback.format_exc()))
    if rank == VICTIM:
        time.sleep(LONG)  # so that nobody is found gone who is not; it is killed
    out.close()
    out.join_thread()
    os._exit(0)


def run(rank: int, port: int, how: str, waits_in: str) -> Any:
    torch.set_num_threads(1)
    device = register(patience=5.0)
    PROBES["in_order"] = lambda: InOrderProbe(device)
    device_watch.GRACE = 1.5
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("in_order", store=store, rank=rank, world_size=2)
    model = make_model()
    ranks = ProcessRank(make_program(Case(t=2, m=2), model), dict(model.state_dict()), "cpu", 60.0)
    (mine,) = ranks.here
    optimizer = make_optimizer(torch.optim.SGD, [mine.params], lambda fn: fn(mine.params), lr=1.0)
    if waits_in == "step":  # as on CUDA, where it asks for the NaN of the step before
        mine.executor._nan.look = lambda *_: device.synchronize()  # type: ignore[method-assign]
    limit = timedelta(seconds=60.0 + WATCHDOG_MARGIN)
    assert mine.world._group_limit == limit, "the watchdog of the groups would be first"  # type: ignore[attr-defined]
    step(ranks, waits_in)
    device.synchronize()
    device.patience = 0.1
    mine.world.timeout = TIMEOUT
    kept = values(mine)
    if rank == VICTIM:
        leave_at(mine, how)
    told, raised = io.StringIO(), []
    with redirect_stderr(told):
        # `synchronize` is `loss.item()`: the host waits, and nothing of ours is below it.
        for act in (
            partial(step, ranks, waits_in),
            device.synchronize,
            optimizer.step,
            partial(step, ranks, waits_in),
        ):
            try:
                act()
                raised.append("")
            except BaseException as exc:
                raised.append(f"{type(exc).__name__}: {exc}")
        ranks.close()
    now = values(mine)
    equal = {name: torch.equal(now[name], kept[name]) for name in now}
    is_kept = {
        "grads": all(same for name, same in equal.items() if name.endswith(".grad")),
        "parameters": all(same for name, same in equal.items() if not name.endswith(".grad")),
    }
    return raised, told.getvalue(), is_kept, device.is_aborted


def step(ranks: ProcessRank, waits_in: str) -> torch.Tensor:
    def run(rank: Rank) -> torch.Tensor:
        batch = cut(rank.executor.program, make_batch(), rank.executor.inputs, 0, rank.world.device)
        return rank.executor.step(batch, nan="raise" if waits_in == "step" else "ignore")

    return ranks.run("step", run)


def values(rank: Rank) -> dict[str, torch.Tensor]:
    """Parameters and gradients."""
    found = {name: x.detach().clone() for name, x in rank.params.local.items()}
    grads = {name: rank.params.gradient(name) for name in rank.params.local}
    return found | {f"{name}.grad": grad.clone() for name, grad in grads.items() if grad is not None}


def leave_at(rank: Rank, how: str) -> None:
    right, board = rank.executor._do[Kind.F], rank.world.board  # type: ignore[attr-defined]

    def leave(action: Action) -> None:
        if str(action) != LAST:
            return right(action)
        if how == "raises":
            raise ValueError("no such word")
        wait_until(lambda: LAST in (board._ask(lambda store: store.get(f"beat of {VICTIM}")) or b"").decode())
        os.kill(os.getpid(), signal.SIGKILL)

    rank.executor._do[Kind.F] = leave


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("how", "waits_in"),
    [("raises", "item"), ("raises", "step"), ("is killed", "step"), ("is killed", "item")],
)
def test_the_other_rank_says_who_it_was_and_hands_out_nothing(how: str, waits_in: str) -> None:
    port = free_port()
    out = CONTEXT.Queue()
    processes = [CONTEXT.Process(target=serve, args=(rank, port, how, waits_in, out)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        found = {}
        while 0 not in found:
            rank, what = out.get(timeout=LONG)
            found[rank] = what
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert not isinstance(found[0], str), found[0]
    raised, told, is_kept, is_aborted = found[0]
    if how == "raises":
        words = "rank 1 at F0.1: ValueError: no such word"
    else:
        words = "failed; rank 1 is gone: it was last known at F0.1"
    assert is_aborted, found
    assert told.count("autoptd: RuntimeFault: ") == 1 and words in told, told
    first, item, optimizer, again = raised
    assert item == "" and words in optimizer and words in again, raised
    assert all(one.startswith("RuntimeFault: ") for one in (first, optimizer, again) if one), raised
    if waits_in == "step":  # else it is over before anybody knows, or not
        assert words in first and is_kept["grads"], found
    assert is_kept["parameters"], found
