"""How far the planner's closed form (`estimate`) is from the simulated schedule (`predict`), over random settings.

The search ranks by the closed form. Both see the same seconds of a layer, an end and a message, so that what differs is the
pipeline: its length, and what is in flight. Drawn from a fixed seed: GPTs and a Llama, dgx-a100 (messages on the critical
path) and dgx-h100 (messages beside computation), t, p, d, v, microbatches, recomputation, ZeRO and sequence parallelism.

    python benchmarks/planner_formula.py [--settings N]      # a table, benchmarks/results/planner_formula.json
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from autoptd.wings.planner.estimate import estimate
from autoptd.wings.planner.predict import predict
from autoptd.wings.planner.setting import Setting
from autoptd.wings.planner.shape import Shape

ROOT = Path(__file__).parent.parent
SHAPES = [
    Shape(layers=24, hidden=2304, heads=24, seq=2048),
    Shape(layers=48, hidden=6144, heads=64, seq=2048),
    Shape(layers=96, hidden=12288, heads=96, seq=2048),
    Shape(layers=48, hidden=8192, heads=64, seq=4096, vocab=128256, ffn=28672, kv_heads=8, mlp_matrices=3),
]
MOST = 6000  # actions of a schedule
Way = dict[str, Any]


def draw(dice: random.Random, kind: str) -> tuple[Shape, str, Way] | None:
    """One setting of a kind; None where the dice give none."""
    shape, cluster = dice.choice(SHAPES), dice.choice(("dgx-a100", "dgx-h100"))
    p, v, m = dice.choice((2, 3, 4, 6, 8, 12, 16, 24)), 1, dice.randint(1, 96)
    if kind.startswith("interleaved") or kind == "looped_bfs":
        v = dice.choice((2, 3, 4, 6))
        m = p * dice.randint(1, 8) if "divides m" in kind else m
        if "not a multiple" in kind:
            m = dice.choice((dice.randint(1, p), p * dice.randint(1, 6) + dice.randint(1, p - 1)))
    if kind == "layers do not divide":
        v = dice.choice((1, 1, 2, 3))
    if kind == "zbv":
        v = 2
    is_even = shape.layers % (p * v) == 0
    if p * v > shape.layers or p * v * m > MOST or is_even == (kind == "layers do not divide"):
        return None
    if "not a multiple" in kind and m % p == 0:
        return None
    d, b, t = dice.choice((1, 2, 8)), dice.choice((1, 2, 4)), dice.choice((1, 2, 4, 8))
    way = {"t": t, "p": p, "d": d, "v": v, "microbatch": b, "batch": m * d * b, "precision": "bf16"}
    way |= {"recompute": dice.choice(("none", "selective", "full")), "zero": dice.choice((0, 0, 1, 2, 3))}
    way |= {"sequence_parallel": dice.choice((False, True))}
    name = kind.split(",")[0]
    return shape, cluster, way | {"schedule": None if name in ("1f1b", "layers do not divide") else name}


KINDS = (
    "1f1b",
    "interleaved, p divides m",
    "interleaved, m not a multiple of p",
    "layers do not divide",
    "gpipe",
    "looped_bfs",
    "zb_h1",
    "zb_2p",
    "zbv",
)


def compare(kind: str, count: int) -> dict[str, float]:
    """Closed form over simulation, less one, of `count` settings: mean and largest distance of time, and of bytes."""
    dice = random.Random(f"{kind} {count}")
    seconds, held = [], []
    while len(seconds) < count:
        drawn = draw(dice, kind)
        if drawn is None:
            continue
        shape, cluster, way = drawn
        closed, found = (
            estimate(shape, cluster, Setting(**way)),
            predict(shape, cluster, **way, max_actions=10**9),
        )
        seconds.append(float(closed.step_seconds) / found.step_seconds - 1)
        held.append(float(closed.memory_bytes) / max(found.memory) - 1)
    means = {
        f"{name}_mean": sum(map(abs, found)) / count for name, found in (("time", seconds), ("memory", held))
    }
    return means | {
        f"{name}_worst": max(map(abs, found)) for name, found in (("time", seconds), ("memory", held))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--settings", type=int, default=150, help="of each kind")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "planner_formula.json")
    args = parser.parse_args()
    print(
        f"{'closed form against simulation':36}  time: mean, worst   memory: mean, worst   ({args.settings} settings each)"
    )
    rows = {}
    for kind in KINDS:
        one = rows[kind] = compare(kind, args.settings)
        cells = f"{one['time_mean']:11.2%} {one['time_worst']:7.2%} {one['memory_mean']:14.2%} {one['memory_worst']:7.2%}"
        print(f"{kind:36} {cells}", flush=True)
    args.out.write_text(json.dumps({"settings": args.settings, "kinds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
