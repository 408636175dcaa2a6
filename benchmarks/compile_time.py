"""What a compilation costs: seconds per stage of the compiler, memory, and the size of the emitted files, by depth.

A nanoGPT-like model (examples/gpt.py) without weights (meta) at 12, 48, 96 and 128 layers, and the trillion-parameter GPT of
Narayanan et al., SC'21, table 1, for its 3,072 ranks. Each is compiled once in a fresh process, after a one-operator export
that loads what torch.export loads lazily. `trace` is torch.export alone (both of its runs); `rest` is everything else.

    python benchmarks/compile_time.py            # a table, benchmarks/results/compile_time.json and compile_time.svg
    python benchmarks/compile_time.py --only 48  # one of them
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
SMALL = {"n_embd": 1024, "n_head": 16, "vocab_size": 51200, "block_size": 1024}
MESH = {"t": 4, "p": 4, "d": 2, "v": 2, "num_microbatches": 8}
TRILLION = {"n_layer": 128, "n_embd": 25600, "n_head": 160, "vocab_size": 51200, "block_size": 2048}
CASES: dict[str, tuple[dict[str, int], dict[str, int], int]] = {  # name -> model, mesh, rows of the global batch
    **{str(layers): ({"n_layer": layers, **SMALL}, MESH, 64) for layers in (12, 48, 96, 128)},
    "1.008T": (TRILLION, {"t": 8, "p": 64, "d": 6, "v": 2, "num_microbatches": 512}, 3072),
}
STAGES = {  # what is timed: stage -> functions of these modules
    "normalize": ("autoptd.trace.capture.normalize",),
    "annotate": ("autoptd.passes.annotate",),
    "communicate": ("autoptd.passes.communicate", "autoptd.passes.check_connected"),
    "cut": ("autoptd.passes.cut",),
    "localize": ("autoptd.passes.localize",),
    "schedule": ("autoptd.compile.make_orders",),
    "emit": ("autoptd.codegen.write_stage", "autoptd.codegen.crossings"),
    "copies": ("autoptd.dump.copy_graph",),
}


class Clock:
    """Seconds spent in functions that are replaced by timed ones; the outermost call counts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, stage: str, path: str) -> None:
        owner_name, _, name = path.rpartition(".")
        __import__(owner_name)
        owner = sys.modules[owner_name]
        setattr(owner, name, self._timed(stage, getattr(owner, name)))

    def _timed(self, stage: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

        return timed


def peak_mib() -> float:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else MIB)


def measure(case: str) -> dict[str, Any]:
    """Compile one case in this process."""
    import torch

    after_torch = peak_mib()
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    import autoptd
    from examples.gpt import GPT, GPTConfig

    config, mesh, rows = CASES[case]
    torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(2, 2),), strict=False)
    clock = Clock()
    for stage, paths in {"trace": ("torch.export.export",), **STAGES}.items():
        for path in paths:
            clock.time(stage, path)
    with torch.device("meta"):
        model = GPT(GPTConfig(**config))
        ids, targets = (torch.zeros(rows, config["block_size"], dtype=torch.int64) for _ in range(2))
    before = peak_mib()
    start = time.perf_counter()
    program = autoptd.compile(model, example_inputs=(ids, targets), **mesh)
    total = time.perf_counter() - start
    return {
        "case": case,
        "parameters": sum(one.numel() for one in model.parameters()),
        "ranks": program.mesh.size,
        "microbatches": program.num_microbatches,
        "seconds": {name: round(value, 3) for name, value in clock.seconds.items()},
        "trace_s": round(clock.seconds["trace"], 3),
        "rest_s": round(total - clock.seconds["trace"], 3),
        "peak_mib": round(peak_mib()),
        "torch_mib": round(after_torch),
        "before_mib": round(before),
        "stage_files": len(program.sources),
        "source_kib": round(sum(map(len, program.sources.values())) / 1024, 1),
        "largest_file_kib": round(max(map(len, program.sources.values())) / 1024, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--here", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args.here)))
        return
    for case in args.only:
        done = subprocess.run([sys.executable, __file__, "--here", case], capture_output=True, text=True, check=True)
        print(json.dumps(json.loads(done.stdout.splitlines()[-1]), indent=1), flush=True)


if __name__ == "__main__":
    main()
