"""What exact dropout costs: nanoseconds per element of one call, one CPU thread, beside torch's own dropout.

Both run forward alone, then forward and backward, on the same float32 value, taking turns; counted is the processor time of
the thread, the least of many calls (other programs only add to it). AutoPTD draws its mask again in backward, torch stores
it: 4 bytes per element.

    python benchmarks/dropout.py         # a table, benchmarks/results/dropout.json and dropout.svg
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from autoptd.runtime.ops.dropout import Draw, dropout  # noqa: E402

RATE = 0.1
SIZES = {  # what it is -> (shape, dim of the batch)
    "residual, one row": ((1, 1024, 1024), 0),
    "residual, 4 rows": ((4, 1024, 256), 0),
    "residual, 16 rows": ((16, 256, 256), 0),
    "attention, 4 rows": ((4, 16, 128, 128), 0),
    "sequence first": ((512, 8, 256), 1),
    "small": ((4, 64, 64), 0),
}


def forward(x: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.no_grad():
        run(x)


def both(x: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x.grad = None
    y = run(x)
    y.backward(y.detach())


def measure(shape: tuple[int, ...], batch: int, calls: int) -> dict[str, float]:
    """Nanoseconds per element of every contender."""
    x = torch.randn(shape, requires_grad=True)
    draw = Draw(0, 1, 2, 0, shape[batch])
    contenders: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "ours": lambda one: dropout(one, RATE, draw, batch),
        "torch": lambda one: F.dropout(one, RATE),
    }
    found: dict[str, list[float]] = {}
    for _ in range(calls + 2):
        for name, run in contenders.items():
            for what, call in (("forward", forward), ("both", both)):
                start = time.thread_time_ns()
                call(x, run)
                found.setdefault(f"{name}_{what}", []).append((time.thread_time_ns() - start) / x.numel())
    return {name: min(times) for name, times in found.items()}


def picture(rows: list[dict[str, object]]) -> str:
    """Forward and backward together: ours above, torch's below."""
    widest = max(float(str(row[key])) for row in rows for key in ("ours_both", "torch_both"))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{50 + 52 * len(rows)}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="10" y="24" font-size="14">dropout, forward and backward: ns per element on one CPU thread</text>',
    ]
    for i, row in enumerate(rows):
        y = 40 + 52 * i
        lines.append(f'<text x="10" y="{y + 22}" font-size="13">{row["what"]}</text>')
        for k, (key, name, color) in enumerate(
            (("ours_both", "ours", "#7aa6d6"), ("torch_both", "torch", "#c9c9c9"))
        ):
            width = 360 * float(str(row[key])) / widest
            lines.append(f'<rect x="160" y="{y + 20 * k}" width="{width:.1f}" height="16" fill="{color}"/>')
            text = f"{name} {float(str(row[key])):.1f}"
            lines.append(f'<text x="{166 + width:.1f}" y="{y + 20 * k + 13}" font-size="12">{text}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"dropout of {RATE}, float32, 1 thread, torch {torch.__version__}: ns per element")
    print(f"{'value':20} {'shape':20} {'forward':>8} {'torch':>7} {'both':>7} {'torch':>7}")
    rows: list[dict[str, object]] = []
    for what, (shape, batch) in SIZES.items():
        row = measure(shape, batch, args.calls)
        rows.append({"what": what, "shape": list(shape), **row})
        times = [f"{row[key]:.2f}" for key in ("ours_forward", "torch_forward", "ours_both", "torch_both")]
        print(f"{what:20} {shape!s:20} {times[0]:>8} {times[1]:>7} {times[2]:>7} {times[3]:>7}", flush=True)
    record = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "rows": rows}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "dropout.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "dropout.svg").write_text(picture(rows))


if __name__ == "__main__":
    main()
