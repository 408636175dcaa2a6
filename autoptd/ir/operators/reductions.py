"""Operators that need all entries of some dim at once: sums, norms, softmax, sorting, transforms."""

from __future__ import annotations

from torch.fx import Node

from autoptd.ir.notes import op_name, shape
from autoptd.ir.operators.links import (
    NORMAL,
    along,
    dims_of,
    over_classes,
    pointwise_links,
    reduction,
    same_dim,
)
from autoptd.ir.operators.record import EVERY, FIRST, Link, Member, Operator, argument, operands


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
    """Link batch_norm, entry by entry: in training `trace/batch_norms.py` has written it as means and products."""
    ndim, vectors = len(shape(node)), range(1, len(operands(node)))
    channels = {0: Member((1,)), **dict.fromkeys(vectors, Member((0,)))}
    return [Link("c", channels, Member((1,))), *(same_dim(d) for d in range(ndim) if d != 1)]


def extreme_links(node: Node) -> list[Link]:
    """Link max and min: of two tensors, over all dims, or over one."""
    return pointwise_links(node) if len(operands(node)) > 1 else reduction(NORMAL)(node)


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


FOURIER = [f"{kind}{dims}" for kind in "fft ifft rfft irfft hfft ihfft".split() for dims in ("", "2", "n")]
FOURIER += ["fftshift", "ifftshift"]

OPERATORS = [
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
        "aten.softmax",
        links=over_classes(along("dim"), "classes_softmax"),
        keeps="operands",
        text=".softmax",
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
]
