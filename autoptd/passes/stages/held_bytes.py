"""Count the bytes that a rank holds for every operator of the backbone: parameters with their state, and saved activations.

In: a CONNECTED graph. Out: `Held`, per position of the backbone. The assumptions, which the "too full" error names:

- A trained parameter is held with its gradient and AdamW's state, in the dtypes and the parts of the request
  (ir/state_bytes.py); a frozen one and a buffer once. It counts once on every rank that reads it.
- What is saved for backward is that of the program on one stage (`preview.py`): exact, but for what a cut changes. A value
  counts where it is first saved, so that what crosses is held by the stage that reads it.

    held = count_bytes(graph, backbone, ctx)
    sum(held.kept)        # bytes of parameters with their state that have one reader
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from autoptd.ir.notes import note, tensor
from autoptd.ir.sizes import Sizes, local_shapes
from autoptd.options import Options
from autoptd.passes.context import Context
from autoptd.passes.stages.line import Level
from autoptd.passes.stages.preview import kept_per_operator


@dataclass(frozen=True)
class Held:
    """Per position: bytes held once, and what is kept of a microbatch; `shared`: (bytes, positions) of what several read."""

    kept: tuple[float, ...]
    levels: Sequence[Level]
    shared: tuple[tuple[float, tuple[int, ...]], ...]


def count_bytes(graph: Graph, backbone: Sequence[Node], ctx: Context) -> Held:
    """Count bytes per position of the backbone."""
    sizes, options = ctx.sizes, ctx.options
    order = {node: i for i, node in enumerate(backbone)}
    kept = [0.0] * len(backbone)
    shared: dict[tuple[int, ...], float] = {}
    # Positions of the backbone that read a node, directly or through nodes outside of it.
    readers: dict[Node, set[int]] = {}
    for node in reversed(graph.nodes):
        if node in order or node.op == "output":
            continue
        positions: set[int] = set()
        for user in node.users:
            positions |= {order[user]} if user in order else readers.get(user, set())
        readers[node] = positions
        if node.op == "placeholder" and note(node).kind in ("param", "buffer"):
            nbytes = _bytes_kept(node, sizes, options)
            if len(positions) > 1:
                key = tuple(sorted(positions))
                shared[key] = shared.get(key, 0.0) + nbytes
            else:
                kept[min(positions, default=0)] += nbytes
    levels = kept_per_operator(graph, backbone, ctx)
    return Held(tuple(kept), levels, tuple((nbytes, key) for key, nbytes in sorted(shared.items())))


def _bytes_kept(node: Node, sizes: Sizes, options: Options) -> float:
    count = math.prod(local_shapes(node, sizes)[0])
    itemsize = tensor(node).element_size()
    if not note(node).needs_grad:
        return count * itemsize
    return count * options.state_bytes(itemsize).total


def read_from_outside(result: Node) -> set[Node]:
    """Return the operands of a fused operator; `result` is the last of those that it replaces."""
    inner: list[Node] = [result]
    outside: set[Node] = set()
    while inner:
        for operand in inner.pop().all_input_nodes:
            if note(operand).fused.is_inner:
                inner.append(operand)
            else:
                outside.add(operand)
    return outside


__all__ = ["Held", "count_bytes", "read_from_outside"]
