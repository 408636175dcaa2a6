"""How the dims of an operator's operands and result correspond: `Link`s, computed from shapes.

In: a node. Out: its links, each a set of dims of operands and result that run together. A function per family of operators;
which operator has which is the table of `rules.py`. A row of letters reads like einsum, aligned from the right:

    letter_links(node, "... i, o i, o -> ... o")     # a letter missing on the right is contracted, a starred one stays whole
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autoptd.ir.notes import op_name, shape, value

NORMAL = "needs all values at once"


@dataclass(frozen=True)
class Member:
    """The dims of one tensor that take part in a link, in order.

    `lead` and `tail` are factors of those dims that lie outside of the link (a piece of a split: lead = number of pieces).
    """

    dims: tuple[int, ...]
    lead: int = 1
    tail: int = 1


@dataclass(frozen=True)
class Link:
    """Dims that run together through one operator: operand number -> Member, and where they stand in the result.

    `out` is None when the operator contracts them. `whole` says why the operator cannot be split along them ("" if it can).
    `form` names how a contraction over a split dim is computed locally ("" : the same operator gives the partial sum).
    `segment` says that the result is (start, length) of the operand's dim: one of several pieces of unequal sizes.
    """

    name: str
    operands: dict[int, Member]
    out: Member | None
    whole: str = ""
    form: str = ""
    segment: tuple[int, int] | None = None


def operands(node: Node) -> list[Node]:
    """The tensor arguments of a node in schema order, lists flattened; an absent optional tensor takes no place."""
    found: list[Node] = []

    def visit(arg: Any) -> None:
        if isinstance(arg, Node):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            for one in arg:
                visit(one)

    for arg in (*node.args, *node.kwargs.values()):
        visit(arg)
    return found


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """A non-tensor argument by position or name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def letter_links(node: Node, letters: str) -> list[Link]:
    """Links of a row of letters, for this node's shapes."""
    left, right = letters.split("->")
    patterns = [pattern.split() for pattern in left.split(",")]
    sizes = [shape(one) for one in operands(node)]
    lead = max((len(size) - len(p) + 1 for size, p in zip(sizes, patterns, strict=False) if "..." in p), default=0)
    spell = [_spell(p, len(size), lead) for size, p in zip(sizes, patterns, strict=False)]
    result = _spell(right.split(), len(shape(node)), lead)
    names = dict.fromkeys(name for word in [*spell, result] for name in word)
    out_shape = shape(node)
    made = []
    for name in names:
        members = {i: Member((word.index(name),)) for i, word in enumerate(spell) if name in word}
        members = {i: one for i, one in members.items() if sizes[i][one.dims[0]] != 1}
        out = Member((result.index(name),)) if name in result else None
        if out is not None and out_shape[out.dims[0]] == 1:
            continue
        plain = name.rstrip("*")
        whole = f"{plain} must stay whole" if name.endswith("*") else ""
        if members or out is not None:
            made.append(Link(plain, members, out, whole))
    return made


def matmul_links(node: Node) -> list[Link]:
    """matmul: a vector on either side has no dim of its own in the result."""
    left, right = (len(shape(one)) for one in operands(node))
    letters = "... m k, ... k n -> ... m n" if right > 1 else "... k, k -> ..."
    return letter_links(node, letters if left > 1 or right == 1 else "k, ... k n -> ... n")


def _spell(pattern: list[str], ndim: int, lead: int) -> list[str]:
    """One letter for every dim: `...` becomes numbered letters, and a tensor of fewer dims keeps the rightmost ones."""
    if "..." in pattern:
        at = pattern.index("...")
        dots = ndim - len(pattern) + 1
        pattern = [*pattern[:at], *(f".{lead - dots + i}" for i in range(dots)), *pattern[at + 1 :]]
    return pattern[len(pattern) - ndim :]


