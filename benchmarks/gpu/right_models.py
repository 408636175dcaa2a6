"""A small model and `verify`, for the rows of section 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import autoptd
from benchmarks.gpu.models import Call
from benchmarks.gpu.rows import Found, Setting


def small_gpt(setting: Setting, dropout: float, stages: int, heads: int = 4) -> tuple[nn.Module, Call]:
    """Small layers in bf16 (float64 on a CPU: there is time for one dtype), and a batch of eight rows."""
    from examples.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    layers, size = (2, 4) if setting.is_toy and stages <= 2 else (4, 32)
    width = heads * size
    config = GPTConfig(
        vocab_size=64, block_size=16, n_layer=layers, n_head=heads, n_embd=width, dropout=dropout
    )
    model = GPT(config).to(setting.where, torch.float64 if setting.is_toy else torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(0, 64, (8, 16), generator=generator).to(setting.where) for _ in range(2))
    return model, ((ids, targets), {})


def verified(model: nn.Module, example: Any, asked: dict[str, Any]) -> Found:
    report = autoptd.verify(model, example_inputs=example, **asked)
    kinds = dict.fromkeys(one.what for one in report.differences)
    return {
        "ok": report.passed,
        **{f"{kind}, largest": report.worst(kind).size for kind in kinds},
        "mesh": report.mesh,
    }
