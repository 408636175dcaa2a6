"""The table of operators, and questions that combine a record with a node.

In: a node. Out: its record, or an answer. Most operators are one line of letters, read like einsum and aligned from
the right, where `...` stands for any leading dims; a starred letter (`h*`) must stay whole. A letter that is missing
on the right is contracted: split along it, the result is P.

    Operator("aten.mm", "m k, k n -> m n")

The links of other operators are computed from shapes (`links.py`, `moves.py`). Pointwise operators are known by
torch's tag. An unknown operator has an empty record: see `passes/ops/unlisted.py`. No other file refers to operators
by name, except fusion patterns, the normal form of traces, and special cases of codegen.

    operator_of(node).keeps         # "operands"
    is_view(node)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.notes import note, op_name, shape
from autoptd.ir.operators import flops, moves
from autoptd.ir.operators.links import (
    NORMAL,
    along,
    attention_links,
    batch_norm_links,
    convolution_links,
    cross_entropy_links,
    diff_links,
    einsum_links,
    expert_links,
    extreme_links,
    fourier_links,
    free_links,
    glu_links,
    last_dims_whole,
    last_two_whole,
    letter_links,
    linear_links,
    matmul_links,
    no_links,
    over_classes,
    pointwise_links,
    recurrent_links,
    reduction,
    roll_links,
    sample_links,
    weight_norm_links,
)
from autoptd.ir.operators.record import CLASSES, EVERY, FIRST, Link, Member, Operator, operands

# Linear in each factor by itself: one of them may be a partial sum while the other is whole.
GEMM = Operator("", linear=((0,), (1,)), factors=(0, 1), keeps="operands", is_fresh=True, is_finite=True)
# Views by the order of their entries: the same order in other dims, and another order of the dims.
FOLD = Operator("", links=moves.reshape_links, linear=FIRST, moves="fold")
TURN = Operator("", links=moves.permute_links, linear=FIRST, moves="turn")
SPLIT = Operator("", links=moves.split_links, linear=FIRST, moves="pieces", text="torch.split")
# Jointly linear in both operands: partial sums add up only where both are partial.
SUM = Operator("", links=pointwise_links, linear=((0, 1),), is_sum=True)
FILLED = Operator("", fills=True, cuts_gradient=True)
FOURIER = [f"{kind}{dims}" for kind in "fft ifft rfft irfft hfft ihfft".split() for dims in ("", "2", "n")]
FOURIER += ["fftshift", "ifftshift"]
# Losses that have a value for every entry.
POINTWISE_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss binary_cross_entropy".split()
)
POINTWISE_LOSSES += [
    "binary_cross_entropy_with_logits",
    "margin_ranking_loss",
    "hinge_embedding_loss",
    "poisson_nll_loss",
]

OPERATORS = [
    # ---- Products.
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
        flops=flops.expert_flops,
        product=flops.expert_product,
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
        flops=flops.einsum_flops,
        is_finite=True,
        text="torch.einsum",
    ),
    Operator(
        "aten.scaled_dot_product_attention",
        links=attention_links,
        linear=((2,),),
        flops=flops.attention_flops,
        backward_flops=flops.attention_backward_flops,
        product=flops.attention_product,
        keeps="operands",
        variable="attention",
    ),
    *(
        Operator(f"aten.{name}", links=convolution_links, linear=((0, 2),), local_sizes=flops.local_groups)
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
        flops=flops.attention_flops,
        backward_flops=flops.attention_backward_flops,
        product=flops.attention_product,
        keeps="operands",
        variable="attention",
    ),
    Operator("linear", factors=(0, 1), is_fresh=True),
    Operator(
        "grouped_mm",
        linear=((0,), (1,)),
        flops=flops.expert_flops,
        product=flops.expert_product,
        keeps="operands",
        is_fresh=True,
        variable="experts",
    ),
    Operator(
        flops.HEAD, flops=flops.head_flops, backward_flops=lambda node, shape: 0, product=flops.head_product
    ),
    # ---- Views: the same entries in other dims, in another order or in another dtype.
    replace(FOLD, name="aten.view", sizes=("size",), text=".reshape", keeps_name=True),
    replace(FOLD, name="aten.reshape", sizes=("shape",), text=".reshape", keeps_name=True),
    replace(
        FOLD,
        name="aten._unsafe_view",
        sizes=("size",),
        is_view=True,
        text=".reshape",
        variable="view",
        keeps_name=True,
    ),
    replace(FOLD, name="aten.flatten", text=".flatten"),
    replace(
        FOLD, name="aten.unflatten", sizes=("sizes",), local_sizes=moves.local_unflatten, text=".unflatten"
    ),
    replace(FOLD, name="aten.squeeze", text=".squeeze"),
    replace(FOLD, name="aten.unsqueeze", text=".unsqueeze", keeps_name=True),
    Operator("aten.view.dtype", links=moves.bits_links, text=".view", needs_contiguous=True, keeps_name=True),
    replace(TURN, name="aten.transpose", text=".transpose", keeps_name=True),
    replace(TURN, name="aten.permute", text=".permute", keeps_name=True),
    replace(TURN, name="aten.t", text=".t"),
    *(replace(TURN, name=f"aten.{name}") for name in ("numpy_T", "swapaxes", "swapdims")),
    Operator(
        "aten.expand",
        links=moves.expand_links,
        linear=FIRST,
        moves="spread",
        sizes=("size",),
        text=".expand",
        keeps_name=True,
    ),
    # Copies and casts: those that the schema declares a view may be one.
    Operator(
        "aten.contiguous",
        links=pointwise_links,
        linear=FIRST,
        moves="same",
        is_view=False,
        text=".contiguous",
        keeps_name=True,
    ),
    Operator("aten.clone", links=pointwise_links, linear=FIRST, moves="same", keeps="nothing", text=".clone"),
    Operator(
        "aten.detach", links=pointwise_links, linear=FIRST, moves="same", cuts_gradient=True, text=".detach"
    ),
    Operator("aten.alias", moves="same"),
    Operator(
        "aten.to",
        links=pointwise_links,
        moves="cast",
        is_view=False,
        keeps="nothing",
        text=".to",
        keeps_name=True,
    ),
    Operator("aten._to_copy", moves="cast", keeps="nothing", variable="x"),
    Operator("aten.type_as", moves="cast", is_view=False),
    Operator("aten.view_as_complex", links=moves.complex_links, needs_contiguous=True),
    Operator("aten.view_as_real", links=moves.complex_links),
    # ---- Pieces, repeats and joins.
    # Pieces
    Operator(
        "aten.slice",
        links=moves.slice_links,
        linear=FIRST,
        moves="part",
        sizes=("start", "end"),
        local_sizes=moves.local_bounds,
        variable="part",
    ),
    Operator("aten.select", links=moves.drop_dim_links, linear=FIRST, moves="part", text=".select"),
    replace(SPLIT, name="aten.split", sizes=("split_size",), local_sizes=moves.local_split("split_size")),
    replace(SPLIT, name="aten.split_with_sizes", local_sizes=moves.local_split("split_sizes")),
    replace(SPLIT, name="aten.chunk", text="torch.chunk"),
    replace(SPLIT, name="aten.unbind", links=moves.drop_dim_links, text=".unbind"),
    Operator("getitem", links=moves.getitem_links, linear=FIRST, moves="pieces", is_view=True),
    # Repeats and joins
    Operator(
        "aten.repeat",
        links=moves.tile_links,
        linear=FIRST,
        sizes=("repeats",),
        local_sizes=moves.local_repeats,
    ),
    Operator(
        "aten.repeat_interleave",
        links=moves.repeat_links,
        linear=FIRST,
        local_sizes=moves.local_interleaved,
        text="torch.repeat_interleave",
    ),
    Operator("aten.cat", links=moves.cat_links, linear=EVERY, keeps="nothing", text="torch.cat"),
    Operator("aten.stack", links=moves.stack_links, linear=EVERY, text="torch.stack"),
    Operator("aten.pad", links=moves.pad_links, text="F.pad"),
    Operator("aten.constant_pad_nd", links=moves.pad_links),
    # Markers between a value and its reader
    *(Operator(marker.__name__, linear=FIRST) for marker in markers.PLACED),
    # ---- Pointwise operators: torch tags them; these lack the tag, or have more to record. Then, tensors made from literals.
    replace(
        SUM,
        name="aten.add",
        is_finite=True,
        keeps="nothing",
        is_fresh=True,
        monotone=(1, 1),
        text="+",
        variable="x",
    ),
    replace(SUM, name="aten.sub", is_finite=True, keeps="nothing", monotone=(1, -1), text="-", variable="x"),
    replace(SUM, name="aten.rsub"),
    Operator(
        "aten.mul", links=pointwise_links, linear=((0,), (1,)), is_finite=True, keeps="operands", text="*"
    ),
    Operator("aten.div", links=pointwise_links, linear=FIRST, is_finite=True, keeps="operands", text="/"),
    Operator(
        "aten.neg",
        links=pointwise_links,
        linear=FIRST,
        is_finite=True,
        keeps="nothing",
        monotone=(-1,),
        text=".neg",
    ),
    Operator("aten.pow", keeps="operands", text="**", variable="power"),
    # Values that each microbatch computes separately (`autoptd/subject/per_microbatch.py`).
    Operator("autoptd.per_microbatch", links=no_links, linear=FIRST),
    # Updates of buffers in forward (`ir/updates.py`).
    Operator("autoptd.update_buffer", links=no_links, linear=FIRST, variable="loss"),
    Operator("autoptd.keep_part", links=no_links, linear=FIRST, text="self.keep_part", variable="loss"),
    # What an evaluation returns besides the loss (`ir/outputs.py`).
    Operator("autoptd.keep_output", links=no_links, linear=FIRST, text="self.keep_output", variable="loss"),
    # Linear: all addends share one mask.
    Operator("aten.dropout", links=pointwise_links, linear=FIRST, is_random=True),
    # These read only the shape of the operand.
    *(
        Operator(name, links=pointwise_links, is_random=True, cuts_gradient=True, variable="noise")
        for name in ("autoptd.uniform", "autoptd.normal", "autoptd.exponential")
    ),
    Operator("aten.gelu", keeps="operands", text="F.gelu"),
    Operator("aten.relu", keeps="operands", text="F.relu"),
    Operator("aten.silu", keeps="operands", text="F.silu"),
    Operator("aten.tanh", keeps="operands", is_finite=True, text=".tanh"),
    Operator("aten.sigmoid", keeps="operands", text=".sigmoid"),
    *(
        Operator(f"aten.{name}", text=f".{name}")
        for name in "rsqrt cos sin exp log abs square sqrt clamp".split()
    ),
    Operator("aten.glu", links=glu_links),
    *(
        Operator(f"aten.{name}", links=pointwise_links)
        for name in ("hardswish", "log_sigmoid", "floor_divide")
    ),
    # Choices and comparisons.
    Operator("aten.where", links=pointwise_links, text="torch.where"),
    Operator("aten.masked_fill", links=pointwise_links, is_finite=True, text=".masked_fill"),
    Operator("aten.minimum", monotone=(1, 1), text="torch.minimum"),
    Operator("aten.maximum", monotone=(1, 1), text="torch.maximum"),
    Operator("aten.eq", text="=="),
    Operator("aten.ne", text="!="),
    Operator("aten.lt", monotone=(-1, 1), text="<"),
    Operator("aten.le", monotone=(-1, 1), text="<="),
    Operator("aten.gt", monotone=(1, -1), text=">"),
    Operator("aten.ge", monotone=(1, -1), text=">="),
    Operator("aten.logical_and", monotone=(1, 1), text="torch.logical_and"),
    Operator("aten.logical_or", monotone=(1, 1), text="torch.logical_or"),
    Operator("aten.logical_not", monotone=(-1,), text="torch.logical_not"),
    Operator("aten.bitwise_and", monotone=(1, 1), text="&"),
    Operator("aten.bitwise_or", monotone=(1, 1), text="|"),
    Operator("aten.bitwise_not", monotone=(-1,)),
    Operator("aten.__and__", links=pointwise_links, monotone=(1, 1), text="&", variable="mask"),
    Operator("aten.__or__", links=pointwise_links, monotone=(1, 1), text="|", variable="mask"),
    Operator("aten.__xor__", links=pointwise_links, text="^"),
    *(Operator(f"aten.{name}", links=pointwise_links) for name in ("isfinite", "isnan", "isinf")),
    # Complex numbers.
    *(Operator(f"aten.{name}", links=pointwise_links) for name in "real imag complex polar _conj".split()),
    Operator("aten.resolve_conj", links=pointwise_links, is_view=False),
    # Made of literals.
    *(
        Operator(
            f"aten.{name}", links=free_links, sizes=("size",), fills=True, creates=True, text=f"torch.{name}"
        )
        for name in ("full", "zeros", "ones")
    ),
    *(
        Operator(f"aten.{name}", links=no_links, creates=True, text=f"torch.{name}")
        for name in ("arange", "eye", "scalar_tensor")
    ),
    # These take only the shape, or the dtype, of another tensor.
    *(replace(FILLED, name=f"aten.{name}_like", links=pointwise_links) for name in ("full", "zeros", "ones")),
    *(replace(FILLED, name=f"aten.new_{name}", cuts_gradient=False) for name in ("full", "zeros", "ones")),
    *(Operator(f"aten.{name}_like", cuts_gradient=True) for name in ("empty", "rand", "randn", "randint")),
    # ---- Operators that need all entries of some dim at once: sums, norms, softmax, sorting, transforms.
    Operator("aten.sum", links=reduction(""), linear=FIRST, keeps="nothing", text=".sum"),
    Operator("aten.mean", links=reduction("", form="mean"), linear=FIRST, keeps="nothing", text=".mean"),
    Operator("aten.cumsum", links=along("dim"), linear=FIRST, text="torch.cumsum"),
    Operator("aten.amax", links=reduction(NORMAL), text=".amax"),
    Operator("aten.amin", links=reduction(NORMAL), text=".amin"),
    Operator("aten.argmax", links=over_classes(reduction(NORMAL), "classes_argmax"), text="torch.argmax"),
    Operator("aten.argmin", links=reduction(NORMAL), text="torch.argmin"),
    *(Operator(f"aten.{name}", links=reduction(NORMAL)) for name in "any all var std prod".split()),
    Operator("aten.logsumexp", links=over_classes(reduction(NORMAL), "classes_logsumexp")),
    Operator("aten.linalg_vector_norm", links=reduction(NORMAL)),
    Operator("aten.max", links=extreme_links),
    Operator("aten.min", links=extreme_links),
    # Norms.
    Operator("aten.layer_norm", links=last_dims_whole, keeps="operands", text="F.layer_norm"),
    Operator("aten.rms_norm", links=last_dims_whole, keeps="operands", text="F.rms_norm"),
    Operator("aten._weight_norm", links=weight_norm_links),
    Operator("aten.batch_norm", links=batch_norm_links),
    Operator("aten.group_norm", links=sample_links),
    Operator(
        "aten.softmax", links=over_classes(along("dim"), "classes_softmax"), keeps="operands", text=".softmax"
    ),
    Operator(
        "aten.log_softmax", links=over_classes(along("dim"), "classes_log_softmax"), text=".log_softmax"
    ),
    Operator("aten._softmax", links=along("dim")),
    Operator("aten._safe_softmax", links=along("dim")),
    # Operators that depend on positions along a dim.
    Operator("aten.flip", links=along("dims"), linear=FIRST, text="torch.flip"),
    Operator("aten.roll", links=roll_links, linear=FIRST, text="torch.roll"),
    Operator("aten.diff", links=diff_links, linear=EVERY, text="torch.diff"),
    Operator("aten.triu", links=last_two_whole, linear=FIRST, text="torch.triu"),
    Operator("aten.tril", links=last_two_whole, linear=FIRST, text="torch.tril"),
    Operator("aten.topk", links=along("dim"), sorts=True),
    Operator("aten.sort", links=along("dim"), sorts=True),
    *(Operator(f"aten.{name}", sorts=True) for name in ("argsort", "msort", "searchsorted")),
    *(Operator(f"aten.fft_{name}", links=fourier_links) for name in FOURIER),
    # ---- Lookups by ids, and losses.
    Operator("aten.embedding", links=moves.embedding_links, linear=FIRST, is_lookup=True),
    Operator(
        "aten.gather",
        links=over_classes(moves.gather_links, "classes_gather"),
        linear=FIRST,
        text="torch.gather",
    ),
    *(
        Operator(f"aten.{name}", links=moves.scatter_links, text=f".{name}")
        for name in ("scatter", "scatter_add")
    ),
    Operator("aten.index", links=moves.index_links, linear=FIRST),
    Operator("aten.index_select", links=moves.index_links, linear=FIRST, text="torch.index_select"),
    Operator("aten.one_hot", links=moves.one_hot_links),
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
TABLE: dict[str, Operator] = {record.name: record for record in OPERATORS}


def operator_of(node: Node) -> Operator:
    """Return the record of a node's overload, else of its operator, else an empty one with the name."""
    is_overload = isinstance(node.target, torch._ops.OpOverload)
    overload, name = _names(node.target) if is_overload else ("", op_name(node))
    return TABLE.get(overload) or TABLE.get(name) or _unknown(name)


