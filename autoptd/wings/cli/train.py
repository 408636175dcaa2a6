"""Implement `autoptd train`: a training loop on text without a download, one token per byte.

Under torchrun each process is a rank; with `--backend local`, ranks are threads of this process. The text is a file, or
Python's help topics.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from autoptd.api import ParallelModel, parallelize
from autoptd.errors import PlanError, RuntimeFault
from autoptd.ir.mesh import Coordinate
from autoptd.ir.scopes import activity
from autoptd.options import grouped
from autoptd.runtime.world.devices import device_of_ranks
from autoptd.subject.initial.deferred import deferred
from autoptd.wings.cli.models import (
    as_call,
    find_model,
    length_of,
    make_with_weights,
    vocabulary_of,
    weights_in,
)
from autoptd.wings.cli.request import keywords_of, options_of, read_pairs, rows_of
from autoptd.wings.planner.auto import machine_here
from autoptd.wings.reports.excepthook import is_interrupt
from autoptd.wings.reports.progress import Progress
from autoptd.wings.reports.report import write_report


def train(args: Namespace) -> int:
    """Train; return the exit code."""
    keywords = keywords_of(args)
    seed = args.seed or 0
    torch.manual_seed(seed)
    subject = find_model(args.model, read_pairs("set", args.set))
    options = options_of(args)
    building = deferred(seed) if args.deferred else nullcontext()
    with activity(f"building {args.model}"), building:
        model, given = make_with_weights(subject, args.dtype)
    if given is not None:
        fact = "the factory returns its own batch, which cannot be replaced with text"
        raise PlanError(
            f"MODEL {args.model}", fact, "return only the module, or write your own loop (examples/train.py)"
        )
    if vocabulary_of(model, args.vocab) < 256:
        fact = f"a vocabulary of {vocabulary_of(model, args.vocab)} is too small for 256 bytes"
        raise PlanError(f"MODEL {args.model}", fact, "--set vocab_size=256")
    rows, length = rows_of(args), length_of(subject, model, args.seq)
    tokens = load_tokens(args.data)
    # The run's first batch, drawn again below: the program is compiled for its sizes.
    first = next(batches(tokens, rows, length, 1, seed))
    if not args.random and "weights" not in keywords and (folder := weights_in(args.model)) is not None:
        keywords["weights"] = folder
    _say(
        f"weights: loaded from {keywords['weights']}"
        if "weights" in keywords
        else f"weights: random, seed {seed}"
    )
    if "machine" not in keywords and "plan" not in keywords:
        # Predict for this machine, as the report compares predictions with measurements.
        device = device_of_ranks(model.parameters(), options.device, options.backend)
        keywords["machine"] = machine_here(device)
    pm = parallelize(model, example_inputs=as_call(model, *first), **grouped(keywords))
    optimizer = pm.optimizer(torch.optim.AdamW, lr=args.lr, weight_decay=args.weight_decay)
    progress: Any = None
    try:
        with _checkpoints(args, pm, optimizer) as ckpt:
            watched: dict[str, Any] = {"log": args.log, "tensorboard": args.tensorboard, "peak": args.peak}
            watched |= {"quiet": args.quiet, "measure_every": args.measure_every}
            with Progress(pm, tokens=rows * length, steps=args.steps, **watched) as progress:
                pairs = batches(tokens, rows, length, args.steps, seed, start=pm.steps)
                _train(args, pm, optimizer, progress, ckpt, (as_call(model, x, y) for x, y in pairs))
    # Ctrl-C reaches all ranks; ranks that wait for another one see a fault of that rank.
    except (KeyboardInterrupt, RuntimeFault) as error:
        if not is_interrupt(error):
            raise
        _report_interrupt(args, pm, 0 if progress is None else progress.first + len(progress.losses))
        # Shell convention: 128 plus the signal number.
        return 130
    if args.out:
        _write(args, pm, as_call(model, *first))
    pm.close()
    if progress.losses:
        _say(f"loss {progress.losses[0]:.4f} -> {progress.losses[-1]:.4f} in {len(progress.losses)} steps")
    else:
        _say(f"nothing to do: step {progress.first} of {args.steps} is already done")
    return 0


def _checkpoints(
    args: Namespace, pm: ParallelModel, optimizer: torch.optim.Optimizer
) -> AbstractContextManager[Any]:
    """Return the checkpointer, resumed if requested; a null context without --save."""
    if args.save is None:
        return nullcontext()
    often = {"every": args.save_every, "mtbf": args.mtbf}
    ckpt = pm.checkpointer(args.save, optimizer, **often, keep=args.keep)
    return resumed(ckpt) if args.resume else ckpt


@contextmanager
def resumed(ckpt: Any) -> Iterator[Any]:
    """Open a checkpointer and resume from its last checkpoint."""
    with ckpt:
        ckpt.resume()
        yield ckpt


def _train(
    args: Namespace,
    pm: ParallelModel,
    optimizer: Any,
    progress: Any,
    ckpt: Any,
    calls: Iterable[Any],
) -> None:
    """Train on all calls, or until a signal stops the run; save at the end."""
    for call in calls:
        inputs, keys = _call(pm, call)
        loss = progress.step(*inputs, **keys)
        norm = pm.clip_grad_norm_(args.clip)
        optimizer.step()
        optimizer.zero_grad()
        progress.add(loss, norm, lr=optimizer.param_groups[0]["lr"])
        if ckpt is not None and not ckpt.step(loss):
            return
    if ckpt is not None:
        ckpt.save()


def _report_interrupt(args: Namespace, pm: ParallelModel, steps: int) -> None:
    """Report Ctrl-C once for all ranks. No step is recorded for it, as the ranks have stopped."""
    if pm.coordinate != Coordinate():
        return
    written = ""
    if args.out:
        pm.show(args.out)
        write_report(pm.program, Path(args.out) / "report.html", args.model)
        written = f"; wrote {args.out}/report.html"
    print(f"interrupted after {steps} of {args.steps} steps{written}", file=sys.stderr)


def _say(line: str) -> None:
    # From the environment, as there may be no process group yet.
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def _call(pm: ParallelModel, call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `step` on this rank, cut from a global batch."""
    if isinstance(call, dict):
        return (), pm.local_batch(**call)
    return pm.local_batch(*call), {}


