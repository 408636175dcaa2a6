"""LoRA on one card, the base frozen: tokens a second beside what is published for an H100.

Published are 12,473 tokens/s for Llama 3 8B and 14,110 for Qwen2.5 7B: NVIDIA's NeMo AutoModel, one H100, bf16, 4,096 tokens,
microbatches of 2, 16 of them a step; LoRA of all linear layers but the head, r=16, alpha 32, dropout 0.1. Here a step is one
microbatch. Each form is alone on the card, so times are not taken in turns: the base is there once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.forms import Form, compiled, eager, measure, ours
from benchmarks.gpu.models import Call, Shape, batch, build, sized
from benchmarks.gpu.rows import Found, Setting

FUSED, PLAIN, EAGER, COMPILED = "ours, fused", "ours, plain", "eager", "torch.compile"
R, ALPHA, RATE = 16, 32, 0.1
PUBLISHED = {"Llama 8B": "12,473 tokens/s on one H100", "Qwen2.5 7B": "14,110 tokens/s on one H100"}


def adapter_parameters(shape: Shape) -> int:
    """The parameters of the adapters of all layers: r * (inputs + outputs) of every linear layer."""
    attention = 2 * 2 * shape.h + 2 * (shape.h + shape.h * shape.kv // shape.heads)
    return R * shape.layers * (attention + 3 * (shape.h + shape.wide))


def lora_flops(shape: Shape, tokens: int) -> float:
    """Model FLOPs of a step: of a frozen weight 4 per token, since it has no gradient; 6 of an adapter's; scores as ever."""
    scores = 6 * shape.s * shape.h * shape.layers * tokens
    frozen = (shape.flops(tokens) - scores) * 4 / 6
    return frozen + scores + 6 * adapter_parameters(shape) * tokens


def with_lora(model: nn.Module) -> nn.Module:
    """A model of PEFT, whose adapters have the dtype of the base."""
    from peft import LoraConfig, get_peft_model

    how: dict[str, Any] = {"r": R, "lora_alpha": ALPHA, "lora_dropout": RATE, "target_modules": "all-linear"}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **how), autocast_adapter_dtype=False)


def forms_of(shape: Shape, call: Call, setting: Setting) -> dict[str, Callable[[], Form]]:
    """What makes each form, its own base included."""
    dtype = torch.float32 if setting.is_toy else torch.bfloat16
    triton = "eager" if setting.is_toy else "triton"

    def mine(fuse: Any) -> Form:
        # A deferred model would be there once from the start, but draws its values on the CPU: a minute and more.
        model = with_lora(build(shape, setting.where, dtype))
        return ours(model, call, is_kept=False, fuse=fuse)

    def theirs(is_compiled: bool) -> Form:
        model = with_lora(build(shape, setting.where, dtype))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        return eager(model, call, optimizer, compiled(model, setting.is_toy) if is_compiled else None)

    return {
        FUSED: lambda: mine(triton),
        EAGER: lambda: theirs(False),
        COMPILED: lambda: theirs(True),
        PLAIN: lambda: mine(False),
    }


def trained(shape: Shape, setting: Setting) -> Iterator[Found]:
    """One form after the other, the most telling first."""
    published = PUBLISHED.get(shape.name, "")
    shape = sized(shape, setting.is_toy)
    call, flops = batch(shape, setting.where), lora_flops(shape, shape.tokens)
    torch._dynamo.reset()
    found: list[Found] = []
    for name, make in forms_of(shape, call, setting).items():
        about: Found = {}
        try:
            form = make()
        except torch.OutOfMemoryError:
            found.append({"form": name, "why": "out of memory"})
        else:
            seconds = 0.0 if setting.is_toy else min(6.0, max(3.0, setting.left() / 4))
            rows, about = measure(
                {name: form},
                setting,
                layers=shape.layers,
                tokens=shape.tokens,
                flops=flops,
                seconds=seconds,
                reference=name,
            )
            found += rows
            form.close()
            del form
        gc.collect()
        setting.device.release()
        told: Found = {
            "tokens of a step": shape.tokens,
            "model FLOPs of a step": flops,
            "published": published,
        }
        yield {**told, **about, "forms": list(found)}
        if setting.left() <= 10.0:
            break
