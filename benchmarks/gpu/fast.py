"""Section 2, Fast: steps of training of known models, ours beside eager and beside torch's compiler, in turns in one
process.

In bf16, that is `model.bfloat16()`, with torch's fused AdamW on both sides; the ceiling is a plain product of 8192^3
in the same minute. Model FLOPs: of every product, nothing counted for what is computed again, attention's causal
half. Two models also run as one rank of many: the others are not there, so communication takes no time; two with
adapters, their bases frozen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import autoptd
from benchmarks.gpu import adapters
from benchmarks.gpu.again import recomputed
from benchmarks.gpu.forms import Form, close_world, compiled, eager, measure, of_rank, ours
from benchmarks.gpu.models import (
    GPT_1B,
    GPT_175B,
    LLAMA_1B,
    LLAMA_8B,
    NANOGPT,
    QWEN_7B,
    Call,
    Shape,
    batch,
    build,
    sized,
)
from benchmarks.gpu.rows import Found, Row, Setting

FUSED, PLAIN, INDUCTOR = "ours, fused", "ours, plain", "ours, inductor"
EAGER, COMPILED, AUTOTUNED = "eager", "torch.compile", "torch.compile, max-autotune-no-cudagraphs"
FIRST = (
    (FUSED, EAGER),
    (COMPILED,),
    (PLAIN,),
)  # what is measured first; each time with all that is there before
COMPILERS = ((FUSED, COMPILED), (INDUCTOR,), (AUTOTUNED,))
PUBLISHED = {LLAMA_1B.name: "40,150 tokens/s on each of 8 H100s at d=8"}
HOOKS: dict[str, Any] = {"hooks": autoptd.LinearHooks(async_allreduce=True, fp32_gradients=True)}


def maker(model: torch.nn.Module, call: Call, is_toy: bool) -> Callable[[str], Form]:
    """Make the forms of a model by name; torch's share its weights, ours have copies."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    triton = "eager" if is_toy else "triton"  # a step in the interpreter takes seconds
    makers: dict[str, Callable[[], Form]] = {
        EAGER: lambda: eager(model, call, optimizer),
        COMPILED: lambda: eager(model, call, optimizer, compiled(model, is_toy)),
        AUTOTUNED: lambda: eager(
            model, call, optimizer, compiled(model, is_toy, "max-autotune-no-cudagraphs")
        ),
        FUSED: lambda: ours(model, call, fuse=triton),
        PLAIN: lambda: ours(model, call, fuse=False),
        INDUCTOR: lambda: ours(model, call, fuse=triton if is_toy else "inductor"),
    }
    return lambda name: makers[name]()


def train(shape: Shape, batches: Sequence[Sequence[str]], setting: Setting) -> Iterator[Found]:
    """A model in several forms, the most telling first; the findings of each batch of forms replace those before."""
    shape = sized(shape, setting.is_toy)
    dtype = torch.float32 if setting.is_toy else torch.bfloat16
    model, call = build(shape, setting.where, dtype), batch(shape, setting.where)
    torch._dynamo.reset()  # or another size of the same code would be compiled for sizes that change
    flops, make = shape.flops(shape.tokens), maker(model, call, setting.is_toy)
    forms: dict[str, Form] = {}
    found: Found = {
        "tokens of a step": shape.tokens,
        "model FLOPs of a step": flops,
        "published": PUBLISHED.get(shape.name, ""),
    }
    started: dict[str, float] = {}
    refused: dict[str, str] = {}
    for names in batches:
        for name in names:
            begin = time.time()
            try:
                forms[name] = make(name)
                setting.device.sync()
                started[name] = time.time() - begin
            except torch.OutOfMemoryError:
                refused[name] = "out of memory"
            except Exception as exc:  # the others are worth their time
                refused[name] = f"{type(exc).__name__}: {exc}"[:300]
        seconds = 0.0 if setting.is_toy else min(8.0, max(3.0, setting.left() / 4))
        rows, about = measure(
            forms, setting, layers=shape.layers, tokens=shape.tokens, flops=flops, seconds=seconds
        )
        for row in rows:
            row["starts in, s"] = started[row["form"]]
        rows += [{"form": name, "why": why} for name, why in refused.items()]
        yield {**found, **about, "forms": rows}
        if setting.left() <= 0:
            break
    for form in forms.values():
        form.close()


