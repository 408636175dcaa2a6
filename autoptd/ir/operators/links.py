"""Link functions that several operator families share: how dims of operands and result correspond.

In: a node. Out: its links, each a set of dims of operands and result that run together. Link functions of a
single family are in the file of that family. A row of letters reads like einsum, aligned from the right: a
letter that is missing on the right is contracted, a starred one stays whole.

    letter_links(node, "... i, o i, o -> ... o")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.fx import Node

from autoptd.ir.notes import op_name, shape
from autoptd.ir.operators.record import Link, Member, argument, operands

NORMAL = "needs all values at once"


def letter_links(node: Node, letters: str) -> list[Link]:
    """Return the links that a row of letters gives for this node's shapes; none if the row does not fit.

    An operand with fewer dims than its pattern is broadcast and keeps the rightmost letters; the result has
    all letters.
    """
    left, right = letters.split("->")
    patterns, result = [pattern.split() for pattern in left.split(",")], right.split()
    sizes, out_shape = [shape(operand) for operand in operands(node)], shape(node)
    # `...` stands for as many dims as the operand with the most leading dims has.
    pairs = zip(sizes, patterns, strict=False)
    leads = [len(size) - len(pattern) + 1 for size, pattern in pairs if "..." in pattern]
    lead = max(leads, default=0)
    result_ndim = len(result) - 1 + lead if "..." in result else len(result)
    if len(out_shape) != result_ndim:
        return []
    words = [_letter_per_dim(p, len(size), lead) for size, p in zip(sizes, patterns, strict=False)]
    result = _letter_per_dim(result, len(out_shape), lead)
    size_of = _sizes_of_letters([*words, result], [*sizes, out_shape])
    links = []
    for letter in size_of or ():
        members = {}
        for number, (word, size) in enumerate(zip(words, sizes, strict=True)):
            member = _member_of(letter, word, size)
            if member is not None:
                members[number] = member
        out = _member_of(letter, result, out_shape)
        # A dim of size 1 in the result cannot be split.
        if letter in result and out is None:
            continue
        plain = letter.rstrip("*")
        whole = f"{plain} must stay whole" if letter.endswith("*") else ""
        if members or out is not None:
            links.append(Link(plain, members, out, whole))
    return links


def _member_of(letter: str, word: list[str], size: tuple[int, ...]) -> Member | None:
    """Return the dim of a letter in a tensor; None if it has none, or is broadcast (a dim of size 1)."""
    if letter not in word or size[word.index(letter)] == 1:
        return None
    return Member((word.index(letter),))


def _sizes_of_letters(words: list[list[str]], sizes: list[tuple[int, ...]]) -> dict[str, int] | None:
    """Return the size of every letter, in the order of first use; None where operands disagree on one."""
    size_of: dict[str, int] = {}
    for word, word_sizes in zip(words, sizes, strict=True):
        for letter in dict.fromkeys(word):
            # For a letter that occurs twice in a word, the first dim counts.
            size = word_sizes[word.index(letter)]
            known = size_of.setdefault(letter, size)
            # A dim of size 1 met first is broadcast to the other's size.
            if known == 1:
                size_of[letter] = size
            elif size not in (1, known):
                return None
    return size_of


def _letter_per_dim(pattern: list[str], ndim: int, lead: int) -> list[str]:
    """Return one letter for every dim: `...` becomes numbered letters, and a tensor of fewer dims than its
    pattern keeps the rightmost ones.
    """
    if "..." in pattern:
        place = pattern.index("...")
        count = ndim - len(pattern) + 1
        # Number leading dims from the right, so that broadcast operands get the same letters.
        dots = [f".{lead - count + i}" for i in range(count)]
        pattern = [*pattern[:place], *dots, *pattern[place + 1 :]]
    return pattern[len(pattern) - ndim :]


def pointwise_links(node: Node) -> list[Link]:
    """Return one link for every dim of the result, without operands that are broadcast along it."""
    out = shape(node)
    links = []
    for dim, size in enumerate(out):
        if size == 1:
            continue
        # Count from the right, where operands with fewer dims are aligned.
        back = dim - len(out)
        members = {}
        for number, operand in enumerate(operands(node)):
            operand_dim = len(shape(operand)) + back
            if operand_dim >= 0 and shape(operand)[operand_dim] == size:
                members[number] = Member((operand_dim,))
        links.append(Link(f"d{dim}", members, Member((dim,))))
    return links


def along(name: str, default: Any = -1) -> Callable[[Node], list[Link]]:
    """Return the links of operators that keep the shape and need the dims in argument `name` whole (softmax,
    cumsum).
    """

    def make(node: Node) -> list[Link]:
        ndim = len(shape(node))
        starred = dims_of(argument(node, name, default), ndim)
        return [same_dim(d, f"{op_name(node)} needs it whole" if d in starred else "") for d in range(ndim)]

    return make


def over_classes(links: Callable[[Node], list[Link]], form: str) -> Callable[[Node], list[Link]]:
    """Let the dim of an operator that needs all its values at once be split, in a form of `CLASSES`.

    Applies to a single such dim, named by argument `dim`; the form does not support several.
    """

    def make(node: Node) -> list[Link]:
        made, dim = links(node), argument(node, "dim")
        needed = [link for link in made if link.whole]
        is_one = isinstance(dim, int) or (isinstance(dim, (list, tuple)) and len(dim) == 1)
        if len(needed) != 1 or not is_one:
            return made
        return [replace(link, whole="", form=form, mixes=link.whole) if link.whole else link for link in made]

    return make


def reduction(whole: str, form: str = "") -> Callable[[Node], list[Link]]:
    """Return the links of operators that reduce the dims given by argument `dim` (all, if absent).

    `whole` is the reason why those cannot be split, "" if they can.
    """

    def make(node: Node) -> list[Link]:
        size = shape(operands(node)[0])
        dims = argument(node, "dim")
        # `dim=[]` reduces everything too.
        dims = range(len(size)) if dims is None or dims == [] else dims_of(dims, len(size))
        keeps_dims = len(shape(node)) == len(size)
        links, out_dim = [], 0
        for d in range(len(size)):
            if d in dims:
                links.append(Link(f"d{d}", {0: Member((d,))}, None, whole, form))
                # With keepdim, the reduced dim stays in the result.
                out_dim += keeps_dims
            else:
                links.append(Link(f"d{d}", {0: Member((d,))}, Member((out_dim,))))
                out_dim += 1
        return [link for link in links if size[link.operands[0].dims[0]] != 1]

    return make


def free_links(node: Node) -> list[Link]:
    """Return a link for every dim of full, zeros, ones: free in the result, whatever the operands."""
    return [Link(f"d{d}", {}, Member((d,))) for d, size in enumerate(shape(node)) if size != 1]


def no_links(node: Node) -> list[Link]:
    """Return no links, for arange and the like: every rank computes all of it."""
    return []


def same_dim(dim: int, whole: str = "") -> Link:
    """Link one dim of the first operand to the same dim of the result."""
    return Link(f"d{dim}", {0: Member((dim,))}, Member((dim,)), whole)


def dims_of(dims: Any, ndim: int) -> list[int]:
    """Return one or several dims as a list of non-negative indices; a 0-d tensor has none."""
    if not ndim:
        return []
    return [d % ndim for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
