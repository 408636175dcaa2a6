"""Recomputation by value beside `torch.utils.checkpoint` of every layer: time and memory of a step, in turns.

The model on one device is examples/gpt.py. *checkpoint* wraps every block (`use_reentrant=False`); as it is, it stops a block's
second forward at the last value that backward needs (`early_stop`), which *checkpoint, no early stop* does not. Ours are
`parallelize(model, recompute=...)` at t=p=d=1, by the same plain operators (fuse=False). *hooks alone* files every saved tensor
as recomputation does, and drops none.

A step is one microbatch forward and backward, the loss read, gradients set to None. Below 1 ours is faster: the median over
turns of our time / theirs, with its 95% interval, of wall time. Memory is what a step allocates at most beyond weights and
inputs.

    python benchmarks/recompute.py          # a table, benchmarks/results/recompute.json and recompute.svg
"""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import autoptd

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.lib.memory import peak_bytes
from benchmarks.lib.pairs import ratio_of, take_turns
from benchmarks.lib.report import ratio_bars, save, save_picture
from examples.gpt import GPT, GPTConfig

Run = Callable[[], float]
Row = dict[str, Any]
FULL, HALF, NONE, HOOKS = "ours, full", "ours, full:1/2", "ours, nothing again", "ours, hooks alone"
THEIRS, WHOLE, MODEL = "checkpoint", "checkpoint, no early stop", "the model"
# (ours, theirs) -> compared.
PAIRS = ((FULL, THEIRS), (FULL, WHOLE), (NONE, MODEL), (HOOKS, NONE), (FULL, NONE), (THEIRS, MODEL))


class Setup(NamedTuple):
    name: str
    config: GPTConfig
    rows: int


def gpt(width: int, layers: int, length: int) -> GPTConfig:
    return GPTConfig(
        n_embd=width, n_head=width // 64, n_layer=layers, block_size=length, vocab_size=512, dropout=0.0
    )


SETUPS = [
    Setup("h=256 L=8", gpt(256, 8, 256), 4),
    Setup("h=512 L=6", gpt(512, 6, 256), 4),
    Setup("h=1024 L=3", gpt(1024, 3, 256), 2),
]


def their_step(model: GPT, call: tuple[Tensor, Tensor], wrap: str) -> Run:
    parameters = list(model.parameters())
    forwards = [block.forward for block in model.transformer.h]

    @contextmanager
    def wrapped() -> Iterator[None]:
        for block, forward in zip(model.transformer.h, forwards, strict=True):
            block.forward = forward if wrap == MODEL else partial(checkpoint, forward, use_reentrant=False)
        with set_checkpoint_early_stop(wrap != WHOLE):
            yield

    def run() -> float:
        with wrapped():
            loss = model(*call)[1]
            loss.backward()
            told: float = loss.item()
        for parameter in parameters:
            parameter.grad = None
        return told

    return run


def our_step(model: GPT, call: tuple[Tensor, Tensor], recompute: Any, *, hooks: bool = False) -> Run:
    pm = autoptd.parallelize(
        model, num_microbatches=1, backend="local", fuse=False, recompute=recompute, example_inputs=call
    )
    if hooks:
        for stage in pm.run.ranks.here[0].executor.stages.values():  # type: ignore[union-attr]
            stage._recomputes = True
    parameters = list(pm.parameters())

    def run() -> float:
        told: float = pm.step(*call).item()
        for parameter in parameters:
            parameter.grad = None
        return told

    return run


def runs_of(setup: Setup) -> dict[str, Run]:
    torch.manual_seed(0)
    model = GPT(setup.config)
    ids, targets = torch.randint(0, setup.config.vocab_size, (2, setup.rows, setup.config.block_size))
    call = (ids, targets)
    runs = {
        FULL: our_step(model, call, "full"),
        HALF: our_step(model, call, "full:1/2"),
        NONE: our_step(model, call, False),
        HOOKS: our_step(model, call, False, hooks=True),
    }
    return runs | {name: their_step(model, call, name) for name in (THEIRS, WHOLE, MODEL)}


def measure(setup: Setup, seconds: float) -> list[Row]:
    runs = runs_of(setup)
    losses = {name: run() for name, run in runs.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-5, losses
    turns = take_turns(runs, 100, seconds=seconds)
    peaks = {name: peak_bytes(run) for name, run in runs.items()}
    rows: list[Row] = []
    for ours, theirs in PAIRS:
        ratio = ratio_of(turns[ours].wall, turns[theirs].wall)
        row: Row = {"setup": setup.name, "ours": ours, "theirs": theirs, "turns": len(turns[ours].wall)}
        row |= {"ms": round(1e3 * statistics.median(turns[ours].wall), 1), "time": list(ratio)}
        row |= {"MB": round(peaks[ours] / 1e6, 1), "memory": round(peaks[ours] / peaks[theirs], 3)}
        rows.append(row)
        print(f"{setup.name:12} {ours:20} / {theirs:26} {ratio}  memory {row['memory']}", flush=True)
    return rows


def picture(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(7, 0.35 * len(rows) + 1), layout="constrained")
    bars = [(f"{row['setup']}: {row['ours']} / {row['theirs']}", *row["time"]) for row in rows]
    ratio_bars(figure.subplots(), bars, "time of a step")
    return figure


def main() -> None:
    warnings.filterwarnings("ignore")
    rows = [row for setup in SETUPS for row in measure(setup, seconds=40)]
    save("recompute", {"rows": rows})
    save_picture("recompute", picture(rows))


if __name__ == "__main__":
    main()
