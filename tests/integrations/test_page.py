"""docs/howto/trainer.md: its script runs, with ranks as threads, and its error is the one that a Trainer raises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from autoptd.errors import PlanError
from tests.integrations.runs import Rows, Trainer, arguments, gpt2, transformers

PAGE = (Path(__file__).parents[2] / "docs/howto/trainer.md").read_text()


def test_the_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = re.findall(r"```python\n(.*?)```", PAGE, re.S)[0]
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {"model": gpt2(), "train": Rows(32), "test": Rows(4)}
    known["TrainingArguments"] = lambda folder, **how: arguments(folder, **how)
    exec(script.replace('parallel={"t"', 'parallel={"backend": "local", "t"'), known)
    trainer = known["trainer"]
    assert trainer.state.global_step == 4 and trainer.pm.options.mesh.size == 8
    assert trainer.pm.program.num_microbatches == 4
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "trained")
    assert all(x.equal(trainer.model.state_dict()[name]) for name, x in loaded.state_dict().items())


def test_the_error_is_the_one_shown(tmp_path: Path) -> None:
    (text,) = re.findall(r"```text\n(.*?)```", PAGE, re.S)
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    args.fsdp = "full_shard"
    with pytest.raises(PlanError) as shown:
        Trainer(gpt2(), args, train_dataset=Rows(4), parallel={"backend": "local", "t": 2})
    assert " ".join(text.split()) == f"PlanError: {shown.value}"


def test_a_loop_with_accelerate_is_run(tmp_path: Path) -> None:
    import accelerate

    (block,) = re.findall(r"<!-- run: accelerate -->\n```python\n(.*?)```", PAGE, re.S)
    logged: list[float] = []

    class Tracker(accelerate.tracking.GeneralTracker):  # type: ignore[misc]
        name, requires_logging_directory, main_process_only = "list", False, True

        def __init__(self) -> None:
            super().__init__()

        @property
        def tracker(self) -> list[float]:
            return logged

        def store_init_configuration(self, values: Any) -> None:
            pass

        def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
            logged.append(values["loss"])

    batches = [{"input_ids": row, "labels": row} for row in Rows(16, padded=False).ids.split(4)]
    found = {"accelerate": accelerate, "autoptd": autoptd, "torch": torch, "model": gpt2().double()}
    found |= {
        "first_batch": batches[0],
        "loader": batches,
        "folder": tmp_path / "saved",
        "tracker": Tracker(),
    }
    exec(block, found)
    model, expected = gpt2().double(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss))
    assert logged == pytest.approx(expected, rel=1e-6) and (tmp_path / "saved").is_dir()
    found["pm"].close()
