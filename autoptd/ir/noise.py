"""Random numbers of a model beside dropout: what every way to draw them is in a graph.

In: a tensor, of which the shape and the dtype are read alone. Out: as many numbers of one kind. Which ones they are follows
from where they are drawn (`runtime/ops/noise.py`), and is known to no node: called in a graph, these give torch's own.

    torch.ops.autoptd.uniform(x)            # from 0 on, below 1
    torch.ops.autoptd.normal(x)             # mean 0, variance 1
    torch.ops.autoptd.exponential(x)        # mean 1, above 0
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from autoptd.ir.notes import op_name

KINDS = ("uniform", "normal", "exponential")
NAMES = {f"autoptd.{kind}": kind for kind in KINDS}
DROPOUT = "aten.dropout"


def is_draw(node: Node) -> bool:
    """Tell whether a node draws numbers: a dropout, or noise."""
    return op_name(node) == DROPOUT or op_name(node) in NAMES


@torch.library.custom_op("autoptd::uniform", mutates_args=())
def uniform(x: Tensor) -> Tensor:
    """Return numbers from 0 on, below 1, of the shape and dtype of x."""
    return torch.rand_like(x)


@torch.library.custom_op("autoptd::normal", mutates_args=())
def normal(x: Tensor) -> Tensor:
    """Return numbers of mean 0 and variance 1, of the shape and dtype of x."""
    return torch.randn_like(x)


@torch.library.custom_op("autoptd::exponential", mutates_args=())
def exponential(x: Tensor) -> Tensor:
    """Return numbers above 0 of mean 1, of the shape and dtype of x."""
    return torch.empty_like(x).exponential_()


for made in (uniform, normal, exponential):
    made.register_fake(lambda x: x.new_empty(x.shape))
    # No gradient goes through what was drawn.
    made.register_autograd(lambda ctx, grad: None)

OPERATORS = {"uniform": uniform, "normal": normal, "exponential": exponential}
