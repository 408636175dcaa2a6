"""Bring a recorded graph into the few forms that the passes know, without changing what it computes.

Removed: asserts, aliases, casts to the same dtype, dropout without effect, literal devices, detaches without effect,
dead code. In-place operators become functional (`functionalize.py`); random numbers become those of `draws.py`, and
every other random operator is refused by name; statistics become sums (`statistics.py`), sorted experts products by
row (`experts.py`). Rewritten here are operators with several spellings, and

- the reduction of a pointwise loss, which becomes a separate operator;
- `F.nll_loss`, and cross entropy with class probabilities as targets, which become log_softmax, gather, products and
  sums, so that samples and classes may be split (`cross_entropy_loss` of logits and labels stays one operator);
- indices that count from zero, which become views, or a gather if one index is arbitrary.

At last every value is marked that depends on parameters (`of_params`), or carries a gradient to one (`needs_grad`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.errors import PlanError, TraceError
from autoptd.ir.notes import note, op_name, output, set_note, shape, site, value
from autoptd.ir.operators.record import argument
from autoptd.ir.operators.table import operator_of
from autoptd.ir.scopes import on_cpu
from autoptd.trace import draws
from autoptd.trace.autocast import cast_once
from autoptd.trace.changed_buffers import check_updates
from autoptd.trace.draws import NAMES, check_generators, rewrite_noise
from autoptd.trace.experts import rewrite_experts
from autoptd.trace.functionalize import functionalize
from autoptd.trace.new_nodes import Maker, put
from autoptd.trace.statistics import rewrite_batch_norms, write_as_sums

aten = torch.ops.aten
IDENTITIES = {"aten.alias", "aten.lift_fresh", "aten.lift_fresh_copy", "aten.detach_"}
SIZES_OF_ANOTHER = {"aten.expand_as": aten.expand.default, "aten.view_as": aten.view.default}
SIZES_OF_ANOTHER |= {"aten.reshape_as": aten.reshape.default}
NEW = {
    "aten.new_zeros": aten.zeros.default,
    "aten.new_ones": aten.ones.default,
    "aten.new_full": aten.full.default,
}
RECURRENT = {"aten.gru", "aten.lstm", "aten.rnn_tanh", "aten.rnn_relu"}


def normalize(graph: Graph) -> None:
    """Rewrite `graph` in place.

    Raises TraceError or PlanError with the source line of an operator that cannot be kept.
    """
    check_generators(graph)
    rewrite_batch_norms(graph)
    # First, because the rewrites below assume that every value is written once.
    functionalize(graph)
    draws.rewrite_dropouts(graph)
    rewrite_noise(graph)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _normalize_one(graph, node)
    # By default random operators count as impure; this removes dead dropouts as well.
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    rewrite_experts(graph)
    write_as_sums(graph)
    for node in list(graph.nodes):
        # Keep inputs: a step is called with all of them.
        if node.op == "placeholder" and not node.users and note(node).kind != "input":
            graph.erase_node(node)
    _check_operators(graph)
    graph.lint()


def bring_to_traced(graph: Graph, model: nn.Module, dtype: torch.dtype | None, assigned: Set[str]) -> None:
    """Bring a newly read graph into the form TRACED.

    `dtype` is that of autocast, if any; `assigned` are buffers to which the forward has assigned other tensors.
    """
    with on_cpu():
        normalize(graph)
        if dtype is not None:
            cast_once(graph, dtype)
        mark_dependence(graph, dict(model.named_parameters()))
    check_updates(graph, model, assigned)


def _check_operators(graph: Graph) -> None:
    """Refuse calls left over from function transforms, which mean nothing outside them, and sparse tensors,
    which have no dims to split.
    """
    for node in graph.nodes:
        home = getattr(node.target, "__module__", None) or ""
        if "functorch" in home or op_name(node) in ("aten._make_dual", "aten._unpack_dual"):
            fact = f"torch.func or torch.vmap ({op_name(node)}) cannot be traced"
            raise TraceError(
                site(node), fact, "write it with operators on whole tensors, and gradients by hand"
            )
        pieces = value(node)
        for piece in pieces if isinstance(pieces, (tuple, list)) else [pieces]:
            if isinstance(piece, torch.Tensor) and piece.layout is not torch.strided:
                raise TraceError(
                    site(node), f"a {piece.layout} tensor", "use dense tensors, or gather and index_add"
                )


def _normalize_one(graph: Graph, node: Node) -> None:
    name = op_name(node)
    if "_assert" in name or name.startswith("aten.sym_constrain"):
        graph.erase_node(node)
    elif name in IDENTITIES:
        put(node, node.args[0])
    elif name == "aten.narrow":
        x, dim, start, length = node.args
        node.target, node.args = aten.slice.Tensor, (x, dim, start, start + length)
    elif name in ("aten.split", "aten.split_with_sizes", "aten.chunk"):
        _normalize_split(node)
    elif name == "aten.squeeze":
        _normalize_squeeze(node)
    elif name in ("aten.mT", "aten.mH") and not value(node).is_complex():
        node.target, node.args = aten.transpose.int, (node.args[0], -2, -1)
    elif name == "aten.movedim":
        _normalize_movedim(node)
    elif name == "aten.tensor_split":
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        sizes = [int(piece.shape[dim]) for piece in value(node)]  # type: ignore[index]
        node.target, node.args, node.kwargs = aten.split_with_sizes.default, (node.args[0], sizes, dim), {}
        _normalize_split(node)
    elif name == "aten.take_along_dim" and _is_gather(node):
        node.target, node.args = aten.gather.default, (node.args[0], node.args[2], node.args[1])
    elif name in ("aten.nll_loss_nd", "aten.nll_loss", "aten.nll_loss2d"):
        _normalize_nll(node)
        return
    elif name == "aten.cross_entropy_loss" and has_soft_labels(node):
        rewrite_soft_labels(node)
        return
    elif name == "aten.embedding" and True in node.args[3:]:
        fact = (
            "embedding with scale_grad_by_freq or sparse gradients: they depend on how the batch is divided"
        )
        raise PlanError(site(node), fact, "use an embedding without scale_grad_by_freq and sparse")
    elif name == "aten.broadcast_to":
        node.target = aten.expand.default
    elif name == "aten.index":
        rewrite_index(node)
    # Only the shape of the other tensor is read.
    elif name in SIZES_OF_ANOTHER:
        node.target, node.args = SIZES_OF_ANOTHER[name], (node.args[0], list(shape(node)))
    # Only the dtype of the tensor is read.
    elif name in NEW:
        node.target, node.args, node.kwargs = NEW[name], node.args[1:], {"dtype": value(node).dtype}
    elif name == "aten.broadcast_tensors":
        _normalize_broadcast(node)
    elif name in ("aten.cat", "aten.concat", "aten.concatenate") and isinstance(argument(node, "dim"), int):
        node.target = aten.cat.default
        _normalize_cat(node)
    elif _adds_nothing(node):
        put(node, node.args[0])
    elif operator_of(node).reduces:
        _split_reduction(graph, node)
    elif operator_of(node).moves == "cast":
        _normalize_cast(node)
    # rrelu only draws its slope in training.
    elif name == "aten.rrelu" and not argument(node, "training"):
        lower, upper = argument(node, "lower"), argument(node, "upper")
        node.target, node.args, node.kwargs = aten.leaky_relu.default, (node.args[0], (lower + upper) / 2), {}
    elif name in RECURRENT and not _is_random(node):
        _put_time_first(graph, node)
    elif name == "aten.instance_norm" and node.args[5] and node.args[3] is not None:
        fact = f"its running statistics (buffer {note(node.args[3]).name}) are changed by the forward"  # type: ignore[arg-type]
        raise PlanError(site(node), fact, "use a norm without running statistics, or model.eval()")
    elif _is_random(node):
        fact = "a random operator would draw other numbers on every layout"
        raise PlanError(
            site(node), fact, "pass the numbers to the model as an input; nn.Dropout is drawn exactly"
        )
    node.kwargs = {
        key: arg for key, arg in node.kwargs.items() if key not in ("device", "pin_memory", "layout")
    }


def _adds_nothing(node: Node) -> bool:
    """Tell whether a node adds 0: `sum(losses)` begins with 0 + loss."""
    if op_name(node) != "aten.add" or isinstance(node.args[1], Node) or node.args[1] != 0:
        return False
    return value(node.args[0]).dtype == value(node).dtype  # type: ignore[arg-type]


def _normalize_cat(node: Node) -> None:
    """Remove empty vectors, which torch ignores in cat: an unused key-value cache is one."""
    parts = [part for part in node.args[0] if shape(part) != (0,)]  # type: ignore[union-attr, arg-type]
    if len(parts) == 1 and value(parts[0]).dtype == value(node).dtype:  # type: ignore[arg-type]
        put(node, parts[0])
    else:
        node.args = (parts, *node.args[1:])


def _normalize_split(node: Node) -> None:
    """Replace pieces of unequal sizes by slices: the dims of one do not determine the others."""
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    sizes = [int(piece.shape[dim]) for piece in value(node)]
    ends = list(accumulate(sizes))
    if len(set(sizes)) > 1 and all(op_name(user) == "getitem" for user in node.users):
        for user in list(node.users):
            i = int(user.args[1])  # type: ignore[arg-type]
            user.target, user.args = aten.slice.Tensor, (node.args[0], dim, ends[i] - sizes[i], ends[i])
            note(user).code, note(user).origin = note(node).code, replace(note(user).origin, piece=i)


def _normalize_squeeze(node: Node) -> None:
    x = node.args[0]
    size = shape(x)  # type: ignore[arg-type]
    given: Any = node.args[1] if len(node.args) > 1 else range(len(size))
    given = [given] if isinstance(given, int) else given
    # squeeze without dims would drop dims whose local size is 1 because they are split.
    dims = [dim % len(size) for dim in given if size and size[dim] == 1]
    if dims:
        node.target, node.args, node.kwargs = aten.squeeze.dims, (x, dims), {}
    else:
        put(node, x)


def _normalize_movedim(node: Node) -> None:
    x, sources, targets = node.args
    count = len(shape(x))  # type: ignore[arg-type]
    if isinstance(sources, int):
        sources, targets = [sources], [targets]
    moved = {to % count: source % count for source, to in zip(sources, targets, strict=True)}  # type: ignore[operator, arg-type]
    rest = iter(dim for dim in range(count) if dim not in moved.values())
    node.target, node.args = (
        aten.permute.default,
        (x, [moved[d] if d in moved else next(rest) for d in range(count)]),
    )


def _is_gather(node: Node) -> bool:
    """Tell whether a take_along_dim is a gather, without broadcasting."""
    if len(node.args) < 3 or node.args[2] is None:
        return False
    x, index = shape(node.args[0]), shape(node.args[1])  # type: ignore[arg-type]
    dim = node.args[2] % len(x)  # type: ignore[operator]
    return len(x) == len(index) and all(d == dim or x[d] == index[d] for d in range(len(x)))


def _normalize_nll(node: Node) -> None:
    """Replace nll_loss of log-probabilities by cross_entropy: log_softmax does not change them."""
    x = node.args[0]
    # Reshapes and transposes keep log-probabilities.
    while isinstance(x, Node) and op_name(x) in (
        "aten.view",
        "aten.flatten",
        "aten.reshape",
        "aten.transpose",
    ):
        x = x.args[0]
    if isinstance(x, Node) and op_name(x) == "aten.log_softmax":
        node.target = aten.cross_entropy_loss.default
    else:
        rewrite_nll(node)


def _normalize_broadcast(node: Node) -> None:
    """Expand the tensors that a loss is called with where their shapes differ."""
    for piece in list(node.users):
        x = node.args[0][piece.args[1]]  # type: ignore[index]
        if shape(x) == shape(piece):
            put(piece, x)
        else:
            piece.target, piece.args = aten.expand.default, (x, list(shape(piece)))


def _split_reduction(graph: Graph, node: Node) -> None:
    """Split a loss with a reduction into the loss of every sample, then the mean or the sum."""
    # The global mean cannot be computed from means of parts: the reduction must be a node that can be split.
    names = [parameter.name for parameter in node.target._schema.arguments]  # type: ignore[union-attr]
    reduction = argument(node, "reduction")
    kwargs = dict(zip(names, node.args, strict=False)) | node.kwargs | {"reduction": 0}
    node.args, node.kwargs = tuple(kwargs.pop(name) for name in names[:2]), kwargs
    if reduction:
        with graph.inserting_after(node):
            made = graph.call_function((aten.mean.default, aten.sum.default)[reduction - 1])
        node.replace_all_uses_with(made)
        made.args, made.meta = (node,), {"val": value(node)}
        set_note(made, note(node).bare())
        args, kwargs = map_arg((node.args, node.kwargs), value)
        with torch.no_grad():
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _put_time_first(graph: Graph, node: Node) -> None:
    """Transpose around recurrent layers that read [batch, time, ...]: their results differ in batch dim."""
    names = [parameter.name for parameter in node.target._schema.arguments]  # type: ignore[union-attr]
    if names[0] != "input" or names[-1] != "batch_first" or not argument(node, "batch_first"):
        return
    given = dict(zip(names, node.args, strict=False)) | node.kwargs | {"batch_first": False}
    given["input"] = Maker(node)(aten.transpose.int, given["input"], 0, 1)
    node.args, node.kwargs = tuple(given.values()), {}
    pieces = list(value(node))
    pieces[0] = pieces[0].transpose(0, 1)
    node.meta["val"] = type(value(node))(pieces)
    for piece in [user for user in node.users if user.args[1] == 0]:
        with graph.inserting_after(piece):
            made = graph.call_function(aten.transpose.int, (piece, 0, 1))
        piece.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
        made.meta["val"], piece.meta["val"] = value(piece), pieces[0]
        set_note(made, note(piece).bare())


def _normalize_cast(node: Node) -> None:
    source = node.args[0]
    assert isinstance(source, Node)
    if value(source).dtype == value(node).dtype:
        put(node, source)
    else:
        node.target, node.args, node.kwargs = aten.to.dtype, (source, value(node).dtype), {}


def _is_random(node: Node) -> bool:
    if op_name(node) in (draws.NAME, draws.ATTENTION, *NAMES) or not isinstance(
        node.target, torch._ops.OpOverload
    ):
        return False
    # Recurrent operators only apply dropout between layers.
    if op_name(node) in RECURRENT:
        return bool(
            argument(node, "dropout") and argument(node, "train") and argument(node, "num_layers") > 1
        )
    return torch.Tag.nondeterministic_seeded in node.target.tags


def has_soft_labels(node: Node) -> bool:
    """Tell whether the targets of a cross_entropy_loss are class probabilities."""
    return bool(value(node.args[1]).is_floating_point())  # type: ignore[arg-type]


def rewrite_soft_labels(node: Node) -> None:
    """Rewrite a cross_entropy_loss of class probabilities; a mean divides by samples, not class weights."""
    make = Maker(node)
    logits, targets = node.args[:2]
    dim = min(1, len(shape(logits)) - 1)  # type: ignore[arg-type]
    classes, smoothing = shape(logits)[dim], argument(node, "label_smoothing")  # type: ignore[arg-type]
    if smoothing:
        targets = make(aten.mul.Tensor, targets, 1 - smoothing)
        targets = make(aten.add.Tensor, targets, smoothing / classes)
    product = make(aten.mul.Tensor, make(aten.log_softmax.int, logits, dim), targets)
    weight = argument(node, "weight")
    if weight is not None:
        behind = [1] * (len(shape(logits)) - 1 - dim)  # type: ignore[arg-type]
        product = make(aten.mul.Tensor, product, make(aten.view.default, weight, [classes, *behind]))
    loss = make(aten.neg.default, make(aten.sum.dim_IntList, product, [dim]))
    reduction = argument(node, "reduction")
    if reduction:
        loss = make((aten.mean.default, aten.sum.default)[reduction - 1], loss)
    put(node, loss)


def rewrite_nll(node: Node) -> None:
    """Rewrite an nll_loss of any values; a mean divides by the number, or weight, of labels not ignored."""
    make = Maker(node)
    x, labels = node.args[:2]
    dim = min(1, len(shape(x)) - 1)  # type: ignore[arg-type]
    ignored = make(aten.eq.Scalar, labels, argument(node, "ignore_index"))
    known = make(aten.masked_fill.Scalar, labels, ignored, 0)
    picked = make(aten.gather.default, x, dim, make(aten.unsqueeze.default, known, dim))
    loss = make(aten.neg.default, make(aten.squeeze.dims, picked, [dim]))
    counted = make(aten.logical_not.default, ignored)
    weight = argument(node, "weight")
    if weight is not None:
        counted = make(aten.masked_fill.Scalar, make(aten.index.Tensor, weight, [known]), ignored, 0.0)
        loss = make(aten.mul.Tensor, loss, counted)
    loss = make(aten.masked_fill.Scalar, loss, ignored, 0.0)
    reduction = argument(node, "reduction")
    if reduction:
        loss = make(aten.sum.default, loss)
    if reduction == 1:
        loss = make(aten.div.Tensor, loss, make(aten.sum.default, counted))
    put(node, loss)


# Larger indices are not evaluated.
MAX_ENTRIES = 1 << 20


def rewrite_index(node: Node) -> None:
    """Rewrite an index whose leading dims are counted, each along a separate dim, except for at most one."""
    x, indices = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    while indices and indices[-1] is None:
        indices.pop()
    size, out = shape(x), shape(node)  # type: ignore[arg-type]
    if not indices or None in indices:
        return
    # The dims that the indices, broadcast together, add to the result.
    met = out[: len(out) - (len(size) - len(indices))]
    places = [_counted_along(index, n, len(met)) for index, n in zip(indices, size, strict=False)]
    if None not in places:
        _index_to_view(node, [place for place in places if place is not None], met)
    elif places.count(None) == 1 and len(places) > 1:
        _index_to_gather(node, indices, places, met)


def _index_to_view(node: Node, places: list[int], met: Sequence[int]) -> None:
    """Replace an index that counts in all dims by a view: with separate dims every entry is taken once."""
    x, out = node.args[0], shape(node)
    size = shape(x)  # type: ignore[arg-type]
    taken = [place for place, n in zip(places, size, strict=False) if n != 1]
    if len(set(taken)) != len(taken) or math.prod(out) != math.prod(size):
        return
    order = [*sorted(range(len(places)), key=lambda dim: (places[dim], dim)), *range(len(places), len(size))]
    moved = Maker(node)(aten.permute.default, x, order)
    node.target, node.args = aten.view.default, (moved, list(out))


def _index_to_gather(node: Node, indices: list[Node], places: list[int | None], met: Sequence[int]) -> None:
    """Replace an index by a gather: one index is looked up, the others count along leading dims."""
    x, out, ids = node.args[0], shape(node), indices[places.index(None)]
    size = shape(x)  # type: ignore[arg-type]
    looked_up = places.index(None)
    counted = sorted(
        (dim for dim in range(len(places)) if dim != looked_up), key=lambda dim: (places[dim], dim)
    )
    kept = [size[dim] for dim in counted]
    is_counted = all(size[dim] == 1 or places[dim] == k for k, dim in enumerate(counted))
    if value(ids).dtype not in (torch.int64, torch.int32) or not is_counted or list(met[: len(kept)]) != kept:
        return

    make = Maker(node)

    def shaped(target: Any, ids: Node, *size: int) -> Node:
        return ids if shape(ids) == size else make(target, ids, list(size))

    order = [*counted, looked_up, *range(len(places), len(size))]
    rest, free = size[len(places) :], math.prod(met[len(kept) :])
    if order != list(range(len(size))):
        x = make(aten.permute.default, x, order)
    # gather does not support negative indices.
    from_end = make(aten.lt.Scalar, ids, 0)
    from_start = make(aten.add.Tensor, ids, size[looked_up])
    ids = make(aten.where.self, from_end, from_start, ids)
    ids = make.cast(ids, torch.int64)
    ids = shaped(aten.expand.default, ids, *met)
    ids = shaped(aten.reshape.default, ids, *kept, free, *[1] * len(rest))
    ids = shaped(aten.expand.default, ids, *kept, free, *rest)
    found = make(aten.gather.default, x, len(kept), ids)
    node.target, node.args = aten.view.default, (found, list(out))


def _counted_along(index: Node, size: int, ndim: int) -> int | None:
    """Return the dim, of `ndim` aligned from the right, along which `index` is 0 ... size - 1, else None."""
    if (
        value(index).dtype not in (torch.int64, torch.int32)
        or value(index).numel() != size
        or size > MAX_ENTRIES
    ):
        return None
    found = _evaluate(index, {})
    if found is None or not torch.equal(found.flatten(), torch.arange(size, dtype=found.dtype)):
        return None
    dims = [dim for dim, n in enumerate(found.shape) if n != 1]
    if len(dims) == 1:
        return ndim - found.dim() + dims[0]
    return 0 if size == 1 else None


def _evaluate(node: Node, known: dict[Node, Tensor | None]) -> Tensor | None:
    """Return the value of a node computed from literals only; None if it reads anything else, or is large."""
    if node not in known:
        known[node] = None
        known_value = value(node)
        if (
            node.op == "call_function"
            and isinstance(known_value, Tensor)
            and known_value.numel() <= MAX_ENTRIES
        ):
            read = [_evaluate(arg, known) for arg in node.all_input_nodes]
            if all(arg is not None for arg in read):
                args, kwargs = map_arg((node.args, node.kwargs), lambda arg: known[arg])
                kwargs = {
                    key: arg for key, arg in kwargs.items() if key not in ("device", "pin_memory", "layout")
                }
                known[node] = node.target(*args, **kwargs)
    return known[node]


def mark_dependence(graph: Graph, parameters: dict[str, nn.Parameter]) -> None:
    """Fill `of_params` and `needs_grad` of every node; remove detaches that have no effect."""
    _mark(graph, parameters)
    _drop_idle_detaches(graph)
    _forget_lost_gradients(graph)


def _drop_idle_detaches(graph: Graph) -> None:
    """Remove detaches of values without gradient (a table of sines under no_grad)."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        source = node.args[0]
        if isinstance(source, Node) and not note(source).needs_grad:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _forget_lost_gradients(graph: Graph) -> None:
    """Clear `needs_grad` of values that the loss reads only through detach or zeros_like.

    Their parameters are not trained.
    """
    # Walk backwards, like gradients: a value gets a gradient only from its readers.
    live = set(output(graph).all_input_nodes)
    for node in reversed(graph.nodes):
        if node not in live:
            # Includes the output node, which has no value.
            note(node).needs_grad = False
        elif note(node).needs_grad:
            live.update(node.all_input_nodes)


def _mark(graph: Graph, parameters: dict[str, nn.Parameter]) -> None:
    """Propagate parameters and gradients from operand to result."""
    for node in graph.nodes:
        record = note(node)
        if record.kind == "param":
            record.of_params, record.needs_grad = True, parameters[record.name].requires_grad
        elif node.op in ("call_function", "output"):
            operands = [note(arg) for arg in node.all_input_nodes]
            record.of_params = any(operand.of_params for operand in operands)
            result = node.meta.get("val")
            pieces = result if isinstance(result, (tuple, list)) else [result]
            needs_grad = any(operand.needs_grad for operand in operands)
            cuts = operator_of(node).cuts_gradient
            record.needs_grad = needs_grad and not cuts and any(map(_is_differentiable, pieces))


def _is_differentiable(piece: Any) -> bool:
    return isinstance(piece, torch.Tensor) and (piece.dtype.is_floating_point or piece.is_complex())
