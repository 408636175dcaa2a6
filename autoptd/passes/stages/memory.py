"""Bytes that a rank holds for every operator of the backbone: parameters with their state, and what backward needs.

In: a CONNECTED graph. Out: `Held`, per position of the backbone. Assumptions, which the error that uses them names:

- a trained parameter is held four times, as itself, its gradient and AdamW's two moments, all in its dtype (and once more where
  gradients add up in float32); a frozen one and a buffer once. It counts once on every rank that reads it.
- saved for backward: what an operator makes, unless it makes a view or all that read it forget it (sums, casts, ...); of
  a cross-entropy the logarithms of the probabilities. Of what GEMMs gather again the shards. What crosses counts where it is
  made. Values inside of a fused operator are not kept; a head fused with its loss keeps the gradients of its operands, those
  of parameters in float32 at least.

    held = count_bytes(graph, backbone, Sizes(Mesh(t=2), traced_rows=2, rows=1, pieces=8))
    sum(held.kept)        # bytes of parameters with their state that have one reader
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.machine import COPIES
from autoptd.ir.notes import note, ops, tensor
from autoptd.ir.operators.table import is_view, operator_of
from autoptd.ir.sizes import Sizes, local_shapes
from autoptd.passes.hook_gemms import gather_again


@dataclass(frozen=True)
class Held:
    """Per position: bytes held once, and per microbatch in flight; `shared`: (bytes, positions) of what several read."""

    kept: tuple[float, ...]
    saved: tuple[float, ...]
    shared: tuple[tuple[float, tuple[int, ...]], ...]


def count_bytes(graph: Graph, backbone: Sequence[Node], sizes: Sizes, main_grads: bool = False) -> Held:
    """Count; `main_grads`: every trained parameter has a gradient in float32 beside its own."""
    order = {node: i for i, node in enumerate(backbone)}
    kept = [0.0] * len(backbone)
    shared: dict[tuple[int, ...], float] = {}
    readers: dict[Node, set[int]] = {}
    for node in reversed(graph.nodes):
        if node in order or node.op == "output":
            continue
        readers[node] = {at for user in node.users for at in _positions(user, order, readers)}
        if node.op == "placeholder" and note(node).kind in ("param", "buffer"):
            nbytes = _bytes_kept(node, sizes, main_grads)
            if len(readers[node]) > 1:
                shared[tuple(sorted(readers[node]))] = shared.get(tuple(sorted(readers[node])), 0.0) + nbytes
            else:
                kept[min(readers[node], default=0)] += nbytes
    saved = tuple(_bytes_saved(node, sizes) for node in backbone)
    return Held(tuple(kept), saved, tuple((nbytes, at) for at, nbytes in sorted(shared.items())))


def saved_bytes(graph: Graph, sizes: Sizes) -> float:
    """Bytes that the backward of a microbatch keeps, of the whole graph."""
    return sum(_bytes_saved(node, sizes) for node in ops(graph))


def _positions(user: Node, order: dict[Node, int], readers: dict[Node, set[int]]) -> set[int]:
    return {order[user]} if user in order else readers.get(user, set())


def _bytes_kept(node: Node, sizes: Sizes, main_grads: bool) -> float:
    count = math.prod(local_shapes(node, sizes)[0])
    itemsize = tensor(node).element_size()
    if not note(node).needs_grad:
        return count * itemsize
    return count * (COPIES * itemsize + (4 if main_grads and itemsize < 8 else 0))


def _bytes_saved(node: Node, sizes: Sizes) -> float:
    """Bytes that the backward of a microbatch keeps of a value."""
    record = note(node)
    if not record.needs_grad or is_view(node) or gather_again(node) or record.extra.get("inner"):
        return 0.0
    beside = 0.0
    if record.extra.get("fused") == "part of linear_cross_entropy":
        read = [one for one in read_from_outside(node) if note(one).needs_grad]
        beside = sum(_bytes(one, sizes) * (_width(one) if _is_weight(one) else 1) for one in read)
    elif operator_of(node).keeps == "probabilities":
        beside = _bytes(node.args[0], sizes)  # type: ignore[arg-type]
    return beside + (_bytes(node, sizes) if _is_needed(node) else 0.0)


def read_from_outside(result: Node) -> set[Node]:
    """What the operators of a fused one read of others."""
    inner: list[Node] = [result]
    found: set[Node] = set()
    while inner:
        for one in inner.pop().all_input_nodes:
            (inner.append if note(one).extra.get("inner") else found.add)(one)
    return found


def _is_weight(node: Node) -> bool:
    return node.op == "placeholder" and note(node).kind == "param"


def _width(node: Node) -> float:
    """How many times as wide as a parameter the gradient is that a fused head keeps of it: it adds up in float32 at least."""
    return max(4, tensor(node).element_size()) / tensor(node).element_size()


def _bytes(node: Node, sizes: Sizes) -> float:
    return float(sum(map(math.prod, local_shapes(node, sizes))) * tensor(node).element_size())


def _is_needed(node: Node) -> bool:
    """Whether anything that reads a value, or a view of it, needs it for its backward."""
    for user in node.users:
        if is_view(user):
            if _is_needed(user):
                return True
        elif user.target is markers.convert:
            if gather_again(user):  # the shards are kept
                return True
        elif user.op != "output" and operator_of(user).keeps not in ("nothing", "probabilities"):
            return True
    return False


__all__ = ["Held", "count_bytes", "read_from_outside", "saved_bytes"]
