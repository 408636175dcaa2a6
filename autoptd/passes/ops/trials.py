"""Run an operator on random numbers, whole and in pieces, and compare values and gradients.

In: a `Call` (an operator, its arguments, the shapes of its tensors) and a `Claim` (dims said to run together). Out: what
differs. A claim is true where the pieces' values are the pieces of the value (or add up to it, where the result has no
such dim), and the pieces' gradients the pieces of the gradient (added up, for operands that lack the dim): in float64, for
every way of dividing in `divisions`, single and scattered entries among them, and every kind of random numbers in `DRAWS`.

A call that fails cannot be tried (`CannotTry`). One that writes into its operands, gives other values when it is called again,
or reads how its operands lie in memory is `Unfit` to be split in any way.

    make_trial(call).differs(Claim(places=(0, None), out=0))     # "" where dim 0 of the first operand is dim 0 of the result
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autoptd.compat import OpOverload

ENOUGH = 3  # draws, of those in DRAWS, on which the operator gives finite values that are not all equal
OF_LINEARITY = 1000  # roundings of a backward that takes logarithms, against those of one that does not
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
    """Where a tensor stands among the arguments of a call."""

    number: int


@dataclass(frozen=True)
class Call:
    """All that an answer depends on: the operator, its arguments (with slots for tensors), shapes and dtypes of the tensors."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    needs_grad: bool

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results on these tensors; CannotTry where it fails, or gives anything but tensors of one rank."""
        args, kwargs = (_fill(arg, tensors) for arg in (self.args, self.kwargs))
        try:
            made = self.target(*args, **dict(kwargs))
        except Exception as error:  # an operator may fail in any way on sizes it was not made for
            raise CannotTry(
                f"it fails on random numbers: {(str(error).splitlines() or [repr(error)])[0]}"
            ) from error
        pieces = tuple(made) if isinstance(made, (tuple, list)) else (made,)
        if (
            not pieces
            or any(not isinstance(one, Tensor) for one in pieces)
            or len({one.dim() for one in pieces}) > 1
        ):
            raise CannotTry("it gives no tensor, or several with unlike dims")
        return pieces


@dataclass(frozen=True)
class Claim:
    """Dims said to run together: one of each operand (None: not that operand), and of the result (None: summed over)."""

    places: tuple[int | None, ...]
    out: int | None


class CannotTry(Exception):
    """Why an operator cannot be tried."""


class Unfit(CannotTry):
    """Why no rule can hold for an operator."""


def divisions(size: int) -> list[list[Tensor]]:
    """Ways to divide `size` entries: near both ends, unequally, and scattered, as shards of an inner factor are."""
    order = torch.arange(size)
    cuts = sorted({1, size // 2, size - 1})
    made = [[order[:cut], order[cut:]] for cut in cuts if 0 < cut < size]
    made.append([order[::2], order[1::2]])
    if size > 3:
        mixed = torch.randperm(size, generator=torch.Generator().manual_seed(size))
        made.append([mixed[:1], mixed[1:3], mixed[3:]])
    return made


@dataclass(frozen=True)
class Answer:
    """The results of a run and the gradients of its operands (None: no gradient reaches it, or it is no float)."""

    values: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]

    def limits(self) -> tuple[float, float]:
        """Relative tolerance, and the size below which a tensor is noise beside the others."""
        return _tolerance(self.values), 1e-3 * max(map(_size_of, (*self.values, *self.gradients)))


@dataclass(frozen=True)
class Trial:
    """A call on one choice of sizes: its operands, cotangents and answers for every draw that says something."""

    call: Call
    drawn: tuple[tuple[Tensor, ...], ...]
    cotangents: tuple[tuple[Tensor, ...], ...]
    whole: tuple[Answer, ...]

    @property
    def rank(self) -> int:
        return self.whole[0].values[0].dim()

    def differs(self, claim: Claim) -> str:
        """What is not as `claim` says, "" where all is."""
        sizes = {self.call.shapes[i][d] for i, d in enumerate(claim.places) if d is not None}
        sizes |= {one.shape[claim.out] for one in self.whole[0].values} if claim.out is not None else set()
        if len(sizes) != 1:
            return f"the sizes {sorted(sizes)} differ"
        ways = divisions(sizes.pop())
        for i, (drawn, cotangents, whole) in enumerate(
            zip(self.drawn, self.cotangents, self.whole, strict=True)
        ):
            for division in (
                ways if i == 0 else ways[-2:]
            ):  # of the first numbers all ways, of the others the hardest
                try:
                    text = self._differs(claim, division, drawn, cotangents, whole)
                except CannotTry as error:
                    text = str(error)
                if text:
                    return text
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
            parts = [_take(one, place, ids) for one, place in zip(drawn, claim.places, strict=True)]
            wanted = [_take(one, claim.out, ids) for one in cotangents]
            pieces.append(answer(self.call, parts, wanted))
        if any(len(one.values) != len(whole.values) for one in pieces):
            return "the pieces give another number of results"
        limits = whole.limits()
        for i, value in enumerate(whole.values):
            found = [one.values[i] for one in pieces]
            if claim.out is None and not value.is_floating_point():
                return "its result is no sum over that dim"
            if not _matches(found, value, claim.out, division, limits):
                return "the result of the pieces is another" + ("" if claim.out is not None else ", added up")
        for i, gradient in enumerate(whole.gradients):
            got = [one.gradients[i] for one in pieces]
            if gradient is None and any(one is not None for one in got):
                return f"pieces give operand {i} a gradient, the whole does not"
            if gradient is not None and not _matches(got, gradient, claim.places[i], division, limits):
                return f"the gradient of operand {i} is another"
        return ""

    def is_linear(self) -> bool:
        """Whether backward is linear in the gradient that it is given: only then may partial sums go through it."""
        for drawn, cotangents, whole in zip(self.drawn, self.cotangents, self.whole, strict=True):
            if all(one is None for one in whole.gradients):
                continue
            turned = [one.flip(tuple(range(one.dim()))) for one in cotangents]
            rest = [
                one - other if one.is_floating_point() else one
                for one, other in zip(cotangents, turned, strict=True)
            ]
            shares = [answer(self.call, drawn, some).gradients for some in (turned, rest)]
            sums = [(list(two), one) for one, *two in zip(whole.gradients, *shares, strict=True)]
            for factor in (1e-4, 1e4):
                scaled = answer(self.call, drawn, [one * factor for one in cotangents]).gradients
                sums += [
                    ([None if one is None else one / factor], two)
                    for one, two in zip(scaled, whole.gradients, strict=True)
                ]
            tolerance, scale = whole.limits()
            limits = OF_LINEARITY * tolerance, scale
            if not all(two is None or _matches(one, two, None, [], limits) for one, two in sums):
                return False
        return True


@cache
def make_trial(call: Call) -> Trial:
    """Draw operands and run the call; CannotTry says why it is refused as a whole."""
    drawn, cotangents, whole = [], [], []
    for seed, draw in enumerate(DRAWS):
        source = torch.Generator().manual_seed(1000 + seed)
        tensors = [
            _draw(size, dtype, call, draw, source)
            for size, dtype in zip(call.shapes, call.dtypes, strict=True)
        ]
        first = answer(call, tensors, None)
        wanted = [
            torch.randn(one.shape, generator=source, dtype=torch.float64).to(one.dtype)
            for one in first.values
        ]
        found = answer(call, tensors, wanted)
        if not _equal(found, answer(call, tensors, wanted)):
            raise Unfit("it gives other values when it is called again")
        if _says_something(found):
            _check_layout(call, tensors, found)
            drawn.append(tuple(tensors))
            cotangents.append(tuple(wanted))
            whole.append(found)
    if len(whole) < ENOUGH:
        raise CannotTry("its values or gradients on random numbers are all equal, zero, or not finite")
    if not all(_differ([one.values[i] for one in whole]) for i in range(len(whole[0].values))):
        raise CannotTry("its value is the same for all random numbers")
    return Trial(call, tuple(drawn), tuple(cotangents), tuple(whole))


def answer(call: Call, tensors: Sequence[Tensor], cotangents: Sequence[Tensor] | None) -> Answer:
    """Run a call; gradients for these cotangents, where the trace says that it has any."""
    leaves = [
        one.detach().clone().requires_grad_(one.is_floating_point() and call.needs_grad) for one in tensors
    ]
    with torch.enable_grad():
        read = [one.clone() if one.requires_grad else one for one in leaves]
        values = call.run(read)
        if any(not torch.equal(one, two) for one, two in zip(read, tensors, strict=True)):
            raise Unfit("it writes into its operands")
        gradients: list[Tensor | None] = [None] * len(leaves)
        pairs = zip(values, cotangents or (), strict=False)
        heads = [(one, wanted) for one, wanted in pairs if one.requires_grad]
        floats = [i for i, one in enumerate(leaves) if one.requires_grad]
        if heads and floats:
            if any(one.shape != wanted.shape for one, wanted in heads):
                raise CannotTry("its result has another shape")
            ends, wanted = zip(*heads, strict=True)
            try:
                found = torch.autograd.grad(ends, [leaves[i] for i in floats], wanted, allow_unused=True)
            except Exception as error:  # a backward that is missing or fails
                raise CannotTry(f"its backward fails: {str(error).splitlines()[0]}") from error
            for i, gradient in zip(floats, found, strict=True):
                gradients[i] = gradient
    return Answer(tuple(one.detach() for one in values), tuple(gradients))


def _check_layout(call: Call, tensors: list[Tensor], first: Answer) -> None:
    """The same values of operands that lie otherwise in memory, as they may on a rank."""
    try:
        turned = answer(call, [one.mT.contiguous().mT if one.dim() > 1 else one for one in tensors], None)
    except CannotTry:
        return  # it says so itself
    pairs = list(zip(turned.values, first.values, strict=True))
    if any(
        one.shape != two.shape or not _close(one, two, _tolerance(first.values), 0.0) for one, two in pairs
    ):
        raise Unfit("it reads how its operands lie in memory")


def _says_something(found: Answer) -> bool:
    """Finite, and not one number everywhere: zeros add up to zeros however they are cut. Nor may all gradients be zero."""
    gradients = [one for one in found.gradients if one is not None]
    if not all(bool(one.isfinite().all()) for one in (*found.values, *gradients)):
        return False
    if gradients and not any(map(_size_of, gradients)):
        return False
    return all(
        one.numel() and bool((one != (0 if one.numel() == 1 else one.flatten()[0])).any())
        for one in found.values
    )


def _differ(values: Sequence[Tensor]) -> bool:
    """Whether not all of them are the same."""
    return any(one.shape != values[0].shape or not torch.equal(one, values[0]) for one in values[1:])


def _draw(
    size: tuple[int, ...], dtype: torch.dtype, call: Call, draw: Draw, source: torch.Generator
) -> Tensor:
    if dtype.is_floating_point:
        return draw(size, source)
    if dtype == torch.bool:
        return torch.rand(size, generator=source) > 0.5
    sizes = [
        n
        for one, kind in zip(call.shapes, call.dtypes, strict=True)
        for n in one
        if kind.is_floating_point and n > 1
    ]
    return torch.randint(
        min(sizes, default=5), size, generator=source, dtype=dtype
    )  # an index of any of their dims


def _take(x: Tensor, dim: int | None, ids: Tensor) -> Tensor:
    return x if dim is None else x.index_select(dim, ids)


def _matches(
    found: Sequence[Tensor | None],
    wanted: Tensor,
    dim: int | None,
    division: list[Tensor],
    limits: tuple[float, float],
) -> bool:
    """Whether pieces are those of `wanted` along `dim`, or add up to it where that is None. No gradient is zeros."""
    if dim is None:
        parts = [one for one in found if one is not None]
        is_alike = all(one.shape == wanted.shape for one in parts)
        return is_alike and _close(sum(parts, torch.zeros_like(wanted)), wanted, *limits)
    targets = [wanted.index_select(dim, ids) for ids in division]
    pieces = [torch.zeros_like(two) if one is None else one for one, two in zip(found, targets, strict=True)]
    return all(
        one.shape == two.shape and _close(one, two, *limits) for one, two in zip(pieces, targets, strict=True)
    )


def _close(one: Tensor, two: Tensor, tolerance: float, scale: float) -> bool:
    if one.dtype != two.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, two)
    error = (one - two).abs().max() if one.numel() else torch.zeros(())
    return bool(error <= tolerance * max(_size_of(two), scale))


def _tolerance(values: Sequence[Tensor]) -> float:
    """Some hundred roundings of the dtype."""
    return max([300 * torch.finfo(one.dtype).eps for one in values if one.is_floating_point()], default=0.0)


def _size_of(x: Tensor | None) -> float:
    return float(x.abs().max()) if x is not None and x.is_floating_point() and x.numel() else 0.0


def _equal(one: Answer, two: Answer) -> bool:
    """To the bit; what is not finite is compared as it is."""
    pairs = zip((*one.values, *one.gradients), (*two.values, *two.gradients), strict=True)
    return all(
        a is b
        if a is None or b is None
        else a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in pairs
    )


def _fill(arg: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(arg, Slot):
        return tensors[arg.number]
    return [_fill(one, tensors) for one in arg] if isinstance(arg, tuple) else arg


__all__ = ["Call", "CannotTry", "Claim", "Slot", "Trial", "Unfit", "make_trial"]
