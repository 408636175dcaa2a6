"""Drive a compilation, one stage per line. In: an unmodified model and a request. Out: a `Program`.

    program = compile(model, t=2, p=2, d=2, v=2, example_inputs=(ids, targets))
    program.save("out/")

It needs no process group, no GPU and no weights in memory: meta parameters compile as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from autoptd import trace as tracing
from autoptd.compiler.compiled import Compiled, Draw
from autoptd.compiler.context import make_context
from autoptd.compiler.memory_search import Written, fit
from autoptd.compiler.program_cache import ProgramCache
from autoptd.compiler.request import BatchPlan, Request, Traces, batch_plans, settle
from autoptd.compiler.warn import warn_of_mixing, warn_of_recompute, warn_of_whole_tokens
from autoptd.compiler.write import Writer
from autoptd.errors import AutoptdError
from autoptd.ir.scopes import on_cpu, paused_collection
from autoptd.options import Options
from autoptd.passes import Record, passes_for
from autoptd.passes.context import Context
from autoptd.program.program import Program


class Tried(NamedTuple):
    """A compiled program with its traces."""

    written: Written
    traces: Traces


def compile_program(
    model: nn.Module,
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    replicas: int,
    check: bool = True,
    like: Program | None = None,
    record: Record | None = None,
    counts: tuple[int, ...] = (),
    draw: Draw | None = None,
) -> Program:
    """Compile for the batch in `(args, kwargs)`: the rows of `replicas` replicas (1 under torchrun, else
    all).

    With `like`, a program of the same model, its parameter storage and cuts are followed. `record` gets the
    graph in all its forms, and the seconds of every pass. `counts`: see `plan_batch`; `draw`: see `Compiled`.
    """
    tracing.check_module(model)
    tracing.check_device(model, args, kwargs)
    record = record or Record()
    handed = {name: parameter.dtype for name, parameter in model.named_parameters()}
    cast = like.cast_buffers if like is not None else ()
    with tracing.computing_in(model, options.precision, cast) as narrowing:
        options = settle(model, options)
        request = Request(model, options, args, kwargs, replicas, narrowing, check, like, counts, handed)
        plans = batch_plans(request)
        plan = next(plans)
        tried = try_plan(request, plan, record)
        while isinstance(tried, AutoptdError):
            plan = plans.send(tried)
            tried = try_plan(request, plan, record)
    program, graph, ctx = tried.written
    if plan.mixed is not None:
        warn_of_mixing(plan.mixed, plan.microbatches_before, program)
    # A program from the cache was already warned about when it was written.
    if isinstance(program, Compiled):
        warn_of_recompute(graph, ctx.options, tried.traces.captured.checkpointed)
        if like is None:
            warn_of_whole_tokens(ctx)
        program = replace(program, draw=draw)
    return replace(program, cast_buffers=narrowing.cast, traced=tried.traces.traced)


def try_plan(request: Request, plan: BatchPlan, record: Record) -> Tried | AutoptdError:
    """Compile with one division of the rows, or return why that is impossible."""
    try:
        # With one microbatch a trace has all rows, which may not fit on one device: the model has been
        # compared with a trace of fewer.
        traces = request.traces(plan.batch, check=plan.mixed is None)
        with on_cpu():
            with paused_collection():
                traces, ctx = make_context(request, traces, plan.batch)
            written = _write(request, plan, traces, ctx, record)
        return written if isinstance(written, AutoptdError) else Tried(written, traces)
    except AutoptdError as error:
        return error


def _write(
    request: Request, plan: BatchPlan, traces: Traces, ctx: Context, record: Record
) -> Written | AutoptdError:
    """Return the program of these traces, from the cache if it is there."""
    like, traced = request.like, traces.captured.graph
    passes = passes_for(ctx)
    writer = Writer(traces, plan.batch, request.handed, record)
    # Other programs follow the first one by its graphs, which are not written to a cache.
    if request.options.shapes.cache is None or like is None:
        return fit(traced, ctx, passes, record, writer.write)
    cache = ProgramCache(request.options.shapes.cache)
    key = cache.key(traces, plan.batch, ctx, request.handed)
    if (kept := cache.load(key, traces.captured.buffers)) is not None:
        return Written(replace(kept, follows=like), traced, ctx)
    written = fit(traced, ctx, passes, record, writer.write)
    if isinstance(written, Written):
        cache.store(key, written.program)
    return written
