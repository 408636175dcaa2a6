"""Train on sequences that are long for the model's width, with c context-parallel ranks that share each of them.

In: sizes. Out: the memory of a rank at the peak of a step, as planned, with c=1 and with c; then the losses with c.

    torchrun --nproc-per-node 2 -- examples/long_context.py --c 2 --length 65536 --hidden 2048
    python examples/long_context.py --c 2 --backend local                       # ranks as threads
"""

import os
import time
from argparse import ArgumentParser

import torch
from gpt import GPT, GPTConfig
from text import VOCAB_SIZE, batches, load_tokens

import autoptd

parser = ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--backend", help="local: ranks are threads")
parser.add_argument("--data", help="text file (default: Python's help topics)")
parser.add_argument("--lr", type=float, default=1e-3)
numbers = {
    "c": 2,
    "t": 1,
    "p": 1,
    "length": 4096,
    "hidden": 128,
    "layers": 4,
    "heads": 4,
    "batch": 1,
    "steps": 5,
}
for name, number in numbers.items():
    parser.add_argument(f"--{name}", type=int, default=number, help="default %(default)s")
args = parser.parse_args()


def say(text):
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def make_model():
    torch.manual_seed(0)
    return GPT(GPTConfig(VOCAB_SIZE, args.length, args.layers, args.heads, args.hidden))


data = list(batches(load_tokens(args.data), args.batch, args.length, args.steps, seed=0))
mesh = {"t": args.t, "p": args.p, "example_inputs": data[0]}

# `compile` only plans, so no rank needs to have this memory.
for c in (1, args.c):
    program = autoptd.compile(make_model(), c=c, **mesh)
    peak = max(peak.nbytes for peak in autoptd.peak_memory(program))
    state = program.memory(rank=0)
    held = state.parameters + state.gradients + state.moments
    say(
        f"c={c}: {peak / 2**20:.1f} MiB per rank at the peak of a step, {held / 2**20:.1f} MiB of it weights and AdamW"
    )

pm = autoptd.parallelize(make_model(), c=args.c, backend=args.backend, **mesh)
optimizer = pm.optimizer(torch.optim.AdamW, lr=args.lr)
for step, batch in enumerate(data):
    start = time.perf_counter()
    loss = pm.step(
        *pm.local_batch(*batch)
    )  # whole rows: each rank takes its tokens where they are first read
    optimizer.step()
    optimizer.zero_grad()
    say(f"step {step}: loss {loss:.6f}, {time.perf_counter() - start:.2f} s")
pm.close()
