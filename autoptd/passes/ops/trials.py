"""Run an operator on random numbers, whole and in pieces, and compare values and gradients.

In: a `Call` (an operator, its arguments, the shapes of its tensors) and a `Claim` (dims that run together). Out: the
difference, if there is one. A claim holds if the values of the pieces are pieces of the value (or add up to it, if the result
has no such dim), and the gradients of the pieces are pieces of the gradient (or add up to it, for operands that lack the dim):
in float64, for all divisions in `divisions`, including single and scattered entries, and all kinds of numbers in `DRAWS`.

A call that fails cannot be tried (`CannotTry`). An operator that writes into its operands, returns different values when it is
called again, or whose result depends on strides is `Unfit` to be split at all.

    make_trial(call).differs(Claim(places=(0, None), out=0))     # "" if dim 0 of the first operand is dim 0 of the result
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autoptd.compat import OpOverload

# On at least this many of DRAWS, the values must be finite and not all equal.
MIN_DRAWS = 3
# The factor by which rounding errors of a backward with logarithms may be larger.
LINEARITY_TOLERANCE = 1000
Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]
DRAWS: tuple[Draw, ...] = (
    lambda size, seed: torch.randn(size, generator=seed, dtype=torch.float64),
    lambda size, seed: torch.rand(size, generator=seed, dtype=torch.float64) + 0.05,
    lambda size, seed: torch.randn(size, generator=seed, dtype=torch.float64) * 1e3,
    lambda size, seed: torch.randn(size, generator=seed, dtype=torch.float64) * 1e-3,
    lambda size, seed: torch.randn(size, generator=seed, dtype=torch.float64) * 3 + 2,
)


@dataclass(frozen=True)
class Slot:
    """The place of a tensor among the arguments of a call."""

    number: int


@dataclass(frozen=True)
class Call:
    """Everything that an answer depends on: the operator, its arguments (with slots for tensors), their shapes and dtypes."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    needs_grad: bool

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the results for these tensors; CannotTry if it fails, or does not return tensors of equal rank."""
        args, kwargs = _fill(self.args, tensors), _fill(self.kwargs, tensors)
        try:
            result = self.target(*args, **dict(kwargs))
        # An operator may fail in any way on unsupported sizes.
        except Exception as error:
            first_line = (str(error).splitlines() or [repr(error)])[0]
            raise CannotTry(f"it fails on random numbers: {first_line}") from error
        results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        are_tensors = bool(results) and all(isinstance(value, Tensor) for value in results)
        if not are_tensors or len({value.dim() for value in results}) > 1:
            raise CannotTry("it returns no tensor, or several with different numbers of dims")
        return results


@dataclass(frozen=True)
class Claim:
    """Dims that run together: one of each operand (None: not that operand), and of the result (None: contracted)."""

    places: tuple[int | None, ...]
    out: int | None


class CannotTry(Exception):
    """The reason why an operator cannot be tried."""


class Unfit(CannotTry):
    """The reason why no rule can hold for an operator."""


def divisions(size: int) -> list[list[Tensor]]:
    """Return ways to divide `size` entries: near both ends, in the middle, and scattered, like shards of an inner factor.

    The last two are the hardest.
    """
    order = torch.arange(size)
    cuts = sorted({1, size // 2, size - 1})
    ways = [[order[:cut], order[cut:]] for cut in cuts if 0 < cut < size]
    ways.append([order[::2], order[1::2]])
    if size > 3:
        mixed = torch.randperm(size, generator=torch.Generator().manual_seed(size))
        ways.append([mixed[:1], mixed[1:3], mixed[3:]])
    return ways


@dataclass(frozen=True)
class Answer:
    """The results of a run, and the gradients of its operands (None: no gradient reaches it, or it is not a float)."""

    values: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]

    def limits(self) -> tuple[float, float]:
        """Return the relative tolerance, and the magnitude below which a tensor is noise compared with the others."""
        return _tolerance(self.values), 1e-3 * max(map(_size_of, (*self.values, *self.gradients)))


@dataclass(frozen=True)
class Trial:
    """A call on one choice of sizes: its operands, cotangents and answers for every informative draw."""

    call: Call
    drawn: tuple[tuple[Tensor, ...], ...]
    cotangents: tuple[tuple[Tensor, ...], ...]
    whole: tuple[Answer, ...]

    @property
    def rank(self) -> int:
        return self.whole[0].values[0].dim()

    def differs(self, claim: Claim) -> str:
        """Return what contradicts `claim`; "" if nothing does."""
        sizes = {self.call.shapes[i][dim] for i, dim in enumerate(claim.places) if dim is not None}
        if claim.out is not None:
            sizes |= {value.shape[claim.out] for value in self.whole[0].values}
        if len(sizes) != 1:
            return f"the sizes {sorted(sizes)} differ"
        ways = divisions(sizes.pop())
        for drawn, cotangents, whole in zip(self.drawn, self.cotangents, self.whole, strict=True):
            for division in ways:
                try:
                    difference = self._differs(claim, division, drawn, cotangents, whole)
                except CannotTry as error:
                    difference = str(error)
                if difference:
                    return difference
            # All ways for the first numbers, for the others only the hardest.
            ways = ways[-2:]
        return ""

    def _differs(
        self,
        claim: Claim,
        division: list[Tensor],
        drawn: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        whole: Answer,
    ) -> str:
        pieces = []
        for ids in division:
            operands = [_take(x, place, ids) for x, place in zip(drawn, claim.places, strict=True)]
            given = [_take(cotangent, claim.out, ids) for cotangent in cotangents]
            pieces.append(answer(self.call, operands, given))
        if any(len(piece.values) != len(whole.values) for piece in pieces):
            return "the pieces have another number of results"
        limits = whole.limits()
        # Values are pieces of the result, or addends if the result lacks the dim; likewise gradients.
        for i, value in enumerate(whole.values):
            values = [piece.values[i] for piece in pieces]
            if claim.out is None and not value.is_floating_point():
                return "its result is not a sum over that dim"
            if not _matches(values, value, claim.out, division, limits):
                return (
                    "the results of the pieces" + ("" if claim.out is not None else ", added up,") + " differ"
                )
        for i, gradient in enumerate(whole.gradients):
            gradients = [piece.gradients[i] for piece in pieces]
            if gradient is None and any(other is not None for other in gradients):
                return f"operand {i} has a gradient in pieces, and none as a whole"
            if gradient is not None and not _matches(gradients, gradient, claim.places[i], division, limits):
                return f"the gradient of operand {i} differs"
        return ""

    def is_linear(self) -> bool:
        """Tell whether backward is linear in its output gradient, so that it may run on partial sums."""
        for drawn, cotangents, whole in zip(self.drawn, self.cotangents, self.whole, strict=True):
            if all(gradient is None for gradient in whole.gradients):
                continue
            tolerance, scale = whole.limits()
            limits = LINEARITY_TOLERANCE * tolerance, scale
            for gradients in list(self._linear_combinations(drawn, cotangents)):
                for parts, gradient in zip(zip(*gradients, strict=True), whole.gradients, strict=True):
                    if gradient is not None and not _matches(parts, gradient, None, [], limits):
                        return False
        return True

    def _linear_combinations(
        self, drawn: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> Iterator[list[tuple[Tensor | None, ...]]]:
        """Yield gradients that add up to those for `cotangents` if backward is linear."""
        # g = flipped g + the rest.
        flipped = [cotangent.flip(tuple(range(cotangent.dim()))) for cotangent in cotangents]
        rest = []
        for cotangent, other in zip(cotangents, flipped, strict=True):
            rest.append(cotangent - other if cotangent.is_floating_point() else cotangent)
        yield [answer(self.call, drawn, part).gradients for part in (flipped, rest)]
        # g = (g * factor) / factor.
        for factor in (1e-4, 1e4):
            scaled = answer(self.call, drawn, [cotangent * factor for cotangent in cotangents]).gradients
            yield [tuple(None if gradient is None else gradient / factor for gradient in scaled)]


@cache
def make_trial(call: Call) -> Trial:
    """Draw operands and run the call; CannotTry or Unfit if it is refused as a whole."""
    drawn, cotangents, whole = [], [], []
    # Small and large, positive and mixed: on one kind of numbers, an operator may be additive by chance.
    for seed, draw in enumerate(DRAWS):
        source = torch.Generator().manual_seed(1000 + seed)
        tensors = []
        for size, dtype in zip(call.shapes, call.dtypes, strict=True):
            tensors.append(_draw(size, dtype, call, draw, source))
        given = []
        for value in answer(call, tensors, None).values:
            given.append(torch.randn(value.shape, generator=source, dtype=torch.float64).to(value.dtype))
        first = answer(call, tensors, given)
        # Pieces of a stateful or nondeterministic operator cannot be compared with the whole.
        if not _equal(first, answer(call, tensors, given)):
            raise Unfit("it returns different values when it is called again")
        if _is_informative(first):
            # Only for an informative answer: NaN is not equal to itself.
            _check_layout(call, tensors, first)
            drawn.append(tuple(tensors))
            cotangents.append(tuple(given))
            whole.append(first)
    # The logarithm of negative numbers is NaN: such draws are skipped, and too few others would prove little.
    if len(whole) < MIN_DRAWS:
        raise CannotTry("its values or gradients on random numbers are all equal, zero, or not finite")
    for values in zip(*(first.values for first in whole), strict=False):
        if not _differ(values):
            raise CannotTry("its value is the same for all random numbers")
    return Trial(call, tuple(drawn), tuple(cotangents), tuple(whole))


def answer(call: Call, tensors: Sequence[Tensor], cotangents: Sequence[Tensor] | None) -> Answer:
    """Run a call, and its backward for these cotangents if it has gradients in the trace."""
    leaves = []
    for x in tensors:
        leaves.append(x.detach().clone().requires_grad_(x.is_floating_point() and call.needs_grad))
    with torch.enable_grad():
        # Not the leaves themselves: if the operator wrote into them, autograd would raise another error.
        read = [leaf.clone() if leaf.requires_grad else leaf for leaf in leaves]
        values = call.run(read)
        if any(not torch.equal(after, before) for after, before in zip(read, tensors, strict=True)):
            raise Unfit("it writes into its operands")
        gradients: list[Tensor | None] = [None] * len(leaves)
        pairs = zip(values, cotangents or (), strict=False)
        heads = [(value, cotangent) for value, cotangent in pairs if value.requires_grad]
        floats = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        if heads and floats:
            if any(value.shape != cotangent.shape for value, cotangent in heads):
                raise CannotTry("its result has another shape")
            ends, given = zip(*heads, strict=True)
            try:
                grads = torch.autograd.grad(ends, [leaves[i] for i in floats], given, allow_unused=True)
            # The backward is missing, or fails in an operator-specific way.
            except Exception as error:
                raise CannotTry(f"its backward fails: {str(error).splitlines()[0]}") from error
            for i, gradient in zip(floats, grads, strict=True):
                gradients[i] = gradient
    return Answer(tuple(value.detach() for value in values), tuple(gradients))


def _check_layout(call: Call, tensors: list[Tensor], first: Answer) -> None:
    """Raise Unfit if results differ for operands with other strides, which a rank may have."""
    try:
        strided = answer(call, [x.mT.contiguous().mT if x.dim() > 1 else x for x in tensors], None)
    except CannotTry:
        # It refuses such operands, so the fault would not be silent.
        return
    tolerance = _tolerance(first.values)
    for value, expected in zip(strided.values, first.values, strict=True):
        if value.shape != expected.shape or not _close(value, expected, tolerance, 0.0):
            raise Unfit("its result depends on the strides of its operands")


def _is_informative(found: Answer) -> bool:
    """Tell whether an answer can contradict a claim: finite, not one number everywhere, gradients not all zero.

    Zeros add up to zeros, however they are cut.
    """
    gradients = [gradient for gradient in found.gradients if gradient is not None]
    if not all(bool(x.isfinite().all()) for x in (*found.values, *gradients)):
        return False
    if gradients and not any(map(_size_of, gradients)):
        return False
    for value in found.values:
        # A single number must not be zero.
        trivial = 0 if value.numel() <= 1 else value.flatten()[0]
        if not bool((value != trivial).any()):
            return False
    return True


def _differ(values: Sequence[Tensor]) -> bool:
    """Tell whether at least one differs from the first."""
    first = values[0]
    return any(value.shape != first.shape or not torch.equal(value, first) for value in values[1:])


def _draw(
    size: tuple[int, ...], dtype: torch.dtype, call: Call, draw: Draw, source: torch.Generator
) -> Tensor:
    if dtype.is_floating_point:
        return draw(size, source)
    if dtype == torch.bool:
        return torch.rand(size, generator=source) > 0.5
    # An index of any dim of the floats.
    sizes: list[int] = []
    for shape, kind in zip(call.shapes, call.dtypes, strict=True):
        if kind.is_floating_point:
            sizes += [n for n in shape if n > 1]
    return torch.randint(min(sizes, default=5), size, generator=source, dtype=dtype)


def _take(x: Tensor, dim: int | None, ids: Tensor) -> Tensor:
    return x if dim is None else x.index_select(dim, ids)


def _matches(
    pieces: Sequence[Tensor | None],
    whole: Tensor,
    dim: int | None,
    division: list[Tensor],
    limits: tuple[float, float],
) -> bool:
    """Tell whether pieces are those of `whole` along `dim`, or add up to it if `dim` is None.

    A gradient that is None counts as zeros.
    """
    if dim is None:
        addends = [piece for piece in pieces if piece is not None]
        is_alike = all(addend.shape == whole.shape for addend in addends)
        return is_alike and _close(sum(addends, torch.zeros_like(whole)), whole, *limits)
    for piece, ids in zip(pieces, division, strict=True):
        expected = whole.index_select(dim, ids)
        given = torch.zeros_like(expected) if piece is None else piece
        if given.shape != expected.shape or not _close(given, expected, *limits):
            return False
    return True


def _close(value: Tensor, expected: Tensor, tolerance: float, scale: float) -> bool:
    if value.dtype != expected.dtype:
        return False
    if not value.is_floating_point():
        return torch.equal(value, expected)
    error = (value - expected).abs().max() if value.numel() else torch.zeros(())
    return bool(error <= tolerance * max(_size_of(expected), scale))


def _tolerance(values: Sequence[Tensor]) -> float:
    """Return the relative tolerance: 300 times the machine epsilon."""
    eps = [torch.finfo(value.dtype).eps for value in values if value.is_floating_point()]
    return 300 * max(eps, default=0.0)


def _size_of(x: Tensor | None) -> float:
    return float(x.abs().max()) if x is not None and x.is_floating_point() and x.numel() else 0.0


def _equal(first: Answer, second: Answer) -> bool:
    """Compare bit by bit; NaN equals NaN."""
    pairs = zip((*first.values, *first.gradients), (*second.values, *second.gradients), strict=True)
    for a, b in pairs:
        if a is None or b is None:
            if a is not b:
                return False
        elif a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num()):
            return False
    return True


def _fill(arg: Any, tensors: Sequence[Tensor]) -> Any:
    """Replace the slots of an argument by tensors."""
    if isinstance(arg, Slot):
        return tensors[arg.number]
    return [_fill(item, tensors) for item in arg] if isinstance(arg, tuple) else arg


__all__ = ["Call", "CannotTry", "Claim", "Slot", "Trial", "Unfit", "make_trial"]
