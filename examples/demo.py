"""Train one GPT twice, on one device and on 2 x 2 x 2 ranks, and compare the two loss curves.

In: nothing (or `--data FILE`). Out: the results in `out/`, and exit status 1 unless the losses of the parallel run
are within 1e-3 of the plain ones at every step and end below the unigram entropy of the text.

    make demo
    make demo ARGS="--data my.txt --steps 100"
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

from curves import draw, find_faults
from recipe import add_arguments
from text import load_tokens, unigram_entropy

MESH = ["--t", "2", "--p", "2", "--d", "2", "--v", "2", "--num-microbatches", "4"]
RANKS = 8
OUTPUTS = {  # name or pattern -> what it shows, in the order in which to open them
    "graph.svg": "start here: the model as a graph, with the inserted collectives",
    "stage_*.py": "the program: one readable file per pipeline stage, the same on every tensor and data rank",
    "layers.py": "the methods that several stages call, mostly layers",
    "stages.svg": "what each stage holds, communicates and sends",
    "schedule.svg": "which rank computes which microbatch when, where it idles, what it holds for backward",
    "trace.json": "the same for ui.perfetto.dev",
    "schedule.txt": "the same as text: each pipeline rank's list of actions",
    "collectives.md": "every collective with its bytes and the reason for it",
    "plan.json": "the decisions: mesh, cut, shards",
    "program.json": "the input of the runtime: slices, buckets, actions",
    "loss.svg": "both loss curves, one on top of the other",
    "passes": "the graph after every pass (diff two of them)",
    "single.json": "losses and tokens/s of the plain loop on one device",
    "parallel.json": "losses and tokens/s of the 8 ranks",
}


def main() -> None:
    args = add_arguments(ArgumentParser(description=__doc__.splitlines()[0])).parse_args()
    here, start = Path(__file__).parent, time.perf_counter()
    for name in ("single.json", "parallel.json"):  # an old result must not be taken for a new one
        (args.out / name).unlink(missing_ok=True)
    run("One device, a plain torch loop", [sys.executable, here / "single.py", *sys.argv[1:]])
    # "--": without it torchrun takes the script's --d for an abbreviation of its --duplicate-... options and stops
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(RANKS),
        "--",
    ]
    run(f"{RANKS} ranks: {' '.join(MESH)}", [*torchrun, here / "train.py", *MESH, *sys.argv[1:]])

    single, parallel = (read_losses(args.out / name) for name in ("single.json", "parallel.json"))
    entropy = unigram_entropy(load_tokens(args.data))
    (args.out / "loss.svg").write_text(draw(single, parallel, entropy))
    faults = find_faults(single, parallel, entropy, args.precision)
    if faults:
        sys.exit("\nThe demo FAILED:\n" + "\n".join(f"  {fault}" for fault in faults))
    difference = max(abs(a - b) for a, b in zip(single, parallel, strict=True))
    seconds = time.perf_counter() - start
    print(f"\nOK in {seconds:.0f} s: {len(single)} steps, the losses differ by at most {difference:.1e}")
    print(f"final loss {parallel[-1]:.3f} nats (the text's unigram entropy: {entropy:.3f})\n")
    print(f"In {args.out}/:")
    for pattern, meaning in OUTPUTS.items():
        names = sorted(path.name for path in args.out.glob(pattern))
        if names:
            print(f"  {' .. '.join(dict.fromkeys((names[0], names[-1]))):26} {meaning}")


def run(title: str, command: list[str | Path]) -> None:
    """Run one script, with one thread per process (8 processes share the cores); end the demo if it fails."""
    print(f"\n== {title}", flush=True)
    status = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode
    if status:
        sys.exit(f"\nThe demo FAILED: '{title}' ended with status {status}; see its first error above")


def read_losses(path: Path) -> list[float]:
    return json.loads(path.read_text())["losses"]


if __name__ == "__main__":
    main()
