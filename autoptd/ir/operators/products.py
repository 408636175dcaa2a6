"""Operators that multiply: GEMMs, einsum, attention, convolutions, recurrent layers, and how many products they make."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.notes import note, shape
from autoptd.ir.operators.links import letter_links, same_dim
from autoptd.ir.operators.record import Link, Member, Operator, Product, Size, argument, operands
from autoptd.ir.sizes import Sizes, local_shapes


def linear_links(node: Node) -> list[Link]:
    """linear: a weight of one dim gives no dim of its own in the result; it has no bias, or one number."""
    has_rows = len(shape(operands(node)[1])) > 1
    return letter_links(node, "... i, o i, o -> ... o" if has_rows else "... i, i, -> ...")


def matmul_links(node: Node) -> list[Link]:
    """matmul: a vector on either side has no dim of its own in the result."""
    left, right = (len(shape(one)) for one in operands(node))
    letters = "... m k, ... k n -> ... m n" if right > 1 else "... k, k -> ..."
    return letter_links(node, letters if left > 1 or right == 1 else "k, ... k n -> ... n")


def einsum_links(node: Node) -> list[Link]:
    """einsum: its equation is a row, where it has no letter twice in one term.

    Without an arrow the result has the letters that occur once, in alphabetical order.
    """
    equation = str(node.args[0]).replace(" ", "")
    if "->" not in equation:
        found = Counter(equation.replace("...", "").replace(",", ""))
        single = "".join(sorted(letter for letter, count in found.items() if count == 1))
        equation += "->" + ("..." if "..." in equation else "") + single
    terms = equation.replace("->", ",").split(",")
    if any(len(set(term.replace("...", ""))) < len(term.replace("...", "")) for term in terms):
        return []
    left, right = (" ".join(part.replace("...", ".")) for part in equation.split("->"))
    return letter_links(node, f"{left} -> {right}".replace(" , ", ", ").replace(".", "..."))


def recurrent_links(node: Node) -> list[Link]:
    """gru, lstm, rnn, time first: the samples of input, initial states and results; time and channels stay whole."""
    states = argument(node, "hx")
    count = len(states) if isinstance(states, (list, tuple)) else 1
    return [Link("b", {k: Member((1,)) for k in range(count + 1)}, Member((1,)))]


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
    return [
        *made,
        Link("o", {k: Member((0,), lead=groups) for k in (1, *biased)}, Member((at,), lead=groups)),
    ]


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
        members |= {
            i: Member((d - ndim + len(m),)) for i, m in masks.items() if _carries(m, d - ndim, out[d])
        }
        if k[d] in (1, out[d]):
            made.append(Link(f"b{d}", members, Member((d,))))
        elif any(i in members for i in masks):
            made.append(Link(f"b{d}", members, None, "grouped heads under a mask per head"))
        else:
            repeat = q[d] // k[d]
            grouped = {0: Member((d,), tail=repeat), 1: Member((d,)), 2: Member((d,))}
            made.append(Link("kv", grouped, Member((d,), tail=repeat)))
            made.append(Link("repeat", {0: Member((d,), lead=k[d])}, Member((d,), lead=k[d])))
    query = {0: Member((ndim - 2,))} | {
        i: Member((len(m) - 2,)) for i, m in masks.items() if _carries(m, -2, q[-2])
    }
    keys = {1: Member((ndim - 2,)), 2: Member((ndim - 2,))}
    keys |= {i: Member((len(m) - 1,)) for i, m in masks.items() if _carries(m, -1, k[-2])}
    made.append(Link("l", query, Member((ndim - 2,)), "attention positions are counted from the first query"))
    made.append(Link("m", keys, None, "softmax runs over all keys"))
    made.append(
        Link("k", {0: Member((ndim - 1,)), 1: Member((ndim - 1,))}, None, "scores need the whole head")
    )
    made.append(Link("e", {2: Member((ndim - 1,))}, Member((ndim - 1,))))
    return made


def _carries(size: Sequence[int], back: int, wanted: int) -> bool:
    return len(size) >= -back and size[back] == wanted and wanted != 1


def einsum_flops(node: Node, shape: Size) -> int:
    """Of one product of two factors or more, whose dims are all named."""
    terms = str(node.args[0]).replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands(node), strict=True):
        sizes |= zip(term, shape(operand), strict=False)
    return 2 * math.prod(sizes.values()) if len(terms) > 1 and "." not in "".join(terms) else 0


def attention_flops(node: Node, shape: Size) -> int:
    """Both products in full, whatever the mask."""
    query, key, value = (shape(operand) for operand in operands(node)[:3])
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def attention_backward_flops(node: Node, shape: Size) -> int:
    """Five products: fused kernels compute the scores again."""
    query, key, value = (shape(operand) for operand in operands(node)[:3])
    is_needed = any(note(operand).needs_grad for operand in operands(node)[:3])
    return is_needed * 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def attention_product(node: Node, shape: Size) -> Product:
    query, key = shape(operands(node)[0]), shape(operands(node)[1])
    kind = "causal attention" if argument(node, "is_causal") else "attention"
    return (math.prod(query[:-2]), query[-2], key[-2], query[-1]), kind


def head_flops(node: Node, shape: Size) -> int:
    """A head fused with its loss makes the gradients of its operands in forward."""
    x, _, weight, *_ = operands(node)
    return products(node) * 2 * math.prod(shape(x)) * shape(weight)[0]


def head_product(node: Node, shape: Size) -> Product:
    x, _, weight, *_ = (shape(operand) for operand in operands(node))
    return (1, math.prod(x[:-1]), weight[0], x[-1]), "head with its loss"


def products(node: Node) -> int:
    """Matrix products in a node's forward that the model has one of: a head fused with its loss makes its gradients too."""
    if node.target is not markers.FUSED[HEAD]:
        return 1
    x, _, weight, *_ = operands(node)
    return 1 + note(x).needs_grad + note(weight).needs_grad


def local_groups(node: Node, sizes: Sizes) -> dict[str, int]:
    """Groups of a convolution, where a rank has some of them."""
    x, weight = (local_shapes(operand, sizes)[0] for operand in operands(node)[:2])
    if argument(node, "groups") == 1:
        return {}
    return {"groups": x[len(x) - len(weight) + 1] // weight[1]}


HEAD = "linear_cross_entropy"
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
    # Of the runtime: a GEMM with hooks, and a head fused with its loss.
    Operator("linear", factors=(0, 1), is_fresh=True),
    Operator(HEAD, flops=head_flops, backward_flops=lambda node, shape: 0, product=head_product),
]
