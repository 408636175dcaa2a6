"""Mixtures of experts: the model of transformers on one device, beside ours on one and, both ways to divide experts, on two.

Two stacks of layers, few wide experts (as Mixtral) and many narrow ones (as Qwen3-MoE), float32, on processes of one thread
over gloo, all forms in the same processes, in turns. A step is forward and backward of one microbatch, the loss read,
gradients set to None after. A time is that of the slowest rank.

- transformers: the unmodified model with its default settings (`experts_implementation="grouped_mm"`).
- ours, t=1; t=2 inside (each expert's channels) and by number (each rank's experts), as a plan pins them.

Parts: seconds of forward and backward of what a layer of experts is made of, alone on one device. Spread: the standard
deviation of an expert's rows over their mean, of routers that are not trained.

    python benchmarks/experts.py                              # benchmarks/results/experts.json and experts.svg
    python benchmarks/experts.py --seconds 2 --folder out     # a try
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from matplotlib.figure import Figure
from torch import Tensor, nn

import autoptd
from autoptd import runtime as rt

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.lib.pairs import of_all_ranks, ratio_of, take_turns
from benchmarks.lib.processes import spawn
from benchmarks.lib.report import RESULTS, ratio_bars, save, save_picture

Row = dict[str, Any]
VOCAB, WIDTH, HEADS = 256, 256, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "use_cache": False,
}
# Experts, choices of a token, channels of an expert.
STACKS = {"wide": (8, 2, 896), "narrow": (64, 8, 64)}
# How the matrices are pinned, and how many ranks there are; both matrices have the experts in dim 0.
OURS: dict[str, tuple[int, dict[str, int]]] = {
    "ours, t=1": (1, {}),
    "ours, t=2 inside": (2, {"gate_up_proj": 1, "down_proj": 2}),
    "ours, t=2 by number": (2, {"gate_up_proj": 0, "down_proj": 0}),
}


def make_model(stack: str) -> nn.Module:
    experts, choices, channels = STACKS[stack]
    torch.manual_seed(0)
    if stack == "wide":
        sizes = {"num_local_experts": experts, "intermediate_size": channels}
        config = transformers.MixtralConfig(**SIZES, num_experts_per_tok=choices, **sizes)
        return transformers.MixtralForCausalLM(config)
    sizes = {"num_experts": experts, "moe_intermediate_size": channels, "head_dim": WIDTH // HEADS}
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SIZES, num_experts_per_tok=choices, **sizes)
    )


def measure(stack: str, tokens: int, seconds: float, rounds: int) -> dict[str, Any]:
    """All forms of a stack, in turns, on one of two processes."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(1)
    ids = torch.randint(0, VOCAB, (1, tokens))
    batch = {"input_ids": ids, "labels": ids.clone()}
    eager = make_model(stack)
    runs: dict[str, Callable[[], object]] = {"transformers": lambda: _step_of(eager, batch)}
    losses = {"transformers": float(eager(**batch).loss)}
    for name, (t, dims) in OURS.items():
        pins = [{"pattern": f"model.layers.*.mlp.experts.{key}", "dim": dim} for key, dim in dims.items()]
        pm = autoptd.parallelize(
            make_model(stack),
            t=t,
            num_microbatches=1,
            ranks=autoptd.RankOptions(check_every=0),
            example_inputs=batch,
            plan={"shard": pins} if pins else None,
            # One rank is a thread of each process.
            backend="local" if t == 1 else None,
        )
        runs[name] = lambda pm=pm: _our_step(pm, batch)  # type: ignore[misc]
        losses[name] = pm.step(**batch).item()
    turns = of_all_ranks(take_turns(runs, 1000, seconds=seconds, fewest=rounds, warm_up=2))
    found = {name: turns[name]._asdict() | {"loss": losses[name]} for name in runs}
    return {"forms": found, "parts": parts(stack, tokens), "spread": spread(eager, batch, stack)}


def _step_of(model: nn.Module, batch: dict[str, Tensor]) -> None:
    loss = model(**batch).loss
    loss.backward()
    loss.item()
    for parameter in model.parameters():
        parameter.grad = None


def _our_step(pm: autoptd.ParallelModel, batch: dict[str, Tensor]) -> None:
    loss = pm.step(**batch)
    assert loss is not None
    loss.item()
    for parameter in pm.parameters():
        parameter.grad = None


