"""What stands in the comments of a stage file: modules, shapes, the bytes and reasons of collectives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.layout import BATCH
from autoptd.ir.notes import note, op_name, shape, tensor
from autoptd.ir.operators.table import says_shape
from autoptd.ir.sub_axes import is_sub_axis, parse
from autoptd.ir.types import CONVERSIONS, shard_size
from autoptd.program.calls import star

SHORT = {"all-reduce": "AR", "all-gather": "AG", "reduce-scatter": "RS", "all-to-all": "A2A"}
WHEN = ("fwd", "bwd")


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


def reason_of(node: Node, t: int, layers: dict[str, str] | None = None, is_shared: bool = False) -> str:
    """What stands above a line: of a conversion its collectives, bytes and reason, of what tp splits its reason.

    `is_shared`: it is known that several stages compute it.
    """
    record = note(node)
    if node.target is markers.convert:
        work = [
            f"{SHORT.get(what, what)} {when}"
            for what, when in zip(conversion_work(node), WHEN, strict=True)
            if what != "none"
        ]
        work += ["AG again bwd"] if "uses" in record.extra else []
        return f"{', '.join(work) or 'no communication'}, {collective_bytes(node, t):,} B: {brief(node, record.why, layers)}"
    reasons = []
    if (
        record.why.startswith(("column", "row"))
        or record.forms.keys() - {BATCH}
        or record.fallback
        or record.rule
    ):
        reasons.append(record.why or record.rule)
    if "reason" in record.extra:
        reasons.append(record.extra["reason"])
    if (
        layers is None
        and not is_shared
        and record.placement.startswith("computed again")
        and len(record.stages) > 1
    ):
        reasons.append(f"computed on stages {numbers_text(record.stages)}: cheaper than sent")
    return "; ".join(reasons)


def shape_of(node: Node) -> str:
    """What stands behind a line: the local shape, where it changes and the line does not say it."""
    first = next((arg for arg in node.args if isinstance(arg, Node)), None)
    if node.target is markers.convert or says_shape(node) or not tensor(node).dim():
        return ""
    is_new = first is None or local_shape_text(first) != local_shape_text(node)
    return local_shape_text(node) if is_new else ""


def numbers_text(numbers: Sequence[int]) -> str:
    """`0, 2 to 5`: ascending numbers, runs of three and more by their ends."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts: list[str] = []
    for run in runs:
        texts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    return ", ".join(texts)


def origin_text(node: Node) -> str:
    """What a value that crosses is: `add of transformer.h.3`."""
    return f"{(note(node).conversion or op_name(node)).removeprefix('aten.')} of {note(node).module or 'the model itself'}"


def brief(node: Node, why: str, layers: dict[str, str] | None = None) -> str:
    """A reason without the path that the section above `node` shows already."""
    why = why.removeprefix(f"{note(node).module}: " if note(node).module else "")
    for layer, shown in (layers or {}).items():
        if why.startswith((f"{layer}.", f"{layer}: ")):
            return (shown + why.removeprefix(layer)).removeprefix(".").removeprefix(": ")
    return why


def site_text(node: Node, weights: Mapping[str, str] | None = None) -> str:
    """What a collective calls itself in errors and records, as Python text: the path of its module.

    In a layer, `weights` are the paths of what it is called with, and the names of these arguments: they know their path.
    """
    path = note(node).module or "model"
    for layer, name in (weights or {}).items():
        if path == layer:
            return f"{name}.at()"
        if path.startswith(f"{layer}."):
            return f"{name}.at({json.dumps(path.removeprefix(f'{layer}.'))})"
    return json.dumps(star(path) if weights is not None else path)


def conversion_work(node: Node) -> tuple[str, str]:
    """What a conversion does forward and backward: its row of the table, less what this node does not need."""
    row = next(row for row in CONVERSIONS.values() if row.name == note(node).conversion)
    forward, backward = row.forward, row.backward
    if row.name == "s_to_s" and node.args[2] == node.args[4]:  # within one dim: see the runtime's s_to_s
        forward = backward = "none" if node.args[3] == node.args[5] else "all-gather"
    return forward, backward if note(node).needs_grad else "none"


def collective_bytes(node: Node, t: int) -> int:
    """Bytes of the whole value, its padding included, that the ranks along the axis of a conversion move, in one microbatch."""
    count = 1
    for size in note(node).extra["local_shapes"][0]:
        count *= size
    padded, axis = node.kwargs.get("size", 0), note(node).axis
    degree = parse(axis).size if is_sub_axis(axis) else t
    if note(node).layout[axis].kind == "S":
        count *= degree
    elif padded:
        count = count // padded * shard_size(padded, degree) * degree
    return count * tensor(node).element_size()


def local_shape_text(node: Node) -> str:
    """`[2, 64, 96]`: the local shape of a node's (first) value."""
    shapes = note(node).extra.get("local_shapes") or [shape(node)]
    return str(list(shapes[0]))


def value_text(node: Node, t: int = 1) -> str:
    """`[1, 8, 32] float32, invariant over tp`: what a rank has of a value."""
    dtype = str(tensor(node).dtype).removeprefix("torch.")
    text = f"{local_shape_text(node)} {dtype}"
    return f"{text}, {note(node).layout.text(note(node).dims)}" if t > 1 else text
