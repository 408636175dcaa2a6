"""Bytes of a layer that a tensor rank keeps for backward, beside Korthikanti et al. 2022, table 2.

In units of s b h bytes, of 16-bit activations and attention that keeps no scores, the paper has 10 + 24/t, with sequence
parallelism 34/t. 2 of the 34 are masks of dropout, which AutoPTD draws again and does not keep: without them it is 8 + 24/t and
32/t. With full recomputation it is the layer's input, 2 (with sequence parallelism 2/t). What is kept beyond that are two
numbers a row of every norm and one a head and row of attention, in 32 bits. A layer is the difference between models of three
layers and of two.

Counted are the storages that autograd saves and that recipes read, each once, less the parameters, of rank 0 in a world where
nobody else is.

    python benchmarks/memory.py          # a table, benchmarks/results/memory.json and memory.svg
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.lib.one_rank import one_rank, step
from benchmarks.lib.report import save, save_picture
from examples.gpt import GPT, GPTConfig
from tests.parity.kept import watched

SHAPES = {"h=1024 s=1024 a=16": (1024, 1024, 16), "h=2048 s=1024 a=16": (2048, 1024, 16)}
# With heads of 128, as large models have, statistics are 1% of a layer's input.
CASES = (("h=1024 s=1024 a=16", None), ("h=2048 s=1024 a=16", "full"))
ROWS, VOCAB = 1, 256
Row = dict[str, object]


def layer_units(shape: str, t: int, asked: dict[str, Any]) -> float:
    """Bytes of a layer on rank 0, in s b h, halved: CPUs run float32, of which the paper's types are half."""
    width, length, heads = SHAPES[shape]
    # Not one layer and two: what is before the first one may lie otherwise.
    two, three = (_kept_bytes(width, length, heads, layers, t, asked) for layers in (2, 3))
    return (three - two) / (2 * ROWS * length * width)


def _kept_bytes(width: int, length: int, heads: int, layers: int, t: int, asked: dict[str, Any]) -> int:
    config = GPTConfig(n_embd=width, n_head=heads, n_layer=layers, block_size=length, vocab_size=VOCAB)
    call = tuple(torch.randint(0, VOCAB, (ROWS, length)) for _ in range(2))
    with torch.device("meta"):
        model = GPT(config)
    rank = one_rank(model, call, rank=0, device="cpu", t=t, num_microbatches=1, **asked)
    with watched(rank) as found:
        step(rank, call)
    rank.world.close()
    dist.destroy_process_group()
    return sum(found.values())


def measure() -> list[Row]:
    rows: list[Row] = []
    for shape, recompute in CASES:
        for t in (1, 2, 4, 8):
            for tokens in (False, True) if t > 1 else (False,):
                rows.append(_row(shape, t, tokens, recompute))
                print(
                    "  ".join(f"{value!s:>{max(len(key), 5)}}" for key, value in rows[-1].items()), flush=True
                )
    return rows


def _row(shape: str, t: int, tokens: bool, recompute: str | None) -> Row:
    paper, without_masks = (34 / t, 32 / t) if tokens else (10 + 24 / t, 8 + 24 / t)
    if recompute:
        paper = without_masks = 2 / t if tokens else 2.0
    kept = layer_units(shape, t, {"sequence_parallel": tokens, "recompute": recompute})
    row: Row = {"shape": shape, "t": t, "sequence parallel": tokens, "recompute": recompute or "none"}
    return row | {"paper": round(paper, 3), "without masks": round(without_masks, 3), "kept": round(kept, 3)}


def picture(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for recompute, words in (("none", ""), ("full", ", full recomputation")):
        for tokens, name in ((False, "tensor parallel"), (True, "and sequence parallel")):
            same = [row for row in rows if row["recompute"] == recompute]
            mine = [row for row in same if row["sequence parallel"] == tokens or row["t"] == 1]
            ranks = [row["t"] for row in mine]
            (line,) = axes.plot(ranks, [row["kept"] for row in mine], marker="o", label=f"{name}{words}")
            axes.plot(ranks, [row["paper"] for row in mine], "--", color=line.get_color())
    axes.set(
        xlabel="tensor ranks t", ylabel="bytes of a layer / (s b h)", yscale="log", title="dashed: the paper"
    )
    axes.legend()
    return figure


def main() -> None:
    warnings.filterwarnings("ignore")
    print(
        "  ".join(
            [
                "shape".rjust(18),
                "    t",
                "sequence parallel",
                "recompute",
                "paper",
                "without masks",
                " kept",
            ]
        )
    )
    rows = measure()
    save("memory", {"rows": rows})
    save_picture("memory", picture(rows))


if __name__ == "__main__":
    main()
