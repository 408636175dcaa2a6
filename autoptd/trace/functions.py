"""Trace custom autograd functions through their forward, or as one operator.

torch.export drops the backward of an `autograd.Function`. Many of them only save memory or time, and autograd
of their forward gives the same gradients (BLOOM's GELU): these are traced through their forward. This is
tested on random numbers of several magnitudes, forward and backward. All others (`other_functions`) need a
second trace, in which each is one operator with its own backward (`call_whole`); a function that reads state
which may change later (`outside.py`) is refused by name.

    met.append(Call.of(GeLUFunction, args));  y = run_forward(GeLUFunction, args)     # while tracing
    whole = other_functions(met)                                                      # afterwards
    y = call_whole(RoundStraightThrough, args)                                        # while tracing again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoptd.errors import TraceError, a_type
from autoptd.trace.outside import outside_state
from autoptd.trace.own_functions import operator_for

STATE_REMEDY = (
    "pass it as an argument of apply (a tensor that is an input of the model), or write it as a constant"
)
REMEDY = "write it with differentiable torch operators"
# Scales of the random arguments; incoming gradients are scaled by the third power.
SIZES = (1e-2, 1.0, 1e2)
# Relative to the largest entry, in float64.
TOLERANCE = 1e-7
# Arguments of more entries are tried with smaller dims.
MAX_ENTRIES = 1 << 20
PLAIN = (int, float, bool, str, torch.dtype, type(None))


class Unfit(Exception):
    """Report why the backward of a function is not known to be the derivative of its forward."""


class ReadsParameters(Unfit):
    """Report a forward that reads parameters which are not arguments: backward has no gradients for them."""


@dataclass(frozen=True)
class Given:
    """Describe a tensor argument of a function; its gradient is only compared if it needs one."""

    shape: torch.Size
    needs_gradient: bool


@dataclass(frozen=True)
class Call:
    """Pair a function with its arguments, with tensors as `Given`."""

    function: Any
    args: tuple[Any, ...]

    @classmethod
    def of(cls, function: Any, args: Sequence[Any]) -> Call:
        site = f"autograd.Function {function.__name__}"
        for arg in args:
            if not isinstance(arg, (Tensor, *PLAIN)):
                fact = f"its backward is not traced, and it takes {a_type(arg)}"
                raise TraceError(site, fact, REMEDY)
        given = [Given(arg.shape, arg.requires_grad) if isinstance(arg, Tensor) else arg for arg in args]
        return cls(function, tuple(given))


class NeedsContext(Exception):
    """Report a forward that configures autograd through its context: it cannot run as plain operators."""


class _Context:
    """Stand in for the context of `forward`; saved tensors are dropped, as backward is not called."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(arg, Tensor) and arg.requires_grad for arg in args)

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        raise NeedsContext


def run_forward(function: Any, args: Sequence[Any]) -> Any:
    """Run the forward of a function as plain operators, which autograd sees."""
    has_context = function.setup_context is torch.autograd.Function.setup_context
    try:
        return function.forward(*([_Context(args)] if has_context else []), *args)
    # The function calls a context method that changes how autograd works.
    except AttributeError as error:
        fact = f"its backward is not traced: {error}"
        raise TraceError(f"autograd.Function {function.__name__}", fact, REMEDY) from error


def takes_others(args: Sequence[Any]) -> bool:
    """Tell whether a function takes non-float tensors, so that it cannot be tested on random numbers."""
    return any(isinstance(arg, Tensor) and not arg.dtype.is_floating_point for arg in args)


def call_whole(function: Any, args: Sequence[Any]) -> Any:
    """Call a function as one operator of the graph, with the backward that it has."""
    for method in (function.forward, function.backward):
        _check_state(function, method)
    operator, given = operator_for(function, tuple(args))
    return operator(*given)


def _check_state(function: Any, method: Any) -> None:
    read = outside_state(method)
    if read:
        which = "backward" if method is function.backward else "forward"
        fact = f"its {which} reads {read}, whose later values the traced graph would not see"
        raise TraceError(f"autograd.Function {function.__name__}", fact, STATE_REMEDY)


