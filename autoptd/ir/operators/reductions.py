"""Operators that need all entries of some dim at once: sums, norms, softmax, sorting, transforms."""

from __future__ import annotations

from torch.fx import Node

from autoptd.ir.notes import op_name, shape
from autoptd.ir.operators.links import NORMAL, along, pointwise_links, reduction, same_dim
from autoptd.ir.operators.record import EVERY, FIRST, Link, Member, Operator, argument, operands


def diff_links(node: Node) -> list[Link]:
    """diff(x, n, dim, prepend, append): neighbours along `dim` meet, all else runs together."""
    count, ndim = len(operands(node)), len(shape(node))
    at = argument(node, "dim") % ndim
    made = [
        Link(f"d{d}", {i: Member((d,)) for i in range(count)}, Member((d,))) for d in range(ndim) if d != at
    ]
    return [
        *made,
        *(Link(f"d{at}", {i: Member((at,))}, None, "neighbours meet along it") for i in range(count)),
    ]


def last_two_whole(node: Node) -> list[Link]:
    """triu and tril: which entries stay depends on the place in the last two dims."""
    ndim = len(shape(node))
    return [same_dim(d, f"{op_name(node)} needs it whole" if d >= ndim - 2 else "") for d in range(ndim)]


def roll_links(node: Node) -> list[Link]:
    """roll: the dims that are rolled stay whole; without dims the tensor is rolled as one vector."""
    return along("dims")(node) if argument(node, "dims") else []


def last_dims_whole(node: Node) -> list[Link]:
    """layer_norm and rms_norm: the normalised dims stay whole; weight and bias are those dims."""
    ndim, normalized = len(shape(node)), len(node.args[1])  # type: ignore[arg-type]
    made = [same_dim(d) for d in range(ndim - normalized)]
    for i in range(normalized):
        members = {0: Member((ndim - normalized + i,))}
        members |= {k: Member((i,)) for k in range(1, len(operands(node)))}
        made.append(Link(f"h{i}", members, Member((ndim - normalized + i,)), "the norm needs its whole dim"))
    return made


def weight_norm_links(node: Node) -> list[Link]:
    """_weight_norm(v, g, dim): the slices of v along dim have a norm each, and g scales them."""
    kept, size = argument(node, "dim"), shape(node)
    if kept == -1 or tuple(shape(operands(node)[1])) != tuple(
        n if d == kept else 1 for d, n in enumerate(size)
    ):
        return []
    made = [Link("o", {0: Member((kept,)), 1: Member((kept,))}, Member((kept,)))]
    others = [d for d in range(len(size)) if d != kept]
    return [*made, *(Link(f"d{d}", {0: Member((d,))}, Member((d,)), "a norm runs over it") for d in others)]


def sample_links(node: Node) -> list[Link]:
    """Group norm: samples are apart, all else is whole."""
    return [same_dim(0)] if len(shape(node)) > 1 else []


def batch_norm_links(node: Node) -> list[Link]:
    """batch_norm: its channels; with running statistics (eval mode) everything else, too."""
    ndim, vectors = len(shape(node)), range(1, len(operands(node)))
    made = [Link("c", {0: Member((1,)), **{k: Member((0,)) for k in vectors}}, Member((1,)))]
    whole = "its statistics run over it" if argument(node, "training") else ""
    return [*made, *(same_dim(d, whole) for d in range(ndim) if d != 1)]


def extreme_links(node: Node) -> list[Link]:
    """max and min: of two tensors, over all dims, or over one."""
    return pointwise_links(node) if len(operands(node)) > 1 else reduction(NORMAL)(node)


def fourier_links(node: Node) -> list[Link]:
    """torch.fft: the dims beside those that are transformed."""
    before, after = shape(operands(node)[0]), shape(node)
    dims = argument(node, "dim")
    if dims is None:
        sizes = argument(node, "s")
        dims = list(range(-len(sizes), 0) if sizes else range(len(before)))
    taken = [dim % len(before) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]
    return [same_dim(d, "the transform needs it whole" if d in taken else "") for d in range(len(after))]


FOURIER = [f"{kind}{dims}" for kind in "fft ifft rfft irfft hfft ihfft".split() for dims in ("", "2", "n")]
FOURIER += ["fftshift", "ifftshift"]

OPERATORS = [
    Operator("aten.sum", links=reduction(""), linear=FIRST, keeps="nothing", text=".sum"),
    Operator("aten.mean", links=reduction("", form="mean"), linear=FIRST, keeps="nothing", text=".mean"),
    Operator("aten.cumsum", links=along("dim"), linear=FIRST, text="torch.cumsum"),
    Operator("aten.amax", links=reduction(NORMAL), text=".amax"),
    Operator("aten.amin", links=reduction(NORMAL), text=".amin"),
    Operator("aten.argmax", links=reduction(NORMAL), text="torch.argmax"),
    Operator("aten.argmin", links=reduction(NORMAL), text="torch.argmin"),
    *(Operator(f"aten.{name}", links=reduction(NORMAL)) for name in "logsumexp any all var std prod".split()),
    Operator("aten.linalg_vector_norm", links=reduction(NORMAL)),
    Operator("aten.max", links=extreme_links),
    Operator("aten.min", links=extreme_links),
    # Norms
    Operator("aten.layer_norm", links=last_dims_whole, keeps="operands", text="F.layer_norm"),
    Operator("aten.rms_norm", links=last_dims_whole, keeps="operands", text="F.rms_norm"),
    Operator("aten._weight_norm", links=weight_norm_links),
    Operator("aten.batch_norm", links=batch_norm_links),
    Operator("aten.group_norm", links=sample_links),
    Operator("aten.softmax", links=along("dim"), keeps="operands", text=".softmax"),
    Operator("aten.log_softmax", links=along("dim"), text=".log_softmax"),
    Operator("aten._softmax", links=along("dim")),
    Operator("aten._safe_softmax", links=along("dim")),
    # Places along a dim
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
