"""What `verify` does to the user's very own model: it trains a step, is compared with its float64 copy, and
is put back.

What `verify` trains is a float64 copy. A copy cuts parameters that share storage apart, and buffers that are
views of them; a wider dtype hides one that was lost. Neither can be seen on the copy.

    with put_back(model):
        losses = ...                        # trained, in its own dtype
    check_copy(model, losses, of_the_copy)
"""

from __future__ import annotations

import torch
from torch import nn

from autoptd.errors import PlanError, TraceError
from autoptd.verify.widening import relative_difference

# How far a loss in this dtype may be off one in float64, relative.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
# Of two runs that round differently, one may be nearer to float64 by chance, by so many times.
AMPLIFIED = 16


def check_copy(model: nn.Module, ours: list[torch.Tensor], copied: list[torch.Tensor]) -> None:
    """Refuse a model that trains otherwise than its float64 copy: what is compared would not be the model."""
    # Step 0 is before any update: only from step 1 on can a lost tie show.
    for step, (loss, wanted) in enumerate(zip(map(float, ours), map(float, copied), strict=True)):
        if not abs(loss - wanted) <= rounding_of(model) * max(abs(wanted), abs(float(copied[0]))):
            fact = f"in step {step} its loss is {loss:.9g}, that of a float64 copy {wanted:.9g}: "
            fact += (
                "parameters, buffers or attributes share storage, which a copy cuts"
                if step
                else "a copy differs"
            )
            remedy = "tie weights by assigning the Parameter itself, and read it in forward where it is read"
            raise TraceError("model", fact, remedy)


def rounding_of(model: nn.Module) -> float:
    """Return the rounding of the coarsest dtype of a parameter."""
    return max((ROUNDING.get(p.dtype, 0.0) for p in model.parameters()), default=1e-6)


def finite_losses(losses: list[torch.Tensor], precision: str | None) -> list[torch.Tensor]:
    """Return the losses of the model before it overflows in its own dtype; refuse one whose first loss does."""
    count = next((step for step, loss in enumerate(losses) if not torch.isfinite(loss).all()), len(losses))
    if not count:
        fact = f"the model's own first loss is {float(losses[0])}: it overflows"
        raise PlanError(f"precision={precision!r}", fact, "precision='bf16', or smaller values")
    return losses[:count]


def allowance(rounding: float, losses: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Return how far losses may be off `losses` of the model in its own dtype, at least `rounding`; `exact` are in
    float64.

    A model may amplify rounding: then its own losses are off as well, and those of ranks, which round elsewhere, as far.
    """
    # Of a step that was skipped there is no second loss.
    pairs = zip(losses, exact[: len(losses)], strict=True)
    own = [relative_difference(loss.double(), wide, 0.0) for loss, wide in pairs]
    return max(rounding, AMPLIFIED * max(own))
