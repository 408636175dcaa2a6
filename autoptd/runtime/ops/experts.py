"""Sort rows by expert once, multiply them group by group, and restore their order once.

In: rows of tokens, and the expert that each has chosen. Out: products, without copying a matrix or dropping a
token. With a group of ranks that hold different experts, each rank takes and multiplies only the rows of its
experts; all other rows have zero gradients, whatever they or the matrices of their experts hold.

    order, ends = by_expert(ids, 8, tp)
    rows = take_rows(x, order, 2)
    experts = put_rows(grouped_mm(rows, weight, ends), order, len(ids))

Every gradient is made in a fixed order, so that it is the same to the bit each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoptd.ir.expert_mm import outer_products, products_of_groups, sorted_by_expert
from autoptd.runtime.world.world import Group


def by_expert(ids: Tensor, experts: int, group: Group | None = None) -> tuple[Tensor, Tensor]:
    """Return the order of rows sorted by expert, and the end offset of each expert's rows.

    With a group, only those of this rank's experts: the i-th rank has the i-th chunk of `experts`.
    """
    each = experts // (group.size if group is not None else 1)
    if ids.is_meta:
        # All rows may have chosen experts of one rank.
        return torch.empty_like(ids), ids.new_empty(each)
    order, ends = sorted_by_expert(ids, experts)
    if group is None or group.size == 1:
        return order, ends
    first = group.index * each
    # The host waits for both.
    start, stop = (int(ends[k - 1]) if k else 0 for k in (first, first + each))
    return order[start:stop], ends[first : first + each] - start


def take_rows(x: Tensor, order: Tensor, choices: int = 1) -> Tensor:
    """Return the rows of x in an order, where x has a row for `choices` of these."""
    return _Taken.apply(x, order, choices)  # type: ignore[no-any-return, no-untyped-call]


def put_rows(x: Tensor, order: Tensor, count: int) -> Tensor:
    """Return `count` rows with those of x in the places that `order` says, and zeros elsewhere."""
    return _Put.apply(x, order, count)  # type: ignore[no-any-return, no-untyped-call]


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each group of rows, which ends there, with its matrix of [e, i, o]."""
    return _Product.apply(x, weight, ends)  # type: ignore[no-any-return, no-untyped-call]


def expert_rows(table: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Return the row of `table` of each row's expert, for the rows in `order`."""
    return _Rows.apply(table, order, ends)  # type: ignore[no-any-return, no-untyped-call]


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.rows, ctx.choices = len(x), choices
        return x[order if choices == 1 else order // choices]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        placed = _placed(grad, order, ctx.rows * ctx.choices)
        if ctx.choices > 1:
            placed = placed.unflatten(0, (ctx.rows, ctx.choices)).sum(1)
        return placed, None, None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(order)
        return _placed(x, order, count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad[order], None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return products_of_groups(x, weight, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        # Of a sum it is a number, expanded.
        grad = grad.contiguous()
        for_x, for_weight, _ = ctx.needs_input_grad
        of_x = products_of_groups(grad, weight.transpose(1, 2), ends) if for_x else None
        of_weight = outer_products(x, grad, ends, weight) if for_weight else None
        return of_x, of_weight, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        ctx.like = table.shape
        if table.is_meta:
            return table.new_empty(len(order), *table.shape[1:])
        return table.repeat_interleave(_counts(ends), 0, output_size=len(order))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (ends,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.like)
        start = 0
        for k, end in enumerate(ends.tolist() if not grad.is_meta else ()):
            out[k] = grad[start:end].sum(0)
            start = end
        return out, None, None


def _counts(ends: Tensor) -> Tensor:
    return torch.diff(ends, prepend=ends.new_zeros(1))


def _placed(x: Tensor, order: Tensor, count: int) -> Tensor:
    """Return `count` rows, with zeros where there is none of x."""
    if x.is_meta:
        return x.new_empty(count, *x.shape[1:])
    make = x.new_empty if len(x) == count else x.new_zeros
    out = make(count, *x.shape[1:])
    out[order] = x
    return out
