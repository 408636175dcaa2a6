"""The axis table: which operator's dims correspond how, and in which operands it is linear.

Most operators are one line of letters, read like einsum and aligned from the right, `...` standing for any leading dims:

    Rule("aten.mm", "m k, k n -> m n")                a letter missing on the right is contracted: split by it, the result is P
    Rule("aten.layer_norm", ...)                      a starred letter (h*) must stay whole

Views, slices, splits and the like are computed from shapes (`dim_links.py`). Pointwise operators are known by torch's
tag. What no rule knows has no row: see `unlisted.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node

from autoptd.ir.notes import op_name
from autoptd.passes.ops.dim_links import (
    NORMAL,
    Link,
    along,
    diff_links,
    einsum_links,
    free_links,
    last_dims_whole,
    last_two_whole,
    letter_links,
    linear_links,
    matmul_links,
    no_links,
    operands,
    pointwise_links,
    reduction,
    roll_links,
)
from autoptd.passes.ops.operator_links import (
    attention_links,
    batch_norm_links,
    convolution_links,
    cross_entropy_links,
    embedding_links,
    extreme_links,
    fourier_links,
    gather_links,
    glu_links,
    index_links,
    one_hot_links,
    recurrent_links,
    sample_links,
    weight_norm_links,
)
from autoptd.passes.ops.shape_links import (
    bits_links,
    cat_links,
    complex_links,
    drop_dim_links,
    expand_links,
    getitem_links,
    pad_links,
    permute_links,
    repeat_links,
    reshape_links,
    slice_links,
    split_links,
    stack_links,
    tile_links,
)


@dataclass(frozen=True)
class Rule:
    """One row: operator, its letters or the function that computes its links, and which operands it is linear in.

    `op` names one overload ("aten.view.dtype") where that differs from the others. `linear` lists groups of operand numbers:
    the result is P when all operands of one group are P and the others whole.
    """

    op: str
    letters: str = ""
    links: Callable[[Node], list[Link]] | None = None
    linear: tuple[tuple[int, ...], ...] = ()


def links(node: Node) -> list[Link] | None:
    """The links of `node`, or None when no rule knows its operator."""
    rule = find_rule(node)
    if rule is None:
        return None
    return rule.links(node) if rule.links else letter_links(node, rule.letters)


def find_rule(node: Node) -> Rule | None:
    target = node.target
    for name in (str(target), op_name(node)):
        if name in TABLE:
            return TABLE[name]
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        return POINTWISE
    return None


def linear_groups(node: Node) -> list[tuple[Node, ...]]:
    """Groups of operands in which `node` is jointly linear: it maps their partial sums to a partial sum."""
    rule, read = find_rule(node), operands(node)
    if rule is None or node.kwargs.get("rounding_mode") is not None:
        return []
    if op_name(node) in ("aten.add", "aten.sub", "aten.rsub") and len(read) < 2:
        return []  # a literal would be added once per rank
    wanted = [tuple(range(len(read)))] if rule.linear == EVERY else rule.linear
    groups = [[i for i in group if i < len(read)] for group in wanted if group[0] < len(read)]
    # x * x is linear in each factor but not in x: a tensor that is read outside of the group as well does not count
    found = [(group, list(dict.fromkeys(read[i] for i in group))) for group in groups]
    return [tuple(ones) for group, ones in found if sum(map(read.count, ones)) == len(group)]


def addends(node: Node, split: set[Node]) -> set[Node]:
    """Operands that are added to a contraction over the `split` ones (a bias): they must be partial sums like it."""
    joint = [group for group in linear_groups(node) if split & set(group)]
    return {one for group in joint for one in group} - split


FIRST = ((0,),)
LINEAR_UNARY = "contiguous clone neg detach".split()
VIEWS = "view reshape _unsafe_view flatten unflatten squeeze unsqueeze".split()
TRANSPOSES = "transpose t numpy_T permute swapaxes swapdims".split()
LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss".split()  # their reductions are split off
LOSSES += "binary_cross_entropy binary_cross_entropy_with_logits".split()
LOSSES += "margin_ranking_loss hinge_embedding_loss poisson_nll_loss".split()
FOURIER = [f"{kind}{dims}" for kind in "fft ifft rfft irfft hfft ihfft".split() for dims in ("", "2", "n")]
FOURIER += "fftshift ifftshift".split()
# pointwise, torch has no tag
UNTAGGED = "hardswish log_sigmoid where masked_fill floor_divide isfinite isnan isinf".split()
EVERY = ((-1,),)  # linear in all operands together

TABLE: dict[str, Rule] = {
    rule.op: rule
    for rule in [
        Rule("aten.linear", links=linear_links, linear=((0, 2),)),
        Rule("aten.addmm", "m n, m k, k n -> m n", linear=((0, 1),)),
        Rule("aten.matmul", links=matmul_links, linear=((0,), (1,))),
        *(Rule(f"aten.{name}", "k, k ->", linear=((0,), (1,))) for name in ("dot", "vdot")),
        Rule("aten.mv", "m k, k -> m", linear=((0,), (1,))),
        Rule("aten.mm", "m k, k n -> m n", linear=((0,), (1,))),
        Rule("aten.bmm", "b m k, b k n -> b m n", linear=((0,), (1,))),
        Rule("aten.baddbmm", "b m n, b m k, b k n -> b m n", linear=((0, 1), (0, 2))),
        Rule("aten.einsum", links=einsum_links, linear=((0,), (1,), (2,))),
        Rule("aten.repeat_interleave", links=repeat_links, linear=FIRST),
        Rule("aten.embedding", links=embedding_links, linear=FIRST),
        Rule("aten.layer_norm", links=last_dims_whole),
        Rule("aten.rms_norm", links=last_dims_whole),
        Rule("aten._weight_norm", links=weight_norm_links),
        Rule("aten.scaled_dot_product_attention", links=attention_links, linear=((2,),)),
        Rule("aten.cross_entropy_loss", links=cross_entropy_links),
        Rule("aten.dropout", links=pointwise_links, linear=FIRST),  # by a mask that all addends share
        Rule("aten.cosine_embedding_loss", "... h*, ... h*, ... -> ..."),
        Rule("aten.triplet_margin_loss", "... h*, ... h*, ... h* -> ..."),
        Rule("aten.multi_margin_loss", "b c*, b, c* -> b"),
        Rule("aten.multilabel_margin_loss", "b c*, b c* -> b"),
        Rule("aten.batch_norm", links=batch_norm_links),
        *(Rule(f"aten.{name}.input", links=recurrent_links) for name in "gru lstm rnn_tanh rnn_relu".split()),
        *(Rule(f"aten.fft_{name}", links=fourier_links) for name in FOURIER),
        Rule("aten._safe_softmax", links=along(1)),
        Rule("aten.softmax", links=along(1)),
        Rule("aten._softmax", links=along(1)),
        Rule("aten.log_softmax", links=along(1)),
        Rule("aten.cumsum", links=along(1), linear=FIRST),
        Rule("aten.flip", links=along(1, "dims"), linear=FIRST),
        Rule("aten.roll", links=roll_links, linear=FIRST),
        Rule("aten.diff", links=diff_links, linear=EVERY),
        Rule("aten.triu", links=last_two_whole, linear=FIRST),
        Rule("aten.tril", links=last_two_whole, linear=FIRST),
        Rule("aten.sum", links=reduction("", dim_at=1), linear=FIRST),
        Rule("aten.mean", links=reduction("", form="mean", dim_at=1), linear=FIRST),
        *(
            Rule(f"aten.{name}", links=reduction(NORMAL))
            for name in "amax amin argmax argmin logsumexp any all".split()
        ),
        *(Rule(f"aten.{name}", links=reduction(NORMAL)) for name in "var std prod".split()),
        Rule("aten.linalg_vector_norm", links=reduction(NORMAL, dim_at=2)),
        *(Rule(f"aten.{name}", links=pointwise_links, linear=FIRST) for name in LINEAR_UNARY),
        *(Rule(f"aten.{name}", links=pointwise_links, linear=((0, 1),)) for name in ("add", "sub", "rsub")),
        Rule("aten.mul", links=pointwise_links, linear=((0,), (1,))),
        Rule("aten.div", links=pointwise_links, linear=FIRST),
        *(Rule(f"aten.{name}", links=pointwise_links) for name in [*LOSSES, *UNTAGGED]),
        *(Rule(f"aten.{name}", links=pointwise_links) for name in "to __and__ __or__ __xor__".split()),
        *(Rule(f"aten.{name}", links=reshape_links, linear=FIRST) for name in VIEWS),
        Rule("aten.view.dtype", links=bits_links),
        *(Rule(f"aten.{name}", links=permute_links, linear=FIRST) for name in TRANSPOSES),
        Rule("aten.expand", links=expand_links, linear=FIRST),
        Rule("aten.slice", links=slice_links, linear=FIRST),
        *(Rule(f"aten.{name}", links=split_links, linear=FIRST) for name in "split split_with_sizes chunk".split()),
        *(Rule(f"aten.{name}", links=drop_dim_links, linear=FIRST) for name in ("select", "unbind")),
        Rule("getitem", links=getitem_links, linear=FIRST),
        Rule("aten.cat", links=cat_links, linear=EVERY),
        Rule("aten.stack", links=stack_links, linear=EVERY),
        Rule("aten.repeat", links=tile_links, linear=FIRST),
        Rule("aten.glu", links=glu_links),
        Rule("aten.gather", links=gather_links, linear=FIRST),
        Rule("aten.index", links=index_links, linear=FIRST),
        Rule("aten.index_select", links=index_links, linear=FIRST),
        Rule("aten.one_hot", links=one_hot_links),
        *(Rule(f"aten.{name}", links=extreme_links) for name in ("max", "min")),
        *(Rule(f"aten.{name}", links=along(at)) for name, at in (("topk", 2), ("sort", 1))),
        *(Rule(f"aten.{name}", links=pointwise_links) for name in "real imag complex polar _conj resolve_conj".split()),
        *(Rule(f"aten.{name}", links=complex_links) for name in ("view_as_complex", "view_as_real")),
        *(Rule(f"aten.{name}", links=convolution_links, linear=((0, 2),)) for name in ("conv1d", "conv2d")),
        Rule("aten.group_norm", links=sample_links),
        *(Rule(f"aten.{name}", links=pad_links) for name in ("pad", "constant_pad_nd")),
        *(Rule(f"aten.{name}", links=free_links) for name in "full zeros ones".split()),
        *(Rule(f"aten.{name}", links=pointwise_links) for name in "zeros_like ones_like full_like".split()),
        *(Rule(f"aten.{name}", links=no_links) for name in "arange scalar_tensor eye".split()),
    ]
}
POINTWISE = Rule("pointwise", links=pointwise_links)
GEMMS = ("aten.linear", "aten.addmm", "aten.matmul", "aten.mm", "aten.bmm", "aten.baddbmm")
