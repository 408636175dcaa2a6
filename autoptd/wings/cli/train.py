"""`autoptd train`: the training loop on text, a token a byte.

Under torchrun each process is a rank; else, with `--backend local`, the ranks are threads of this one.
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

import autoptd
from autoptd.errors import PlanError, RuntimeFault
from autoptd.ir.activity import activity
from autoptd.ir.mesh import Coordinate
from autoptd.runtime.world.devices import device_of_ranks
from autoptd.wings.cli.data import batches, load_tokens
from autoptd.wings.cli.models import (
    as_call,
    find_model,
    length_of,
    make_with_weights,
    vocabulary_of,
    weights_in,
)
from autoptd.wings.cli.request import keywords_of, options_of, rows_of
from autoptd.wings.cli.settings import read_pairs
from autoptd.wings.planner.auto import machine_here
from autoptd.wings.reports.excepthook import is_interrupt
from autoptd.wings.reports.report import write_report


def train(asked: Namespace) -> int:
    """Train as asked; 0."""
    keywords = keywords_of(asked)
    seed = asked.seed or 0
    torch.manual_seed(seed)
    subject = find_model(asked.model, read_pairs("set", asked.set))
    options = options_of(asked)
    building = autoptd.deferred(seed) if asked.deferred else nullcontext()
    with activity(f"building {asked.model}"), building:
        model, given = make_with_weights(subject, asked.dtype)
    if given is not None:
        fact = "its factory brings a batch of its own: text does not fit it"
        raise PlanError(
            f"MODEL {asked.model}", fact, "return the module alone, or write the loop: examples/train.py"
        )
    if vocabulary_of(model, asked.vocab) < 256:
        fact = f"its vocabulary of {vocabulary_of(model, asked.vocab)} has no place for 256 bytes"
        raise PlanError(f"MODEL {asked.model}", fact, "--set vocab_size=256")
    rows, length = rows_of(asked), length_of(subject, model, asked.seq)
    tokens = load_tokens(asked.data)
    # The first batch of the run, drawn once more below: its sizes are what is compiled for.
    first = next(batches(tokens, rows, length, 1, seed))
    if not asked.random and "weights" not in keywords and (folder := weights_in(asked.model)) is not None:
        keywords["weights"] = folder
    _say(
        f"weights: read from {keywords['weights']}"
        if "weights" in keywords
        else f"weights: random, of seed {seed}"
    )
    if "machine" not in keywords and "plan" not in keywords:
        # What is predicted stands beside what is measured here.
        device = device_of_ranks(model.parameters(), options.device, options.backend)
        keywords["machine"] = machine_here(device)
    pm = autoptd.parallelize(model, example_inputs=as_call(model, *first), **keywords)
    optimizer = pm.optimizer(torch.optim.AdamW, lr=asked.lr, weight_decay=asked.weight_decay)
    progress: Any = None
    try:
        with _checkpoints(asked, pm, optimizer) as ckpt:
            watched: dict[str, Any] = {"log": asked.log, "tensorboard": asked.tensorboard, "peak": asked.peak}
            watched |= {"quiet": asked.quiet, "measure_every": asked.measure_every}
            with autoptd.Progress(pm, tokens=rows * length, steps=asked.steps, **watched) as progress:
                pairs = batches(tokens, rows, length, asked.steps, seed, start=pm.steps)
                _train(asked, pm, optimizer, progress, ckpt, (as_call(model, x, y) for x, y in pairs))
    # Ctrl-C reaches all ranks; those that wait for another see it as that one's fault.
    except (KeyboardInterrupt, RuntimeFault) as error:
        if not is_interrupt(error):
            raise
        _report_interrupt(asked, pm, 0 if progress is None else progress.first + len(progress.losses))
        # The shells' convention: 128 plus the number of the signal.
        return 130
    if asked.out:
        _write(asked, pm, as_call(model, *first))
    pm.close()
    if progress.losses:
        _say(f"loss {progress.losses[0]:.4f} -> {progress.losses[-1]:.4f} in {len(progress.losses)} steps")
    else:
        _say(f"nothing to do: step {progress.first} of {asked.steps} was done before")
    return 0


def _checkpoints(
    asked: Namespace, pm: autoptd.ParallelModel, optimizer: torch.optim.Optimizer
) -> AbstractContextManager[Any]:
    """Return what saves the run as asked, resumed if that is asked; nothing without --save."""
    if asked.save is None:
        return nullcontext()
    often = {"every": asked.save_every, "mtbf": asked.mtbf}
    ckpt = pm.checkpointer(asked.save, optimizer, **often, keep=asked.keep)
    return resumed(ckpt) if asked.resume else ckpt


@contextmanager
def resumed(ckpt: Any) -> Iterator[Any]:
    """Open a checkpointer, and go on from its last checkpoint."""
    with ckpt:
        ckpt.resume()
        yield ckpt


def _train(
    asked: Namespace,
    pm: autoptd.ParallelModel,
    optimizer: Any,
    progress: Any,
    ckpt: Any,
    calls: Iterable[Any],
) -> None:
    """Train on all calls, or until a signal asks to end; what comes of the last step is saved."""
    for call in calls:
        args, keys = _call(pm, call)
        loss = progress.step(*args, **keys)
        norm = pm.clip_grad_norm_(asked.clip)
        optimizer.step()
        optimizer.zero_grad()
        progress.add(loss, norm, lr=optimizer.param_groups[0]["lr"])
        if ckpt is not None and not ckpt.step(loss):
            return
    if ckpt is not None:
        ckpt.save()


def _report_interrupt(asked: Namespace, pm: autoptd.ParallelModel, steps: int) -> None:
    """Report Ctrl-C once for all ranks.

    The report has no recorded step, as no rank waits for another any more.
    """
    if pm.coordinate != Coordinate():
        return
    written = ""
    if asked.out:
        pm.show(asked.out)
        write_report(pm.program, Path(asked.out) / "report.html", asked.model)
        written = f"; wrote {asked.out}/report.html"
    print(f"interrupted after {steps} of {asked.steps} steps{written}", file=sys.stderr)


def _say(line: str) -> None:
    # By the environment, as there may be no process group yet.
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def _call(pm: autoptd.ParallelModel, call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what `step` takes here, of a global batch."""
    if isinstance(call, dict):
        return (), pm.local_batch(**call)
    return pm.local_batch(*call), {}


def _write(asked: Namespace, pm: autoptd.ParallelModel, call: Any) -> None:
    """Record one more step, whose gradients nobody uses, and write what it shows, beside one without recording."""
    args, keys = _call(pm, call)
    start = time.perf_counter()
    pm.step(*args, **keys).item()
    plain_seconds = time.perf_counter() - start
    # A collective: every rank records, rank 0 writes.
    with pm.record() as record:
        pm.step(*args, **keys)
    with activity("drawing pictures"):
        pm.show(asked.out, record)
    if pm.coordinate == Coordinate():
        with activity("writing the report"):
            write_report(pm.program, Path(asked.out) / "report.html", asked.model, record, plain_seconds)
        print(f"wrote {asked.out}/report.html", file=sys.stderr)


__all__ = ["train"]
