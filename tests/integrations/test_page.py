"""docs/howto/trainer.md: its script runs, with ranks as threads, and its error is the one that a Trainer raises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from autoptd.errors import PlanError
from tests.integrations.runs import Rows, Trainer, arguments, gpt2, transformers

PAGE = (Path(__file__).parents[2] / "docs/howto/trainer.md").read_text()


def test_the_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
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
