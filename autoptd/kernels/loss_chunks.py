"""The passes over the logits of a head, some rows at a time: what `kernels.loss` does with each chunk of them.

In: x [N, h], the head's weight [n, h] and bias, the labels of the rows. Out: the sum of the rows' losses, and the
gradients of x, weight and bias, summed up chunk by chunk (`Sums`).

    result, share = in_turn(Inputs(x, weight, bias, labels), loss, how, expected, sums)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from autoptd.compat import add_mm
from autoptd.errors import InternalError
from autoptd.kernels.cross_entropy import Labels, Loss, Terms
from autoptd.kernels.forms import scaled, wide

Tensor = torch.Tensor


@dataclass(frozen=True)
class How:
    """What is asked of the chunked loss besides the loss of rows: see `linear_cross_entropy`."""

    reduction: str
    chunk: int
    softcap: float | None = None
    triton: bool = False
    wgrad: Callable[[WeightSum], None] | None = None
    loss_scale: float | None = None

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum", "none") or self.chunk < 1:
            raise InternalError(
                "linear_cross_entropy", f"cannot reduce by {self.reduction!r}, {self.chunk} rows at a time"
            )


class WeightSum(NamedTuple):
    """The gradient of a weight: `total` times `scale`, a number in the dtype of the total."""

    weight: Tensor
    total: Tensor
    scale: Tensor

    def add_to(self, grad: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return it in `dtype`, added to `grad` in its place if there is one."""
        if grad is not None and grad.dtype == self.total.dtype:
            return grad.addcmul_(self.total, self.scale)
        found = scaled(self.total, self.scale, dtype if grad is None else grad.dtype)
        return found if grad is None else grad.add_(found)


def alone(numbers: Tensor, op: str) -> Tensor:
    return numbers


