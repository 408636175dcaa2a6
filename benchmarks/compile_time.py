"""What a compilation costs: seconds per stage of the compiler, memory, and the size of the emitted files, by depth.

A nanoGPT-like model (examples/gpt.py) without weights (meta) at 12, 48, 96 and 128 layers, and the trillion-parameter GPT of
Narayanan et al., SC'21, table 1, for its 3,072 ranks. With c=8, a GPT and Hugging Face's Llama of 96 layers: `joint` is what
finds the types over tp and cp together. Each is compiled once in a fresh process, after a first fake tensor, which loads what
torch loads lazily. `trace` is recording the operators alone (both traces); `rest` is everything else, normalising the graph
included. Seconds are those of the process (one thread), not of the clock on the wall.

    python benchmarks/compile_time.py            # a table, benchmarks/results/compile_time.json and compile_time.svg
    python benchmarks/compile_time.py --only 48  # one of them
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
SMALL = {"n_embd": 1024, "n_head": 16, "vocab_size": 51200, "block_size": 1024}
MESH = {"t": 4, "p": 4, "d": 2, "v": 2, "num_microbatches": 8}
TRILLION = {"n_layer": 128, "n_embd": 25600, "n_head": 160, "vocab_size": 51200, "block_size": 2048}
CONTEXT = {"t": 8, "c": 8}
WIDE = {"n_layer": 96, "n_embd": 4096, "n_head": 64, "vocab_size": 51200, "block_size": 2048}
LLAMA = {
    "num_hidden_layers": 96,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 2048,
}
LLAMA_8B = {"num_hidden_layers": 32, "num_attention_heads": 32}
NARROW = {"n_embd": 256, "n_head": 4, "vocab_size": 1024, "block_size": 128}
DEEP = {"t": 4, "p": 16, "d": 2, "num_microbatches": 16}
CASES: dict[
    str, tuple[dict[str, int], dict[str, int], int]
] = {  # name -> model, mesh, rows of the global batch
    **{str(layers): ({"n_layer": layers, **SMALL}, MESH, 64) for layers in (12, 48, 96, 128)},
    "1.008T": (TRILLION, {"t": 8, "p": 64, "d": 6, "v": 2, "num_microbatches": 512}, 3072),
    "GPT, c=8": (WIDE, CONTEXT, 2),
    "Llama, c=8": (LLAMA, CONTEXT, 2),
    "Llama 8B": ({**LLAMA, **LLAMA_8B}, {"t": 8, "p": 4, "v": 2, "num_microbatches": 8}, 8),
    **{f"L={layers}": ({"n_layer": layers, **NARROW}, DEEP, 32) for layers in (32, 128, 512, 2048)},
}
STAGES = {  # what is timed beside the passes: stage -> functions of these modules
    "normalize": ("autoptd.trace.normalize.normalize",),
    "joint": ("autoptd.passes.annotate.solve_pairs",),
    "schedule": ("autoptd.schedule.requested_orders",),
    "emit": ("autoptd.codegen.write_program", "autoptd.codegen.crossings"),
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
            start = time.process_time()
            try:
                return run(*args, **kwargs)
            finally:
                self.seconds[stage] = self.seconds.get(stage, 0.0) + time.process_time() - start

        return timed


def peak_mib() -> float:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else MIB)


def make(config: dict[str, int], rows: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a model with the arguments of a call."""
    import torch

    if "n_layer" in config:
        from examples.gpt import GPT, GPTConfig

        shape = rows, config["block_size"]
        ids, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        return GPT(GPTConfig(**config)), (ids, targets), {}
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = torch.zeros(rows, config["max_position_embeddings"], dtype=torch.int64)
    model = LlamaForCausalLM(LlamaConfig(**config))
    return model, (), {"input_ids": ids, "labels": ids, "use_cache": False}


