"""Initial weights of models that fit no device: what recording a constructor takes, and what a rank takes to make its slices.

GPTs of examples/gpt.py in float32, built under `autoptd.deferred()`; each case in a fresh process of one thread.

- record: SC'21's trillion-parameter GPT. Seconds of the constructor, operators on the tape, seconds to find the seeds of all
  draws and to hash the tape (what ranks compare before they start), and the process's peak memory, torch included.
- one rank: SC'21's 1.7B GPT (1.65B here, whose ends are tied), compiled for t=8, p=8; then one rank of the 64 makes its
  parameters, in torch's "fake" process group: the first rank, and one in the middle. Its peak is that of the process: torch,
  the model's recording, the compiler. Bound: the rank's slices, the largest parameter whole, and 0.6 GiB.

    python benchmarks/initial.py               # two tables, benchmarks/results/initial.json and initial.svg

Seconds are those of the process (one thread), not of the clock on the wall; peaks are the same on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import autoptd
from autoptd.runtime.step.launch import ProcessRank
from autoptd.subject.initial.deferred import named_tensors
from autoptd.subject.initial.recipes import Recipes, recording_of

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.lib.fake_world import fake_process_group
from benchmarks.lib.report import save, save_picture
from examples.gpt import GPT, GPTConfig

Row = dict[str, Any]
GIB = 1 << 30
TRILLION = GPTConfig(vocab_size=51200, block_size=2048, n_layer=128, n_head=160, n_embd=25600)
SMALL = GPTConfig(vocab_size=51200, block_size=2048, n_layer=24, n_head=24, n_embd=2304)
MESH = {"t": 8, "p": 8}
RANKS = (0, 28)
# Beyond a rank's slices and one whole parameter, in bytes.
ALLOWED = 0.6 * GIB


def peak_bytes() -> int:
    """Return the largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def record() -> Row:
    """Record the constructor of the largest model."""
    before, start = peak_bytes(), time.process_time()
    with autoptd.deferred():
        model = GPT(TRILLION)
    recorded = time.process_time()
    recipes = Recipes(named_tensors(model))
    seeded = time.process_time()
    recipes.fingerprint()
    hashed = time.process_time()
    recording = recording_of(model.lm_head.weight)
    assert recording is not None
    return {
        "case": "record",
        "parameters": sum(x.numel() for x in model.parameters()),
        "operators": len(recording.tape.steps),
        "record s": recorded - start,
        "seeds s": seeded - recorded,
        "hash s": hashed - seeded,
        "peak bytes": peak_bytes(),
        "torch bytes": before,
    }


def one_rank(rank: int) -> Row:
    """Make the parameters of one rank."""
    before = peak_bytes()
    with autoptd.deferred():
        model = GPT(SMALL)
    recorded = peak_bytes()
    ids = torch.zeros(2, 16, dtype=torch.int64)
    program = autoptd.compile(model, example_inputs=(ids, ids), num_microbatches=1, **MESH)
    compiled = peak_bytes()
    fake_process_group(rank, program.mesh.size)
    start = time.process_time()
    made = ProcessRank(program, Recipes(named_tensors(model)), device="cpu").here[0]
    seconds = time.process_time() - start
    slices = sum(x.nbytes for x in made.params.local.values())
    largest = max(x.nbytes for x in model.parameters())
    whole = sum(x.numel() for name, x in model.named_parameters() if name in made.params.local)
    return {
        "case": f"rank {rank}",
        "parameters": sum(x.numel() for x in model.parameters()),
        "seconds": seconds,
        "drawn": whole,
        "slices bytes": slices,
        "largest bytes": largest,
        "torch bytes": before,
        "recorded bytes": recorded,
        "compiled bytes": compiled,
        "peak bytes": peak_bytes(),
        "bound bytes": slices + largest + ALLOWED,
    }


def in_fresh_process(*arguments: str) -> Row:
    command = [sys.executable, __file__, "--here", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--here", metavar="CASE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.here:
        print(json.dumps(record() if args.here == "record" else one_rank(int(args.here))))
        return
    recorded = in_fresh_process("record")
    print(RECORD_HEAD, record_line(recorded), RANK_HEAD, sep="\n", flush=True)
    ranks = []
    for rank in RANKS:
        ranks.append(in_fresh_process(str(rank)))
        print(rank_line(ranks[-1]), flush=True)
    save("initial", {"record": recorded, "ranks": ranks})
    draw(recorded, ranks)


RECORD_HEAD = "    model  operators  record s  seeds s  hash s  peak GiB  (torch GiB)"
RANK_HEAD = "     rank  slices GiB  largest GiB  compiled GiB  peak GiB  bound GiB  seconds  M drawn"


def record_line(row: Row) -> str:
    seconds = f"{row['record s']:>9.2f} {row['seeds s']:>8.2f} {row['hash s']:>7.2f}"
    memory = f"{row['peak bytes'] / GIB:>9.2f} {row['torch bytes'] / GIB:>12.2f}"
    return f"{row['parameters'] / 1e12:>8.3f}T {row['operators']:>10} {seconds} {memory}"


def rank_line(row: Row) -> str:
    sizes = [row[f"{name} bytes"] / GIB for name in ("slices", "largest", "compiled", "peak", "bound")]
    widths = (12, 12, 13, 9, 10)
    memory = " ".join(f"{size:>{width - 1}.2f}" for size, width in zip(sizes, widths, strict=True))
    return f"{row['case']:>9} {memory} {row['seconds']:>8.1f} {row['drawn'] / 1e6:>8.0f}"


def draw(recorded: Row, ranks: list[Row]) -> None:
    """Draw the peaks, and for ranks their bounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.4), layout="constrained")
    axes = figure.subplots()
    names = ["record 1.008T", *(f"1.65B, {row['case']} of 64" for row in ranks)]
    rows = [recorded, *ranks]
    axes.barh(names, [row["peak bytes"] / GIB for row in rows], color="#7aa6d6")
    axes.barh(names, [row["torch bytes"] / GIB for row in rows], color="#b8b8b8")
    for i, row in enumerate(rows):
        bound = row.get("bound bytes", GIB) / GIB
        axes.plot([bound, bound], [i - 0.4, i + 0.4], color="#b00020", linestyle="--", linewidth=1)
        axes.text(bound + 0.02, i, f"{row['peak bytes'] / GIB:.2f} GiB", va="center", fontsize=8)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel("peak memory of the process, GiB (grey: torch; dashed: the bound)")
    save_picture("initial", figure)


if __name__ == "__main__":
    main()
