"""How the dims of an operator's operands and result correspond: `Link`s, computed from shapes.

In: a node. Out: its links, each a set of dims of operands and result that run together. A function per family of operators,
general ones here, those of views and pieces in `shape_links.py`, of attention, losses and tables in `operator_links.py`; which
operator has which is said by `table.py`. A row of letters reads like einsum, aligned from the right:

    letter_links(node, "... i, o i, o -> ... o")     # a letter missing on the right is contracted, a starred one stays whole
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.fx import Node

from autoptd.ir.notes import op_name, shape

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
    """A non-tensor argument by name; `position` is where it stands in operators without a schema.

    Overloads of one operator differ: the second argument of `x.var(False)` is no dim. `default` is for an argument that is left
    out and whose default the schema calls None.
    """
    if hasattr(node.target, "_schema"):
        position, usual = _arguments(node.target).get(name, (len(node.args), None))
        default = default if usual is None else usual
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


@cache
def _arguments(overload: Any) -> dict[str, tuple[int, Any]]:
    """Place and default of every argument."""
    return {one.name: (i, one.default_value) for i, one in enumerate(overload._schema.arguments)}


def letter_links(node: Node, letters: str) -> list[Link]:
    """Links of a row of letters, for this node's shapes; none where the row does not fit them.

    An operand with fewer dims than its pattern is broadcast, and keeps the rightmost letters; the result has them all.
    """
    left, right = letters.split("->")
    patterns, result = [pattern.split() for pattern in left.split(",")], right.split()
    sizes, out_shape = [shape(one) for one in operands(node)], shape(node)
    dotted = [len(size) - len(p) + 1 for size, p in zip(sizes, patterns, strict=False) if "..." in p]
    lead = max(dotted, default=0)
    if len(out_shape) != len(result) - ("..." in result) + (lead if dotted and "..." in result else 0):
        return []
    spell = [_spell(p, len(size), lead) for size, p in zip(sizes, patterns, strict=False)]
    result = _spell(result, len(out_shape), lead)
    names = dict.fromkeys(name for word in [*spell, result] for name in word)
    every = list(zip([*spell, result], [*sizes, out_shape], strict=True))
    if any(len({size[word.index(name)] for word, size in every if name in word} - {1}) > 1 for name in names):
        return []
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


def linear_links(node: Node) -> list[Link]:
    """linear: a weight of one dim gives no dim of its own in the result; it has no bias, or one number."""
    has_rows = len(shape(operands(node)[1])) > 1
    return letter_links(node, "... i, o i, o -> ... o" if has_rows else "... i, i, -> ...")


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
        starred = dims_of(argument(node, position, name, default), ndim)
        return [same_dim(d, f"{op_name(node)} needs it whole" if d in starred else "") for d in range(ndim)]

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
    return [same_dim(d, f"{op_name(node)} needs it whole" if d >= ndim - 2 else "") for d in range(ndim)]


def roll_links(node: Node) -> list[Link]:
    """roll: the dims that are rolled stay whole; without dims the tensor is rolled as one vector."""
    return along(2, "dims")(node) if argument(node, 2, "dims") else []


def last_dims_whole(node: Node) -> list[Link]:
    """layer_norm and rms_norm: the normalised dims stay whole; weight and bias are those dims."""
    ndim, normalized = len(shape(node)), len(node.args[1])  # type: ignore[arg-type]
    made = [same_dim(d) for d in range(ndim - normalized)]
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
        dims = range(len(size)) if dims is None or dims == [] else dims_of(dims, len(size))
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


def free_links(node: Node) -> list[Link]:
    """full, zeros, ones: every dim of the result is free, whatever the operands are."""
    return [Link(f"d{d}", {}, Member((d,))) for d, size in enumerate(shape(node)) if size != 1]


def no_links(node: Node) -> list[Link]:
    """arange and the like: computed whole."""
    return []


def same_dim(dim: int, whole: str = "") -> Link:
    return Link(f"d{dim}", {0: Member((dim,))}, Member((dim,)), whole)


def dims_of(dims: Any, ndim: int) -> list[int]:
    return [d % ndim for d in (dims if isinstance(dims, (list, tuple)) else [dims])] if ndim else []
