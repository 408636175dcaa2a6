"""Ours against the same model written by hand in Megatron's style, and against torch's own composition.

The GPT of examples/gpt.py trains on 2 or 4 processes of one thread over gloo, in all its forms in the same processes, in turns:
a step is all microbatches forward and backward, gradients summed, the loss read, gradients set to None after.

- hand-written: `lib/megatron_style.py`, plain autograd functions for f and g, local shapes: the ceiling of eager code. With the
  vocabulary split, and with whole logits gathered.
- Megatron-Core's layers in it, where the package is there: `lib/megatron_core.py`.
- torch: `lib/torch_native.py`, DTensor's parallelize_module (with and without sequence parallelism), pipelining's 1F1B and
  interleaved 1F1B, DistributedDataParallel.

Above 1 ours is faster: the median over turns of their time / our time, of wall time (the slowest rank's) and of CPU time (all
ranks'), with its 95% interval. Parity: the largest difference of a loss to the one-device model's, of three steps of SGD.
Memory: the most that a rank allocates during a step. Lines: code that one writes beyond the one-device model, without docs.

A group of gloo is slower when it rests between its turns: of the hand-written program (h=64) two copies on our group took 1.00
and 1.01 of our time, one on a group of its own 1.09 (1.04 to 1.14), one on the default group 1.12 (1.08 to 1.16), in five draws
alike. So at t=2 all forms share one group, and every case is drawn several times, in processes of its own.

    python benchmarks/peers.py                 # two tables, benchmarks/results/peers.json and peers.svg
    python benchmarks/peers.py --ceiling --seconds 120 --draws 4   # hand-written programs alone, many turns: peers_ceiling.json
"""

from __future__ import annotations

import argparse
import math
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
from autoptd.runtime.world.processes import DistributedGroup

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.lib import megatron_core, megatron_style, torch_native
from benchmarks.lib.lines import code_lines
from benchmarks.lib.memory import peak_bytes
from benchmarks.lib.pairs import of_all_ranks, ratio_of, take_turns
from benchmarks.lib.processes import spawn
from benchmarks.lib.report import ratio_bars, save, save_picture
from examples.gpt import GPT, GPTConfig

Row = dict[str, Any]
Drawn = dict[str, Any]  # of one form: "wall" and "cpu" seconds of its turns, "peak MB", "parity"
Step = Callable[[Tensor, Tensor], Tensor | None]


class Size(NamedTuple):
    """h, layers, rows of a microbatch, tokens of a row; heads of 16 below h=256, of 64 from there."""

    h: int
    layers: int
    b: int
    s: int

    def config(self) -> GPTConfig:
        heads = self.h // (16 if self.h < 256 else 64)
        return GPTConfig(n_embd=self.h, n_head=heads, n_layer=self.layers, block_size=self.s)


class Case(NamedTuple):
    """A mesh, and m microbatches of a replica."""

    t: int = 1
    p: int = 1
    v: int = 1
    d: int = 1
    m: int = 1

    def __str__(self) -> str:
        return " ".join(f"{name}={n}" for name, n in self._asdict().items() if n > 1 and name != "m")


SIZES = [Size(64, 8, 2, 32), Size(128, 8, 4, 64), Size(256, 6, 4, 128), Size(512, 4, 4, 256)]
CASES = [Case(p=2, m=4), Case(p=2, v=2, m=4), Case(d=2, m=2), Case(t=2, p=2, m=4)]
SMALL = Size(128, 8, 2, 64)  # of the meshes other than t=2
OURS = "AutoPTD"


class Contender(NamedTuple):
    """One form of the model: its step on this rank's rows, and its parameters."""

    step: Step
    parameters: list[torch.nn.Parameter]
    optimizer: Callable[[], torch.optim.Optimizer]


def ours(model: GPT, case: Case, ids: Tensor, targets: Tensor) -> tuple[Contender, dist.ProcessGroup | None]:
    """Also the group of its tensor ranks, where there are some."""
    pm = autoptd.parallelize(
        model,
        case.t,
        case.p,
        case.d,
        v=case.v,
        num_microbatches=case.m,
        fuse=False,
        example_inputs=(ids, targets),
    )
    made = Contender(pm.step, list(pm.parameters()), lambda: pm.optimizer(torch.optim.SGD, lr=0.1))
    if case.t == 1:
        return made, None
    group = pm.run.started("peers.py").here[0].world.group(("tp",))
    assert isinstance(group, DistributedGroup)
    return made, group.handle


def hand_written(model: GPT, head: str, group: dist.ProcessGroup) -> Contender:
    return trained_by_hand(megatron_style.ParallelGPT(model.config, model.state_dict(), group, head))


