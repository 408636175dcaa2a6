"""Values of a model's output that an evaluation returns besides the loss.

The operator takes the loss and returns it, so that a graph has one output, as the operators of `ir/updates.py` do.

    loss = torch.ops.autoptd.keep_output(loss, logits, "logits")
"""

from __future__ import annotations

import torch
from torch import Tensor

OUTPUT = "autoptd.keep_output"


@torch.library.custom_op("autoptd::keep_output", mutates_args=())
def keep_output(loss: Tensor, x: Tensor, name: str) -> Tensor:
    """Return the loss; an evaluation returns `x` as `name`."""
    return loss.clone()


@keep_output.register_fake
def _(loss: Tensor, x: Tensor, name: str) -> Tensor:
    return torch.empty_like(loss)


keep_output.register_autograd(lambda ctx, grad: (grad, None, None))

__all__ = ["OUTPUT", "keep_output"]
