"""Operators that look entries up by ids, and losses."""

from __future__ import annotations

import torch
from torch.fx import Node

from autoptd.ir.notes import note, op_name, shape, value
from autoptd.ir.operators.links import pointwise_links, same_dim
from autoptd.ir.operators.record import FIRST, Link, Member, Operator, argument, operands

UNCOUNTED = "its labels or class weights are computed from parameters, so their number is not known before the forward"


def embedding_links(node: Node) -> list[Link]:
    """embedding(weight, ids): a split of the vocabulary gives partial sums of rows."""
    ids = len(shape(operands(node)[1]))
    made = [
        Link("vocabulary", {0: Member((0,))}, None, form="vocab_embedding"),
        Link("h", {0: Member((1,))}, Member((ids,))),
    ]
    if argument(node, "scale_grad_by_freq") or argument(node, "sparse"):
        made[0] = Link(
            "vocabulary", {0: Member((0,))}, None, "gradients by frequency and sparse gradients need all rows"
        )
    return made + [Link(f"n{d}", {1: Member((d,))}, Member((d,))) for d in range(ids)]


def gather_links(node: Node) -> list[Link]:
    """gather(x, dim, index): the dims beside `dim` run together where they are equally long; `dim` of x is looked up."""
    x, index = (shape(one) for one in operands(node))
    dim = argument(node, "dim") % len(x) if x else 0
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
        dim = argument(node, "dim") % max(1, len(shape(read[0])))
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


def cross_entropy_links(node: Node) -> list[Link]:
    """cross_entropy_loss(logits, targets, weight?): the vocabulary and the tokens may be split, each with its local form."""
    logits, targets = shape(operands(node)[0]), shape(operands(node)[1])
    if len(targets) == len(logits) or len(logits) < 2:  # class probabilities, or one unbatched sample
        return []
    reduction = argument(node, "reduction")
    whole = UNCOUNTED if reduction == 1 and any(note(one).of_params for one in operands(node)[1:]) else ""
    vocabulary = {0: Member((1,))} | ({2: Member((0,))} if len(operands(node)) > 2 else {})
    made = [Link("vocabulary", vocabulary, None, form="vocab_cross_entropy")]
    for d in range(len(targets)):
        members = {0: Member((d + (d > 0),)), 1: Member((d,))}
        made.append(
            Link(f"n{d}", members, None, whole, "token_loss")
            if reduction
            else Link(f"n{d}", members, Member((d,)))
        )
    return made


# Losses of every entry, and what reads several entries for one.
POINTWISE_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss binary_cross_entropy".split()
)
POINTWISE_LOSSES += (
    "binary_cross_entropy_with_logits margin_ranking_loss hinge_embedding_loss poisson_nll_loss".split()
)

OPERATORS = [
    Operator("aten.embedding", links=embedding_links, linear=FIRST, is_lookup=True),
    Operator("aten.gather", links=gather_links, linear=FIRST, text="torch.gather"),
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
    Operator("aten.nll_loss", counts_labels=True),
    Operator("aten.nll_loss_nd", counts_labels=True),
    *(Operator(f"aten.{name}", links=pointwise_links, reduces=True) for name in POINTWISE_LOSSES),
    Operator("aten.cosine_embedding_loss", "... h*, ... h*, ... -> ...", reduces=True),
    Operator("aten.triplet_margin_loss", "... h*, ... h*, ... h* -> ...", reduces=True),
    Operator("aten.multi_margin_loss", "b c*, b, c* -> b", reduces=True),
    Operator("aten.multilabel_margin_loss", "b c*, b c* -> b", reduces=True),
    # Of the runtime, where the vocabulary is split
    Operator("vocab_embedding", is_lookup=True, is_fresh=True, variable="rows"),
    Operator("cross_entropy", keeps="probabilities", variable="loss"),
]
