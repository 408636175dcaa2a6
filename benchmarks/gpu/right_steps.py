"""Section 1, of steps that repeat: the host waits nowhere without a reason, and nothing is left behind.

Torch's sync debug mode tells of operators that make the host wait for the device; each place is listed, with the
reason where one is known. On a CPU operators are counted that would wait on a GPU, `.item()` for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import autoptd
from benchmarks.gpu.device import Site
from benchmarks.gpu.models import LLAMA_1B, NANOGPT, Shape, batch, build, replace, toy
from benchmarks.gpu.rows import Found, Row, Setting

# Of these 50 steps, memory is compared behind the 25th and at the end: the last 20 losses are kept.
STEPS, FIRST = 50, 25

# (file, function) -> why the host waits there, in a step. What is not here is reported as a fault.
REASONS = {  # (file, function): why the host waits there
    ("executor.py", "_set_totals"): "the first step alone: a loss divided by Python numbers tells its dtype",
    (
        "flags.py",
        "read",
    ): "a NaN of the step before stops the run: its answer came behind that step's work",
}


def trained(shape: Shape, setting: Setting, **asked: Any) -> tuple[Any, Any]:
    """A running model of one rank, and a function that makes one step of training."""
    model = build(shape, setting.where, torch.float32 if setting.is_toy else torch.bfloat16)
    args, kwargs = batch(shape, setting.where, microbatches=2)
    pm = autoptd.parallelize(
        model,
        backend="local",
        num_microbatches=2,
        example_inputs=args or kwargs,
        ranks=autoptd.RankOptions(check_every=0),
        **asked,
    )
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)

    def step() -> None:
        pm.step(*args, **kwargs)
        pm.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return pm, step


def small(shape: Shape, setting: Setting) -> Shape:
    return toy(shape) if setting.is_toy else replace(shape, layers=4, b=2, s=512)


def waits(shape: Shape, setting: Setting) -> Iterator[Found]:
    """Every place of a step where the host waits for the device, how often in a step of two microbatches, and why."""
    pm, step = trained(small(shape, setting), setting)
    for _ in range(3):
        step()
    found = setting.device.waits(step)
    places = [told(site, count) for site, count in sorted(found.items())]
    unknown = [one for one in places if not one["reason"]]
    pm.close()
    why = "; ".join(f"{one['place']}: {one['line']}" for one in unknown)
    yield {
        "ok": not unknown,
        "waits": sum(found.values()),
        "without a reason": len(unknown),
        "why": why,
        "places": places,
    }


def told(site: Site, count: int) -> Found:
    file, function, line, text = site
    name = Path(file).name
    reason = REASONS.get((name, function), "")
    return {"place": f"{name}:{line} {function}", "line": text[:120], "times": count, "reason": reason}


def growth(shape: Shape, setting: Setting) -> Iterator[Found]:
    """Bytes that are allocated behind step 25 and behind step 50: the same."""
    pm, step = trained(small(shape, setting), setting)
    total = 32 if setting.is_toy else STEPS
    first = FIRST
    for _ in range(first):
        step()
    before = setting.device.allocated()
    peaks = [setting.device.peak(step)]
    for _ in range(total - first - 2):
        step()
    peaks.append(setting.device.peak(step))
    after = setting.device.allocated()
    pm.close()
    grown = after - before
    yield {
        "ok": grown == 0,
        "steps": total,
        "bytes more": grown,
        "peak of the first": peaks[0],
        "of the last": peaks[1],
    }


ROWS = [
    Row("waits of the host: GPT", partial(waits, NANOGPT), seconds=40, gigabytes=4),
    Row("waits of the host: Llama", partial(waits, LLAMA_1B), seconds=40, gigabytes=6, is_short=False),
    Row("memory over 50 steps: GPT", partial(growth, NANOGPT), seconds=40, gigabytes=4),
]
