"""The source of a small model that parts are put into: every kind of case has a table of such parts.

    write([Part("counts", init="self.register_buffer('n', torch.zeros(()))", start="self.n += 1")], sizes)

Slots of `Net`: `init`, `start` (before the layers; ids, y, keep are there), `end` (h is), `loss` (logits is). Of each layer:
`layer_init`, `layer` (before its MLP), `layer_end`. `top` are definitions, `more` functions of the script (see judge.py).
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SOURCE = """\
import collections, dataclasses, enum, functools, itertools, math, operator, queue, random, threading, types, weakref

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

B, L, W, V, N = {sizes}
{top}


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(W, 3 * W), nn.Linear(W, W)

    def forward(self, h):
        q, k, v = (x.unflatten(-1, (4, W // 4)).transpose(1, 2) for x in self.qkv(h).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.i = i
        {mix_init}
        self.norm, self.up, self.down = nn.LayerNorm(W), nn.Linear(W, 2 * W), nn.Linear(2 * W, W)
{layer_init}

    def forward(self, h):
        i = self.i
        {mix}
{layer}
        h = h + self.down(F.gelu(self.up(self.norm(h))))
{layer_end}
        return h


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, W)
        self.blocks = nn.ModuleList(Block(i) for i in range(N))
        self.head = nn.Linear(W, V)
{init}

    def forward(self, ids, y, keep):
{start}
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
{end}
        logits = self.head(h)
{loss}


def make(variant=0):
    torch.manual_seed(3)
    return Net()


def batch(step, rows):
    draw = torch.Generator().manual_seed(50 + step)
    ids, y = (torch.randint(0, V, (rows, L), generator=draw) for _ in range(2))
    return ids, y, (torch.arange(L) < torch.randint(1, L + 1, (rows, 1), generator=draw)).double()


{more}
"""
LOSS = "return F.cross_entropy(logits.flatten(0, 1), y.flatten())"


@dataclass(frozen=True)
class Part:
    name: str
    init: str = ""
    start: str = ""
    layer_init: str = ""
    layer: str = ""
    layer_end: str = ""
    end: str = ""
    loss: str = ""
    top: str = ""
    more: str = ""
    play: dict[str, Any] = field(default_factory=dict)  # keywords of Script


def write(parts: Sequence[Part], sizes: tuple[int, ...], *, mixes: bool = False) -> str:
    def of(slot: str, indent: int = 8) -> str:
        lines = "\n".join(text for part in parts if (text := getattr(part, slot)))
        return textwrap.indent(lines, " " * indent)

    slots = {name: of(name) for name in ("init", "start", "layer_init", "layer", "layer_end", "end")}
    slots |= {name: of(name, 0) for name in ("top", "more")}
    loss = of("loss") or textwrap.indent(LOSS, " " * 8)
    mix_init, mix = ("self.mix = Mix()", "h = h + self.mix(h)") if mixes else ("pass", "pass")
    return SOURCE.format(sizes=sizes, loss=loss, mix_init=mix_init, mix=mix, **slots)
