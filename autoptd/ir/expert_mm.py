"""Products of rows with the matrices of their experts, the core of a mixture of experts.

In: rows, the matrices of all experts [e, i, o], and the expert of each row. Out: [s, o]; rows are independent
of each other.

    y = torch.ops.autoptd.grouped_mm(x, weight, ends)      # sorted: the rows of expert k end at ends[k]
    y = torch.ops.autoptd.expert_mm(x, weight, ids)        # in any order: y[k] = x[k] @ weight[ids[k]]

`GroupedProducts` replaces torch's grouped product, which only traces in bfloat16, with the first one;
`trace/experts.py` turns it into the second one, whose rows may come from any microbatch. No matrix is copied:
rows are sorted by expert, multiplied group by group, and put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NAME = "autoptd.expert_mm"


class GroupedProducts(TorchFunctionMode):
    """Call `product` of rows, matrices and ends in place of torch's grouped product, if `wanted` says so."""

    def __init__(self, product: Callable[..., Tensor], wanted: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.product, self.wanted = product, wanted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "_grouped_mm":
            return func(*args, **(kwargs or {}))
        return self._of(func, *args, **(kwargs or {}))

    def _of(self, func: Any, x: Tensor, other: Tensor, offs: Tensor | None = None, **rest: Any) -> Tensor:
        is_plain = x.dim() == 2 and other.dim() == 3 and offs is not None
        if is_plain and self.wanted(x) and all(given is None for given in rest.values()):
            return self.product(x, other, offs)
        return func(x, other, offs=offs, **rest)  # type: ignore[no-any-return]


@torch.library.custom_op("autoptd::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return [s, o] from rows [s, i] sorted by group, matrices [e, i, o], and the end of each group's rows
    [e].
    """
    return products_of_groups(x, weight, ends)


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("autoptd::grouped_mm_backward", mutates_args=())
def grouped_mm_backward(grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and matrices."""
    return products_of_groups(grad, weight.transpose(1, 2), ends), outer_products(x, grad, ends, weight)


@grouped_mm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _grouped_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return (*grouped_mm_backward(grad, *ctx.saved_tensors), None)


@torch.library.custom_op("autoptd::expert_mm", mutates_args=())
def expert_mm(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Return [s, o] from rows [s, i], matrices [e, i, o] and the expert of each row [s], from 0 to e - 1."""
    order, ends = sorted_by_expert(ids, len(weight))
    out = x.new_empty(len(x), weight.shape[2])
    out[order] = products_of_groups(x[order], weight, ends)
    return out


@expert_mm.register_fake
def _(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("autoptd::expert_mm_backward", mutates_args=())
def expert_mm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, ids: Tensor, for_x: bool, for_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and matrices; one that is not needed is empty."""
    order, ends = sorted_by_expert(ids, len(weight))
    sorted_grad = grad[order]
    of_x, of_weight = x.new_empty(0), weight.new_empty(0)
    if for_x:
        of_x = torch.empty_like(x)
        of_x[order] = products_of_groups(sorted_grad, weight.transpose(1, 2), ends)
    if for_weight:
        of_weight = outer_products(x[order], sorted_grad, ends, weight)
    return of_x, of_weight


@expert_mm_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, ids: Tensor, for_x: bool, for_weight: bool
) -> tuple[Tensor, Tensor]:
    of_x = torch.empty_like(x) if for_x else x.new_empty(0)
    return of_x, weight.new_empty(weight.shape) if for_weight else weight.new_empty(0)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    for_x, for_weight = ctx.needs_input_grad[:2]
    of_x, of_weight = expert_mm_backward(grad, *ctx.saved_tensors, for_x, for_weight)
    return of_x if for_x else None, of_weight if for_weight else None, None


expert_mm.register_autograd(_backward, setup_context=_setup)
grouped_mm.register_autograd(_grouped_backward, setup_context=_setup)


def sorted_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the order that sorts rows by expert, and the end of each expert's rows."""
    return ids.argsort(stable=True), torch.bincount(ids, minlength=experts).cumsum(0)


def _is_fast(x: Tensor, other: Tensor) -> bool:
    """Tell whether torch multiplies all groups in one kernel; otherwise one by one, and the host waits for
    their sizes.
    """
    if not x.is_cuda or x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    # Rows and columns must start at multiples of 16 bytes.
    return not any(size % 8 for size in (*x.shape, *other.shape[-2:]))


def products_of_groups(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each group of rows with its matrix."""
    if _is_fast(x, weight):
        return torch.nn.functional.grouped_mm(x, weight, offs=ends.to(torch.int32))
    if x.is_meta:
        return x.new_empty(len(x), weight.shape[2])
    # Rows after the last group belong to no expert.
    out = x.new_zeros(len(x), weight.shape[2])
    start = 0
    for end, matrix in zip(ends.tolist(), weight, strict=True):
        if end > start:
            torch.mm(x[start:end], matrix, out=out[start:end])
        start = end
    return out


def outer_products(x: Tensor, grad: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of every matrix in `weight`, with its strides: zero if no row chose the expert."""
    if _is_fast(x, grad):
        return torch.nn.functional.grouped_mm(x.t(), grad, offs=ends.to(torch.int32))
    # For a transposed parameter the gradient is transposed too, so that accumulation needs no strided copy.
    out = torch.empty_like(weight, dtype=grad.dtype)
    if x.is_meta:
        return out
    start = 0
    for end, matrix in zip(ends.tolist(), out, strict=True):
        torch.mm(x[start:end].t(), grad[start:end], out=matrix)
        start = end
    return out
