"""How the dims of an operator's operands and result correspond: what many operators share.

In: a node. Out: its links, each a set of dims of operands and result that run together. What one family alone computes is in
its file. A row of letters reads like einsum, aligned from the right:

    letter_links(node, "... i, o i, o -> ... o")     # a letter missing on the right is contracted, a starred one stays whole
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from autoptd.ir.notes import op_name, shape
from autoptd.ir.operators.record import Link, Member, argument, operands

NORMAL = "needs all values at once"


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


def along(name: str, default: Any = -1) -> Callable[[Node], list[Link]]:
    """Operators that keep the shape and need the dims given by one argument whole (softmax, cumsum)."""

    def make(node: Node) -> list[Link]:
        ndim = len(shape(node))
        starred = dims_of(argument(node, name, default), ndim)
        return [same_dim(d, f"{op_name(node)} needs it whole" if d in starred else "") for d in range(ndim)]

    return make


def reduction(whole: str, form: str = "") -> Callable[[Node], list[Link]]:
    """Operators that reduce the dims given by argument `dim` (all, if absent); `whole` says why those cannot be split."""

    def make(node: Node) -> list[Link]:
        size = shape(operands(node)[0])
        dims = argument(node, "dim")
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
