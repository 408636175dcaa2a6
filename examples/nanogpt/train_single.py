"""Train a GPT on one device, with a loop in the manner of nanoGPT. train.py is the same loop on many ranks.

In: `train.bin` and `val.bin` in the folder `--out` (see prepare.py), settings as flags. Out: losses, a checkpoint.

    python -m examples.nanogpt.prepare out/nanogpt
    python -m examples.nanogpt.train_single --device cuda --dtype bfloat16
"""

import math
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import torch

from examples.gpt import GPT, GPTConfig

settings = {"out": "out/nanogpt", "init_from": "scratch", "device": "cpu", "dtype": "float32", "seed": 1337}
settings |= {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 256}
settings |= {"batch_size": 12, "accumulation": 40, "max_iters": 600000}
settings |= {"eval_interval": 2000, "eval_iters": 200, "log_interval": 10}
settings |= {"lr": 6e-4, "min_lr": 6e-5, "warmup_iters": 2000, "weight_decay": 0.1, "grad_clip": 1.0}
parser = ArgumentParser(description=__doc__)
for name, default in settings.items():
    parser.add_argument(f"--{name}", type=type(default), default=default, help="default %(default)s")
args = parser.parse_args()

torch.manual_seed(args.seed)
context = torch.autocast(args.device, getattr(torch, args.dtype), enabled=args.dtype != "float32")
sizes = {name: getattr(args, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}


def get_batch(split, rows=args.batch_size):
    # A new memmap each time: one that lives for the whole run keeps every page that it has read.
    data = np.memmap(Path(args.out) / f"{split}.bin", dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - args.block_size, (rows,))
    tokens = np.stack([data[i : i + args.block_size + 1] for i in starts]).astype(np.int64)
    x, y = torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())
    return x.to(args.device), y.to(args.device)


def get_lr(step):
    if step < args.warmup_iters:
        return args.lr * (step + 1) / (args.warmup_iters + 1)
    done = (step - args.warmup_iters) / max(1, args.max_iters - args.warmup_iters)
    return args.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (args.lr - args.min_lr)


@torch.no_grad()
def estimate_loss():
    means = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(args.eval_iters)
        for k in range(args.eval_iters):
            with context:
                losses[k] = model(*get_batch(split))[1]
        means[split] = losses.mean().item()
    model.train()
    return means


model = GPT(GPTConfig(**sizes)).to(args.device)
matrices = [p for p in model.parameters() if p.dim() >= 2]
vectors = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
step, checkpoint = 0, Path(args.out) / "ckpt.pt"
if args.init_from == "resume":
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    step = saved["step"]

while step < args.max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    if step % args.eval_interval == 0:
        means = estimate_loss()
        print(f"step {step}: train loss {means['train']:.6f}, val loss {means['val']:.6f}", flush=True)
    total = 0.0
    for _ in range(args.accumulation):
        with context:
            loss = model(*get_batch("train"))[1] / args.accumulation
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % args.log_interval == 0:
        print(f"iter {step}: loss {total:.6f}", flush=True)
    step += 1
    if step % args.eval_interval == 0 or step == args.max_iters:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save({**saved, "random": torch.get_rng_state()}, checkpoint)
