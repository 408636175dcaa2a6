"""Find the scalar loss in what a model returns, so that the loss is the only output of the traced graph.

Accepted: a scalar, a tuple or list with exactly one scalar in it (`(logits, loss)`), a mapping or output
object with `.loss`, or `loss_fn(output, targets)` with `targets=` passed to the call. A tensor with one entry,
such as [1], is a scalar where there is no other, as it is for `backward()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autoptd.compat import tree_leaves
from autoptd.errors import TraceError

REMEDY = "return (output, loss) or an object with .loss from forward, or pass loss_fn= and targets="


class WithLoss(nn.Module):
    """The model followed by its loss: forward takes the call of the model and returns the scalar loss alone."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn
        # nn.Module.__init__ sets it to True.
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.loss_fn is None:
            return find_loss(self.model(*args, **kwargs))
        if "targets" not in kwargs:
            raise TraceError(
                "step", "loss_fn is given but the call has no targets", "pass targets= beside the inputs"
            )
        targets = kwargs.pop("targets")
        return find_loss(self.loss_fn(self.model(*args, **kwargs), targets))


def find_loss(output: Any) -> torch.Tensor:
    """Return the scalar loss in `output`, 0-d; TraceError when there is none or more than one."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if is_single(named):
        return as_scalar(named)
    singles = [leaf for leaf in tree_leaves(output) if is_single(leaf)]
    scalars = [leaf for leaf in singles if leaf.dim() == 0] or singles
    if len(scalars) == 1:
        return as_scalar(scalars[0])
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    fact = "no loss found" if not scalars else f"{len(scalars)} scalars found, so the loss is ambiguous"
    raise TraceError("output of the model", f"{fact}: it returns tensors of shapes {shapes}", REMEDY)


def is_single(leaf: Any) -> bool:
    """Tell whether this is a tensor with one entry, which has a gradient."""
    return isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and leaf.is_floating_point()


def as_scalar(loss: torch.Tensor) -> torch.Tensor:
    """Return a tensor with one entry as one without dims."""
    return loss.reshape(()) if loss.dim() else loss
