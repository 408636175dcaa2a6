"""The loss that `pm.step` returns: a detached number, which says what to call where a loop takes it for the output of a model.

In: a 0-d tensor. Out: the same, of a class that refuses `backward` (of what is computed with it, too), unpacking, indices, and
the attributes of a model's output, as loops have them that were written for one device.

    loss = StepLossTensor.of(loss)
    (loss / 4).backward()          # PlanError: pm.step has run forward and backward. Remedy: leave it out ...
    logits, loss = loss            # PlanError: pm.step returns the loss alone

Everything else gives plain tensors, and copies and files have plain ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor

from autoptd.errors import PlanError
from autoptd.instead import WrongCall

# What loops do to a loss before its backward: `loss / steps`, `scaler.scale(loss)`, `loss + loss_before`.
ARITHMETIC = frozenset(
    getattr(Tensor, name)
    for name in "add sub mul div __add__ __radd__ __sub__ __mul__ __rmul__ __truediv__ mean sum to".split()
)
# They look at the class.
BY_CLASS = frozenset({Tensor.__repr__, Tensor.__format__, Tensor.__deepcopy__})
OUTPUTS = ("loss", "logits", "last_hidden_state", "past_key_values", "hidden_states")


def refuse_as_output(name: str = "") -> NoReturn:
    """Raise an error for a loss that is taken for the output of a model, of which `name` is read."""
    fact, remedy = (
        "returns the loss alone, a number",
        "loss = pm.step(...); without gradients pm.eval_step(...)",
    )
    raise (
        WrongCall(f"pm.step(...).{name}", f"pm.step {fact}", remedy)
        if name
        else PlanError("pm.step", fact, remedy)
    )


class StepLossTensor(Tensor):
    """A loss whose backward has run: see the module's docstring."""

    # Loggers know a tensor by the name of its class: "torch." and "Tensor".
    __module__ = "torch"

    @classmethod
    def of(cls, loss: Tensor) -> Self:
        """Return the same number, of this class; the tensor itself stays a plain one."""
        return loss.detach().as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.backward:
            fact = "pm.step has run forward and backward already, and gradients are in place"
            raise PlanError(
                "loss.backward()",
                fact,
                "leave it out: loss = pm.step(...), and then pm.clip_grad_norm_ and optimizer.step()",
            )
        if func is Tensor.__getitem__ and isinstance(args[1], (int, str)):
            refuse_as_output()
        if func in BY_CLASS:
            args = (args[0].as_subclass(Tensor), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        is_loss = func in ARITHMETIC and type(result) is Tensor and not result.requires_grad
        return result.as_subclass(cls) if is_loss and result.dim() == 0 else result

    # Not for a type checker, which sees itself what there is.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in OUTPUTS:
                refuse_as_output(name)
            raise AttributeError(f"'Tensor' object has no attribute {name!r}", name=name, obj=self)

        # torch's own asks no class.
        def __iter__(self) -> NoReturn:
            refuse_as_output()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[arg-type]


__all__ = ["StepLossTensor"]