@cache
def _names(overload: Any) -> tuple[str, str]:
    """Return ("aten.view.dtype", "aten.view") for that overload."""
    return str(overload), overload._schema.name.replace("::", ".")


@cache
def _unknown(name: str) -> Operator:
    return Operator(name)


def is_listed(overload: Any) -> bool:
    """Tell whether AutoPTD knows how to split an operator of torch's registry."""
    record = next((TABLE[name] for name in _names(overload) if name in TABLE), None)
    return (record is not None and record.is_split) or torch.Tag.pointwise in overload.tags


def links(node: Node) -> list[Link] | None:
    """Return the links of `node`, or None if it is unknown how to split it."""
    record = operator_of(node)
    if record.links:
        return record.links(node)
    if record.letters:
        return letter_links(node, record.letters)
    return pointwise_links(node) if is_pointwise(node) else None


def is_pointwise(node: Node) -> bool:
    """Tell whether each entry of the result depends only on the operands' entries at the same position."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or operator_of(node).links is pointwise_links


def is_view(node: Node) -> bool:
    """Tell whether the result shares the memory of an operand, by the record or by the schema."""
    known = operator_of(node).is_view
    if known is not None or not isinstance(node.target, torch._ops.OpOverload):
        return bool(known)
    return _shares_memory(node.target)


@cache
def _shares_memory(overload: Any) -> bool:
    """Tell whether the schema has a result that aliases an operand and is not written to."""
    aliases = [result.alias_info for result in overload._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def linear_groups(node: Node) -> list[tuple[Node, ...]]:
    """Return the groups of operands in which `node` is jointly linear, so that partial sums stay partial."""
    record, read = operator_of(node), operands(node)
    # A rounded quotient is not linear; a literal that is added would be added once per rank.
    if node.kwargs.get("rounding_mode") is not None or (record.is_sum and len(read) < 2):
        return []
    numbers = [tuple(range(len(read)))] if record.linear == EVERY else record.linear
    groups = []
    for group in numbers:
        if group[0] >= len(read):
            continue
        # An absent operand, such as a bias, takes no place.
        present = [i for i in group if i < len(read)]
        members = list(dict.fromkeys(read[i] for i in present))
        # x * x is linear in each factor but not in x: a tensor that is read outside of the group too does
        # not count.
        if sum(map(read.count, members)) == len(present):
            groups.append(tuple(members))
    return groups


def addends(node: Node, split: set[Node]) -> set[Node]:
    """Return the operands that are added to a contraction over the `split` ones (a bias): they must be
    partial sums like it.
    """
    joint: set[Node] = set()
    for group in linear_groups(node):
        if split & set(group):
            joint |= set(group)
    return joint - split


def says_shape(node: Node) -> bool:
    """Tell whether an operator that moves entries is given the shape of its result."""
    record = operator_of(node)
    return bool(record.moves and record.sizes and not record.local_sizes)


def is_over_classes(node: Node) -> bool:
    """Tell whether ranks compute an operator together, each with its classes (`CLASSES`)."""
    return any(form.startswith(CLASSES) for form in note(node).forms.values())


# A dim that is all of a tensor's dim 0.
ROWS = Member((0,))
# Fused operators whose rows depend only on the same row of the operands.
BY_ROW = ("swiglu", "geglu", "gelu", "silu", "bias_gelu", "rms_norm", "layer_norm")


def rows_read(node: Node, rows: Collection[Node]) -> list[Node] | None:
    """Return the operands that share the rows of the result, those in `rows` included; None if rows mix."""
    read = operands(node)
    if operator_of(node).is_random or set(rows).isdisjoint(read):
        return None
    if op_name(node) == "getitem":
        return read
    if node.target in markers.FUSED.values():
        return _fused_rows(node, rows)
    for link in links(node) or ():
        has_rows = link.out == ROWS and not (link.whole or link.mixes or link.segment or link.form)
        if has_rows and all(
            link.operands.get(number) in ((ROWS,) if operand in rows else (ROWS, None))
            for number, operand in enumerate(read)
        ):
            return [operand for number, operand in enumerate(read) if number in link.operands]
    return None


def _fused_rows(node: Node, rows: Collection[Node]) -> list[Node] | None:
    """Return the operands of a fused operator that compute entry by entry, or along the last dim."""
    if not isinstance(node.meta["val"], type(operands(node)[0].meta["val"])) or len(shape(node)) < 2:
        return None
    found = [operand for operand in operands(node) if len(shape(operand)) == len(shape(node))]
    is_by_row = op_name(node) in BY_ROW and all(shape(operand)[0] == shape(node)[0] for operand in found)
    return found if is_by_row and set(rows).intersection(operands(node)) <= set(found) else None


def experts_of(ids: Any) -> Any:
    """Return the values of ids, ignoring reshapes and type over an axis: a model may flatten twice."""
    while isinstance(ids, Node) and (ids.target is markers.convert or operator_of(ids).moves == "fold"):
        ids = ids.args[0]
    return ids


def looked_up(node: Node) -> Any:
    """Return the ids of a lookup `table[ids]` in a table made of parameters, else None."""
    if op_name(node) == "aten.index_select":
        table, dim, ids = node.args[:3]
        is_first = dim == 0
    elif op_name(node) == "aten.index":
        table, indices = node.args[:2]
        is_first = isinstance(indices, (list, tuple)) and len(indices) == 1
        ids = indices[0] if is_first else None  # type: ignore[index]
    else:
        return None
    has_rows = is_first and isinstance(ids, Node) and len(shape(ids)) == 1
    return ids if has_rows and note(table).of_params else None  # type: ignore[arg-type]
