"""Define the request of one program, with the data that its attempts share.

In: a model, options, a call. Out: a `Request`, which divides the rows of the call and traces the model.

    request.batch()                         # equal microbatches
    request.traces(batch, check=True)       # of one device's model, with few rows and with many
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autoptd import schedule
from autoptd import trace as tracing
from autoptd.compiler.batch import Batch, Traces, plan_batch, trace_rows
from autoptd.options import Options
from autoptd.program.program import Program
from autoptd.runtime.world.devices import default_fusion


@dataclass(frozen=True)
class Request:
    """The inputs of a compilation: see `driver.compile_program`.

    `handed` are the dtypes of parameters in the user's model. `known` caches traces by their rows.
    """

    model: nn.Module
    options: Options
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    replicas: int
    check: bool
    like: Program | None
    counts: tuple[int, ...]
    handed: Mapping[str, torch.dtype]
    narrowing: tracing.Narrowing
    known: dict[tuple[int, int, bool], Traces] = field(default_factory=dict)

    def batch(self, group: int = 1) -> Batch:
        """Return the planned division of rows, with whole groups of rows in a microbatch."""
        return plan_batch(self.options, self.args, self.kwargs, self.replicas, group, self.like, self.counts)

    def traces(self, batch: Batch, check: bool) -> Traces:
        """Return the traces of the model for a division of its rows; `check` compares them with the model."""
        # The trace of the one-device model, which is split afterwards, serves all ranks and divisions.
        rows = batch.traced_rows, batch.whole_rows, batch.pieces > 1
        if rows not in self.known:
            self.known[rows] = trace_rows(
                self.model, self.options, self.args, self.kwargs, batch, self.narrowing, self.check and check
            )
        return self.known[rows]


def settle(model: nn.Module, options: Options) -> Options:
    """Complete the options from the model, its device and a schedule given by the user."""
    written = schedule.written_orders(options)
    # A schedule from a file fixes m, as it lists every microbatch.
    if written is not None:
        options = replace(options, num_microbatches=schedule.num_microbatches(written))
    fuse = replace(options.fuse, backend=default_fusion(model.parameters(), options))
    return replace(options, fuse=fuse)


__all__ = ["Request", "settle"]
