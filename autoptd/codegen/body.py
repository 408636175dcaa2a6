"""Write operators one per line, a blank line and the module's path where the source module changes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch.fx import Node

from autoptd.codegen.comments import brief, call_site, comment_of, section_of
from autoptd.codegen.writer import Writer
from autoptd.ir.notes import note


def write_body(
    writer: Writer,
    body: Sequence[Node],
    names: dict[Node, str],
    t: int,
    spell: Callable[[int, Node, str], str],
    layers: dict[str, str] | None = None,
) -> None:
    """Write `body`; `spell` gives the expression of its i-th operator and its collectives' site, `layers`: see `section_of`."""
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
        if (f := note(node).extra.get("swallowed")) is not None:
            why = brief(node, f.why, layers)
            writer.add(2, f"# overlap: all-reduce backward, {f.payload_bytes:,} B: {why}")
        target = names[node]
        if _is_unpacked(node, position):
            pieces = {user.args[1]: names[user] for user in node.users}
            target = ", ".join(pieces.get(k, "_") for k in range(len(node.meta["val"])))
            target += "," if len(node.meta["val"]) == 1 else ""
        writer.add(2, f"{target} = {spell(i, node, call_site(node, layers))}", comment_of(node, t, layers))
        writer.nodes[len(writer.lines)] = node


def _is_unpacked(node: Node, position: dict[Node, int]) -> bool:
    """A tuple whose pieces are taken right behind it is written as `q, k, v = ...`."""
    if not isinstance(node.meta["val"], (tuple, list)) or node not in position:
        return False
    near = range(position[node] + 1, position[node] + 1 + len(node.users))
    return all(position.get(user, -1) in near for user in node.users)
