"""What every fused operator gains, alone and all together (SC'21, section 5.8: all together +11% to +19%), in turns with none.

Models of transformers as they are, attention written out ("eager"): GPT-2 with its dropouts, and Llama. A step is forward and
backward of one microbatch at t=p=d=1. Above 1 the fused program is faster: the median over turns of plain / fused with its 95%
interval, of wall time; peak memory is what a step allocates at most beyond weights and inputs.

The order of dims is measured as well: a block of attention on [b, s, h] and on [s, b, h] (SC'21, section 4.2), whose products
need no transposed copy where batched products cannot read strides. Those of torch can. Measured alone
are the sum of embedding and positions in one buffer, which no pattern stands for, and the loss in chunks, by the size of the
logits: below 8 MB the compiler leaves them whole.

    python benchmarks/fusion.py                # a table, benchmarks/results/fusion.json and fusion.svg
    python benchmarks/fusion.py --inductor     # with torch's compiler, and the seconds that it takes to start: minutes
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import autoptd

sys.path.insert(0, str(Path(__file__).parent.parent))

from autoptd.kernels.loss import linear_cross_entropy, linear_cross_entropy_plain
from benchmarks.lib.memory import peak_bytes
from benchmarks.lib.pairs import ratio_of, take_turns
from benchmarks.lib.report import ratio_bars, save, save_picture

ROWS, TOKENS, WIDTH, HEADS, LAYERS, VOCAB = 4, 256, 256, 4, 4, 8192
Row = dict[str, Any]


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": TOKENS}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager"))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": VOCAB,
    }
    more = {"num_key_value_heads": HEADS // 2, "intermediate_size": 3 * WIDTH, "attn_implementation": "eager"}
    return LlamaForCausalLM(LlamaConfig(**sizes, **more))


MODELS: dict[str, Callable[[], nn.Module]] = {"GPT-2, dropout 0.1": gpt2, "Llama": llama}


def step(pm: autoptd.ParallelModel, call: dict[str, Tensor]) -> None:
    """One step; gradients are gone afterwards, so that every step allocates them."""
    pm.step(**call)
    for _, parameter in pm.named_parameters():
        parameter.grad = None


def measure(name: str, seconds: float, with_inductor: bool) -> list[Row]:
    """One row per fused operator of a model, and one for all of them."""
    torch.manual_seed(0)
    model = MODELS[name]()
    ids = torch.randint(0, VOCAB, (ROWS, TOKENS))
    call = {"input_ids": ids, "labels": ids.clone()}
    make = partial(autoptd.parallelize, model, example_inputs=call, num_microbatches=1, backend="local")
    program = autoptd.compile(model, example_inputs=call, num_microbatches=1)
    ops = list(dict.fromkeys(one.op for one in program.fusions if not one.why))
    ways = (
        {"none": make(fuse=False)} | {op: make(fuse=autoptd.Fuse(only=[op])) for op in ops} | {"all": make()}
    )
    started = {}
    if with_inductor:
        ways["inductor"] = make(fuse="inductor")
        start = time.perf_counter()
        step(ways["inductor"], call)
        started["inductor"] = time.perf_counter() - start
    turns = take_turns({way: partial(step, pm, call) for way, pm in ways.items()}, 200, seconds=seconds)
    peaks = {way: peak_bytes(partial(step, pm, call)) for way, pm in ways.items()}
    times = {
        one.op: sum(each.times for each in program.fusions if each.op == one.op) for one in program.fusions
    }
    rows = []
    for way in ways:
        if way == "none":
            continue
        gain = ratio_of(turns["none"].wall, turns[way].wall)
        row = {
            "model": name,
            "fused": way,
            "times": times.get(way),
            "gain": gain._asdict(),
            "turns": len(turns[way].wall),
        }
        row |= {"peak bytes": peaks[way], "peak bytes of none": peaks["none"]}
        rows.append(row | ({"seconds to start": started[way]} if way in started else {}))
        print(
            f"  {name:20} {way:22} {row['times'] or '':>4} {gain!s:24} peak memory {peaks[way] / peaks['none']:.2f}x"
            + (f"  starts in {started[way]:.0f} s" if way in started else "")
        )
    for pm in ways.values():
        pm.close()
    return rows


def block(x: Tensor, qkv: Tensor, out: Tensor, tokens: int) -> Tensor:
    """Attention on x whose dim `tokens` has the tokens, the other one the batch."""
    q, k, v = (one.unflatten(-1, (HEADS, -1)) for one in F.linear(x, qkv).chunk(3, -1))
    order = (0, 2, 1, 3) if tokens == 1 else (1, 2, 0, 3)
    y = F.scaled_dot_product_attention(*(one.permute(order) for one in (q, k, v)), is_causal=True)
    return F.linear((y.permute(0, 2, 1, 3) if tokens == 1 else y.permute(2, 0, 1, 3)).flatten(2), out)


def measure_layout(seconds: float) -> Row:
    """[b, s, h] beside [s, b, h]."""
    qkv, out = (torch.randn(n, WIDTH).mul(0.02).requires_grad_() for n in (3 * WIDTH, WIDTH))
    x = torch.randn(ROWS, TOKENS, WIDTH)
    values = {1: x.requires_grad_(), 0: x.detach().transpose(0, 1).contiguous().requires_grad_()}

    def run(tokens: int) -> None:
        block(values[tokens], qkv, out, tokens).sum().backward()

    turns = take_turns({"bsh": partial(run, 1), "sbh": partial(run, 0)}, 200, seconds=seconds)
    gain = ratio_of(turns["bsh"].wall, turns["sbh"].wall)
    words = "saves time: worth a choice of layouts" if gain.low > 1 else "saves nothing that could be told"
    print(f"  a block of attention: [s, b, h] over [b, s, h] {gain}: [s, b, h] {words}")
    return {"gain of [s, b, h]": gain._asdict(), "turns": len(turns["bsh"].wall)}


def measure_embedding(seconds: float) -> Row:
    """The sum of an embedding and its positions beside the same in one buffer, forward and backward."""
    table, places = (torch.randn(n, WIDTH).requires_grad_() for n in (VOCAB, TOKENS))
    ids = torch.randint(0, VOCAB, (ROWS, TOKENS))
    grad = torch.randn(ROWS, TOKENS, WIDTH)
    runs: dict[str, Callable[[], None]] = {
        "plain": lambda: (F.embedding(ids, table) + places).backward(grad),
        "one buffer": lambda: F.embedding(ids, table).add_(places).backward(grad),
    }
    turns = take_turns(runs, 2000, seconds=seconds)
    gain = ratio_of(turns["plain"].wall, turns["one buffer"].wall)
    print(f"  embedding and positions in one buffer: {gain}")
    return {"gain": gain._asdict(), "turns": len(turns["plain"].wall)}


def backward_of(loss: Callable[..., Tensor], *inputs: Tensor) -> None:
    loss(*inputs).backward()


def measure_loss(seconds: float, tokens: int = ROWS * TOKENS) -> list[Row]:
    """The head and its loss in chunks beside F.linear and F.cross_entropy, forward and backward, by the size of the logits."""
    rows = []
    for classes in (256, 1024, 4096, 16384):
        x, weight = (torch.randn(n, WIDTH).requires_grad_() for n in (tokens, classes))
        targets = torch.randint(0, classes, (tokens,))
        forms = {"plain": linear_cross_entropy_plain, "chunks": linear_cross_entropy}
        runs = {name: partial(backward_of, form, x, weight, targets) for name, form in forms.items()}
        turns = take_turns(runs, 200, seconds=seconds / 4)
        gain = ratio_of(turns["plain"].wall, turns["chunks"].wall)
        rows.append(
            {
                "MB of logits": 4e-6 * tokens * classes,
                "gain": gain._asdict(),
                "turns": len(turns["plain"].wall),
            }
        )
        print(f"  the loss in chunks of {rows[-1]['MB of logits']:5.1f} MB of logits: {gain}")
    return rows


def draw(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(7, 0.8 + 0.3 * len(rows)), layout="constrained")
    bars = [
        (f"{row['model']}: {row['fused']}", *(row["gain"][key] for key in ("median", "low", "high")))
        for row in rows
    ]
    ratio_bars(figure.subplots(), bars, "plain / fused, wall time of a step, cpu")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--inductor", action="store_true", help="measure torch's compiler too")
    parser.add_argument("--seconds", type=float, default=20.0, help="per model")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(
        f"plain / fused, wall time, median (95%), of a step of {ROWS} x {TOKENS} tokens, h={WIDTH}, {LAYERS} layers"
    )
    rows = [row for name in MODELS for row in measure(name, args.seconds, args.inductor)]
    layout = measure_layout(args.seconds / 5)
    embedding, chunks = measure_embedding(args.seconds / 5), measure_loss(args.seconds / 2)
    about = {
        "rows": ROWS,
        "tokens": TOKENS,
        "h": WIDTH,
        "heads": HEADS,
        "layers": LAYERS,
        "vocabulary": VOCAB,
    }
    save(
        "fusion",
        {
            "sizes": about,
            "device": "cpu",
            "fusion": rows,
            "layout": layout,
            "embedding": embedding,
            "loss": chunks,
        },
    )
    save_picture("fusion", draw(rows))


if __name__ == "__main__":
    main()
