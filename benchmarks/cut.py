"""What cutting by time is worth: the busiest pipeline rank beside that of an equal-layers split, predicted and executed.

Predicted: GPTs with large vocabularies (h=4096, 32 layers, 128k tokens, p=8, tied embeddings; parameters on meta), compiled
twice: cut by AutoPTD, and with `plan={"cut": [4, 4, ...]}`. Seconds are those of the cost model for one microbatch, forward
and backward (Machine in ir/machine.py); a step is the simulated schedule. The head of such a model weighs as much as several
layers, and it is all on the last stage.

Executed: a small GPT with a vocabulary that makes its head as heavy, ranks as threads with one core each at most. Both programs
take steps in turn (A B, B A, ...); of each step the CPU seconds of every rank's thread are taken, and of those the busiest
rank's. CPU seconds, since other work on the machine would show in the clock on the wall.

    python benchmarks/cut.py                  # a table, benchmarks/results/cut.json and cut.svg
    python benchmarks/cut.py --rounds 20      # more steps of the executed one
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import autoptd
from autoptd.program.program import Program
from autoptd.runtime.step.launch import LocalRanks, Rank
from autoptd.runtime.step.microbatches import cut

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from examples.gpt import GPT, GPTConfig  # noqa: E402

LARGE = {"n_layer": 32, "n_embd": 4096, "n_head": 32, "vocab_size": 131072, "block_size": 2048}
MESHES = [{"t": t, "p": 8, "v": v} for t in (1, 8) for v in (1, 2, 4)]
SMALL = {"n_layer": 8, "n_embd": 128, "n_head": 4, "vocab_size": 12288, "block_size": 64}
EXECUTED = [{"p": 2}, {"p": 4}, {"p": 2, "v": 2}]
Row = dict[str, Any]


def both(
    config: dict[str, int], mesh: dict[str, int], rows: int, device: str
) -> Iterator[tuple[str, GPT, Program]]:
    """The same model, cut by AutoPTD and into equal numbers of layers."""
    stages = mesh["p"] * mesh.get("v", 1)
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(GPTConfig(**config))
        ids, targets = (torch.zeros(rows, config["block_size"], dtype=torch.int64) for _ in range(2))
    each = config["n_layer"] // stages
    for name, plan in (("by time", None), ("equal layers", {"cut": [each] * stages})):
        yield (
            name,
            model,
            autoptd.compile(model, example_inputs=(ids, targets), plan=plan, num_microbatches=rows, **mesh),
        )


def predict(mesh: dict[str, int]) -> Row:
    """Milliseconds of the busiest rank per microbatch, and where the model is cut."""
    row: Row = {**mesh}
    for name, _, program in both(LARGE, mesh, 2 * mesh["p"], "meta"):
        found = program.costs.cut
        step_ms = 1e3 * found.makespan
        row[name] = {
            "busiest_ms": 1e3 * max(found.rank_seconds),
            "rank_ms": [1e3 * x for x in found.rank_seconds],
        }
        row[name] |= {
            "after": list(found.after),
            "why": found.why,
            "step_ms": step_ms,
            "rank_gib": [x / 2**30 for x in found.rank_bytes],
        }
    row["gain"] = row["equal layers"]["busiest_ms"] / row["by time"]["busiest_ms"]
    row["step_gain"] = row["equal layers"]["step_ms"] / row["by time"]["step_ms"]
    return row


def execute(mesh: dict[str, int], rounds: int) -> Row:
    """Median CPU milliseconds per step of the busiest rank, of both programs, and of their ratio."""
    rows = 2 * mesh["p"]
    batch = tuple(torch.randint(0, SMALL["vocab_size"], (rows, SMALL["block_size"])) for _ in range(2))
    running = {
        name: (LocalRanks(program, model.state_dict()), program)
        for name, model, program in both(SMALL, mesh, rows, "cpu")
    }
    times: dict[str, list[list[float]]] = {name: [] for name in running}
    try:
        for k in range(rounds + 1):
            for name in list(running)[:: 1 if k % 2 else -1]:
                ranks, program = running[name]
                taken = step_times(ranks, program, batch)
                if k:  # the first one warms up
                    times[name].append(taken)
    finally:
        for ranks, _ in running.values():
            ranks.close()
    row: Row = {**mesh, "rounds": rounds}
    for name, taken in times.items():
        row[name] = {
            "busiest_ms": 1e3 * statistics.median(map(max, taken)),
            "after": running[name][1].plan["cut"],
        }
        row[name]["rank_ms"] = [1e3 * statistics.median(one) for one in zip(*taken, strict=True)]
        row[name]["predicted_us"] = 1e6 * max(running[name][1].costs.cut.rank_seconds)
    ratios = sorted(max(a) / max(b) for a, b in zip(times["equal layers"], times["by time"], strict=True))
    row |= {
        "gain": statistics.median(ratios),
        "low": ratios[len(ratios) // 10],
        "high": ratios[-1 - len(ratios) // 10],
    }
    row["predicted"] = row["equal layers"]["predicted_us"] / row["by time"]["predicted_us"]
    return row


def step_times(ranks: LocalRanks, program: Program, batch: tuple[torch.Tensor, ...]) -> list[float]:
    """CPU seconds of one step, per rank: each is a thread, and so is its backward."""
    taken: dict[int, float] = {}

    def body(rank: Rank) -> None:
        torch.set_num_threads(1)
        pieces = cut(program, batch, rank.executor.inputs, rank.world.coordinate.dp, rank.world.device)
        start = time.thread_time()
        rank.executor.step(pieces)
        taken[rank.world.rank] = time.thread_time() - start

    ranks.run("step", body)
    return [taken[rank] for rank in sorted(taken)]


def mesh_text(row: Row) -> str:
    return " ".join(f"{key}={row[key]}" for key in ("t", "p", "v") if key in row)


def picture(predicted: list[Row], executed: list[Row]) -> str:
    """Two bars per mesh: equal layers (grey), cut by time (blue), the longer one as long as the picture is wide."""
    height = 60 + 46 * (len(predicted) + len(executed)) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{height}" font-family="sans-serif">'
    ]
    lines.append('<rect width="100%" height="100%" fill="white"/>')
    lines.append(
        '<text x="10" y="22" font-size="14">busiest rank: equal layers (grey), cut by time (blue)</text>'
    )
    y = 44
    for title, rows in (
        ("predicted, h=4096, 32 layers, vocabulary 128k", predicted),
        ("executed, CPU time of a step", executed),
    ):
        lines.append(f'<text x="10" y="{y}" font-size="12" fill="#555">{title}</text>')
        y += 10
        for row in rows:
            scale = 360 / max(row[name]["busiest_ms"] for name in ("equal layers", "by time"))
            lines.append(f'<text x="10" y="{y + 22}" font-size="13">{mesh_text(row)}</text>')
            for name, color, top in (("equal layers", "#b8b8b8", y), ("by time", "#7aa6d6", y + 18)):
                width = scale * row[name]["busiest_ms"]
                lines.append(f'<rect x="110" y="{top}" width="{width:.1f}" height="15" fill="{color}"/>')
                text = f"{row[name]['busiest_ms']:.1f} ms" + (
                    f" ({row['gain']:.2f}x)" if name == "by time" else ""
                )
                lines.append(f'<text x="{118 + width:.1f}" y="{top + 12}" font-size="12">{text}</text>')
            y += 44
        y += 22
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("predicted: busiest rank, ms per microbatch of 1 row")
    print(f"{'mesh':>14} {'equal layers':>13} {'by time':>9} {'gain':>6} {'of a step':>9}  cut behind")
    predicted, executed = [], []
    for mesh in MESHES:
        row = predict(mesh)
        predicted.append(row)
        numbers = f"{row['equal layers']['busiest_ms']:>13.2f} {row['by time']['busiest_ms']:>9.2f} {row['gain']:>6.3f}"
        after = " ".join(one.removeprefix("transformer.") for one in row["by time"]["after"])
        print(f"{mesh_text(row):>14} {numbers} {row['step_gain']:>9.3f}  {after}", flush=True)
    print("executed: busiest rank, CPU ms per step; gain: median and the middle 80% of the pairs")
    for mesh in EXECUTED:
        row = execute(mesh, args.rounds)
        executed.append(row)
        numbers = f"{row['equal layers']['busiest_ms']:>13.1f} {row['by time']['busiest_ms']:>9.1f} {row['gain']:>6.3f}"
        print(
            f"{mesh_text(row):>14} {numbers}  {row['low']:.3f} to {row['high']:.3f}, predicted {row['predicted']:.3f}",
            flush=True,
        )
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine |= {"load": os.getloadavg()[1], "python": platform.python_version(), "torch": torch.__version__}
    args.out.mkdir(parents=True, exist_ok=True)
    record = {
        "machine": machine,
        "model": LARGE,
        "predicted": predicted,
        "executed_model": SMALL,
        "executed": executed,
    }
    (args.out / "cut.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "cut.svg").write_text(picture(predicted, executed))


if __name__ == "__main__":
    main()
