"""Operators that look entries up by ids, and losses."""

from __future__ import annotations

import torch
from torch.fx import Node

from autoptd.ir.notes import note, op_name, shape, value
from autoptd.ir.operators.links import over_classes, pointwise_links, same_dim
from autoptd.ir.operators.record import FIRST, Link, Member, Operator, argument, operands

UNCOUNTED = (
    "its labels or class weights are computed from parameters, so their number is not known before the "
)
UNCOUNTED += "forward"


def embedding_links(node: Node) -> list[Link]:
    """Link embedding(weight, ids): a split of the vocabulary gives partial sums of rows."""
    ndim = len(shape(operands(node)[1]))
    vocabulary = Link("vocabulary", {0: Member((0,))}, None, form="vocab_embedding")
    if argument(node, "scale_grad_by_freq") or argument(node, "sparse"):
        whole = "gradients by frequency and sparse gradients need all rows"
        vocabulary = Link("vocabulary", {0: Member((0,))}, None, whole)
    # ids [b, s] and weight [V, h] give [b, s, h].
    hidden = Link("h", {0: Member((1,))}, Member((ndim,)))
    return [vocabulary, hidden, *(Link(f"n{d}", {1: Member((d,))}, Member((d,))) for d in range(ndim))]


def gather_links(node: Node) -> list[Link]:
    """Link gather(x, dim, index): the other dims run together where they are equally long; `dim` of x is
    looked up.
    """
    x, index = (shape(operand) for operand in operands(node))
    dim = argument(node, "dim") % len(x) if x else 0
    links = [Link("looked up", {0: Member((dim,))}, None, "any entry may be looked up")] if x else []
    for d in range(len(index)):
        if d == dim:
            links.append(Link(f"d{d}", {1: Member((d,))}, Member((d,))))
        elif x[d] == index[d]:
            links.append(Link(f"d{d}", {0: Member((d,)), 1: Member((d,))}, Member((d,))))
        else:
            links.append(Link(f"d{d}", {0: Member((d,))}, None, "an uneven slice needs it whole"))
    return links


def scatter_links(node: Node) -> list[Link]:
    """Link scatter(x, dim, index, src or a number): the other dims run together where all are equally long."""
    sizes = [shape(operand) for operand in operands(node)]
    dim = argument(node, "dim") % max(1, len(sizes[0]))
    links = []
    for d in range(len(sizes[0])):
        members = dict.fromkeys(range(len(sizes)), Member((d,)))
        uneven = "" if len({size[d] for size in sizes}) == 1 else "an uneven slice needs it whole"
        whole = "any entry may be written" if d == dim else uneven
        links.append(Link(f"d{d}", {0: Member((d,))} if whole else members, Member((d,)), whole))
    return links


def index_links(node: Node) -> list[Link]:
    """Link x[:, ids] and index_select: one tensor of positions in one dim, looked up as in an embedding."""
    read = operands(node)
    if op_name(node) == "aten.index_select":
        dim = argument(node, "dim") % max(1, len(shape(read[0])))
    else:
        indexed = [d for d, index in enumerate(node.args[1]) if index is not None]  # type: ignore[arg-type, union-attr]
        # Several index tensors meet elementwise; a mask gives sizes that depend on its values.
        if len(indexed) != 1 or value(read[1]).dtype in (torch.bool, torch.uint8):
            return []
        dim = indexed[0]
    x, ids = (shape(operand) for operand in read)
    links = [Link("looked up", {0: Member((dim,))}, None, "any entry may be looked up")] if x else []
    for d in range(len(x)):
        if d != dim:
            # The dims of ids replace `dim`: later dims move.
            out_dim = d if d < dim else d - 1 + len(ids)
            links.append(Link(f"d{d}", {0: Member((d,))}, Member((out_dim,))))
    return links + [Link(f"n{d}", {1: Member((d,))}, Member((dim + d,))) for d in range(len(ids))]


def one_hot_links(node: Node) -> list[Link]:
    """Link one_hot(ids): the dims of ids run through; the last dim of the result is new."""
    return [same_dim(d) for d in range(len(shape(node)) - 1)]


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


# Losses that have a value for every entry; below them, those that read several entries for one value.
POINTWISE_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss binary_cross_entropy".split()
)
POINTWISE_LOSSES += (
    "binary_cross_entropy_with_logits margin_ranking_loss hinge_embedding_loss poisson_nll_loss".split()
)

OPERATORS = [
    Operator("aten.embedding", links=embedding_links, linear=FIRST, is_lookup=True),
    Operator(
        "aten.gather", links=over_classes(gather_links, "classes_gather"), linear=FIRST, text="torch.gather"
    ),
    *(Operator(f"aten.{name}", links=scatter_links, text=f".{name}") for name in ("scatter", "scatter_add")),
    Operator("aten.index", links=index_links, linear=FIRST),
    Operator("aten.index_select", links=index_links, linear=FIRST, text="torch.index_select"),
    Operator("aten.one_hot", links=one_hot_links),
    Operator(
        "aten.cross_entropy_loss",
        links=cross_entropy_links,
        keeps="probabilities",
        counts_labels=True,
        variable="loss",
    ),
    *(Operator(f"aten.{name}", links=pointwise_links, reduces=True) for name in POINTWISE_LOSSES),
    Operator("aten.cosine_embedding_loss", "... h*, ... h*, ... -> ...", reduces=True),
    Operator("aten.triplet_margin_loss", "... h*, ... h*, ... h* -> ...", reduces=True),
    Operator("aten.multi_margin_loss", "b c*, b, c* -> b", reduces=True),
    Operator("aten.multilabel_margin_loss", "b c*, b c* -> b", reduces=True),
    # Operators of the runtime: where the vocabulary is split.
    Operator("vocab_embedding", is_lookup=True, is_fresh=True, variable="rows"),
    Operator("cross_entropy", keeps="probabilities", variable="loss"),
    Operator("classes_gather", is_fresh=True, variable="gather"),
    Operator("take_rows", is_lookup=True, is_fresh=True, variable="rows"),
    Operator("put_rows", is_fresh=True, variable="experts"),
    Operator("expert_rows", is_lookup=True, is_fresh=True, variable="bias"),
    *(Operator(f"classes_{name}", variable=name) for name in "log_softmax softmax logsumexp argmax".split()),
]
