"""Which optimizers update every element by itself, so that their update of a shard is the shard of the update.

In: a torch optimizer's class, and the keywords for it. Out: nothing, or a PlanError. torch's own are known; a class derived
from one of them that leaves its methods alone is like it; where it has methods of its own, it is tried: some steps on small
tensors whole, and on their halves.

    check_elementwise(torch.optim.AdamW, {"lr": 1e-3})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import optim

from autoptd.errors import PlanError

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
SHAPES = ((6, 4), (4,), (2, 4, 6))
SCALES = (1.0, 1e-3, 1e3, 1e-6)  # of the gradients, a step each


def check_elementwise(cls: type[optim.Optimizer], keywords: Mapping[str, Any]) -> None:
    """PlanError for a class that is not known, and not found, to update every element by itself."""
    if cls in ELEMENTWISE or getattr(cls, "elementwise", False):
        return
    base = next((one for one in cls.__mro__ if one in ELEMENTWISE), None)
    if base is None:
        raise PlanError(
            f"optimizer {cls.__name__}",
            "is not known to update every element by itself, so shards would be updated differently from the whole",
            f"one of {', '.join(one.__name__ for one in ELEMENTWISE)}, or a class derived from one; "
            "or set elementwise = True on the class if it is",
        )
    own = _own_methods(cls, base)
    if own and (reason := try_halves(cls, keywords)):
        fact = f"derives from {base.__name__} with a {own[0]} of its own: {reason}"
        raise PlanError(
            f"optimizer {cls.__name__}",
            fact,
            f"{base.__name__}; or set elementwise = True if that is meant so",
        )


def _own_methods(cls: type, base: type) -> list[str]:
    """Names of base's methods (but for the constructor) that classes between the two define anew."""
    between = cls.__mro__[: cls.__mro__.index(base)]
    return sorted(
        {name for one in between for name in vars(one) if hasattr(base, name) and not name.startswith("__")}
    )


@torch.random.fork_rng(devices=[])
def try_halves(cls: type[optim.Optimizer], keywords: Mapping[str, Any]) -> str:
    """Step small tensors whole and in halves, along every dim; why that is not the same, "" if it is."""
    torch.manual_seed(0)
    first = [torch.randn(size, dtype=torch.float64) for size in SHAPES]
    grads = [[scale * torch.randn_like(x) for x in first] for scale in SCALES]
    try:
        whole = _train(cls, keywords, first, grads)
        for dim in range(max(map(len, SHAPES))):

            def halve(xs: list[torch.Tensor], dim: int = dim) -> list[torch.Tensor]:
                return [half.contiguous() for x in xs for half in (x.chunk(2, dim) if dim < x.dim() else [x])]

            halves = _train(cls, keywords, halve(first), [halve(some) for some in grads])
            if not all(
                torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(halves, halve(whole), strict=True)
            ):
                return "halves of a tensor are updated differently from the whole"
    except Exception as error:
        return f"it could not be tried ({type(error).__name__}: {error})"
    return ""


def _train(
    cls: type[optim.Optimizer],
    keywords: Mapping[str, Any],
    first: list[torch.Tensor],
    grads: list[list[torch.Tensor]],
) -> list[torch.Tensor]:
    parameters = [torch.nn.Parameter(x.clone()) for x in first]
    made = cls(parameters, **keywords)
    for some in grads:
        for x, grad in zip(parameters, some, strict=True):
            x.grad = grad.clone()
        made.step()
    return [x.detach() for x in parameters]


__all__ = ["ELEMENTWISE", "check_elementwise"]
