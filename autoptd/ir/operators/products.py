"""Operators that multiply: GEMMs, einsum, attention, convolutions, recurrent layers; and their FLOPs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.notes import note, shape, tensor
from autoptd.ir.operators.links import letter_links, same_dim
from autoptd.ir.operators.record import QUERIES, Link, Member, Operator, Product, Size, argument, operands
from autoptd.ir.sizes import Sizes, local_shapes


def linear_links(node: Node) -> list[Link]:
    """Link linear; a 1-d weight adds no dim to the result, and its bias, if any, is one number."""
    has_rows = len(shape(operands(node)[1])) > 1
    return letter_links(node, "... i, o i, o -> ... o" if has_rows else "... i, i, -> ...")


def matmul_links(node: Node) -> list[Link]:
    """Link matmul; a vector on either side adds no dim to the result."""
    left, right = (len(shape(operand)) for operand in operands(node))
    if right == 1:
        return letter_links(node, "... k, k -> ...")
    if left == 1:
        return letter_links(node, "k, ... k n -> ... n")
    return letter_links(node, "... m k, ... k n -> ... m n")


def einsum_links(node: Node) -> list[Link]:
    """Link einsum by its own equation, unless a letter comes twice in one term (a diagonal).

    Without an arrow the result has the letters that occur once, in alphabetical order.
    """
    equation = str(node.args[0]).replace(" ", "")
    if "->" not in equation:
        count_of = Counter(equation.replace("...", "").replace(",", ""))
        single = "".join(sorted(letter for letter, count in count_of.items() if count == 1))
        equation += "->" + ("..." if "..." in equation else "") + single
    for term in equation.replace("->", ",").split(","):
        letters = term.replace("...", "")
        if len(set(letters)) < len(letters):
            return []
    # "...ij,jk->...ik" becomes the row of letters "... i j, j k -> ... i k"; `.` stands for `...` while
    # letters are spaced.
    left, right = (" ".join(part.replace("...", ".")) for part in equation.split("->"))
    return letter_links(node, f"{left} -> {right}".replace(" , ", ", ").replace(".", "..."))


def recurrent_links(node: Node) -> list[Link]:
    """Link gru, lstm, rnn, time first: the samples of input, initial states and results; time and channels
    stay whole.
    """
    states = argument(node, "hx")
    count = len(states) if isinstance(states, (list, tuple)) else 1
    return [Link("b", {k: Member((1,)) for k in range(count + 1)}, Member((1,)))]


def convolution_links(node: Node) -> list[Link]:
    """Link conv1d and conv2d: samples, channels in (contracted) and channels out.

    The channels of a grouped one are the groups, and what each of them gives.
    """
    x, weight = (shape(operand) for operand in operands(node)[:2])
    # The dim of the channels: 0 where there are no samples.
    channels = len(shape(node)) - len(weight) + 1
    groups = x[channels] // weight[1]
    # Operands that have the channels out in dim 0: the weight, and the bias if there is one.
    giving = (1, 2) if len(operands(node)) > 2 else (1,)
    links = [same_dim(0)] if channels else []
    if groups == 1:
        links.append(Link("i", {0: Member((channels,)), 1: Member((1,))}, None))
        return [*links, Link("o", dict.fromkeys(giving, Member((0,))), Member((channels,)))]
    each = weight[0] // groups
    of_group = {0: Member((channels,), tail=weight[1]), **dict.fromkeys(giving, Member((0,), tail=each))}
    of_each = dict.fromkeys(giving, Member((0,), lead=groups))
    group = Link("group", of_group, Member((channels,), tail=each))
    return [*links, group, Link("o", of_each, Member((channels,), lead=groups))]


def attention_links(node: Node) -> list[Link]:
    """Link scaled_dot_product_attention: batch dims, heads and the value's head_dim may be split; queries
    where ranks have other tokens.

    Softmax couples all keys, and `is_causal` counts positions from the first query: see `QUERIES`. With `enable_gqa` the
    query heads are KV heads x repeat: the KV heads run through all three operands, the repeat through the
    query only.
    """
    q, k, v = (shape(operand) for operand in operands(node)[:3])
    ndim = len(q)
    if len(k) != ndim or len(v) != ndim:
        return []
    links = []
    for d in range(ndim - 2):
        links += _batch_dim_links(node, d)
    # q is [..., l, k], k is [..., m, k], v is [..., m, e], and the mask [..., l, m].
    row, column = ndim - 2, ndim - 1
    queries = {0: Member((row,)), **_of_mask(node, -2, q[-2])}
    keys = {1: Member((row,)), 2: Member((row,)), **_of_mask(node, -1, k[-2])}
    channels = {0: Member((column,)), 1: Member((column,))}
    counted = "attention positions are counted from the first query"
    links.append(Link("l", queries, Member((row,)), form=QUERIES, mixes=counted))
    links.append(Link("m", keys, None, "softmax runs over all keys"))
    links.append(Link("k", channels, None, "scores need the whole head"))
    links.append(Link("e", {2: Member((column,))}, Member((column,))))
    return links


def _batch_dim_links(node: Node, d: int) -> list[Link]:
    """Return the links of one dim before the sequences: of samples, or of heads."""
    q, k, v = (shape(operand) for operand in operands(node)[:3])
    size = shape(node)[d]
    of_mask = _of_mask(node, d - len(q), size)
    members = {i: Member((d,)) for i, operand in enumerate((q, k, v)) if operand[d] == size} | of_mask
    if k[d] in (1, size):
        return [Link(f"b{d}", members, Member((d,)))]
    if of_mask:
        return [Link(f"b{d}", members, None, "grouped heads under a mask per head")]
    repeat = q[d] // k[d]
    heads = {0: Member((d,), tail=repeat), 1: Member((d,)), 2: Member((d,))}
    repeats = {0: Member((d,), lead=k[d])}
    return [
        Link("kv", heads, Member((d,), tail=repeat)),
        Link("repeat", repeats, Member((d,), lead=k[d])),
    ]


def _of_mask(node: Node, back: int, size: int) -> dict[int, Member]:
    """Return the part that the mask, operand 3, has in a link: none if it is broadcast along it.

    `back` is the dim, counted from the right; `size` that of the other operands.
    """
    if len(operands(node)) < 4:
        return {}
    mask = shape(operands(node)[3])
    if size == 1 or len(mask) < -back or mask[back] != size:
        return {}
    return {3: Member((len(mask) + back,))}


def einsum_flops(node: Node, shape: Size) -> int:
    """Count the forward FLOPs of a product of two factors or more, whose dims are all named; 0 for others."""
    terms = str(node.args[0]).replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands(node), strict=True):
        sizes |= zip(term, shape(operand), strict=False)
    return 2 * math.prod(sizes.values()) if len(terms) > 1 and "." not in "".join(terms) else 0


def attention_flops(node: Node, shape: Size) -> int:
    """Count the forward FLOPs of attention: both products in full, whatever the mask."""
    query, key, value = (shape(operand) for operand in operands(node)[:3])
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def attention_backward_flops(node: Node, shape: Size) -> int:
    """Count the backward FLOPs of attention: five products, as fused kernels compute the scores again."""
    query, key, value = (shape(operand) for operand in operands(node)[:3])
    is_needed = any(note(operand).needs_grad for operand in operands(node)[:3])
    return is_needed * 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def attention_product(node: Node, shape: Size) -> Product:
    """Return (batch, queries, keys, head_dim) and the kernel's name."""
    query, key = shape(operands(node)[0]), shape(operands(node)[1])
    is_causal = node.target is markers.causal_attention or argument(node, "is_causal")
    kind = "causal attention" if is_causal else "attention"
    return (math.prod(query[:-2]), query[-2], key[-2], query[-1]), kind


