"""Which device a rank takes, and that it is the current one while the rank runs; where there is no CUDA, with stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import autoptd
from autoptd import compat
from autoptd.errors import PlanError, RuntimeFault
from autoptd.ir.mesh import Mesh
from autoptd.runtime.world import devices
from autoptd.runtime.world.threads import Ranks, ThreadWorld
from autoptd.wings.planner import auto
from autoptd.wings.planner.cluster import find_cluster
from tests.parity.models import batch, gpt


class Cuda:
    """What torch.cuda would answer on a machine with `count` devices, `current` the current one of this thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 4, current: int = 0) -> None:
        self.current = current
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.device)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, torch.device(device).index
        yield
        self.current = before


@pytest.mark.parametrize(
    ("device", "local_rank", "count", "expected"),
    [
        ("cuda", "3", 4, "cuda:3"),
        ("cuda", None, 4, "cuda:2"),  # the current one
        ("cuda", "3", 1, "cuda:0"),  # a launcher that shows each process its own device only
        ("cuda:1", "3", 4, "cuda:1"),
        ("cpu", "3", 4, "cpu"),
        (None, "3", 4, "cuda:3"),
    ],
)
def test_the_device_of_a_process(
    monkeypatch: pytest.MonkeyPatch, device: str | None, local_rank: str | None, count: int, expected: str
) -> None:
    Cuda(monkeypatch, count, current=2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert devices.process_device(device, None) == torch.device(expected)
    monkeypatch.setattr(devices, "bound_device", lambda: torch.device("cuda", 1))
    assert devices.process_device("cuda", None) == torch.device("cuda", 1)
    assert devices.process_device(None, "gloo") == torch.device("cpu")


def test_threads_take_the_device_that_is_current_where_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, current=2)
    shared = ThreadWorld(Mesh(), device="cuda")
    assert [world.device for world in shared.worlds] == [torch.device("cuda", 2)]
    cuda.current = 0
    assert Ranks(shared).run(lambda world: cuda.current) == [2]  # the one rank, in the caller's thread
    assert cuda.current == 0


def test_a_device_that_is_not_there_hangs_nobody() -> None:
    """Each thread's first call of CUDA fails: that is a fault of a rank, as any other."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    ranks = Ranks(ThreadWorld(Mesh(t=2), device="cuda:0", timeout=5.0))
    with pytest.raises(RuntimeFault, match=r"rank \d at"):
        ranks.run(lambda world: world.group(("tp",)).all_reduce(torch.ones(1), "sum"))
    ids, targets = batch(4)
    with pytest.raises(PlanError, match="torch finds 0 CUDA devices"):
        autoptd.parallelize(
            gpt(2),
            t=2,
            backend="local",
            device="cuda",
            timeout=5.0,
            example_inputs=(ids, targets),
            fuse="eager",
        )


@pytest.mark.parametrize(
    ("backend", "environment", "device", "expected"),
    [
        (None, True, None, "cuda:1"),  # the model is on the CPU, its ranks will not be
        ("nccl", True, None, "cuda:1"),
        ("gloo", True, None, "cpu"),
        (None, True, "cpu", "cpu"),
        ("local", True, None, "cpu"),  # threads, where the model is
        (None, False, None, "cpu"),
        ("local", False, "cuda", "cuda:0"),
    ],
)
def test_compiler_and_planner_ask_for_the_device_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, environment: bool, device: str | None, expected: str
) -> None:
    Cuda(monkeypatch)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value) if environment else monkeypatch.delenv(name, raising=False)
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: asked.append(device) or "NVIDIA H200")
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    model, found = gpt(2), torch.device(expected)
    assert devices.device_of_ranks(model.parameters(), device, backend) == found
    fusion = "triton" if found.type == "cuda" else "eager"
    assert devices.default_fusion(model.parameters(), device, backend) == fusion
    clusters: list[str] = []
    monkeypatch.setattr(auto, "find_cluster", lambda name: clusters.append(name) or find_cluster(name))
    gpus = {} if environment else {"gpus": 2}
    auto.planned(model, batch(4), {"t": "auto", "device": device, "backend": backend, **gpus})
    assert clusters == ["dgx-h200" if found.type == "cuda" else "laptop-cpu"]
    assert asked == ([found] if found.type == "cuda" else [])


def test_sends_and_receives_get_few_ctas(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(max_ctas=32)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    limit = timedelta(seconds=5)
    assert compat._nccl_options("nccl", limit, 4).config.max_ctas == 4
    assert compat._nccl_options("gloo", limit, 4) is None
    for options in (compat._nccl_options("nccl", limit, None), compat._nccl_options("nccl", limit, 4)):
        assert options.is_high_priority_stream and options._timeout == limit
    assert compat._nccl_options("nccl", limit, None).config.max_ctas == 32
    monkeypatch.setattr(
        Options, "__init__", lambda self: None
    )  # built against an NCCL that has no such bound
    assert isinstance(compat._nccl_options("nccl", limit, 4), Options)


def test_a_model_is_compiled_for_gpus_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device is asked for its number: ranks are elsewhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.thread_device("cuda") == torch.device("cuda")
