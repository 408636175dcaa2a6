"""Link functions of operators that compute: which dims of the operands run together with which dim of the result.

In: a node. Out: its links. A row of letters reads like einsum, aligned from the right: a letter that is missing on
the right is contracted, a starred one stays whole.

    letter_links(node, "... i, o i, o -> ... o")

Operators that only move entries are in `moves.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.fx import Node

from autoptd.ir.notes import note, op_name, shape
from autoptd.ir.operators.record import QUERIES, Link, Member, argument, dims_of, operands, same_dim

NORMAL = "needs all values at once"
UNCOUNTED = "its labels or class weights are computed from parameters, so their number is not known before the forward"


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


def free_links(node: Node) -> list[Link]:
    """Return a link for every dim of full, zeros, ones: free in the result, whatever the operands."""
    return [Link(f"d{d}", {}, Member((d,))) for d, size in enumerate(shape(node)) if size != 1]


def no_links(node: Node) -> list[Link]:
    """Return no links, for arange and the like: every rank computes all of it."""
    return []


# Products


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


def expert_links(node: Node) -> list[Link]:
    """Link expert_mm: rows with their expert's number; any row may have chosen any expert."""
    return letter_links(node, "s i, e* i o, s -> s o")


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
    return [Link("kv", heads, Member((d,), tail=repeat)), Link("repeat", repeats, Member((d,), lead=k[d]))]


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


# Reductions and norms


def extreme_links(node: Node) -> list[Link]:
    """Link max and min: of two tensors, over all dims, or over one."""
    return pointwise_links(node) if len(operands(node)) > 1 else reduction(NORMAL)(node)


def last_dims_whole(node: Node) -> list[Link]:
    """Link layer_norm and rms_norm: the normalised dims stay whole; weight and bias are those dims."""
    ndim, normalized = len(shape(node)), len(node.args[1])  # type: ignore[arg-type]
    # layer_norm of [b, s, h] with normalized_shape [h]: b and s run through, h is whole.
    kept = ndim - normalized
    vectors = range(1, len(operands(node)))
    links = [same_dim(d) for d in range(kept)]
    for i in range(normalized):
        members = {0: Member((kept + i,)), **dict.fromkeys(vectors, Member((i,)))}
        links.append(Link(f"h{i}", members, Member((kept + i,)), "the norm needs its whole dim"))
    return links


def weight_norm_links(node: Node) -> list[Link]:
    """Link _weight_norm(v, g, dim): the slices of v along dim have a norm each, and g scales them."""
    kept, size = argument(node, "dim"), shape(node)
    # -1 is a norm over everything.
    if kept == -1:
        return []
    norms = tuple(length if d == kept else 1 for d, length in enumerate(size))
    if tuple(shape(operands(node)[1])) != norms:
        return []
    links = [Link("o", {0: Member((kept,)), 1: Member((kept,))}, Member((kept,)))]
    for d in range(len(size)):
        if d != kept:
            links.append(same_dim(d, "a norm runs over it"))
    return links


def sample_links(node: Node) -> list[Link]:
    """Link group norm: samples are independent, all other dims are whole."""
    return [same_dim(0)] if len(shape(node)) > 1 else []


def batch_norm_links(node: Node) -> list[Link]:
    """Link batch_norm, entry by entry: in training `trace/statistics.py` has written it as means and products."""
    ndim, vectors = len(shape(node)), range(1, len(operands(node)))
    channels = {0: Member((1,)), **dict.fromkeys(vectors, Member((0,)))}
    return [Link("c", channels, Member((1,))), *(same_dim(d) for d in range(ndim) if d != 1)]


def cross_entropy_links(node: Node) -> list[Link]:
    """Link cross_entropy_loss(logits, targets, weight?): vocabulary and tokens may be split, each with its
    local form.
    """
    logits, targets = shape(operands(node)[0]), shape(operands(node)[1])
    # Class probabilities, or one unbatched sample.
    if len(targets) == len(logits) or len(logits) < 2:
        return []
    is_reduced = bool(argument(node, "reduction"))
    whole = ""
    # 1 is a mean, which divides by the number (or the weight) of its labels.
    if argument(node, "reduction") == 1:
        reads_params = any(note(operand).of_params for operand in operands(node)[1:])
        whole = UNCOUNTED if reads_params else ""
    vocabulary = {0: Member((1,))}
    if len(operands(node)) > 2:
        vocabulary[2] = Member((0,))
    links = [Link("vocabulary", vocabulary, None, form="vocab_cross_entropy")]
    for d in range(len(targets)):
        # Logits are [n, vocabulary, ...]: after the first dim, those of the targets are one further right.
        members = {0: Member((d + (d > 0),)), 1: Member((d,))}
        if is_reduced:
            links.append(Link(f"n{d}", members, None, whole, "token_loss"))
        else:
            links.append(Link(f"n{d}", members, Member((d,))))
    return links


# Positions along a dim


def diff_links(node: Node) -> list[Link]:
    """Link diff(x, n, dim, prepend, append): `dim` combines neighbours, the other dims run through."""
    numbers, ndim = range(len(operands(node))), len(shape(node))
    dim = argument(node, "dim") % ndim
    links = []
    for d in range(ndim):
        if d != dim:
            links.append(Link(f"d{d}", dict.fromkeys(numbers, Member((d,))), Member((d,))))
    for number in numbers:
        links.append(Link(f"d{dim}", {number: Member((dim,))}, None, "neighbours meet along it"))
    return links


def last_two_whole(node: Node) -> list[Link]:
    """Link triu and tril: which entries are kept depends on positions in the last two dims."""
    ndim = len(shape(node))
    return [same_dim(d, f"{op_name(node)} needs it whole" if d >= ndim - 2 else "") for d in range(ndim)]


def roll_links(node: Node) -> list[Link]:
    """Link roll: the dims that are rolled stay whole; without dims the tensor is rolled as one vector."""
    return along("dims")(node) if argument(node, "dims") else []


def fourier_links(node: Node) -> list[Link]:
    """Link torch.fft: all dims but those that are transformed."""
    before, after = shape(operands(node)[0]), shape(node)
    dims = argument(node, "dim")
    if dims is None:
        # Sizes without dims apply to the last dims.
        sizes = argument(node, "s")
        dims = list(range(-len(sizes), 0) if sizes else range(len(before)))
    taken = dims_of(dims, len(before))
    return [same_dim(d, "the transform needs it whole" if d in taken else "") for d in range(len(after))]


def glu_links(node: Node) -> list[Link]:
    """Link glu: both halves of a dim give one."""
    ndim = len(shape(node))
    halved = argument(node, "dim") % ndim
    links = [same_dim(d) for d in range(ndim) if d != halved]
    return [*links, Link("half", {0: Member((halved,), lead=2)}, Member((halved,)))]
