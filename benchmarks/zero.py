"""ZeRO's stages against our own all-reduce, and against torch's forms of them; and an optimizer over flat storage.

The GPT of examples/gpt.py trains with AdamW on 2 or 4 processes of one thread over gloo, in all forms in the same processes,
in turns. A step is forward and backward of this replica's rows, gradients summed, AdamW's update, gradients set to None, and
where optimizer state is sharded, the gather of what was updated.

- AutoPTD, zero=0 to 3; zero=3 also with each parameter gathered once (`reshard_after_forward=False`).
- torch DDP with AdamW; with ZeroRedundancyOptimizer around it.
- torch FSDP2 (`fully_shard` per block and around all), `reshard_after_forward=False` and True.

Above 1 our zero=1 is faster, and beside zero=3 our zero=3: the median over turns of their time / its time, of wall time (the
slowest rank's) and of CPU time (all ranks'), with its 95% interval. Parity: the largest difference of a loss to the one-device
model's, over three steps. State: bytes of optimizer state on the rank that has the most. Held: bytes of parameters between
steps, likewise.

The update alone: AdamW over a model's parameters, one tensor each, against the same number of elements in one flat tensor.

    python benchmarks/zero.py                  # two tables, benchmarks/results/zero.json and zero.svg
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import autoptd

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.lib.pairs import Interval, of_all_ranks, ratio_of, take_turns
from benchmarks.lib.processes import spawn
from benchmarks.lib.report import ratio_bars, save, save_picture
from examples.gpt import GPT, GPTConfig

Row = dict[str, Any]
OURS, OURS_3 = "AutoPTD zero=1", "AutoPTD zero=3"
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}


class Size(NamedTuple):
    """h, layers, rows of a replica, tokens of a row."""

    h: int
    layers: int
    b: int
    s: int

    def config(self) -> GPTConfig:
        return GPTConfig(n_embd=self.h, n_head=self.h // 32, n_layer=self.layers, block_size=self.s)


SIZES = [Size(128, 8, 4, 64), Size(256, 6, 4, 128), Size(512, 4, 4, 128)]


class Contender(NamedTuple):
    """One form of training: its loss on this rank's rows with gradients summed, and its optimizer.

    `held_bytes`: bytes of parameters between steps. `is_mean`: the loss is that of the global batch, not of a replica.
    """

    backward: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    held_bytes: Callable[[], int]
    is_mean: bool = False

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss = self.backward(ids, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state_bytes(self) -> int:
        # A sharded optimizer keeps its state in the one that it wraps.
        inner = getattr(self.optimizer, "optim", self.optimizer)
        tensors = [x for state in inner.state.values() for x in state.values() if isinstance(x, Tensor)]
        local = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
        return sum(x.nbytes for x in local)


def ours(model: GPT, d: int, zero: int | autoptd.Zero, ids: Tensor, targets: Tensor) -> Contender:
    pm = autoptd.parallelize(
        model, d=d, zero=zero, num_microbatches=1, fuse=False, example_inputs=(ids, targets)
    )
    optimizer = pm.optimizer(torch.optim.AdamW, **ADAMW)
    return Contender(pm.step, optimizer, lambda: pm.memory()[dist.get_rank()].parameters, is_mean=True)


def by_autograd(model: nn.Module, optimizer: torch.optim.Optimizer) -> Contender:
    def backward(ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(ids, targets)[1]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def held_bytes() -> int:
        local = [x.to_local() if hasattr(x, "to_local") else x for x in model.parameters()]
        return sum(x.untyped_storage().nbytes() for x in local)

    return Contender(backward, optimizer, held_bytes)


def copy_of(model: GPT) -> GPT:
    made = GPT(model.config)
    made.load_state_dict(model.state_dict())
    return made


def replicated(model: GPT, is_sharded: bool) -> Contender:
    wrapped = nn.parallel.DistributedDataParallel(copy_of(model))
    if is_sharded:
        sharded = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, fused=True, **ADAMW)
        return by_autograd(wrapped, sharded)
    return by_autograd(wrapped, torch.optim.AdamW(wrapped.parameters(), fused=True, **ADAMW))


def fully_sharded(model: GPT, reshard: bool) -> Contender:
    made: Any = copy_of(model)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in made.transformer.h:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    # As by default: the root's own parameters are needed again at once.
    fully_shard(made, mesh=mesh, reshard_after_forward=False)
    return by_autograd(made, torch.optim.AdamW(made.parameters(), fused=True, **ADAMW))


def contenders(model: GPT, d: int, ids: Tensor, targets: Tensor) -> dict[str, Contender]:
    return {
        OURS: ours(model, d, 1, ids, targets),
        "AutoPTD zero=0": ours(model, d, 0, ids, targets),
        "AutoPTD zero=2": ours(model, d, 2, ids, targets),
        OURS_3: ours(model, d, 3, ids, targets),
        "AutoPTD zero=3, gathered once": ours(
            model, d, autoptd.Zero(3, reshard_after_forward=False), ids, targets
        ),
        "torch DDP": replicated(model, is_sharded=False),
        "torch DDP + ZeroRedundancyOptimizer": replicated(model, is_sharded=True),
        "torch FSDP2, gathered once": fully_sharded(model, reshard=False),
        "torch FSDP2": fully_sharded(model, reshard=True),
    }


def measure(size: Size, d: int, seconds: float) -> dict[str, Row]:
    """Take turns on one of `d` processes."""
    warnings.filterwarnings("ignore")
    size = Size(*size)
    torch.manual_seed(0)
    model = GPT(size.config())
    whole_ids, whole_targets = (torch.randint(0, 256, (size.b * d, size.s)) for _ in range(2))
    ids, targets = (x.chunk(d)[dist.get_rank()] for x in (whole_ids, whole_targets))
    made = contenders(model, d, whole_ids, whole_targets)
    wanted = one_device(model, whole_ids, whole_targets)
    apart = {name: largest_of_ranks(differences(one, ids, targets, wanted)) for name, one in made.items()}
    runs = {name: lambda one=one: one.step(ids, targets).item() for name, one in made.items()}  # type: ignore[misc]
    turns = of_all_ranks(take_turns(runs, 2000, calls=max(1, 256 // size.h), seconds=seconds))
    rows: dict[str, Row] = {}
    for name, one in made.items():
        state, held = largest_of_ranks(one.state_bytes()), largest_of_ranks(one.held_bytes())
        sizes = {"state bytes": state, "held bytes": held}
        rows[name] = {**turns[name]._asdict(), **sizes, "parity": apart[name]}
    return rows


def one_device(model: GPT, ids: Tensor, targets: Tensor) -> list[float]:
    plain = copy_of(model)
    one = by_autograd(plain, torch.optim.AdamW(plain.parameters(), **ADAMW))
    return [one.step(ids, targets).item() for _ in range(3)]


def differences(one: Contender, ids: Tensor, targets: Tensor, wanted: list[float]) -> float:
    """Return the largest relative difference of a loss."""
    worst = 0.0
    for right in wanted:
        loss = one.step(ids, targets).detach().clone()
        if not one.is_mean:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        worst = max(worst, abs(loss.item() - right) / abs(right))
    return worst


def largest_of_ranks(value: float) -> float:
    everyone: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return max(everyone)


def rows_of(size: Size, d: int, drawn: dict[str, Row]) -> list[Row]:
    rows: list[Row] = []
    for name, one in drawn.items():
        row = {"d": d, **size._asdict(), "who": name, "turns": len(one["wall"])}
        row["ms"] = 1e3 * sorted(one["wall"])[len(one["wall"]) // 2]
        for which in ("wall", "cpu"):
            if name != OURS:
                row[which] = ratio_of(one[which], drawn[OURS][which])._asdict()
            if "FSDP2" in name:
                row[f"{which} beside zero=3"] = ratio_of(one[which], drawn[OURS_3][which])._asdict()
        kept = ("state bytes", "held bytes", "parity")
        rows.append(row | {which: one[which] for which in kept})
    return rows


def update(size: Size, seconds: float) -> Row:
    """AdamW over a model's parameters against one flat tensor of as many elements."""
    torch.set_num_threads(1)
    parameters = list(GPT(size.config()).parameters())
    flat = nn.Parameter(torch.cat([x.detach().reshape(-1) for x in parameters]))
    forms: dict[str, list[nn.Parameter]] = {"a tensor each": parameters, "flat": [flat]}
    row: Row = {"h": size.h, "tensors": len(parameters), "elements": flat.numel()}
    for form, keywords in {"foreach": {"foreach": True}, "fused": {"fused": True}}.items():
        runs: dict[str, Callable[[], object]] = {}
        for name, tensors in forms.items():
            for x in tensors:
                x.grad = torch.randn_like(x)
            runs[name] = torch.optim.AdamW(tensors, **ADAMW, **keywords).step
        turns = take_turns(runs, 2000, calls=max(1, 2048 // size.h), seconds=seconds)
        row[form] = ratio_of(turns["a tensor each"].wall, turns["flat"].wall)._asdict()
        row[f"{form} ms"] = 1e3 * sorted(turns["flat"].wall)[len(turns["flat"].wall) // 2]
    return row


def told(ratio: dict[str, float] | None) -> str:
    return str(Interval(**ratio)) if ratio else ""


def show(rows: list[Row]) -> None:
    print(
        f"{'d':>2}{'h':>5}  {'who':<37}{'turns':>6}{'ms':>8}{'wall: / zero=1':>24}{'wall: / zero=3':>24}{'CPU':>24}"
        f"{'state, held MB':>16}{'parity':>9}"
    )
    for row in rows:
        ratios = (
            f"{told(row.get('wall')):>24}{told(row.get('wall beside zero=3')):>24}{told(row.get('cpu')):>24}"
        )
        state = "".join(f"{row[f'{what} bytes'] / 1e6:>8.1f}" for what in ("state", "held"))
        print(
            f"{row['d']:>2}{row['h']:>5}  {row['who']:<37}{row['turns']:>6}{row['ms']:>8.1f}{ratios}"
            f"{state:>9}{row['parity']:>9.0e}",
            flush=True,
        )


def show_update(row: Row) -> None:
    print(
        f"update, h={row['h']}: {row['tensors']} tensors of {row['elements']} elements, their time / flat: "
        f"foreach {told(row['foreach'])}, fused {told(row['fused'])}",
        flush=True,
    )


def picture(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(8, 1 + 0.28 * len(rows)), layout="constrained")
    for axes, which in zip(figure.subplots(1, 2, sharey=True), ("wall", "cpu"), strict=True):
        bars = [
            (
                f"d={row['d']}, h={row['h']}: {row['who']}",
                row[which]["median"],
                row[which]["low"],
                row[which]["high"],
            )
            for row in rows
            if which in row
        ]
        ratio_bars(axes, bars, f"{'wall' if which == 'wall' else 'CPU'} time / that of zero=1")
        axes.tick_params(labelsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of turns per size and d, 15 rounds at least"
    )
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 4], help="data-parallel degrees")
    parser.add_argument("--widths", type=int, nargs="+", default=[size.h for size in SIZES])
    args = parser.parse_args()
    rows: list[Row] = []
    print(f"GPT, float32, AdamW, processes of one thread over gloo, torch {torch.__version__}")
    sizes = [size for size in SIZES if size.h in args.widths]
    for d in args.degrees:
        for size in sizes:
            found = rows_of(size, d, spawn(measure, d, size, d, args.seconds))
            show(found)
            rows += found
            save("zero", {"rows": rows})  # a run that is cut short leaves what it has
    updates = [update(size, args.seconds / 4) for size in sizes]
    for row in updates:
        show_update(row)
    save("zero", {"rows": rows, "update": updates})
    save_picture("zero", picture(rows))


if __name__ == "__main__":
    main()
