"""Process the logits of a head chunk by chunk, for `kernels.loss`.

In: x [N, h], the head's weight [n, h] and bias, the labels of the rows. Out: the sum of the rows' losses, and
the gradients of x, weight and bias, accumulated over the chunks (`Sums`).

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
    """Hold the options of the chunked loss other than those of `Loss`: see `linear_cross_entropy`."""

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
    """Represent the gradient of a weight as `total` times `scale`, a number in the dtype of the total."""

    weight: Tensor
    total: Tensor
    scale: Tensor

    def add_to(self, grad: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the gradient in `dtype`, accumulated into `grad` in place if given."""
        if grad is not None and grad.dtype == self.total.dtype:
            return grad.addcmul_(self.total, self.scale)
        found = scaled(self.total, self.scale, dtype if grad is None else grad.dtype)
        return found if grad is None else grad.add_(found)


def alone(numbers: Tensor, op: str) -> Tensor:
    return numbers


class Chunk:
    """Hold the logits of some rows, then their softmax, then their gradient, in one buffer."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Labels, loss: Loss, how: How
    ) -> None:
        self.labels, self.loss, self.how, self.dtype = labels, loss, how, x.dtype
        z = linear(x, weight, bias)
        # The Triton kernels upcast on load; torch operators need an upcast copy.
        self.z = z if how.triton else z.to(wide(z.dtype))
        self.slope = None
        if how.softcap is not None:
            # In place: z / c, then tanh of it, then c tanh(z / c). The derivative is 1 - tanh^2.
            self.z.div_(how.softcap).tanh_()
            self.slope = 1.0 - self.z.square()
            self.z.mul_(how.softcap)

    def terms(self) -> Terms:
        if self.how.triton:
            from autoptd.kernels.cross_entropy_triton import terms

            return terms(self.loss, self.z, self.labels)
        return self.loss.shares(self.z, self.labels, out=self.z)

    def gradients(self, terms: Terms, grad: Tensor) -> Tensor:
        """Return the gradient of the logits before the softcap, in the dtype of x.

        `grad` is the gradient of the rows' losses.
        """
        if self.how.triton:
            from autoptd.kernels.cross_entropy_triton import gradients_

            z = gradients_(self.loss, self.z, terms, self.labels, grad)
        else:
            z = self.loss.gradients(self.z, terms, self.labels, grad, out=self.z)
        z = z if self.slope is None else z.mul_(self.slope)
        return z if z.dtype == self.dtype else _rows_like(z, self.dtype).copy_(z)


# Alignment of the rows of logits. Half-precision GEMMs are five times slower on an H100 if rows are not
# aligned to 16 bytes, and GPT-2's vocabulary, 50,257, is odd. 128 is the size of a cache line.
ROW_BYTES = {"cuda": 128}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear(x, weight, bias)` of a matrix x, with rows aligned to ROW_BYTES."""
    if len(weight) * x.element_size() % ROW_BYTES.get(x.device.type, 1) == 0:
        return F.linear(x, weight, bias)
    out = _rows_like(x, x.dtype, len(weight))
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _rows_like(x: Tensor, dtype: torch.dtype, columns: int = 0) -> Tensor:
    """Return an empty matrix with as many rows as x (and columns, by default), aligned to ROW_BYTES."""
    columns = columns or x.shape[1]
    step = max(1, ROW_BYTES.get(x.device.type, 0) // dtype.itemsize)
    return x.new_empty((len(x), -(-columns // step) * step), dtype=dtype)[:, :columns]


class Wanted(NamedTuple):
    """Hold which gradients of x, weight and bias are needed, and the weight if autograd does not see it."""

    x: bool
    weight: bool
    bias: bool
    leaf: Tensor | None = None


class Sums:
    """Accumulate the needed gradients of x, weight and bias over the chunks."""

    def __init__(self, wanted: Wanted, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.wants_weight, self.wants_bias = wanted.weight, bias is not None and wanted.bias
        self.x = torch.empty_like(x) if wanted.x else None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def add(self, at: slice, dz: Tensor, x: Tensor, weight: Tensor) -> None:
        if self.x is not None:
            # z = x w^T: dx = dz w for these rows; dw = dz^T x, summed over all rows.
            torch.mm(dz, weight, out=self.x[at])
        if self.wants_weight:
            self.weight = add_mm(self.weight, dz.t(), x[at], wide(weight.dtype))
        if self.wants_bias:
            each = dz.sum(0, dtype=wide(dz.dtype))
            self.bias = each if self.bias is None else self.bias.add_(each)


class Inputs(NamedTuple):
    """Hold the operands of the logits, and the labels of their rows."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Labels

    def chunks(self, size: int) -> Iterator[slice]:
        return (slice(start, start + size) for start in range(0, len(self.x), size))


def in_turn(
    inputs: Inputs, loss: Loss, how: How, expected: Tensor, sums: Sums | None
) -> tuple[Tensor, Tensor]:
    """Return the sums of the rows' losses and of their shares; add the gradients to `sums`."""
    x, weight, bias, labels = inputs
    result, share = x.new_zeros((2,), dtype=wide(x.dtype))
    for at in inputs.chunks(how.chunk):
        chunk = Chunk(x[at], weight, bias, labels.rows(at), loss, how)
        terms = chunk.terms()
        result = result + loss.of_rows(terms, chunk.labels).sum()
        share = share + terms.share.sum()
        # Compute gradients while the chunk's logits exist: backward would have to recompute them.
        if sums is not None:
            each = torch.ones_like(terms.total).mul_(expected)
            sums.add(at, chunk.gradients(terms, each), x, weight)
        # Free the chunk before the next one is allocated.
        del chunk
    return result, share


def at_once(
    inputs: Inputs, loss: Loss, how: How, expected: Tensor, sums: Sums | None
) -> tuple[Tensor, Tensor]:
    """Do the same with one kernel per chunk where all columns are local.

    The kernel reads a row for its loss and overwrites it with the gradient. For small models the two dozen
    small operators that `in_turn` launches per chunk take longer on the host than on the device.
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