class Chunk:
    """The logits of some rows, in the dtype of the loss: then their softmax, then their gradient, in one
    place.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Labels, loss: Loss, how: How
    ) -> None:
        self.labels, self.loss, self.how, self.dtype = labels, loss, how, x.dtype
        z = linear(x, weight, bias)
        # Triton's passes widen each element as they read it; torch's operators need a wide copy.
        self.z = z if how.triton else z.to(wide(z.dtype))
        self.slope = None
        if how.softcap is not None:
            # In the memory of z: z / c, then tanh of it, then c tanh(z / c). Its slope is 1 - tanh^2.
            self.z.div_(how.softcap).tanh_()
            self.slope = 1.0 - self.z.square()
            self.z.mul_(how.softcap)

    def terms(self) -> Terms:
        if self.how.triton:
            from autoptd.kernels.cross_entropy_triton import terms

            return terms(self.loss, self.z, self.labels)
        return self.loss.shares(self.z, self.labels, out=self.z)

    def gradients(self, terms: Terms, grad: Tensor) -> Tensor:
        """Return the gradient of the logits before the softcap, in the dtype of x, for `grad`, that of the
        rows' losses.
        """
        if self.how.triton:
            from autoptd.kernels.cross_entropy_triton import gradients_

            z = gradients_(self.loss, self.z, terms, self.labels, grad)
        else:
            z = self.loss.gradients(self.z, terms, self.labels, grad, out=self.z)
        z = z if self.slope is None else z.mul_(self.slope)
        return z if z.dtype == self.dtype else _rows_like(z, self.dtype).copy_(z)


# Rows of logits begin at multiples of so many bytes. In half precision products of matrices whose rows do not begin at
# multiples of 16 are five times as slow on an H100: GPT-2's vocabulary, 50,257, is odd. 128 is a line of its cache.
ROW_BYTES = {"cuda": 128}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear(x, weight, bias)` of a matrix x, in rows that begin at multiples of ROW_BYTES."""
    if len(weight) * x.element_size() % ROW_BYTES.get(x.device.type, 1) == 0:
        return F.linear(x, weight, bias)
    out = _rows_like(x, x.dtype, len(weight))
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _rows_like(x: Tensor, dtype: torch.dtype, columns: int = 0) -> Tensor:
    """Return an empty matrix with the rows of x, by default the columns too, that begin at multiples of ROW_BYTES."""
    columns = columns or x.shape[1]
    step = max(1, ROW_BYTES.get(x.device.type, 0) // dtype.itemsize)
    return x.new_empty((len(x), -(-columns // step) * step), dtype=dtype)[:, :columns]


class Wanted(NamedTuple):
    """Whether the gradients of x, weight and bias are wanted.

    The weight itself, where autograd does not see it.
    """

    x: bool
    weight: bool
    bias: bool
    leaf: Tensor | None = None


class Sums:
    """The gradients of x, weight and bias, of those that are wanted, summed up chunk by chunk."""

    def __init__(self, wanted: Wanted, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.wants_weight, self.wants_bias = wanted.weight, bias is not None and wanted.bias
        self.x = torch.empty_like(x) if wanted.x else None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def add(self, at: slice, dz: Tensor, x: Tensor, weight: Tensor) -> None:
        if self.x is not None:
            # z = x w^T: dx = dz w, of these rows; dw = dz^T x, summed over all rows.
            torch.mm(dz, weight, out=self.x[at])
        if self.wants_weight:
            self.weight = add_mm(self.weight, dz.t(), x[at], wide(weight.dtype))
        if self.wants_bias:
            each = dz.sum(0, dtype=wide(dz.dtype))
            self.bias = each if self.bias is None else self.bias.add_(each)


class Inputs(NamedTuple):
    """What the logits are made of, and the labels of their rows."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Labels

    def chunks(self, size: int) -> Iterator[slice]:
        return (slice(start, start + size) for start in range(0, len(self.x), size))


def in_turn(
    inputs: Inputs, loss: Loss, how: How, expected: Tensor, sums: Sums | None
) -> tuple[Tensor, Tensor]:
    """Return the sum of the rows' losses and that of their shares; add the gradients to `sums`."""
    x, weight, bias, labels = inputs
    result, share = x.new_zeros((2,), dtype=wide(x.dtype))
    for at in inputs.chunks(how.chunk):
        chunk = Chunk(x[at], weight, bias, labels.rows(at), loss, how)
        terms = chunk.terms()
        result = result + loss.of_rows(terms, chunk.labels).sum()
        share = share + terms.share.sum()
        # Now, while the chunk's logits are at hand: backward would have to compute them again.
        if sums is not None:
            each = torch.ones_like(terms.total).mul_(expected)
            sums.add(at, chunk.gradients(terms, each), x, weight)
        # Free it before the next chunk is allocated.
        del chunk
    return result, share


def at_once(
    inputs: Inputs, loss: Loss, how: How, expected: Tensor, sums: Sums | None
) -> tuple[Tensor, Tensor]:
    """Do the same where all columns are here: a kernel reads a row for its loss and leaves its gradient there.

    Of small models a chunk's small operators, two dozen above, take the host more time than the device.
    """
    from autoptd.kernels.cross_entropy_triton import whole_rows_

    x, weight, bias, labels = inputs
    losses = x.new_empty((2 if loss.smoothing else 1, len(x)), dtype=wide(x.dtype))
    hard, soft = 1.0 - loss.smoothing, loss.smoothing / loss.classes
    factors = (expected * hard, expected * soft) if loss.smoothing else (expected, expected)
    for at in inputs.chunks(how.chunk):
        z = linear(x[at], weight, bias)
        whole_rows_(loss, z, labels.rows(at), losses[:, at], None if sums is None else factors)
        if sums is not None:
            sums.add(at, z, x, weight)
        del z
    parts = losses.sum(1)
    result = parts[0] * hard + parts[1] * soft if loss.smoothing else parts[0]
    return result, (~labels.ignored).sum(dtype=wide(x.dtype))
