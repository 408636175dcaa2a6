"""Context parallelism: ours in its forms, beside Ulysses by hand and torch's ring attention, at long sequences.

The GPT of examples/gpt.py trains on c processes of one thread over gloo, in all forms in the same processes, in turns. A step
is forward and backward of one microbatch, gradients summed, the loss read, gradients set to None after.

- ours: `context="ulysses"`, and `"all_gather"` with tokens in runs and in zigzag order.
- by hand: `lib/context_forms.py`, Ulysses with two all-to-alls a layer and direction.
- torch: the ring below `torch.distributed.tensor.experimental.context_parallel`, given the kernel for CPUs. The public
  function does not know that one; what it says on a CPU stands in the JSON.

A time is that of the slowest rank. Balance: CPU time of the busiest rank over the mean of all, of the median turn. Parity: the
largest difference of a loss to that of the one-device model, of three steps of SGD, relative.

    python benchmarks/context.py                              # benchmarks/results/context.json and context.svg
    python benchmarks/context.py --lengths 128 --seconds 2 --folder out   # a try
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor

import autoptd

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.lib.context_forms import contenders, why_not_context_parallel
from benchmarks.lib.memory import peak_bytes
from benchmarks.lib.pairs import Turns, of_all_ranks, ratio_of, take_turns
from benchmarks.lib.processes import spawn
from benchmarks.lib.report import RESULTS, ratio_bars, save, save_picture
from examples.gpt import GPT, GPTConfig

Row = dict[str, Any]
OURS: dict[str, dict[str, Any]] = {
    "ulysses": {"context": "ulysses"},
    "all_gather, contiguous": {"context": autoptd.ContextParallel("all_gather", "contiguous")},
    "all_gather, zigzag": {"context": autoptd.ContextParallel("all_gather", "zigzag")},
}
# The form of ours that each of the others is held against: what it does likewise.
BESIDE = {
    "hand-written Ulysses": "ulysses",
    "torch's ring, contiguous": "all_gather, contiguous",
    "torch's ring, zigzag": "all_gather, zigzag",
    "all_gather, contiguous": "all_gather, zigzag",
    "ulysses": "all_gather, zigzag",
}


class Form(NamedTuple):
    """A step on whole rows, and the parameters of a rank."""

    step: Callable[[Tensor, Tensor], Tensor | None]
    parameters: list[torch.nn.Parameter]
    optimizer: Callable[[], torch.optim.Optimizer]


def make_model(width: int, layers: int, length: int) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(n_embd=width, n_head=width // 64, n_layer=layers, block_size=length))


def forms(width: int, layers: int, ids: Tensor, targets: Tensor) -> dict[str, Form]:
    """All forms of the model, on one of its c processes."""
    length, c, found = ids.shape[1], dist.get_world_size(), {}
    for name, how in OURS.items():
        model = make_model(width, layers, length)
        pm = autoptd.parallelize(
            model,
            c=c,
            num_microbatches=1,
            fuse=False,
            ranks=autoptd.RankOptions(check_every=0),
            example_inputs=(ids, targets),
            **how,
        )
        found[name] = Form(
            pm.step, list(pm.parameters()), lambda pm=pm: pm.optimizer(torch.optim.SGD, lr=0.1)
        )
    # One that rests between its turns, as each of ours.
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    for name, one in contenders(lambda: make_model(width, layers, length), group, length).items():
        parameters = list(one.model.parameters())
        found[name] = Form(one.step, parameters, lambda own=parameters: torch.optim.SGD(own, lr=0.1))
    return found


def measure(width: int, layers: int, length: int, seconds: float, rounds: int) -> dict[str, Any]:
    """All forms at a length, in turns, on one of their processes."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(1)
    ids, targets = torch.randint(0, 256, (2, 1, length))
    made = forms(width, layers, ids, targets)
    apart = _apart(made, make_model(width, layers, length), ids, targets)

    def run(one: Form) -> None:
        loss = one.step(ids, targets)
        assert loss is not None
        loss.item()
        for parameter in one.parameters:
            parameter.grad = None

    runs = {name: lambda one=one: run(one) for name, one in made.items()}  # type: ignore[misc]
    own = take_turns(runs, 1000, seconds=seconds, fewest=rounds, warm_up=1)
    turns = of_all_ranks(own)
    found = {}
    for name, one in runs.items():
        peak, balance = peak_bytes(one), _balance(own[name])
        found[name] = {
            **turns[name]._asdict(),
            "balance": balance,
            "peak MB": _all(peak, max) / 1e6,
            "parity": apart[name],
        }
    return {"forms": found, "context_parallel on CPU": why_not_context_parallel(dist.group.WORLD)}  # type: ignore[arg-type]


