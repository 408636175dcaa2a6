"""What the runtime costs: a step of the emitted t=p=d=1 program beside the unmodified model; Python time per action and call.

Steps: both run forward and backward of the same batch in one process, one microbatch, one thread, taking turns in changing
order (A B, B A, ...). Of each pair the ratio model time / program time is taken, of wall and of CPU time; printed are the
median and its 95% interval by order statistics (no assumption on the distribution). Above 1 the emitted program is faster. On a
machine that others use as well, CPU time is the steadier of the two: wall time then contains waits for a core, twice for a
step that is handed to the thread of its rank.

Python time: microseconds of CPU per action of the executor beyond what its forward or backward takes by itself, and per
collective and message of tiny tensors between ranks as threads.

    python benchmarks/step.py            # a table, benchmarks/results/step.json and step.svg
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autoptd
from autoptd.ir.mesh import Mesh
from autoptd.runtime import p_to_r
from autoptd.runtime.batch import cut
from autoptd.runtime.launch import Rank
from autoptd.runtime.threads import ThreadWorld, run_ranks
from autoptd.runtime.world import Needs, World

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from examples.gpt import GPT, GPTConfig  # noqa: E402

LENGTH, ROWS, LAYERS = 64, 4, 4
WARM_UP, FEWEST = 3, 12
Row = dict[str, Any]


def measure(run: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Median, and the order statistics that enclose that of the distribution in at least 95 of 100 samples (binomial)."""
    ordered, n = sorted(values), len(values)
    rank, outside = 0, 0.5**n
    while 2 * (outside + math.comb(n, rank + 1) * 0.5**n) <= 0.05:
        rank += 1
        outside += math.comb(n, rank) * 0.5**n
    return statistics.median(ordered), ordered[rank], ordered[n - 1 - rank]


def compare_steps(width: int, budget: float, most: int) -> Row:
    """Ratios of paired steps at one width: `most` pairs, or as many as fit into `budget` seconds, FEWEST at least."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_embd=width, n_head=width // 16, n_layer=LAYERS, block_size=LENGTH))
    ids, targets = (torch.randint(0, 256, (ROWS, LENGTH)) for _ in range(2))
    pm = autoptd.parallelize(model, num_microbatches=1, backend="local", example_inputs=(ids, targets))
    parameters = list(pm.parameters())

    def eager() -> None:
        model.zero_grad()
        model(ids, targets)[1].backward()

    def emitted() -> None:
        for parameter in parameters:
            parameter.grad = None
        pm.step(ids, targets)

    for _ in range(WARM_UP):
        eager()
        emitted()
    times: dict[Callable[[], None], list[tuple[float, float]]] = {eager: [], emitted: []}
    start = time.perf_counter()
    for i in range(most):
        for run in (eager, emitted) if i % 2 else (emitted, eager):
            times[run].append(measure(run))
        if time.perf_counter() - start > budget and i + 1 >= FEWEST:
            break
    pm.close()
    row: Row = {"width": width, "pairs": len(times[eager])}
    for which, name in enumerate(("wall", "cpu")):
        a, b = ([one[which] for one in times[run]] for run in (eager, emitted))
        ratio, low, high = median_interval([x / y for x, y in zip(a, b, strict=True)])
        row[name] = {"model_ms": 1e3 * statistics.median(a), "program_ms": 1e3 * statistics.median(b)}
        row[name] |= {"ratio": ratio, "low": low, "high": high}
    return row


class Tiny(nn.Module):
    """So little work that an action is almost all Python."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).sum()


def action_time(microbatches: int = 64, repeats: int = 41) -> Row:
    """Microseconds of CPU per F or B action, beyond the stage's own forward and backward."""
    x = torch.randn(microbatches, 2)
    pm = autoptd.parallelize(Tiny(), num_microbatches=microbatches, backend="local", example_inputs=(x,))
    rank: Rank = pm._running((x,), {})[1].here[0]
    batch = cut(pm.program, (x,), {}, rank.executor.inputs, 0, rank.world.device)
    stage = rank.executor._stages[0]

    def bare() -> None:
        rank.executor.gradients.begin()
        for one in batch:
            stage.forward(**one)[-1].backward()

    def by_executor() -> None:
        rank.executor.step(batch)

    extra = []
    for _ in range(repeats):
        own = measure(bare)[1]
        extra.append(1e6 * (measure(by_executor)[1] - own) / (2 * microbatches))
    pm.close()
    return {"what": "action (F or B)", "microseconds": statistics.median(extra), "of": 2 * microbatches * repeats}


