"""Section 4, Runtime: what the host takes per action and call, what hides behind products, what a graph would gain.

The links of other GPUs are not here: in the place of a sum over ranks a kernel stays on some multiprocessors, on a
stream of its own, for as long as the sum's bytes would take on NVLink. Hidden is what the two take together less than
one after the other, of the shorter of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import autoptd
from autoptd.runtime import linear
from autoptd.runtime.step.microbatches import cut, flatten
from autoptd.runtime.world.world import Pending, SoloGroup
from benchmarks import overhead
from benchmarks.gpu import right_nccl
from benchmarks.gpu.device import Device
from benchmarks.gpu.forms import close_world
from benchmarks.gpu.kernels import on_device
from benchmarks.gpu.models import GPT_1B, GPT_175B, LLAMA_1B, NANOGPT, Shape, batch, build, replace, sized
from benchmarks.gpu.operators import maker
from benchmarks.gpu.rows import Found, Row, Setting, SkipRow
from benchmarks.gpu.spin import Spin
from benchmarks.lib import one_rank

LINK = 0.8 * 450e9  # bytes/s in one direction that a ring over NVLink of Hopper sustains, about
RANKS = 8
BLOCKS = 16  # multiprocessors that a sum holds


def ring_microseconds(nbytes: int) -> float:
    """An all-reduce of RANKS ranks."""
    return 1e6 * 2 * (RANKS - 1) / RANKS * nbytes / LINK


class Elsewhere(Pending):
    """What runs on the side stream."""

    def __init__(self, device: Device, result: Tensor) -> None:
        self._device, self._result = device, result

    def wait(self) -> Tensor:
        self._device.join()
        return self._result

    def is_done(self) -> bool:
        return True


class SpinningGroup(SoloGroup):
    """A group whose asynchronous sums are a stay on the side stream, and leave the value as it is."""

    def __init__(self, device: Device, is_urgent: bool) -> None:
        super().__init__(0)
        self.size = RANKS  # it is asked whether there is anything to sum
        self.device, self.is_urgent, self.spins = device, is_urgent, dict[int, Spin]()
        self.started = 0

    def all_reduce_start(self, flat: Tensor, site: str) -> Pending:
        if flat.nbytes not in self.spins:
            self.spins[flat.nbytes] = Spin(
                self.device, BLOCKS if self.device.is_cuda else 1, ring_microseconds(flat.nbytes)
            )
        self.started += 1
        with self.device.side_stream(self.is_urgent):
            self.spins[flat.nbytes]()
        return Elsewhere(self.device, flat)


def host_times(setting: Setting) -> Iterator[Found]:
    """As benchmarks/overhead.py measures on a CPU, with tensors on the device: CPU time, nothing waits for the device."""
    few = {"repeats": 3} if setting.is_toy else {"repeats": 21}
    close_world()
    rows = [overhead.step_time(20 if setting.is_toy else 200, device=setting.where, **few)]
    rows.append(overhead.action_time(4 if setting.is_toy else 64, device=setting.where, **few))
    yield {"forms": rows}
    rows += overhead.process_times(setting.where, calls=10 if setting.is_toy else 500, **few)
    close_world()
    yield {"forms": rows}


def overlapped_linear(setting: Setting) -> Iterator[Found]:
    """A column-split layer both ways, whose input's gradient is summed while the weight's is computed."""
    device = setting.device
    tokens, h, out = (16, 16, 8) if setting.is_toy else (2048, GPT_175B.h, 4 * GPT_175B.h // RANKS)
    make = maker(setting.where, torch.bfloat16)
    x, weight, grad = make(tokens, h).requires_grad_(), make(out, h).requires_grad_(), make(tokens, out)

    def both_ways(group: SpinningGroup | None) -> object:
        return torch.autograd.grad(linear(x, weight, overlap=group, site="here"), (x, weight), grad)

    alone = on_device(device, partial(both_ways, None))
    forms = []
    for is_urgent in (False, True):
        group = SpinningGroup(device, is_urgent)
        both_ways(group)  # makes its kernel, which is timed
        sums = sum(device.microseconds(spin, 0.02) for spin in group.spins.values())
        both = on_device(device, partial(both_ways, group))
        told = {key: text for key, text in (alone | both).items() if key == "why"}
        name = f"a stream of {'high' if is_urgent else 'usual'} priority"
        forms.append({"form": name, **hidden(alone["us"], sums, both["us"]), **told})
        yield {"layer": f"[{tokens}, {h}] x [{h}, {out}]", "blocks": BLOCKS, "forms": forms}


def hidden(alone: float, sums: float, both: float) -> Found:
    share = (alone + sums - both) / max(1e-9, min(alone, sums))
    return {"us alone": alone, "us of the sum": sums, "us together": both, "share hidden": share}


def bucket_overlap(shape: Shape, setting: Setting) -> Iterator[Found]:
    """A step of one of eight replicas whose gradients' sums run beside the backward."""
    device = setting.device
    shape = sized(shape, setting.is_toy)
    close_world()
    model = build(shape, "meta", torch.bfloat16)
    args, kwargs = batch(shape, setting.where)
    call: Any = args or kwargs
    fuse = "eager" if setting.is_toy else "triton"
    rank = one_rank.one_rank(
        model, call, rank=0, device=setting.where, num_microbatches=1, d=RANKS, fuse=fuse
    )
    group, found = rank.world.group(("dp",)), []

    def step() -> None:
        one_rank.step(rank, call)

    step()
    alone = device.microseconds(step, 0.2 * device.is_cuda)
    for is_urgent in (False, True):
        spinning = SpinningGroup(device, is_urgent)
        group.all_reduce_start = spinning.all_reduce_start  # type: ignore[method-assign]
        step()
        count, spinning.started = spinning.started, 0
        step()
        per_step = {nbytes: device.microseconds(spin, 0.02) for nbytes, spin in spinning.spins.items()}
        sums = sum(per_step.values()) * count / max(1, len(per_step))
        both = device.microseconds(step, 0.2 * device.is_cuda)
        name = f"a stream of {'high' if is_urgent else 'usual'} priority"
        found.append({"form": name, "buckets": count, **hidden(alone, sums, both)})
        yield {"model": shape.name, "forms": found}
    close_world()


