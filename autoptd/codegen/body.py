"""Write operators one per line, a blank line and the module's path where the source module changes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch.fx import Node

from autoptd.codegen.comments import brief, reason_of, section_of, shape_of
from autoptd.codegen.writer import Writer
from autoptd.ir.notes import note


def write_body(
    writer: Writer,
    body: Sequence[Node],
    names: dict[Node, str],
    t: int,
    spell: Callable[[int, Node], str],
    layers: dict[str, str] | None = None,
    is_shared: bool = False,
) -> None:
    """Write `body`; `spell` gives the expression of its i-th operator, `layers`: see `section_of`.

    `is_shared`: several stages call it, and where they do says so.
    """
    position = {node: i for i, node in enumerate(body)}
    section = None
    for i, node in enumerate(body):
        if node.target is operator.getitem and _is_unpacked(node.args[0], position):  # type: ignore[arg-type]
            continue
        here = section_of(node, layers)
        if here != section:
            section = here
            writer.gap()
            source = f"  ({note(node).source})" if note(node).source else ""
            writer.add(2, f"# {here}{source}")
        if (f := note(node).extra.get("absorbed")) is not None:
            writer.comment(2, f"overlap: AR bwd, {f.payload_bytes:,} B: {brief(node, f.why, layers)}")
        target = names[node]
        if _is_unpacked(node, position):
            pieces = {user.args[1]: names[user] for user in node.users}
            target = ", ".join(pieces.get(k, "_") for k in range(len(node.meta["val"])))
            target += "," if len(node.meta["val"]) == 1 else ""
        reason = reason_of(node, t, layers, is_shared)
        writer.add(2, f"{target} = {spell(i, node)}", shape_of(node), above=reason, node=node)


def _is_unpacked(node: Node, position: dict[Node, int]) -> bool:
    """A tuple whose pieces are taken right behind it is written as `q, k, v = ...`."""
    if not isinstance(node.meta["val"], (tuple, list)) or node not in position:
        return False
    near = range(position[node] + 1, position[node] + 1 + len(node.users))
    return all(position.get(user, -1) in near for user in node.users)