def other_functions(met: Sequence[Call]) -> set[Any]:
    """Return the functions whose gradients are not the derivatives of their forward, or may not be."""
    found: set[Any] = set()
    for call in dict.fromkeys(met):
        # A test may pass only because of state that the function reads now.
        _check_state(call.function, call.function.backward)
        try:
            # Testing must not advance the user's random generators.
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.manual_seed(0)
                for size in SIZES:
                    _try(call, size)
        except ReadsParameters:
            fact = "its forward reads parameters that are not among its arguments: they would get no gradient"
            raise TraceError(f"autograd.Function {call.function.__name__}", fact, REMEDY) from None
        except Unfit:
            found.add(call.function)
    return found


def _try(call: Call, size: float) -> None:
    small = _small_sizes([arg.shape for arg in call.args if isinstance(arg, Given)])
    drawn: list[Any] = []
    for arg in call.args:
        if isinstance(arg, Given):
            shape = [small.get(n, n) for n in arg.shape]
            arg = size * torch.randn(shape, dtype=torch.float64, device="cpu")
        drawn.append(arg)
    trained = [arg.needs_gradient for arg in call.args if isinstance(arg, Given)]
    runs = (lambda args: run_forward(call.function, args), lambda args: call.function.apply(*args))
    try:
        if any(tensor.requires_grad for tensor in _tensors(run_forward(call.function, drawn))):
            raise ReadsParameters
        leaves = _leaves(drawn, trained), _leaves(drawn, trained)
        found, wanted = (_tensors(run(_filled(drawn, own))) for run, own in zip(runs, leaves, strict=True))
        # Scale gradients against values: a clamp in the backward shows in one of the combinations.
        ways = [size**3 * torch.randn_like(tensor) for tensor in wanted]
        gradients = [
            _gradients(result, own, ways) for result, own in zip((found, wanted), leaves, strict=True)
        ]
    except Unfit:
        raise
    except Exception as error:
        raise Unfit(f"it cannot be tried on random numbers: {error}") from error
    for mine, other in zip([*found, *gradients[0]], [*wanted, *gradients[1]], strict=True):
        scale = max(float(other.detach().abs().max()), 1e-300) if other.numel() else 1.0
        if not torch.allclose(mine, other, rtol=0.0, atol=TOLERANCE * scale):
            raise Unfit("it is not the derivative of its forward")


def _leaves(args: Sequence[Any], trained: list[bool]) -> list[Tensor]:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    return [tensor.clone().requires_grad_(is_so) for tensor, is_so in zip(tensors, trained, strict=True)]


def _gradients(made: list[Tensor], leaves: list[Tensor], ways: list[Tensor]) -> list[Tensor]:
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    live = [(tensor, way) for tensor, way in zip(made, ways, strict=True) if tensor.requires_grad]
    if not live:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(
        [tensor for tensor, _ in live], leaves, [way for _, way in live], allow_unused=True
    )
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for gradient, leaf in zip(found, leaves, strict=True)
    ]


def _filled(args: Sequence[Any], leaves: Sequence[Tensor]) -> list[Any]:
    """Return `args` with other tensors, cloned in case the forward writes to its arguments."""
    rest = iter(leaves)
    return [next(rest).clone() if isinstance(arg, Tensor) else arg for arg in args]


def _small_sizes(shapes: Sequence[torch.Size]) -> dict[int, int]:
    """Map the dim sizes of large arguments to smaller ones; equal sizes stay equal, others different."""
    if all(shape.numel() <= MAX_ENTRIES for shape in shapes):
        return {}
    large = sorted({n for shape in shapes for n in shape if n > 8})
    return {n: 10 + 2 * i for i, n in enumerate(large)}


def _tensors(made: Any) -> list[Tensor]:
    return [
        tensor
        for tensor in (made if isinstance(made, (tuple, list)) else [made])
        if isinstance(tensor, Tensor)
    ]
