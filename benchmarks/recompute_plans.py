"""Recomputation by value beside recomputation of whole layers, in equal bytes: predicted steps of GPT-3 175B and Llama-2 70B.

Both at t=8, p=8 on A100s (bf16 with float32 storage, one replica, 32 microbatches of one sequence), without sequence
parallelism and with it; a row with `tokens` "auto" leaves that open. *full*, *full:1/2*, ... compute whole layers
again, the same share on every pipeline rank. `recompute="auto"` gets as much memory as the fullest rank takes there
at its fullest moment, and may cut the model elsewhere. AdaPipe (Sun et al., ASPLOS'24, abstract), which chooses units
of layers to compute again and the cut together, by stage, reports up to 1.32x over Megatron-LM on these two models,
measured on NVIDIA GPUs. Nothing is measured here: seconds are those of the simulated schedule (`program.costs.cut`).

`chosen in` are the seconds of this process in which layers were solved, all prices and attempts of one compilation together.

    python benchmarks/recompute_plans.py             # a table, benchmarks/results/recompute_plans.json and .svg; half an hour
    python benchmarks/recompute_plans.py --layers 16 # smaller models: no file is written
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from matplotlib.figure import Figure
from torch import nn

import autoptd
from autoptd.passes.kept.by_value import ByValue

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.lib.report import save, save_picture
from examples.gpt import GPT, GPTConfig

Row = dict[str, Any]
GIB = 1 << 30
MICROBATCHES = 32
MESH: dict[str, Any] = {"t": 8, "p": 8, "num_microbatches": MICROBATCHES, "machine": "dgx-a100"}
UNIFORM = ("full", "full:1/2", "full:1/4")
# Sun et al. 2024, abstract: "up to", over Megatron-LM.
ADAPIPE = 1.32
# No bound: with one, the fullest moments of a step are rehearsed.
MEMORY = 1 << 50


def gpt3(layers: int | None = None) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = GPTConfig(
        n_embd=12288, n_head=96, n_layer=layers or 96, vocab_size=51200, block_size=2048, dropout=0.0
    )
    with torch.device("meta"):
        ids, targets = (torch.zeros(MICROBATCHES, 2048, dtype=torch.long) for _ in range(2))
        return GPT(config), {"idx": ids, "targets": targets}


def llama2(layers: int | None = None) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        num_hidden_layers=layers or 80,
        max_position_embeddings=4096,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("meta"):
        ids = torch.zeros(MICROBATCHES, 4096, dtype=torch.long)
        return transformers.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


MODELS: dict[str, Callable[[int | None], tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "GPT-3 175B": gpt3,
    "Llama-2 70B": llama2,
}


@contextmanager
def choosing() -> Iterator[list[float]]:
    """Collect the seconds in which the values of layers are chosen."""
    spent: list[float] = []

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return run(*args, **kwargs)
            finally:
                spent.append(time.process_time() - start)

        return wrapped

    with (
        mock.patch.object(ByValue, "__init__", timed(ByValue.__init__)),
        mock.patch.object(ByValue, "choose", timed(ByValue.choose)),
    ):
        yield spent


def plan_of(model: nn.Module, call: dict[str, torch.Tensor], **keywords: Any) -> Row:
    start = time.process_time()
    with choosing() as spent:
        program = autoptd.compile(model, example_inputs=call, precision="bf16", **{**MESH, **keywords})
    cut = program.costs.cut
    again = cut.again_seconds or (0.0,)
    return {
        "seconds": round(cut.makespan, 4),
        "GiB": round(max(cut.peak_bytes) / GIB, 2),
        "again, first stage": round(again[0] / cut.seconds[0], 3),
        "again, last stage": round(again[-1] / cut.seconds[-1], 3),
        "chosen in": round(sum(spent), 2),
        "compiled in": round(time.process_time() - start, 1),
        "bytes": max(cut.peak_bytes),
    }


def rows_of(name: str, layers: int | None) -> Iterator[Row]:
    model, call = MODELS[name](layers)

    def row(what: str, tokens: bool | str, beside: Row | None = None) -> Row:
        """The row of a plan; `beside` another one, in the bytes of that."""
        asked: Row = {
            "recompute": False if what == "nothing" else what,
            "sequence_parallel": tokens,
            "zero": 0,
        }
        asked["memory"] = beside["bytes"] if beside else MEMORY
        found = {"model": name, "recompute": what, "tokens": tokens, "beside": beside and beside["recompute"]}
        found |= plan_of(model, call, **asked)
        if beside:
            found["gain"] = round(beside["seconds"] / found["seconds"], 3)
        print("  ".join(f"{value!s:>11}" for key, value in found.items() if key != "bytes"), flush=True)
        return found

    for tokens in (False, True):
        yield row("nothing", tokens)
        for uniform in UNIFORM:
            whole = row(uniform, tokens)
            yield whole
            yield row("auto", tokens, whole)
            if uniform == "full" and not tokens:
                yield row("auto", "auto", whole)


def picture(rows: list[Row]) -> Figure:
    """Seconds of a step over the bytes of the fullest rank, a panel for each model."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for at, name in enumerate(MODELS):
        axes = figure.add_subplot(1, len(MODELS), at + 1)
        for tokens, style in ((False, "-"), (True, "--")):
            mine = [row for row in rows if row["model"] == name and row["tokens"] is tokens]
            for by_value, colour, mark in ((False, "#8a8a8a", "s"), (True, "#203a5c", "o")):
                line = [
                    row
                    for row in mine
                    if row["recompute"] == "nothing" or (row["recompute"] == "auto") is by_value
                ]
                points = sorted((row["GiB"], row["seconds"]) for row in line)
                label = f"{'by value' if by_value else 'whole layers'}{', tokens split' * tokens}"
                axes.plot(*zip(*points, strict=True), mark + style, color=colour, label=label)
        axes.set(title=name, xlabel="GiB on the fullest rank", ylabel="seconds of a step, predicted")
        axes.legend(fontsize=7)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int)
    args = parser.parse_args()
    rows = [row for name in MODELS for row in rows_of(name, args.layers)]
    for row in rows:
        if row["beside"] == "full":
            told = f"{row['model']}, tokens={row['tokens']}: auto in the bytes of full: {row['gain']}x"
            print(f"{told} (AdaPipe, published: up to {ADAPIPE}x)")
    longer = [row for row in rows if row["beside"] and row["gain"] < 1]
    assert not longer, f"longer than whole layers in equal bytes: {longer}"
    if args.layers is None:
        kept = [{key: value for key, value in row.items() if key != "bytes"} for row in rows]
        save("recompute_plans", {"AdaPipe, up to": ADAPIPE, "rows": kept})
        save_picture("recompute_plans", picture(rows))


if __name__ == "__main__":
    main()