def pointwise_links(node: Node) -> list[Link]:
    """One link for every dim of the result; operands that are broadcast along it do not carry it."""
    out = shape(node)
    made = []
    for dim, size in enumerate(out):
        if size != 1:
            back = dim - len(out)
            members = {
                i: Member((len(shape(one)) + back,))
                for i, one in enumerate(operands(node))
                if len(shape(one)) + back >= 0 and shape(one)[back] == size
            }
            made.append(Link(f"d{dim}", members, Member((dim,))))
    return made


def along(position: int, name: str = "dim", default: Any = -1) -> Callable[[Node], list[Link]]:
    """Operators that keep the shape and need the dims given by one argument whole (softmax, cumsum)."""

    def make(node: Node) -> list[Link]:
        ndim = len(shape(node))
        starred = _dims(argument(node, position, name, default), ndim)
        return [_same_dim(d, f"{op_name(node)} needs it whole" if d in starred else "") for d in range(ndim)]

    return make


def diff_links(node: Node) -> list[Link]:
    """diff(x, n, dim, prepend, append): neighbours along `dim` meet, all else runs together."""
    count, ndim = len(operands(node)), len(shape(node))
    at = argument(node, 2, "dim", -1) % ndim
    made = [Link(f"d{d}", {i: Member((d,)) for i in range(count)}, Member((d,))) for d in range(ndim) if d != at]
    return [*made, *(Link(f"d{at}", {i: Member((at,))}, None, "neighbours meet along it") for i in range(count))]


def last_two_whole(node: Node) -> list[Link]:
    """triu and tril: which entries stay depends on the place in the last two dims."""
    ndim = len(shape(node))
    return [_same_dim(d, f"{op_name(node)} needs it whole" if d >= ndim - 2 else "") for d in range(ndim)]


def roll_links(node: Node) -> list[Link]:
    """roll: the dims that are rolled stay whole; without dims the tensor is rolled as one vector."""
    return along(2, "dims")(node) if argument(node, 2, "dims") else []


def last_dims_whole(node: Node) -> list[Link]:
    """layer_norm and rms_norm: the normalised dims stay whole; weight and bias are those dims."""
    ndim, normalized = len(shape(node)), len(node.args[1])  # type: ignore[arg-type]
    made = [_same_dim(d) for d in range(ndim - normalized)]
    for i in range(normalized):
        members = {0: Member((ndim - normalized + i,))}
        members |= {k: Member((i,)) for k in range(1, len(operands(node)))}
        made.append(Link(f"h{i}", members, Member((ndim - normalized + i,)), "the norm needs its whole dim"))
    return made


def reduction(whole: str, form: str = "", dim_at: int = 1) -> Callable[[Node], list[Link]]:
    """Operators that reduce the dims given by argument `dim_at` (all, if absent); `whole` says why those cannot be split."""

    def make(node: Node) -> list[Link]:
        size = shape(operands(node)[0])
        dims = argument(node, dim_at, "dim")
        dims = range(len(size)) if dims is None or dims == [] else _dims(dims, len(size))
        keep = len(shape(node)) == len(size)
        made, at = [], 0
        for d in range(len(size)):
            if d in dims:
                made.append(Link(f"d{d}", {0: Member((d,))}, None, whole, form))
                at += keep
            else:
                made.append(Link(f"d{d}", {0: Member((d,))}, Member((at,))))
                at += 1
        return [link for link in made if size[link.operands[0].dims[0]] != 1]

    return make


def reshape_links(node: Node) -> list[Link]:
    """A view: the smallest groups of dims with equal products correspond."""
    before, after = shape(operands(node)[0]), shape(node)
    made, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        left, right = [i], [j]
        product_in, product_out = before[i], after[j]
        while product_in != product_out:
            if product_in < product_out:
                i += 1
                left.append(i)
                product_in *= before[i]
            else:
                j += 1
                right.append(j)
                product_out *= after[j]
        made.append(Link(f"d{left[0]}", {0: Member(tuple(left))}, Member(tuple(right))))
        i, j = i + 1, j + 1
    return made


