"""Checkpoints of a run: seconds to save and load, and how long training stands still, beside torch.distributed.checkpoint.

The GPT of examples/gpt.py trains with AdamW on 4 processes of one thread over gloo: ours at t=2, d=2, torch's FSDP2 over all
four. What is saved is parameters and both moments in float32, each element once.

- save: `pm.save`, `dcp.save`, and `torch.save` of the state that `pm.state_dict()` and the optimizer's gather on rank 0.
- load: `pm.load` and `dcp.load` into a running model, from the page cache.
- plain: every process writes its quarter of as many bytes into a file and syncs it; reads one. No format, no checks.
- stall: the slower of the two steps around an asynchronous save, less the slower of two steps later on, when nothing is
  saved. Ours is `pm.checkpointer` around a training loop; `dcp.async_save` is called between two steps, with a group of its
  own. Beside them the seconds in which all processes clone what they write.
- of one rank: four processes load what one has saved by pm.save, which dcp.load reads as well, ours at t=4; with the bytes
  that the rank reads that reads most. dcp's reader takes a saved tensor whole, whatever it needs of it.

Seconds of the slowest rank, medians over turns; all forms take turns in the same processes.

    python benchmarks/checkpoints.py           # a table, benchmarks/results/checkpoints.json and checkpoints.svg
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import autoptd
from autoptd.runtime.checkpoint.restore import Restoration

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.lib.processes import spawn
from benchmarks.lib.report import save, save_picture
from examples.gpt import GPT, GPTConfig

Row = dict[str, Any]
Run = Callable[[], object]
RANKS = 4
CONFIG = GPTConfig(vocab_size=8192, n_embd=1024, n_head=16, n_layer=8, block_size=16, dropout=0.0)
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}
ROWS = 4
# Steps between two saves of the loop that is watched; a multiple of 4.
BETWEEN = 12


class Ours:
    """`parallelize` at t=2, d=2."""

    def __init__(self, model: GPT, ids: Tensor, targets: Tensor, **keywords: Any) -> None:
        keywords = keywords or {"t": 2, "d": 2}
        self.pm = autoptd.parallelize(model, num_microbatches=1, example_inputs=(ids, targets), **keywords)
        self.optimizer = self.pm.optimizer(torch.optim.AdamW, **ADAMW)
        self.batch = self.pm.local_batch(ids, targets)

    def step(self) -> None:
        self.pm.step(*self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        self.pm.save(folder, optimizer=self.optimizer)

    def load(self, folder: Path) -> None:
        self.pm.load(folder, optimizer=self.optimizer)

    def gathered(self, folder: Path) -> None:
        state = {"model": self.pm.state_dict(), "optimizer": self.optimizer.state_dict()}
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
            with (folder / "state.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def own_tensors(self) -> list[Tensor]:
        """What this process would copy if every rank copied an equal share."""
        held = [*self.pm.parameters()]
        for state in self.optimizer.state.values():
            held += [x for x in state.values() if isinstance(x, Tensor) and x.dim()]
        # Two replicas hold the same, and each saves half.
        return [x.detach().reshape(-1)[: x.numel() // 2] for x in held]


class Theirs:
    """FSDP2 over all ranks, saved by torch.distributed.checkpoint."""

    def __init__(self, model: GPT, ids: Tensor, targets: Tensor) -> None:
        mesh = dist.init_device_mesh("cpu", (RANKS,))
        self.model: Any = GPT(model.config)
        self.model.load_state_dict(model.state_dict())
        for block in self.model.transformer.h:
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **ADAMW)
        self.ids, self.targets = (x.chunk(RANKS)[dist.get_rank()] for x in (ids, targets))

    def step(self) -> None:
        self.model(self.ids, self.targets)[1].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: Path, reader: dcp.FileSystemReader | None = None) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder, storage_reader=reader)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def measure(turns: int, root: str) -> Row:
    """Measure on one of the processes."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    model = GPT(CONFIG)
    ids, targets = (torch.randint(0, 256, (ROWS, CONFIG.block_size)) for _ in range(2))
    ours, theirs = Ours(model, ids, targets), Theirs(model, ids, targets)
    for each in (ours, theirs):
        each.step()
    nbytes = 3 * 4 * sum(x.numel() for x in {id(x): x for x in model.parameters()}.values())
    folder = Path(root)
    saved = {
        "plain writes": lambda k: plain_write(folder / "plain" / str(k), nbytes // RANKS),
        "pm.save": lambda k: ours.save(folder / "ours" / str(k)),
        "dcp.save": lambda k: theirs.save(folder / "theirs" / str(k)),
        "torch.save, gathered": lambda k: ours.gathered(folder / "gathered" / str(k)),
    }
    loaded = {
        "plain reads": lambda k: (folder / "plain" / "0" / str(dist.get_rank())).read_bytes(),
        "pm.load": lambda k: ours.load(folder / "ours" / "0"),
        "dcp.load": lambda k: theirs.load(folder / "theirs" / "0"),
    }
    places = dict(zip(saved, ("plain", "ours", "theirs", "gathered"), strict=True))
    seconds = {**in_turns(saved, turns, lambda name, k: clear(folder / places[name] / str(k - 1)))}
    seconds |= in_turns(loaded, turns)
    stalls = {
        "pm.checkpointer": stall_of_ours(ours, folder / "run", turns),
        "dcp.async_save": stall_of_theirs(theirs, folder / "async", turns),
    }
    found = {"bytes": nbytes, "seconds": seconds, "stalls": stalls}
    return {**found, "of one rank": of_one_rank(theirs, model, ids, targets, turns, folder / "one")}


class CountingReader(dcp.FileSystemReader):
    """Counts the bytes of the items that it reads."""

    nbytes = 0

    def read_data(self, plan: Any, planner: Any) -> Any:
        self.nbytes += sum(self.storage_data[item.storage_index].length for item in plan.items)
        return super().read_data(plan, planner)


def of_one_rank(
    theirs: Theirs, model: GPT, ids: Tensor, targets: Tensor, turns: int, folder: Path
) -> dict[str, Row]:
    """Let one process save, and all load: seconds, and the bytes of the rank that reads most."""
    if dist.get_rank() == 0:
        alone = Ours(model, ids, targets, backend="local")
        alone.step()
        alone.save(folder)
        alone.pm.close()
    ours, read = Ours(model, ids, targets, t=RANKS), dict.fromkeys(("pm.load", "dcp.load"), 0)
    ours.step()

    def by_ours(turn: int) -> None:
        with mock.patch.object(Restoration, "spread", counted):
            ours.load(folder)

    def counted(self: Restoration) -> None:
        read["pm.load"] = self.nbytes
        spread(self)

    def by_theirs(turn: int) -> None:
        reader = CountingReader(folder)
        theirs.load(folder, reader)
        read["dcp.load"] = reader.nbytes

    spread = Restoration.spread
    seconds = in_turns({"pm.load": by_ours, "dcp.load": by_theirs}, turns)
    most = {name: int(slowest([nbytes])) for name, nbytes in read.items()}
    return {name: {"seconds": taken, "bytes": most[name]} for name, taken in seconds.items()}


def clear(folder: Path) -> None:
    """Remove what the turn before has written; that of the first turn stays, to be read."""
    if folder.name != "0" and dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)


