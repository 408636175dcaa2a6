"""The emitted t=p=d=1 program beside the unmodified model: eager, compiled by torch.compile, and ours, in turns.

A step is all microbatches forward and backward with gradients added up, the loss read, gradients set to None; ours looks for
NaN as well. Above 1 ours is faster: the median over turns of their time / our time, with its 95% interval, of wall and of CPU
time. On a machine that others use, CPU time is the steadier. "ours plain" has no fused operators.

FLOPs are model FLOPs, 72 B s L h^2 (1 + s/6h + V/12Lh), nothing counted for recomputation (SC'21, section 5.1, whose formula
counts it: 96). The ceiling is a GEMM [B s, h] x [h, 4h] of the same dtype, measured in the same run. Memory is what a step
allocates at most beyond weights and inputs.

On a CPU; GPUs have `make gpu` (benchmarks/gpu), whose models are large and in bf16.

    python benchmarks/single.py                # a table, benchmarks/results/single.json and single.svg
    python benchmarks/single.py --compiled     # torch.compile at every width: minutes on a CPU
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

import autoptd

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.lib.memory import peak_bytes
from benchmarks.lib.pairs import ratio_of, take_turns
from benchmarks.lib.report import ratio_bars, save, save_picture
from examples.gpt import GPT, GPTConfig

Row = dict[str, Any]
Run = Callable[[], float]
OURS, FUSED = "ours plain", "ours fused"


class Setup(NamedTuple):
    """A GPT, and the batch of one step: m microbatches of b rows."""

    name: str
    config: GPTConfig
    b: int
    m: int = 1


def gpt(h: int, heads: int, layers: int, s: int, vocab: int = 256) -> GPTConfig:
    return GPTConfig(vocab_size=vocab, block_size=s, n_layer=layers, n_head=heads, n_embd=h)


SETUPS = [Setup(f"h={h}", gpt(h, h // 16, 4, 64), 4) for h in (64, 128, 256, 512)]
SETUPS += [
    Setup("h=128 m=4", gpt(128, 8, 4, 64), 2, m=4),
    Setup("h=256 V=8192", gpt(256, 16, 4, 256, 8192), 4),
]


def model_flops(config: GPTConfig, tokens: int) -> float:
    """Of a step without recomputation."""
    h, s, layers, vocab = config.n_embd, config.block_size, config.n_layer, config.vocab_size
    return 72 * tokens * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))


def gemm_ceiling(tokens: int, h: int) -> float:
    """FLOP/s of [tokens, h] x [h, 4h], the fastest of some."""
    a, b = torch.randn(tokens, h), torch.randn(h, 4 * h)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 8 * tokens * h**2 / best


def eager_step(
    model: Callable[..., Any], parameters: list[Tensor], ids: Tensor, targets: Tensor, m: int
) -> Run:
    """A step of the model itself (or of what torch.compile made of it), as one writes it."""

    def run() -> float:
        total = torch.zeros(())
        for x, y in zip(ids.chunk(m), targets.chunk(m), strict=True):
            loss = model(x, y)[1] / m
            loss.backward()
            total += loss.detach()
        told = total.item()
        for parameter in parameters:
            parameter.grad = None
        return told

    return run


def our_step(model: GPT, ids: Tensor, targets: Tensor, m: int, **keywords: Any) -> Run:
    pm = autoptd.parallelize(
        model, num_microbatches=m, backend="local", example_inputs=(ids, targets), **keywords
    )
    parameters = list(pm.parameters())

    def run() -> float:
        told = pm.step(ids, targets).item()
        for parameter in parameters:
            parameter.grad = None
        return told

    return run


def whole_model(setup: Setup, *, compiled: bool) -> dict[str, Run]:
    """Every form of the model, ours first."""
    torch.manual_seed(0)
    model = GPT(setup.config)
    ids, targets = batch(setup)
    parameters: list[Tensor] = list(model.parameters())
    runs = {
        OURS: our_step(model, ids, targets, setup.m, fuse=False),
        FUSED: our_step(model, ids, targets, setup.m),
    }
    runs["eager"] = eager_step(model, parameters, ids, targets, setup.m)
    if compiled:
        runs["torch.compile"] = eager_step(torch.compile(model), parameters, ids, targets, setup.m)
    return runs


def batch(setup: Setup) -> tuple[Tensor, Tensor]:
    shape = (setup.b * setup.m, setup.config.block_size)
    ids, targets = (torch.randint(0, setup.config.vocab_size, shape) for _ in range(2))
    return ids, targets


def measure(setup: Setup, seconds: float, *, compiled: bool) -> list[Row]:
    runs = whole_model(setup, compiled=compiled)
    turns = take_turns(runs, 200, calls=max(1, 128 // setup.config.n_embd), seconds=seconds)
    tokens = setup.b * setup.m * setup.config.block_size
    ceiling = gemm_ceiling(tokens // setup.m, setup.config.n_embd)
    rows = []
    for name, run in runs.items():
        wall = statistics.median(turns[name].wall)
        speed = model_flops(setup.config, tokens) / wall
        row: Row = {"setup": setup.name, "who": name, "turns": len(turns[name].wall), "ms": 1e3 * wall}
        row |= {
            "CPU ms": 1e3 * statistics.median(turns[name].cpu),
            "GFLOP/s": speed / 1e9,
            "of GEMM": speed / ceiling,
        }
        row["peak MB"] = peak_bytes(run) / 1e6
        if name != OURS:
            for which in ("wall", "cpu"):
                ratio = ratio_of(getattr(turns[name], which), getattr(turns[OURS], which))
                row[which] = ratio._asdict()
        rows.append(row)
    return rows


def show(row: Row) -> None:
    ratios = [
        f"{row[x]['median']:.3f} ({row[x]['low']:.3f}-{row[x]['high']:.3f})" if x in row else ""
        for x in ("wall", "cpu")
    ]
    numbers = f"{row['ms']:>9.2f}{row['CPU ms']:>9.2f}{row['GFLOP/s']:>9.1f}{row['of GEMM']:>8.0%}{row['peak MB']:>9.2f}"
    print(f"{row['setup']:<20}{row['who']:<15}{numbers}{ratios[0]:>23}{ratios[1]:>23}", flush=True)


def picture(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    for axes, which in zip(figure.subplots(1, 2, sharey=True), ("wall", "cpu"), strict=True):
        bars = [
            (f"{row['setup']}: {row['who']}", row[which]["median"], row[which]["low"], row[which]["high"])
            for row in rows
            if which in row
        ]
        ratio_bars(axes, bars, f"{'wall' if which == 'wall' else 'CPU'} time, theirs / ours plain")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of turns per row, 15 rounds at least")
    parser.add_argument(
        "--compiled", action="store_true", help="torch.compile everywhere, not at the first width only"
    )
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(f"GPT, torch {torch.__version__}; one thread")
    columns = f"{'ms':>9}{'CPU ms':>9}{'GFLOP/s':>9}{'of GEMM':>8}{'peak MB':>9}"
    print(f"{'':<20}{'':<15}{columns}{'wall: theirs / ours':>23}{'CPU: theirs / ours':>23}")
    rows: list[Row] = []
    for setup in SETUPS:
        made = measure(setup, args.seconds, compiled=args.compiled or setup is SETUPS[0])
        for row in made:
            show(row)
        rows += made
    save("single", {"rows": rows})
    save_picture("single", picture(rows))


if __name__ == "__main__":
    main()
