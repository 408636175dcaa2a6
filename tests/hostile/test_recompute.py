"""Recomputation of layers that are not a GPT's: folded dims, several results of which some are unread, operators of users."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.ir.machine import Machine

WIDTH, VOCAB = 16, 32
# Collectives start at once: models as small as these are split in many ways.
MACHINE = Machine(latency=1e-9)


@torch.library.custom_op("recompute::half_more", mutates_args=())
def half_more(x: Tensor) -> Tensor:
    return x * 1.5


half_more.register_fake(torch.empty_like)
half_more.register_autograd(lambda ctx, grad: grad * 1.5)
autoptd.register_rule("recompute::half_more", "... -> ...")


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.run: Callable[[Layer, Tensor, Tensor], Tensor] = KINDS[kind]
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.route = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x, self.norm(x))


def folded(layer: Layer, x: Tensor, y: Tensor) -> Tensor:
    """Two products read a reshaped value, which is gathered with sequence parallelism."""
    y = y.reshape(-1, WIDTH)
    return x + layer.down(F.silu(layer.gate(y)) * layer.up(y)).reshape(x.shape)


def routed(layer: Layer, x: Tensor, y: Tensor) -> Tensor:
    """Saves indices that nobody reads."""
    best, _ = layer.route(y).softmax(-1).topk(2, -1)
    return x + layer.down(F.gelu(layer.up(y))) * best.sum(-1, keepdim=True)


def largest(layer: Layer, x: Tensor, y: Tensor) -> Tensor:
    return x + layer.down(torch.tanh(layer.up(y))) * layer.gate(y).max(-1, keepdim=True)[0]


def of_users(layer: Layer, x: Tensor, y: Tensor) -> Tensor:
    return x + layer.down(half_more(F.gelu(layer.up(y))).square())


def read_late(layer: Layer, x: Tensor, y: Tensor) -> Tensor:
    """Values with many readers, the last of them far behind."""
    h = torch.sigmoid(layer.up(y))
    squares = h * h
    return x + layer.down(layer.gate(x).exp() * squares) + layer.down(h)


def halved(layer: Layer, x: Tensor, y: Tensor) -> Tensor:
    q, k = layer.up(y).chunk(2, -1)
    return x + q * k / (1 + y.std(-1, keepdim=True)) + layer.down(torch.cat([q, k], -1))


KINDS = {function.__name__: function for function in (folded, routed, largest, of_users, read_late, halved)}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"t": 2},
    {"t": 2, "sequence_parallel": True},
    {"p": 2, "schedule": "zb_h1"},
    {"t": 2, "p": 2, "sequence_parallel": True, "fuse": False, "async_tensor_model_parallel_allreduce": True},
)
MODES: tuple[Any, ...] = ("full", ("*",), ("*.up", "*.gate"), ("*.norm",))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def gradients(kind: str, number: int, recompute: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Model(kind)
    ids, labels = torch.randint(VOCAB, (2, 4, 8))
    asked = {"num_microbatches": 2, "machine": MACHINE, "timeout": 30, "recompute": recompute}
    pm = autoptd.parallelize(
        model, backend="local", example_inputs=(ids, labels), **asked, **SETTINGS[number]
    )
    try:
        return {"loss": pm.step(ids, labels), **pm.gradients()}
    finally:
        pm.close()


@cache
def kept(kind: str, number: int) -> dict[str, Tensor]:
    return gradients(kind, number, False)


CASES = [(kind, number, mode) for kind in KINDS for number in range(len(SETTINGS)) for mode in MODES]


@pytest.mark.one_in(48)
@pytest.mark.parametrize(("kind", "number", "mode"), CASES, ids=map(str, CASES))
def test_the_same_bits(kind: str, number: int, mode: Any) -> None:
    found, expected = gradients(kind, number, mode), kept(kind, number)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_saved_stages_run_alone(tmp_path: Any) -> None:
    """`python out/stage_0.py --check`, with the recipes of its own file and of layers.py."""
    from autoptd.runtime.step.stage import LAYERS, load_layers, load_stage
    from autoptd.runtime.step.standalone import check_stage

    ids, labels = torch.randint(VOCAB, (2, 4, 8))
    program = autoptd.compile(Model("folded"), t=2, p=3, recompute="full", example_inputs=(ids, labels))
    program.save(tmp_path)
    layers = load_layers(program.sources[LAYERS], LAYERS) if LAYERS in program.sources else None
    assert any("_again(self" in text for text in program.sources.values())
    for number in range(3):
        stage = load_stage(program.sources[f"stage_{number}.py"], f"stage_{number}.py", layers)
        assert check_stage(stage, tmp_path).wrong == []


class Merged(nn.Module):
    """Layers that end in the sum of two partial sums: the next one begins with their all-reduce, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 32) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(32, WIDTH) for _ in range(3))
        self.join = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        first = x = self.embed(ids)
        for up, down in zip(self.up, self.down, strict=True):
            x = F.layer_norm(down(F.gelu(up(x))) + self.join(torch.cat([x, first], -1)), [WIDTH])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_a_sum_in_the_memory_of_an_argument_is_kept() -> None:
    torch.manual_seed(0)
    model, batch = Merged(), torch.randint(VOCAB, (2, 4, 8)).unbind()
    asked = {"t": 2, "sequence_parallel": False, "recompute": ["*"], "example_inputs": batch}
    program = autoptd.compile(model, **asked)
    method = program.sources["stage_0.py"].split("def layer(")[1].split("\n    def ")
    assert "x = self.kept(rt.p_to_i(x, tp, inplace=True" in method[0]
    assert "layer_again(" in method[1] and "p_to_i" not in method[1] and "down" not in method[1]
    autoptd.verify(model, **asked, timeout=30)  # raises where anything differs