def graph_gain(shape: Shape, setting: Setting) -> Iterator[Found]:
    """Forward and backward of one stage and microbatch, captured by hand: replayed, against as they are launched now."""
    device = setting.device
    shape = sized(shape, setting.is_toy)
    model = build(shape, setting.where, torch.float32 if setting.is_toy else torch.bfloat16)
    args, kwargs = batch(shape, setting.where)
    fuse = "eager" if setting.is_toy else "triton"
    pm = autoptd.parallelize(
        model, num_microbatches=1, backend="local", example_inputs=args or kwargs, fuse=fuse
    )
    rank = pm.run.started("step").here[0]
    (piece,) = cut(pm.program, flatten(args, kwargs)[0], rank.executor.inputs, 0, rank.world.device)
    pm.step(*args, **kwargs)  # counts of labels are set
    stage, weights = rank.executor.stages[0], list(rank.params.leaves.values())

    def once() -> None:
        for leaf in weights:
            leaf.grad = None
        stage.forward(**piece)[-1].backward()

    once()
    wanted = [leaf.grad.clone() for leaf in weights if leaf.grad is not None]
    launched, host = device.microseconds(once, 0.2 * device.is_cuda), device.host_microseconds(once)
    found: Found = {
        "model": shape.name,
        "h": shape.h,
        "layers": shape.layers,
        "us launched": launched,
        "host, us a pass": host,
    }
    yield found
    replay = device.capture(once)
    replay()
    device.sync()
    worst = max(float((leaf.grad - x).abs().max()) for leaf, x in zip(_given(weights), wanted, strict=True))
    replayed = device.microseconds(replay, 0.2 * device.is_cuda)
    pm.close()
    yield found | {"us replayed": replayed, "gain": launched / replayed, "gradients differ by": worst}


def _given(weights: list[Tensor]) -> list[Any]:
    return [leaf for leaf in weights if leaf.grad is not None]


