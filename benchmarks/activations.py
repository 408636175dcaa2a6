"""Bytes that a layer keeps for backward on a tensor rank: counted, beside the formulas of Korthikanti et al. 2022, table 2.

In units of s b h bytes, of 16-bit activations and attention that keeps no scores, these are 10 + 24/t, with sequence
parallelism 34/t. 2 of the 34 are masks of dropout, which AutoPTD draws again and does not keep: without them it is 8 + 24/t and
32/t. Counted are the storages that autograd saves while the emitted stage runs forward, each once, less the parameters; a layer
is the difference between models of two layers and of one.

    python benchmarks/activations.py     # a table, benchmarks/results/activations.json and activations.svg
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from examples.gpt import GPT, GPTConfig  # noqa: E402
from tests.parity.kept import kept_bytes  # noqa: E402

SHAPES = {"h=1024 s=1024 a=16": (1024, 1024, 16), "h=2048 s=1024 a=16": (2048, 1024, 16)}
ROWS, VOCAB = 1, 256
Row = dict[str, object]


def layer_units(width: int, length: int, heads: int, t: int, *, tokens: bool) -> float:
    """Bytes that a layer keeps on rank 0, in units of s b h, halved: CPUs run float32, of which the paper's types are half."""
    sizes = []
    for layers in (1, 2):
        torch.manual_seed(0)
        config = GPTConfig(n_embd=width, n_head=heads, n_layer=layers, block_size=length, vocab_size=VOCAB)
        model = GPT(config)
        ids, targets = (torch.randint(0, VOCAB, (ROWS, length)) for _ in range(2))
        sizes.append(kept_bytes(model, (ids, targets), t, sequence_parallel=tokens))
    return (sizes[1] - sizes[0]) / 2 / (ROWS * length * width)


def measure(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for shape, (width, length, heads) in list(SHAPES.items())[: 1 if quick else None]:
        for t in (1, 2, 4, 8):
            for tokens in (False, True) if t > 1 else (False,):
                paper, without_masks = (34 / t, 32 / t) if tokens else (10 + 24 / t, 8 + 24 / t)
                counted = layer_units(width, length, heads, t, tokens=tokens)
                row: Row = {"shape": shape, "t": t, "sequence parallel": tokens, "paper": round(paper, 2)}
                rows.append(row | {"without masks": round(without_masks, 2), "counted": round(counted, 2)})
                print("  ".join(f"{value!s:>{len(key)}}" for key, value in rows[-1].items()), flush=True)
    return rows


def picture(rows: list[Row], path: Path) -> None:
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for tokens, name in ((False, "tensor parallel"), (True, "and sequence parallel")):
        same = [row for row in rows if row["shape"] == rows[0]["shape"]]
        mine = [row for row in same if row["sequence parallel"] == tokens or row["t"] == 1]
        ranks = [row["t"] for row in mine]
        (line,) = axes.plot(ranks, [row["counted"] for row in mine], marker="o", label=f"{name}, counted")
        axes.plot(ranks, [row["paper"] for row in mine], "--", color=line.get_color(), label=f"{name}, paper")
    axes.set(
        xlabel="tensor ranks t", ylabel="kept bytes of a layer / (s b h)", ylim=(0, None), title=str(rows[0]["shape"])
    )
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first shape only")
    print("  ".join(["shape".rjust(18), "t", "sequence parallel", "paper", "without masks", "counted"]))
    rows = measure(parser.parse_args().quick)
    folder = ROOT / "benchmarks" / "results"
    told = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "rows": rows}
    (folder / "activations.json").write_text(json.dumps(told, indent=2) + "\n")
    picture(rows, folder / "activations.svg")


if __name__ == "__main__":
    main()
