"""Find the scalar loss in what a model returns, so that the loss is the only output of the traced graph.

Accepted: a scalar, a tuple or list with exactly one scalar in it (`(logits, loss)`), a mapping or output
object with `.loss`, or `loss_fn(output, targets)` with `targets=` passed to the call. A tensor with one entry,
such as [1], counts as a scalar if there is no other, as in `backward()`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoptd.compat import tree_leaves
from autoptd.errors import TraceError

REMEDY = "return (output, loss) or an object with .loss from forward, or pass loss_fn= and targets="


class WithLoss(nn.Module):
    """Wrap the model and its loss: forward takes the model's arguments and returns only the scalar loss."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn
        # nn.Module.__init__ sets it to True.
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.loss_fn is None:
            return find_loss(self.model(*args, **kwargs), lambda: targets_left_out(self.model, args, kwargs))
        if "targets" not in kwargs:
            raise TraceError(
                "step", "loss_fn is given, but the call has no targets", "pass targets= with the inputs"
            )
        targets = kwargs.pop("targets")
        return find_loss(self.loss_fn(self.model(*args, **kwargs), targets))


def targets_left_out(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Return the names of targets that are missing in this call: without them a model returns no loss."""
    parameters = inspect.signature(model.forward).parameters
    given = {*list(parameters)[: len(args)], *kwargs}
    rest = [each.name for each in parameters.values() if each.default is None and each.name not in given]
    return [name for name in rest if "label" in name or "target" in name]


def find_loss(output: Any, left_out: Callable[[], Sequence[str]] = tuple) -> torch.Tensor:
    """Return the scalar loss in `output`, 0-d; TraceError when there is none or more than one.

    `left_out` returns the targets that the call has omitted.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if is_single(named):
        return as_scalar(named)
    singles = [leaf for leaf in tree_leaves(output) if is_single(leaf)]
    scalars = [leaf for leaf in singles if leaf.dim() == 0] or singles
    if len(scalars) == 1:
        return as_scalar(scalars[0])
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    fact = "no loss found" if not scalars else f"{len(scalars)} scalars found, so the loss is ambiguous"
    names = left_out() if not scalars else ()
    remedy = f"pass {'= or '.join(names)}= in example_inputs; else " if names else ""
    raise TraceError("output of the model", f"{fact}: it returns tensors of shapes {shapes}", remedy + REMEDY)


def is_single(leaf: Any) -> bool:
    """Tell whether this is a tensor with one entry and a gradient."""
    return isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and leaf.is_floating_point()


def as_scalar(loss: torch.Tensor) -> torch.Tensor:
    """Return a tensor with one entry as one without dims."""
    return loss.reshape(()) if loss.dim() else loss