def _balance(turns: Turns) -> float:
    """CPU time of the busiest rank over the mean."""
    own = statistics.median(turns.cpu)
    return _all(own, max) / (_all(own, sum) / dist.get_world_size())


def _all(value: float, of: Callable[[list[float]], float]) -> float:
    """What `of` gives for the values of all ranks."""
    everyone: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return of(everyone)


def _apart(made: dict[str, Form], alone: GPT, ids: Tensor, targets: Tensor) -> dict[str, float]:
    """The largest relative difference of three losses; the parameters have been stepped after."""
    optimizer, wanted = torch.optim.SGD(alone.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = alone(ids, targets)[1]
        loss.backward()
        optimizer.step()
        wanted.append(float(loss))
    found = {}
    for name, one in made.items():
        stepping, worst = one.optimizer(), 0.0
        for right in wanted:
            stepping.zero_grad()
            mine = one.step(ids, targets)
            stepping.step()
            assert mine is not None
            worst = max(worst, abs(mine.item() - right) / abs(right))
        found[name] = _all(worst, max)
        for parameter in one.parameters:
            parameter.grad = None
    return found


def rows_of(c: int, length: int, width: int, found: dict[str, Any]) -> list[Row]:
    """The table of a length: the time of each form, and of the one of ours that it is held against."""
    rows = []
    for name, one in found.items():
        row: Row = {"c": c, "tokens": length, "h": width, "who": name, "turns": len(one["wall"])}
        row |= {"ms": 1e3 * statistics.median(one["wall"]), "CPU ms": 1e3 * statistics.median(one["cpu"])}
        if name in BESIDE:
            ours = found[BESIDE[name]]
            row["beside"] = BESIDE[name]
            row |= {which: ratio_of(one[which], ours[which])._asdict() for which in ("wall", "cpu")}
        rows.append(row | {key: one[key] for key in ("balance", "peak MB", "parity")})
    return rows


def show(rows: list[Row]) -> None:
    print(
        f"{'tokens':>7}  {'who':<26}{'turns':>6}{'ms':>10}{'balance':>9}{'MB':>9}{'parity':>9}  its time / ours"
    )
    for row in rows:
        told = (
            f"{row['tokens']:>7}  {row['who']:<26}{row['turns']:>6}{row['ms']:>10.1f}{row['balance']:>9.3f}"
        )
        ratio = ""
        if "wall" in row:
            ratio = "{median:.3f} ({low:.3f}-{high:.3f})".format(**row["wall"]) + f" of {row['beside']}"
        print(f"{told}{row['peak MB']:>9.1f}{row['parity']:>9.0e}  {ratio}", flush=True)


def picture(rows: list[Row]) -> Figure:
    shown = [row for row in rows if "wall" in row]
    figure = Figure(figsize=(8, 1 + 0.3 * len(shown)), layout="constrained")
    bars = [
        (
            f"{row['tokens']} tokens: {row['who']}\n/ our {row['beside']}",
            *map(row["wall"].get, ("median", "low", "high")),
        )
        for row in shown
    ]
    axes = figure.subplots()
    ratio_bars(axes, bars, f"time of a step on c={shown[0]['c']} ranks, its / ours")
    axes.tick_params(labelsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="tokens of the one row")
    parser.add_argument("--c", type=int, default=2, help="processes")
    parser.add_argument("--width", type=int, default=256, help="of the model, with heads of 64")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0, help="of turns per length")
    parser.add_argument("--rounds", type=int, default=9, help="of turns, at least")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the results")
    args = parser.parse_args()
    rows: list[Row] = []
    print(f"GPT, float32, {args.c} processes of one thread over gloo, torch {torch.__version__}")
    for length in args.lengths:
        found = spawn(measure, args.c, args.width, args.layers, length, args.seconds, args.rounds)
        new = rows_of(args.c, length, args.width, found["forms"])
        rows += new
        show(new)
        save(
            "context",
            {"rows": rows, "context_parallel on CPU": found["context_parallel on CPU"]},
            args.folder,
        )
    save_picture("context", picture(rows), args.folder)
    print("torch's context_parallel on CPU:", found["context_parallel on CPU"] or "runs")


if __name__ == "__main__":
    main()
