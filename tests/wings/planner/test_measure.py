"""What measuring makes of times: fits, and a file that can be read back.

Nothing here depends on how fast the machine is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from autoptd.errors import PlanError
from autoptd.wings.cli import main
from autoptd.wings.planner import measure
from autoptd.wings.planner.cluster import find_cluster


def test_products_are_fitted_by_rate_and_ramp() -> None:
    timed = [
        (side * side * k, k, 2 * side * side * k * (1 + 40 / k) / 3e10)
        for side in (256, 512)
        for k in (32, 512)
    ]
    rate, ramp = measure.fit_products(timed)
    assert rate == pytest.approx(3e10) and ramp == pytest.approx(40)
    flat = [(1000 * k, k, 2 * 1000 * k / 3e10 * (1 - 1 / k)) for k in (32, 512)]  # short ones are faster
    assert measure.fit_products(flat)[1] == 0


def test_lines_are_fitted_by_relative_errors() -> None:
    x = np.array([1.0, 1e3, 1e6])
    assert measure.fit_line(x, 2e-9 * x + 1e-4) == pytest.approx((2e-9, 1e-4))


def test_what_is_measured_can_be_read_as_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MIN_SECONDS", 0.0005)
    monkeypatch.setattr(measure, "SIDES", {"cpu": (32,), "cuda": (256,)})
    monkeypatch.setattr(measure, "DEPTHS", {"cpu": (8, 32), "cuda": (64, 256)})
    assert main(["measure", str(tmp_path / "mine.toml"), "--ranks", "1"]) == 0
    cluster = find_cluster(tmp_path / "mine.toml")
    assert cluster.gpus_per_node == 1 and cluster.software == find_cluster("laptop-cpu").software
    assert cluster.software.context_bytes < 1e9  # no CUDA, no NCCL
    assert (
        cluster.gpu.matrix_flops > 1e6
        and cluster.gpu.memory_bandwidth > 1e6
        and cluster.gpu.memory_bytes > 1e6
    )
    assert "cannot be measured" in (tmp_path / "mine.toml").read_text()


class Queue:
    """A stand-in for a GPU and a clock: a call takes 10 us there and 1 us here, to wait takes a millisecond
    more.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.busy_until, self.calls = 0.0, 0.0, 0
        monkeypatch.setattr("torch.cuda.synchronize", self.wait)
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)

    def call(self, seconds: float = 1e-5) -> None:
        self.now += 1e-6
        self.busy_until = max(self.busy_until, self.now) + seconds
        self.calls += 1

    def wait(self) -> None:
        self.now = max(self.now, self.busy_until) + 1e-3


def test_times_of_a_gpu_are_those_of_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting hides among many calls, and what was started before does not count."""
    queue = Queue(monkeypatch)
    assert measure.seconds_of(queue.call, "cuda") == pytest.approx(1e-5, rel=0.03)
    assert queue.calls * 1e-5 > 5 * measure.MIN_SECONDS
    seen = measure.repeated(queue.call, "cuda", lambda: queue.call(0.5))
    assert len(seen) == 10 and max(seen) < 2e-3


def test_products_are_of_numbers_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ones draw less power on a GPU, which then runs faster than it ever will."""
    made: list[torch.Tensor] = []
    monkeypatch.setattr(measure, "seconds_of", lambda call, _: made.append(call()) or 1.0)
    monkeypatch.setattr(measure, "SIDES", {"cpu": (8,)})
    measure.time_products("cpu", torch.float32)
    assert all(one.unique().numel() == 64 for one in made) and len(made) == len(measure.DEPTHS["cpu"])


def test_strings_survive_a_file() -> None:
    assert measure.to_toml({"source": 'a "b" \\ c', "gpu": {"units": 3, "ramp": 2.5}}).splitlines() == [
        'source = "a \\"b\\" \\\\ c"',
        "",
        "[gpu]",
        "units = 3",
        "ramp = 2.500e+00",
    ]


def test_more_ranks_than_there_can_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="ranks=0") as none:
        measure.measure_cluster(0)
    assert none.value.remedy.startswith("1 rank")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(PlanError, match=r"this machine has 2 GPUs\. Remedy: 1 to 2"):
        measure.measure_cluster(3)


def test_nothing_is_measured_for_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(_: int) -> None:
        raise AssertionError("this would be lost")

    monkeypatch.setattr("autoptd.wings.planner.measure.measure_cluster", measured)
    assert main(["measure", str(tmp_path / "nowhere" / "mine.toml")]) == 2
    assert main(["measure", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "there is no directory" in printed and "is a directory" in printed
