"""The three operators that stand for all of a model's random numbers other than dropout.

In: a tensor that gives shape and dtype. Out: as many numbers of one kind. Their values depend on
the place where they are drawn (`runtime/ops/dropout.py`), which no node knows: called in a graph, these
operators return torch's own numbers.

    torch.ops.autoptd.uniform(x)            # from 0 (inclusive) to 1 (exclusive)
    torch.ops.autoptd.normal(x)             # mean 0, variance 1
    torch.ops.autoptd.exponential(x)        # mean 1, positive
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

KINDS = ("uniform", "normal", "exponential")
NAMES = {f"autoptd.{kind}": kind for kind in KINDS}


@torch.library.custom_op("autoptd::uniform", mutates_args=())
def uniform(x: Tensor) -> Tensor:
    """Return numbers from 0 (inclusive) to 1 (exclusive), in the shape and dtype of x."""
    return torch.rand_like(x)


@torch.library.custom_op("autoptd::normal", mutates_args=())
def normal(x: Tensor) -> Tensor:
    """Return numbers of mean 0 and variance 1, in the shape and dtype of x."""
    return torch.randn_like(x)


@torch.library.custom_op("autoptd::exponential", mutates_args=())
def exponential(x: Tensor) -> Tensor:
    """Return positive numbers of mean 1, in the shape and dtype of x."""
    return torch.empty_like(x).exponential_()


for made in (uniform, normal, exponential):
    made.register_fake(lambda x: x.new_empty(x.shape))
    # Drawn numbers have no gradient.
    made.register_autograd(lambda ctx, grad: None)

OPERATORS = {"uniform": uniform, "normal": normal, "exponential": exponential}
# Everything that draws: dropout, and noise.
_DRAWS = {torch.ops.aten.dropout.default, *(getattr(torch.ops.autoptd, kind).default for kind in KINDS)}


def is_draw(node: Node) -> bool:
    """Tell whether a node draws random numbers: a dropout, or noise."""
    return node.target in _DRAWS
