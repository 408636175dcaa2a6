"""Bytes and counts that a rank sends: by the formulas, by the program's own list, and as the runtime sent them.

Of the GPT on meshes of all three axes, ranks as threads, rank 0's:

- tp: per layer and microbatch, forward and backward: 4 all-reduces of b s h elements, which is 8 b s h (t-1)/t elements over a
  ring (SC'21, section 3.2); with sequence parallelism 4 all-gathers and 4 reduce-scatters of the same bytes, and an all-gather
  more for each of the two inputs of which backward gathers the shard again (Korthikanti et al. 2022, section 4.2.2). That is
  of a wider model: in the narrow one the compiler finds all-reduces, or whole weights, cheaper;
- pp: per boundary and microbatch, each way: b s h elements, v times as many boundaries with v chunks per rank; a t-th with
  scatter/gather (SC'21, sections 2.2.2 and 4.1);
- dp: once a step: 2 (d-1)/d of the bytes of the gradients that are summed over replicas alone.

Planned is `program.collectives`, sent is what `pm.record()` saw; both in wire bytes of a ring.

    python benchmarks/collectives.py       # a table, benchmarks/results/collectives.json and collectives.svg
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

import autoptd

sys.path.insert(0, str(Path(__file__).parent.parent))

from autoptd.program.calls import Call, expected_calls
from benchmarks.lib.report import save, save_picture
from examples.gpt import GPT, GPTConfig

HEADS, LAYERS, ROWS, ITEM = 8, 8, 2, 4  # b = ROWS, float32
NARROW, WIDE = (64, 32), (512, 256)  # h, s
Row = dict[str, Any]


class Layout(NamedTuple):
    t: int = 1
    p: int = 1
    d: int = 1
    v: int = 1
    m: int = 1
    sequence_parallel: bool = False
    p2p: str = "direct"

    def __str__(self) -> str:
        degrees = [f"{name}={n}" for name, n in zip("tpdv", self[:4], strict=True) if n > 1]
        return " ".join(
            [*degrees, *["sp, h=512 s=256"] * self.sequence_parallel, *["scattered"] * (self.p2p != "direct")]
        )


LAYOUTS = [
    *(Layout(t=2), Layout(t=4), Layout(t=8), Layout(t=4, sequence_parallel=True)),
    *(Layout(p=2, m=4), Layout(p=4, m=4), Layout(p=2, v=2, m=4)),
    *(Layout(t=2, p=2, m=4), Layout(t=4, p=2, m=4, p2p="scatter_gather")),
    *(Layout(d=2, m=2), Layout(d=4), Layout(t=2, p=2, d=2, v=2, m=4)),
]


def measure(layout: Layout) -> list[Row]:
    t, p, d, v, m, tokens, p2p = layout
    torch.manual_seed(0)
    width, length = WIDE if tokens else NARROW
    hidden = ROWS * length * width * ITEM  # bytes of b s h
    model = GPT(GPTConfig(n_embd=width, n_head=HEADS, n_layer=LAYERS, block_size=length))
    ids, targets = (torch.randint(0, 256, (ROWS * m * d, length)) for _ in range(2))
    pm = autoptd.parallelize(
        model, t, p, d, v=v, num_microbatches=m, sequence_parallel=tokens, ranks=autoptd.RankOptions(p2p=p2p), backend="local",
        plan={"cut": [LAYERS // (p * v)] * (p * v)}, example_inputs=(ids, targets),
    )  # fmt: skip
    pm.step(ids, targets)  # the first step also tells dtypes
    with pm.record() as record:
        pm.step(ids, targets)
    sent, planned = Counter(record.of(0)), expected_calls(pm.program, 0)
    mine = [pm.program.param(name) for name in pm.rank_parameters(0)]
    of_replicas = [
        spec for spec in mine if t == 1 or [step.axis for step in spec.sums if step.axis != "pp"] == ["dp"]
    ]
    gradients = sum(spec.grad_bytes(pm.program.mesh) for spec in of_replicas)
    pm.close()
    rows = []
    if t > 1:
        layers = LAYERS // p * m
        count, passes = (10, 10) if tokens else (4, 8)
        formula = passes * hidden * (t - 1) / t
        rows.append(_row(layout, "tp, a layer and microbatch", count, formula, planned, sent, layers))
    if p > 1:
        ways = (v, v - 1)  # boundaries over which rank 0 sends forward, and gradients back
        part = t if p2p == "scatter_gather" else 1
        rows.append(_row(layout, "pp, a microbatch", sum(ways), sum(ways) * hidden / part, planned, sent, m))
    if d > 1:
        rows.append(_row(layout, "dp, a step", 0, 2 * gradients * (d - 1) / d, planned, sent, 1))
    return rows


def _row(
    layout: Layout,
    what: str,
    count: int,
    formula: float,
    planned: Counter[Call],
    sent: Counter[Call],
    per: int,
) -> Row:
    row: Row = {"mesh": str(layout), "what": what, "formula": formula}
    for name, calls in (("planned", planned), ("sent", sent)):
        mine = {call: times for call, times in calls.items() if _belongs(call, what[:2])}
        row[name] = sum(times * call.wire_bytes for call, times in mine.items()) / per
        row[f"{name} calls"] = sum(mine.values()) / per
    return row | {"formula calls": count or None}


def _belongs(call: Call, axis: str) -> bool:
    """Of tp what layers do, of dp the gradients, of pp the messages."""
    if call.axis != axis or call.kind == "objects":
        return False
    if axis == "tp":
        return call.phase != "step" and ".h." in call.site
    return call.site.startswith("gradients ") if axis == "dp" else call.kind == "send"


def picture(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(8, 0.8 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [f"{row['mesh']}: {row['what']}" for row in rows]
    for shift, key, color in (
        (-0.25, "formula", "#bbbbbb"),
        (0.0, "planned", "#7aa6d6"),
        (0.25, "sent", "#203a5c"),
    ):
        axes.barh(
            [i + shift for i in range(len(rows))],
            [row[key] / 1024 for row in rows],
            0.25,
            label=key,
            color=color,
        )
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel("KiB that rank 0 sends")
    axes.legend()
    return figure


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    warnings.filterwarnings("ignore")
    print(
        f"GPT, h={NARROW[0]}, {LAYERS} layers, b s = {ROWS} x {NARROW[1]}, float32; wire bytes of rank 0, calls in brackets"
    )
    print(f"{'mesh':<22}{'what':<28}{'formula':>16}{'planned':>18}{'sent':>18}")
    rows = []
    for layout in LAYOUTS:
        for row in measure(layout):
            rows.append(row)
            told = [
                f"{row[k]:,.0f} ({row[f'{k} calls'] if row[f'{k} calls'] is not None else '-'})"
                for k in ("formula", "planned", "sent")
            ]
            print(f"{row['mesh']:<22}{row['what']:<28}{told[0]:>16}{told[1]:>18}{told[2]:>18}", flush=True)
    save("collectives", {"rows": rows})
    save_picture("collectives", picture(rows))


if __name__ == "__main__":
    main()
