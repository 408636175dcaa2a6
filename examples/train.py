"""Train the same GPT on t x p x d ranks: gpt.py as it is, and the loop of single.py with `pm` for the model.

In: the command line. Out: `<out>/parallel.json` with the losses, and everything that `pm.show` writes.

    torchrun --nproc-per-node 8 -- examples/train.py --t 2 --p 2 --d 2 --v 2
    python examples/train.py --t 2 --p 2 --d 2 --v 2 --backend local              # the same, ranks are threads

The `--` is for torchrun: without it, it takes the script's `--d` for one of its own options, abbreviated, and stops.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace

import torch
from recipe import MAX_GRAD_NORM, Log, add_arguments, make_batches, make_model

import autoptd


def train(args: Namespace) -> None:
    pm = autoptd.parallelize(
        make_model(args),
        t=args.t,
        p=args.p,
        d=args.d,
        v=args.v,
        num_microbatches=args.num_microbatches,
        schedule=args.schedule,
        backend=args.backend,
        example_inputs=example_inputs(args),
    )
    opt = pm.optimizer(torch.optim.AdamW, lr=args.lr)
    with Log(args, "parallel.json", quiet=os.environ.get("RANK", "0") != "0") as log:
        for batch in make_batches(args):
            loss = pm.step(*pm.local_batch(*batch))
            pm.clip_grad_norm_(MAX_GRAD_NORM)
            opt.step()
            opt.zero_grad()
            log.add(loss)
    pm.show(args.out)
    pm.close()


def example_inputs(args: Namespace) -> tuple[torch.Tensor, ...]:
    """Return what `step` takes: the global batch when ranks are threads, else one replica's share of it."""
    replicas = 1 if args.backend == "local" else args.d
    return tuple(tensor[: args.batch // replicas] for tensor in next(make_batches(args)))


def parse_arguments() -> Namespace:
    parser = add_arguments(ArgumentParser(description=__doc__.splitlines()[0]))
    parser.add_argument("--t", type=int, default=1, help="tensor parallel degree (default %(default)s)")
    parser.add_argument("--p", type=int, default=1, help="pipeline parallel degree (default %(default)s)")
    parser.add_argument("--d", type=int, default=1, help="data parallel degree (default %(default)s)")
    parser.add_argument("--v", type=int, default=1, help="model chunks per pipeline rank (default %(default)s)")
    parser.add_argument("--num-microbatches", type=int, help="per replica and step")
    parser.add_argument("--schedule", help="gpipe, 1f1b, interleaved, looped_bfs, zb_h1, zb_2p or zbv")
    parser.add_argument("--backend", help="local (ranks are threads), gloo or nccl")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_arguments())
