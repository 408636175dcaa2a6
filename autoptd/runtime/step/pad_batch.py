"""Pad the batches of a run to a few lengths, and to one number of rows.

In: the leaves of a call, shorter than a bucket or with fewer rows than the first program's. Out: leaves of
the sizes of a bucket. Sequences are padded at the end: labels with the `ignore_index` of the loss, other
arguments with 0 or the requested value. Missing rows are copies of real ones (a row without tokens would have
nothing to attend to), with all labels ignored, and with only padding in *blank* arguments, such as the
model's attention mask.

    padding = BatchPadding(program, lengths=(512, 1024), labels={"labels": -100}, pad={}, replicas=1)
    length, rows = padding.measure(leaves)
    leaves = padding.padded(leaves, bucket, padding.rows)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F

from autoptd.errors import PlanError
from autoptd.program.program import Program
from autoptd.program.specs import InputSpec
from autoptd.runtime.step.microbatches import expected_shape

SITE = "shapes: padding"
# Number of arguments that are tried as blank in added rows.
MAX_BLANKS = 4
# The fractional parts of its multiples are evenly spread.
GOLDEN = 0.6180339887498949


class BatchPadding:
    """Pad the calls of a run, whose arguments are those of its first program.

    `labels` has the `ignore_index` of each argument with labels, `pad` the requested padding values, both by name. A call
    has the rows of `replicas` replicas.
    """

    def __init__(
        self,
        first: Program,
        lengths: Sequence[int],
        labels: Mapping[str, int],
        pad: Mapping[str, float],
        replicas: int,
    ) -> None:
        self.lengths, self.labels = tuple(lengths), labels
        self._specs, self._blocks = first.inputs, first.row_blocks
        if unknown := sorted(set(pad) - {spec.name for spec in first.inputs}):
            names = ", ".join(spec.name for spec in first.inputs)
            raise PlanError(f"Buckets(pad={dict(pad)})", f"the model has no {unknown[0]}", f"of {names}")
        self._values = {**dict.fromkeys((spec.name for spec in first.inputs), 0), **labels, **pad}
        self._shapes = {spec.name: expected_shape(first, spec, replicas) for spec in first.inputs}
        self._lead = lead_of(first)
        self._length = self._shapes[self._lead.name][1]
        # The rows of a call.
        self.rows = self._shapes[self._lead.name][0]

    def dims(self, spec: InputSpec) -> list[int]:
        """Return the dims of an argument that are as long as the batch's rows: `ids` has one, a mask of pairs has two."""
        sizes = list(enumerate(self._shapes[spec.name]))
        return [dim for dim, size in sizes if size == self._length and not (spec.batched and dim == 0)]

    def measure(self, leaves: Sequence[Any]) -> tuple[int, int]:
        """Return the length and the rows of a call; PlanError if it is too large, or if its arguments do not match."""
        lead = leaves[self._lead.leaf].shape
        rows, length = int(lead[0]), int(lead[1])
        for spec in self._specs:
            shape, dims = tuple(leaves[spec.leaf].shape), self.dims(spec)
            wanted = list(self._shapes[spec.name])
            for dim in dims:
                wanted[dim] = length
            if spec.batched:
                wanted[0] = rows
            if shape != tuple(wanted):
                fact = f"{spec.name} is {list(shape)}, but should be {wanted} where {self._lead.name} is {list(lead)}"
                remedy = "tensors of one length; or example_inputs in which no other size equals the length by chance"
                raise PlanError("step", fact, remedy)
        if not 0 < length <= self.lengths[-1]:
            fact = f"{self._lead.name} has {length} tokens, but the largest bucket has {self.lengths[-1]}"
            longer = (
                f"cut it to {self.lengths[-1]} tokens, or example_inputs (and autoptd.Buckets) of {length}"
            )
            raise PlanError("step", fact, longer if length else "a batch of at least one token")
        if not 0 < rows <= self.rows:
            fact = f"{self._lead.name} has {rows} rows, but the batch of example_inputs has {self.rows}"
            raise PlanError("step", fact, "at least one row, and at most as many as example_inputs has")
        if rows < self.rows:
            self._check_rows(rows)
        return length, rows

    def length_of(self, leaves: Sequence[Any]) -> int:
        """Return how many tokens a row of a call has."""
        return int(leaves[self._lead.leaf].shape[1])

    def rows_of(self, leaves: Sequence[Any]) -> int:
        """Return the rows of a call."""
        return int(leaves[self._lead.leaf].shape[0])

    def _check_rows(self, rows: int) -> None:
        """Raise PlanError where no rows can be added."""
        if self._blocks > 1:
            fact = f"{self._lead.name} has {rows} of {self.rows} rows, and rows in {self._blocks} blocks cannot be padded"
            raise PlanError("step", fact, "drop a smaller last batch (DataLoader(..., drop_last=True))")

    def possible_blanks(self) -> list[tuple[str, ...]]:
        """Return which arguments may be blank in added rows: the fewest first, in the same order on every rank."""
        others = [spec.name for spec in self._specs if spec.batched and spec is not self._lead]
        others = [name for name in others if name not in self.labels][:MAX_BLANKS]
        counts = range(0 if self.labels else 1, len(others) + 1)
        return [names for count in counts for names in combinations(others, count)]

    def bucket(self, length: int) -> int:
        """Return the smallest bucket that holds `length` tokens."""
        return next(bucket for bucket in self.lengths if bucket >= length)

    def padded(self, leaves: Sequence[Any], length: int, rows: int, blank: Collection[str] = ()) -> list[Any]:
        """Return the leaves of a call padded to `length` tokens and `rows` rows; added rows of `blank`
        arguments are padding.
        """
        given = list(leaves)
        have = leaves[self._lead.leaf].shape[0]
        for spec in self._specs:
            x, value = given[spec.leaf], self._values[spec.name]
            for dim in self.dims(spec):
                more = [0, 0] * (x.dim() - 1 - dim) + [0, length - x.shape[dim]]
                x = F.pad(x, more, value=value) if length > x.shape[dim] else x
            if spec.batched and rows > have:
                x = torch.cat([x, self._more_rows(spec, x, rows - have, blank)])
            given[spec.leaf] = x
        return given

    def _more_rows(
        self, spec: InputSpec, x: torch.Tensor, count: int, blank: Collection[str]
    ) -> torch.Tensor:
        if spec.name in self.labels or spec.name in blank:
            return x.new_full((count, *x.shape[1:]), self._values[spec.name])
        return x[torch.arange(count, device=x.device) % x.shape[0]]

    def varied(self, leaves: Sequence[Any]) -> list[list[Any]]:
        """Return calls with other values, which show effects of padding that the given values may hide.

        The list is empty if there is nothing to vary.

        Weights that are all 1 have the same mean for any number of rows, and appended zeros do not change the
        maximum of positive numbers. So masks cover fewer tokens in every row; other floats are all negative
        in one call, all positive in the next, and all different; integers differ from the padding. Labels are
        unchanged.
        """
        calls: list[list[Any]] = []
        for sign in (-1.0, 1.0):
            call = list(leaves)
            for spec in self._specs:
                if spec.batched and spec.name not in self.labels:
                    call[spec.leaf] = _varied(leaves[spec.leaf], sign, self._values[spec.name])
            is_known = any(_are_equal(call, other) for other in (leaves, *calls))
            calls += [] if is_known else [call]
        return calls

    def with_other_tokens(self, padded: Sequence[Any], length: int, rows: int) -> list[Any]:
        """Return a call padded from `length` tokens and `rows` rows, with copies of real tokens as padding.

        Masks, positions and labels are unchanged.
        """
        given, x = list(padded), padded[self._lead.leaf].clone()
        x[:, length:] = x[:, torch.arange(x.shape[1] - length, device=x.device) % length]
        x[rows:] = x[(torch.arange(x.shape[0] - rows, device=x.device) + 1) % rows]
        given[self._lead.leaf] = x
        return given

    def cut(self, leaves: Sequence[Any], length: int, rows: int) -> list[Any]:
        """Return the leaves of a call with fewer tokens and rows: its first ones."""
        given = list(leaves)
        for spec in self._specs:
            x = given[spec.leaf]
            for dim in self.dims(spec):
                x = x.narrow(dim, 0, length)
            # As a loader makes them: models may ask for views.
            given[spec.leaf] = (x[:rows] if spec.batched else x).contiguous()
        return given


