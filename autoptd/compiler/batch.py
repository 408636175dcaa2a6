"""Divide the rows of a call into replicas and microbatches, and trace the model with few and many rows.

In: the call of a step, and the options. Out: a `Batch`, and `Traces`. The batch is dim 0 of the first tensor,
and of all tensors of the same length (`runtime/step/microbatches.py` divides the calls of a run by the same
rule).

    batch = plan_batch(options, (ids, targets), {}, replicas=2)
    batch.rows, batch.num_microbatches          # of a microbatch, of a replica
    plan_batch(options, (ids,), {}, replicas=2, like=program, counts=(2, 1))    # an evaluation of 3 rows
    trace_rows(model, options, args, kwargs, batch).captured.graph
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from autoptd import trace as tracing
from autoptd.compat import tree_flatten, tree_unflatten
from autoptd.errors import AutoptdError, PlanError, TraceError
from autoptd.ir.activity import activity
from autoptd.ir.garbage import paused_collection
from autoptd.ir.updates import Updates
from autoptd.options import Options
from autoptd.program.program import Program
from autoptd.runtime.step.microbatches import batch_rows
from autoptd.runtime.world.devices import device_of_ranks

# Rows of two pairs, and of the largest group that is searched for.
PAIRS, LARGEST_GROUP = 4, 64


class FewRows(TraceError):
    """The model can be traced with all rows of the batch, but not with those of a microbatch."""


@dataclass(frozen=True)
class Batch:
    """How a step's rows are divided: `rows` per microbatch, `num_microbatches` per replica, `pieces`
    microbatches over all replicas, `traced_rows` in the trace.

    `mixes`: replicas have one microbatch each, whose operators may read the rows of all replicas; the trace
    has all rows.
    """

    # Numbers of the call's leaves that have the batch in dim 0.
    batched: tuple[int, ...]
    rows: int
    num_microbatches: int
    pieces: int
    traced_rows: int
    mixes: bool = False

    @property
    def with_more_rows(self) -> Batch | None:
        """This batch with two pairs of rows in its trace, or two microbatches; None where a step has fewer."""
        return self.tracing(max(PAIRS, 2 * self.rows))

    def tracing(self, rows: int) -> Batch | None:
        """Return this batch with `rows` rows in its trace; None if it has fewer."""
        is_possible = self.pieces > 1 and self.traced_rows < rows <= self.rows * self.pieces
        return replace(self, traced_rows=rows) if is_possible and rows % self.rows == 0 else None

    @property
    def possible_groups(self) -> list[int]:
        """The group sizes, larger than the rows of the trace, that divide a step into several groups."""
        step = self.rows * self.pieces
        most = min(step // 2, LARGEST_GROUP)
        return [rows for rows in range(self.traced_rows + 1, most + 1) if step % rows == 0]

    @property
    def in_one_microbatch(self) -> Batch:
        """This batch with one microbatch per replica, in which rows may be mixed."""
        rows = self.rows * self.num_microbatches
        pieces = self.pieces // self.num_microbatches
        return Batch(self.batched, rows, 1, pieces, rows * pieces, mixes=pieces > 1)

    @property
    def whole_rows(self) -> int:
        """Rows of the second trace: those of a step, if they are more than in the first trace."""
        step = self.rows * self.pieces
        # Comparing needs two numbers of rows, even if a step has only one microbatch.
        return step if step > self.traced_rows else 2 * self.traced_rows


def plan_batch(
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    replicas: int,
    group: int = 1,
    like: Program | None = None,
    counts: tuple[int, ...] = (),
) -> Batch:
    """Choose the microbatches, each with whole groups of rows; `Options.num_microbatches` has the default.

    `like` is a program of other sizes, whose arguments have the batch in the same places. `counts` are the
    rows of every replica of an evaluation, if they differ. PlanError if the rows do not divide over
    `replicas` and microbatches.
    """
    leaves = tree_flatten((args, kwargs))[0]
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        remedy = "pass the tensors that the model is called with"
        raise PlanError("example_inputs", "no tensor with a batch dim", remedy)
    if like is not None and (known := [spec.leaf for spec in like.inputs if spec.batched]):
        total = len(leaves[known[0]])
    else:
        total = batch_rows(leaves, replicas * (options.num_microbatches or 1))
    # Every tensor as long as the batch is split: ids, labels, masks. One of another length goes whole to all.
    batched = tuple(i for i in tensors if leaves[i].shape[0] == total)
    if not (sum(counts) if counts else total) or 0 in leaves[batched[0]].shape[1:]:
        fact = f"the batch is empty: tensor {batched[0]} is {list(leaves[batched[0]].shape)}"
        raise PlanError("example_inputs", fact, "a batch of at least one row, and rows of at least one entry")
    if like is not None:
        batched = _batched_like(like, leaves, batched, total)
    if counts and like is not None and like.row_blocks == 1:
        return _plan_unequal(options, batched, counts, like.rows)
    if total % replicas or counts:
        total, replicas = (sum(counts), len(counts)) if counts else (total, replicas)
        degrees = options.mesh.product_text(options.mesh.batch_axes)
        fact = f"the global batch's {total} rows do not divide over {degrees}"
        if len(batched) < len(tensors):
            sizes = ", ".join(f"tensor {i} has {leaves[i].shape[0]}" for i in tensors)
            fact += f" (in their first dim, {sizes}: the batch is the first tensor's, "
            fact += "or of most where that has one entry)"
        raise PlanError("example_inputs", fact, f"a multiple of {replicas} rows")
    share = total // replicas
    m = options.num_microbatches or default_microbatches(share // group, options.mesh.pipeline_ranks)
    if share % m:
        fits = [k for k in range(1, share + 1) if share % k == 0]
        fact = f"{share} rows of a replica do not divide into {m} microbatches"
        remedy = f"num_microbatches in {{{', '.join(map(str, fits))}}}"
        if share < m:
            fact = f"the global batch of {total} has {share} for each replica, and a microbatch needs one at least"
            remedy = f"num_microbatches={share}, or a global batch of a multiple of {m * replicas} rows"
        raise PlanError(f"num_microbatches={m}", fact, remedy)
    rows, pieces = share // m, m * options.mesh.replicas
    # A microbatch of one row is traced with two: a dim of size 1 is broadcast, and would not look like a
    # batch.
    # So would a single group of rows.
    batch = Batch(batched, rows, m, pieces, rows if pieces == 1 else max(rows, 2 * group if group > 1 else 2))
    # A model that mixes rows at one size does so at others.
    return batch.in_one_microbatch if like is not None and like.busy_axes else batch


def _plan_unequal(options: Options, batched: tuple[int, ...], counts: tuple[int, ...], rows: int) -> Batch:
    """Choose the microbatches of an evaluation whose replicas have different numbers of rows: each runs its
    own number.

    They are equal parts of training microbatches, which have `rows` rows; only the whole batch is
    distinguished from them, so the schedule may have more.
    """
    own = math.gcd(*counts, rows)
    needed, pieces, p = max(counts) // own, sum(counts) // own, options.mesh.pipeline_ranks
    m = -(-needed // p) * p
    # A schedule from a file lists every microbatch.
    if isinstance(options.schedule, Path) and options.num_microbatches is not None:
        m = options.num_microbatches
        if needed > m:
            fact = f"{max(counts)} rows of a replica are {needed} microbatches of {own}, and the schedule has {m}"
            raise PlanError("eval_step", fact, f"a multiple of {len(counts) * m} rows")
    return Batch(batched, own, m, pieces, own if pieces == 1 else max(own, 2))


def _batched_like(like: Program, leaves: list[Any], batched: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Return the arguments with the batch in dim 0 in another program, as lengths may match by chance."""
    if like.rows * like.num_microbatches * like.mesh.replicas == 1:
        # In a batch of one row, every tensor with one row had the length of the batch.
        return batched
    known = {spec.leaf: spec.batched for spec in like.inputs}
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for spec in like.inputs:
        if spec.batched and spec.leaf in tensors and spec.leaf not in batched:
            fact = f"is {list(leaves[spec.leaf].shape)}, and the batch has {total} rows"
            raise PlanError(spec.name, fact, "as many rows in all that is part of the batch")
    return tuple(i for i in batched if known.get(i, True))


