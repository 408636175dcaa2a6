"""Operators of which no record says how they may be split: the user's own rules, and what probing finds.

`register_rule` takes a row of letters for an operator of torch's registry. When the operator is met, every letter is tried on
random numbers (`probe.py`), and a row that is wrong is a PlanError. What nobody registered is probed for all of its dims.

In: a node. Out: its links, with where they come from.

    register_rule("mine::scale", "... d, d -> ... d")
    unlisted_links(node).origin     # "registered and probed"
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch.fx import Node

from autoptd.compat import OpOverloadPacket
from autoptd.errors import PlanError
from autoptd.ir.notes import op_name, shape, site
from autoptd.ir.operators.links import letter_links
from autoptd.ir.operators.record import Link, Member, Operator, operands
from autoptd.ir.operators.table import is_listed
from autoptd.passes.ops.probe import (
    NOT_LINEAR,
    CannotTry,
    Claim,
    Shapes,
    Unfit,
    call_of,
    contradiction,
    probe,
    small_shapes,
    trials_of,
)
from autoptd.passes.ops.trials import Call, Trial

SITE = "register_rule"
EXAMPLE = 'register_rule("ns::op", "b s d, d -> b s d"), "..." for any leading dims, d* for a dim that must stay whole'
TERM = re.compile(r"(\.\.\.\s+|\.\.\.$)?([a-z]\w*\*?(\s+|$))*", re.IGNORECASE)
# The users' rules: filled by register_rule alone, before anything is compiled.
REGISTERED: dict[str, Operator] = {}


@dataclass(frozen=True)
class Unlisted:
    """The links of an operator without a row, and their origin; `refused` says why there are none to split it by."""

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

    `op` is an operator of torch's registry, such as `torch.library.custom_op` makes. `letters` names the dims of its tensor
    arguments, in order, and of its result (of each, where it gives several alike). The operator may be split along every
    letter: where the result has it, its pieces are the pieces of the result; where it has not, they add up to the result.
    `...` stands for any leading dims; a starred letter (`d*`) must stay whole. When a model with the operator is compiled, each
    letter is tried on random numbers, values and gradients: PlanError if the rule does not hold.
    """
    namespace, _, name = op.replace("::", ".", 1).partition(".")
    known = getattr(getattr(torch.ops, namespace), name, None) if name.isidentifier() else None
    if not isinstance(known, OpOverloadPacket):
        raise PlanError(SITE, f"torch knows no operator {op}", "import the module that defines it first")
    # Of one operator all overloads are taken to be alike; custom_op makes one.
    overload = getattr(known, known.overloads()[0])
    if is_listed(overload):
        raise PlanError(SITE, f"{op} has a row of AutoPTD's own, which is proven", "leave it out")
    left, arrow, right = letters.partition("->")
    # "b s d, d -> b s d" -> ["b s d", "d", "b s d"]
    terms = [*left.split(","), right]
    if not arrow or not all(TERM.fullmatch(term.strip()) for term in terms):
        raise PlanError(SITE, f"{letters!r} is no rule", EXAMPLE)
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
    # A dim of the result that no operand has cannot be cut: no slice of an operand says how long it is.
    starred |= {word for word in right if word.rstrip("*") not in read}
    marked = []
    for words in (*left, right):
        letters = [word.rstrip("*") for word in words]
        marked.append(" ".join(f"{letter}*" if letter in starred else letter for letter in letters))
    return f"{', '.join(marked[:-1])} -> {marked[-1]}"


def unlisted_links(node: Node) -> Unlisted:
    """Return the links of an operator without a row, proven by trying it where that is possible.

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
    # A contracted dim has no name in the result: it goes by its place in the first operand that has it.
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
    """Return small shapes for the operands with one size per letter, all of them different."""
    sizes = [list(shape) for shape in call.shapes]
    # One made-up size for each letter, to be replaced by small ones that all differ.
    different = small_shapes(tuple((k,) for k in range(2, 2 + len(node_links))))
    for link, (size,) in zip(node_links, different, strict=True):
        for i, member in link.operands.items():
            sizes[i][member.dims[0]] = size
    return tuple(map(tuple, sizes))


def _no_rule(node: Node, reason: str) -> PlanError:
    return PlanError(site(node), f"no rule can hold for {op_name(node)}: {reason}", "leave register_rule out")


def _check_link(node: Node, letters: str, link: Link, operand_count: int, trials: list[Trial]) -> None:
    """Raise PlanError if the trials contradict one letter of a rule."""
    places = [link.operands[i].dims[0] if i in link.operands else None for i in range(operand_count)]
    out = link.out.dims[0] if link.out is not None else None
    difference = contradiction(trials, Claim(tuple(places), out))
    if difference:
        i, member = next(iter(link.operands.items()))
        fact = f"{op_name(node)} does not follow its rule {letters!r}: "
        fact += f"cut along {link.name} (dim {member.dims[0]} of operand {i}), {difference}"
        raise PlanError(site(node), fact, f"another rule, or {link.name}* if it must stay whole")


def _check_fits(node: Node, letters: str) -> None:
    """Raise PlanError unless the rule names every dim of every tensor, and equal letters are equally long."""
    left, right = letters.split(" -> ")
    terms = [*left.split(", "), right]
    shapes = [*map(shape, operands(node)), shape(node)]
    read = ", ".join(str(list(size)) for size in shapes[:-1])
    remedy = f"a rule for these shapes: {read} -> {list(shapes[-1])}"
    if len(terms) != len(shapes):
        fact = f"{op_name(node)} reads {len(shapes) - 1} tensors, its rule {letters!r} names {len(terms) - 1}"
        raise PlanError(site(node), fact, remedy)

    misfit = _misfit(terms, shapes)
    if misfit is not None:
        term, size = misfit
        fact = f"{op_name(node)} has a tensor of {len(size)} dims where its rule {letters!r} says {term!r}"
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
            fact = f"{op_name(node)} has sizes {sorted(different)} where its rule {letters!r} says {word}"
            raise PlanError(site(node), fact, remedy)


def _misfit(terms: list[str], shapes: list[tuple[int, ...]]) -> tuple[str, tuple[int, ...]] | None:
    """Return the first term that does not name every dim of its tensor, with the tensor's shape."""
    # How many dims each `...` stands for: that of the result must be the longest of the operands'.
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


__all__ = ["Unlisted", "register_rule", "unlisted_links"]
