"""Operators without a record: how they may be split, according to the user's rules, or to probing.

In: a node. Out: its links, with their origin, or the reason why the operator must stay whole.

`register_rule` declares letters for an operator of torch's registry. When a model with the operator is compiled, every letter
is tried on random numbers (`trials.py`), and a wrong rule is a PlanError. An operator without a rule is probed: every claim
that its shapes allow (which dims run together) is tried, on small sizes that are all different and on those of the trace.
Operators that cannot be tried are refused, without a trial if they draw random numbers or write into their operands.

    register_rule("mine::scale", "... d, d -> ... d")
    unlisted_links(node).origin     # "registered and probed"
    probe(node).claims              # (Claim(places=(0, None), out=0),): dim 0 of the first operand is dim 0 of the result
    probe(node).refused             # "it draws random numbers"
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from autoptd.compat import OpOverload, OpOverloadPacket
from autoptd.errors import PlanError
from autoptd.ir.notes import note, op_name, shape, site, tensor
from autoptd.ir.operators.links import letter_links
from autoptd.ir.operators.record import Link, Member, Operator, operands
from autoptd.ir.operators.table import is_listed
from autoptd.passes.ops.trials import Call, CannotTry, Claim, Slot, Trial, Unfit, make_trial

SITE = "register_rule"
EXAMPLE = 'register_rule("ns::op", "b s d, d -> b s d"), "..." for any leading dims, d* for a dim that must stay whole'
TERM = re.compile(r"(\.\.\.\s+|\.\.\.$)?([a-z]\w*\*?(\s+|$))*", re.IGNORECASE)
# The users' rules, which only register_rule adds.
REGISTERED: dict[str, Operator] = {}
# One for each size of the trace: no two dims of different sizes can be confused.
SMALL_SIZES = (5, 7, 11, 13, 17, 19, 23, 29)
# An operator with larger operands is not tried on the sizes of the trace.
MAX_ELEMENTS = 1 << 16
# Dims of a size for which more combinations are possible are not tried.
MAX_CLAIMS = 256
NOT_LINEAR = "its backward is not linear in its output gradient"
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Unlisted:
    """The links of an operator without a record, and their origin, or the reason why it is `refused`."""

    links: list[Link]
    origin: str = ""
    refused: str = ""
    is_linear: bool = True

    def __str__(self) -> str:
        names = ", ".join(link.name for link in self.links if not link.whole)
        if names:
            return f"{self.origin}: may be split by {names}"
        return self.origin or f"probed: {self.refused}"


def register_rule(op: str, letters: str) -> None:
    """Declare how the dims of an operator correspond: `register_rule("ns::op", "b s d, d -> b s d")`.

    `op` is an operator in torch's registry, for example one that `torch.library.custom_op` created. `letters` names the dims of
    its tensor arguments, in order, and of its result (of each result, if it has several alike). The operator may be split along
    every letter: the results on pieces are pieces of the result if that has the letter, and else add up to the result. `...`
    stands for any leading dims; a starred letter (`d*`) must stay whole. When a model with the operator is compiled, each
    letter is tried on random numbers, for values and gradients. Compiling raises PlanError if the rule does not hold.
    """
    namespace, _, name = op.replace("::", ".", 1).partition(".")
    known = getattr(getattr(torch.ops, namespace), name, None) if name.isidentifier() else None
    if not isinstance(known, OpOverloadPacket):
        raise PlanError(SITE, f"torch has no operator {op}", "import the module that defines it first")
    # All overloads of an operator are assumed to be alike; custom_op creates one.
    overload = getattr(known, known.overloads()[0])
    if is_listed(overload):
        raise PlanError(SITE, f"AutoPTD already has a tested rule for {op}", "remove the call")
    left, arrow, right = letters.partition("->")
    # "b s d, d -> b s d" -> ["b s d", "d", "b s d"]
    terms = [*left.split(","), right]
    if not arrow or not all(TERM.fullmatch(term.strip()) for term in terms):
        raise PlanError(SITE, f"invalid rule {letters!r}", EXAMPLE)
    for term in terms:
        words = [word.rstrip("*") for word in term.split()]
        if len(set(words)) < len(words):
            raise PlanError(
                SITE, f"{letters!r} has a letter twice in {term.strip()!r}", "one letter for each dim"
            )
    record = Operator(f"{namespace}.{name}", _with_stars(terms))
    REGISTERED[record.name] = record


def _with_stars(terms: list[str]) -> str:
    """Write a rule (its last term is the result) with a star at every place of a letter that must stay whole."""
    *left, right = [term.split() for term in terms]
    read: set[str] = set()
    starred: set[str] = set()
    for words in (*left, right):
        for word in words:
            letter = word.rstrip("*")
            if words is not right:
                read.add(letter)
            if word.endswith("*"):
                starred.add(letter)
    # A dim of the result that no operand has cannot be cut: no slice of an operand determines its length.
    starred |= {word for word in right if word.rstrip("*") not in read}
    marked = []
    for words in (*left, right):
        letters = [word.rstrip("*") for word in words]
        marked.append(" ".join(f"{letter}*" if letter in starred else letter for letter in letters))
    return f"{', '.join(marked[:-1])} -> {marked[-1]}"


def unlisted_links(node: Node) -> Unlisted:
    """Return the links of an operator without a record, tried on random numbers if possible.

    Raises PlanError for a registered rule that does not hold.
    """
    record = REGISTERED.get(op_name(node))
    if record is not None:
        return _registered(node, record.letters)
    probed = probe(node)
    node_links = [_link(claim) for claim in probed.claims]
    return Unlisted(node_links, "probed" if node_links else "", probed.refused, probed.is_linear)


def _link(claim: Claim) -> Link:
    members = {i: Member((dim,)) for i, dim in enumerate(claim.places) if dim is not None}
    if claim.out is not None:
        return Link(f"d{claim.out}", members, Member((claim.out,)))
    # A contracted dim has no name in the result: it is named by its place in the first operand that has it.
    first, member = next(iter(members.items()))
    return Link(f"d{member.dims[0]} of operand {first}", members, None)


def _registered(node: Node, letters: str) -> Unlisted:
    _check_fits(node, letters)
    node_links = letter_links(node, letters)
    try:
        call = call_of(node)
        with torch.random.fork_rng(devices=[]):
            trials = trials_of(call, _small_shapes_of(call, node_links))
    except Unfit as error:
        raise _no_rule(node, str(error)) from None
    except CannotTry as error:
        return Unlisted(node_links, f"registered, not probed ({error})")
    if not all(trial.is_linear() for trial in trials):
        raise _no_rule(node, NOT_LINEAR)
    for link in node_links:
        if not link.whole:
            _check_link(node, letters, link, len(call.shapes), trials)
    return Unlisted(node_links, "registered and probed")


def _small_shapes_of(call: Call, node_links: list[Link]) -> Shapes:
    """Return small shapes for the operands, with a different size for each letter."""
    sizes = [list(shape) for shape in call.shapes]
    # A placeholder size for each letter, which `small_shapes` replaces.
    different = small_shapes(tuple((k,) for k in range(2, 2 + len(node_links))))
    for link, (size,) in zip(node_links, different, strict=True):
        for i, member in link.operands.items():
            sizes[i][member.dims[0]] = size
    return tuple(map(tuple, sizes))


def _no_rule(node: Node, reason: str) -> PlanError:
    return PlanError(
        site(node), f"no rule can hold for {op_name(node)}: {reason}", "remove the register_rule"
    )


def _check_link(node: Node, letters: str, link: Link, operand_count: int, trials: list[Trial]) -> None:
    """Raise PlanError if the trials contradict one letter of a rule."""
    places = [link.operands[i].dims[0] if i in link.operands else None for i in range(operand_count)]
    out = link.out.dims[0] if link.out is not None else None
    difference = contradiction(trials, Claim(tuple(places), out))
    if difference:
        i, member = next(iter(link.operands.items()))
        fact = f"{op_name(node)} does not follow its rule {letters!r}: "
        fact += f"cut along {link.name} (dim {member.dims[0]} of operand {i}), {difference}"
        raise PlanError(site(node), fact, f"a correct rule, or {link.name}* if it must stay whole")


def _check_fits(node: Node, letters: str) -> None:
    """Raise PlanError unless the rule names every dim of every tensor, and equal letters have equal sizes."""
    left, right = letters.split(" -> ")
    terms = [*left.split(", "), right]
    shapes = [*map(shape, operands(node)), shape(node)]
    read = ", ".join(str(list(size)) for size in shapes[:-1])
    remedy = f"a rule for these shapes: {read} -> {list(shapes[-1])}"
    if len(terms) != len(shapes):
        fact = f"{op_name(node)} reads {len(shapes) - 1} tensors, and its rule {letters!r} names {len(terms) - 1}"
        raise PlanError(site(node), fact, remedy)

    misfit = _misfit(terms, shapes)
    if misfit is not None:
        term, size = misfit
        fact = (
            f"{op_name(node)} has a tensor of {len(size)} dims, for which its rule {letters!r} has {term!r}"
        )
        raise PlanError(site(node), fact, remedy)
    lengths: dict[str, set[int]] = {}
    for term, size in zip(terms, shapes, strict=True):
        named = [word for word in term.split() if word != "..."]
        # From the right: `...` stands for leading dims.
        for word, length in zip(reversed(named), reversed(size), strict=False):
            lengths.setdefault(word, set()).add(length)
    for word, different in lengths.items():
        # A dim of size 1 is broadcast.
        if len(different - {1}) > 1:
            fact = f"{op_name(node)} has the sizes {sorted(different)} for {word} of its rule {letters!r}"
            raise PlanError(site(node), fact, remedy)


def _misfit(terms: list[str], shapes: list[tuple[int, ...]]) -> tuple[str, tuple[int, ...]] | None:
    """Return the first term that does not name every dim of its tensor, with the tensor's shape."""
    # The number of dims that each `...` stands for: in the result, as many as in the longest operand.
    dots = []
    for term, size in zip(terms, shapes, strict=True):
        if "..." in term.split():
            dots.append(len(size) - len(term.split()) + 1)
    if "..." in terms[-1].split() and dots[-1] != max(dots[:-1], default=0):
        return terms[-1], shapes[-1]
    for term, size in zip(terms, shapes, strict=True):
        words = term.split()
        named = [word for word in words if word != "..."]
        if len(named) > len(size) or (len(named) < len(size) and "..." not in words):
            return term, size
    return None


