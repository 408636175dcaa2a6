"""Find out by trying which dims of an operator without a row may be split.

In: a node. Out: which dims run together (`Claim`s), or why the operator must stay whole. Every claim that the shapes allow
is tried (`trials.py`), on small sizes that are all different and on those of the trace; what cannot be tried is refused.
Random operators and those that write into their operands are not tried at all.

    probe(node).claims      # (Claim(places=(0, None), out=0),): dim 0 of the first operand is dim 0 of the result
    probe(node).refused     # "it draws random numbers"
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import torch
from torch.fx import Node

from autoptd.compat import OpOverload
from autoptd.ir.notes import note, tensor
from autoptd.ir.operators.record import operands
from autoptd.passes.ops.trials import Call, CannotTry, Claim, Slot, Trial, Unfit, make_trial

# One for each size of the trace: no two dims of other sizes can be confused.
SMALL_SIZES = (5, 7, 11, 13, 17, 19, 23, 29)
MOST_ELEMENTS = 1 << 16  # of an operand, where the operator is tried on the sizes of the trace
MOST_CLAIMS = 256
NOT_LINEAR = "its backward is not linear in the gradient that it is given"
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Probed:
    """What was found: true claims, or why there are none; `is_linear` of its backward in the gradient it is given."""

    claims: tuple[Claim, ...]
    refused: str = ""
    is_linear: bool = True


def probe(node: Node) -> Probed:
    """Try all claims that the shapes of `node` allow."""
    try:
        with torch.random.fork_rng(devices=[]):  # the operator's own random numbers are no one else's
            return _probe(call_of(node))
    except CannotTry as error:
        return Probed((), str(error))


@cache  # a pure function of the signature: equal layers are tried once
def _probe(call: Call) -> Probed:
    trials = trials_of(call, small_shapes(call.shapes))
    if not all(trial.is_linear() for trial in trials):
        return Probed((), NOT_LINEAR, is_linear=False)
    found = tuple(claim for claim in _candidates(trials[0]) if not contradiction(trials, claim))
    return Probed(found, "" if found else "pieces of every dim give other values or gradients")


def contradiction(trials: Sequence[Trial], claim: Claim) -> str:
    """What differs where `claim` is false, "" where it is true."""
    return next((text for trial in trials if (text := trial.differs(claim))), "")


def call_of(node: Node) -> Call:
    """The signature of a node's call; CannotTry where it must not be tried."""
    target, read = node.target, operands(node)
    if not isinstance(target, OpOverload):
        raise CannotTry("it is not in torch's registry of operators")
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise Unfit("it draws random numbers")
    if target._schema.is_mutable:
        raise Unfit("it writes into its operands")
    if not read or any(tensor(one).is_complex() for one in read):
        raise CannotTry("its operands are complex" if read else "it reads no tensors")
    numbers = iter(range(len(read)))

    def freeze(arg: Any) -> Any:
        if isinstance(arg, Node):
            return Slot(next(numbers))
        if isinstance(arg, (list, tuple)):
            return tuple(map(freeze, arg))
        if not isinstance(arg, PLAIN):
            raise CannotTry(f"its argument {arg} is no plain value")
        return arg

    args = freeze(node.args)
    kwargs = tuple((key, freeze(arg)) for key, arg in node.kwargs.items())
    shapes, dtypes = tuple(tuple(tensor(one).shape) for one in read), tuple(tensor(one).dtype for one in read)
    return Call(target, args, kwargs, shapes, dtypes, note(node).needs_grad)


def small_shapes(shapes: Shapes) -> Shapes:
    """Other sizes, all different, for the sizes of the trace; what is 1 is broadcast and stays 1."""
    seen = list(dict.fromkeys(size for one in shapes for size in one if size > 1))
    if len(seen) > len(SMALL_SIZES):
        return shapes
    new = dict(zip(seen, SMALL_SIZES, strict=False))
    return tuple(tuple(new.get(size, size) for size in one) for one in shapes)


def trials_of(call: Call, small: Shapes) -> list[Trial]:
    """The call on small sizes, where it takes them, and on those of the trace, where these are not too large."""
    made: list[Trial] = []
    reason = ""
    is_small = all(math.prod(size) <= MOST_ELEMENTS for size in call.shapes)
    for shapes in dict.fromkeys([small, *([call.shapes] if is_small else [])]):
        try:
            made.append(make_trial(replace(call, shapes=shapes)))
        except Unfit:
            raise
        except CannotTry as error:
            reason = str(error)
    if not made or (is_small and made[-1].call.shapes != call.shapes):
        raise CannotTry(reason)
    return made


def _candidates(trial: Trial) -> Iterator[Claim]:
    """All claims for dims of equal size: in each operand one or none, in the result one or none."""
    shapes = trial.call.shapes
    for size in dict.fromkeys(n for one in shapes for n in one if n > 1):
        places = [[*(d for d, n in enumerate(one) if n == size), None] for one in shapes]
        outs = [d for d in range(trial.rank) if all(one.shape[d] == size for one in trial.whole[0].values)]
        if math.prod(map(len, places)) * (len(outs) + 1) > MOST_CLAIMS:
            continue
        for chosen in product(*places):
            if any(place is not None for place in chosen):
                yield from (Claim(chosen, out) for out in (*outs, None))


__all__ = [
    "NOT_LINEAR",
    "CannotTry",
    "Claim",
    "Probed",
    "call_of",
    "contradiction",
    "probe",
    "small_shapes",
    "trials_of",
]
