"""The head and the cross-entropy as one operator, with the vocabulary split over a group of ranks.

In: x of type R (the same on every rank; its gradient is a partial sum on each, which the caller's f adds up), this
rank's rows of the head's weight, global ids. Out: the loss, of type I. It equals
`vocab_parallel_cross_entropy(F.linear(x, weight), targets, group)`, with the same options and errors, but the logits
of all rows never exist at once: see `kernels/loss.py`.

    loss = vocab_parallel_linear_cross_entropy(x, w.lm_head.weight, targets, tp, size=50257, site="loss")

Each chunk of N rows takes two reductions: of N numbers for the maximum, and of N for each of the sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoptd.errors import PlanError
from autoptd.kernels.loss import can_use_triton, chunked_loss, default_chunk, linear_cross_entropy
from autoptd.kernels.loss_chunks import How, WeightSum
from autoptd.runtime.ops.vocab import local_labels, sharded_loss
from autoptd.runtime.world.world import Group

Tensor = torch.Tensor


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: Group,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    total: Tensor | float | None = None,
    chunk: int | None = None,
    dtype: torch.dtype | None = None,
    wgrad: Callable[[WeightSum], None] | None = None,
    loss_scale: float | None = None,
    size: int = 0,
    site: str = "",
    backend: str = "eager",
) -> Tensor:
    """Return the cross-entropy of the whole logits x weight^T + bias, of x [..., h], weight [n, h] and targets [...].

    `bias` and `class_weight` are this rank's [n]; `size` is V where the group does not divide it (see `vocab.py`). The other
    options are those of `kernels.loss.linear_cross_entropy`.
    """
    if targets.is_floating_point():
        raise PlanError(
            site or "cross_entropy", "targets are class probabilities, not ids", "targets of dtype int64"
        )
    # No reduction between chunks, and ids need not be mapped to columns of this rank.
    if group.size == 1:
        return linear_cross_entropy(
            x,
            weight,
            targets,
            bias=bias,
            class_weight=class_weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            softcap=softcap,
            total=total,
            chunk=chunk,
            dtype=dtype,
            wgrad=wgrad,
            loss_scale=loss_scale,
            backend=backend,
        )
    # The rows of the head's weight are columns of the logits: this rank's n of V.
    columns = len(weight)
    labels = local_labels(targets.reshape(-1), columns, group, ignore_index, size)
    loss = sharded_loss(columns, group, label_smoothing, class_weight, size, site, x.dtype)
    triton = can_use_triton(backend, x, class_weight)
    # The chunk follows from this rank's n, which is equal on all ranks: their reductions must pair up.
    chunk = chunk or default_chunk(columns, x.dtype, x.device)
    how = How(reduction, chunk, softcap, triton, wgrad, loss_scale)
    # Computed in float32 at least, rounded here once.
    return chunked_loss(x, weight, bias, labels, loss, how, total, targets.shape).to(dtype or x.dtype)
