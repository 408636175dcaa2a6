"""Propose divisions of a step's rows until the model allows one.

In: a `Request`. Out: one `BatchPlan` after another, each in response to the reason why the previous one is
impossible:

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

from collections.abc import Generator
from dataclasses import dataclass

from autoptd import schedule
from autoptd.compiler.batch import Batch, FewRows, groups_of
from autoptd.compiler.request import Request
from autoptd.errors import AutoptdError, PlanError
from autoptd.options import Options
from autoptd.passes import MixedSamples, RowGroups


@dataclass(frozen=True)
class BatchPlan:
    """A division of rows. `mixed`: why it has one microbatch per replica instead of the planned number."""

    batch: Batch
    mixed: MixedSamples | None = None
    microbatches_before: int = 0


Plans = Generator[BatchPlan, AutoptdError, AutoptdError]


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


def _with_more_rows(request: Request, batch: Batch) -> Plans:
    """Yield a division, and one with more traced rows; return the first reason, or the row groups found."""
    first = yield BatchPlan(batch)
    more = None
    if isinstance(first, FewRows):
        more = groups_of(request.model, request.options, request.args, request.kwargs, batch)
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
    fact = f"{mixed.fact}, and every replica would repeat for all rows what follows: {reason.site}"
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


__all__ = ["BatchPlan", "batch_plans"]
