"""Python time of the runtime: per step, per action and per collective, beyond the work itself.

- a step with no work to speak of: `pm.step` around a model whose parameters are many and tiny, less its stage's own forward and
  backward, per parameter;
- an action (F or B), beyond what its forward or backward takes by itself;
- a collective and a message of one number between two ranks as threads, CPU time per call and rank;
- the same all-reduce through `torch.distributed`, as torch's own function and as our group calls it, with nobody else there.

Microseconds of CPU time, medians of repeats: other programs hardly count.

    python benchmarks/overhead.py              # a table, benchmarks/results/overhead.json and overhead.svg
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn

import autoptd

sys.path.insert(0, str(Path(__file__).parent.parent))

from autoptd.ir.mesh import Mesh
from autoptd.runtime import i_to_p, i_to_r, p_to_i
from autoptd.runtime.step.launch import Rank
from autoptd.runtime.step.microbatches import cut
from autoptd.runtime.world.processes import DistributedWorld
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, Group, World
from benchmarks.lib.fake_world import fake_process_group
from benchmarks.lib.report import save, save_picture

Row = dict[str, Any]


class Tiny(nn.Module):
    """So little work that a step is almost all Python: `count` parameters of two numbers."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x.sum()


def cpu_time(run: Callable[[], object], device: str = "cpu") -> float:
    """On a GPU from an empty queue on: a host that waits for it spins, and that would count."""
    if not device.startswith("cpu"):
        torch.cuda.synchronize()
    start = time.process_time()
    run()
    return time.process_time() - start


def micro(seconds: list[float], per: int) -> float:
    return 1e6 * statistics.median(seconds) / per


def step_time(parameters: int = 200, repeats: int = 81, device: str = "cpu") -> Row:
    """Per parameter, of one microbatch: all that a step does beyond its stage's forward and backward."""
    x, model = torch.randn(2, 2, device=device), Tiny(parameters).to(device)
    pm = autoptd.parallelize(model, num_microbatches=1, backend="local", example_inputs=(x,))
    rank: Rank = pm.run.started("step").here[0]
    stage, own = rank.executor.stages[0], list(rank.params.leaves.values())
    local = list(pm.parameters())

    def bare() -> None:
        stage.forward(x=x)[-1].backward()
        for leaf in own:
            leaf.grad = None

    def step() -> None:
        pm.step(x)
        for parameter in local:
            parameter.grad = None

    extra = [-cpu_time(bare, device) + cpu_time(step, device) for _ in range(repeats)]
    pm.close()
    return {"what": "a step, per parameter", "microseconds": micro(extra, parameters)}


def action_time(microbatches: int = 64, repeats: int = 41, device: str = "cpu") -> Row:
    """Per F or B, beyond the stage's own forward and backward."""
    x, model = torch.randn(microbatches, 2, device=device), Tiny().to(device)
    pm = autoptd.parallelize(model, num_microbatches=microbatches, backend="local", example_inputs=(x,))
    rank: Rank = pm.run.started("step").here[0]
    pieces = cut(pm.program, (x,), rank.executor.inputs, 0, rank.world.device)
    stage = rank.executor.stages[0]

    def bare() -> None:
        rank.executor.gradients.begin()
        for one in pieces:
            stage.forward(**one)[-1].backward()

    extra = [
        -cpu_time(bare, device) + cpu_time(lambda: rank.executor.step(pieces), device) for _ in range(repeats)
    ]
    pm.close()
    return {"what": "an action (F or B)", "microseconds": micro(extra, 2 * microbatches)}


def thread_time(
    what: str, mesh: Mesh, call: Callable[[World], object], calls: int = 100, repeats: int = 21
) -> Row:
    """Per call and rank, of something that two rank threads do together."""
    communicators = Communicators(links=((0, 1),) if mesh.p > 1 else ())

    def body(world: World) -> None:
        for _ in range(calls):
            call(world)

    shared = ThreadWorld(mesh, communicators)
    seconds = [cpu_time(lambda: run_ranks(shared, body)) for _ in range(repeats)]
    return {"what": f"threads: {what}", "microseconds": micro(seconds, calls * mesh.size)}


def call_time(
    what: str, run: Callable[[], object], calls: int = 1000, repeats: int = 21, device: str = "cpu"
) -> Row:
    """Per call, in this thread."""

    def body() -> None:
        for _ in range(calls):
            run()

    return {"what": what, "microseconds": micro([cpu_time(body, device) for _ in range(repeats)], calls)}


def thread_times() -> list[Row]:
    x = torch.ones(1)

    def pass_on(world: World) -> None:
        if world.coordinate.pp == 0:
            world.outgoing(1).send([x], "here").wait()
        else:
            world.incoming(0).receive([((1,), torch.float32)], "here").wait()

    return [
        thread_time("all-reduce, t=2", Mesh(t=2), lambda world: world.group(("tp",)).all_reduce(x, "here")),
        thread_time("message, p=2", Mesh(p=2), pass_on),
    ]


def process_times(device: str = "cpu", calls: int = 1000, repeats: int = 21) -> list[Row]:
    """Rank 1 of t=2 through torch.distributed, whose "fake" group takes no time of its own."""
    fake_process_group(rank=1, world_size=2)
    world = DistributedWorld(Mesh(t=2), Communicators(), device=device)
    tp: Group = world.group(("tp",))
    x, leaf, bias = torch.ones(3, 64, device=device)
    leaf, bias = (one.clone().requires_grad_() for one in (leaf, bias))
    made: dict[str, Callable[[], object]] = {
        "torch.distributed.all_reduce, and a clone": lambda: dist.all_reduce(x.clone()),
        "our group's all_reduce": lambda: tp.all_reduce(x, "here"),
        "I to R (f), forward": lambda: i_to_r(leaf, tp, site="here"),
        "P to I (g), forward": lambda: p_to_i(leaf, tp, site="here"),
        "I to P of a bias, forward": lambda: i_to_p(bias, tp),
    }
    rows = [call_time(what, call, calls, repeats, device) for what, call in made.items()]
    world.close()
    return rows


def picture(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.barh([row["what"] for row in rows], [row["microseconds"] for row in rows], color="#7aa6d6")
    for i, row in enumerate(rows):
        axes.text(row["microseconds"], i, f" {row['microseconds']:.1f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("microseconds of CPU time")
    return figure


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    rows = [step_time(), action_time(), *thread_times(), *process_times()]
    for row in rows:
        print(f"{row['what']:<45}{row['microseconds']:>8.1f} us", flush=True)
    save("overhead", {"rows": rows})
    save_picture("overhead", picture(rows))


if __name__ == "__main__":
    main()
