"""Write operators one per line, with a blank line and the module's path where the source module changes.

In: operators, their names, and a function that gives their expressions. Out: lines such as

    # transformer.h.3.mlp  (model.py:84)
    # column: 256 = 2 x 128
    c_fc = F.linear(ln_2, w.mlp.c_fc.weight, w.mlp.c_fc.bias)  # [2, 64, 128]
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Protocol

from torch.fx import Node

from autoptd.codegen.comments import brief, reason_of, section_of, shape_of
from autoptd.codegen.writer import Writer
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note


class Kept(Protocol):
    """How the values of a method are kept for backward: `again.py`."""

    def wrapped(self, node: Node, text: str) -> str: ...


def write_body(
    writer: Writer,
    body: Sequence[Node],
    names: dict[Node, str],
    mesh: Mesh,
    express: Callable[[int, Node], str],
    layers: dict[str, str] | None = None,
    is_shared: bool = False,
    kept: Kept | None = None,
) -> None:
    """Write `body`; `express` gives the expression of its i-th operator. For `layers` see `section_of`.

    `is_shared`: the body is a method of several stages, whose docstring names them. `kept` wraps values that
    are kept.
    """
    position = {node: i for i, node in enumerate(body)}
    section = None
    for i, node in enumerate(body):
        # The line that unpacks the tuple assigns its name.
        if node.target is operator.getitem and _is_unpacked(node.args[0], position):  # type: ignore[arg-type]
            continue
        module = section_of(node, layers)
        if module != section:
            section = module
            writer.gap()
            source = f"  ({note(node).source})" if note(node).source else ""
            writer.comment(2, f"{module}{source}")
        # A conversion I -> R without a line: its all-reduce runs in the backward of this GEMM
        # (passes/hook_gemms.py), and a reader who counts collectives must find it.
        absorbed = note(node).gemm.absorbed
        if absorbed is not None:
            why = brief(node, absorbed.why, layers)
            writer.comment(2, f"overlap: AR bwd, {absorbed.payload_bytes:,} B: {why}")
        is_unpacked = _is_unpacked(node, position)
        target = _unpacked_target(node, names) if is_unpacked else names[node]
        reason = reason_of(node, mesh, layers, is_shared)
        text = express(i, node)
        if kept is not None and not is_unpacked:
            text = kept.wrapped(node, text)
            reason = "; ".join(filter(None, [reason, note(node).keep.dropped]))
        writer.add(2, f"{target} = {text}", shape_of(node), above=reason, node=node)
        if kept is not None and is_unpacked:
            _write_pieces(writer, node, body, names, kept)


def _write_pieces(
    writer: Writer, node: Node, body: Sequence[Node], names: dict[Node, str], kept: Kept
) -> None:
    """Write the calls that keep pieces of a tuple, in the order in which they are taken."""
    for piece in body:
        if piece in node.users and kept.wrapped(piece, names[piece]) != names[piece]:
            how = note(piece).keep.dropped
            writer.add(2, f"{names[piece]} = {kept.wrapped(piece, names[piece])}", above=how)


def _unpacked_target(node: Node, names: dict[Node, str]) -> str:
    """Return the targets of an unpacked tuple: `q, _, v` if its second element is unread."""
    pieces = {user.args[1]: names[user] for user in node.users}
    count = len(node.meta["val"])
    target = ", ".join(pieces.get(k, "_") for k in range(count))
    return f"{target}," if count == 1 else target


def _is_unpacked(node: Node, position: dict[Node, int]) -> bool:
    """Tell whether a tuple is written as `q, k, v = ...`: its pieces are taken right after it."""
    if not isinstance(node.meta["val"], (tuple, list)) or node not in position:
        return False
    # A piece that is taken later, or in another function, reads `pair[1]` there.
    near = range(position[node] + 1, position[node] + 1 + len(node.users))
    return all(position.get(user, -1) in near for user in node.users)
