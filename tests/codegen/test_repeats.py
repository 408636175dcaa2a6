"""Repeated layers of many kinds are written once, mean what was written out, and the files do not grow with depth."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoptd
from autoptd.codegen.repeats import Steps

Tensor = torch.Tensor
WIDTH, HEADS, LENGTH, VOCAB = 16, 2, 6, 12


class Layer(nn.Module):
    """An attention with a mask of its own and an MLP; `scale` and `shift` are numbers of its own."""

    def __init__(self, scale: float = 1.0, shift: int = 0, rotate: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.proj, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.scale, self.shift, self.rotate = scale, shift, rotate

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            part.view(*part.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(WIDTH, dim=2)
        )
        if self.rotate:
            q, k = q.cos() * q, k.cos() * k
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).reshape(x.shape)) * self.scale
        return x + self.down(F.gelu(self.up(x)).roll(self.shift, 1))


class Stack(nn.Module):
    """A decoder of `Layer`s; `way` says what differs from layer to layer."""

    def __init__(self, way: str, depth: int) -> None:
        super().__init__()
        self.way = way
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(self.make(k) for k in range(depth))
        self.tail = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCAB)
        full = torch.ones(LENGTH, LENGTH).tril()
        self.register_buffer("full", full.log())
        self.register_buffer("local", (full - full.tril(-3)).log())

    def make(self, k: int) -> Layer:
        if self.way == "floats":
            return Layer(scale=1.0 / (k + 1))
        if self.way == "steps":
            return Layer(shift=2 * k + 1)
        return Layer(rotate=self.way == "kinds" and k % 3 != 2)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = first = self.wte(ids)
        layers = [self.layers[0]] * len(self.layers) if self.way == "shared" else self.layers
        for k, layer in enumerate(layers):
            if self.way == "skip":
                x = x * 0.5 + first * 0.5
            x = layer(x, self.local if self.way == "masks" and k % 2 else self.full)
        if self.way == "two stacks":
            for linear in self.tail:
                x = x + linear(torch.sin(torch.tanh(x) * 2.0))
        return F.cross_entropy(self.head(x).view(-1, VOCAB), targets.view(-1))


def batch(rows: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids, targets = torch.randint(0, VOCAB, (2, rows, LENGTH))
    return ids, targets


@cache
def text(way: str, depth: int, t: int = 2) -> str:
    torch.manual_seed(0)
    request = {"t": t, "num_microbatches": 2, "fuse": False}  # with fusion a causal mask is not read
    return autoptd.compile(Stack(way, depth), **request, example_inputs=batch()).sources["stage_0.py"]


EXPECTED = {
    "same": "x = self.layer(w.layers[i], x, b.full)",
    "masks": "x = self.layer(w.layers[i], x, (b.full, b.local)[i % 2])",
    "floats": "x = self.layer(i, w.layers[i], x, b.full)",
    "steps": "x = self.layer(i, w.layers[i], x, b.full)",
    "kinds": "x = self.layer(w.layers[i], w.layers[i + 1], w.layers[i + 2], x, b.full)",
    "shared": "x = self.layer(w.layers[0], x, ",
    "skip": "x = self.layer(w.layers[i], x, x_whole, b.full)",
    "two stacks": "x = self.layer_2(w.tail[i], w.tail[i + 1], x)",  # column and row by turns: fewer collectives
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("way", EXPECTED)
def test_the_file_has_every_layer_once(way: str) -> None:
    short = text(way, 12 if way == "kinds" else 6)
    assert EXPECTED[way] in short and short.count("F.scaled_dot_product_attention") <= 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", ["kinds", "floats", "skip"])
def test_the_file_does_not_grow_with_depth(way: str) -> None:
    small, large = text(way, 9), text(way, 12)
    longer = 3 if way == "floats" else 0  # one number per layer
    assert len(large.splitlines()) <= len(small.splitlines()) + longer
    assert large.count("F.scaled_dot_product_attention") == small.count("F.scaled_dot_product_attention")


def test_numbers_are_spelled_by_i() -> None:
    assert "torch.roll(gelu, [2 * i + 1], [1])" in text("steps", 6)
    short = text("floats", 2, t=1)
    assert "(1.0, 0.5)[i]" in short


@pytest.mark.one_in(12)
@pytest.mark.parametrize("way", EXPECTED)
def test_the_loop_means_the_layers(way: str) -> None:
    torch.manual_seed(0)
    mesh = {"p": 2, "d": 2} if way in ("same", "kinds") else {"t": 2, "p": 2, "v": 2}
    autoptd.verify(
        Stack(way, 6), **mesh, num_microbatches=2, example_inputs=batch(4 * mesh.get("d", 1)), steps=2
    )


def test_what_is_made_in_the_first_layer_for_all_is_no_loop_argument_of_itself() -> None:
    """Layer 0 makes a bias that the others read: it is outside of their loop."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

        def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
            x, bias = self.wte(ids), None
            for layer in self.layers:
                y = torch.tanh(layer(torch.sin(x)))
                bias = y.cos() if bias is None else bias
                x = x + y * bias
            return F.cross_entropy(self.head(x).view(-1, VOCAB), targets.view(-1))

    torch.manual_seed(0)
    model = Shared()
    source = autoptd.compile(model, example_inputs=batch(), num_microbatches=2).sources["stage_0.py"]
    assert "for i in range(1, 6):" in source
    autoptd.verify(model, p=2, num_microbatches=2, example_inputs=batch())


def values(text: str, steps: Steps, count: int) -> list[float]:
    return [eval(text, {"i": steps.first + k * steps.step}) for k in range(count)]


@pytest.mark.parametrize("first, step", [(0, 1), (3, 1), (0, 2), (5, 3), (7, -1)])
@pytest.mark.parametrize(
    "of", [lambda k: k, lambda k: 3 * k + 1, lambda k: 10 - k, lambda k: (4, 9)[k % 2], lambda k: 1 / (k + 1)]
)
def test_an_expression_of_i_gives_every_period_its_number(
    first: int, step: int, of: Callable[[int], float]
) -> None:
    steps, wanted = Steps(first, step), [of(k) for k in range(6)]
    assert values(steps.express(wanted), steps, 6) == wanted
    assert all(math.isfinite(one) for one in wanted)


class Scales(nn.Module):
    """Layers that are no modules: parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.full((2,), 1.0 + i)) for i in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x.sum()


def test_a_layer_that_is_a_parameter() -> None:
    model, x = Scales().double(), torch.randn(2, 2, dtype=torch.float64)
    pm = autoptd.parallelize(model, num_microbatches=1, backend="local", example_inputs=(x,))
    assert "for i in range(" in pm.program.sources["stage_0.py"]
    torch.testing.assert_close(pm.step(x), model(x).detach())
    pm.close()
