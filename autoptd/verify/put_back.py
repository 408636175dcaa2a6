"""Restore a model after training or running it: its values, and the state that a forward leaves on its
modules.

In: a model. Out: the same one, unchanged afterwards.

    with put_back(model):
        loss = model(ids, labels)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Restore every parameter, gradient, buffer and attribute of `model` afterwards."""
    tensors = [*model.parameters(), *model.buffers()]
    values, gradients = [x.detach().clone() for x in tensors], [(p, p.grad) for p in model.parameters()]
    states = [(vars(module), dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        # In place: vars(module) is the module's own dict.
        for state, before, buffers in states:
            state.clear()
            state.update(before)
            state["_buffers"].clear()
            state["_buffers"].update(buffers)
        with torch.no_grad():
            for x, value in zip(tensors, values, strict=True):
                x.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


__all__ = ["put_back"]
