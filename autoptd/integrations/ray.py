"""Checkpoints of a training loop that Ray Train runs on its workers, in the storage of the Ray run.

In: the `ParallelModel` and the optimizer of a `train_loop_per_worker`; Ray's TorchTrainer has made the process group,
which `parallelize` uses. Out: reports with checkpoints, and the last one of them after a restart, on the workers that
are left.

    def loop(config):                                   # TorchTrainer(loop, ...).fit()
        pm = autoptd.parallelize(model, t=2, d="auto", example_inputs=(x, y))
        opt = pm.optimizer(torch.optim.AdamW, lr=3e-4)
        run = RayRun(pm, opt, "/shared/staging")
        run.resume()
        while pm.steps < 10_000:
            loss = pm.step(*pm.local_batch(*batch(pm.steps)))
            opt.step(); opt.zero_grad()
            if pm.steps % 500 == 0:
                run.report({"loss": float(loss)})
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train
import torch

from autoptd.api import ParallelModel


class RayRun:
    """The checkpoints of one `ParallelModel` in the storage of a Ray run; all workers make every call.

    `folder` is one that all workers see, in which a checkpoint is written before Ray copies it. `extra` has
    objects with `state_dict` and `load_state_dict`, as for `pm.save`.
    """

    def __init__(
        self,
        pm: ParallelModel,
        optimizer: torch.optim.Optimizer | None,
        folder: str | Path,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.pm, self.optimizer, self.folder, self.extra = pm, optimizer, Path(folder), dict(extra or {})

    def resume(self) -> bool:
        """Load the last checkpoint that was reported, on any number of workers; return whether there was one."""
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return False
        # Each node downloads it once; workers of a node read the same copy.
        with checkpoint.as_directory() as folder:
            self.pm.load(folder, optimizer=self.optimizer, extra=self.extra)
        return True

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Save, and report the checkpoint with `metrics`; Ray notes it a moment after this returns."""
        context = ray.train.get_context()
        folder = self.folder / f"{context.get_experiment_name()}-{self.pm.steps:08d}"
        self.pm.save(folder, optimizer=self.optimizer, extra=self.extra)
        # All ranks have written into one folder, which one worker hands over.
        own = ray.train.Checkpoint.from_directory(folder) if context.get_world_rank() == 0 else None
        ray.train.report(
            {**metrics, "steps": self.pm.steps},
            checkpoint=own,
            delete_local_checkpoint_after_upload=own is not None,
        )
