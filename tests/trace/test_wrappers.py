"""Models that another tool has copied or divided over ranks are refused, with what to pass instead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import autoptd


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refused(model: nn.Module) -> autoptd.PlanError:
    with pytest.raises(autoptd.PlanError) as told:
        autoptd.compile(model, d=2, loss_fn=nn.functional.mse_loss, example_inputs={"input": X, "targets": X})
    return told.value


X = torch.ones(2, 4)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


@pytest.mark.usefixtures("group")
def test_wrappers_are_named() -> None:
    model = nn.parallel.DistributedDataParallel(net())
    assert "DistributedDataParallel" in (told := refused(model)).fact and "model.module" in told.remedy
    # As it advises.
    batch = {"input": X, "targets": X}
    autoptd.compile(model.module, d=2, loss_fn=nn.functional.mse_loss, example_inputs=batch)
    inner = nn.Sequential(nn.Linear(4, 4), nn.parallel.DistributedDataParallel(net()))
    assert "(1.module)" in refused(inner).remedy
    wrapped = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    assert "FullyShardedDataParallel" in refused(wrapped).fact
    divided = fully_shard(net(), mesh=dist.init_device_mesh("cpu", (1,)))
    told = refused(divided)
    assert told.site == "0.weight" and "is a DTensor" in told.fact and "before it is divided" in told.remedy
