"""Copy KV heads until context-parallel ranks divide them (TRACED -> TRACED, where ranks divide tokens).

By Ulysses every rank has some heads of all tokens. Of fewer KV heads than ranks, several ranks need the same: each of them
would gather all heads of all tokens, to read one. In: a TRACED graph, and the trace with all samples. Out: both, in which
attention reads copies of its KV heads, made of a rank's own tokens. The all-to-all behind sends every rank the copy that its
queries read, and backward adds up the gradients of the copies.

    attention(q, k, v)                                                # 8 heads, 2 KV heads, over 4 ranks
    attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))     # 4 KV heads

Sent are 2 b s k (c-1)/c elements of keys and values with heads of size k, whatever the number of KV heads.

    copy_heads(graph, ctx)
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from autoptd.ir.mesh import Mesh, Role
from autoptd.ir.notes import copy_graph, note, op_name, ops, placeholders, shape
from autoptd.ir.operators.record import argument, operands
from autoptd.ir.operators.table import operator_of
from autoptd.passes.axes.axes import Axes
from autoptd.passes.context import Context
from autoptd.passes.runner import CALLS, Form, divides_tokens, graph_pass
from autoptd.passes.solve.queries import ATTENTION
from autoptd.passes.tokens.both_traces import drop_unread, second_trace
from autoptd.passes.tokens.token_regions import Maker

aten = torch.ops.aten


@graph_pass(takes=Form.TRACED, gives=Form.TRACED, when=divides_tokens, changes=(CALLS, "tokens"))
def copy_heads(graph: Graph, ctx: Context) -> None:
    """Rewrite the attention of both traces where both have it."""
    if ctx.options.context.attention not in ("auto", "ulysses"):
        return
    whole = second_trace(graph, ctx)
    ranks = math.prod(map(ctx.mesh.degree, ctx.mesh.token_axes))
    outer = math.prod(map(ctx.mesh.degree, ctx.mesh.axes_of(Role.VALUES)))
    is_found = False
    for node, same in zip(list(ops(graph)), list(ops(whole)), strict=False):
        heads = _kv_heads(node)
        if heads is None or _kv_heads(same) is None:
            continue
        times = _times(node, heads[0], outer, ranks)
        if times > 1 and (
            ctx.options.context.attention == "ulysses" or _pays(node, heads[0], times, outer, ranks)
        ):
            if not is_found:
                _note_atoms(graph)
            is_found = True
            for attention in dict.fromkeys((node, same)):
                _replace(attention, times, outer)
    if is_found:
        drop_unread(graph, whole)


def degrees_of_copies(node: Node, mesh: Mesh) -> list[int]:
    """Return the degrees for which the KV heads of an attention would be copied."""
    found, outer = _kv_heads(node), math.prod(map(mesh.degree, mesh.axes_of(Role.VALUES)))
    if found is None:
        return []
    return [c for c in range(2, shape(node)[1] + 1) if _times(node, found[0], outer, c) > 1]


def _note_atoms(graph: Graph) -> None:
    """Note the atoms of parameters as the model has them: those of copies are another mesh's, and checkpoints fit all."""
    copied = copy_graph(graph)
    Axes(copied)
    for node, same in zip(placeholders(graph, "param"), placeholders(copied, "param"), strict=True):
        note(node).tokens = replace(note(node).tokens, model_dims=note(same).dims)


def _kv_heads(node: Node) -> tuple[Node, Node] | None:
    """Return keys and values with fewer heads than the queries, before the model repeats them."""
    if op_name(node) != ATTENTION:
        return None
    q, k, v = operands(node)[:3]
    # Without an own dim of heads, or one that the others' is broadcast to, there are no groups of queries.
    if any(len(shape(each)) != 4 for each in (node, q, k, v)) or shape(q)[1] != shape(node)[1]:
        return None
    k, v = _repeated(k), _repeated(v)
    heads = shape(k)[1]
    is_grouped = heads == shape(v)[1] and heads < shape(q)[1] and shape(q)[1] % heads == 0
    return (k, v) if is_grouped else None


def _has_mask_of_heads(node: Node) -> bool:
    mask = argument(node, "attn_mask")
    return isinstance(mask, Node) and len(shape(mask)) > 2 and shape(mask)[-3] > 1


def _repeated(x: Node) -> Node:
    """Return the heads that `x` repeats consecutively; else `x`."""
    if op_name(x) == "aten.repeat_interleave":
        source, times, dim = operands(x)[0], argument(x, "repeats"), argument(x, "dim")
        # A tensor of counts may repeat each head another number of times.
        is_even = isinstance(times, int) and dim in (1, -3) and len(shape(source)) == 4
        return source if is_even and shape(source)[1] * times == shape(x)[1] else x
    # [b, heads, 1, s, size] expanded to [b, heads, times, s, size], and folded.
    expanded = x
    while len(shape(expanded)) == 4 and _is_same(expanded):
        expanded = operands(expanded)[0]
    if op_name(expanded) != "aten.expand" or len(shape(expanded)) != 5:
        return x
    b, heads, times, s, size = shape(expanded)
    single = operands(expanded)[0]
    is_fold = tuple(shape(x)) == (b, heads * times, s, size)
    if not is_fold or op_name(single) != "aten.unsqueeze" or tuple(shape(single)) != (b, heads, 1, s, size):
        return x
    source = operands(single)[0]
    return source if tuple(shape(source)) == (b, heads, s, size) else x


def _is_same(node: Node) -> bool:
    """Tell whether an operator gives its operand in other dims, or as it is, gradients included."""
    record = operator_of(node)
    return record.moves in ("fold", "same") and not record.cuts_gradient


def _times(node: Node, kv: Node, outer: int, ranks: int) -> int:
    """Return how often each KV head is there for `ranks` to divide what `outer` other ranks leave of them.

    Once where they do, cannot, or where it is one head, which is sent to all ranks as it is.
    """
    queries, heads = shape(node)[1], shape(kv)[1]
    if heads % outer or heads == outer:
        return 1
    divided = math.lcm(heads // outer, ranks)
    # A mask for each head is divided with heads that are as many.
    is_whole = not _has_mask_of_heads(node) or divided * outer == queries
    return divided * outer // heads if is_whole and queries // outer % divided == 0 else 1


def _pays(node: Node, heads: Node, times: int, outer: int, ranks: int) -> bool:
    """Tell whether fewer elements are sent than where keys and values are gathered; of those a window may be read alone.

    Both ways 4 b s (h_q + h_copied) (c-1)/c^2 beside 4 b s h_kv (c-1)/c.
    """
    q, k = shape(node)[1] // outer, shape(heads)[1] // outer
    return argument(node, "attn_mask") is None and q + times * k < k * ranks


def _replace(node: Node, times: int, outer: int) -> None:
    found = _kv_heads(node)
    assert found is not None
    maker, copied = Maker(node.graph, node, note(node)), []
    for name, heads in zip(("k_copies", "v_copies"), found, strict=True):
        made = maker.make(aten.repeat_interleave.self_int, heads, times, 1)
        note(made).tokens = replace(note(made).tokens, outer_heads=outer)
        note(made).origin = replace(note(made).origin, name=name)
        copied.append(made)
    args = list(node.args)
    args[1:3] = copied
    is_grouped = shape(node)[1] > shape(copied[0])[1]
    node.args, node.kwargs = tuple(args), {**node.kwargs, "enable_gqa": is_grouped}


__all__ = ["copy_heads", "degrees_of_copies"]