def _write(args: Namespace, pm: ParallelModel, call: Any) -> None:
    """Run a step without and a step with recording, discard their gradients, and write the report."""
    inputs, keys = _call(pm, call)
    start = time.perf_counter()
    pm.step(*inputs, **keys).item()
    plain_seconds = time.perf_counter() - start
    # Collective: every rank records, rank 0 writes.
    with pm.record() as record:
        pm.step(*inputs, **keys)
    with activity("drawing pictures"):
        pm.show(args.out, record)
    if pm.coordinate == Coordinate():
        with activity("writing the report"):
            write_report(pm.program, Path(args.out) / "report.html", args.model, record, plain_seconds)
        print(f"wrote {args.out}/report.html", file=sys.stderr)


def load_tokens(path: str | None) -> torch.Tensor:
    """Return the bytes of a file (or of all help topics) as a 1-D tensor; PlanError if the file cannot be
    read.
    """
    if path is None:
        from pydoc_data.topics import topics

        data = "\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise PlanError(f"--data {path}", f"cannot be read: {error}", "pass a text file") from error
    # A bytearray, because torch warns about read-only memory.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def batches(
    tokens: torch.Tensor, batch: int, length: int, steps: int, seed: int, start: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield [batch, length] pairs of ids for steps `start` to `steps`. Positions depend on the seed alone, so
    all ranks and a resumed run see the same batches.
    """
    if len(tokens) <= length:
        fact = f"{len(tokens)} bytes of text are too few for rows of {length}"
        raise PlanError("--data", fact, f"a longer text, or --seq {max(1, len(tokens) // 2)}")
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(length + 1, device="cpu")
    for step in range(steps):
        # [batch, 1] + [length + 1]: a window at a random position for each row.
        places = torch.randint(len(tokens) - length, (batch, 1), generator=generator, device="cpu")
        if step < start:
            continue
        rows = tokens[places + window]
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