def in_turns(
    runs: dict[str, Callable[[int], object]], turns: int, before: Callable[[str, int], None] = lambda *_: None
) -> dict[str, float]:
    """Return the median seconds of the slowest rank; `before` each of them, not measured."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns):
        for name, run in runs.items():
            before(name, turn)
            dist.barrier()
            taken[name].append(slowest([timed(lambda run=run, turn=turn: run(turn))]))  # type: ignore[misc]
    return {name: statistics.median(each) for name, each in taken.items()}


def timed(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def slowest(seconds: Any) -> float:
    """Return the median here, on the rank where it is largest."""
    everyone: list[float] = [0.0] * RANKS
    dist.all_gather_object(everyone, statistics.median(seconds))
    return max(everyone)


def plain_write(folder: Path, nbytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / str(dist.get_rank())
    block = memoryview(bytearray(os.urandom(1 << 20)) * 16)
    with path.open("wb", buffering=0) as file:
        for start in range(0, nbytes, len(block)):
            file.write(block[: min(len(block), nbytes - start)])
        os.fsync(file.fileno())


def stall_of_ours(ours: Ours, folder: Path, turns: int) -> dict[str, float]:
    """Save every few steps; the loop waits for nothing else. Later on, clone what this process has written."""
    taken, clones, tensors = [], [], ours.own_tensors()
    with ours.pm.checkpointer(folder, ours.optimizer, every=BETWEEN, keep=1) as ckpt:
        while ours.pm.steps % BETWEEN != BETWEEN - 1:
            ours.step()

        def step() -> None:
            ours.step()
            ckpt.step()

        for _ in range(turns):
            taken += [timed(step) for _ in range(BETWEEN)]
            clones.append(timed(lambda: [x.clone() for x in tensors]))
    return {**stall_of(taken), "clone": slowest(clones)}


def stall_of_theirs(theirs: Theirs, folder: Path, turns: int) -> dict[str, float]:
    """The call behind a step, and the steps after it."""
    taken = []
    # Its thread communicates: in the group of the training loop it would meet the loop's own calls.
    group = dist.new_group()
    for turn in range(turns):
        dist.barrier()
        start = time.perf_counter()
        theirs.step()
        future = dcp.async_save(theirs.state(), checkpoint_id=folder / str(turn), process_group=group)
        taken.append(time.perf_counter() - start)
        taken += [timed(theirs.step) for _ in range(BETWEEN - 1)]
        future.result()
    return stall_of(taken)


def stall_of(taken: list[float]) -> dict[str, float]:
    """The slower of the two steps around a save, less the slower of two steps elsewhere: of two, one is slower anyway."""
    pairs = [max(taken[at : at + 2]) for at in range(0, len(taken), 2)]
    usual = statistics.median(pair for k, pair in enumerate(pairs) if k % (BETWEEN // 2) >= BETWEEN // 4)
    stall = slowest(pair - usual for pair in pairs[:: BETWEEN // 2])
    return {"stall": stall, "step": slowest(taken)}


def show(found: Row) -> None:
    nbytes, seconds, stalls = found["bytes"], found["seconds"], found["stalls"]
    print(f"{nbytes / 1e6:.0f} MB of parameters and moments, {RANKS} processes, torch {torch.__version__}")
    for name, taken in seconds.items():
        base = seconds["plain writes" if "save" in name or "write" in name else "plain reads"]
        print(f"  {name:<24}{taken:>8.2f} s{nbytes / taken / 1e9:>8.2f} GB/s{base / taken:>8.2f} of plain")
    print(f"  {'cloning a share':<24}{1e3 * stalls['pm.checkpointer']['clone']:>8.0f} ms")
    for name in ("pm.checkpointer", "dcp.async_save"):
        stall, step = stalls[name]["stall"], stalls[name]["step"]
        print(f"  {name:<24}{1e3 * stall:>8.0f} ms stall, a step takes {1e3 * step:.0f} ms", flush=True)
    for name, row in found["of one rank"].items():
        print(
            f"  {name + ' of one rank':<24}{row['seconds']:>8.2f} s, a rank reads {row['bytes'] / 1e6:.0f} MB"
        )


def picture(found: Row) -> Figure:
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    seconds, stalls = found["seconds"], found["stalls"]
    left.barh(list(seconds), [found["bytes"] / taken / 1e9 for taken in seconds.values()])
    left.set_xlabel("GB/s")
    names = ["pm.checkpointer", "dcp.async_save"]
    right.barh(
        ["cloning a share", *names],
        [1e3 * stalls["pm.checkpointer"]["clone"], *(1e3 * stalls[name]["stall"] for name in names)],
    )
    right.set_xlabel("training stands still, ms a save")
    for axes in (left, right):
        axes.invert_yaxis()
        axes.tick_params(labelsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; a temporary folder")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        found = spawn(measure, RANKS, args.turns, str(root))
    finally:
        shutil.rmtree(root)
    show(found)
    save("checkpoints", found)
    save_picture("checkpoints", picture(found))


if __name__ == "__main__":
    main()
