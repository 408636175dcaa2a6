"""Count the bytes that a rank holds for every operator of the backbone: parameters with their state, and saved activations.

In: a CONNECTED graph. Out: `Held`, per position of the backbone. The assumptions, which the "too full" error names:

- A trained parameter is held with its gradient and AdamW's state, in the dtypes and the parts of the request
  (ir/state_bytes.py); a frozen one and a buffer once. It counts once on every rank that reads it.
- Saved for backward is the result of an operator, unless it is a view or none of its readers saves its operands (sums,
  casts, ...). A cross-entropy saves the log-probabilities. Of a value that GEMMs gather again, only the shards are saved. What
  crosses counts where it is made. Values inside of a fused operator are not saved; a head fused with its loss saves the
  gradients of its operands, those of parameters in float32 at least.

    held = count_bytes(graph, backbone, Sizes(Mesh(t=2), traced_rows=2, rows=1, pieces=8), options)
    sum(held.kept)        # bytes of parameters with their state that have one reader
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.notes import note, ops, tensor
from autoptd.ir.operators.table import is_view, operator_of
from autoptd.ir.sizes import Sizes, local_shapes
from autoptd.options import Options
from autoptd.passes.hook_gemms import gather_again


@dataclass(frozen=True)
class Held:
    """Per position: bytes held once, and per microbatch in flight; `shared`: (bytes, positions) of what several read."""

    kept: tuple[float, ...]
    saved: tuple[float, ...]
    shared: tuple[tuple[float, tuple[int, ...]], ...]


def count_bytes(graph: Graph, backbone: Sequence[Node], sizes: Sizes, options: Options) -> Held:
    """Count bytes per position of the backbone; `options` say what is held of a parameter that is trained."""
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
    saved = tuple(_bytes_saved(node, sizes) for node in backbone)
    return Held(tuple(kept), saved, tuple((nbytes, key) for key, nbytes in sorted(shared.items())))


def saved_bytes(graph: Graph, sizes: Sizes) -> float:
    """Return the bytes of the activations of a microbatch that are saved for backward, in the whole graph."""
    return sum(_bytes_saved(node, sizes) for node in ops(graph))


def _bytes_kept(node: Node, sizes: Sizes, options: Options) -> float:
    count = math.prod(local_shapes(node, sizes)[0])
    itemsize = tensor(node).element_size()
    if not note(node).needs_grad:
        return count * itemsize
    return count * options.state_bytes(itemsize).total


def _bytes_saved(node: Node, sizes: Sizes) -> float:
    """Return the bytes that backward of a microbatch needs of an operator: its result, and what it saves itself."""
    record = note(node)
    if not record.needs_grad or is_view(node) or gather_again(node) or record.extra.get("inner"):
        return 0.0
    own = 0.0
    if record.extra.get("fused") == "part of linear_cross_entropy":
        for operand in read_from_outside(node):
            if note(operand).needs_grad:
                own += _bytes(operand, sizes) * (_width(operand) if _is_weight(operand) else 1)
    elif operator_of(node).keeps == "probabilities":
        own = _bytes(node.args[0], sizes)  # type: ignore[arg-type]
    return own + (_bytes(node, sizes) if _is_needed(node) else 0.0)


def read_from_outside(result: Node) -> set[Node]:
    """Return the operands of a fused operator; `result` is the last of those that it replaces."""
    inner: list[Node] = [result]
    outside: set[Node] = set()
    while inner:
        for operand in inner.pop().all_input_nodes:
            if note(operand).extra.get("inner"):
                inner.append(operand)
            else:
                outside.add(operand)
    return outside


def _is_weight(node: Node) -> bool:
    return node.op == "placeholder" and note(node).kind == "param"


def _width(node: Node) -> float:
    """Return the bytes of a gradient that a fused head saves, per byte of the parameter: float32 at least."""
    return max(4, tensor(node).element_size()) / tensor(node).element_size()


def _bytes(node: Node, sizes: Sizes) -> float:
    return float(sum(map(math.prod, local_shapes(node, sizes))) * tensor(node).element_size())


def _is_needed(node: Node) -> bool:
    """Tell whether a reader of a value, or of a view of it, saves it for its backward."""
    for user in node.users:
        if is_view(user):
            if _is_needed(user):
                return True
        elif user.target is markers.convert:
            # GEMMs gather it again: the shards are saved.
            if gather_again(user):
                return True
        elif user.op != "output" and operator_of(user).keeps not in ("nothing", "probabilities"):
            return True
    return False


__all__ = ["Held", "count_bytes", "read_from_outside", "saved_bytes"]