def measure(case: str) -> dict[str, Any]:
    """Compile one case in this process."""
    import torch

    after_torch = peak_mib()
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    from autoptd.compat import load_compiler
    from autoptd.compiler.driver import compile_program
    from autoptd.options import make_options
    from autoptd.passes import Record

    config, mesh, rows = CASES[case]
    load_compiler()
    clock = Clock()
    for stage, paths in {"trace": ("autoptd.trace.capture.record",), **STAGES}.items():
        for path in paths:
            clock.time(stage, path)
    with torch.device("meta"):
        model, args, kwargs = make(config, rows)
    before = peak_mib()
    start = time.process_time()
    options, record = make_options(**mesh), Record()
    program = compile_program(model, options, args, kwargs, replicas=options.d, record=record)
    total = time.process_time() - start
    return {
        "case": case,
        "parameters": sum(one.numel() for one in model.parameters()),
        "ranks": program.mesh.size,
        "microbatches": program.num_microbatches,
        "seconds": {name: round(value, 3) for name, value in (clock.seconds | record.seconds).items()},
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
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args.here)))
        return
    print(HEAD)
    rows, others = [], []
    for case in args.only:
        ours, theirs = [], []
        for _ in range(args.turns):
            ours.append(_measured(ROOT, case))
            if not (args.beside and (row := _measured(args.beside, case))):
                break
            theirs.append(row)
        rows.append(median_of(ours))
        print(line(rows[-1]), flush=True)
        if theirs:
            others.append(median_of(theirs))
            print(line(others[-1]) + "  before: " + ratios(rows[-1], others[-1]), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"machine": platform.processor() or platform.machine(), "torch": version("torch"), "rows": rows}
    if others:
        record |= {"turns": args.turns, "before": others}
    (args.out / "compile_time.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "compile_time.svg").write_text(picture(rows))


def _measured(root: Path, case: str) -> dict[str, Any]:
    """Compile a case with the checkout in `root`, in a process of its own; nothing if it does not have it."""
    command = [sys.executable, str(root / "benchmarks" / "compile_time.py"), "--here", case]
    done = subprocess.run(command, capture_output=True, text=True)
    if f"KeyError: {case!r}" in done.stderr:
        return {}
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def median_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row with the median of the seconds in all; the lower one of two."""
    return sorted(rows, key=seconds)[(len(rows) - 1) // 2]


def seconds(row: dict[str, Any]) -> float:
    return float(row["trace_s"] + row["rest_s"])


def ratios(row: dict[str, Any], before: dict[str, Any]) -> str:
    """Seconds, and memory beyond that of the model, relative to another checkout's."""
    mib = [one["peak_mib"] - one["before_mib"] for one in (row, before)]
    return f"{seconds(row) / seconds(before):.2f} of its seconds, {mib[0] / mib[1]:.2f} of its MiB"


HEAD = "    layers  ranks  trace s  rest s rest/trace joint s  peak MiB  files     KiB  largest"


def line(row: dict[str, Any]) -> str:
    ratio = row["rest_s"] / row["trace_s"]
    sizes = (
        f"{row['peak_mib']:>9} {row['stage_files']:>6} {row['source_kib']:>7} {row['largest_file_kib']:>8}"
    )
    joint = f"{row['seconds']['joint']:>7.2f}" if "joint" in row["seconds"] else f"{'-':>7}"
    seconds = f"{row['trace_s']:>8.2f} {row['rest_s']:>7.2f} {ratio:>10.2f} {joint}"
    return f"{row['case']:>10} {row['ranks']:>6} {seconds} {sizes}"


def picture(rows: list[dict[str, Any]]) -> str:
    """Two bars per case: trace above, rest below, in seconds."""
    scale = 340 / max(row["trace_s"] + row["rest_s"] for row in rows)
    height = 50 + 34 * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{height}" font-family="sans-serif">'
    ]
    lines.append('<rect width="100%" height="100%" fill="white"/>')
    lines.append(
        '<text x="10" y="24" font-size="14">seconds to compile: tracing (grey), everything else (blue)</text>'
    )
    for i, row in enumerate(rows):
        y, first, second = 42 + 34 * i, scale * row["trace_s"], scale * row["rest_s"]
        lines.append(f'<text x="10" y="{y + 15}" font-size="13">{row["case"]}</text>')
        lines.append(f'<rect x="100" y="{y}" width="{first:.1f}" height="20" fill="#b8b8b8"/>')
        lines.append(f'<rect x="{100 + first:.1f}" y="{y}" width="{second:.1f}" height="20" fill="#7aa6d6"/>')
        text = f"{row['trace_s']:.1f} + {row['rest_s']:.1f} s, {row['peak_mib']} MiB"
        lines.append(f'<text x="{110 + first + second:.1f}" y="{y + 15}" font-size="13">{text}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
