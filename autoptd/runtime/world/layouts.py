"""How tensors are laid out for collectives that join or scatter along any dim: torch's own work along the
first.

    whole = in_place_of(gathered, dim=1)        # [t, *x.shape] -> x.shape with dim 1 t times as long
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def fresh(x: Tensor) -> Tensor:
    """Return a contiguous copy that autograd does not know of: a collective may write to it."""
    # Within an autograd function there is nothing to detach from, and the call would cost time.
    if torch.is_grad_enabled():
        x = x.detach()
    return x.clone() if x.is_contiguous() else x.contiguous()


def in_place_of(gathered: Tensor, dim: int) -> Tensor:
    """Join gathered shards [t, ..., n, ...] along `dim`, to [..., t n, ...]: a view if the dims before it are 1."""
    count, *sizes = gathered.shape
    sizes[dim] *= count
    return gathered.movedim(0, dim).reshape(sizes)


def parts_first(x: Tensor, dim: int, count: int, width: int) -> Tensor:
    """Cut x [..., t n, ...] along `dim` into [t, ..., n, ...], contiguous: a view if the dims before it are 1."""
    return x.unflatten(dim, (count, width)).movedim(dim, 0).contiguous()


def as_real(x: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones, which NCCL and gloo can add."""
    return torch.view_as_real(x) if x.is_complex() else x


def sum_in_order(parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Add up what the ranks sent, in the order of ranks and in `dtype`, by default that of the parts."""
    total = parts[0].to(dtype or parts[0].dtype, copy=True, memory_format=torch.contiguous_format)
    for part in parts[1:]:
        total += part
    return total


__all__ = ["as_real", "fresh", "in_place_of", "parts_first", "sum_in_order"]
