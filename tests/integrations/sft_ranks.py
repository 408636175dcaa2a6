"""Run by `test_trl.py` as one of two replicas over gloo. In: a folder. Prints one JSON line: logs and trained weights."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from autoptd.integrations.trl import SFTTrainer
from tests.integrations.runs import finished, gpt2
from tests.integrations.test_trl import config, datasets, rows, tokenizer


def main(folder: Path) -> None:
    # Threads of OpenMP and messages to TRL's authors: see `train_ranks.py` and `test_trl.py`.
    os.environ |= {"OMP_NUM_THREADS": "1", "CI": "1"}
    datasets.disable_progress_bars()
    how = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 2, "ddp_backend": "gloo"}
    data = {"train_dataset": rows("completion", 22), "eval_dataset": rows("completion", 5)}
    trainer = SFTTrainer(
        gpt2(), config(folder, **how), **data, processing_class=tokenizer(), parallel={"d": 2}
    )
    ended = finished(trainer)
    weights = {name: x.tolist() for name, x in ended.weights.items()}
    print(json.dumps({"logs": ended.logs, "weights": weights}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
