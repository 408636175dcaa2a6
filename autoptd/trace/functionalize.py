"""Turn in-place operators into functional ones, so that every value of the graph is written once.

In: a recorded graph, with the in-place operators of the model. Out: the same values without writes. A
write to a fresh value becomes its functional form, and all later readers read that; a write through slices
and single indices (`shifted[:, 1:] = ids[:, :-1]`) concatenates the new piece with the pieces around it. The
final value of a buffer becomes an `update_buffer` before the output. Refused by name: writes to parameters and
arguments, writes through other views, and writes to the base of a view that is read later.

    h.mul_(2)              ->  mul = h * 2
    h[:, 1:] = x           ->  cat([h[:, :1], x], 1)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.errors import PlanError, TraceError
from autoptd.ir.notes import is_tensor, note, op_name, ops, set_note, shape, site, value
from autoptd.ir.operators.record import argument
from autoptd.ir.updates import update_call
from autoptd.trace import draws
from autoptd.trace.new_nodes import Maker

aten = torch.ops.aten
MAY_ALIAS = {"aten.reshape", "aten.contiguous", "aten.to", "aten.flatten", "aten.expand_as"}
# Operators that overwrite their target without reading it.
ASSIGNS = {"aten.copy_", "aten.fill_"}
# Functional forms whose overload differs from the in-place operator's in name or arguments.
FORMS = {
    aten.float_power_.Scalar: aten.float_power.Tensor_Scalar,
    aten.float_power_.Tensor: aten.float_power.Tensor_Tensor,
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    aten.ldexp_.default: aten.ldexp.Tensor,
    # `aten.normal` itself takes means or deviations as tensors.
    aten.normal_.default: aten.normal_functional.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.transpose_.default: aten.transpose.int,
    # `x |= y` of integers and booleans.
    **{
        getattr(getattr(aten, f"__i{name}__"), overload): getattr(getattr(aten, f"__{name}__"), overload)
        for name in ("and", "or", "xor", "lshift", "rshift")
        for overload in ("Scalar", "Tensor")
    },
}


def functionalize(graph: Graph) -> None:
    """Rewrite `graph` in place.

    TraceError or PlanError with the source line of a write that cannot be kept.
    """
    for node in list(ops(graph)):
        for target in _outs(node):
            if note(target).kind == "buffer":
                _write_afterwards(graph, node, target)
    latest: dict[Node, Node] = {}
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(ops(graph)):
        # Readers after a write read its result, whichever alias they use.
        node.args = map_arg(node.args, lambda arg: latest.get(arg, arg))
        node.kwargs = map_arg(node.kwargs, lambda arg: latest.get(arg, arg))
        for target in _outs(node):
            _check_fresh(node, _views_to_base(target), position, latest)
        if not _writes(node):
            _refuse_other_writes(node)
            continue
        target = node.args[0]
        if not isinstance(target, Node):
            fact = f"{op_name(node)} changes several tensors in one call, and has no functional form"
            raise TraceError(site(node), fact, "an in-place operator on each of them")
        # `h[0] += 1` ends by writing the result, which is in place already, into h once more.
        if op_name(node) == "aten.copy_" and _is_same(target, node.args[1]):
            latest[node] = target
            continue
        views = _views_to_base(target)
        _check_fresh(node, views, position, latest)
        for old, new in _written(graph, node, views):
            position[new] = position[node]
            for key in [key for key, current in latest.items() if current is old] + [old]:
                latest[key] = new
        latest[node] = latest[target]
    last = next(iter(reversed(graph.nodes)))
    last.args = map_arg(last.args, lambda arg: latest.get(arg, arg))
    for node, new in list(latest.items()):
        if note(node).kind == "buffer":
            _update(last, node, new)
    # Erase backwards, so that the readers of a write go first.
    for old in reversed(list(latest)):
        if old.op == "call_function" and _writes(old):
            graph.erase_node(old)


def _write_afterwards(graph: Graph, node: Node, target: Node) -> None:
    """Split an operator with an `out=` buffer into its functional form and a write."""
    made_by: Any = node.target
    wanted = [(arg.name, str(arg.type)) for arg in made_by._schema.arguments if not arg.is_out]
    packet = getattr(torch.ops.aten, made_by._schema.name.removeprefix("aten::"))
    for overload in (getattr(packet, name) for name in packet.overloads()):
        if [(arg.name, str(arg.type)) for arg in overload._schema.arguments] == wanted:
            with graph.inserting_before(node):
                pure = graph.call_function(overload, node.args)
            pure.kwargs = {name: arg for name, arg in node.kwargs.items() if arg is not target}
            pure.meta["val"] = value(node)
            set_note(pure, note(node).copy())
            node.target, node.args, node.kwargs = aten.copy_.default, (target, pure), {}
            return
    fact = f"{op_name(node)} writes to buffer {note(target).name} through out=, and has no functional form"
    raise TraceError(site(node), fact, "self.buffer.copy_(...)")


def _update(last: Node, buffer: Node, new: Node) -> None:
    """Insert the update of a buffer to its final value before the output."""
    if shape(new) != shape(buffer) or value(new).dtype != value(buffer).dtype:
        fact = f"buffer {note(buffer).name} changes its shape or dtype"
        raise PlanError(
            site(new), fact, "allocate the buffer with the shape and dtype that it has after the forward"
        )
    loss = last.args[0]
    assert isinstance(loss, Node)
    with last.graph.inserting_before(last):
        made = update_call(last.graph, loss, new, note(buffer).name)
    made.meta["val"] = value(loss)
    set_note(made, note(loss).bare())
    last.args = (made, *last.args[1:])


def _writes(node: Node) -> bool:
    """Tell from its schema whether an operator changes its first argument: `x |= y` has no `_` suffix."""
    name = op_name(node)
    return name.startswith("aten.") and name != "aten.detach_" and 0 in _changed(node)


def _changed(node: Node) -> list[int]:
    """Return which arguments an operator writes to, except `out=`."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = enumerate(node.target._schema.arguments)
    return [i for i, arg in arguments if arg.alias_info and arg.alias_info.is_write and not arg.is_out]