def permute_links(node: Node) -> list[Link]:
    """transpose, t, permute: the dims in another order."""
    ndim, name = len(shape(node)), op_name(node)
    order = list(range(ndim))
    if name == "aten.permute":
        order = [d % ndim for d in node.args[1]]  # type: ignore[operator, union-attr]
    elif name in ("aten.t", "aten.numpy_T"):
        order = order[::-1]
    elif name == "aten.mT":
        order[-2:] = order[:-3:-1]
    else:
        a, b = node.args[1] % ndim, node.args[2] % ndim  # type: ignore[operator]
        order[a], order[b] = order[b], order[a]
    return [Link(f"d{source}", {0: Member((source,))}, Member((d,))) for d, source in enumerate(order)]


def expand_links(node: Node) -> list[Link]:
    """expand: kept dims correspond, new ones are free in the result."""
    before, after = shape(operands(node)[0]), shape(node)
    made = []
    for d, size in enumerate(after):
        source = d - len(after) + len(before)
        same = source >= 0 and before[source] == size
        if size != 1:
            made.append(Link(f"d{d}", {0: Member((source,))} if same else {}, Member((d,))))
    return made


def repeat_links(node: Node) -> list[Link]:
    """repeat_interleave(x, n, dim): n is a minor factor of the dim."""
    repeat, dim = node.args[1], argument(node, 2, "dim")
    if dim is None:
        return []
    ndim = len(shape(node))
    grown = dim % ndim
    made = [_same_dim(d) for d in range(ndim) if d != grown]
    if not isinstance(repeat, int):
        return made
    before = shape(operands(node)[0])[grown]
    return [
        *made,
        Link(f"d{grown}", {0: Member((grown,))}, Member((grown,), tail=repeat)),
        Link("repeat", {}, Member((grown,), lead=before)),
    ]


def weight_norm_links(node: Node) -> list[Link]:
    """_weight_norm(v, g, dim): the slices of v along dim have a norm each, and g scales them."""
    kept, size = argument(node, 2, "dim", 0), shape(node)
    if kept == -1 or tuple(shape(operands(node)[1])) != tuple(n if d == kept else 1 for d, n in enumerate(size)):
        return []
    made = [Link("o", {0: Member((kept,)), 1: Member((kept,))}, Member((kept,)))]
    others = [d for d in range(len(size)) if d != kept]
    return [*made, *(Link(f"d{d}", {0: Member((d,))}, Member((d,)), "a norm runs over it") for d in others)]


def einsum_links(node: Node) -> list[Link]:
    """einsum: its equation is a row, where it has an arrow and no letter twice in one term."""
    equation = str(node.args[0]).replace(" ", "")
    terms = equation.replace("->", ",").split(",")
    if "->" not in equation or any(len(set(term.replace("...", ""))) < len(term.replace("...", "")) for term in terms):
        return []
    left, right = (" ".join(part.replace("...", ".")) for part in equation.split("->"))
    return letter_links(node, f"{left} -> {right}".replace(" , ", ", ").replace(".", "..."))


