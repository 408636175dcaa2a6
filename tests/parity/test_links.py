"""How values travel between stages changes no bit of the result: scattered or whole, packed or alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from tests.parity.models import VOCAB, batch, dropping_gpt, gpt, separate, skipping, uneven


class Chain(nn.Module):
    """No residual to cut at: stages end in the middle of a product, and values of all four types cross."""

    def __init__(self, layers: int = 6, width: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


COLUMNS = {
    "shard": [{"pattern": f"layers.{i}.weight", "dim": int(i in (2, 5)), "axis": "tp"} for i in range(6)]
}
"""Splits of a Chain of six layers with which a gathered value, too, crosses: two column-parallel layers follow each other."""


class Masked(nn.Module):
    """A mask of booleans skips the stages between, beside a value of an odd width."""

    def __init__(self, layers: int = 4, width: int = 15) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.bias = nn.Parameter(torch.randn(VOCAB))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        is_large = x > 0.5
        for layer in self.layers:
            x = x + layer(x).tanh()
        x = x.masked_fill(is_large, 0.0)
        return F.cross_entropy((self.head(x) + self.bias).flatten(0, 1), labels.flatten())


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


SCATTERED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "gpt t2 p2": (gpt, {"t": 2, "p": 2}),
    "gpt t2 p2 gpipe": (gpt, {"t": 2, "p": 2, "schedule": "gpipe"}),
    "gpt t2 p2 v2": (gpt, {"t": 2, "p": 2, "v": 2, "num_microbatches": 4}),
    "gpt t2 p4 v1 d2": (gpt, {"t": 2, "p": 4, "d": 2, "num_microbatches": 2}),
    "gpt t3 p2": (gpt, {"t": 3, "p": 2}),
    "gpt t4 p2 v2": (gpt, {"t": 4, "p": 2, "v": 2, "num_microbatches": 4}),
    "gpt t2 p4 v2 inside layers": (lambda: gpt(2), {"t": 2, "p": 4, "v": 2, "num_microbatches": 4}),
    "gpt of width 30, t4": (lambda: gpt(heads=3, width=30), {"t": 4, "p": 2, "num_microbatches": 8}),
    "separate t2 p2 d2": (separate, {"t": 2, "p": 2, "d": 2}),
    "separate t2 p4 v2 inside layers": (lambda: separate(2), {"t": 2, "p": 4, "v": 2, "num_microbatches": 4}),
    "skipping t2 p3": (skipping, {"t": 2, "p": 3}),
    "skipping t3 p2 v3": (skipping, {"t": 3, "p": 2, "v": 3, "num_microbatches": 4}),
    "skipping t4 p4": (skipping, {"t": 4, "p": 4}),
    "chain t2 p4 v2": (Chain, {"t": 2, "p": 4, "v": 2, "num_microbatches": 4}),
    "chain of columns t2 p4 v2": (Chain, {"t": 2, "p": 4, "v": 2, "num_microbatches": 4, "plan": COLUMNS}),
    "chain t4 p2": (Chain, {"t": 4, "p": 2}),
    "masked t2 p3": (Masked, {"t": 2, "p": 3}),
    "masked t4 p2 v2": (Masked, {"t": 4, "p": 2, "v": 2, "num_microbatches": 2}),
    "dropout t2 p2": (lambda: dropping_gpt(2), {"t": 2, "p": 2, "num_microbatches": 2}),
    "hooks t2 p2": (
        gpt,
        {
            "t": 2,
            "p": 2,
            "async_tensor_model_parallel_allreduce": True,
            "accumulate_allreduce_grads_in_fp32": True,
            "delay_wgrad_compute": "before_reduce",
        },
    ),
}


@pytest.mark.one_in(36)
@pytest.mark.filterwarnings("ignore:.*of the FLOPs of matrix products")
@pytest.mark.parametrize(("make", "mesh"), SCATTERED.values(), ids=SCATTERED)
def test_scattered_is_the_model(make: Callable[[], nn.Module], mesh: dict[str, Any]) -> None:
    ids, targets = batch()
    targets = targets if make is skipping else uneven(targets)
    autoptd.verify(seeded(make), **mesh, p2p="scatter_gather", example_inputs=(ids, targets), steps=2)


def test_all_four_types_cross_and_are_scattered_where_they_are_equal() -> None:
    mesh = {"t": 2, "p": 4, "v": 2, "num_microbatches": 4}
    program = autoptd.compile(Chain(), **mesh, p2p="scatter_gather", example_inputs=batch(), plan=COLUMNS)
    type_of = {one.name: one.type for one in program.crossings}
    parts = {(type_of[one.names[0]], one.is_gradient): one.parts for one in program.transfers}
    assert parts == {
        **{("I", False): 2, ("I", True): 2},
        **{("R", False): 2, ("R", True): 1},
        **{("P", False): 1, ("P", True): 2},
        **{("S", False): 1, ("S", True): 1},
    }


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*of the FLOPs of matrix products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("t", [2, 3])
def test_scattered_and_direct_give_the_same_bits(t: int, dtype: torch.dtype) -> None:
    losses, gradients = [], []
    for p2p in ("direct", "scatter_gather"):
        model = skipping().to(dtype)
        pm = autoptd.parallelize(
            model, t, 2, v=2, num_microbatches=2, p2p=p2p, backend="local", example_inputs=batch()
        )
        losses.append((pm.step(*batch()), pm.eval_step(*batch())))
        gradients.append(pm.gradients())
        pm.close()
    assert torch.equal(losses[0][0], losses[1][0]) and torch.equal(losses[0][1], losses[1][1])
    assert all(torch.equal(x, gradients[1][name]) for name, x in gradients[0].items())


@pytest.mark.parametrize("mesh", [{"t": 1, "p": 2}, {"t": 2, "p": 1}], ids=str)
def test_a_request_that_means_nothing_is_no_error(mesh: dict[str, int]) -> None:
    program = autoptd.compile(gpt(2), **mesh, p2p="scatter_gather", example_inputs=batch())
    assert all(one.parts == 1 for one in program.transfers)


def test_an_unknown_way_to_send_is_refused() -> None:
    with pytest.raises(autoptd.PlanError, match=r"p2p='broadcast': no such choice.*'scatter_gather'"):
        autoptd.compile(gpt(2), p=2, p2p="broadcast", example_inputs=batch())


def test_it_is_in_the_plan_and_in_the_saved_program(tmp_path: Any) -> None:
    program = autoptd.compile(gpt(2), t=2, p=2, p2p="scatter_gather", example_inputs=batch())
    assert program.plan["options"]["p2p"] == "scatter_gather"
    program.save(tmp_path)
    assert type(program).load(tmp_path).transfers == program.transfers
    whole = autoptd.compile(gpt(2), t=2, p=2, p2p="direct", example_inputs=batch())
    assert whole.fingerprint() != program.fingerprint() and whole.sources == program.sources