@dataclass(frozen=True)
class Probed:
    """The claims that hold, or the reason why none does; `is_linear`: backward is linear in its output gradient."""

    claims: tuple[Claim, ...]
    refused: str = ""
    is_linear: bool = True


def probe(node: Node) -> Probed:
    """Try all claims that the shapes of `node` allow."""
    try:
        # Even if the operator draws random numbers, the state of the user's generator must not change.
        with torch.random.fork_rng(devices=[]):
            return _probe(call_of(node))
    except CannotTry as error:
        return Probed((), str(error))


# Cached by the signature: equal layers are tried once.
@cache
def _probe(call: Call) -> Probed:
    trials = trials_of(call, small_shapes(call.shapes))
    if not all(trial.is_linear() for trial in trials):
        return Probed((), NOT_LINEAR, is_linear=False)
    true = tuple(claim for claim in _candidates(trials[0]) if not contradiction(trials, claim))
    return Probed(true, "" if true else "values or gradients differ in pieces of every dim")


def contradiction(trials: Sequence[Trial], claim: Claim) -> str:
    """Return what differs if `claim` is false; "" if it is true."""
    for trial in trials:
        difference = trial.differs(claim)
        if difference:
            return difference
    return ""


def call_of(node: Node) -> Call:
    """Return the signature of a node's call; CannotTry if it must not be tried."""
    target, read = node.target, operands(node)
    if not isinstance(target, OpOverload):
        raise CannotTry("it is not in torch's registry of operators")
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise Unfit("it draws random numbers")
    if target._schema.is_mutable:
        raise Unfit("it writes into its operands")
    if not read:
        raise CannotTry("it reads no tensors")
    if any(tensor(operand).is_complex() for operand in read):
        raise CannotTry("its operands are complex")
    # A tensor that is read twice gets two slots: the operator cannot know that they are the same.
    numbers = iter(range(len(read)))

    def freeze(arg: Any) -> Any:
        if isinstance(arg, Node):
            return Slot(next(numbers))
        if isinstance(arg, (list, tuple)):
            return tuple(map(freeze, arg))
        if not isinstance(arg, PLAIN):
            raise CannotTry(f"its argument {arg} is not a plain value")
        return arg

    args = freeze(node.args)
    kwargs = tuple((key, freeze(arg)) for key, arg in node.kwargs.items())
    shapes = tuple(tuple(tensor(operand).shape) for operand in read)
    dtypes = tuple(tensor(operand).dtype for operand in read)
    return Call(target, args, kwargs, shapes, dtypes, note(node).needs_grad)


