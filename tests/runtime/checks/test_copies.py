"""A bit that one rank's memory lost: named by rank and parameter, in a parameter, a master or a moment."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoptd
from autoptd.errors import RuntimeFault
from autoptd.model.parallel_model import ParallelModel
from tests.parity.models import batch, gpt

NAME = "transformer.h.1.mlp.c_fc.weight"


def trained(**keywords: Any) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """After two updates; copies are compared before every third step."""
    x, y = batch(8)
    pm = autoptd.parallelize(gpt(2), **keywords, example_inputs=(x, y), backend="local", check_every=3)
    opt = pm.optimizer(torch.optim.AdamW, lr=1e-3)
    for _ in range(2):
        pm.step(x, y)
        opt.step()
        opt.zero_grad()
    return pm, opt


def flip(x: torch.Tensor) -> None:
    x.data.view(torch.int32).view(-1)[0] ^= 1


@pytest.mark.parametrize(
    "mesh, victim, told",
    [
        ({"d": 3, "batch": 6}, 2, f"{NAME} on rank 2 differs from rank 0 and most others"),
        ({"d": 2, "p": 2}, 3, f"{NAME} differs between ranks 2, 3"),
    ],
)
def test_a_flipped_bit_of_a_parameter(mesh: dict[str, int], victim: int, told: str) -> None:
    x, y = batch(mesh.pop("batch", 8))
    pm = autoptd.parallelize(gpt(2), **mesh, example_inputs=(x, y), backend="local", check_every=3)
    # No optimizer: what has been flipped is not written over.
    pm.step(x, y)
    pm.step(x, y)
    flip(pm.rank_parameters(victim)[NAME])
    with pytest.raises(RuntimeFault, match=told):
        pm.step(x, y)
    pm.close()


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step"])
def test_a_flipped_bit_of_a_moment(key: str) -> None:
    pm, opt = trained(d=2)
    flip(opt.state[pm.rank_parameters(1)[NAME]][key])
    with pytest.raises(RuntimeFault, match=f"step 3: .*state of {NAME} differs between ranks 0, 1"):
        pm.step(*batch(8))
    pm.close()


@pytest.mark.parametrize("mesh", [{"d": 4}, {"c": 2, "d": 2}], ids=str)
def test_a_flipped_bit_of_what_two_ranks_share_each_of_two_times(mesh: dict[str, int]) -> None:
    """Four ranks that sum gradients, two of which share one state: rank 1 has the same part of it as rank 3."""
    pm, opt = trained(**mesh, zero=1, dp_shard=2)
    (own,) = (rank for rank in pm.run.ranks.here if rank.world.rank == 3)
    flip(opt.state[own.params.stored[NAME]]["exp_avg"])
    with pytest.raises(RuntimeFault, match=f"the optimizer's state of {NAME} differs between ranks 1, 3"):
        pm.step(*batch(8))
    pm.close()


def test_a_flipped_bit_of_a_master() -> None:
    pm, _ = trained(d=2, precision="bf16")
    (own,) = (rank for rank in pm.run.ranks.here if rank.world.rank == 1)
    # The lowest bit of float32: what stages use of it, in bfloat16, stays.
    flip(own.params.stored[NAME])
    with pytest.raises(RuntimeFault, match=f"not: the .*state of {NAME} differs between ranks 0, 1"):
        pm.step(*batch(8))
    pm.close()


@pytest.mark.parametrize(
    "keywords",
    [
        {"c": 2, "d": 2, "zero": 1},
        {"t": 2, "p": 2},
        pytest.param({"d": 2, "zero": 1}, marks=pytest.mark.thorough),
        pytest.param({"d": 4, "zero": 1, "dp_shard": 2}, marks=pytest.mark.thorough),
    ],
)
def test_equal_copies_pass(keywords: dict[str, Any]) -> None:
    pm, opt = trained(**keywords)
    pm.step(*batch(8))
    opt.step()
    pm.close()
