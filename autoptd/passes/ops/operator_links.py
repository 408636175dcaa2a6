"""Links of operators with a meaning of their own: attention, losses, tables, convolutions (`dim_links.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from autoptd.ir.notes import note, op_name, shape, value
from autoptd.passes.ops.dim_links import NORMAL, Link, Member, argument, operands, pointwise_links, reduction, same_dim

UNCOUNTED = "its labels or class weights are computed from parameters, so their number is not known before the forward"


def weight_norm_links(node: Node) -> list[Link]:
    """_weight_norm(v, g, dim): the slices of v along dim have a norm each, and g scales them."""
    kept, size = argument(node, 2, "dim", 0), shape(node)
    if kept == -1 or tuple(shape(operands(node)[1])) != tuple(n if d == kept else 1 for d, n in enumerate(size)):
        return []
    made = [Link("o", {0: Member((kept,)), 1: Member((kept,))}, Member((kept,)))]
    others = [d for d in range(len(size)) if d != kept]
    return [*made, *(Link(f"d{d}", {0: Member((d,))}, Member((d,)), "a norm runs over it") for d in others)]


def glu_links(node: Node) -> list[Link]:
    """glu: both halves of a dim give one."""
    ndim = len(shape(node))
    halved = argument(node, 1, "dim", -1) % ndim
    made = [same_dim(d) for d in range(ndim) if d != halved]
    return [*made, Link("half", {0: Member((halved,), lead=2)}, Member((halved,)))]


def gather_links(node: Node) -> list[Link]:
    """gather(x, dim, index): the dims beside `dim` run together where they are equally long; `dim` of x is looked up."""
    x, index = (shape(one) for one in operands(node))
    dim = argument(node, 1, "dim") % len(x) if x else 0
    made = [Link("looked up", {0: Member((dim,))}, None, "any entry may be looked up")] if x else []
    for d in range(len(index)):
        if d == dim:
            made.append(Link(f"d{d}", {1: Member((d,))}, Member((d,))))
        elif x[d] == index[d]:
            made.append(Link(f"d{d}", {0: Member((d,)), 1: Member((d,))}, Member((d,))))
        else:
            made.append(Link(f"d{d}", {0: Member((d,))}, None, "an uneven slice needs it whole"))
    return made


def index_links(node: Node) -> list[Link]:
    """x[:, ids] and index_select: one tensor of positions in one dim; that dim is looked up, as in an embedding."""
    read = operands(node)
    if op_name(node) == "aten.index_select":
        dim = argument(node, 1, "dim") % max(1, len(shape(read[0])))
    else:
        places = [i for i, one in enumerate(node.args[1]) if one is not None]  # type: ignore[arg-type, union-attr]
        if len(places) != 1 or value(read[1]).dtype in (torch.bool, torch.uint8):
            return []  # several index tensors meet elementwise; a mask gives sizes that depend on its values
        dim = places[0]
    x, ids = (shape(one) for one in read)
    made = [Link("looked up", {0: Member((dim,))}, None, "any entry may be looked up")] if x else []
    made += [
        Link(f"d{d}", {0: Member((d,))}, Member((d if d < dim else d - 1 + len(ids),)))
        for d in range(len(x))
        if d != dim
    ]
    return made + [Link(f"n{d}", {1: Member((d,))}, Member((dim + d,))) for d in range(len(ids))]


def one_hot_links(node: Node) -> list[Link]:
    """one_hot(ids): a new last dim, in which each id has its place."""
    return [same_dim(d) for d in range(len(shape(node)) - 1)]


def extreme_links(node: Node) -> list[Link]:
    """max and min: of two tensors, over all dims, or over one."""
    return pointwise_links(node) if len(operands(node)) > 1 else reduction(NORMAL)(node)


def sample_links(node: Node) -> list[Link]:
    """Group norm: samples are apart, all else is whole."""
    return [same_dim(0)] if len(shape(node)) > 1 else []


def batch_norm_links(node: Node) -> list[Link]:
    """batch_norm: its channels; with running statistics (eval mode) everything else, too."""
    ndim, vectors = len(shape(node)), range(1, len(operands(node)))
    made = [Link("c", {0: Member((1,)), **{k: Member((0,)) for k in vectors}}, Member((1,)))]
    whole = "its statistics run over it" if argument(node, 5, "training") else ""
    return [*made, *(same_dim(d, whole) for d in range(ndim) if d != 1)]


def recurrent_links(node: Node) -> list[Link]:
    """gru, lstm, rnn, time first: the samples of input, initial states and results; time and channels stay whole."""
    states = argument(node, 1, "hx")
    count = len(states) if isinstance(states, (list, tuple)) else 1
    return [Link("b", {k: Member((1,)) for k in range(count + 1)}, Member((1,)))]


def fourier_links(node: Node) -> list[Link]:
    """torch.fft: the dims beside those that are transformed."""
    before, after = shape(operands(node)[0]), shape(node)
    dims = argument(node, 2, "dim")
    if dims is None:
        sizes = argument(node, 1, "s")
        dims = list(range(-len(sizes), 0) if sizes else range(len(before)))
    taken = [dim % len(before) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]
    return [same_dim(d, "the transform needs it whole" if d in taken else "") for d in range(len(after))]


def convolution_links(node: Node) -> list[Link]:
    """conv1d, conv2d: samples; channels in (contracted) and out, of grouped ones the groups and what each of them gives."""
    x, weight = (shape(one) for one in operands(node)[:2])
    at = len(shape(node)) - len(weight) + 1  # of the channels; there may be no samples
    groups = x[at] // weight[1]
    biased = [2] if len(operands(node)) > 2 else []
    made = [same_dim(0)] if at else []
    if groups == 1:
        made.append(Link("i", {0: Member((at,)), 1: Member((1,))}, None))
        return [*made, Link("o", {k: Member((0,)) for k in (1, *biased)}, Member((at,)))]
    each = weight[0] // groups
    grouped = {k: Member((0,), tail=each) for k in (1, *biased)}
    made.append(Link("group", {0: Member((at,), tail=weight[1]), **grouped}, Member((at,), tail=each)))
    return [*made, Link("o", {k: Member((0,), lead=groups) for k in (1, *biased)}, Member((at,), lead=groups))]


def attention_links(node: Node) -> list[Link]:
    """scaled_dot_product_attention: heads and batch dims and the value's head_dim may be split; sequences stay whole.

    Softmax couples all keys, and `is_causal` counts positions from the first one. With `enable_gqa` the query heads are
    KV heads x repeat: the KV heads run through all three operands, the repeat through the query only.
    """
    q, k, v = (shape(one) for one in operands(node)[:3])
    out, ndim = shape(node), len(q)
    masks = {3: shape(operands(node)[3])} if len(operands(node)) > 3 else {}
    if len(k) != ndim or len(v) != ndim:
        return []
    made = []
    for d in range(ndim - 2):
        members = {i: Member((d,)) for i, size in enumerate((q, k, v)) if size[d] == out[d]}
        members |= {i: Member((d - ndim + len(m),)) for i, m in masks.items() if _carries(m, d - ndim, out[d])}
        if k[d] in (1, out[d]):
            made.append(Link(f"b{d}", members, Member((d,))))
        elif any(i in members for i in masks):
            made.append(Link(f"b{d}", members, None, "grouped heads under a mask per head"))
        else:
            repeat = q[d] // k[d]
            grouped = {0: Member((d,), tail=repeat), 1: Member((d,)), 2: Member((d,))}
            made.append(Link("kv", grouped, Member((d,), tail=repeat)))
            made.append(Link("repeat", {0: Member((d,), lead=k[d])}, Member((d,), lead=k[d])))
    query = {0: Member((ndim - 2,))} | {i: Member((len(m) - 2,)) for i, m in masks.items() if _carries(m, -2, q[-2])}
    keys = {1: Member((ndim - 2,)), 2: Member((ndim - 2,))}
    keys |= {i: Member((len(m) - 1,)) for i, m in masks.items() if _carries(m, -1, k[-2])}
    made.append(Link("l", query, Member((ndim - 2,)), "attention positions are counted from the first query"))
    made.append(Link("m", keys, None, "softmax runs over all keys"))
    made.append(Link("k", {0: Member((ndim - 1,)), 1: Member((ndim - 1,))}, None, "scores need the whole head"))
    made.append(Link("e", {2: Member((ndim - 1,))}, Member((ndim - 1,))))
    return made


def cross_entropy_links(node: Node) -> list[Link]:
    """cross_entropy_loss(logits, targets, weight?): the vocabulary and the tokens may be split, each with its local form."""
    logits, targets = shape(operands(node)[0]), shape(operands(node)[1])
    if len(targets) == len(logits) or len(logits) < 2:  # class probabilities, or one unbatched sample
        return []
    reduction = argument(node, 3, "reduction", 1)
    whole = UNCOUNTED if reduction == 1 and any(note(one).of_params for one in operands(node)[1:]) else ""
    vocabulary = {0: Member((1,))} | ({2: Member((0,))} if len(operands(node)) > 2 else {})
    made = [Link("vocabulary", vocabulary, None, form="vocab_cross_entropy")]
    for d in range(len(targets)):
        members = {0: Member((d + (d > 0),)), 1: Member((d,))}
        made.append(
            Link(f"n{d}", members, None, whole, "token_loss") if reduction else Link(f"n{d}", members, Member((d,)))
        )
    return made


def embedding_links(node: Node) -> list[Link]:
    """embedding(weight, ids): a split of the vocabulary gives partial sums of rows."""
    ids = len(shape(operands(node)[1]))
    made = [
        Link("vocabulary", {0: Member((0,))}, None, form="vocab_embedding"),
        Link("h", {0: Member((1,))}, Member((ids,))),
    ]
    if argument(node, 3, "scale_grad_by_freq", False) or argument(node, 4, "sparse", False):
        made[0] = Link(
            "vocabulary", {0: Member((0,))}, None, "gradients by frequency and sparse gradients need all rows"
        )
    return made + [Link(f"n{d}", {1: Member((d,))}, Member((d,))) for d in range(ids)]


def _carries(size: Sequence[int], back: int, wanted: int) -> bool:
    return len(size) >= -back and size[back] == wanted and wanted != 1
