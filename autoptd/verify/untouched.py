"""Compare the user's own model with the float64 copy that `verify` trains.

A copy separates parameters that share storage, and buffers that are views of them; a wider dtype hides a lost
one. Neither shows on the copy. So the model itself trains one step, and is restored.

    with put_back(model):
        losses = ...                        # trained, in its own dtype
    check_copy(model, losses, of_the_copy)
"""

from __future__ import annotations

import torch
from torch import nn

from autoptd.errors import PlanError, TraceError
from autoptd.verify.widening import relative_difference

# Largest relative difference between a loss in this dtype and one in float64.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
# Of two runs that round differently, one may be closer to float64 by chance, by up to this factor.
AMPLIFIED = 16


def check_copy(model: nn.Module, ours: list[torch.Tensor], copied: list[torch.Tensor]) -> None:
    """Reject a model that trains differently from its float64 copy: the comparison would prove nothing about
    it.
    """
    # Step 0 comes before any update: a lost tie can only show from step 1 on.
    for step, (loss, wanted) in enumerate(zip(map(float, ours), map(float, copied), strict=True)):
        if not abs(loss - wanted) <= rounding_of(model) * max(abs(wanted), abs(float(copied[0]))):
            fact = f"in step {step} its loss is {loss:.9g}, that of a float64 copy {wanted:.9g}: "
            fact += (
                "parameters, buffers or attributes share storage, which a copy separates"
                if step
                else "the copy differs"
            )
            remedy = "tie weights by assigning the Parameter itself, and read it in forward where it is used"
            raise TraceError("model", fact, remedy)


def rounding_of(model: nn.Module) -> float:
    """Return the rounding error of the coarsest parameter dtype."""
    return max((ROUNDING.get(p.dtype, 0.0) for p in model.parameters()), default=1e-6)


def finite_losses(losses: list[torch.Tensor], precision: str | None) -> list[torch.Tensor]:
    """Return the model's losses up to an overflow in its own dtype; reject a model whose first loss
    overflows.
    """
    count = next((step for step, loss in enumerate(losses) if not torch.isfinite(loss).all()), len(losses))
    if not count:
        fact = f"the model's own first loss is {float(losses[0])}: it overflows"
        raise PlanError(f"precision={precision!r}", fact, "use precision='bf16', or smaller values")
    return losses[:count]


def allowance(rounding: float, losses: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Return how far losses may differ from `losses` of the model in its own dtype, at least `rounding`;
    `exact` are in float64.

    A model may amplify rounding: then its own losses differ from `exact` as well, and those of ranks, which
    round elsewhere, by as much.
    """
    # A skipped step has no second loss.
    pairs = zip(losses, exact[: len(losses)], strict=True)
    own = [relative_difference(loss.double(), wide, 0.0) for loss, wide in pairs]
    return max(rounding, AMPLIFIED * max(own))
