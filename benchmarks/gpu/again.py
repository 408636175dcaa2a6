"""A stack of layers whose activations are computed again, beside `torch.utils.checkpoint` of every layer: time and memory.

The same plain operators on both sides (fuse=False), bf16, torch's fused AdamW, as in the section "Fast". `checkpoint` stops the
second forward of a layer at the last value that backward needs (`early_stop`); *checkpoint, no early stop* does not. The bytes
that are predicted are those of a step that was rehearsed on tensors without numbers (`autoptd/compiler/peak_memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from benchmarks.gpu.forms import Form, eager, measure, ours
from benchmarks.gpu.models import Shape, batch, build, sized
from benchmarks.gpu.rows import Found, Setting

FULL, FUSED, HALF, NOTHING = "ours, full", "ours, full, fused", "ours, full:1/2", "ours, nothing again"
THEIRS, WHOLE = "checkpoint", "checkpoint, no early stop"


def checkpointed(model: nn.Module, early_stop: bool) -> Callable[..., Any]:
    """The forward of a GPT with each of its layers in a checkpoint."""
    layers = list(model.transformer.h)  # type: ignore[union-attr, arg-type]
    forwards = [layer.forward for layer in layers]

    def forward(*args: Any, **kwargs: Any) -> Any:
        for layer, own in zip(layers, forwards, strict=True):
            layer.forward = partial(checkpoint, own, use_reentrant=False)
        try:
            # It is asked as a layer's forward begins, not in backward.
            with set_checkpoint_early_stop(early_stop):
                return model(*args, **kwargs)
        finally:
            for layer in layers:
                del layer.forward

    return forward


def recomputed(shape: Shape, setting: Setting) -> Iterator[Found]:
    """Ours and theirs in turns; then ours with less computed again, where that fits."""
    shape = sized(shape, setting.is_toy)
    dtype = torch.float32 if setting.is_toy else torch.bfloat16
    model, call = build(shape, setting.where, dtype), batch(shape, setting.where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    triton = "eager" if setting.is_toy else "triton"
    makers: dict[str, Callable[[], Form]] = {
        FULL: lambda: ours(model, call, fuse=False, recompute="full"),
        THEIRS: lambda: eager(model, call, optimizer, checkpointed(model, early_stop=True)),
        WHOLE: lambda: eager(model, call, optimizer, checkpointed(model, early_stop=False)),
        FUSED: lambda: ours(model, call, fuse=triton, recompute="full"),
        HALF: lambda: ours(model, call, fuse=False, recompute="full:1/2"),
        NOTHING: lambda: ours(model, call, fuse=False, recompute=False),
    }
    forms: dict[str, Form] = {}
    refused: list[Found] = []
    flops = shape.flops(shape.tokens)
    # Each time with all that was there before.
    for names in ((FULL, THEIRS, WHOLE), (FUSED, HALF, NOTHING)):
        for name in names:
            try:
                forms[name] = makers[name]()
            except torch.OutOfMemoryError:
                refused.append({"form": name, "why": "out of memory"})
        seconds = 0.0 if setting.is_toy else min(10.0, max(3.0, setting.left() / 3))
        rows, about = measure(
            forms,
            setting,
            layers=shape.layers,
            tokens=shape.tokens,
            flops=flops,
            seconds=seconds,
            reference=FULL,
        )
        yield {"tokens of a step": shape.tokens, **about, "forms": [*rows, *refused]}
        if setting.left() <= 0:
            break
    for form in forms.values():
        form.close()
