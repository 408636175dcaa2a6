"""Shared by single.py and train.py, so that both train the same model on the same batches.

In: the command line. Out: the arguments, the model, the batches; and a log that shows progress and writes the
losses (train.py uses `autoptd.Progress` instead).

    args = add_arguments(ArgumentParser()).parse_args()
    model = make_model(args)
    with Log(args, "single.json") as log:
        for x, y in make_batches(args):
            ...
            log.add(loss)
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from gpt import GPT, GPTConfig
from text import VOCAB_SIZE, batches, load_tokens
from torch import Tensor

MAX_GRAD_NORM = 1.0


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--batch", type=int, default=32, help="rows of the global batch (default %(default)s)"
    )
    parser.add_argument("--length", type=int, default=64, help="tokens per row (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--precision",
        help="precision of the ranks: bf16, fp16, bf16-mixed or fp16-mixed; one device stays in float32",
    )
    parser.add_argument("--data", type=Path, help="text file (default: Python's help topics)")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for results (default %(default)s)"
    )
    return parser


def make_model(args: Namespace) -> GPT:
    torch.manual_seed(args.seed)
    return GPT(GPTConfig(VOCAB_SIZE, args.length, args.layers, args.heads, args.hidden))


def make_batches(args: Namespace, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    return batches(load_tokens(args.data), args.batch, args.length, args.steps, args.seed, start)


class Log:
    """A line of progress (loss, tokens/s) while the steps run, and `<out>/<name>` with all losses when they are done."""

    def __init__(self, args: Namespace, name: str) -> None:
        self.args, self.path = args, args.out / name
        self.losses: list[float] = []
        self.times: list[float] = []  # at the start, and at the end of every step
        self.is_live = (
            sys.stderr.isatty()
        )  # a terminal's line is written over, a log file takes a whole line each time
        self.shown_at = 0.0

    def __enter__(self) -> Log:
        self.times.append(time.perf_counter())
        return self

    def add(self, loss: Tensor) -> None:
        self.losses.append(loss.item())
        self.times.append(time.perf_counter())
        if self.times[-1] - self.shown_at >= (0.2 if self.is_live else 10.0):
            self.show()

    def show(self) -> None:
        self.shown_at = time.perf_counter()
        done = f"{self.path.stem}: step {len(self.losses)}/{self.args.steps}"
        text = f"{done}  loss {self.losses[-1]:.3f}  {self.tokens_per_second():,.0f} tokens/s"
        print(
            f"\r{text}\x1b[K" if self.is_live else text,
            end="" if self.is_live else "\n",
            file=sys.stderr,
            flush=True,
        )

    def tokens_per_second(self) -> float:
        """Divide the tokens of the global batch by the median time of a step, without the first one, which warms up."""
        seconds = [end - start for start, end in zip(self.times, self.times[1:], strict=False)]
        return self.args.batch * self.args.length / statistics.median(seconds[1:] or seconds)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.losses:
            self.show()
        if self.is_live:
            print(file=sys.stderr)
        if kind is None and self.losses:
            save_losses(self.args, self.path, self.losses, self.tokens_per_second())


def save_losses(args: Namespace, path: Path, losses: list[float], tokens_per_second: float) -> None:
    """Write the file that the demo compares."""
    result = {"settings": vars(args), "tokens_per_second": tokens_per_second, "losses": losses}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")
