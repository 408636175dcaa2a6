"""Which optimizers update every element by itself, so that their update of a shard is the shard of the update.

In: a torch optimizer's class, and the keywords for it. Out: nothing, or a PlanError. torch's own are known, and so is a
class derived from one of them that overrides no method. A class that overrides some is tried: a few steps on small
tensors whole, and on their halves.

    check_elementwise(torch.optim.AdamW, {"lr": 1e-3})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import optim

from autoptd.errors import PlanError
from autoptd.ir.default_device import on_cpu

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.RMSprop,
    optim.Rprop,
    optim.Adamax,
    optim.Adadelta,
    optim.ASGD,
)
# Every dim is even, so that it can be halved.
SHAPES = ((6, 4), (4,), (2, 4, 6))
# The scale of the gradients in each of the trial steps: a norm or a bound within the optimizer shows at one of them.
SCALES = (1.0, 1e-3, 1e3, 1e-6)


def check_elementwise(cls: type[optim.Optimizer], keywords: Mapping[str, Any]) -> None:
    """Raise PlanError for a class that is neither known nor found by trial to update every element by itself."""
    # `elementwise = True` on a class is its author's word: see the remedies below.
    if cls in ELEMENTWISE or getattr(cls, "elementwise", False):
        return
    base = next((parent for parent in cls.__mro__ if parent in ELEMENTWISE), None)
    if base is None:
        raise PlanError(
            f"optimizer {cls.__name__}",
            "is not known to update every element by itself, so shards would be updated differently from the whole",
            f"one of {', '.join(known.__name__ for known in ELEMENTWISE)}, or a class derived from one; "
            "or set elementwise = True on the class if it is",
        )
    own = _own_methods(cls, base)
    if own and (reason := try_halves(cls, keywords)):
        fact = f"derives from {base.__name__} with a {own[0]} of its own: {reason}"
        remedy = f"{base.__name__}; or set elementwise = True if that is meant so"
        raise PlanError(f"optimizer {cls.__name__}", fact, remedy)


def _own_methods(cls: type, base: type) -> list[str]:
    """Return the names of base's methods, without the constructor, that classes between the two override."""
    between = cls.__mro__[: cls.__mro__.index(base)]
    names = {name for derived in between for name in vars(derived)}
    return sorted(name for name in names if hasattr(base, name) and not name.startswith("__"))


# The trial leaves the user's random numbers where they were.
@torch.random.fork_rng(devices=[])
def try_halves(cls: type[optim.Optimizer], keywords: Mapping[str, Any]) -> str:
    """Step small tensors whole and in halves, along every dim; return why the results differ, "" if they do not."""
    torch.manual_seed(0)
    first = [torch.randn(size, dtype=torch.float64, device="cpu") for size in SHAPES]
    grads = []
    for scale in SCALES:
        grads.append([scale * torch.randn_like(x) for x in first])
    try:
        whole = _train(cls, keywords, first, grads)
        for dim in range(max(map(len, SHAPES))):
            grads_of_halves = [_halve(step_grads, dim) for step_grads in grads]
            halves = _train(cls, keywords, _halve(first, dim), grads_of_halves)
            for half, expected in zip(halves, _halve(whole, dim), strict=True):
                # Not to the bit, as kernels vectorise halves differently; a norm of the whole is far off.
                if not torch.allclose(half, expected, rtol=1e-9, atol=1e-12):
                    return "halves of a tensor are updated differently from the whole"
    except Exception as error:
        # Whatever a user's optimizer raises.
        return f"it could not be tried ({type(error).__name__}: {error})"
    return ""


def _halve(tensors: list[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """Cut each tensor in two along `dim`, if it has that dim."""
    halves: list[torch.Tensor] = []
    for x in tensors:
        halves += x.chunk(2, dim) if dim < x.dim() else [x]
    return [half.contiguous() for half in halves]


def _train(
    cls: type[optim.Optimizer],
    keywords: Mapping[str, Any],
    first: list[torch.Tensor],
    grads: list[list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Return the values after one step per entry of `grads`, from the values `first`."""
    parameters = [torch.nn.Parameter(x.clone()) for x in first]
    # What the optimizer counts is where its parameters are.
    with on_cpu():
        optimizer = cls(parameters, **keywords)
        for step_grads in grads:
            for x, grad in zip(parameters, step_grads, strict=True):
                x.grad = grad.clone()
            optimizer.step()
    return [x.detach() for x in parameters]


__all__ = ["ELEMENTWISE", "check_elementwise"]
