"""The record of one operator, and how its arguments are read.

In: what is known of the operator. Out: what every stage of the compiler needs of it. All that a
well-behaved one must say is how its dims correspond; what else is left out is derived from torch's
schema, or costs speed or looks alone.

    Operator("mine.gate", "... d, ... d, d -> ... d")

    argument(node, "dim")       # of x.sum(-1): -1, wherever the overload has it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from torch.fx import Node

from autoptd.ir.notes import note
from autoptd.ir.sizes import Sizes

# Gives the shape of a node's value: that of one device, or a rank's.
Size = Callable[[Node], tuple[int, ...]]
# (batch, m, n, k), and the name of the kernel that computes it.
Product = tuple[tuple[int, ...], str]

# Values of `Operator.linear`: linear in the first operand; linear in all operands together.
FIRST = ((0,),)
EVERY = ((-1,),)

# How the entries of the result are those of the operand: in the same order, in other dims ("fold"); with
# dims in another order ("turn"); repeated without a copy ("spread"); in several pieces ("pieces"), or one
# of them ("part"); dim by dim the same ("same"), or in another dtype ("cast"). "" is what computes.
Moves = Literal["", "fold", "turn", "spread", "pieces", "part", "same", "cast"]

# What backward keeps: the operands, nothing at all, or, of a loss, something as large as its first
# operand; "" is not known.
Keeps = Literal["", "operands", "nothing", "probabilities"]


# How forms begin that ranks compute together, of operators over classes that are split over them: a log_softmax, or a gather
# of the chosen ones. Not over the batch: samples are not computed together.
CLASSES = "classes_"
# The form of attention whose queries are split over ranks that have other tokens: keys and values are whole. Where it is
# causal, a rank must know which places its queries have.
QUERIES = "queries"


@dataclass(frozen=True)
class Member:
    """The dims of one tensor that take part in a link, in order.

    `lead` and `tail` are factors of those dims that lie outside of the link (a piece of a split: lead =
    number of pieces).
    """

    dims: tuple[int, ...]
    lead: int = 1
    tail: int = 1


@dataclass(frozen=True)
class Link:
    """Dims that run together through one operator, as operand number -> Member and their place in the result.

    `out` is None when the operator contracts them. `whole` says why the operator cannot be split along
    them ("" if it can). `form` names how a contraction over a split dim is computed locally ("" : the
    same operator gives the partial sum), how ranks compute it together (`CLASSES`), or that a rank must know
    its place (`QUERIES`); for the last two `mixes` says why it keeps no samples apart. `segment` says that
    the result is (start, length) of the operand's dim: one of several pieces of unequal sizes.
    """

    name: str
    operands: dict[int, Member]
    out: Member | None
    whole: str = ""
    form: str = ""
    segment: tuple[int, int] | None = None
    mixes: str = ""


@dataclass(frozen=True)
class Operator:
    """Everything that AutoPTD knows of one operator.

    name: "aten.linear", or that of one overload ("aten.view.dtype") where it differs from the others.

    How it may be split:
    letters, links: its row of letters, or the function that computes its links from shapes. Without
        either it is known by torch's tag for pointwise operators, or it is unlisted: probed, and
        reported.
    linear: groups of operand numbers; the result is P when all operands of one group are P and the others
        whole.
    is_sum: adds its operands up, so that a literal among them would be added once per rank.
    is_finite: value and derivative are finite where operands are zero: the padding of a vocabulary may go
        through.
    reduces: its argument `reduction` means or sums the losses of samples; the trace splits that off.

    Its arguments:
    sizes: names of those that are sizes of the result, and follow the number of rows in a batch.
    local_sizes: what the arguments that depend on sizes are on one rank, by name; left out, each
        of `sizes` is the local shape of the result.

    What it costs:
    moves, is_view: how entries are moved (see `Moves`); whether that is free, by default as torch's
        schema says.
    fills, creates: gives one number everywhere; makes a tensor out of literals.
    factors: numbers of the operands that it multiplies, "m k" first: a GEMM.
    flops, backward_flops, product: forward and backward floating-point operations, and sizes, of what is
        no plain GEMM.
    is_lookup: reads as much of its table as it gives.
    sorts: takes n log n.
    keeps: what backward needs (see `Keeps`).
    cuts_gradient: no gradient goes through it.
    is_fresh: its result is new memory that its backward does not need, and may be overwritten.
    is_random, counts_labels: draws numbers; divides by the number of its labels: never computed on more
        than one stage.
    monotone: whether the result grows (1) or falls (-1) with each operand.

    How it is written:
    text: "F.gelu", "torch.cat", ".transpose" of the first operand, or "+" between two; left out, torch's
        overload is called.
    needs_contiguous: it refuses operands whose entries do not lie one behind the other, as a rank's may not
        where those of the whole do.
    variable: what its result is called, by default like the operator.
    keeps_name: its result is called like its first operand.
    """

    name: str
    letters: str = ""
    links: Callable[[Node], list[Link]] | None = None
    linear: tuple[tuple[int, ...], ...] = ()
    is_sum: bool = False
    is_finite: bool = False
    reduces: bool = False
    sizes: tuple[str, ...] = ()
    local_sizes: Callable[[Node, Sizes], Mapping[str, Any]] | None = None
    moves: Moves = ""
    is_view: bool | None = None
    fills: bool = False
    creates: bool = False
    factors: tuple[int, ...] = ()
    flops: Callable[[Node, Size], int] | None = None
    backward_flops: Callable[[Node, Size], int] | None = None
    product: Callable[[Node, Size], Product] | None = None
    is_lookup: bool = False
    sorts: bool = False
    keeps: Keeps = ""
    cuts_gradient: bool = False
    is_fresh: bool = False
    is_random: bool = False
    counts_labels: bool = False
    monotone: tuple[int, ...] = ()
    text: str = ""
    needs_contiguous: bool = False
    variable: str = ""
    keeps_name: bool = False

    @property
    def is_split(self) -> bool:
        """Whether the record says how the operator may be split, and not only what it costs."""
        return bool(self.letters or self.links)


def operands(node: Node) -> list[Node]:
    """Return the tensor arguments of a node in schema order, lists flattened; an absent one takes no
    place.
    """
    found: list[Node] = []

    def visit(arg: Any) -> None:
        if isinstance(arg, Node):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            for item in arg:
                visit(item)

    for arg in (*node.args, *node.kwargs.values()):
        visit(arg)
    return found


def is_over_classes(node: Node) -> bool:
    """Tell whether ranks compute an operator together, each with its classes (`CLASSES`)."""
    return any(form.startswith(CLASSES) for form in note(node).forms.values())


def argument(node: Node, name: str, default: Any = None) -> Any:
    """Return the argument `name` of a node, or its default: `default` where the schema has none."""
    # Past the end of the positional ones, where the schema has no such argument.
    absent = (len(node.args), None)
    position, usual = _arguments(node.target).get(name, absent)
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default if usual is None else usual)


def set_arguments(node: Node, given: Mapping[str, Any]) -> None:
    """Set some arguments of a node, each by position or by name as before; a new one by position if it is
    the next.
    """
    args, kwargs = list(node.args), dict(node.kwargs)
    for name, new in given.items():
        position = _arguments(node.target)[name][0]
        if position < len(args):
            args[position] = new
        elif position == len(args) and name not in kwargs:
            args.append(new)
        else:
            kwargs[name] = new
    node.args, node.kwargs = tuple(args), kwargs


@cache
def _arguments(overload: Any) -> dict[str, tuple[int, Any]]:
    """Return position and default of every argument, by name."""
    listed = enumerate(overload._schema.arguments)
    return {declared.name: (i, declared.default_value) for i, declared in listed}


__all__ = [
    "CLASSES",
    "EVERY",
    "FIRST",
    "QUERIES",
    "Keeps",
    "Link",
    "Member",
    "Moves",
    "Operator",
    "Product",
    "Size",
    "argument",
    "is_over_classes",
    "operands",
    "set_arguments",
]
