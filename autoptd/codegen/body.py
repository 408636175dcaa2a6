"""Write operators one per line, with comments for a reader: modules, shapes, and the bytes and reasons of collectives.

In: operators, their names, and a function that gives their expressions. Out: lines such as

    # transformer.h.3.mlp  (model.py:84)
    # column: 256 = 2 x 128
    c_fc = F.linear(ln_2, w.mlp.c_fc.weight, w.mlp.c_fc.bias)  # [2, 64, 128]
    # AR fwd, 65,536 B: row: its input arrives sharded
    c_proj = rt.p_to_i(c_proj, tp, site="transformer.h.3.mlp.c_proj")

A blank line and the module's path stand where the source module changes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch.fx import Node

from autoptd.codegen.writer import Writer
from autoptd.ir import markers
from autoptd.ir.layout import BATCH
from autoptd.ir.mesh import Mesh
from autoptd.ir.names import quoted, star
from autoptd.ir.notes import note, op_name, shape, tensor
from autoptd.ir.operators.table import operator_of, says_shape
from autoptd.ir.types import CONVERSIONS, ONE_RANK, shard_size

SHORT = {"all-reduce": "AR", "all-gather": "AG", "reduce-scatter": "RS", "all-to-all": "A2A"}
WHEN = ("fwd", "bwd")
# A method is chained to an expression of at most this many characters.
MAX_CHAINED = 60


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
    # The beginning of a chain of methods, `q.view(2, 64, 4, 16)`, and the comment on its shape.
    chain, chain_shape = "", ""
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
        text, shown = express(i, node), shape_of(node)
        if chain:
            # `q.transpose(1, 2)` continues with another method.
            text = chain + text.removeprefix(names[node])
            shown = "" if says_shape(node) else shown or chain_shape
        after = body[i + 1] if i + 1 < len(body) else None
        is_plain = not reason and (kept is None or kept.wrapped(node, text) == text)
        is_plain = is_plain and after is not None and _is_chained(node, after, names)
        if is_plain and not reason_of(after, mesh, layers, is_shared) and len(text) <= MAX_CHAINED:
            chain, chain_shape = text, shown
            continue
        chain = ""
        if kept is not None and not is_unpacked:
            text = kept.wrapped(node, text)
            reason = "; ".join(filter(None, [reason, note(node).keep.dropped]))
        writer.add(2, f"{target} = {text}", shown, above=reason, node=node)
        if kept is not None and is_unpacked:
            _write_pieces(writer, node, body, names, kept)


def _is_chained(node: Node, after: Node, names: dict[Node, str]) -> bool:
    """Tell whether a line continues on the next one, as in `q.view(...).transpose(1, 2)`: two methods and one name."""
    is_alone = list(node.users) == [after] and after.all_input_nodes == [node] and after.args[0] is node
    are_methods = operator_of(node).text.startswith(".") and operator_of(after).text.startswith(".")
    is_one_name = names[node] == names.get(after) and note(node).module == note(after).module
    return is_alone and are_methods and is_one_name


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


def section_of(node: Node, layers: dict[str, str] | None = None) -> str:
    """Return the source module that a line is shown under: a path that ends one name below a layer.

    In the method of a layer, `layers` maps the paths of its modules to their display names ("" for a single
    module), where the path then begins.
    """
    path = note(node).module
    if layers is None:
        # "transformer.h.3.attn.c_proj" -> "transformer.h.3.attn": without a number, the first two names.
        parts = path.split(".")
        cut = next((i + 2 for i, part in enumerate(parts) if part.isdigit()), 2)
        return ".".join(parts[:cut]) or "the model itself"
    for layer, shown in layers.items():
        if path == layer or path.startswith(f"{layer}."):
            inner = path.removeprefix(layer).removeprefix(".").split(".")[0]
            return ".".join(part for part in (shown, inner) if part) or "the layer itself"
    return path.split(".")[-1] or "the layer itself"


def reason_of(node: Node, mesh: Mesh, layers: dict[str, str] | None = None, is_shared: bool = False) -> str:
    """Return the comment above a line: collectives, bytes and reason of a conversion; why another operator is
    split.

    `is_shared`: the method says that several stages compute it.
    """
    record = note(node)
    if node.target is markers.convert:
        return _conversion_reason(node, mesh, layers)
    reasons = []
    # Most operators follow their operands, and a reason above each would hide the important ones. Only GEMMs,
    # operators whose local form differs, and operators that could not be split have one.
    is_split = record.why.startswith(("column", "row")) or bool(record.forms.keys() - {BATCH})
    if is_split or record.fallback or record.rule:
        reasons.append(record.why or record.rule)
    if record.reason:
        reasons.append(record.reason)
    # Not in the method of a layer: its rounds belong to different stages.
    is_repeated = record.stages_why.startswith("computed again") and len(record.stages) > 1
    if is_repeated and layers is None and not is_shared:
        reasons.append(f"computed on stages {numbers_text(record.stages)}: cheaper than sent")
    return "; ".join(reasons)


def _conversion_reason(node: Node, mesh: Mesh, layers: dict[str, str] | None) -> str:
    """Return `AR fwd, 65,536 B: why`."""
    work = []
    for kind, when in zip(conversion_work(node), WHEN, strict=True):
        if kind != "none":
            work.append(f"{SHORT.get(kind, kind)} {when}")
    # Regathered for the weight gradient instead of being kept: a collective that is not in the table.
    if note(node).gemm.uses is not None:
        work.append("AG again bwd")
    why = brief(node, note(node).why, layers)
    # The reason names the rank, and nothing is sent.
    if why and {*conversion_work(node)} <= {"none", ONE_RANK}:
        return why
    return f"{', '.join(work) or 'no communication'}, {collective_bytes(node, mesh):,} B: {why}"


def shape_of(node: Node) -> str:
    """Return the comment after a line: the local shape, where it changes and the expression does not show it."""
    first = next((arg for arg in node.args if isinstance(arg, Node)), None)
    if node.target is markers.convert or says_shape(node) or not tensor(node).dim():
        return ""
    is_new = first is None or local_shape_text(first) != local_shape_text(node)
    return local_shape_text(node) if is_new else ""


def brief(node: Node, why: str, layers: dict[str, str] | None = None) -> str:
    """Return a reason without the path that the section of `node` already shows."""
    if note(node).module:
        why = why.removeprefix(f"{note(node).module}: ")
    # "h.3.mlp: row ..." in the method of h.3 -> "mlp: row ...": the number of the second round would be wrong
    # in a method that all rounds call.
    for layer, shown in (layers or {}).items():
        if why.startswith((f"{layer}.", f"{layer}: ")):
            return (shown + why.removeprefix(layer)).removeprefix(".").removeprefix(": ")
    return why


def conversion_work(node: Node) -> tuple[str, str]:
    """Return the collectives of a conversion in forward and backward: its table row, less unneeded ones."""
    row = next(row for row in CONVERSIONS.values() if row.name == note(node).conversion)
    forward, backward = row.forward, row.backward
    if row.name == "s_to_s" and node.args[2] == node.args[4]:
        # Shards of the same dim in another arrangement (q|k|v in blocks): see the runtime's s_to_s.
        is_same = node.args[3] == node.args[5]
        forward = backward = "none" if is_same else "all-gather"
    if not note(node).needs_grad:
        backward = "none"
    return forward, backward


def collective_bytes(node: Node, mesh: Mesh) -> int:
    """Return the bytes of the whole value of a conversion, with its padding, of one microbatch."""
    count = math.prod(note(node).local.shapes[0])
    padded, axis = node.kwargs.get("size", 0), note(node).axis
    degree = mesh.degree(axis)
    if note(node).layout[axis].kind == "S":
        # The local shape is that of a shard.
        count *= degree
    elif padded:
        # The message is a multiple of the shard: 50257 rows over 4 ranks are 4 x 12565.
        count = count // padded * shard_size(padded, degree) * degree
    return count * tensor(node).element_size()


def origin_text(node: Node) -> str:
    """Describe a value that crosses: `add of transformer.h.3`."""
    operator = (note(node).conversion or op_name(node)).removeprefix("aten.")
    return f"{operator} of {note(node).module or 'the model itself'}"


def site_text(node: Node, weights: Mapping[str, str] | None = None) -> str:
    """Return the site of a collective, for errors and records, as Python text: the path of its module.

    In the method of a layer, `weights` are the paths of the modules that it is called with, by argument. The
    path is then read from the argument, since it differs from layer to layer.
    """
    path = note(node).module or "model"
    for layer, name in (weights or {}).items():
        if path == layer:
            return f"{name}.at()"
        if path.startswith(f"{layer}."):
            return f"{name}.at({quoted(path.removeprefix(f'{layer}.'))})"
    if weights is None:
        return quoted(path)
    # In a layer without such an argument, numbers become stars: "h.*.mlp".
    return quoted(star(path))


def value_text(node: Node) -> str:
    """Describe a rank's part of a value: `[1, 8, 32] float32`."""
    return f"{local_shape_text(node)} {str(tensor(node).dtype).removeprefix('torch.')}"


def typed_text(node: Node, mesh: Mesh) -> str:
    """Describe a value with its types, if ranks share values: `[1, 8, 32] float32, invariant over tp`."""
    if mesh.value_ranks == 1:
        return value_text(node)
    return f"{value_text(node)}, {note(node).layout.text(note(node).dims)}"


def local_shape_text(node: Node) -> str:
    """Return the local shape of a node's (first) value: `[2, 64, 96]`."""
    shapes = note(node).local.shapes or [shape(node)]
    return str(list(shapes[0]))


def numbers_text(numbers: Sequence[int]) -> str:
    """Format ascending numbers as `0, 2 to 5`: runs of three and more by their ends."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts: list[str] = []
    for run in runs:
        if len(run) > 2:
            texts.append(f"{run[0]} to {run[-1]}")
        else:
            texts += map(str, run)
    return ", ".join(texts)
