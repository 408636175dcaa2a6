"""What hooks on the backward of linear layers cost and gain (`rt.linear`, autoptd/runtime/ops/linear.py).

1. Forward and backward of one linear layer [h, 4h] on 256 rows, the hooked form against `F.linear`, taking turns: the price
   of a Python autograd function. "main_grads" adds to the sum within the GEMM, "deferred" runs the GEMM afterwards.
2. A training step of the GPT at t=2, two processes over gloo, with and without `async_allreduce`, in
   turns.

    python benchmarks/linear.py            # two tables, benchmarks/results/linear.json and linear.svg
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F

import autoptd
from autoptd import runtime as rt
from autoptd.runtime.ops.linear import Deferred, WeightGemm

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from examples.gpt import GPT, GPTConfig  # noqa: E402

ROWS, LAYERS, LENGTH = 256, 2, 64
Row = dict[str, float]


def compare(runs: dict[str, Callable[[], object]], pairs: int, clock: Callable[[], float]) -> Row:
    """Median ms of the first, and for the others the median ratio of their time to its, measured in turns."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(pairs):
        for name, run in runs.items():
            start = clock()
            run()
            times[name].append(clock() - start)
    first = next(iter(runs))
    found = {f"{first} ms": 1e3 * statistics.median(times[first])}
    for name in list(runs)[1:]:
        ratios = sorted(a / b for a, b in zip(times[name], times[first], strict=True))
        quarters = {"low": len(ratios) // 4, "": len(ratios) // 2, "high": 3 * len(ratios) // 4}
        found |= {f"{name} {what}".strip(): ratios[at] for what, at in quarters.items()}
    return found


def one_layer(width: int, pairs: int) -> Row:
    """`F.linear` and the hooked forms at one width."""
    weight = torch.randn(4 * width, width, requires_grad=True)
    bias, x = torch.zeros(4 * width, requires_grad=True), torch.randn(ROWS, width, requires_grad=True)
    grad, deferred = torch.randn(ROWS, 4 * width), Deferred()
    weight.grad = torch.zeros_like(weight)

    def add(gemm: WeightGemm) -> None:
        weight.grad.addmm_(*gemm.factors())  # type: ignore[union-attr]

    def late() -> None:
        rt.linear(x, weight, bias, wgrad=deferred).backward(grad)
        for gemm in deferred.take():
            add(gemm)

    with torch.no_grad():
        x.grad, bias.grad = torch.zeros_like(x), torch.zeros_like(bias)
    runs: dict[str, Callable[[], object]] = {
        "F.linear": lambda: F.linear(x, weight, bias).backward(grad),
        "autograd": lambda: rt.linear(x, weight, bias).backward(grad),
        "main_grads": lambda: rt.linear(x, weight, bias, wgrad=add).backward(grad),
        "deferred": late,
    }
    return {"width": width} | compare(
        runs, pairs, time.thread_time
    )  # of the processor: other programs do not count


def steps_of_rank(rank: int, port: int, widths: list[int], pairs: int, out: str) -> None:
    """One of two processes: steps without and with overlap, in turns; rank 0 writes what it measured."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    rows = []
    for width in widths:
        runs: dict[str, Callable[[], object]] = {}
        ids, targets = (
            torch.randint(0, 256, (4, LENGTH), generator=torch.Generator().manual_seed(i)) for i in (0, 1)
        )
        for name, overlap in (("in the open", False), ("overlapped", True)):
            torch.manual_seed(0)
            model = GPT(GPTConfig(n_embd=width, n_head=width // 16, n_layer=LAYERS, block_size=LENGTH))
            hooks: dict[str, Any] = {"hooks": autoptd.LinearHooks(async_allreduce=overlap), "fuse": False}
            pm = autoptd.parallelize(model, t=2, num_microbatches=1, example_inputs=(ids, targets), **hooks)
            runs[name] = partial(pm.step, ids, targets)
        rows.append({"width": width} | compare(runs, pairs, time.perf_counter))
    if rank == 0:
        Path(out).write_text(json.dumps(rows))


def two_processes(widths: list[int], pairs: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        mp.spawn(steps_of_rank, (29500 + os.getpid() % 1000, widths, pairs, str(out)), nprocs=2)  # type: ignore[no-untyped-call]
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def picture(layer: list[Row], step: list[Row]) -> str:
    """Both tables as bars; the line at 1 is the plain form."""
    bars = [
        (f"layer h={int(row['width'])} {name}", row, name)
        for row in layer
        for name in ("main_grads", "deferred")
    ]
    bars += [(f"step h={int(row['width'])} overlapped", row, "overlapped") for row in step]
    size = f'width="640" height="{60 + 22 * len(bars)}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
    lines.append('<rect width="100%" height="100%" fill="white"/>')
    lines.append(
        '<text x="10" y="22" font-size="14">time with the hook / time without, median and middle half</text>'
    )
    for i, (text, row, name) in enumerate(bars):
        y = 36 + 22 * i
        low, high = (210 + 200 * min(row[f"{name} {end}"], 1.8) for end in ("low", "high"))
        colour = "#d69a5a" if name == "overlapped" else "#7aa6d6"
        lines.append(f'<text x="10" y="{y + 12}">{text}</text>')
        lines.append(f'<rect x="210" y="{y}" width="{200 * row[name]:.1f}" height="15" fill="{colour}"/>')
        lines.append(f'<path d="M{low:.1f} {y + 8}H{high:.1f}" stroke="#203a5c" stroke-width="3"/>')
        lines.append(
            f'<text x="{max(high, 210 + 200 * row[name]) + 8:.1f}" y="{y + 12}">{row[name]:.2f}</text>'
        )
    lines.append(f'<path d="M410 30V{40 + 22 * len(bars)}" stroke="#b00020" stroke-dasharray="4"/></svg>')
    return "\n".join(lines) + "\n"


def show(title: str, rows: list[Row], names: tuple[str, ...]) -> None:
    print(f"\n{title}")
    first = next(key for key in rows[0] if key.endswith(" ms"))
    print(f"{'h':>6} {first:>15}" + "".join(f"{name:>26}" for name in names))
    for row in rows:
        told = "".join(
            f"{row[name]:>10.2f} ({row[f'{name} low']:.2f} to {row[f'{name} high']:.2f})" for name in names
        )
        print(f"{int(row['width']):>6} {row[first]:>15.3f}{told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--step-widths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--pairs", type=int, default=400, help="at h=64; wider layers take fewer")
    parser.add_argument("--step-pairs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    layer = [one_layer(width, max(24, 64 * args.pairs // width)) for width in args.widths]
    show(
        f"a linear layer [h, 4h], {ROWS} rows, float32, 1 thread",
        layer,
        ("autograd", "main_grads", "deferred"),
    )
    step = two_processes(args.step_widths, args.step_pairs)
    show(f"a step of a GPT, {LAYERS} layers, 4 x {LENGTH} tokens, t=2 over gloo", step, ("overlapped",))
    machine = platform.processor() or platform.machine()
    record = {"machine": machine, "cores": os.cpu_count(), "load": load, "torch": torch.__version__}
    record |= {"layer": layer, "step": step}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "linear.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "linear.svg").write_text(picture(layer, step))


if __name__ == "__main__":
    main()