def trained_by_hand(written: megatron_style.ParallelGPT) -> Contender:
    def step(ids: Tensor, targets: Tensor) -> Tensor:
        loss = written(ids, targets)
        loss.backward()
        written.sum_shared_gradients()
        return loss.detach()  # type: ignore[no-any-return]

    return _with_sgd(step, list(written.parameters()))


def native(
    model: GPT, case: Case, tp: dist.ProcessGroup | None = None, *, sequence: bool = False
) -> Contender:
    if case.p > 1:
        made: Any = torch_native.Pipeline(
            model.config, model.state_dict(), p=case.p, v=case.v, t=case.t, m=case.m
        )
    else:
        made = torch_native.Whole(
            model.config, model.state_dict(), tp=tp, d=case.d, m=case.m, sequence=sequence
        )
    return _with_sgd(made.step, made.parameters())


def _with_sgd(step: Step, parameters: list[torch.nn.Parameter]) -> Contender:
    # Not foreach: it takes no lists of plain and distributed tensors.
    return Contender(step, parameters, lambda: torch.optim.SGD(parameters, lr=0.1, foreach=False))


def contenders(model: GPT, case: Case, ids: Tensor, targets: Tensor) -> dict[str, Contender]:
    mine, group = ours(model, case, ids, targets)
    found = {OURS: mine}
    if case == Case(t=2):
        assert group is not None
        found |= {f"hand-written, {head}": hand_written(model, head, group) for head in ("vocab", "gathered")}
        if megatron_core.is_installed():
            core = megatron_core.core_gpt(model.config, model.state_dict(), group)
            found["Megatron-Core's layers"] = trained_by_hand(core)
        found["torch DTensor"] = native(model, case, group)
        found["torch DTensor, sequence"] = native(model, case, group, sequence=True)
    else:
        name = {True: "torch DDP", case.p > 1: "torch pipelining", case.t > 1: "torch pipelining + DTensor"}[
            True
        ]
        found[name] = native(model, case)
    return found


