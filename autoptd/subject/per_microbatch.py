"""Mark an auxiliary loss that is computed for each microbatch separately, as a load-balancing loss is in
Megatron.

In: a value that a model computes from its rows, and adds to its loss. Out: the same value. With several
microbatches or replicas, each computes it from its own rows, and the loss of a step has their mean. So it
depends on how the batch is divided, unlike any other part of a loss. On one device and in one microbatch,
nothing changes.

    balance = experts * (chosen.mean(0) * probs.mean(0)).sum()
    loss = loss + 0.01 * autoptd.per_microbatch(balance)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

Tensor = torch.Tensor
# Replaces the operator while `verify` runs the unmodified model.
_INSTEAD: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("instead", default=None)


def per_microbatch(x: Tensor) -> Tensor:
    """Return x, a value of the rows at hand: every microbatch computes its own, and a step's loss has their
    mean.

    It must not carry the batch any more; values that only it reads may mix the rows of a microbatch by sums
    and means.
    """
    instead = _INSTEAD.get()
    return _mark(x) if instead is None else instead(x)  # type: ignore[no-any-return]


@contextmanager
def marking(instead: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Call `instead` of every marked value, in place of marking it."""
    token = _INSTEAD.set(instead)
    try:
        yield
    finally:
        _INSTEAD.reset(token)


@torch.library.custom_op("autoptd::per_microbatch", mutates_args=())
def _mark(x: Tensor) -> Tensor:
    return x.clone()


@_mark.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad


_mark.register_autograd(_backward)