def _refuse_other_writes(node: Node) -> None:
    """Raise TraceError for writes that would be lost: a custom operator that changes an argument, or one of
    torch's that changes other arguments than the first, if they exist before the call.
    """
    if op_name(node) == "aten.detach_":
        return
    for i in _changed(node):
        name = node.target._schema.arguments[i].name  # type: ignore[union-attr]
        target = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        is_old = isinstance(target, Node) and _viewed(target).op == "placeholder"
        if is_old or not op_name(node).startswith("aten."):
            what = f"its argument {name}"
            if is_old and note(_viewed(target)).name:
                what = f"{note(_viewed(target)).kind} {note(_viewed(target)).name}"
            fact = f"{op_name(node)} changes {what} in place, and has no functional form"
            raise TraceError(
                site(node), fact, "an operator that returns the new value: self.buffer.copy_(op(self.buffer))"
            )


def _outs(node: Node) -> list[Node]:
    """Return the `out=` arguments of an operator."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    names = [arg.name for arg in node.target._schema.arguments if arg.kwarg_only and arg.is_out]
    found = (node.kwargs.get(name) for name in names)
    return [target for target in found if isinstance(target, Node)]


def _is_same(target: Node, source: Any) -> bool:
    """Tell whether `source` is `target`, or the same piece of the same value."""
    if not isinstance(source, Node) or _piece(target) is None or _piece(source) is None:
        return source is target
    return (
        source.args[0] is target.args[0]
        and _piece(source) == _piece(target)
        and source.target is target.target
    )


def _views_to_base(target: Node) -> list[Node]:
    """Return `target`, the value that it is a slice or a single index of, and so on."""
    found = [target]
    while _piece(found[-1]) is not None:
        found.append(found[-1].args[0])  # type: ignore[arg-type]
    return found


def _piece(node: Node) -> tuple[int, int, int] | None:
    """Return (dim, start, end) of a slice without step or a select; None for other operators."""
    name = op_name(node)
    if name not in ("aten.slice", "aten.select"):
        return None
    x: Any = node.args[0]
    dim, start, _, step = (*node.args[1:], *(0, 0, None, 1)[len(node.args) - 1 :])
    dim = int(dim or 0) % len(shape(x))  # type: ignore[arg-type]
    start, size = int(start or 0), shape(x)[dim]  # type: ignore[arg-type]
    start = max(start + size, 0) if start < 0 else min(start, size)
    if name == "aten.select":
        return dim, start, start + 1
    return (dim, start, start + shape(node)[dim]) if step == 1 else None


def _check_fresh(node: Node, views: list[Node], position: dict[Node, int], latest: dict[Node, Node]) -> None:
    """Refuse a write unless its base, the last of `views`, is made by the forward, and is not read later
    through an older view or through a value that it is a view of.
    """
    base = views[-1]
    record = note(base)
    if record.origin.constant is not None:
        fact = "the forward changes a tensor that is not a buffer"
        raise PlanError(
            site(node), fact, "register it with register_buffer, or do not write to it in forward"
        )
    if record.kind == "param":
        fact = f"parameter {record.name} is changed in place"
        raise TraceError(site(node), fact, "do not write to parameters in forward")
    if record.kind == "input":
        raise TraceError(
            site(node), "an argument of the model is changed in place", "write out of place: x = x + y"
        )
    at = position[node]
    older = {alias for view in views for alias in _aliases(view, {*views}) if position.get(alias, -1) < at}
    whole = _viewed(base)
    if whole is not base:
        older |= {whole, *_aliases(whole, {*views})}
    # Readers after the write may refer to the old nodes of these values as well.
    older |= {old for old, new in latest.items() if new in older}
    is_read = any(position.get(user, -1) > at for alias in older for user in alias.users)
    if is_read or (whole is not base and whole.op == "placeholder"):
        fact = "an in-place write goes through a view"
        raise TraceError(site(node), fact, "write out of place: torch.where, torch.cat")


def _viewed(node: Node) -> Node:
    """Return the base of a view, through views of views; the node itself if it is not a view."""
    while _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _aliases(node: Node, but: set[Node]) -> Iterator[Node]:
    """Yield the views of `node`, and views of those."""
    for user in node.users:
        if user not in but and _is_view(user):
            yield user
            yield from _aliases(user, but)


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    if op_name(node) == "aten.to" and value(node).dtype != value(node.args[0]).dtype:  # type: ignore[arg-type]
        return False
    if op_name(node) in MAY_ALIAS:
        return True
    if op_name(node) == draws.NAME:
        return not draws.drops(node)
    if not isinstance(node.target, torch._ops.OpOverload) or _writes(node):
        return False
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _written(graph: Graph, node: Node, views: list[Node]) -> Iterator[tuple[Node, Node]]:
    """Yield (old, new) of every value that `node` changes: its target, and the views up to the base."""
    make = Maker(node, node.next, note(node))
    made = _assigned(make, node, views[0]) if op_name(node) in ASSIGNS else _pure(make, node)
    for view, whole in pairwise(views):
        made = _put_back(make, view, whole, made)
    yield views[-1], made
    for view in reversed(views[:-1]):
        made = make(view.target, made, *view.args[1:])
        yield view, made


def _assigned(make: Maker, node: Node, target: Node) -> Node:
    """Return the value that `copy_` or `fill_` writes."""
    source, wanted = node.args[1], value(target)
    if not isinstance(source, Node):
        return make(aten.full_like.default, target, source)
    source = make.cast(source, wanted.dtype)
    if shape(source) != shape(target):
        source = make(aten.expand.default, source, list(shape(target)))
    # Clone: the next write must not change the source.
    return make(aten.clone.default, source)


def _put_back(make: Maker, view: Node, whole: Node, piece: Node) -> Node:
    """Return `whole` with `view` replaced by `piece`."""
    place = _piece(view)
    assert place is not None
    dim, start, end = place
    size = shape(whole)[dim]
    if op_name(view) == "aten.select":
        piece = make(aten.unsqueeze.default, piece, dim)
    before = _parts_of(make, whole, dim, 0, start)
    behind = _parts_of(make, whole, dim, end, size)
    parts = [*before, piece, *behind]
    return make(aten.cat.default, parts, dim) if len(parts) > 1 else piece


def _parts_of(make: Maker, whole: Node, dim: int, start: int, end: int) -> list[Node]:
    """Return the parts of `whole` from `start` to `end`; reuse the operands of a cat whose bounds match."""
    if start == end:
        return []
    if op_name(whole) == "aten.cat" and argument(whole, "dim") % len(shape(whole)) == dim:
        parts: list[Node] = list(whole.args[0])  # type: ignore[arg-type]
        ends = list(accumulate((shape(part)[dim] for part in parts), initial=0))
        if start in ends and end in ends:
            return parts[ends.index(start) : ends.index(end)]
    return [make(aten.slice.Tensor, whole, dim, start, end)]


def _pure(make: Maker, node: Node) -> Node:
    """Return the functional form of an in-place operator."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if target is aten.fill_diagonal_.default:
        return _with_diagonal(make, node)
    args, pure = list(node.args), FORMS.get(target)
    if target is aten.polygamma_.default:
        pure, args = aten.polygamma.default, args[::-1]
    if pure is None:
        packet = getattr(aten, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
        pure = getattr(packet, target._overloadname, None) if packet is not None else None
    if pure is None:
        raise TraceError(site(node), "this in-place operator has no functional form", "write it out of place")
    made = make(pure, *args, **node.kwargs)
    # An in-place operator casts a wider result to the dtype of its target.
    return make.cast(made, value(node).dtype) if is_tensor(node) else made


def _with_diagonal(make: Maker, node: Node) -> Node:
    """Return the result of `fill_diagonal_`: the number where all indices are equal."""
    target, number = node.args[0], argument(node, "fill_value")
    assert isinstance(target, Node)
    sizes, indices = shape(target), []
    for dim, size in enumerate(sizes):
        index = make(aten.arange.default, size, device=value(target).device)
        # `wrap` continues in tall matrices one row below the end of the diagonal.
        if dim == 0 and argument(node, "wrap") and len(sizes) == 2:
            index = make(aten.remainder.Scalar, index, sizes[1] + 1)
        indices.append(make(aten.view.default, index, [size] + [1] * (len(sizes) - 1 - dim)))
    mask = make(aten.eq.Tensor, indices[0], indices[1])
    for index in indices[2:]:
        mask = make(aten.logical_and.default, mask, make(aten.eq.Tensor, indices[0], index))
    return make(aten.masked_fill.Scalar, target, mask, number)
