"""Take the updates of buffers out of the traces of a model (`passes/buffer_updates.py`), before its passes run.

In: `Traces` and a context. Out: traces without them, and `Traces.updates`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoptd import passes
from autoptd import trace as tracing
from autoptd.compiler.batch import Traces
from autoptd.passes import Context


def without_updates(traces: Traces, ctx: Context) -> Traces:
    """Take the updates of buffers out of the traces of a model."""
    graph, whole, updates = passes.split_updates(traces.captured.graph, traces.whole, ctx)
    return replace(traces, captured=replace(traces.captured, graph=graph), whole=whole, updates=updates)


def constant_buffers(traces: Traces) -> dict[str, torch.Tensor]:
    """Return the values of buffers; those that the forward updates have none that holds for another step."""
    updated = set(traces.updates.buffers) if traces.updates is not None else set()
    updated.update(name for name, _ in tracing.updated_buffers(traces.captured.graph))
    values = traces.captured.buffers
    return {name: value.to("meta") if name in updated else value for name, value in values.items()}


__all__ = ["constant_buffers", "without_updates"]
