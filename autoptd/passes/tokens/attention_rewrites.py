"""Rewrite attention for ranks that divide its queries or tokens.

In: a TRACED graph, and the trace with all samples that it is compared with. Out: both, rewritten alike; if a fact is
missing, attention stays as the model has it.

- `raise_attention`: torch's attention replaces the operators of attention that is written out (scale, mask, softmax,
  product with the values), by the pattern of fused operators (`fusion/attention.py`). A rank's queries are then split
  from the keys of all ranks, a causal mask is not computed, and no scores are saved: written out, a rank saves
  [b, heads, s/c, s] of them.
- `read_causal`: attention with a mask that proves to be causal (transformers passes such masks, of all tokens by all
  tokens) reads no mask. The queries of a rank see the keys before them, in any token order, and no rank computes the
  mask. If tokens are not divided, fused attention finds the same (`fusion/attention.py`). A mask that proves to be a
  sliding window is noted for `read_windows`.
- `copy_heads`: with Ulysses every rank has some heads of all tokens. If there are fewer KV heads than ranks, several
  ranks need the same head, and each would gather all heads of all tokens to read one. Instead, attention reads copies
  of its KV heads, made of a rank's own tokens. The following all-to-all sends every rank the copy that its queries
  read, and backward adds up the gradients of the copies. It sends 2 b s k (c-1)/c elements of keys and values with
  heads of size k, regardless of the number of KV heads.

On a CONNECTED graph, with types over every axis:

- `read_windows`: attention that is split by its queries reads the keys in its window, and no mask. A rank with s/c
  queries and a window of w keys multiplies s/c + w of them, not s.

    attention(q, k, v)                                                     # 8 heads, 2 KV heads, over 4 ranks
    attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))     # 4 KV heads

    z = scaled_dot_product_attention(q, k, v, mask)             # mask: [1, 1, s/c, s]
    z = scaled_dot_product_attention(q, k, v, is_causal=True)   # and note(z).tokens.reads_window == w
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from autoptd.ir.fusion import Group, Swapped
from autoptd.ir.mesh import Mesh, Role
from autoptd.ir.notes import copy_graph, note, op_name, ops, placeholders, shape
from autoptd.ir.operators.record import QUERIES, argument, operands
from autoptd.ir.operators.table import operator_of
from autoptd.passes.axes.axes import Axes
from autoptd.passes.axes.constants import Constants
from autoptd.passes.axes.masks import causal_keywords, window_of
from autoptd.passes.context import Context
from autoptd.passes.fusion.attention import PRODUCTS, attention
from autoptd.passes.runner import CALLS, Form, divides_tokens, divides_values, graph_pass
from autoptd.passes.solve.splits import ATTENTION, may_be_by_queries
from autoptd.passes.tokens.both_traces import Maker, drop_unread, pairs

aten = torch.ops.aten
# Attention, or the softmax of one that is written out.
SCORED = (ATTENTION, "aten.softmax", "aten._safe_softmax")


def second_trace(graph: Graph, ctx: Context) -> Graph:
    """Return the trace with all samples, to be rewritten; `graph` itself if there is only one.

    Other runs begin with the one in the context: the first rewrite of a run copies it.
    """
    if ctx.whole is None:
        return graph
    if ctx.found.whole is None:
        ctx.found.whole = copy_graph(ctx.whole)
    return ctx.found.whole


@graph_pass(takes=Form.TRACED, gives=Form.TRACED, when=divides_values, changes=(CALLS,))
def raise_attention(graph: Graph, ctx: Context) -> None:
    """Replace written-out attention in both traces, if both have it."""
    if not _divides_queries(graph, ctx):
        return
    whole, constants = second_trace(graph, ctx), Constants(ctx.buffers)
    is_found = False
    for node, same in pairs(graph, whole):
        if not may_be_by_queries(node, ctx.mesh):
            continue
        groups = [_written_out(product, constants) for product in dict.fromkeys((node, same))]
        if all(group is not None for group in groups) and len({_facts(group) for group in groups}) == 1:
            is_found = True
            for group in groups:
                _replace(group)
    if is_found:
        drop_unread(graph, whole)


def _divides_queries(graph: Graph, ctx: Context) -> bool:
    """Tell whether ranks may have some of the queries of any attention, written out or not."""
    return any(may_be_by_queries(node, ctx.mesh) for node in ops(graph) if op_name(node) in SCORED)


def _written_out(node: Node, constants: Constants) -> Group | None:
    """Return the attention that ends in a product, if no other operator reads its inner values."""
    found = attention(node, constants) if op_name(node) in PRODUCTS else None
    if not isinstance(found, Group):
        return None
    # An operator without operands is a literal tensor, such as `aten.full`: it simply stays for its other readers.
    inner = [member for member in found.members if member is not node and member.all_input_nodes]
    is_own = all(reader in found.members for member in inner for reader in member.users)
    return found if is_own else None


def _facts(group: Group | None) -> Hashable:
    assert group is not None
    kinds = tuple(type(operand) for operand in group.operands)
    return kinds, tuple(sorted(group.keywords.items()))


def _replace(group: Group | None) -> None:
    assert group is not None
    node, (q, k, v, mask) = group.result, group.operands
    maker = Maker(node.graph, node, note(node))
    if isinstance(k, Swapped):
        k = maker.make(aten.transpose.int, k.node, -2, -1)
    keywords = dict(group.keywords)
    arguments = (q, k, v, mask, 0.0, keywords.pop("causal"))
    assert isinstance(q, Node)
    # Leave out torch's default scale.
    if math.isclose(keywords["scale"], shape(q)[-1] ** -0.5, rel_tol=1e-15):
        keywords.pop("scale")
    node.replace_all_uses_with(maker.make(aten.scaled_dot_product_attention.default, *arguments, **keywords))


@graph_pass(takes=Form.TRACED, gives=Form.TRACED, when=divides_values, changes=(CALLS, "tokens"))
def read_causal(graph: Graph, ctx: Context) -> None:
    """Drop masks that prove to be causal in both traces, and note windows."""
    if not _divides_queries(graph, ctx):
        return
    whole, constants = second_trace(graph, ctx), Constants(ctx.buffers)
    is_found = False
    for both in pairs(graph, whole):
        node, _ = both
        if not may_be_by_queries(node, ctx.mesh):
            continue
        keywords = [causal_keywords(call, constants) for call in both]
        if all(given is not None for given in keywords):
            is_found = True
            for call, given in zip(both, keywords, strict=True):
                call.args, call.kwargs = call.args[:3], given | {"is_causal": True}  # type: ignore[operator]
            continue
        windows = {window_of(call, constants) for call in both}
        if len(windows) == 1 and (window := windows.pop()) is not None:
            note(node).tokens = replace(note(node).tokens, window=window)
    if is_found:
        drop_unread(graph, whole)


@graph_pass(takes=Form.CONNECTED, gives=Form.CONNECTED, when=divides_tokens, changes=(CALLS, "tokens"))
def read_windows(graph: Graph, ctx: Context) -> None:
    """Drop masks that are windows, with the operators that compute them, where ranks split queries."""
    found = [node for node in ops(graph) if _is_by_window(node)]
    for node in found:
        note(node).tokens = replace(note(node).tokens, reads_window=note(node).tokens.window)
        keywords = {name: given for name, given in node.kwargs.items() if name in ("scale", "enable_gqa")}
        node.args, node.kwargs = node.args[:3], keywords | {"is_causal": True}
    if found:
        drop_unread(graph)
        left = set(graph.nodes)
        for assignment in ctx.found.assignments.values():
            for node in assignment.strategies.keys() - left:
                del assignment.strategies[node]


def _is_by_window(node: Node) -> bool:
    """Tell whether attention with a known window is split by runs of queries over one axis."""
    record = note(node)
    axes = [axis for axis, form in record.forms.items() if form == QUERIES]
    if record.tokens.window is None or len(axes) != 1:
        return False
    # Positions are counted in chunks of all queries, not of each of several blocks.
    return record.layout[axes[0]].atom == 0


@graph_pass(takes=Form.TRACED, gives=Form.TRACED, when=divides_tokens, changes=(CALLS, "tokens"))
def copy_heads(graph: Graph, ctx: Context) -> None:
    """Copy KV heads in both traces until context-parallel ranks divide them."""
    if ctx.options.context.attention not in ("auto", "ulysses"):
        return
    whole = second_trace(graph, ctx)
    ranks = math.prod(map(ctx.mesh.degree, ctx.mesh.token_axes))
    outer = math.prod(map(ctx.mesh.degree, ctx.mesh.axes_of(Role.VALUES)))
    is_found = False
    for node, same in pairs(graph, whole):
        heads = _kv_heads(node)
        if heads is None or _kv_heads(same) is None:
            continue
        times = _times(node, heads[0], outer, ranks)
        is_requested = ctx.options.context.attention == "ulysses"
        if times > 1 and (is_requested or _pays(node, heads[0], times, outer, ranks)):
            if not is_found:
                _note_atoms(graph)
            is_found = True
            for call in dict.fromkeys((node, same)):
                _copy(call, times, outer)
    if is_found:
        drop_unread(graph, whole)


def degrees_of_copies(node: Node, mesh: Mesh) -> list[int]:
    """Return the degrees for which the KV heads of an attention would be copied."""
    found, outer = _kv_heads(node), math.prod(map(mesh.degree, mesh.axes_of(Role.VALUES)))
    if found is None:
        return []
    return [c for c in range(2, shape(node)[1] + 1) if _times(node, found[0], outer, c) > 1]


def _note_atoms(graph: Graph) -> None:
    """Note the atoms of parameters without copies, which depend on the mesh: checkpoints fit every mesh."""
    copied = copy_graph(graph)
    Axes(copied)
    for node, same in zip(placeholders(graph, "param"), placeholders(copied, "param"), strict=True):
        note(node).tokens = replace(note(node).tokens, model_dims=note(same).dims)


def _kv_heads(node: Node) -> tuple[Node, Node] | None:
    """Return keys and values with fewer heads than the queries, before the model repeats them."""
    if op_name(node) != ATTENTION:
        return None
    q, k, v = operands(node)[:3]
    # Groups of queries need a separate dim of heads, which is not broadcast.
    if any(len(shape(value)) != 4 for value in (node, q, k, v)) or shape(q)[1] != shape(node)[1]:
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
        # A tensor of counts may repeat heads differently.
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
    """Tell whether an operator returns its operand, reshaped or unchanged, gradients included."""
    record = operator_of(node)
    return record.moves in ("fold", "same") and not record.cuts_gradient


def _times(node: Node, kv: Node, outer: int, ranks: int) -> int:
    """Return how many copies of each KV head `ranks` need to divide the heads that `outer` other ranks leave.

    One, if they divide the heads already, cannot, or if there is a single head, which is sent to all ranks.
    """
    queries, heads = shape(node)[1], shape(kv)[1]
    if heads % outer or heads == outer:
        return 1
    divided = math.lcm(heads // outer, ranks)
    # A mask per head can only be divided along with as many heads.
    is_whole = not _has_mask_of_heads(node) or divided * outer == queries
    return divided * outer // heads if is_whole and queries // outer % divided == 0 else 1


def _pays(node: Node, heads: Node, times: int, outer: int, ranks: int) -> bool:
    """Tell whether copies send fewer elements than gathering keys and values; with a mask, a window of them may be enough.

    Forward and backward, 4 b s (h_q + h_copied) (c-1)/c^2 compared with 4 b s h_kv (c-1)/c.
    """
    q, k = shape(node)[1] // outer, shape(heads)[1] // outer
    return argument(node, "attn_mask") is None and q + times * k < k * ranks


def _copy(node: Node, times: int, outer: int) -> None:
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
