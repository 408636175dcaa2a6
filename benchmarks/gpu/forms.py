"""One model in several forms, each a step of training: eager, by torch's compiler, and ours, plain and fused.

In all of them a step is forward and backward of one microbatch, torch's fused AdamW, gradients set to None. Ours
looks for NaN in the loss besides. What a form holds, and what it was predicted to, is told beside what it takes.

    forms = {"eager": eager(model, call), "ours, fused": ours(model, call, fuse="triton")}
    rows = measure(forms, setting, shape, layers=16, tokens=8192, flops=6.9e13, seconds=10)
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoptd
from autoptd.compiler.peak_memory import peak_memory
from autoptd.wings.reports.summary import summarize
from benchmarks.gpu.device import Device, ceilings
from benchmarks.gpu.machine import card
from benchmarks.gpu.models import Call, Shape, batch, build, loss_of
from benchmarks.gpu.rows import Found, Setting
from benchmarks.lib import one_rank
from benchmarks.lib.pairs import Turns, interval, ratio_of, take_turns

REFERENCE = "ours, fused"  # whose time the others' are divided by, as a rule
TURN = 0.05  # seconds that a turn takes at least, so that its ends do not show
Step = Callable[[], object]


@dataclass(frozen=True)
class Form:
    """`step` trains; `launch` is the same without any wait of ours; `held` are parameters and optimizer state."""

    step: Step
    launch: Step
    held: int
    predicted: int = 0  # bytes of everything, by the compiler
    close: Step = lambda: None


def bytes_of(parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer | None) -> int:
    states = optimizer.state.values() if optimizer is not None else ()
    moments = [x for state in states for x in state.values() if isinstance(x, Tensor)]
    return sum(x.nbytes for x in {id(x): x for x in [*parameters, *moments]}.values())


def eager(
    model: nn.Module, call: Call, optimizer: torch.optim.Optimizer, runs: Callable[..., Any] | None = None
) -> Form:
    """The model itself, or `runs` in its place: what torch.compile made of it. Such forms share weights and optimizer."""
    args, kwargs = call
    forward = model if runs is None else runs

    def step() -> None:
        loss_of(forward(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # its state is there
    return Form(step, step, bytes_of(list(model.parameters()), optimizer))


def compiled(model: nn.Module, is_toy: bool, mode: str | None = None) -> Callable[..., Any]:
    """torch.compile; at toy size its tracing only, for compiling takes a CPU a minute."""
    if is_toy:
        return torch.compile(model, backend="eager", dynamic=False)
    return torch.compile(model, mode=mode, dynamic=False)


def ours(model: nn.Module, call: Call, is_kept: bool = True, **asked: Any) -> Form:
    """The emitted program of one rank; `model` leaves the device once its weights are copied, unless `is_kept`."""
    args, kwargs = call
    pm = autoptd.parallelize(
        model,
        backend="local",
        num_microbatches=1,
        example_inputs=args or kwargs,
        ranks=autoptd.RankOptions(check_every=0),
        **asked,
    )
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
    if not is_kept:
        model.to("meta")
    ranks = {waits: replace(pm.options.ranks, nan="raise" if waits else "ignore") for waits in (True, False)}
    options = {waits: replace(pm.options, ranks=ranks[waits]) for waits in (True, False)}

    def step(waits: bool = True) -> None:
        pm.options = options[waits]
        pm.step(*args, **kwargs)
        optimizer.step()
        optimizer.zero_grad()

    step()
    held = bytes_of(list(pm.parameters()), optimizer)
    predicted = peak_memory(pm.program)[0].nbytes
    return Form(step, lambda: step(False), held, predicted, pm.close)


def of_rank(
    shape: Shape, setting: Setting, mesh: dict[str, int], microbatches: int, **asked: Any
) -> tuple[Form, int]:
    """One rank in the middle of a pipeline, or of its tensor ranks, with nobody else there, no optimizer; and its layers."""
    model = build(shape, "meta", torch.bfloat16)
    args, kwargs = batch(shape, setting.where, microbatches)
    call: one_rank.Batch = args or kwargs
    size = math.prod(mesh.values())
    rank = one_rank.one_rank(
        model,
        call,
        rank=size // 2,
        device=setting.where,
        num_microbatches=microbatches,
        machine="h200",
        **mesh,
        **asked,
    )
    held = bytes_of(list(rank.params.local.values()), None)
    costs = summarize(rank.executor.program).ranks[rank.world.coordinate.pp]
    names = [name.split(".") for name in rank.params.local]
    layers = {
        next(part for part in name if part.isdecimal()) for name in names if any(map(str.isdecimal, name))
    }

    def step() -> None:
        one_rank.step(rank, call)

    step()
    predicted = costs.parameter_bytes + costs.gradient_bytes + costs.activation_bytes
    return Form(step, step, held, predicted), len(layers)


def measure(
    forms: dict[str, Form],
    setting: Setting,
    *,
    layers: int,
    tokens: int,
    flops: float,
    seconds: float,
    reference: str = REFERENCE,
) -> tuple[list[Found], Found]:
    """A row per form, and what holds for all: the ceilings of this minute, the card's clocks.

    The times of the others are divided by that of the form `reference`.
    """
    device = setting.device
    runs = {name: form.step for name, form in forms.items()}
    turns = turns_of(runs, device, seconds, fewest=6 if setting.is_toy else 15)
    about = ceilings(device)
    if device.is_cuda:
        about |= {key: text for key, text in card().items() if key in ("SM clock, MHz", "power, W")}  # type: ignore[assignment]
    rows = [
        row_of(name, form, turns, device, layers, tokens, flops, about["GEMM FLOP/s"], reference)
        for name, form in forms.items()
    ]
    return rows, about


def turns_of(runs: dict[str, Step], device: Device, seconds: float, fewest: int = 15) -> dict[str, Turns]:
    """Turns of equal numbers of calls, as many as take TURN seconds; none at toy size."""
    calls = 1
    if device.is_cuda:
        times = []
        for run in runs.values():
            run()
            device.sync()
            start = time.perf_counter()
            run()
            device.sync()
            times.append(time.perf_counter() - start)
        calls = max(1, math.ceil(TURN / min(times)))
    return take_turns(runs, 200, calls=calls, seconds=seconds, fewest=fewest, warm_up=1, sync=device.sync)


def row_of(
    name: str,
    form: Form,
    turns: dict[str, Turns],
    device: Device,
    layers: int,
    tokens: int,
    flops: float,
    ceiling: float,
    reference: str,
) -> Found:
    wall = statistics.median(turns[name].wall)
    peak = form.held + device.peak(form.step)
    row: Found = {
        "form": name,
        "ms": interval([1e3 * one for one in turns[name].wall])._asdict(),
        "tokens/s": tokens / wall,
        "model FLOP/s": flops / wall,
    }
    row |= {"share of the GEMM ceiling": flops / wall / ceiling, "turns": len(turns[name].wall)}
    if reference in turns and name != reference:
        row[f"its time over that of {reference}"] = ratio_of(
            turns[name].wall, turns[reference].wall
        )._asdict()
    row |= {"peak bytes": peak}
    if form.predicted:
        row |= {"predicted bytes": form.predicted, "predicted over measured": form.predicted / peak}
    launches = device.launches(form.launch)
    row |= {
        "launches": launches,
        "launches a layer": launches / layers,
        "host, ms": 1e-3 * device.host_microseconds(form.launch),
    }
    return row


def close_world() -> None:
    """End the group in which ranks without others ran."""
    if dist.is_initialized():
        dist.destroy_process_group()