def head_flops(node: Node, shape: Size) -> int:
    """Count the forward FLOPs of a head fused with its loss, whose forward also computes gradients."""
    x, _, weight, *_ = operands(node)
    return products(node) * 2 * math.prod(shape(x)) * shape(weight)[0]


def head_product(node: Node, shape: Size) -> Product:
    """Return (1, tokens, vocabulary, hidden) and the kernel's name."""
    x, _, weight, *_ = (shape(operand) for operand in operands(node))
    return (1, math.prod(x[:-1]), weight[0], x[-1]), "head with its loss"


def products(node: Node) -> int:
    """Count the matrix products in a node's forward per product of the model: a fused head also computes
    its gradients there.
    """
    if node.target is not markers.FUSED[HEAD]:
        return 1
    x, _, weight, *_ = operands(node)
    return 1 + note(x).needs_grad + note(weight).needs_grad


def local_groups(node: Node, sizes: Sizes) -> dict[str, int]:
    """Return the groups of a convolution that a rank has, where the channels are grouped."""
    x, weight = (local_shapes(operand, sizes)[0] for operand in operands(node)[:2])
    if argument(node, "groups") == 1:
        return {}
    return {"groups": x[len(x) - len(weight) + 1] // weight[1]}


def expert_links(node: Node) -> list[Link]:
    """Link expert_mm: rows with their expert's number; any row may have chosen any expert."""
    return letter_links(node, "s i, e* i o, s -> s o")


def expert_flops(node: Node, shape: Size) -> int:
    """Count the forward FLOPs of expert_mm: one matrix a row, and no padding of groups.

    A rank that has some of the experts has its part of the rows, on average.
    """
    x, weight = (shape(operand) for operand in operands(node)[:2])
    count, experts = 2 * x[0] * x[1] * weight[2], tensor(operands(node)[1]).shape[0]
    # Sizes may be letters of a formula.
    is_part = isinstance(weight[0], int) and weight[0] < experts
    return count * weight[0] // experts if is_part else count


def expert_product(node: Node, shape: Size) -> Product:
    """Return (1, rows, out, in), and the kernel's name."""
    x, weight = (shape(operand) for operand in operands(node)[:2])
    return (1, x[0], weight[2], x[1]), "experts"


HEAD = "linear_cross_entropy"
# Linear in each factor by itself: one of them may be a partial sum while the other is whole.
GEMM = Operator("", linear=((0,), (1,)), factors=(0, 1), keeps="operands", is_fresh=True, is_finite=True)

OPERATORS = [
    replace(GEMM, name="aten.linear", links=linear_links, linear=((0, 2),), text="F.linear"),
    replace(
        GEMM,
        name="aten.addmm",
        letters="m n, m k, k n -> m n",
        linear=((0, 1),),
        factors=(1, 2),
        text="torch.addmm",
    ),
    replace(GEMM, name="aten.matmul", links=matmul_links, text="@"),
    replace(GEMM, name="aten.mm", letters="m k, k n -> m n", text="torch.mm"),
    replace(GEMM, name="aten.bmm", letters="b m k, b k n -> b m n", is_finite=False, text="torch.bmm"),
    replace(
        GEMM,
        name="aten.baddbmm",
        letters="b m n, b m k, b k n -> b m n",
        linear=((0, 1), (0, 2)),
        factors=(1, 2),
        is_finite=False,
        text="torch.baddbmm",
    ),
    Operator(
        "autoptd.expert_mm",
        links=expert_links,
        linear=((0,), (1,)),
        flops=expert_flops,
        product=expert_product,
        keeps="operands",
        is_fresh=True,
        text="rt.expert_mm",
        variable="experts",
    ),
    Operator("aten.dot", "k, k ->", linear=((0,), (1,))),
    Operator("aten.vdot", "k, k ->", linear=((0,), (1,))),
    Operator("aten.mv", "m k, k -> m", linear=((0,), (1,))),
    Operator(
        "aten.einsum",
        links=einsum_links,
        linear=((0,), (1,), (2,)),
        flops=einsum_flops,
        is_finite=True,
        text="torch.einsum",
    ),
    Operator(
        "aten.scaled_dot_product_attention",
        links=attention_links,
        linear=((2,),),
        flops=attention_flops,
        backward_flops=attention_backward_flops,
        product=attention_product,
        keeps="operands",
        variable="attention",
    ),
    *(
        Operator(f"aten.{name}", links=convolution_links, linear=((0, 2),), local_sizes=local_groups)
        for name in ("conv1d", "conv2d")
    ),
    *(
        Operator(f"aten.{name}.input", links=recurrent_links)
        for name in ("gru", "lstm", "rnn_tanh", "rnn_relu")
    ),
    # Operators of the runtime: causal attention of a rank's own queries, a GEMM with hooks, and a head that is fused with its
    # loss.
    Operator(
        "causal_attention",
        flops=attention_flops,
        backward_flops=attention_backward_flops,
        product=attention_product,
        keeps="operands",
        variable="attention",
    ),
    Operator("linear", factors=(0, 1), is_fresh=True),
    Operator(
        "grouped_mm",
        linear=((0,), (1,)),
        flops=expert_flops,
        product=expert_product,
        keeps="operands",
        is_fresh=True,
        variable="experts",
    ),
    Operator(HEAD, flops=head_flops, backward_flops=lambda node, shape: 0, product=head_product),
]
