"""docs/howto/lightning.md: its script runs, with ranks as threads, and its error is the one that a Trainer raises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
import lightning
import torch

from autoptd.errors import PlanError
from tests.integrations.lightning_runs import Data, Rows, Small, on_ranks, trainer_of

PAGE = (Path(__file__).parents[2] / "docs/howto/lightning.md").read_text()


def test_the_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {"lightning": lightning, "module": Small()}
    known |= {"train_loader": Data(Rows(24), 8), "val_loader": Data(Rows(11), 4)}
    exec(script.replace("Strategy(t=2", 'Strategy(backend="local", t=2'), known)
    strategy = known["trainer"].strategy
    assert strategy.ranks.steps == 6 and strategy.ranks.options.mesh.size == 8
    assert float(strategy.grad_norm) > 0 and (tmp_path / "trained.ckpt.ranks").is_dir()
    loaded = Small.load_from_checkpoint("trained.ckpt").state_dict()
    assert all(torch.equal(x, loaded[name]) for name, x in known["module"].state_dict().items())


def test_the_error_is_the_one_shown() -> None:
    class Steps(Small):
        def optimizer_step(self, *_: Any, **__: Any) -> None:
            pass

    (text,) = re.findall(r"```text\n(.*?)```", PAGE, re.S)
    averaging = lightning.pytorch.callbacks.StochasticWeightAveraging(1e-2)
    with pytest.raises(PlanError) as shown:
        trainer_of(on_ranks(t=2), [averaging]).fit(Steps(), Data(Rows(8), 4))
    assert " ".join(text.split()) == f"PlanError: {shown.value}"
