"""Find the scalar loss in what a model returns, so that the loss is the only output of the traced graph.

Accepted: a scalar, a tuple or list with exactly one scalar in it (`(logits, loss)`), a mapping or output
object with `.loss`, or `loss_fn(output, targets)` with `targets=` passed to the call. A tensor with one entry,
such as [1], counts as a scalar if there is no other, as in `backward()`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoptd.compat import tree_leaves
from autoptd.errors import TraceError, a_type
from autoptd.ir.outputs import keep_output

REMEDY = "return (output, loss) or an object with .loss from forward, or pass loss_fn= and targets="


Outputs = str | Sequence[str] | Callable[..., Any]
Picked = dict[str, torch.Tensor]
# The name of an output that a function returns alone; those in a dict have other ones.
ALONE = ""
ARGUMENT = "pm.eval_step(outputs=)"


@dataclass(frozen=True)
class LossAndOutputs:
    """A loss function, or None, and what an evaluation returns besides the loss: see `pm.eval_step`."""

    loss_fn: Callable[..., Any] | None
    outputs: Outputs

    def __call__(self, output: Any, targets: Any) -> Any:
        assert self.loss_fn is not None
        return self.loss_fn(output, targets)


class WithLoss(nn.Module):
    """Wrap the model and its loss: forward takes the model's arguments and returns only the scalar loss."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | LossAndOutputs | None) -> None:
        super().__init__()
        self._wanted = loss_fn if isinstance(loss_fn, LossAndOutputs) else None
        self.model, self.loss_fn = model, loss_fn if self._wanted is None else self._wanted.loss_fn
        # nn.Module.__init__ sets it to True.
        self.training = model.training

    def twin(self) -> WithLoss:
        """Return another wrapper of the same model, which nothing watches."""
        return WithLoss(self.model, self.loss_fn if self._wanted is None else self._wanted)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss, outputs = self.results(*args, **kwargs)
        for name, x in outputs.items():
            loss = keep_output(loss, x.detach(), name)
        return loss

    def results(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Picked]:
        """Return the loss, and the outputs by name."""
        call, targets = dict(kwargs), kwargs.pop("targets", None) if self.loss_fn is not None else None
        if self.loss_fn is not None and "targets" not in call:
            raise TraceError(
                "step", "loss_fn is given, but the call has no targets", "pass targets= with the inputs"
            )
        output = self.model(*args, **kwargs)
        if self.loss_fn is None:
            loss = find_loss(output, lambda: targets_left_out(self.model, args, kwargs))
        else:
            loss = find_loss(self.loss_fn(output, targets))
        if self._wanted is None:
            return loss, {}
        # A function may write to what the model has returned.
        loss = loss.clone()
        with torch.no_grad():
            return loss, picked_outputs(self._wanted.outputs, output, args, call)


def picked_outputs(wanted: Outputs, output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Picked:
    """Return what an evaluation returns of a model's output, by name."""
    if callable(wanted):
        found = wanted(output, *args, **kwargs)
        picked = dict(found) if isinstance(found, Mapping) else {ALONE: found}
        if isinstance(found, Mapping) and not all(isinstance(name, str) and name for name in found):
            names = ", ".join(map(repr, found))
            raise TraceError(ARGUMENT, f"gives a dict with the keys {names}", "keys that are names")
    else:
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        parts = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
        if missing := [name for name in names if name not in parts]:
            what = "a tensor" if isinstance(output, torch.Tensor) else a_type(output)
            fact = f"the model returns {what}, which has no {missing[0]!r}"
            has = [name for name, one in parts.items() if isinstance(one, torch.Tensor)]
            remedy = (
                f"one of {', '.join(has)}"
                if has
                else "a function: outputs=lambda output, *args, **kwargs: output[0]"
            )
            raise TraceError(ARGUMENT, fact, remedy)
        picked = {name: parts[name] for name in names}
    for name, x in picked.items():
        if not isinstance(x, torch.Tensor):
            fact = f"gives {a_type(x)}{f' as {name!r}' if name else ''}"
            raise TraceError(ARGUMENT, fact, "a tensor, or a dict of tensors by name")
    return picked


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
