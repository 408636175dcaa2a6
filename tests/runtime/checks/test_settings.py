"""Groups of an optimizer that are set otherwise on one rank: named by rank, group and key."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import autoptd
from autoptd.errors import RuntimeFault
from autoptd.runtime.checks.copies import check_settings, settings_of
from autoptd.runtime.step.launch import Rank
from tests.runtime.params.test_own_optimizers import Grouped, batch, net

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD


def values() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]


def set_lr(optimizer: Any) -> None:
    optimizer.param_groups[-1]["lr"] = 0.5


def fill_lr(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"].mul_(0.5)


def set_betas(optimizer: Any) -> None:
    optimizer.param_groups[0]["betas"] = (0.8, 0.999)


def schedule_only(optimizer: Any) -> None:
    """No number that a step reads: a scheduler notes where it began."""
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.param_groups[0] |= {"logged as": "decay", "fused": True}


def stepped() -> torch.optim.Optimizer:
    optimizer: Any = SGD(values(), lr=0.1)
    optimizer.updates = 3
    return optimizer


def step_again(optimizer: Any) -> None:
    optimizer.updates += 1


def step_without_parameters(optimizer: Any) -> None:
    optimizer.updates = 0
    optimizer.param_groups[0]["params"] = []


def schedule(optimizer: Any) -> None:
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize(
    "make, change, told",
    [
        (lambda: AdamW(values(), lr=0.1), set_lr, "lr of group 0 is 0.1 on rank 0, 2, 3 and 0.5 on rank 1"),
        (lambda: Grouped(values()), set_lr, "lr of group 1 is 0.001 on rank 0, 2, 3 and 0.5 on rank 1"),
        (
            lambda: AdamW(values(), lr=torch.tensor(0.5)),
            fill_lr,
            "lr of group 0 is 0.5 .* and 0.25 on rank 1",
        ),
        (lambda: AdamW(values()), set_betas, r"betas of group 0 is \(0.9, 0.999\) .* and \(0.8, 0.999\)"),
        (lambda: SGD(values(), lr=0.1), schedule_only, ""),
        (lambda: Grouped(values()), schedule, ""),
        (stepped, step_again, r"optimizer.step\(\) has run 3 times on rank 0, 2, 3 and 4 times on rank 1\."),
        (stepped, step_without_parameters, ""),
    ],
)
def test_a_setting_of_one_rank(make: Any, change: Any, told: str) -> None:
    """Each rank has an optimizer of its own, as processes have."""
    pm = autoptd.parallelize(net(), t=2, d=2, zero=1, backend="local", example_inputs=batch(0))
    made = [make() for _ in range(4)]
    change(made[1])

    def check(rank: Rank) -> None:
        optimizers = {7: made[rank.world.rank]}
        if rank.world.rank == 2:
            # One that the others have not any more.
            optimizers[3] = SGD(values(), lr=9.0)
        check_settings(rank.world, optimizers, step=5)

    outcome: Any = contextlib.nullcontext()
    if told:
        outcome = pytest.raises(RuntimeFault, match=f"step 5: .*{told}")
    with outcome:
        pm.run.ranks.run("check", check)
    pm.close()


def test_what_has_no_plain_value_is_left_out() -> None:
    optimizer = Grouped(values())
    optimizer.param_groups[0] |= {
        "hook": print,
        "bounds": [0.1, None, torch.tensor([1, 2])],
        "mixed": (1, print),
    }
    found = settings_of(optimizer)
    assert found[0, "bounds"] == "(0.1, None, [1, 2])"
    assert not {(0, "hook"), (0, "mixed"), (0, "params")} & set(found)


def test_a_step_within_a_step_counts_once() -> None:
    """Torch hooks the step of a class that somebody has used by itself; one rank may have, and others not."""

    class Own(AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    AdamW(values())
    pm = autoptd.parallelize(net(), t=2, backend="local", example_inputs=batch(0))
    optimizer: Any = pm.optimizer(Own, lr=0.1)
    for seed in range(3):
        pm.step(*batch(seed))
        optimizer.step()
    assert optimizer.updates == 3
    pm.close()
