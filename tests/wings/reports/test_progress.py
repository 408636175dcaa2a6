"""Progress of a run: what is logged, where time goes, and that other ranks are quiet."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import autoptd
from autoptd.errors import PlanError
from autoptd.ir.mesh import Coordinate
from autoptd.runtime.world.threads import ThreadGroup
from autoptd.runtime.world.world import Done
from autoptd.wings.reports.progress import known_peak, progress_line
from autoptd.wings.words import bytes_text
from examples.gpt import GPT, GPTConfig

Tensor = torch.Tensor


def make() -> tuple[autoptd.ParallelModel, Tensor]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, block_size=8, n_layer=2, n_head=2, n_embd=8))
    x = torch.randint(0, 32, (4, 8))
    return autoptd.parallelize(model, t=2, p=2, backend="local", example_inputs=(x, x)), x


def test_a_measured_step_is_a_step_and_its_times_add_up() -> None:
    pm, x = make()
    plain = pm.step(x, x)
    wanted = {name: grad.clone() for name, grad in pm.gradients().items()}
    opt = pm.optimizer(torch.optim.SGD, lr=0.1)
    opt.zero_grad()
    loss, times = pm.measured_step(x, x)
    found = pm.gradients()
    pm.close()
    assert torch.equal(loss, plain) and all(torch.equal(found[name], grad) for name, grad in wanted.items())
    assert [one.rank for one in times] == [0, 1, 2, 3]
    for one in times:
        assert one.compute > 0 and one.communication > 0 and one.peak_bytes > 1 << 20
        assert one.compute + one.communication + one.waiting == pytest.approx(one.seconds)


def test_the_wait_for_what_was_started_is_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, block_size=8, n_layer=1, n_head=2, n_embd=8))
    x = torch.randint(0, 32, (2, 8))
    hooks = {"async_tensor_model_parallel_allreduce": True, "num_microbatches": 1}
    pm = autoptd.parallelize(model, t=2, backend="local", example_inputs=(x, x), **hooks)
    start, waited = ThreadGroup.all_reduce_start, list[int]()

    class Late(Done):
        def wait(self) -> Any:
            time.sleep(0.02)
            waited.append(1)
            return self.result.wait()

    monkeypatch.setattr(ThreadGroup, "all_reduce_start", lambda *args: Late(start(*args)))
    _, times = pm.measured_step(x, x)
    pm.close()
    assert len(waited) > 2 and sum(one.communication for one in times) >= 0.02 * len(waited)


def test_what_is_logged(tmp_path: Path) -> None:
    pm, x = make()
    told, log = io.StringIO(), tmp_path / "deep" / "run.jsonl"
    with autoptd.Progress(
        pm, tokens=32, steps=5, log=log, peak=1e9, measure_every=3, stream=told
    ) as progress:
        for _ in range(5):
            loss = progress.step(x, x)
            progress.add(loss, pm.clip_grad_norm_(1.0), lr=0.5)
        seconds, predicted = progress.seconds, progress.pm.program.memory
    pm.close()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one["step"] for one in records] == [1, 2, 3, 4, 5] and [
        one["loss"] for one in records
    ] == progress.losses
    assert ["compute" in one for one in records] == [False, True, False, False, True]
    for one, took in zip(records, seconds, strict=True):
        assert one["tokens_per_second"] == pytest.approx(32 / took) and one["lr"] == 0.5
        assert one["mfu"] == pytest.approx(progress.model_flops / took / 1e9 / 4)
    assert len(records[1]["peak_bytes"]) == 1  # the ranks are threads of one process
    assert records[1]["state_bytes"] == sum(predicted(rank).total for rank in range(4))
    assert 0 < records[1]["step_seconds"] <= seconds[1]
    lines = told.getvalue().splitlines()
    assert lines[0].startswith("step 1/5  loss ") and lines[-1].startswith("step 5/5  loss ")
    assert "bubble and rest" in lines[-1] and lines[-1].endswith("iB) for all ranks")
    assert f"(state {bytes_text(records[1]['state_bytes'])})" in lines[-1]


def test_tensorboard_gets_all_numbers() -> None:
    class Board:
        scalars: ClassVar[dict[str, float]] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars[name] = value

        def close(self) -> None: ...

    pm, x = make()
    with autoptd.Progress(pm, tokens=32, measure_every=1, quiet=True) as progress:
        progress._board = Board()
        for _ in range(2):
            progress.add(progress.step(x, x))
    pm.close()
    assert Board.scalars["peak_bytes"] > 1 << 20 and {"loss", "compute", "waiting"} <= set(Board.scalars)


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "float32", 66.9e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
        ("NVIDIA H100 NVL", "bfloat16", 835e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200 NVL", "bfloat16", 835e12),
        ("NVIDIA H200", "float16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("Tesla V100-SXM2-32GB", "float16", 125e12),
        ("Tesla V100-SXM2-32GB", "bfloat16", None),
        ("Tesla T4", "float16", 65e12),
        ("NVIDIA T400 4GB", "float16", None),
        ("NVIDIA GB200", "bfloat16", None),
        ("NVIDIA H200", "float64", None),
    ],
)
def test_peaks_are_of_the_whole_name_and_the_dtype(device: str, dtype: str, peak: float | None) -> None:
    assert known_peak(device, dtype) == peak


def test_other_ranks_are_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pm, x = make()
    monkeypatch.setattr(type(pm), "coordinate", Coordinate(tp=1))
    told = io.StringIO()
    with autoptd.Progress(pm, tokens=32, log=tmp_path / "run.jsonl", stream=told) as progress:
        progress.add(progress.step(x, x))
    pm.close()
    assert progress.losses and not told.getvalue() and not (tmp_path / "run.jsonl").exists()


def test_words_and_refusals(tmp_path: Path) -> None:
    record = {
        "step": 7,
        "loss": 2.5,
        "grad_norm": 0.8123,
        "tokens_per_second": 12345.0,
        "model_flops_per_second": 8e12,
    }
    line = progress_line(record | {"mfu": 0.385}, 1000, 8, ())
    assert line == "step    7/1000  loss 2.5000  norm 0.812  12.3 k tokens/s  1 TFLOP/s a rank (MFU 38.5%)"
    pm, _ = make()
    with pytest.raises(PlanError, match="cannot be written"):
        autoptd.Progress(pm, tokens=1, log=tmp_path)
    pm.close()
