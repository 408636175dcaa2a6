"""What each schedule's bubble is: simulated, and executed by the runtime with stages that take a known time.

Four pipeline ranks as threads train a small model whose every action is held up for its time (`ranks.timed`): t_f of a stage,
2 t_f of its backward, half of that for W where the schedule has W; with v chunks per rank each stage takes 1/v of it. So the
executor, its messages and its waits are real, and only the arithmetic is not. The bubble is finish / ideal - 1, ideal being the
busiest rank's own work. Of some steps the fastest counts: what else runs on the machine wakes threads late, and only adds.
The gain is 1F1B's time over the schedule's.

    python benchmarks/schedules.py       # a table, benchmarks/results/schedules.json and schedules.svg
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.ir.actions import Kind
from autoptd.schedule import simulate

ROOT = Path(__file__).parent.parent
P = 4
SCHEDULES = [
    *(("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3), ("looped_bfs", 2)),
    *(("zb_h1", 1), ("zb_2p", 1), ("zbv", 2)),
]
Row = dict[str, Any]


class Layers(nn.Module):
    """Equal layers, as many as there are stages; so small that they take no time beside the delays."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, target)


def compare(schedule: str, v: int, m: int, unit: float, steps: int) -> Row:
    """Simulate a schedule and execute it `steps` times; t_f is `unit` seconds."""
    torch.manual_seed(0)
    x, target = torch.randn(2, 2 * m, 8)
    keywords: dict[str, Any] = {"schedule": schedule, "num_microbatches": m, "backend": "local"}
    pm = autoptd.parallelize(Layers(P * v), p=P, v=v, **keywords, example_inputs=(x, target))
    orders = pm.program.orders
    has_w = any(action.kind is Kind.W for order in orders for action in order)
    forward, backward, weight_gradient = 1 / v, 2 / v, 1 / v
    simulated = simulate(orders, forward=forward, backward=backward, weight_gradient=weight_gradient)
    units = {
        Kind.F: forward,
        Kind.B: backward - weight_gradient if has_w else backward,
        Kind.W: weight_gradient,
    }
    delays = {(stage, kind): unit * time for kind, time in units.items() for stage in range(P * v)}
    ranks = pm.run.started("step")
    pm.step(x, target)
    executed = []
    for _ in range(steps):
        with ranks.timed(delays) as timeline:
            pm.step(x, target)
        executed.append((timeline.makespan / unit, timeline.bubble))
    pm.close()
    finish, bubble = min(executed)
    row: Row = {"schedule": schedule, "v": v, "m": m, "peak_live_microbatches": max(simulated.peak_live) / v}
    row["simulated"] = {"finish": simulated.makespan, "bubble": simulated.bubble}
    row["executed"] = {"finish": finish, "bubble": bubble, "all": [one for one, _ in executed]}
    return row


def add_gains(rows: list[Row]) -> None:
    """1F1B's time over each schedule's, with as many microbatches."""
    base = {row["m"]: row for row in rows if row["schedule"] == "1f1b"}
    for row in rows:
        for how in ("simulated", "executed"):
            row[how]["gain"] = base[row["m"]][how]["finish"] / row[how]["finish"]


def text(row: Row) -> str:
    simulated, executed = row["simulated"], row["executed"]
    name = f"{row['schedule']} v={row['v']}" if row["v"] > 1 else row["schedule"]
    bubbles = f"{simulated['bubble']:>10.1%} {executed['bubble']:>10.1%}"
    times = f"{simulated['finish']:>10.2f} {executed['finish']:>10.2f}"
    gains = f"{simulated['gain']:>10.3f} {executed['gain']:>10.3f}"
    return f"{row['m']:>3}  {name:<16} {row['peak_live_microbatches']:>5.1f} {bubbles} {times} {gains}"


HEADER = (
    f"{'m':>3}  {'schedule':<16} {'live':>5} {'bubble':>10} {'executed':>10} {'time':>10} {'executed':>10} "
    f"{'gain':>10} {'executed':>10}"
)


def picture(rows: list[Row]) -> str:
    """Bubbles as horizontal bars, simulated above executed."""
    widest = max(row[how]["bubble"] for row in rows for how in ("simulated", "executed"))
    height = 70 + 38 * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{height}" font-family="sans-serif">'
    ]
    lines.append('<rect width="100%" height="100%" fill="white"/>')
    lines.append(
        f'<text x="10" y="24" font-size="14">bubble over ideal time, p={P}, t_b = 2 t_f, W half of B</text>'
    )
    lines.append('<text x="10" y="42" font-size="12" fill="#555">light: simulated; dark: executed</text>')
    for i, row in enumerate(rows):
        y = 56 + 38 * i
        name = f"m={row['m']} {row['schedule']}" + (f" v={row['v']}" if row["v"] > 1 else "")
        lines.append(f'<text x="10" y="{y + 20}" font-size="12">{name}</text>')
        for how, color, top in (("simulated", "#bcd3ea", y), ("executed", "#5b8cc0", y + 15)):
            bubble = row[how]["bubble"]
            width = 400 * bubble / widest
            lines.append(f'<rect x="160" y="{top}" width="{width:.1f}" height="13" fill="{color}"/>')
            lines.append(f'<text x="{165 + width:.1f}" y="{top + 11}" font-size="11">{bubble:.1%}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--milliseconds", type=float, default=100.0, help="of a rank's forward, t_f")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"p={P}, t_f = {args.milliseconds:g} ms per rank, t_b = 2 t_f, W half of B; times in t_f")
    rows = []
    for m in args.microbatches:
        for schedule, v in SCHEDULES:
            rows.append(compare(schedule, v, m, args.milliseconds / 1e3, args.steps))
            add_gains(rows)
            print(*([HEADER] if len(rows) == 1 else []), text(rows[-1]), sep="\n", flush=True)
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine |= {"load": os.getloadavg()[1], "python": platform.python_version(), "torch": torch.__version__}
    record = {"machine": machine, "p": P, "t_f_ms": args.milliseconds, "steps": args.steps, "rows": rows}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "schedules.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "schedules.svg").write_text(picture(rows))


if __name__ == "__main__":
    main()
