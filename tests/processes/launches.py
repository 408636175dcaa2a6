"""What the ranks of `test_launches.py` do: one process runs many worlds of several sizes, one after the other.

In: `Launch`es. Out: per launch and rank, "" or what went wrong. In each world the model of `tests/runtime/tied_model.py` (tied
ends, values that skip stages) makes two steps and an evaluation, beside the plain model in float64.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from autoptd.program.program import Program
from autoptd.runtime.params.full_values import gather_gradients
from autoptd.runtime.step.launch import ProcessRank, Rank
from autoptd.runtime.step.microbatches import cut
from tests.parity.models import batch as gpt_batch
from tests.parity.models import gpt
from tests.processes.in_order import register
from tests.runtime.tied_model import Case, make_batch, make_model, make_program

LIMIT = 1e-9


@dataclass(frozen=True)
class Launch:
    """Worlds of `size` ranks. `group` says what there is before them.

    "": nothing, each world makes the default group as under torchrun. "gloo", "in_order": a default group of the user's.
    "bound": one with `device_id=`, as far as there can be one on a CPU: a new group is split from it, which takes all ranks.
    `folder` has a compiled program of `tests/parity/models.py`'s GPT instead of a case.
    """

    size: int
    port: int
    work: tuple[Case | Path, ...]
    group: str = ""
    has_own_groups: bool = False  # the user's, made on some ranks before
    starts_late: tuple[int, ...] = ()  # ranks that come later than the others


def serve(rank: int, launches: list[Launch], timeout: float, out: Any) -> None:
    """The life of a process."""
    torch.set_num_threads(1)
    for number, launch in enumerate(launches):
        if rank >= launch.size:
            continue
        try:
            run_launch(rank, launch, timeout)
        except BaseException:
            out.put((number, rank, traceback.format_exc()))
            return
        out.put((number, rank, ""))


def run_launch(rank: int, launch: Launch, timeout: float) -> None:
    time.sleep(1.0 if rank in launch.starts_late else 0.0)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(launch.size), MASTER_ADDR="127.0.0.1"
    )
    with default_group(rank, launch, timeout):
        for number, work in enumerate(launch.work):
            os.environ["MASTER_PORT"] = str(launch.port + 1 + number)
            if isinstance(work, Case):
                model = make_model(work.layers)
                check(
                    make_program(work, model),
                    model,
                    [make_batch(work.rows, seed) for seed in (1, 2)],
                    timeout,
                )
            else:
                whole = gpt(8, width=16).double()
                check(Program.load(work), whole, [gpt_batch(24), gpt_batch(24)], timeout)


@contextmanager
def default_group(rank: int, launch: Launch, timeout: float) -> Iterator[None]:
    """What the user made before."""
    if not launch.group:
        yield
        return
    register()
    store = dist.TCPStore("127.0.0.1", launch.port, launch.size, rank == 0)
    backend = "in_order" if launch.group == "in_order" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=launch.size)
    if launch.has_own_groups:
        if rank in (0, launch.size - 1):
            dist.new_group([0, launch.size - 1], use_local_synchronization=True)
        if rank < 2:
            dist.new_group([0, 1])
        if rank == 1:
            dist.new_group([1], use_local_synchronization=True)
    try:
        with split_from_all(timeout) if launch.group == "bound" else mock.patch.dict({}):
            yield
    finally:
        dist.destroy_process_group()


def split_from_all(timeout: float) -> Any:
    """A stand-in for `ncclCommSplit`, which a bound default group makes of each new group: a collective of all ranks."""
    make, world = c10d._new_process_group_helper, dist.group.WORLD
    assert world is not None
    count = iter(range(10_000))

    def split(*args: Any, **kwargs: Any) -> Any:
        dist.monitored_barrier(world, timeout=c10d.timedelta(seconds=timeout))
        names = [None] * world.size()
        dist.all_gather_object(names, (next(count), args[5]), group=world)
        if len(set(names)) > 1:
            raise RuntimeError(f"ranks split for different groups: {names}")
        return make(*args, **kwargs)

    return mock.patch.object(c10d, "_new_process_group_helper", split)


def check(program: Program, model: nn.Module, batches: list[tuple[Tensor, Tensor]], timeout: float) -> None:
    """Loss and accumulated gradients of some steps, and an evaluation, beside those of the model on one device."""
    ranks = ProcessRank(program, dict(model.state_dict()), "cpu", timeout)

    def microbatches(rank: Rank, batch: tuple[Tensor, Tensor]) -> Any:
        return cut(program, batch, rank.executor.inputs, rank.world.coordinate.dp, rank.world.device)

    def step(rank: Rank) -> Tensor:
        return rank.executor.step(microbatches(rank, batch))

    for batch in batches:
        made = model(*batch)
        wanted = made[1] if isinstance(made, tuple) else made
        wanted.backward()
        wanted = wanted.detach()
        loss = ranks.run("step", step)
        require(
            abs(float(loss - wanted)) <= LIMIT * abs(float(wanted)), f"{program.schedule_name}: loss {loss}"
        )
    gradients = ranks.run("gradients", lambda rank: gather_gradients(rank.params))
    trained = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    require(
        not gradients or set(trained) <= set(gradients),
        f"gradients of {set(trained) - set(gradients)} are missing",
    )
    largest = max(float(grad.abs().max()) for grad in trained.values())
    for name, grad in trained.items() if gradients else ():
        off = float((gradients[name] - grad).abs().max())
        require(
            off <= LIMIT * max(float(grad.abs().max()), 1e-3 * largest), f"gradient of {name} is off by {off}"
        )
    evaluated = ranks.run("evaluate", lambda rank: rank.executor.evaluate(microbatches(rank, batch)))
    require(abs(float(evaluated - wanted)) <= LIMIT * abs(float(wanted)), f"evaluation: {evaluated}")
    ranks.close()


def require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)
