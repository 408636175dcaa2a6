"""Implement `autoptd show`, `compile` and `verify`: compile a model, print its numbers, draw its pictures, check it.

`show` and `compile` need no weights. The batch has d replicas of `num_microbatches` microbatches with `--rows` samples
each, or `--batch` samples.
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

from autoptd import api
from autoptd.errors import PlanError
from autoptd.ir.scopes import activity
from autoptd.options import grouped
from autoptd.program.program import Program
from autoptd.wings.cli.known import KNOWN
from autoptd.wings.cli.models import (
    as_call,
    factories_in,
    find_model,
    length_of,
    make_with_weights,
    make_without_weights,
    vocabulary_of,
)
from autoptd.wings.cli.request import keywords_of, read_pairs, rows_of
from autoptd.wings.reports.pictures import draw_program
from autoptd.wings.reports.report import write_report
from autoptd.wings.reports.summary import checkpoint_costs, summarize


def example_inputs(args: Namespace, subject: Any, model: nn.Module, given: Any) -> Any:
    """Return the global batch: the factory's, else random token ids, the same in every process."""
    if given is not None:
        return given
    length = length_of(subject, model, args.seq)
    # One more id than the length: targets are the same row, one token later.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        vocabulary_of(model, args.vocab), (rows_of(args), length + 1), generator=generator, device="cpu"
    )
    return as_call(model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def make_program(args: Namespace) -> tuple[str, Program]:
    """Compile the requested program without weights; return it with the heading of its numbers."""
    subject = find_model(args.model, read_pairs("set", args.set))
    # Include the time to build the model: the user waits for both.
    start = time.perf_counter()
    with activity(f"building {args.model} without weights"):
        # `precision` stores parameters in float32, which is not the default of known sizes.
        dtype = args.dtype or ("float32" if args.precision else None)
        model, given = make_without_weights(subject, dtype)
    program = api.compile(
        model, example_inputs=example_inputs(args, subject, model, given), **grouped(keywords_of(args))
    )
    # Of one microbatch: [rows, tokens].
    rows = next(spec.shape for spec in program.inputs if spec.batched)
    about = KNOWN[args.model].source if args.model in KNOWN else type(model).__name__
    took = time.perf_counter() - start
    size = "x".join(map(str, rows[1:])) or "no"
    return f"{args.model} ({about}), {size} tokens per sample, compiled in {took:.1f} s", program


def show(args: Namespace) -> int:
    """Print the cost of a model on a mesh; return 0."""
    if args.model.endswith(".py"):
        print("\n".join(factories_in(args.model)))
        return 0
    bandwidth, mtbf = storage_of(args)
    words, program = make_program(args)
    summary, costs = summarize(program), checkpoint_costs(program, bandwidth, mtbf)
    if args.json:
        record = {"model": args.model, **summary.record(), "checkpoint": costs.record()}
        print(json.dumps(record, indent=1))
    else:
        print(f"{words}\n{summary}\n{costs}")
        for line in _fallbacks(program, args.out):
            print(line)
    if args.explain:
        # With --json, stdout is machine-readable.
        print(f"\n{program.explain(args.explain)}", file=sys.stderr if args.json else sys.stdout)
    if args.out:
        _write(program, Path(args.out), args.model)
    return 0


def storage_of(args: Namespace) -> tuple[float | None, float | None]:
    """Return the storage bandwidth in bytes per second and the hours between failures, as far as given."""
    for name in ("storage_bandwidth", "mtbf"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            flag = f"--{name.replace('_', '-')} {value:g}"
            raise PlanError(flag, "must be positive", "GB/s, or hours: for example 50")
    if args.mtbf is not None and args.storage_bandwidth is None:
        raise PlanError("--mtbf", "needs the time of a save", "add --storage-bandwidth GB/s")
    return args.storage_bandwidth and 1e9 * args.storage_bandwidth, args.mtbf


def compile(args: Namespace) -> int:
    """Write a program; return 0."""
    words, program = make_program(args)
    program.save(args.out)
    print(f"{words}\n{summarize(program)}")
    for line in _fallbacks(program, args.out):
        print(line)
    _write(program, Path(args.out), args.model)
    return 0


def _fallbacks(program: Program, folder: str | None) -> list[str]:
    """Return one line on operators that are not split as expected, with a pointer to the full list."""
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
    print(f"wrote {folder}/report.html, with its pictures and tables as separate files", file=sys.stderr)


def verify(args: Namespace) -> int:
    """Print the largest differences; return 0 if the two agree, else 1."""
    # Seeds the weights of models that come without any.
    torch.manual_seed(args.seed or 0)
    subject = find_model(args.model, read_pairs("set", args.set))
    with activity(f"building {args.model}"):
        model, given = make_with_weights(subject, args.dtype)
    batch = example_inputs(args, subject, model, given)
    report = api.verify(model, example_inputs=batch, steps=args.steps, **grouped(keywords_of(args)))
    print(report)
    return 0 if report.passed else 1
