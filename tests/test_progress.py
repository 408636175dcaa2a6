"""Progress of a run: what is logged, where time goes, and that other ranks are quiet."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

import autoptd
from autoptd.errors import PlanError
from autoptd.ir.mesh import Coordinate
from autoptd.progress import progress_line
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


def test_what_is_logged(tmp_path: Path) -> None:
    pm, x = make()
    told, log = io.StringIO(), tmp_path / "deep" / "run.jsonl"
    with autoptd.Progress(pm, tokens=32, steps=5, log=log, peak=1e9, measure_every=3, stream=told) as progress:
        for _ in range(5):
            loss = progress.step(x, x)
            progress.add(loss, pm.clip_grad_norm_(1.0), lr=0.5)
        seconds = progress.seconds
    pm.close()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one["step"] for one in records] == [1, 2, 3, 4, 5] and [one["loss"] for one in records] == progress.losses
    assert ["compute" in one for one in records] == [False, True, False, False, True]
    for one, took in zip(records, seconds, strict=True):
        assert one["tokens_per_second"] == pytest.approx(32 / took) and one["lr"] == 0.5
        assert one["mfu"] == pytest.approx(progress.model_flops / took / 1e9 / 4)
    assert len(records[1]["peak_bytes"]) == 4
    lines = told.getvalue().splitlines()
    assert lines[0].startswith("step 1/5  loss ") and lines[-1].startswith("step 5/5  loss ") and "wait" in lines[-1]


def test_other_ranks_are_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pm, x = make()
    monkeypatch.setattr(type(pm), "coordinate", Coordinate(0, 0, 1))
    told = io.StringIO()
    with autoptd.Progress(pm, tokens=32, log=tmp_path / "run.jsonl", stream=told) as progress:
        progress.add(progress.step(x, x))
    pm.close()
    assert progress.losses and not told.getvalue() and not (tmp_path / "run.jsonl").exists()


def test_words_and_refusals(tmp_path: Path) -> None:
    record = {"step": 7, "loss": 2.5, "grad_norm": 0.8123, "tokens_per_second": 12345.0, "model_flops_per_second": 8e12}
    line = progress_line(record | {"mfu": 0.385}, 1000, 8, ())
    assert line == "step    7/1000  loss 2.5000  norm 0.812  12.3 k tokens/s  1 TFLOP/s a rank (MFU 38.5%)"
    pm, _ = make()
    with pytest.raises(PlanError, match="cannot be written"):
        autoptd.Progress(pm, tokens=1, log=tmp_path)
    pm.close()