def measure(size: Size, case: Case, seconds: float, rounds: int, ceiling: bool) -> dict[str, Drawn]:
    """A draw of a case on one of its processes, `rounds` turns at least; with `ceiling` of ours and what is written by hand."""
    warnings.filterwarnings("ignore")
    size, case = Size(*size), Case(*case)
    torch.manual_seed(0)
    model = GPT(size.config())
    whole_ids, whole_targets = (torch.randint(0, 256, (size.b * case.m * case.d, size.s)) for _ in range(2))
    replica = dist.get_rank() // case.t % case.d
    ids, targets = (x.chunk(case.d)[replica] for x in (whole_ids, whole_targets))
    made = contenders(model, case, whole_ids, whole_targets)
    if ceiling:
        made = {name: one for name, one in made.items() if name == OURS or name.startswith("hand-written")}

    def run(one: Contender) -> None:
        loss = one.step(ids, targets)
        if loss is not None:
            loss.item()
        for parameter in one.parameters:
            parameter.grad = None

    runs = {name: lambda one=one: run(one) for name, one in made.items()}  # type: ignore[misc]
    turns = of_all_ranks(take_turns(runs, 2000, calls=max(1, 128 // size.h), seconds=seconds, fewest=rounds))
    peaks = {name: _largest(peak_bytes(one)) for name, one in runs.items()}
    wanted = [_sgd_step(model, whole_ids, whole_targets) for _ in range(3)]
    apart = {name: _largest(_apart(one, ids, targets, wanted, case.d)) for name, one in made.items()}
    return {
        name: turns[name]._asdict() | {"peak MB": peaks[name] / 1e6, "parity": apart[name]} for name in made
    }


def rows_of(size: Size, case: Case, draws: list[dict[str, Drawn]]) -> list[Row]:
    """The table of a case: turns of all draws together."""
    tokens = size.b * case.m * case.d * size.s
    return [_row(size, case, name, draws, tokens) for name in draws[0]]


def _row(size: Size, case: Case, name: str, draws: list[dict[str, Drawn]], tokens: int) -> Row:
    def pooled(who: str, which: str) -> list[float]:
        return [one for draw in draws for one in draw[who][which]]

    wall, cpu = (pooled(name, which) for which in ("wall", "cpu"))
    row: Row = {"case": str(case), **size._asdict(), "microbatches": case.m, "who": name}
    row |= {"pairs": len(wall), "draws": len(draws), "tokens/s": tokens / statistics.median(wall)}
    row |= {"ms": 1e3 * statistics.median(wall), "CPU ms": 1e3 * statistics.median(cpu)}
    if name != OURS:
        row |= {
            which: ratio_of(pooled(name, which), pooled(OURS, which))._asdict() for which in ("wall", "cpu")
        }
    return row | {which: max(draw[name][which] for draw in draws) for which in ("peak MB", "parity")}


def _sgd_step(model: GPT, ids: Tensor, targets: Tensor) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss = model(ids, targets)[1]
    loss.backward()  # type: ignore[union-attr]
    optimizer.step()
    return loss.item()  # type: ignore[union-attr]


def _apart(one: Contender, ids: Tensor, targets: Tensor, wanted: list[float], d: int) -> float:
    """Largest relative difference of a loss, on ranks that have one."""
    optimizer, worst = one.optimizer(), 0.0
    for right in wanted:
        optimizer.zero_grad()
        loss = one.step(ids, targets)
        optimizer.step()
        if loss is None:
            continue
        if d > 1 and not getattr(one.step, "__self__", None).__class__.__module__.startswith("autoptd"):
            dist.all_reduce(loss)  # the others' is that of a replica
            loss /= d
        worst = max(worst, abs(loss.item() - right) / abs(right))
    return worst


def _largest(value: float) -> float:
    everyone: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return max(everyone)


def lines_of_user_code() -> Row:
    """What each way asks of its user beyond examples/gpt.py: for ours the call, and the batch's cut, of the README's loop."""
    split, whole, pipeline = torch_native.split_tensors, torch_native.Whole, torch_native.Pipeline
    model = [
        torch_native.Attention,
        torch_native.MLP,
        torch_native.Block,
        torch_native.Embeddings,
        torch_native.StageGPT,
    ]
    return {
        OURS: 2,
        "hand-written (t)": code_lines(megatron_style),
        "torch (t, d)": code_lines(*model, torch_native.renamed, split, whole),
        "torch (t, p)": code_lines(*model, torch_native.renamed, split, pipeline),
    }


def show(rows: list[Row]) -> None:
    ratios = f"{'wall: theirs / ours':>26}{'CPU':>24}"
    print(f"{'case':<10}{'h':>5}  {'who':<28}{'pairs':>6}{'tokens/s':>10}{ratios}{'MB':>8}{'parity':>9}")
    for row in rows:
        told_ratios = [
            f"{row[x]['median']:.3f} ({row[x]['low']:.3f}-{row[x]['high']:.3f})" if x in row else ""
            for x in ("wall", "cpu")
        ]
        told = f"{row['case']:<10}{row['h']:>5}  {row['who']:<28}{row['pairs']:>6}{row['tokens/s']:>10.0f}"
        print(
            f"{told}{told_ratios[0]:>26}{told_ratios[1]:>24}{row['peak MB']:>8.2f}{row['parity']:>9.0e}",
            flush=True,
        )


def picture(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(8, 1 + 0.28 * len(rows)), layout="constrained")
    for axes, which in zip(figure.subplots(1, 2, sharey=True), ("wall", "cpu"), strict=True):
        bars = [
            (
                f"{row['case']}, h={row['h']}: {row['who']}",
                row[which]["median"],
                row[which]["low"],
                row[which]["high"],
            )
            for row in rows
            if which in row
        ]
        ratio_bars(axes, bars, f"{'wall' if which == 'wall' else 'CPU'} time, theirs / ours")
        axes.tick_params(labelsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of turns per case, 15 rounds at least")
    parser.add_argument("--draws", type=int, default=2, help="of each case, in new processes")
    parser.add_argument("--only", nargs="+", help="these cases: t=2, 'p=2 v=2', ...")
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[size.h for size in SIZES], help="of the cases t=2"
    )
    parser.add_argument(
        "--ceiling", action="store_true", help="ours and the hand-written programs only, for t=2"
    )
    args = parser.parse_args()
    todo = [(size, Case(t=2)) for size in SIZES if size.h in args.widths]
    todo += [] if args.ceiling else [(SMALL, case) for case in CASES]
    name = "peers_ceiling" if args.ceiling else "peers"
    rows: list[Row] = []
    print(f"GPT, float32, processes of one thread over gloo, torch {torch.__version__}")
    for size, case in todo:
        if args.only and str(case) not in args.only:
            continue
        how = (size, case, args.seconds / args.draws, math.ceil(15 / args.draws), args.ceiling)
        found = rows_of(
            size, case, [spawn(measure, case.t * case.p * case.d, *how) for _ in range(args.draws)]
        )
        rows += found
        show(found)
        save(name, {"rows": rows})  # a run that is cut short leaves what it has
    lines = lines_of_user_code()
    print("lines of user code:", ", ".join(f"{who} {count}" for who, count in lines.items()))
    save(name, {"rows": rows, "lines of user code": lines})
    save_picture(name, picture(rows))


if __name__ == "__main__":
    main()
