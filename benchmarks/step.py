"""What the emitted program costs: a training step of the t=p=d=1 program against the unmodified model in eager mode.

Both run forward and backward of the same batch in one process, taking turns (A B A B ...), one microbatch; printed is the ratio
of their times per pair: median, and the range of the middle half. Above 1 the emitted program is faster.

    python benchmarks/step.py            # a table, benchmarks/results/step.json and step.svg
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import autoptd

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from examples.gpt import GPT, GPTConfig  # noqa: E402

LENGTH, ROWS, LAYERS = 64, 4, 4


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(width: int, pairs: int) -> dict[str, float]:
    """Ratios model time / program time of `pairs` paired steps at one width."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_embd=width, n_head=width // 16, n_layer=LAYERS, block_size=LENGTH))
    ids, targets = (torch.randint(0, 256, (ROWS, LENGTH)) for _ in range(2))
    pm = autoptd.parallelize(model, num_microbatches=1, backend="local", example_inputs=(ids, targets))
    parameters = list(pm.parameters())

    def eager() -> None:
        model.zero_grad()
        model(ids, targets)[1].backward()

    def emitted() -> None:
        for parameter in parameters:
            parameter.grad = None
        pm.step(ids, targets)

    for _ in range(3):
        eager()
        emitted()
    times = [(seconds(eager), seconds(emitted)) for _ in range(pairs)]
    pm.close()
    ratios = sorted(a / b for a, b in times)
    return {
        "width": width,
        "model_ms": 1e3 * statistics.median(a for a, _ in times),
        "program_ms": 1e3 * statistics.median(b for _, b in times),
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 4],
        "high": ratios[3 * len(ratios) // 4],
    }


def picture(rows: list[dict[str, float]]) -> str:
    """The ratios as horizontal bars, the line at 1 being the unmodified model."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="560" height="{60 + 30 * len(rows)}" font-family="sans-serif">'
    ]
    lines.append('<rect width="100%" height="100%" fill="white"/>')
    lines.append('<text x="10" y="24" font-size="14">model time / program time, median and middle half</text>')
    for i, row in enumerate(rows):
        y = 44 + 30 * i
        lines.append(f'<text x="10" y="{y + 14}" font-size="13">h={row["width"]}</text>')
        lines.append(f'<rect x="80" y="{y}" width="{300 * row["ratio"]:.1f}" height="18" fill="#7aa6d6"/>')
        low, high = 80 + 300 * row["low"], 80 + 300 * row["high"]
        lines.append(
            f'<line x1="{low:.1f}" y1="{y + 9}" x2="{high:.1f}" y2="{y + 9}" stroke="#203a5c" stroke-width="3"/>'
        )
        lines.append(f'<text x="{high + 12:.1f}" y="{y + 14}" font-size="13">{row["ratio"]:.2f}</text>')
    lines.append(
        f'<line x1="380" y1="36" x2="380" y2="{50 + 30 * len(rows)}" stroke="#b00020" stroke-dasharray="4"/></svg>'
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"GPT, {LAYERS} layers, {ROWS} x {LENGTH} tokens, float32, 1 thread, torch {torch.__version__}")
    print(f"{'h':>6} {'model ms':>10} {'program ms':>11} {'ratio':>7} {'middle half':>14}")
    rows = []
    for width in args.widths:
        row = measure(width, args.pairs)
        rows.append(row)
        half = f"{row['low']:.2f} to {row['high']:.2f}"
        print(
            f"{width:>6} {row['model_ms']:>10.2f} {row['program_ms']:>11.2f} {row['ratio']:>7.2f} {half:>14}",
            flush=True,
        )
    record = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "rows": rows}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "step.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "step.svg").write_text(picture(rows))


if __name__ == "__main__":
    main()