def _varied(x: torch.Tensor, sign: float, padding: float) -> torch.Tensor:
    """Return other values for an argument, of `sign` unless it is a mask; non-finite values are unchanged."""
    if bool(((x == 0) | (x == 1)).all()) and bool((x != 0).any()):
        return torch.where(_covered(x), x, 0)
    if not x.is_floating_point() and not bool((x != 0).any()):
        return torch.where(_covered(x), x, 1)
    if not x.is_floating_point():
        return torch.where(x == padding, x.max(), x)
    spread = 0.5 + (torch.arange(x.numel(), device=x.device) * GOLDEN) % 1
    return torch.where(x.isfinite(), sign * (x.abs() + 1) * spread.view(x.shape).to(x.dtype), x)


def _covered(mask: torch.Tensor) -> torch.Tensor:
    """Return which entries stay 1: in row i all but the last i; with one entry per row, every second one."""
    rows = torch.arange(mask.shape[0], device=mask.device)
    if mask.dim() == 1:
        return rows % 2 == 0
    if mask.dim() > 2:
        # A mask of pairs: a token that attends to nothing would be NaN.
        return torch.ones_like(mask, dtype=torch.bool)
    places = torch.arange(mask.shape[1], device=mask.device)
    return (places < mask.shape[1] - rows[:, None]) | (places == 0)


def _are_equal(call: Sequence[Any], other: Sequence[Any]) -> bool:
    pairs = zip(call, other, strict=True)
    return all(x is y or (isinstance(x, torch.Tensor) and torch.equal(x, y)) for x, y in pairs)


def lead_of(first: Program) -> InputSpec:
    """Return the argument whose dim 1 is the length of a batch; PlanError where there is none."""
    for spec in first.inputs:
        if spec.batched and len(spec.shape) > 1:
            return spec
    fact = "no argument has a dim for the length"
    raise PlanError(SITE, fact, "shapes='exact'")