def rank(shape: Shape, mesh: dict[str, int], microbatches: int, setting: Setting) -> Iterator[Found]:
    """One rank's program: forms by what was asked for; communication is not there."""
    if setting.is_toy:
        shape, mesh, microbatches = sized(shape, True), dict.fromkeys(mesh, 2), 2
    triton = "eager" if setting.is_toy else "triton"
    asked: dict[str, dict[str, Any]] = {
        FUSED: {"fuse": triton},
        f"{FUSED}, sequence parallel": {"fuse": triton, "sequence_parallel": True},
        PLAIN: {"fuse": False},
        f"{FUSED}, sequence parallel, hooks": {"fuse": triton, "sequence_parallel": True, **HOOKS},
    }
    # At this size fixed costs decide where stages are cut, and a stage may be left without a layer.
    pinned = {"plan": {"cut": [1, 1]}} if setting.is_toy and "p" in mesh else {}
    forms: dict[str, Form] = {}
    close_world()
    for name, options in list(asked.items())[: 1 if setting.is_toy else None]:
        forms[name], layers = of_rank(shape, setting, mesh, microbatches, **options, **pinned)
        tokens = shape.tokens * microbatches
        flops = layers * shape.layer_flops(tokens) / mesh["t"]
        if mesh.get("p", 1) == 1:
            flops += 6 * tokens * shape.vocab * shape.h / mesh["t"]
        seconds = 0.0 if setting.is_toy else min(8.0, max(3.0, setting.left() / 4))
        rows, about = measure(
            forms, setting, layers=layers * microbatches, tokens=tokens, flops=flops, seconds=seconds
        )
        told: Found = {"rank of": " ".join(f"{key}={n}" for key, n in mesh.items()), "layers": layers}
        yield {**told, "microbatches": microbatches, "model FLOPs of a step": flops, **about, "forms": rows}
        if setting.left() <= 10.0:
            break
    close_world()


def _lora(shape: Shape) -> Row:
    name = f"LoRA, {shape.name}"
    return Row(name, partial(adapters.trained, shape), seconds=110, gigabytes=70, is_short=False)


ROWS = [
    Row("nanoGPT 124M", partial(train, NANOGPT, FIRST), seconds=110, gigabytes=20),
    Row("Llama 1.34B", partial(train, LLAMA_1B, FIRST), seconds=130, gigabytes=50, is_short=False),
    Row(
        "GPT-3 175B, a middle stage's rank at t=8 p=8",
        partial(rank, GPT_175B, {"t": 8, "p": 8}, 8),
        seconds=120,
        gigabytes=45,
    ),
    _lora(replace(LLAMA_8B, b=2)),
    Row("GPT 1.3B, computed again", partial(recomputed, GPT_1B), seconds=100, gigabytes=60),
    _lora(QWEN_7B),
    Row(
        "Llama 8B, a rank at t=8",
        partial(rank, LLAMA_8B, {"t": 8}, 4),
        seconds=90,
        gigabytes=30,
        is_short=False,
    ),
    Row(
        "nanoGPT 124M, compilers",
        partial(train, NANOGPT, COMPILERS),
        seconds=180,
        gigabytes=20,
        is_short=False,
    ),
    Row(
        "Llama 1.34B, compilers",
        partial(train, LLAMA_1B, COMPILERS),
        seconds=240,
        gigabytes=50,
        is_short=False,
    ),
    Row("GPT 1.3B", partial(train, GPT_1B, FIRST), seconds=130, gigabytes=50, is_short=False),
]
