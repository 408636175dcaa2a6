"""Train the same GPT on many ranks: the loop of train_single.py, and `diff` shows what changes.

In: `train.bin` and `val.bin` in the folder `--out` (see prepare.py), settings as flags. Out: losses, a checkpoint.

    python -m examples.nanogpt.prepare out/nanogpt
    torchrun --nproc-per-node 8 -m -- examples.nanogpt.train --t 2 --p 2 --d 2 --dtype bfloat16
    python -m examples.nanogpt.train --t 2 --p 2 --backend local                # ranks as threads
"""

import math
import os
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import torch

import autoptd
from examples.gpt import GPT, GPTConfig

settings = {"out": "out/nanogpt", "init_from": "scratch", "dtype": "float32", "seed": 1337}
settings |= {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 256}
settings |= {"batch_size": 12, "accumulation": 40, "max_iters": 600000}
settings |= {"eval_interval": 2000, "eval_iters": 200, "log_interval": 10}
settings |= {"lr": 6e-4, "min_lr": 6e-5, "warmup_iters": 2000, "weight_decay": 0.1, "grad_clip": 1.0}
settings |= {"t": 1, "p": 1, "d": 1, "backend": ""}
parser = ArgumentParser(description=__doc__)
for name, default in settings.items():
    parser.add_argument(f"--{name}", type=type(default), default=default, help="default %(default)s")
args = parser.parse_args()

torch.manual_seed(args.seed)
precision = {"float32": None, "bfloat16": "bf16-mixed"}[args.dtype]
sizes = {name: getattr(args, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}


def say(text):
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def get_batch(split, rows=args.batch_size):
    # A new memmap each time: one that lives for the whole run keeps every page that it has read.
    data = np.memmap(Path(args.out) / f"{split}.bin", dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - args.block_size, (rows,))
    tokens = np.stack([data[i : i + args.block_size + 1] for i in starts]).astype(np.int64)
    x, y = torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())
    return x, y


def get_lr(step):
    if step < args.warmup_iters:
        return args.lr * (step + 1) / (args.warmup_iters + 1)
    done = (step - args.warmup_iters) / max(1, args.max_iters - args.warmup_iters)
    return args.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (args.lr - args.min_lr)


def estimate_loss():
    means = {}
    for split in ("train", "val"):
        losses = torch.zeros(args.eval_iters)
        for k in range(args.eval_iters):
            losses[k] = pm.eval_step(*pm.local_batch(*get_batch(split)))
        means[split] = losses.mean().item()
    return means


model = GPT(GPTConfig(**sizes))
# One step takes the batches of an update as its microbatches.
rows = args.batch_size * args.accumulation
example = torch.zeros(2, rows, args.block_size, dtype=torch.long)
mesh = {"t": args.t, "p": args.p, "d": args.d, "num_microbatches": max(1, args.accumulation // args.d)}
mesh |= {"precision": precision, "backend": args.backend or None}
pm = autoptd.parallelize(model, **mesh, example_inputs=tuple(example))
matrices = [p for p in model.parameters() if p.dim() >= 2]
vectors = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
optimizer = pm.optimizer(torch.optim.AdamW, groups, lr=args.lr, betas=(0.9, 0.95))
step, checkpoint = 0, Path(args.out) / "ckpt"
if args.init_from == "resume":
    pm.load(checkpoint, optimizer)
    step = pm.steps

while step < args.max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    if step % args.eval_interval == 0:
        means = estimate_loss()
        say(f"step {step}: train loss {means['train']:.6f}, val loss {means['val']:.6f}")
    loss = pm.step(*pm.local_batch(*get_batch("train", rows)))
    pm.clip_grad_norm_(args.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % args.log_interval == 0:
        say(f"iter {step}: loss {loss:.6f}")
    step += 1
    if step % args.eval_interval == 0 or step == args.max_iters:
        pm.save(checkpoint, optimizer)
pm.close()
