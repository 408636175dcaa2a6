"""Build the context of the passes from a traced model and a division of its rows.

In: a request, `Traces`, a `Batch`. Out: a `Context`, and the traces without buffer updates
(`passes/buffer_updates.py`): the compile-time values of these buffers hold for no other step.

    traces, ctx = make_context(request, traces, batch)
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoptd import schedule
from autoptd import trace as tracing
from autoptd.compiler.batch import Batch
from autoptd.compiler.request import Request, Traces
from autoptd.compiler.saved import FindSaved
from autoptd.ir.buffers import Buffers
from autoptd.passes.buffer_updates import split_updates
from autoptd.passes.context import Context


def make_context(request: Request, traces: Traces, batch: Batch) -> tuple[Traces, Context]:
    """Return the traces without buffer updates, and what passes read in addition to their graph."""
    options = request.options
    orders = schedule.requested_orders(options, batch.num_microbatches)
    ctx = Context(
        options=options,
        traced_rows=batch.traced_rows,
        rows=batch.rows,
        pieces=batch.pieces,
        batched=frozenset(name for name, leaf in traces.captured.inputs if leaf in batch.batched),
        whole=traces.whole,
        mixes=batch.mixes,
        buffers=Buffers(constant_buffers(traces)),
        orders=orders,
        live=schedule.in_flight_moments(orders),
        makespan=schedule.makespan_of(orders),
        checkpointed=traces.captured.checkpointed if options.recompute.what is None else (),
        saved_by=FindSaved(options.mesh, batch.rows),
        like=request.like,
    )
    graph, whole, updates = split_updates(traces.captured.graph, traces.whole, ctx)
    bare = replace(traces, captured=replace(traces.captured, graph=graph), whole=whole, updates=updates)
    return bare, replace(ctx, whole=whole, buffers=Buffers(constant_buffers(bare)))


def constant_buffers(traces: Traces) -> dict[str, torch.Tensor]:
    """Return the values of buffers, without those that forward updates, whose values hold for one step only."""
    updated = set(traces.updates.buffers) if traces.updates is not None else set()
    updated.update(name for name, _ in tracing.updated_buffers(traces.captured.graph))
    values = traces.captured.buffers
    return {name: value.to("meta") if name in updated else value for name, value in values.items()}


__all__ = ["make_context"]