def default_microbatches(rows: int, pipeline_ranks: int) -> int:
    """Return the largest divisor of `rows` that is at most 4 a pipeline rank, a multiple of
    `pipeline_ranks` preferred."""
    fits = [k for k in range(1, min(rows, 4 * pipeline_ranks) + 1) if rows % k == 0]
    return max([k for k in fits if k % pipeline_ranks == 0] or fits)


def resize(
    args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch, rows: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call with `rows` rows: the first of the example, repeated if too few; zeros if it has none."""
    leaves, tree = tree_flatten((args, kwargs))
    for i in batch.batched:
        if not len(leaves[i]):
            leaves[i] = leaves[i].new_zeros((rows, *leaves[i].shape[1:]))
        times = -(-rows // leaves[i].shape[0])
        leaves[i] = leaves[i].repeat(times, *[1] * (leaves[i].dim() - 1))[:rows]
    return tree_unflatten(leaves, tree)  # type: ignore[return-value]


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


def trace_rows(
    model: nn.Module,
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: Batch,
    narrowing: tracing.Narrowing,
    check: bool = True,
) -> Traces:
    """Trace a call with few rows and, if the batch is split, with many: differences depend on the batch.

    With `check`, the trace is compared with the model, if it has values.
    """
    call = resize(args, kwargs, batch, batch.traced_rows)
    how = options.loss_fn, autocast_here(model, options)
    with activity(f"tracing {batch.traced_rows} samples"):
        captured = capture_rows(model, options, args, kwargs, batch, narrowing)
    # Parameters on meta have no values to compare.
    if check and tracing.has_values(model):
        with activity("comparing trace and model"):
            compare_rows(model, options, captured, call, batch, (args, kwargs))
    whole = None
    if batch.pieces > 1:
        with activity(f"tracing {batch.whole_rows} samples"), paused_collection():
            larger = resize(args, kwargs, batch, batch.whole_rows)
            whole = tracing.capture_again(captured, model, *larger, *how)
    traced = tracing.Traced.of(captured, call, *how, options.precision, narrowing.cast)
    return Traces(captured, whole, traced)


@paused_collection()
def capture_rows(
    model: nn.Module,
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: Batch,
    narrowing: tracing.Narrowing,
) -> tracing.Captured:
    """Trace with the rows of a microbatch; an argument that is as long as the batch by chance is the usual
    failure.
    """
    call = resize(args, kwargs, batch, batch.traced_rows)
    autocast = autocast_here(model, options)

    def trace() -> tracing.Captured:
        return tracing.capture(model, *call, options.loss_fn, autocast)

    try:
        return narrowing.settle(trace)
    except TraceError as error:
        # Report a failure of the model itself before blaming rows or traces.
        cause = error.__cause__
        if cause is not None and (own := own_failure(model, options, (args, kwargs))):
            raise own from cause
        rows = tree_flatten((args, kwargs))[0][batch.batched[0]].shape[0]
        # Fewer rows are the cause only if the whole batch can be traced.
        if batch.traced_rows == rows or not _can_trace(model, options, args, kwargs):
            raise
        fact = f"with {batch.traced_rows} of {rows} rows it {error.fact}"
        remedy = (
            f"{divided_remedy(batch, rows)}; or, if it takes rows in groups, two groups in the batch at least"
        )
        raise FewRows(error.site, fact, remedy) from error


def groups_of(
    model: nn.Module, options: Options, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch
) -> Batch | None:
    """Return this batch with two groups in its trace, of the fewest rows that can be traced; None without."""
    for rows in batch.possible_groups:
        call = resize(args, kwargs, batch, rows)
        if _can_trace(model, options, *call):
            # A single group cannot be recognized as one.
            return batch.tracing(math.lcm(2 * rows, batch.rows))
    return None


def compare_rows(
    model: nn.Module,
    options: Options,
    captured: tracing.Captured,
    call: tuple[Any, Any],
    batch: Batch,
    given: tuple[Any, Any],
) -> None:
    """Compare the trace with the model; it may fail on fewer rows than `given` (an indexed table that was
    split by chance).

    A model whose step does not fit on its device is not compared, with a warning.
    """
    try:
        autocast = autocast_here(model, options)
        tracing.compare(model, options.loss_fn, captured.graph, captured.buffers, *call, autocast)
    except AutoptdError:
        raise
    except torch.OutOfMemoryError as error:
        # It may still fit when partitioned, fused or recomputed.
        text = f"the trace is not compared with the model, of which a step with {batch.traced_rows} rows does not fit: "
        warnings.warn(f"model: {text}{str(error).splitlines()[0]}", stacklevel=2)
    except Exception as error:
        fact = f"it cannot be run: {type(error).__name__}: {error}"
        if remedy := narrow_remedy(options, call):
            raise TraceError("model", fact, remedy) from error
        if own := own_failure(model, options, given):
            raise own from error
        fact = f"with {batch.traced_rows} rows {fact}"
        raise TraceError("model", fact, divided_remedy(batch, batch.rows * batch.pieces)) from error


def own_failure(model: nn.Module, options: Options, call: tuple[Any, Any]) -> TraceError | None:
    """Return the error that the model itself raises on a call, None if it runs."""
    autocast = autocast_here(model, options)
    return tracing.own_failure(model, *call, options.loss_fn, autocast, options.precision)


def autocast_here(model: nn.Module, options: Options) -> tracing.Autocast:
    """Return the autocast of a request, for the device of the ranks."""
    device = device_of_ranks(model.parameters(), options.device, options.backend)
    return tracing.autocast_of(model, options.precision, device.type)


def _can_trace(model: nn.Module, options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        tracing.capture(model, args, kwargs, options.loss_fn, autocast_here(model, options))
    except TraceError:
        return False
    return True


def narrow_remedy(options: Options, call: tuple[Any, Any]) -> str:
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


def divided_remedy(batch: Batch, rows: int) -> str:
    """Return the remedy for an argument that is as long as the batch by chance."""
    divided = ", ".join(map(str, batch.batched))
    return (
        f"the first tensor of the call gives the batch; tensors {divided} have {rows} rows and are divided alike: "
        "pass the batch first, and give what is no batch a leading dim of 1"
    )
