"""Train the GPT on one device with a plain torch loop: the reference that the parallel run is compared with.

In: the command line. Out: `<out>/single.json` with the losses.

    python examples/single.py --steps 60
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import torch
from recipe import MAX_GRAD_NORM, Log, add_arguments, make_batches, make_model


def train(args: Namespace) -> None:
    model = make_model(args)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    with Log(args, "single.json") as log:
        for x, y in make_batches(args):
            _, loss = model(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            opt.step()
            opt.zero_grad()
            log.add(loss)


if __name__ == "__main__":
    train(add_arguments(ArgumentParser(description=__doc__.splitlines()[0])).parse_args())
