"""Buffers that a forward updates: operators that stand for the updates, and the computation once per step.

Each operator takes the loss and returns it, so that a graph has one output. In a TRACED graph,
`update_buffer` gives the value of a buffer after the call. `passes/buffer_updates.py` replaces it with
`keep_part`, a microbatch's contribution to the update, and records in `Updates` the computation on these
parts after the last microbatch.

    loss = torch.ops.autoptd.update_buffer(loss, new, "norm.running_mean")
    loss = torch.ops.autoptd.keep_part(loss, mean, 0, True)     # part 0: a part of a sum over the batch
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

UPDATE, KEEP = "autoptd.update_buffer", "autoptd.keep_part"


@torch.library.custom_op("autoptd::update_buffer", mutates_args=())
def update_buffer(loss: Tensor, new: Tensor, name: str) -> Tensor:
    """Return the loss; after the call the buffer `name` is `new`."""
    return loss.clone()


@torch.library.custom_op("autoptd::keep_part", mutates_args=())
def keep_part(loss: Tensor, part: Tensor, number: int, is_sum: bool) -> Tensor:
    """Return the loss; `is_sum`: the parts of all microbatches and replicas add up, else all are the same."""
    return loss.clone()


@update_buffer.register_fake
def _(loss: Tensor, new: Tensor, name: str) -> Tensor:
    return torch.empty_like(loss)


@keep_part.register_fake
def _(loss: Tensor, part: Tensor, number: int, is_sum: bool) -> Tensor:
    return torch.empty_like(loss)


update_buffer.register_autograd(lambda ctx, grad: (grad, None, None))
keep_part.register_autograd(lambda ctx, grad: (grad, None, None, None))


def update_call(graph: Graph, loss: Node, new: Node, name: str) -> Node:
    """Add an `update_buffer` to a graph."""
    return graph.call_function(torch.ops.autoptd.update_buffer.default, (loss, new, name))


def keep_call(graph: Graph, loss: Node, part: Node, number: int, is_sum: bool) -> Node:
    """Add a `keep_part` to a graph."""
    return graph.call_function(torch.ops.autoptd.keep_part.default, (loss, part, number, is_sum))


@dataclass(frozen=True)
class Updates:
    """The computation after the last microbatch of a step: new values of `buffers` from old ones and `parts`.

    The outputs of `graph` are these values; its placeholders are buffers, and parts with `kind` "part" and a
    name like `part_0`. `sums` tells for each part whether it is a sum over the batch; `of_batch` are the
    buffers whose new values depend on the batch.
    """

    graph: Graph
    buffers: tuple[str, ...]
    of_batch: tuple[str, ...]
    parts: tuple[Node, ...]
    sums: tuple[bool, ...]


def part_name(number: int) -> str:
    return f"part_{number}"


__all__ = ["KEEP", "UPDATE", "Updates", "keep_call", "part_name", "update_call"]