def _sizes(shapes: Shapes) -> list[int]:
    """Return the different sizes of dims except 1, in order of appearance."""
    sizes = dict.fromkeys(itertools.chain.from_iterable(shapes))
    return [size for size in sizes if size > 1]


def small_shapes(shapes: Shapes) -> Shapes:
    """Replace the sizes of the trace by small ones that all differ; a dim of size 1 is broadcast, and keeps its size."""
    sizes = _sizes(shapes)
    # With more different sizes than small ones, those of the trace stay.
    if len(sizes) > len(SMALL_SIZES):
        return shapes
    new = dict(zip(sizes, SMALL_SIZES, strict=False))
    small = []
    for dims in shapes:
        small.append(tuple(new.get(size, size) for size in dims))
    return tuple(small)


def trials_of(call: Call, small: Shapes) -> list[Trial]:
    """Try the call on small sizes, if it accepts them, and on those of the trace, unless they are too large.

    Raises CannotTry if neither works, or if those of the trace are small enough and fail.
    """
    trials: list[Trial] = []
    reason = ""
    # Also on sizes of the trace, since an operator may depend on them (an FFT, a kernel of fixed width).
    is_small = all(math.prod(shape) <= MAX_ELEMENTS for shape in call.shapes)
    choices = [small, call.shapes] if is_small else [small]
    for shapes in dict.fromkeys(choices):
        try:
            trials.append(make_trial(replace(call, shapes=shapes)))
        # No rule holds, whatever the sizes.
        except Unfit:
            raise
        except CannotTry as error:
            reason = str(error)
    if not trials or (is_small and trials[-1].call.shapes != call.shapes):
        raise CannotTry(reason)
    return trials


def _candidates(trial: Trial) -> Iterator[Claim]:
    """Yield all claims for dims of equal size: in each operand one or none, in the result one or none."""
    results = trial.whole[0].values
    for size in _sizes(trial.call.shapes):
        places: list[list[int | None]] = []
        for operand in trial.call.shapes:
            places.append([*(dim for dim, n in enumerate(operand) if n == size), None])
        outs: list[int | None] = []
        for dim in range(trial.rank):
            if all(result.shape[dim] == size for result in results):
                outs.append(dim)
        outs.append(None)
        if math.prod(map(len, places)) * len(outs) > MAX_CLAIMS:
            continue
        for chosen in itertools.product(*places):
            if any(place is not None for place in chosen):
                for out in outs:
                    yield Claim(chosen, out)
