"""Run by `test_ray.py`: trainers of Ray on this machine, one of whose workers dies; prints their losses as a line of JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer

import autoptd
from autoptd.integrations.ray import RayRun
from tests.parity.models import batch, gpt


def loop(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    folder, call = Path(config["folder"]), batch(8)
    pm = autoptd.parallelize(gpt(2).double(), t=2, d="auto", example_inputs=call)
    opt = pm.optimizer(torch.optim.AdamW, lr=1e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12)
    run = RayRun(pm, opt, folder / "staging", extra={"scheduler": sched})
    resumed, rank = run.resume(), ray.train.get_context().get_world_rank()
    while pm.steps < config["last"]:
        if not resumed and rank == config["dies"] and pm.steps == 3:
            # Waits until Ray has noted the report of the second step.
            ray.train.get_all_reported_checkpoints()
            os._exit(1)
        loss = pm.step(*pm.local_batch(*call))
        opt.step()
        opt.zero_grad()
        sched.step()
        if rank == 0:
            with (folder / "losses.jsonl").open("a") as file:
                line = {"step": pm.steps, "loss": float(loss), "d": pm.options.d, "resumed": resumed}
                file.write(json.dumps(line) + "\n")
        if pm.steps % 2 == 0:
            run.report({"loss": float(loss)})
    pm.close()


def fit(folder: str, workers: int, last: int, dies: int) -> int:
    result = TorchTrainer(
        loop,
        train_loop_config={"folder": folder, "last": last, "dies": dies},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=f"{folder}/storage",
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    ).fit()
    return int(result.metrics["steps"])


def main(folder: str) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    # The same run, that is the same storage: on 4 workers, one of which dies, then on 2.
    steps = [fit(folder, 4, 6, dies=3), fit(folder, 2, 8, dies=-1)]
    ray.shutdown()
    print(json.dumps(steps))


if __name__ == "__main__":
    main(sys.argv[1])
