"""Divide the rows of a call into replicas and microbatches.

In: the call of a step, and the options. Out: a `Batch`. The batch is dim 0 of the first tensor, and of all
tensors of the same length (`runtime/step/microbatches.py` divides the calls of a run by the same rule).

    batch = plan_batch(options, (ids, targets), {}, replicas=2)
    batch.rows, batch.num_microbatches          # of a microbatch, of a replica
    plan_batch(options, (ids,), {}, replicas=2, like=program, counts=(2, 1))    # an evaluation of 3 rows
    args, kwargs = resize((ids, targets), {}, batch, batch.traced_rows)         # the call to trace
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autoptd.compat import tree_flatten, tree_unflatten
from autoptd.errors import PlanError
from autoptd.options import Options
from autoptd.program.program import Program
from autoptd.runtime.step.microbatches import batch_rows

# Rows of two pairs, and of the largest group that is searched for.
PAIRS, LARGEST_GROUP = 4, 64


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
            fact = f"the global batch of {total} has {share} for each replica, and a microbatch needs at least one"
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
            raise PlanError(spec.name, fact, "the same number of rows in every tensor of the batch")
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
