"""Plans over tp of real models at real sizes, beside Megatron's: parameters, collectives and bytes of a layer, seconds.

Eleven models of transformers by their published sizes (four layers of each, bfloat16, on meta: no weights, no GPU), one row
of 2k, 8k and 32k tokens a microbatch, for `machine="h100"`, with `sequence_parallel` False, True and "auto". Megatron's plan of
a layer (Shoeybi et al. 2019; Korthikanti et al. 2022) is a count, which the solver is not told: one all-reduce for each
residual sum and direction; with sequence parallelism a gather behind each norm and a scatter before each residual sum, and as
much backward, beside the second gather of what a weight's gradient needs. Nothing is measured: seconds are the cost model's.

    python benchmarks/plans.py                  # a table, benchmarks/results/plans.json and plans.svg
    python benchmarks/plans.py --only llama-8b --tokens 2048    # other rows of the file stay as they are
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autoptd
from autoptd.ir.layout import Sizes
from autoptd.ir.machine import find_machine
from autoptd.ir.types import LOCAL_KINDS, wire_bytes
from autoptd.passes.ops.costs import collective_seconds
from autoptd.passes.plan_cost import weigh
from autoptd.program.program import Program

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.lib.report import RESULTS, save, save_picture

LAYERS, ITEMSIZE, MACHINE = 4, 2, "h100"
MEMORY = (
    1 << 40
)  # no bound: the head of Gemma 2 at 32k tokens, which other ranks of a pipeline would hold, is 95 GiB here
TOKENS = (2048, 8192, 32768)
CHOICES: tuple[bool | str, ...] = (False, True, "auto")
Row = dict[str, Any]


@dataclass(frozen=True)
class RealModel:
    """A model of transformers: its class and config by these sizes, and over how many ranks it is split.

    `sums` and `norms` of a layer are what Megatron's plan follows from: residual sums that are made apart (1 where attention
    and MLP are parallel), and norms in front of matrix products.
    """

    kind: str
    sizes: Row
    t: int = 8
    layers: str = "model.layers"
    head: str = "ForCausalLM"
    sums: int = 2
    norms: int = 2
    gathers_again: bool = True

    def make(self, tokens: int) -> nn.Module:
        import transformers

        plain = {"num_hidden_layers": LAYERS, "max_position_embeddings": tokens, "use_cache": False}
        sizes = plain | {name: tokens if size == "tokens" else size for name, size in self.sizes.items()}
        config = getattr(transformers, f"{self.kind}Config")(**sizes)
        with torch.device("meta"):
            return getattr(transformers, self.kind + self.head)(config).to(torch.bfloat16).train()


def _sizes(width: int, inner: int, heads: int, kv_heads: int, vocabulary: int, **more: Any) -> Row:
    sizes = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
    }
    return sizes | ({"num_key_value_heads": kv_heads} if kv_heads != heads else {}) | more


MODELS: dict[str, RealModel] = {
    "gpt3-175b": RealModel(
        "GPT2",  # without attention's dropout: beyond 8k tokens its masks have more elements than are told apart
        {
            "n_layer": LAYERS,
            "n_head": 96,
            "n_embd": 12288,
            "n_positions": "tokens",
            "vocab_size": 50257,
            "attn_pdrop": 0.0,
        },
        layers="transformer.h",
        head="LMHeadModel",
    ),
    "llama-8b": RealModel("Llama", _sizes(4096, 14336, 32, 8, 128256)),
    "llama-70b": RealModel("Llama", _sizes(8192, 28672, 64, 8, 128256)),
    "llama-405b": RealModel("Llama", _sizes(16384, 53248, 128, 8, 128256)),
    "mistral-7b": RealModel("Mistral", _sizes(4096, 14336, 32, 8, 32768, sliding_window=None)),
    "qwen2.5-7b": RealModel("Qwen2", _sizes(3584, 18944, 28, 4, 152064), t=4),
    "qwen3-8b": RealModel("Qwen3", _sizes(4096, 12288, 32, 8, 151936, head_dim=128)),
    "gemma2-9b": RealModel("Gemma2", _sizes(3584, 14336, 16, 8, 256000, head_dim=256, sliding_window=4096)),
    "falcon-40b": RealModel(
        "Falcon",
        {
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "vocab_size": 65024,
            "bias": False,
        }
        | {"new_decoder_architecture": True, "attention_dropout": 0.0, "hidden_dropout": 0.0},
        layers="transformer.h",
        sums=1,
        gathers_again=False,  # its linear layers are products of their own
    ),
    "neox-20b": RealModel("GPTNeoX", _sizes(6144, 24576, 64, 64, 50432), layers="gpt_neox.layers", sums=1),
    "phi3-mini": RealModel("Phi3", _sizes(3072, 8192, 32, 32, 32064, pad_token_id=0)),
}


def plan(name: str, tokens: int, choice: bool | str) -> Program:
    """Compile a model for one microbatch of one row."""
    model = MODELS[name]
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    call = {"input_ids": ids, "labels": ids}
    return autoptd.compile(
        model.make(tokens),
        t=model.t,
        machine=MACHINE,
        memory=MEMORY,
        num_microbatches=1,
        sequence_parallel=choice,
        example_inputs=call,
    )


def calls_of_layer(program: Program, path: str) -> Iterator[tuple[str, str, int]]:
    """(phase, kind, bytes) of what is communicated over tp for the modules of a layer."""
    for one in program.collectives:
        if one.axis == "tp" and one.scope == "microbatch" and one.site.startswith((f"{path}.", f"{path} ")):
            for phase, kind in (("forward", one.forward), ("backward", one.backward)):
                if kind not in LOCAL_KINDS:
                    yield phase, kind, one.payload_bytes


def megatron(name: str, tokens: int, choice: bool | str) -> list[tuple[str, str, int]]:
    """What Megatron communicates for a layer, as `calls_of_layer` has it; `"auto"` is held against sequence parallelism."""
    one = MODELS[name]
    nbytes = ITEMSIZE * tokens * one.sizes.get("hidden_size", one.sizes.get("n_embd", 0))
    if choice is False:
        return [(phase, "all-reduce", nbytes) for phase in ("forward", "backward") for _ in range(one.sums)]
    again = one.norms if one.gathers_again else 0
    kinds = [("forward", "all-gather", one.norms), ("forward", "reduce-scatter", one.sums)]
    kinds += [("backward", "reduce-scatter", one.norms), ("backward", "all-gather", one.sums + again)]
    return [(phase, kind, nbytes) for phase, kind, count in kinds for _ in range(count)]


def row(name: str, tokens: int, choice: bool | str) -> Row:
    """What `plans.json` has of one plan."""
    model, program = MODELS[name], plan(name, tokens, choice)
    machine, t = find_machine(MACHINE), model.t
    layers = [list(calls_of_layer(program, f"{model.layers}.{i}")) for i in range(LAYERS)]
    held = sum(math.prod(one.local_shape(program.mesh)) for one in program.params)
    kept = sum(program.costs.cut.saved_bytes)
    weight = weigh(program.graphs["CONNECTED"], Sizes(program.mesh, 1, 1, 1), machine, kept)

    def told(calls: list[tuple[str, str, int]]) -> Row:
        found: Row = {}
        for phase in ("forward", "backward"):
            here = [(kind, nbytes) for at, kind, nbytes in calls if at == phase]
            found[phase] = dict(sorted(Counter(kind for kind, _ in here).items()))
            found[f"{phase} bytes"] = round(sum(wire_bytes(kind, nbytes, t) for kind, nbytes in here))
        found["seconds"] = sum(collective_seconds(kind, nbytes, t, machine) for _, kind, nbytes in calls)
        return found

    return {
        "model": name,
        "t": t,
        "tokens": tokens,
        "sequence parallel": choice,
        "parameters over 1/t": round(held * t / sum(math.prod(one.shape) for one in program.params), 4),
        "layer": told(layers[LAYERS // 2]),
        "layers are alike": all(sorted(one) == sorted(layers[0]) for one in layers),
        "megatron": told(megatron(name, tokens, choice)),
        "seconds": weight.seconds,
        "kept bytes": weight.saved_bytes,
        **({"found": program.plan["weighed"]["found"]} if choice == "auto" else {}),
    }


def text(one: Row) -> str:
    calls = {
        phase: " ".join(f"{n} {kind}" for kind, n in one["layer"][phase].items())
        for phase in ("forward", "backward")
    }
    alike = "" if one["layers are alike"] else ", layers differ"
    return (
        f"{one['model']:11} {one['tokens']:>6} {one['sequence parallel']!s:>6} {one['parameters over 1/t']:>7.3f}  "
        f"{calls['forward']} + {calls['backward']}{alike}, {1e3 * one['seconds']:.2f} ms"
    )


def picture(rows: list[Row]) -> Any:
    """Bytes of a layer over those of Megatron's, a panel for each choice, and a mark for each length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for at, choice in enumerate(CHOICES):
        axes = figure.add_subplot(1, len(CHOICES), at + 1)
        for tokens, mark in zip(TOKENS, "o^s", strict=True):
            mine = [one for one in rows if (one["tokens"], one["sequence parallel"]) == (tokens, choice)]
            ratios = [_bytes(one["layer"]) / _bytes(one["megatron"]) for one in mine]
            if mine:
                axes.plot(ratios, [one["model"] for one in mine], mark, label=f"{tokens} tokens", alpha=0.7)
        axes.axvline(1, color="#b00020", linestyle="--", linewidth=1)
        axes.set_xlim(0, 1.3)
        axes.set_xlabel(f"bytes of a layer over Megatron's,\nsequence_parallel={choice!r}")
        axes.invert_yaxis()
        axes.legend(fontsize=7)
        if at:
            axes.set_yticklabels([])
    return figure


def _bytes(one: Row) -> int:
    return int(one["forward bytes"] + one["backward bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    args = parser.parse_args()
    file = RESULTS / "plans.json"
    rows = {_key(one): one for one in (json.loads(file.read_text())["rows"] if file.exists() else [])}
    for tokens in args.tokens:
        for name in args.only:
            for choice in CHOICES:
                try:
                    one = row(name, tokens, choice)
                except autoptd.AutoptdError as error:
                    print(f"{name:11} {tokens:>6} {choice!s:>6} skipped: {error}", flush=True)
                else:
                    rows[_key(one)] = one
                    print(text(one), flush=True)
            order = sorted(rows, key=lambda key: (list(MODELS).index(key[0]), key[1], str(key[2])))
            save("plans", {"plan of": MACHINE, "rows": [rows[key] for key in order]})
    save_picture("plans", picture([rows[key] for key in order]))


def _key(one: Row) -> tuple[str, int, bool | str]:
    return one["model"], one["tokens"], one["sequence parallel"]


if __name__ == "__main__":
    main()