def call_time(what: str, mesh: Mesh, call: Callable[[World], object], calls: int = 100, repeats: int = 21) -> Row:
    """Microseconds of CPU per call and rank, and of wall time per call, of something that two rank threads do together."""
    needs = Needs(axes=(("tp",),), links=((0, 1),) if mesh.p > 1 else ())

    def body(world: World) -> None:
        for _ in range(calls):
            call(world)

    shared = ThreadWorld(mesh, needs)
    run_ranks(shared, body)
    times = [measure(lambda: run_ranks(shared, body)) for _ in range(repeats)]
    wall, cpu = (1e6 * statistics.median(one[i] for one in times) / calls for i in (0, 1))
    return {"what": what, "microseconds": cpu / mesh.size, "wall": wall, "of": calls * repeats}


def python_times() -> list[Row]:
    """The table of Python times."""
    x = torch.ones(1)

    def convert(world: World) -> None:
        p_to_r(x.clone().requires_grad_(), world.group(("tp",)), site="here").backward()

    def pass_on(world: World) -> None:
        if world.coordinate.pp == 0:
            world.outgoing(1).send([x], "here").wait()
        else:
            world.incoming(0).receive([((1,), torch.float32)], "here").wait()

    return [
        action_time(),
        call_time("all-reduce, t=2", Mesh(t=2), lambda world: world.group(("tp",)).all_reduce(x, "here")),
        call_time("P to R, forward and backward, t=2", Mesh(t=2), convert),
        call_time("message, p=2", Mesh(p=2), pass_on),
    ]


def picture(rows: list[Row]) -> str:
    """The ratios as horizontal bars, the line at 1 being the unmodified model."""
    height = 76 + 44 * len(rows)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="600" height="{height}" font-family="sans-serif">']
    lines.append('<rect width="100%" height="100%" fill="white"/>')
    lines.append('<text x="10" y="24" font-size="14">model time / program time, median and its 95% interval</text>')
    lines.append('<text x="10" y="42" font-size="12" fill="#555">dark: CPU time; light: wall time</text>')
    for i, row in enumerate(rows):
        y = 58 + 44 * i
        lines.append(f'<text x="10" y="{y + 22}" font-size="13">h={row["width"]}</text>')
        for name, color, top in (("cpu", "#5b8cc0", y), ("wall", "#bcd3ea", y + 19)):
            one = row[name]
            low, high = 80 + 300 * one["low"], 80 + 300 * one["high"]
            lines.append(f'<rect x="80" y="{top}" width="{300 * one["ratio"]:.1f}" height="16" fill="{color}"/>')
            line = f'x1="{low:.1f}" y1="{top + 8}" x2="{high:.1f}" y2="{top + 8}"'
            lines.append(f'<line {line} stroke="#203a5c" stroke-width="2"/>')
            lines.append(f'<text x="{high + 8:.1f}" y="{top + 13}" font-size="12">{one["ratio"]:.3f}</text>')
    lines.append(f'<line x1="380" y1="50" x2="380" y2="{height - 14}" stroke="#b00020" stroke-dasharray="4"/></svg>')
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--pairs", type=int, default=200, help="pairs per width at most")
    parser.add_argument("--seconds", type=float, default=20.0, help=f"per width, {FEWEST} pairs at least")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"GPT, {LAYERS} layers, {ROWS} x {LENGTH} tokens, float32, 1 thread, torch {torch.__version__}")
    print(f"{'h':>6} {'pairs':>6} {'model ms':>10} {'program ms':>11} {'CPU ratio':>10} {'95%':>16} {'wall ratio':>11}")
    rows = []
    for width in args.widths:
        row = compare_steps(width, args.seconds, args.pairs)
        rows.append(row)
        cpu, wall = row["cpu"], row["wall"]
        times = f"{cpu['model_ms']:>10.2f} {cpu['program_ms']:>11.2f} {cpu['ratio']:>10.3f}"
        interval = f"{cpu['low']:.3f} to {cpu['high']:.3f}"
        print(f"{width:>6} {row['pairs']:>6} {times} {interval:>16} {wall['ratio']:>11.3f}", flush=True)
    python = python_times()
    for row in python:
        print(f"{row['what']:<36} {row['microseconds']:>7.1f} us of CPU", flush=True)
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine |= {"load": os.getloadavg()[1], "python": platform.python_version(), "torch": torch.__version__}
    record = {"machine": machine, "steps": rows, "python": python}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "step.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "step.svg").write_text(picture(rows))


if __name__ == "__main__":
    main()
