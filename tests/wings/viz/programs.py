"""Small programs that the tests of pictures look at; each is compiled once."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from autoptd.api import compile
from autoptd.program.program import Program
from examples.gpt import GPT, GPTConfig


@cache
def gpt(layers: int, rows: int = 4, dtype: torch.dtype = torch.float32, **degrees: int) -> Program:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, block_size=8, n_layer=layers, n_head=2, n_embd=8))
    x = torch.randint(0, 32, (rows, 8))
    return compile(model.to(dtype), example_inputs=(x, x), **degrees)


def full() -> Program:
    return gpt(4, rows=8, t=2, p=2, d=2, v=2)


def deep() -> Program:
    return gpt(7, p=2)


def staged() -> Program:
    """More stages than are drawn one by one."""
    return gpt(8, rows=8, p=8)


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())  # a "quoted" comment with a \ in it: \"


class Stack(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.layers:
            x = one(x)
        return x.square().sum()


class InlinedStack(Stack):
    """The same, but what is between the modules of a layer belongs to the stack: a layer is not in one piece."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.layers:
            x = x + one.down(one.up(one.norm(x)).relu())
        return x.square().sum()


class Skipping(nn.Module):
    """The first layer's value is read again by the last stage: it passes by those between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        x = first
        for one in self.layers[1:]:
            x = one(x)
        return (x * first).sum()


def of(model: nn.Module, **degrees: int) -> Program:
    return compile(model, example_inputs=(torch.randn(4, 8),), **degrees)
