"""Run by `test_lightning_processes.py` as one of several ranks over gloo: a Trainer of Lightning saves, another resumes.

In: the mesh as JSON, and a folder. Prints one JSON line: metrics of both, sums of the trained weights in the module of
this process, where it logs and saves, and what was refused.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from autoptd.errors import AutoptdError
from autoptd.integrations.lightning import Strategy
from tests.integrations.lightning_runs import Data, Rows, Small, trainer_of


class Outputs(Callback):
    """Adds up what the validation returns with a row per sample."""

    def __init__(self) -> None:
        self.sums: list[int] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.sums.append(int(outputs["chosen"].sum()))


def run(
    mesh: dict[str, Any] | None, folder: Path, epochs: int, ckpt_path: str | None = None
) -> dict[str, Any]:
    """Train in float64; `mesh` is None for one process of Lightning."""
    torch.manual_seed(0)
    module = Small().double()
    saved = ModelCheckpoint(filename="{step}", every_n_train_steps=3, save_top_k=-1)
    on: dict[str, Any] = {"logger": CSVLogger(folder), "enable_checkpointing": True, "max_epochs": epochs}
    outputs, strategy = Outputs(), None if mesh is None else Strategy(**mesh)
    trainer = trainer_of(strategy, [saved, outputs], gradient_clip_val=0.5, **on)
    trainer.fit(module, Data(Rows(24), 8, shuffle=True), Data(Rows(11, 2), 4), ckpt_path=ckpt_path)
    return {
        "metrics": {name: float(x) for name, x in trainer.callback_metrics.items()},
        "weights": [float(x.sum()) for x in module.state_dict().values()],
        "outputs": outputs.sums,
        "folders": [trainer.log_dir, saved.best_model_path],
    }


def main(mesh: dict[str, Any], folder: Path) -> None:
    first = run(mesh, folder, epochs=2)
    second = run(mesh, folder, epochs=3, ckpt_path=first["folders"][1])
    said = ""
    try:
        rows = Rows(24, seed=int(os.environ["RANK"]))
        trainer_of(Strategy(**mesh)).fit(Small(), Data(rows, 8))
    except AutoptdError as error:
        said = str(error)
    print(json.dumps({"first": first, "second": second, "said": said}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