def tile_links(node: Node) -> list[Link]:
    """repeat: how often a dim is repeated becomes its leading factor."""
    before, after = shape(operands(node)[0]), shape(node)
    new = len(after) - len(before)
    made = []
    for d, size in enumerate(after):
        old = before[d - new] if d >= new else 1
        if old > 1:
            made.append(Link(f"d{d}", {0: Member((d - new,))}, Member((d,), lead=size // old)))
        if size > old:
            made.append(Link(f"times{d}", {}, Member((d,), tail=old)))
    return made


def glu_links(node: Node) -> list[Link]:
    """glu: both halves of a dim give one."""
    ndim = len(shape(node))
    halved = argument(node, 1, "dim", -1) % ndim
    made = [_same_dim(d) for d in range(ndim) if d != halved]
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
    return [_same_dim(d) for d in range(len(shape(node)) - 1)]


def extreme_links(node: Node) -> list[Link]:
    """max and min: of two tensors, over all dims, or over one."""
    return pointwise_links(node) if len(operands(node)) > 1 else reduction(NORMAL)(node)


def complex_links(node: Node) -> list[Link]:
    """view_as_complex and view_as_real: the last real dim holds the two parts."""
    return [_same_dim(d) for d in range(min(len(shape(node)), len(shape(operands(node)[0]))))]


def sample_links(node: Node) -> list[Link]:
    """Group norm: samples are apart, all else is whole."""
    return [_same_dim(0)] if len(shape(node)) > 1 else []


def convolution_links(node: Node) -> list[Link]:
    """conv1d, conv2d: samples; channels in (contracted) and out, of grouped ones the groups and what each of them gives."""
    x, weight = (shape(one) for one in operands(node)[:2])
    at = len(shape(node)) - len(weight) + 1  # of the channels; there may be no samples
    groups = x[at] // weight[1]
    biased = [2] if len(operands(node)) > 2 else []
    made = [_same_dim(0)] if at else []
    if groups == 1:
        made.append(Link("i", {0: Member((at,)), 1: Member((1,))}, None))
        return [*made, Link("o", {k: Member((0,)) for k in (1, *biased)}, Member((at,)))]
    each = weight[0] // groups
    grouped = {k: Member((0,), tail=each) for k in (1, *biased)}
    made.append(Link("group", {0: Member((at,), tail=weight[1]), **grouped}, Member((at,), tail=each)))
    return [*made, Link("o", {k: Member((0,), lead=groups) for k in (1, *biased)}, Member((at,), lead=groups))]


def free_links(node: Node) -> list[Link]:
    """full, zeros, ones: every dim of the result is free, whatever the operands are."""
    return [Link(f"d{d}", {}, Member((d,))) for d, size in enumerate(shape(node)) if size != 1]


def no_links(node: Node) -> list[Link]:
    """arange and the like: computed whole."""
    return []


def slice_links(node: Node) -> list[Link]:
    """slice: one of several pieces of a dim, all equal or not; with steps it needs its dim whole."""
    x = shape(operands(node)[0])
    dim, start, size = _piece(node)
    made = [_same_dim(d) for d in range(len(x)) if d != dim]
    pieces = [_piece(user) for user in operands(node)[0].users if op_name(user) == "aten.slice"]
    others = {length for at, _, length in pieces if at == dim and length not in (size, x[dim])}
    has_steps = argument(node, 4, "step", 1) != 1
    if size == x[dim]:
        made.append(_same_dim(dim))
    elif has_steps or size <= 1:
        made.append(Link(f"d{dim}", {0: Member((dim,))}, None, "an uneven slice needs it whole"))
    elif x[dim] % size == 0 and start % size == 0 and not others:
        made.append(Link(f"d{dim}", {0: Member((dim,), lead=x[dim] // size)}, Member((dim,))))
    else:
        made.append(Link(f"d{dim}", {0: Member((dim,))}, Member((dim,)), segment=(start, size)))
    return made


def _piece(node: Node) -> tuple[int, int, int]:
    """(dim, start, length) of what a slice takes."""
    x = shape(operands(node)[0])
    dim = argument(node, 1, "dim", 0) % len(x)
    start = argument(node, 2, "start", 0) or 0
    return dim, max(start + x[dim], 0) if start < 0 else min(start, x[dim]), shape(node)[dim]


def split_links(node: Node) -> list[Link]:
    """split and chunk: equal pieces correspond; unequal ones need the dim whole. The result stands for every piece."""
    x, pieces = shape(operands(node)[0]), value(node)
    dim = argument(node, 2, "dim", 0) % len(x)
    made = [_same_dim(d) for d in range(len(x)) if d != dim]
    sizes = {int(piece.shape[dim]) for piece in pieces}
    if len(sizes) == 1:
        made.append(Link(f"d{dim}", {0: Member((dim,), lead=len(pieces))}, Member((dim,))))
    else:
        made.append(Link(f"d{dim}", {0: Member((dim,))}, None, "unequal pieces need it whole"))
    return made


def getitem_links(node: Node) -> list[Link]:
    """One piece of a split: dims in which the pieces are equal correspond."""
    sizes = [tuple(piece.shape) for piece in value(operands(node)[0])]
    equal = [d for d in range(len(sizes[0])) if len({size[d] for size in sizes}) == 1]
    return [
        _same_dim(d) if d in equal else Link(f"d{d}", {0: Member((d,))}, None, "unequal pieces need it whole")
        for d in range(len(sizes[0]))
    ]


def drop_dim_links(node: Node) -> list[Link]:
    """select and unbind: one dim disappears and must be whole, the others stay."""
    x = shape(operands(node)[0])
    dim = argument(node, 1, "dim", 0) % len(x)
    kept = [d for d in range(len(x)) if d != dim]
    made = [Link(f"d{d}", {0: Member((d,))}, Member((i,))) for i, d in enumerate(kept)]
    return [*made, Link(f"d{dim}", {0: Member((dim,))}, None, "a single index needs it whole")]


def stack_links(node: Node) -> list[Link]:
    """stack: a new dim appears, the others stay."""
    ndim, count = len(shape(node)), len(operands(node))
    new = argument(node, 1, "dim", 0) % ndim
    kept = [d for d in range(ndim) if d != new]
    return [Link(f"d{d}", {k: Member((i,)) for k in range(count)}, Member((d,))) for i, d in enumerate(kept)]


def cat_links(node: Node) -> list[Link]:
    """cat: equal pieces become a leading factor of the joined dim; unequal ones need it whole."""
    parts, ndim = operands(node), len(shape(node))
    dim = argument(node, 1, "dim", 0) % ndim
    made = [Link(f"d{d}", {k: Member((d,)) for k in range(len(parts))}, Member((d,))) for d in range(ndim) if d != dim]
    sizes = {shape(part)[dim] for part in parts}
    piece = {k: Member((dim,)) for k in range(len(parts))}
    if len(sizes) == 1:
        return [*made, Link(f"d{dim}", piece, Member((dim,), lead=len(parts)))]
    singles = [Link(f"d{dim}", {k: one}, None, "unequal pieces need it whole") for k, one in piece.items()]
    return [*made, *singles]


def pad_links(node: Node) -> list[Link]:
    """pad: padded dims must be whole, the others stay."""
    before, after = shape(operands(node)[0]), shape(node)
    pads = node.args[1]
    padded = {len(after) - 1 - i // 2 for i, amount in enumerate(pads) if amount}  # type: ignore[arg-type]
    whole = [Link(f"d{d}", {0: Member((d,))}, None, "padding needs it whole") for d in sorted(padded)]
    return whole + [_same_dim(d) for d in range(len(before)) if d not in padded]


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
    reduced = argument(node, 3, "reduction", 1) != 0
    vocabulary = {0: Member((1,))} | ({2: Member((0,))} if len(operands(node)) > 2 else {})
    made = [Link("vocabulary", vocabulary, None, form="vocab_cross_entropy")]
    for d in range(len(targets)):
        members = {0: Member((d + (d > 0),)), 1: Member((d,))}
        made.append(Link(f"n{d}", members, None if reduced else Member((d,)), form="token_loss" if reduced else ""))
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


def _same_dim(dim: int, whole: str = "") -> Link:
    return Link(f"d{dim}", {0: Member((dim,))}, Member((dim,)), whole)


def _carries(size: Sequence[int], back: int, wanted: int) -> bool:
    return len(size) >= -back and size[back] == wanted and wanted != 1


def _dims(dims: Any, ndim: int) -> list[int]:
    return [d % ndim for d in (dims if isinstance(dims, (list, tuple)) else [dims])] if ndim else []