def stays(setting: Setting) -> Iterator[Found]:
    """A product while a kernel stays on k multiprocessors, as a receive does that waits for its message."""
    device = setting.device
    side = 64 if setting.is_toy else 8192
    a, b = (torch.randn(side, side, device=setting.where).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    alone = device.microseconds(lambda: torch.mm(a, b, out=product), 0.1 * device.is_cuda)
    forms = []
    for blocks in (0, 1) if setting.is_toy else (0, 4, 16, 32):
        spin = Spin(device, blocks, 2 * alone)

        def both(spin: Spin = spin) -> None:
            with device.side_stream():
                spin()
            torch.mm(a, b, out=product)

        us = device.microseconds(both, 0.1 * device.is_cuda)  # of the product: nobody waits for the other
        device.sync()
        forms.append({"form": f"beside {blocks} blocks", "us": us, "times alone": us / alone})
        yield {"product": side, "us alone": alone, "forms": forms}


def optimizers(shape: Shape, setting: Setting) -> Iterator[Found]:
    """AdamW over a model's parameters: as a loop over lists, fused, fused over one flat tensor; and norms of gradients."""
    device = setting.device
    shape = sized(shape, setting.is_toy)
    dtype = torch.float32 if setting.is_toy else torch.bfloat16
    sizes = [p.shape for p in build(shape, "meta", dtype).parameters()]
    forms: list[Found] = []
    flat = [torch.Size([sum(one.numel() for one in sizes)])]
    ways: dict[str, tuple[list[torch.Size], dict[str, bool]]] = {
        "foreach": (sizes, {"foreach": True}),
        "fused": (sizes, {"fused": True}),
        "fused, one flat tensor": (flat, {"fused": True}),
    }
    for name, (shapes, how) in ways.items():
        parameters = [torch.randn(one, device=setting.where, dtype=dtype).requires_grad_() for one in shapes]
        for one in parameters:
            one.grad = torch.randn_like(one)
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, **how)  # type: ignore[arg-type]
        optimizer.step()
        nbytes = 7 * sum(one.nbytes for one in parameters)  # reads four, writes three
        us = device.microseconds(optimizer.step, 0.1 * device.is_cuda)
        host = device.host_microseconds(optimizer.step)
        forms.append(
            {"form": f"AdamW, {name}", "us": us, "bytes/s": nbytes / (1e-6 * us), "host, us a call": host}
        )
        yield {"parameters": flat[0].numel(), "forms": forms}
        grads = [one.grad for one in parameters if one.grad is not None]
        if name == "fused":
            norm = partial(torch.nn.utils.get_total_norm, grads, foreach=True)
            us = device.microseconds(norm, 0.1 * device.is_cuda)
            nbytes = sum(one.nbytes for one in grads)
            forms.append(
                {"form": "norm of the gradients, foreach", "us": us, "bytes/s": nbytes / (1e-6 * us)}
            )
        del parameters, optimizer, grads
        device.release()
    yield {"parameters": flat[0].numel(), "forms": forms}


def clipping(shape: Shape, setting: Setting) -> Iterator[Found]:
    """`pm.clip_grad_norm_` beside torch's over the same gradients."""
    device = setting.device
    shape = sized(shape, setting.is_toy)
    model = build(shape, setting.where, torch.float32 if setting.is_toy else torch.bfloat16)
    args, kwargs = batch(shape, setting.where)
    pm = autoptd.parallelize(model, num_microbatches=1, backend="local", example_inputs=args or kwargs)
    pm.step(*args, **kwargs)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    calls: dict[str, Callable[[], object]] = {
        "pm.clip_grad_norm_": lambda: pm.clip_grad_norm_(1e9),
        "torch's, foreach": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, foreach=True),
    }
    forms = [
        {
            "form": name,
            "us": device.microseconds(call, 0.1 * device.is_cuda),
            "host, us a call": device.host_microseconds(call),
        }
        for name, call in calls.items()
    ]
    pm.close()
    yield {"model": shape.name, "forms": forms}


def large_only(row: Callable[[Setting], Iterator[Found]], setting: Setting) -> Iterator[Found]:
    if setting.is_toy:
        raise SkipRow("the same at toy size as the row before")
    return row(setting)


ONE_ROW = replace(NANOGPT, b=1)
WIDE = replace(GPT_1B, name="GPT 1.3B, 8 layers", layers=8, b=1)
ROWS = [
    Row("the host's time", host_times, seconds=40, gigabytes=2),
    Row("a graph of a stage, h=768", partial(graph_gain, ONE_ROW), seconds=50, gigabytes=8),
    Row("a graph of a stage, h=2048", partial(large_only, partial(graph_gain, WIDE)), 50, 16, False),
    Row("an overlapped input-gradient", overlapped_linear, seconds=30, gigabytes=4),
    Row(
        "sums of gradients beside backward",
        partial(bucket_overlap, NANOGPT),
        seconds=50,
        gigabytes=16,
        is_short=False,
    ),
    Row("a product beside kernels that wait", stays, seconds=30, gigabytes=4),
    Row(
        "optimizers, 1.34B parameters",
        partial(optimizers, LLAMA_1B),
        seconds=40,
        gigabytes=16,
        is_short=False,
    ),
    Row("clipping, 1.34B parameters", partial(clipping, LLAMA_1B), seconds=60, gigabytes=50, is_short=False),
    right_nccl.MEMORY,
]
