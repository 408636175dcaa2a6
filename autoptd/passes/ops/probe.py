"""Find out by trying which dims of an operator without a row may be split.

In: a node. Out: which dims run together (`Claim`s), or why the operator must stay whole. Every claim that the shapes allow
is tried (`trials.py`), on small sizes that are all different and on those of the trace; what cannot be tried is refused.
Random operators and those that write into their operands are not tried at all.

    probe(node).claims      # (Claim(places=(0, None), out=0),): dim 0 of the first operand is dim 0 of the result
    probe(node).refused     # "it draws random numbers"
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from autoptd.compat import OpOverload
from autoptd.ir.notes import note, tensor
from autoptd.ir.operators.record import operands
from autoptd.passes.ops.trials import Call, CannotTry, Claim, Slot, Trial, Unfit, make_trial

# One for each size of the trace: no two dims of other sizes can be confused.
SMALL_SIZES = (5, 7, 11, 13, 17, 19, 23, 29)
# An operator with larger operands is not tried on the sizes of the trace.
MAX_ELEMENTS = 1 << 16
# Of a size that more combinations of dims have, none is tried.
MAX_CLAIMS = 256
NOT_LINEAR = "its backward is not linear in the gradient that it is given"
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Probed:
    """The true claims, or why there are none; `is_linear`: backward is linear in the gradient that it is given."""

    claims: tuple[Claim, ...]
    refused: str = ""
    is_linear: bool = True


def probe(node: Node) -> Probed:
    """Try all claims that the shapes of `node` allow."""
    try:
        # If the operator draws numbers nevertheless, the user's stream of them must not change.
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
    return Probed(true, "" if true else "pieces of every dim give other values or gradients")


def contradiction(trials: Sequence[Trial], claim: Claim) -> str:
    """Say what differs if `claim` is false; return "" if it is true."""
    for trial in trials:
        difference = trial.differs(claim)
        if difference:
            return difference
    return ""


def call_of(node: Node) -> Call:
    """Return the signature of a node's call; CannotTry where it must not be tried."""
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
    # A tensor that is read twice is two slots: the operator cannot know that they are the same.
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
    shapes = tuple(tuple(tensor(operand).shape) for operand in read)
    dtypes = tuple(tensor(operand).dtype for operand in read)
    return Call(target, args, kwargs, shapes, dtypes, note(node).needs_grad)


def _sizes(shapes: Shapes) -> list[int]:
    """Return the different sizes of dims, without 1, in the order in which they appear."""
    sizes = dict.fromkeys(itertools.chain.from_iterable(shapes))
    return [size for size in sizes if size > 1]


def small_shapes(shapes: Shapes) -> Shapes:
    """Replace the sizes of the trace by small ones, all different; a dim of size 1 is broadcast and stays so."""
    sizes = _sizes(shapes)
    # More different sizes than we have small ones: tried on those of the trace alone.
    if len(sizes) > len(SMALL_SIZES):
        return shapes
    new = dict(zip(sizes, SMALL_SIZES, strict=False))
    small = []
    for shape in shapes:
        small.append(tuple(new.get(size, size) for size in shape))
    return tuple(small)


def trials_of(call: Call, small: Shapes) -> list[Trial]:
    """Try the call on small sizes, if it takes them, and on those of the trace, unless they are too large.

    Raises CannotTry where neither works, or those of the trace should and do not.
    """
    trials: list[Trial] = []
    reason = ""
    # On sizes of the trace too, since an operator may depend on them (an FFT, a kernel of fixed width).
    is_small = all(math.prod(shape) <= MAX_ELEMENTS for shape in call.shapes)
    choices = [small, call.shapes] if is_small else [small]
    for shapes in dict.fromkeys(choices):
        try:
            trials.append(make_trial(replace(call, shapes=shapes)))
        # No rule holds on any sizes.
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
        for shape in trial.call.shapes:
            places.append([*(dim for dim, n in enumerate(shape) if n == size), None])
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
