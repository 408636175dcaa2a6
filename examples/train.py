"""Train the same GPT on t x p x d ranks: gpt.py unmodified, and the loop of single.py with `pm` instead of the model.

In: the command line. Out: `<out>/parallel.json` with the losses, and everything that `pm.show` writes.

    torchrun --nproc-per-node 8 -- examples/train.py --t 2 --p 2 --d 2 --v 2
    python examples/train.py --t 2 --p 2 --d 2 --v 2 --backend local              # the same, with ranks as threads
    torchrun --nproc-per-node 4 -- examples/train.py --t 2 --p 2 --save ckpts --resume      # resumes an interrupted run

The `--` is for torchrun, which would otherwise read the script's `--d` as an abbreviation of one of its options, and stop.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import nullcontext

import torch
from recipe import MAX_GRAD_NORM, add_arguments, make_batches, make_model, save_losses

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
        precision=args.precision,
        backend=args.backend,
        example_inputs=next(make_batches(args)),
    )
    opt = pm.optimizer(torch.optim.AdamW, lr=args.lr)
    tokens = args.batch * args.length
    with (
        pm.checkpointer(args.save, opt, every=args.save_every, keep=3) if args.save else nullcontext() as ckpt
    ):
        if ckpt and args.resume:
            ckpt.resume()
        with autoptd.Progress(pm, tokens=tokens, steps=args.steps, log=args.log) as progress:
            for batch in make_batches(args, start=pm.steps):
                loss = progress.step(*pm.local_batch(*batch))  # pm.step, measured every few steps
                norm = pm.clip_grad_norm_(MAX_GRAD_NORM)
                opt.step()
                opt.zero_grad()
                progress.add(loss, norm)
                if ckpt and not ckpt.step(loss):  # saves when a save is due; False after a signal to stop
                    break
    if progress.is_first and progress.losses:
        save_losses(args, args.out / "parallel.json", progress.losses, progress.tokens_per_second)
    pm.show(args.out)
    pm.close()


def parse_arguments() -> Namespace:
    parser = add_arguments(ArgumentParser(description=__doc__.splitlines()[0]))
    parser.add_argument("--t", type=int, default=1, help="tensor parallel degree (default %(default)s)")
    parser.add_argument("--p", type=int, default=1, help="pipeline parallel degree (default %(default)s)")
    parser.add_argument("--d", type=int, default=1, help="data parallel degree (default %(default)s)")
    parser.add_argument(
        "--v", type=int, default=1, help="model chunks per pipeline rank (default %(default)s)"
    )
    parser.add_argument("--num-microbatches", type=int, help="per replica and step")
    parser.add_argument("--schedule", help="gpipe, 1f1b, interleaved, looped_bfs, zb_h1, zb_2p or zbv")
    parser.add_argument("--backend", help="local (ranks are threads), gloo or nccl")
    parser.add_argument("--log", help="file for one JSON object per step")
    parser.add_argument("--save", help="folder for checkpoints")
    parser.add_argument(
        "--save-every", type=int, default=20, help="steps between checkpoints (default %(default)s)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="start from the last checkpoint in --save, if there is one"
    )
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_arguments())
