"""Trace the model of a request for one division of its rows after another, until one works.

In: a model, options, a call. Out: `Traces` for a `Batch`, and `BatchPlan`s, each in response to the reason why
the previous one is impossible:

- as planned: equal microbatches of the rows of a replica;
- with more rows in the trace, if rows are mixed or too few for the model: they may belong together, which
  shows only in a trace with several groups of them;
- with whole groups of rows in every microbatch, if the rows of a group belong together;
- with one microbatch per replica, whose operators may read the rows of all replicas.

    plans = batch_plans(request)
    tried = try_plan(request, next(plans))
    while isinstance(tried, AutoptdError):
        tried = try_plan(request, plans.send(tried))    # raises the error for users after the last plan
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from autoptd import schedule
from autoptd import trace as tracing
from autoptd.compat import tree_flatten
from autoptd.compiler.batch import Batch, plan_batch, resize
from autoptd.errors import AutoptdError, PlanError, TraceError
from autoptd.ir.scopes import activity, paused_collection
from autoptd.ir.updates import Updates
from autoptd.options import Options
from autoptd.passes.solve.batch_types import MixedSamples, RowGroups
from autoptd.program.program import Program
from autoptd.runtime.world.devices import default_fusion, device_of_ranks

CallArgs = tuple[tuple[Any, ...], dict[str, Any]]


class FewRows(TraceError):
    """The model can be traced with all rows of the batch, but not with those of a microbatch."""


@dataclass(frozen=True)
class Traces:
    """A model as its rows showed it: with `traced_rows`, and (None where the batch is not split) with
    `whole_rows`. `updates` of buffers are in the traces, or were taken out of them. `traced` says how to
    trace it again.
    """

    captured: tracing.Captured
    whole: Graph | None
    traced: tracing.Traced
    updates: Updates | None = None


@dataclass(frozen=True)
class Request:
    """The inputs of one compilation: see `driver.compile_program`.

    `handed` are the dtypes of parameters in the user's model. `known` caches traces by their rows.
    """

    model: nn.Module
    options: Options
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    replicas: int
    narrowing: tracing.Narrowing
    check: bool = True
    like: Program | None = None
    counts: tuple[int, ...] = ()
    handed: Mapping[str, torch.dtype] = field(default_factory=dict)
    known: dict[tuple[int, int, bool], Traces] = field(default_factory=dict)

    def batch(self, group: int = 1) -> Batch:
        """Return the planned division of rows, with whole groups of rows in a microbatch."""
        return plan_batch(self.options, self.args, self.kwargs, self.replicas, group, self.like, self.counts)

    def traces(self, batch: Batch, check: bool) -> Traces:
        """Return the traces of the model for a division of its rows; `check` compares them with the model."""
        # The trace of the one-device model, which is split afterwards, serves all ranks and divisions.
        rows = batch.traced_rows, batch.whole_rows, batch.pieces > 1
        if rows not in self.known:
            self.known[rows] = self._trace(batch, self.check and check)
        return self.known[rows]

    def _trace(self, batch: Batch, check: bool) -> Traces:
        """Trace the call with few rows and, if the batch is split, with many: differences depend on the batch."""
        with activity(f"tracing {batch.traced_rows} samples"):
            captured = self.capture(batch)
        # Parameters on meta have no values to compare.
        if check and tracing.has_values(self.model):
            with activity("comparing trace and model"):
                self._compare(captured, batch)
        how = self.options.loss_fn, self.autocast
        whole = None
        if batch.pieces > 1:
            with activity(f"tracing {batch.whole_rows} samples"), paused_collection():
                larger = resize(self.args, self.kwargs, batch, batch.whole_rows)
                whole = tracing.capture_again(captured, self.model, *larger, *how)
        call = resize(self.args, self.kwargs, batch, batch.traced_rows)
        traced = tracing.Traced.of(
            self.model, captured, call, *how, self.options.precision, self.narrowing.cast
        )
        return Traces(captured, whole, traced)

    @paused_collection()
    def capture(self, batch: Batch) -> tracing.Captured:
        """Trace with the rows of the batch's trace.

        A usual failure is an argument that is as long as the batch by chance.
        """
        call, autocast = resize(self.args, self.kwargs, batch, batch.traced_rows), self.autocast

        def trace() -> tracing.Captured:
            return tracing.capture(self.model, *call, self.options.loss_fn, autocast)

        try:
            return self.narrowing.settle(trace)
        except TraceError as error:
            # Report a failure of the model itself before blaming rows or traces.
            cause = error.__cause__
            if cause is not None and (own := self._own_failure()):
                raise own from cause
            rows = tree_flatten((self.args, self.kwargs))[0][batch.batched[0]].shape[0]
            # Fewer rows are the cause only if the whole batch can be traced.
            if batch.traced_rows == rows or not self._can_trace((self.args, self.kwargs)):
                raise
            fact = f"with {batch.traced_rows} of {rows} rows it {error.fact}"
            remedy = f"{_divided_remedy(batch, rows)}; or, if it takes rows in groups, at least two groups in the batch"
            raise FewRows(error.site, fact, remedy) from error

    def in_groups(self, batch: Batch) -> Batch | None:
        """Return this batch with two groups in its trace, of the fewest rows that can be traced; None without."""
        for rows in batch.possible_groups:
            if self._can_trace(resize(self.args, self.kwargs, batch, rows)):
                # A single group cannot be recognized as one.
                return batch.tracing(math.lcm(2 * rows, batch.rows))
        return None

    @property
    def autocast(self) -> tracing.Autocast:
        return autocast_here(self.model, self.options)

    def _compare(self, captured: tracing.Captured, batch: Batch) -> None:
        """Compare the trace with the model, which may fail on fewer rows than the call has (an indexed table
        that was split by chance).

        A model whose step does not fit on its device is not compared, with a warning.
        """
        call = resize(self.args, self.kwargs, batch, batch.traced_rows)
        try:
            how = captured.graph, captured.buffers, *call, self.autocast
            tracing.compare(self.model, self.options.loss_fn, *how)
        except AutoptdError:
            raise
        except torch.OutOfMemoryError as error:
            # It may still fit when partitioned, fused or recomputed.
            text = f"the trace is not compared with the model: a step with {batch.traced_rows} rows does not fit: "
            warnings.warn(f"model: {text}{str(error).splitlines()[0]}", stacklevel=2)
        except Exception as error:
            fact = f"it cannot be run: {type(error).__name__}: {error}"
            if remedy := _cast_remedy(self.options, call):
                raise TraceError("model", fact, remedy) from error
            if own := self._own_failure():
                raise own from error
            fact = f"with {batch.traced_rows} rows {fact}"
            raise TraceError("model", fact, _divided_remedy(batch, batch.rows * batch.pieces)) from error

    def _own_failure(self) -> TraceError | None:
        """Return the error that the model itself raises on the call; None if it runs."""
        how = self.options.loss_fn, self.autocast, self.options.precision
        return tracing.own_failure(self.model, self.args, self.kwargs, *how)

    def _can_trace(self, call: CallArgs) -> bool:
        try:
            tracing.capture(self.model, *call, self.options.loss_fn, self.autocast)
        except TraceError:
            return False
        return True


def settle(model: nn.Module, options: Options) -> Options:
    """Complete the options from the model, its device and a schedule given by the user."""
    written = schedule.written_orders(options)
    # A schedule from a file fixes m, as it lists every microbatch.
    if written is not None:
        options = replace(options, num_microbatches=schedule.num_microbatches(written))
    if options.fuse.backend is None:
        backend = default_fusion(model.parameters(), options.device, options.backend)
        options = replace(options, fuse=replace(options.fuse, backend=backend))
    return options


def autocast_here(model: nn.Module, options: Options) -> tracing.Autocast:
    """Return the autocast of a request, for the device of the ranks."""
    device = device_of_ranks(model.parameters(), options.device, options.backend)
    return tracing.autocast_of(model, options.precision, device.type)


def _cast_remedy(options: Options, call: CallArgs) -> str:
    """Return the remedy for inputs whose dtype differs from that of a cast model; "" if there are none."""
    dtype = tracing.COMPUTE_DTYPES.get(str(options.precision))
    tensors = [x for x in tree_flatten(call)[0] if isinstance(x, torch.Tensor)]
    others = [str(i) for i, x in enumerate(tensors) if x.is_floating_point() and x.dtype != dtype]
    if dtype is None or not others:
        return ""
    return (
        f"precision={options.precision!r} casts the model, not its inputs: tensors {', '.join(others)} "
        f"of the call with .to({dtype}), as model.to({dtype}) would have them; or precision='{options.precision}-mixed'"
    )


def _divided_remedy(batch: Batch, rows: int) -> str:
    """Return the remedy for an argument that is as long as the batch by chance."""
    divided = ", ".join(map(str, batch.batched))
    return (
        f"the first tensor of the call gives the batch; tensors {divided} have {rows} rows and are divided alike: "
        "pass the batch first, and give a tensor without rows of the batch a leading dim of 1"
    )


@dataclass(frozen=True)
class BatchPlan:
    """A division of rows. `mixed`: why it has one microbatch per replica instead of the planned number."""

    batch: Batch
    mixed: MixedSamples | None = None
    microbatches_before: int = 0


def batch_plans(request: Request) -> Generator[BatchPlan, AutoptdError, None]:
    """Yield divisions of rows, given why the previous one is impossible; finally raise the error for users."""
    batch = request.batch()
    reason = yield from _with_more_rows(request, batch)
    if isinstance(reason, RowGroups):
        fewer = request.batch(reason.group)
        # The number is given by the user, or by their schedule.
        if request.counts or fewer.rows == batch.rows:
            raise PlanError(reason.site, reason.fact, reason.remedy)
        reason = yield from _with_more_rows(request, fewer)
        raise reason
    if not isinstance(reason, MixedSamples):
        raise reason
    if request.counts:
        raise PlanError(reason.site, reason.fact, f"a multiple of {len(request.counts)} rows")
    if not _may_mix(request.options):
        raise reason.refused()
    raise _refusal(reason, (yield BatchPlan(batch.in_one_microbatch, reason, batch.num_microbatches)))


def _with_more_rows(request: Request, batch: Batch) -> Generator[BatchPlan, AutoptdError, AutoptdError]:
    """Yield a division, and one with more traced rows; return the first reason, or the row groups found."""
    first = yield BatchPlan(batch)
    more = None
    if isinstance(first, FewRows):
        more = request.in_groups(batch)
    elif isinstance(first, MixedSamples):
        more = batch.with_more_rows
    if more is None:
        return first
    reason = yield BatchPlan(more)
    return reason if isinstance(reason, RowGroups) else first


def _refusal(mixed: MixedSamples, reason: AutoptdError) -> AutoptdError:
    """Return the error for users if one microbatch per replica is impossible too."""
    if not isinstance(reason, MixedSamples):
        return reason
    if not reason.is_layer:
        return reason.refused(in_one=True)
    fact = f"{mixed.fact}, and every replica would compute {reason.site} for all rows"
    return MixedSamples(mixed.site, fact, mixed.remedy).refused(in_one=True)


def _may_mix(options: Options) -> bool:
    """Tell whether replicas may have one microbatch each: no other number is requested or in the schedule."""
    if options.num_microbatches is not None:
        return options.num_microbatches == 1
    try:
        schedule.requested_orders(options, 1)
    except PlanError:
        return False
    return True
