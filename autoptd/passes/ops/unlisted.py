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
    Unfit,
    call_of,
    contradiction,
    probe,
    small_shapes,
    trials_of,
)

SITE = "register_rule"
EXAMPLE = 'register_rule("ns::op", "b s d, d -> b s d"), "..." for any leading dims, d* for a dim that must stay whole'
TERM = re.compile(r"(\.\.\.\s+|\.\.\.$)?([a-z]\w*\*?(\s+|$))*", re.IGNORECASE)
REGISTERED: dict[
    str, Operator
] = {}  # the users' rules: filled by register_rule alone, before anything is compiled


@dataclass(frozen=True)
class Unlisted:
    """The links of an operator without a row, and their origin; `refused` says why there are none to split it by."""

    links: list[Link]
    origin: str = ""
    refused: str = ""
    is_linear: bool = True

    def __str__(self) -> str:
        names = ", ".join(link.name for link in self.links if not link.whole)
        return (
            f"{self.origin}: may be split by {names}" if names else self.origin or f"probed: {self.refused}"
        )


def register_rule(op: str, letters: str) -> None:
    """Say how the dims of an operator correspond: `register_rule("ns::op", "b s d, d -> b s d")`.

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
    overload = getattr(known, known.overloads()[0])
    if is_listed(overload):
        raise PlanError(SITE, f"{op} has a row of AutoPTD's own, which is proven", "leave it out")
    left, arrow, right = letters.partition("->")
    terms = [*left.split(","), right]
    if not arrow or not all(TERM.fullmatch(term.strip()) for term in terms):
        raise PlanError(SITE, f"{letters!r} is no rule", EXAMPLE)
    for term in terms:
        words = [word.rstrip("*") for word in term.split()]
        if len(set(words)) < len(words):
            raise PlanError(
                SITE, f"{letters!r} has a letter twice in {term.strip()!r}", "one letter for each dim"
            )
    read = {word.rstrip("*") for term in terms[:-1] for word in term.split()}
    starred = {word.rstrip("*") for term in terms for word in term.split() if word.endswith("*")}
    # A dim of the result that no operand has cannot be cut: how long it is, no slice could say.
    starred |= {word for word in right.split() if word.rstrip("*") not in read}
    marked = [
        " ".join(f"{w}*" if (w := word.rstrip("*")) in starred else w for word in term.split())
        for term in terms
    ]
    record = Operator(f"{namespace}.{name}", f"{', '.join(marked[:-1])} -> {marked[-1]}")
    REGISTERED[record.name] = record


def unlisted_links(node: Node) -> Unlisted:
    """The links of an operator without a row, proven by trying where it can be tried."""
    record = REGISTERED.get(op_name(node))
    if record is not None:
        return _registered(node, record.letters)
    found = probe(node)
    made = [_link(claim) for claim in found.claims]
    return Unlisted(made, "probed" if made else "", found.refused, found.is_linear)


def _link(claim: Claim) -> Link:
    members = {i: Member((dim,)) for i, dim in enumerate(claim.places) if dim is not None}
    first, member = next(iter(members.items()))
    name = f"d{claim.out}" if claim.out is not None else f"d{member.dims[0]} of operand {first}"
    return Link(name, members, Member((claim.out,)) if claim.out is not None else None)


def _registered(node: Node, letters: str) -> Unlisted:
    _check_fits(node, letters)
    made = letter_links(node, letters)
    try:
        call = call_of(node)
        sizes = [list(one) for one in call.shapes]
        each = dict(
            zip(
                (link.name for link in made),
                small_shapes(tuple((k,) for k in range(2, 2 + len(made)))),
                strict=True,
            )
        )
        for link in made:
            for i, member in link.operands.items():
                sizes[i][member.dims[0]] = each[link.name][0]
        with torch.random.fork_rng(devices=[]):
            trials = trials_of(call, tuple(map(tuple, sizes)))
    except Unfit as error:
        raise PlanError(
            site(node), f"no rule can hold for {op_name(node)}: {error}", "leave register_rule out"
        ) from None
    except CannotTry as error:
        return Unlisted(made, f"registered, not probed ({error})")
    if not all(trial.is_linear() for trial in trials):
        raise PlanError(
            site(node), f"no rule can hold for {op_name(node)}: {NOT_LINEAR}", "leave register_rule out"
        )
    for link in made:
        if not link.whole:
            places = tuple(
                link.operands[i].dims[0] if i in link.operands else None for i in range(len(call.shapes))
            )
            text = contradiction(trials, Claim(places, link.out.dims[0] if link.out is not None else None))
            if text:
                i, member = next(iter(link.operands.items()))
                fact = f"{op_name(node)} does not follow its rule {letters!r}: "
                fact += f"cut along {link.name} (dim {member.dims[0]} of operand {i}), {text}"
                raise PlanError(site(node), fact, f"another rule, or {link.name}* if it must stay whole")
    return Unlisted(made, "registered and probed")


def _check_fits(node: Node, letters: str) -> None:
    """The rule must name every dim of every tensor, and equal letters must be equally long."""
    left, right = letters.split(" -> ")
    terms, sizes = [*left.split(", "), right], [*(shape(one) for one in operands(node)), shape(node)]
    remedy = (
        f"a rule for these shapes: {', '.join(str(list(one)) for one in sizes[:-1])} -> {list(sizes[-1])}"
    )
    if len(terms) != len(sizes):
        fact = f"{op_name(node)} reads {len(sizes) - 1} tensors, its rule {letters!r} names {len(terms) - 1}"
        raise PlanError(site(node), fact, remedy)
    dots = [
        len(size) - len(term.split()) + 1
        for term, size in zip(terms, sizes, strict=True)
        if "..." in term.split()
    ]
    if "..." in terms[-1].split() and dots[-1] != max(dots[:-1], default=0):
        fact = f"{op_name(node)} has a tensor of {len(sizes[-1])} dims where its rule {letters!r} says {terms[-1]!r}"
        raise PlanError(site(node), fact, remedy)
    lengths: dict[str, set[int]] = {}
    for term, size in zip(terms, sizes, strict=True):
        words = term.split()
        named = [word for word in words if word != "..."]
        if len(named) > len(size) or (len(named) < len(size) and "..." not in words):
            fact = (
                f"{op_name(node)} has a tensor of {len(size)} dims where its rule {letters!r} says {term!r}"
            )
            raise PlanError(site(node), fact, remedy)
        for word, length in zip(reversed(named), reversed(size), strict=False):
            lengths.setdefault(word, set()).add(length)
    for word, found in lengths.items():
        if len(found - {1}) > 1:
            fact = f"{op_name(node)} has sizes {sorted(found)} where its rule {letters!r} says {word}"
            raise PlanError(site(node), fact, remedy)


__all__ = ["Unlisted", "register_rule", "unlisted_links"]
