"""The record of one operator, and the arguments of a node.

In: properties of an operator. Out: what every stage of the compiler asks about it. A well-behaved operator only
declares how its dims correspond; other omitted fields are derived from torch's schema, or affect only speed or the
look of emitted code.

    Operator("mine.gate", "... d, ... d, d -> ... d")

    argument(node, "dim")       # of x.sum(-1): -1, wherever the overload has it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from torch.fx import Node

from autoptd.ir.layout import Sizes

# Returns the shape of a node's value, global or local.
Size = Callable[[Node], tuple[int, ...]]
# (batch, m, n, k), and the name of the kernel that computes it.
Product = tuple[tuple[int, ...], str]
# Values of `Operator.linear`: linear in the first operand; linear in all operands together.
FIRST = ((0,),)
EVERY = ((-1,),)
# How an operator moves entries: same order, regrouped dims ("fold"); permuted dims ("turn"); expanded without
# a copy ("spread"); cut into pieces ("pieces"), or one of them ("part"); unchanged dims ("same"), or those in
# another dtype ("cast"). "" for operators that compute.
Moves = Literal["", "fold", "turn", "spread", "pieces", "part", "same", "cast"]
# Saved for backward: the operands, nothing, or, for a loss, something as large as its first operand; "" if
# unknown.
Keeps = Literal["", "operands", "nothing", "probabilities"]
# Prefix of the forms that ranks compute together because they split the classes: a log_softmax, or a gather
# of the chosen classes. Not for a split batch: samples are independent.
CLASSES = "classes_"
# The form of attention with queries split by tokens and whole keys and values. If it is causal, a rank must
# know the positions of its queries.
QUERIES = "queries"


@dataclass(frozen=True)
class Operator:
    """Record everything that AutoPTD knows about one operator.

    name: "aten.linear", or the name of an overload ("aten.view.dtype") that differs from the others.

    How it may be split:
    letters, links: its row of letters, or the function that computes its links from shapes. Without either,
        the operator has torch's pointwise tag, or is unlisted: then it is probed and reported.
    linear: groups of operand numbers; the result is P if all operands of one group are P and the others
        are whole.
    is_sum: it adds up its operands, so a literal among them would be added once per rank.
    is_finite: value and derivative are finite at zero, so padding of the vocabulary may pass through.
    reduces: its argument `reduction` averages or sums the losses of samples; the trace splits that off.

    Its arguments:
    sizes: names of the arguments that are sizes of the result, and vary with the number of rows in a batch.
    local_sizes: computes the local values of size-dependent arguments, by name; if omitted, each of `sizes`
        is the local shape of the result.

    What it costs:
    moves, is_view: how entries are moved (see `Moves`); whether that is free, by default according to torch's
        schema.
    fills, creates: fills a tensor with one number; makes a tensor out of literals.
    factors: numbers of the operands that a GEMM multiplies, "m k" first.
    flops, backward_flops, product: forward and backward FLOPs, and sizes, if it is not a plain GEMM.
    is_lookup: reads as much of its table as it returns.
    sorts: takes n log n.
    keeps: saved for backward (see `Keeps`).
    cuts_gradient: no gradient goes through it.
    is_fresh: its result is new memory that backward does not need and that may be overwritten.
    is_random, counts_labels: draws random numbers; divides by the number of its labels. Neither is computed
        on more than one stage.
    monotone: whether the result grows (1) or falls (-1) with each operand.

    How it is written:
    text: "F.gelu", "torch.cat", ".transpose" of the first operand, or "+" between two; if omitted, torch's
        overload is called.
    needs_contiguous: it rejects operands that are not contiguous, as a shard of a contiguous one may be.
    variable: the variable name of its result, by default the operator's name.
    keeps_name: its result is named after its first operand.
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
        """Whether the record defines how the operator may be split, and not only its cost."""
        return bool(self.letters or self.links)


@dataclass(frozen=True)
class Member:
    """Name the dims of one tensor that take part in a link, in order.

    `lead` and `tail` are factors of those dims that are outside the link (for a piece of a split, lead is the
    number of pieces).
    """

    dims: tuple[int, ...]
    lead: int = 1
    tail: int = 1


@dataclass(frozen=True)
class Link:
    """Tie dims of operands (operand number -> Member) to the dims of the result that they become.

    `out` is None if the operator contracts them. `whole` is the reason why the operator cannot be split along
    them ("" if it can). `form` names how a contraction over a split dim is computed locally ("": the same
    operator gives the partial sum), how ranks compute it together (`CLASSES`), or that a rank must know its
    position (`QUERIES`); for the last two, `mixes` is the reason why samples do not stay independent. With
    `segment`, the result is (start, length) of the operand's dim: one of several pieces of unequal sizes.
    """

    name: str
    operands: dict[int, Member]
    out: Member | None
    whole: str = ""
    form: str = ""
    segment: tuple[int, int] | None = None
    mixes: str = ""


def same_dim(dim: int, whole: str = "") -> Link:
    """Link one dim of the first operand to the same dim of the result."""
    return Link(f"d{dim}", {0: Member((dim,))}, Member((dim,)), whole)


def operands(node: Node) -> list[Node]:
    """Return the tensor arguments of a node in schema order, with lists flattened and absent ones omitted."""
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


def argument(node: Node, name: str, default: Any = None) -> Any:
    """Return the argument `name` of a node, or its default: `default` where the schema has none."""
    # If the schema has no such argument, use an index past the positional ones.
    absent = (len(node.args), None)
    position, usual = _arguments(node.target).get(name, absent)
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default if usual is None else usual)


def set_arguments(node: Node, given: Mapping[str, Any]) -> None:
    """Set some arguments of a node, each by position or name as before; a new one by position if possible."""
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


def dims_of(dims: Any, ndim: int) -> list[int]:
    """Return one or several dims as a list of non-negative indices; a 0-d tensor has none."""
    if not ndim:
        return []
    return [d % ndim for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
