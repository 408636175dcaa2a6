"""`autoptd show` and `autoptd compile`: a model without weights to a program, its numbers, its pictures.

The batch is d replicas times `num_microbatches` microbatches of `--rows` samples each, or the `--batch`
samples that were asked for.
"""

from __future__ import annotations

import json
import math
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autoptd
from autoptd.errors import PlanError
from autoptd.ir.activity import activity
from autoptd.program.program import Program
from autoptd.wings.cli.known import KNOWN
from autoptd.wings.cli.models import (
    as_call,
    factories_in,
    find_model,
    length_of,
    make_without_weights,
    vocabulary_of,
)
from autoptd.wings.cli.request import keywords_of, rows_of
from autoptd.wings.cli.settings import read_pairs
from autoptd.wings.reports.checkpoint_costs import checkpoint_costs
from autoptd.wings.reports.pictures import draw_program
from autoptd.wings.reports.report import write_report
from autoptd.wings.reports.summary import summarize


def example_inputs(asked: Namespace, subject: Any, model: nn.Module, given: Any) -> Any:
    """Return the global batch: what the factory gave, else token ids drawn at random, the same in every
    process.
    """
    if given is not None:
        return given
    length = length_of(subject, model, asked.seq)
    # Ids of one token more than the length: targets are the same row, a token later.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        vocabulary_of(model, asked.vocab), (rows_of(asked), length + 1), generator=generator, device="cpu"
    )
    return as_call(model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def make_program(asked: Namespace) -> tuple[str, Program]:
    """Compile what is asked for, without weights; and the words with which its numbers begin."""
    subject = find_model(asked.model, read_pairs("set", asked.set))
    # Building the model counts as well: a user waits for both.
    start = time.perf_counter()
    with activity(f"building {asked.model} without weights"):
        # What `precision` stores is in float32, which well-known sizes are not by default.
        dtype = asked.dtype or ("float32" if asked.precision else None)
        model, given = make_without_weights(subject, dtype)
    program = autoptd.compile(
        model, example_inputs=example_inputs(asked, subject, model, given), **keywords_of(asked)
    )
    # Of a microbatch: [rows, tokens].
    rows = next(spec.shape for spec in program.inputs if spec.batched)
    about = KNOWN[asked.model].source if asked.model in KNOWN else type(model).__name__
    took = time.perf_counter() - start
    size = "x".join(map(str, rows[1:])) or "no"
    return f"{asked.model} ({about}), {size} tokens a sample, compiled in {took:.1f} s", program


def show(asked: Namespace) -> int:
    """Print what a model costs on a mesh; 0."""
    if asked.model.endswith(".py"):
        print("\n".join(factories_in(asked.model)))
        return 0
    bandwidth, mtbf = storage_of(asked)
    words, program = make_program(asked)
    summary, costs = summarize(program), checkpoint_costs(program, bandwidth, mtbf)
    if asked.json:
        record = {"model": asked.model, **summary.record(), "checkpoint": costs.record()}
        print(json.dumps(record, indent=1))
    else:
        print(f"{words}\n{summary}\n{costs}")
        for line in _fallbacks(program, asked.out):
            print(line)
    if asked.explain:
        # With --json, stdout is for the machine.
        print(f"\n{program.explain(asked.explain)}", file=sys.stderr if asked.json else sys.stdout)
    if asked.out:
        _write(program, Path(asked.out), asked.model)
    return 0


def storage_of(asked: Namespace) -> tuple[float | None, float | None]:
    """Return the storage's bytes a second and the hours between faults, as far as they are given."""
    for name in ("storage_bandwidth", "mtbf"):
        value = getattr(asked, name)
        if value is not None and not 0 < value < math.inf:
            flag = f"--{name.replace('_', '-')} {value:g}"
            raise PlanError(flag, "is not above 0", "GB/s, or hours: for example 50")
    if asked.mtbf is not None and asked.storage_bandwidth is None:
        raise PlanError("--mtbf", "needs the seconds of a save", "--storage-bandwidth GB/s as well")
    return asked.storage_bandwidth and 1e9 * asked.storage_bandwidth, asked.mtbf


def compile(asked: Namespace) -> int:
    """Write a program; 0."""
    words, program = make_program(asked)
    program.save(asked.out)
    print(f"{words}\n{summarize(program)}")
    for line in _fallbacks(program, asked.out):
        print(line)
    _write(program, Path(asked.out), asked.model)
    return 0


def _fallbacks(program: Program, folder: str | None) -> list[str]:
    """Return one line for all that is not split as one would expect, and where the rest is listed."""
    merged = program.plan.get("fallbacks", [])
    if not merged:
        return []
    first = merged[0]
    where = f"see {folder}/report.html" if folder else "--out DIR writes a report that lists all of them"
    more = f", and {len(merged) - 1} more: {where}" if len(merged) > 1 else ""
    return [
        f"Not split: {first['op']} in {first['site'] or 'the model'}: {first['fact']}. {first['remedy']}{more}"
    ]


def _write(program: Program, folder: Path, name: str) -> None:
    with activity("drawing pictures"):
        draw_program(program, folder)
    with activity("writing the report"):
        write_report(program, folder / "report.html", name)
    print(f"wrote {folder}/report.html, and its pictures and tables as files", file=sys.stderr)


__all__ = ["compile", "example_inputs", "make_program", "show", "storage_of"]
