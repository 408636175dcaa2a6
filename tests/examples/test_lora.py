"""The LoRA script: what PEFT loads on one device has the loss of the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import numbers_after, run

pytest.importorskip("peft")

SIZES = "--layers 2 --hidden 16 --length 8 --batch 4 --steps 4 --rank 2 --lr 1e-2"


def test_the_adapter_is_loaded_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("examples/lora.py", f"{SIZES} --t 2 --p 2 --backend local --out {tmp_path}", monkeypatch)
    text = capsys.readouterr().out
    (before,) = numbers_after("evaluation: ", text)
    (after,) = numbers_after(" -> ", text)
    (loaded,) = numbers_after("on one device: ", text)
    assert abs(loaded - after) < 1e-5 and after < before - 1e-3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
