"""What stands in the comments of a stage file: modules, shapes, the bytes and reasons of collectives."""

from __future__ import annotations

from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.layout import BATCH
from autoptd.ir.notes import note, op_name, shape, tensor
from autoptd.ir.types import CONVERSIONS, shard_size


def section_of(node: Node, layers: dict[str, str] | None = None) -> str:
    """The source module that a line is shown under.

    In a loop, `layers` has the paths of the layers and how each is shown ("" if there is one): the path from there to one name
    below. Elsewhere the path to one name below a layer.
    """
    path = note(node).module
    if layers is None:
        parts = path.split(".")
        cut = next((i + 2 for i, part in enumerate(parts) if part.isdigit()), 2)
        return ".".join(parts[:cut]) or "the model itself"
    for layer, shown in layers.items():
        if path == layer or path.startswith(f"{layer}."):
            inner = path.removeprefix(layer).removeprefix(".").split(".")[0]
            return ".".join(part for part in (shown, inner) if part) or "the layer itself"
    return path.split(".")[-1] or "the layer itself"


def comment_of(node: Node, t: int, layers: dict[str, str] | None = None) -> str:
    """Local shape where it changes; for a conversion its collectives, bytes and reason; for a split GEMM its reason."""
    record = note(node)
    if node.target is markers.convert:
        both = zip(conversion_work(node), ("forward", "backward"), strict=True)
        work = [f"{what} {when}" for what, when in both if what != "none"]
        work += ["again backward"] if "readers" in record.extra else []
        return f"{', '.join(work) or 'no communication'}, {collective_bytes(node, t):,} B: {brief(node, record.why, layers)}"
    said = []
    first = next((arg for arg in node.args if isinstance(arg, Node)), None)
    literal = op_name(node) in ("aten.view", "aten.reshape", "aten.expand", "aten._unsafe_view")
    if not literal and tensor(node).dim() and (first is None or local_shape_text(first) != local_shape_text(node)):
        said.append(local_shape_text(node))
    if record.why.startswith(("column", "row")) or record.forms.keys() - {BATCH} or record.fallback or record.rule:
        said.append(record.why or record.rule)
    if "reason" in record.extra:
        said.append(record.extra["reason"])
    if layers is None and record.placement.startswith("computed again") and len(record.stages) > 1:
        said.append(f"computed on stages {', '.join(map(str, record.stages))}: cheaper than sent")
    return "  ".join(said)


def origin_text(node: Node) -> str:
    """What a value that crosses is: `add of transformer.h.3`."""
    return (
        f"{(note(node).conversion or op_name(node)).removeprefix('aten.')} of {note(node).module or 'the model itself'}"
    )


def brief(node: Node, why: str, layers: dict[str, str] | None = None) -> str:
    """A reason without the path that the section above `node` shows already."""
    why = why.removeprefix(f"{note(node).module}: " if note(node).module else "")
    for layer, shown in (layers or {}).items():
        if why.startswith((f"{layer}.", f"{layer}: ")):
            return (shown + why.removeprefix(layer)).removeprefix(".").removeprefix(": ")
    return why


def call_site(node: Node, layers: dict[str, str] | None = None) -> str:
    """What a collective calls itself in errors and records: its module, the number of a repeated layer as a star."""
    path = note(node).module or "model"
    for layer in layers or ():
        if path == layer or path.startswith(f"{layer}."):
            return ".".join([*layer.split(".")[:-1], "*"]) + path.removeprefix(layer)
    return path


def conversion_work(node: Node) -> tuple[str, str]:
    """What a conversion does forward and backward: its row of the table, less what this node does not need."""
    row = next(row for row in CONVERSIONS.values() if row.name == note(node).conversion)
    forward, backward = row.forward, row.backward
    if row.name == "s_to_s" and node.args[2] == node.args[4]:  # within one dim: see the runtime's s_to_s
        forward = backward = "none" if node.args[3] == node.args[5] else "all-gather"
    return forward, backward if note(node).needs_grad else "none"


def collective_bytes(node: Node, t: int) -> int:
    """Bytes of the whole value, its padding included, that a conversion moves (over tp, one microbatch)."""
    count = 1
    for size in note(node).extra["local_shapes"][0]:
        count *= size
    padded = node.kwargs.get("size", 0)
    kind = note(node).layout[note(node).axis]
    count *= kind.pieces(t)
    if padded and kind.kind != "S":
        count = count // padded * shard_size(padded, t) * t
    return count * tensor(node).element_size()


def local_shape_text(node: Node) -> str:
    """`[2, 64, 96]`: the local shape of a node's (first) value."""
    shapes = note(node).extra.get("local_shapes") or [shape(node)]
    return str(list(shapes[0]))
