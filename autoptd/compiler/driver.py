"""Drive a compilation, one stage per line. In: an unmodified model and a request. Out: a `Program`.

    program = compile(model, t=2, p=2, d=2, v=2, example_inputs=(ids, targets))
    program.save("out/")

It needs no process group, no GPU and no weights in memory: meta parameters compile as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from autoptd import codegen, passes, schedule
from autoptd import trace as tracing
from autoptd.compiler.batch import Batch, Traces
from autoptd.compiler.batch_plans import BatchPlan, batch_plans
from autoptd.compiler.compiled import Compiled, Draw
from autoptd.compiler.context import make_context, without_updates
from autoptd.compiler.memory_search import place
from autoptd.compiler.program_cache import ProgramCache
from autoptd.compiler.records.fallbacks import warn_of_mixing, warn_of_recompute
from autoptd.compiler.records.header import about_stages
from autoptd.compiler.records.program import program_of
from autoptd.compiler.records.specs import crossing_links, crossing_spec, param_specs
from autoptd.compiler.rehearse import Written, rehearse
from autoptd.compiler.request import Request, settle
from autoptd.errors import AutoptdError
from autoptd.ir.activity import activity
from autoptd.ir.default_device import on_cpu
from autoptd.ir.garbage import paused_collection
from autoptd.options import Options
from autoptd.passes import Context, Form, Record, up_to
from autoptd.passes.stages.held_bytes import TooFull
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
        request = Request(model, options, args, kwargs, replicas, check, like, counts, handed, narrowing)
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
        program = replace(program, draw=draw)
    return replace(program, cast_buffers=narrowing.cast, traced=tried.traces.traced)


def try_plan(request: Request, plan: BatchPlan, record: Record) -> Tried | AutoptdError:
    """Compile with one division of the rows, or return why that is impossible."""
    try:
        # With one microbatch a trace has all rows, which may not fit on one device: the model has been
        # compared with a trace of fewer.
        traces = request.traces(plan.batch, check=plan.mixed is None)
        with on_cpu():
            traces = without_updates(traces, make_context(request, traces, plan.batch))
            written = _write(request, plan.batch, traces, record)
        return written if isinstance(written, TooFull) else Tried(written, traces)
    except AutoptdError as error:
        return error


def _write(request: Request, batch: Batch, traces: Traces, record: Record) -> Written | TooFull:
    """Return the program of these traces, from the cache if it is there."""
    ctx, like = make_context(request, traces, batch), request.like
    writer = Writer(traces, batch, request.handed, record)
    # Other programs follow the first one by its graphs, which are not written to a cache.
    if request.options.shapes.cache is None or like is None:
        return rehearse(writer, ctx)
    cache = ProgramCache(request.options.shapes.cache)
    key = cache.key(traces, batch, ctx, request.handed)
    if (kept := cache.load(key, traces.captured.buffers)) is not None:
        return Written(replace(kept, follows=like), traces.captured.graph, ctx)
    written = rehearse(writer, ctx)
    if not isinstance(written, TooFull):
        cache.store(key, written.program)
    return written


@dataclass(frozen=True)
class Writer:
    """Place a traced model, and write its program."""

    traces: Traces
    batch: Batch
    handed: Mapping[str, torch.dtype]
    record: Record

    @paused_collection()
    def write(self, ctx: Context) -> Written | TooFull:
        """Run the passes, repeatedly if needed to find a plan that fits in memory, and write the program."""
        placed = place(self.traces.captured.graph, ctx, self.record)
        if isinstance(placed, TooFull):
            return placed
        graph, ctx = placed
        # Compare "auto" with the plans of Megatron and Korthikanti: two more runs, up to CONNECTED.
        connecting = up_to(Form.CONNECTED, passes.passes_for(ctx))
        weighed = passes.weigh_known(
            self.traces.captured.graph, self.record.graphs["CONNECTED"], ctx, connecting
        )
        options, updates = ctx.options, self.traces.updates
        # Build what the runtime runs, crossings first, as orders and transfers depend on them.
        crossings = codegen.crossings(graph)
        # The cut was balanced on orders without sends and receives, which were not known yet.
        orders = schedule.connect_orders(ctx.orders, crossing_links(tuple(map(crossing_spec, crossings))))
        params = param_specs(graph, self.traces.captured, options, self.handed)
        about = about_stages(options, self.batch, params, orders, ctx.wgrad_sink)
        with activity("write stage files", is_brief=True):
            files = codegen.write_program(graph, options.mesh, crossings, about, updates)
        program = program_of(
            self.traces, self.batch, graph, ctx, self.record, crossings, orders, params, files, weighed
        )
        return Written(program, graph, ctx)


__all__ = ["compile_program"]