def parts(stack: str, tokens: int) -> dict[str, float]:
    """Seconds, forward and backward, of the parts of one layer of experts on one device."""
    experts, choices, channels = STACKS[stack]
    x = torch.randn(tokens, WIDTH, requires_grad=True)
    ids = torch.randn(tokens, experts).topk(choices).indices.flatten()
    up, down = torch.randn(experts, WIDTH, 2 * channels), torch.randn(experts, channels, WIDTH)
    up.requires_grad_()
    down.requires_grad_()
    order, ends = rt.by_expert(ids, experts)
    rows = torch.randn(len(ids), WIDTH, requires_grad=True)
    inner = torch.randn(len(ids), channels, requires_grad=True)
    made: dict[str, Callable[[], Tensor | None]] = {
        "sort": lambda: rt.by_expert(ids, experts) and None,
        "take rows": lambda: rt.take_rows(x, order, choices),
        "put rows back": lambda: rt.put_rows(rows, order, len(ids)),
        "products": lambda: rt.grouped_mm(rows, up, ends).sum() + rt.grouped_mm(inner, down, ends).sum(),
        "one product of the same FLOPs": lambda: (rows @ up[0]).sum() + (inner @ down[0]).sum(),
    }
    buffer = torch.zeros(tokens, WIDTH)

    def run(part: Callable[[], Tensor | None]) -> None:
        y = part()
        if y is not None:
            y.backward(torch.ones_like(y))
        for leaf in (x, up, down, rows, inner):
            leaf.grad = None

    runs: dict[str, Callable[[], object]] = {name: lambda part=part: run(part) for name, part in made.items()}  # type: ignore[misc]
    runs["all-reduce forward and backward"] = lambda: [dist.all_reduce(buffer.zero_()) for _ in range(2)]
    turns = of_all_ranks(take_turns(runs, 15))
    return {name: statistics.median(turns[name].wall) for name in runs}


@torch.no_grad()
def spread(model: nn.Module, batch: dict[str, Tensor], stack: str) -> list[float]:
    """The standard deviation of the rows of an expert over their mean, of every layer."""
    experts, choices, _ = STACKS[stack]
    logits = model(**batch, output_router_logits=True).router_logits
    counts = [torch.bincount(layer.topk(choices).indices.flatten(), minlength=experts) for layer in logits]
    return [float(count.double().std(unbiased=False) / count.double().mean()) for count in counts]


def rows_of(stack: str, tokens: int, found: dict[str, Any]) -> list[Row]:
    """The table of a stack: the time of each form, and of the model of transformers over it."""
    experts, choices, channels = STACKS[stack]
    rows = []
    theirs = found["transformers"]
    for name, one in found.items():
        row: Row = {"stack": stack, "experts": experts, "k": choices, "f": channels, "tokens": tokens}
        row |= {"who": name, "turns": len(one["wall"]), "ms": 1e3 * statistics.median(one["wall"])}
        row["parity"] = abs(one["loss"] - theirs["loss"]) / abs(theirs["loss"])
        if one is not theirs:
            row |= {"wall": ratio_of(theirs["wall"], one["wall"])._asdict()}
        rows.append(row)
    return rows


def show(rows: list[Row]) -> None:
    for row in rows:
        ratio = "{median:.3f} ({low:.3f}-{high:.3f})".format(**row["wall"]) if "wall" in row else ""
        print(
            f"{row['stack']:<8}{row['who']:<22}{row['turns']:>5}{row['ms']:>9.1f}{row['parity']:>9.0e}  {ratio}"
        )


def picture(rows: list[Row]) -> Figure:
    shown = [row for row in rows if "wall" in row]
    figure = Figure(figsize=(7, 1 + 0.35 * len(shown)), layout="constrained")
    bars = [
        (f"{row['experts']} {row['stack']}: {row['who']}", *map(row["wall"].get, ("median", "low", "high")))
        for row in shown
    ]
    ratio_bars(figure.subplots(), bars, "time of a step of transformers' model on one device / ours")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=40.0, help="of turns per stack")
    parser.add_argument("--rounds", type=int, default=9, help="of turns, at least")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the results")
    args = parser.parse_args()
    rows: list[Row] = []
    about: dict[str, Any] = {}
    for stack in STACKS:
        found = spawn(measure, 2, stack, args.tokens, args.seconds, args.rounds)
        rows += rows_of(stack, args.tokens, found["forms"])
        about[stack] = {"parts": found["parts"], "spread": found["spread"]}
    show(rows)
    print(about)
    save("experts", {"rows": rows, "layers": about}, args.folder)
    save_picture("experts", picture(rows), args.folder)


if __name__ == "__main__":
    main()
