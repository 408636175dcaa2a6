"""A partitioned model beside the plain one: torch's own loop on the whole batch, new data in every step.

assert_parity(Net(), [(x, y), (x2, y2)], t=2, num_microbatches=2)       # losses, gradients, updated parameters, in float64
outcome(Net(), [(x, y)], d=2)                                           # "" where they are equal, or the error's text
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import InternalError, PlanError, TraceError

MESHES: list[dict[str, Any]] = [
    {"num_microbatches": 1},
    {"num_microbatches": 4},
    {"d": 2, "num_microbatches": 1},
    {"d": 2, "num_microbatches": 4},
    {"t": 2, "num_microbatches": 2},
    {"t": 2, "d": 2, "num_microbatches": 2},
]
"""For a batch of eight rows; the fourth has one row in every microbatch."""


def wide(batch: Sequence[Any]) -> tuple[Any, ...]:
    """The batch with its floats in float64."""
    return tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in batch)


def assert_parity(model: nn.Module, batches: Sequence[Sequence[Any]], **mesh: Any) -> autoptd.ParallelModel:
    """Train both by SGD, a step for every batch; returns the partitioned one."""
    model = copy.deepcopy(model).double()
    batches = [wide(batch) for batch in batches]
    pm = autoptd.parallelize(model, backend="local", example_inputs=tuple(batches[0]), **mesh)
    ours, theirs = pm.optimizer(torch.optim.SGD, lr=0.05), torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in batches:
        loss, expected = pm.step(*batch), model(*batch)
        expected = expected if isinstance(expected, Tensor) else expected["loss"]
        expected.backward()
        assert loss.dtype == expected.dtype
        assert_near({"loss": loss}, {"loss": expected.detach()}, 1e-3 * abs(float(expected.detach())))
        named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        largest = max((float(one.abs().max()) for one in named.values() if one.numel()), default=1.0)
        found = {name: one for name, one in pm.gradients().items() if name in named}
        assert_near(found, named, 1e-3 * largest)
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
    final = {name: p.detach() for name, p in model.named_parameters()}
    assert_near({name: one for name, one in pm.state_dict().items() if name in final}, final, 1e-3)
    pm.close()
    return pm


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], floor: float) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        error = float((found[name] - one).abs().max()) if one.numel() else 0.0
        assert error <= 1e-9 * max(float(one.abs().max()) if one.numel() else 0.0, floor), (name, error)


def refusal(model: nn.Module, batch: Sequence[Any], **mesh: Any) -> str:
    """The one clear error with which compiling ends; fails where there is none, or another error."""
    try:
        autoptd.compile(copy.deepcopy(model).double(), example_inputs=wide(batch), **mesh)
    except InternalError:
        raise
    except (PlanError, TraceError) as error:
        assert error.site and error.fact and error.remedy
        return str(error)
    raise AssertionError("it compiles")
