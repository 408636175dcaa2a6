"""Bytes that a layer takes on a tensor rank: kept for backward, and at the peak; beside Korthikanti et al. 2022, table 2.

In units of s b h bytes, of 16-bit activations and attention that keeps no scores, the paper has 10 + 24/t, with sequence
parallelism 34/t. 2 of the 34 are masks of dropout, which AutoPTD draws again and does not keep: without them it is 8 + 24/t and
32/t. With full recomputation it is the layer's input, 2 (with sequence parallelism 2/t). What is kept beyond that are two
numbers a row of every norm and one a head and row of attention, in 32 bits. A layer is the difference between models of two
layers and of one.

- kept: the storages that autograd saves while the emitted stage runs forward, each once, less the parameters;
- peak: what a step allocates at most beyond weights and inputs, by torch's profiler, of rank 0 in a world where nobody else is.

    python benchmarks/memory.py          # a table, benchmarks/results/memory.json and memory.svg; --all: a wider model too
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.lib.memory import peak_bytes
from benchmarks.lib.one_rank import one_rank, step
from benchmarks.lib.report import save, save_picture
from examples.gpt import GPT, GPTConfig
from tests.parity.kept import kept_bytes

SHAPES = {"h=2048 s=1024 a=16": (2048, 1024, 16), "h=1024 s=1024 a=16": (1024, 1024, 16)}
ROWS, VOCAB = 1, 256
Row = dict[str, object]


def layer_units(
    width: int, length: int, heads: int, t: int, *, tokens: bool, recompute: str | None
) -> tuple[float, float]:
    """(kept, peak) bytes of a layer on rank 0, in s b h, halved: CPUs run float32, of which the paper's types are half."""
    kept, peak = [], []
    for layers in (1, 2):
        torch.manual_seed(0)
        config = GPTConfig(n_embd=width, n_head=heads, n_layer=layers, block_size=length, vocab_size=VOCAB)
        ids, targets = (torch.randint(0, VOCAB, (ROWS, length)) for _ in range(2))
        asked = {"sequence_parallel": tokens, "recompute": recompute}
        kept.append(kept_bytes(GPT(config), (ids, targets), t, **asked))
        peak.append(_peak(config, (ids, targets), t, asked))
    kept_of_layer, peak_of_layer = ((two - one) / 2 / (ROWS * length * width) for one, two in (kept, peak))
    return kept_of_layer, peak_of_layer


def _peak(config: GPTConfig, call: tuple[torch.Tensor, ...], t: int, asked: dict[str, Any]) -> int:
    with torch.device("meta"):
        model = GPT(config)
    rank = one_rank(model, call, rank=0, device="cpu", t=t, num_microbatches=1, **asked)
    peak = peak_bytes(lambda: step(rank, call))
    rank.world.close()
    dist.destroy_process_group()
    return peak


def measure(shapes: list[str]) -> list[Row]:
    rows: list[Row] = []
    for shape in shapes:
        for recompute in (None, "full"):
            for t in (1, 2, 4, 8):
                for tokens in (False, True) if t > 1 else (False,):
                    rows.append(_row(shape, t, tokens, recompute))
                    print(
                        "  ".join(f"{value!s:>{max(len(key), 5)}}" for key, value in rows[-1].items()),
                        flush=True,
                    )
    return rows


def _row(shape: str, t: int, tokens: bool, recompute: str | None) -> Row:
    paper, without_masks = (34 / t, 32 / t) if tokens else (10 + 24 / t, 8 + 24 / t)
    if recompute:
        paper = without_masks = 2 / t if tokens else 2.0
    kept, peak = layer_units(*SHAPES[shape], t, tokens=tokens, recompute=recompute)
    row: Row = {"shape": shape, "t": t, "sequence parallel": tokens, "recompute": recompute or "none"}
    row |= {"paper": round(paper, 3), "without masks": round(without_masks, 3)}
    return row | {"kept": round(kept, 3), "peak": round(peak, 3)}


def picture(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for tokens, name in ((False, "tensor parallel"), (True, "and sequence parallel")):
        same = [row for row in rows if (row["shape"], row["recompute"]) == (rows[0]["shape"], "none")]
        mine = [row for row in same if row["sequence parallel"] == tokens or row["t"] == 1]
        ranks = [row["t"] for row in mine]
        (line,) = axes.plot(ranks, [row["kept"] for row in mine], marker="o", label=f"{name}, kept")
        axes.plot(
            ranks,
            [row["peak"] for row in mine],
            ":",
            marker="x",
            color=line.get_color(),
            label=f"{name}, peak",
        )
        axes.plot(ranks, [row["paper"] for row in mine], "--", color=line.get_color(), label=f"{name}, paper")
    axes.set(
        xlabel="tensor ranks t",
        ylabel="bytes of a layer / (s b h)",
        ylim=(0, None),
        title=str(rows[0]["shape"]),
    )
    axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="both shapes, not the first only")
    shapes = list(SHAPES)[: None if parser.parse_args().all else 1]
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
                " peak",
            ]
        )
    )
    rows = measure(shapes)
    save("memory", {"rows": rows})
    save_picture("memory", picture(rows))


if __name__ == "__main__":
    main()
