"""Trace custom autograd functions through their forward, or as one operator.

A graph of operators drops the backward of an `autograd.Function`. Many of them only save memory or time, and autograd of
their forward gives the same gradients (BLOOM's GELU): these are traced through their forward. This is tested on
random numbers of several magnitudes, forward and backward. All others (`other_functions`) need a second trace, in
which each is one operator with its own backward (`call_whole`): an operator in torch's registry that calls `apply`,
so that it is traced, tested and differentiated like every other one (see `ir/own_functions.py`).

    met.append(Call.of(GeLUFunction, args));  y = run_forward(GeLUFunction, args)     # while tracing
    whole = other_functions(met)                                                      # afterwards
    y = call_whole(RoundStraightThrough, args)                                        # while tracing again

Refused by name are functions that draw random numbers, write into their arguments, return other values than tensors,
or read state that a program may change later (class attributes, objects, reassigned globals): a trace made with
`AuxLoss.scale = 0.0` would keep that value forever.
"""

from __future__ import annotations

import dis
import enum
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoptd.compat import FakeTensorMode, OpOverload, TorchDispatchMode, without_modes
from autoptd.errors import TraceError, a_type
from autoptd.ir.own_functions import OWN, Own, name_of
from autoptd.subject.contents import PLAIN

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
ARGUMENTS = (int, float, bool, str, torch.dtype, type(None))


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
            if not isinstance(arg, (Tensor, *ARGUMENTS)):
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


NAMESPACE = "autoptd_functions"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
# torch's original, which is patched while a model is traced.
APPLY = torch.autograd.Function.__dict__["apply"].__func__
OPERATORS: dict[Any, OpOverload] = {}
# Schema types of arguments; arguments of other types become part of the operator.
SCHEMA_TYPES = {bool: "bool", int: "int", float: "float", str: "str"}


def operator_for(function: Any, args: tuple[Any, ...]) -> tuple[OpOverload, list[Any]]:
    """Return the operator for a call and its arguments; TraceError if the function is not one of tensors."""
    fixed = tuple((i, arg) for i, arg in enumerate(args) if not _is_given(arg))
    given = [arg for arg in args if _is_given(arg)]
    words = ["Tensor" if isinstance(arg, Tensor) else SCHEMA_TYPES[type(arg)] for arg in given]
    count = _results_of(function, args)
    key = (function, fixed, tuple(words), count)
    if key not in OPERATORS:
        own = Own(function, name_of(function), fixed)
        listed = ", ".join(f"{word} x{i}" for i, word in enumerate(words))
        results = "Tensor" if count == 0 else f"({', '.join(['Tensor'] * count)})"
        name = _unused(re.sub(r"[^A-Za-z0-9]", "_", function.__name__))
        LIBRARY.define(f"{name}({listed}) -> {results}")

        def kernel(*given: Any) -> Any:
            return APPLY(function, *own.arguments(given))

        for dispatch_key in ("Autograd", "CompositeExplicitAutograd"):
            LIBRARY.impl(name, kernel, dispatch_key)
        OPERATORS[key] = getattr(getattr(torch.ops, NAMESPACE), name).default
        OWN[OPERATORS[key]] = own
    return OPERATORS[key], given


def _unused(name: str) -> str:
    """Return an unused operator name: the class's name, with a number only if that is taken."""
    number, made = 1, name
    while hasattr(getattr(torch.ops, NAMESPACE), made):
        number += 1
        made = f"{name}_{number}"
    return made


def _is_given(arg: Any) -> bool:
    return isinstance(arg, Tensor) or type(arg) in SCHEMA_TYPES


def _results_of(function: Any, args: tuple[Any, ...]) -> int:
    """Run forward and backward without values; return the length of forward's tuple, 0 for a tensor."""
    site = f"autograd.Function {function.__name__}"
    with without_modes(), FakeTensorMode(), _Deterministic(site), torch.enable_grad():
        fakes = [_fake(arg) for arg in args]
        versions = _versions(fakes)
        try:
            made = APPLY(function, *fakes)
            results = list(made) if isinstance(made, tuple) else [made]
            if not all(isinstance(result, Tensor) for result in results):
                raise TraceError(site, "it returns something other than tensors", REMEDY)
            if versions != _versions(fakes):
                raise TraceError(site, "it writes into its arguments", "write out of place")
            heads = [result for result in results if result.requires_grad]
            if heads:
                torch.autograd.backward(heads, [torch.ones_like(head) for head in heads])
        except TraceError:
            raise
        except Exception as error:
            fact = f"forward or backward cannot be run without values: {str(error).splitlines()[0]}"
            raise TraceError(site, fact, REMEDY) from error
    return len(results) if isinstance(made, tuple) else 0


def _versions(args: Sequence[Any]) -> list[int]:
    """Count the writes to each tensor, unseen by the trace around, which refuses a model that does so."""
    with torch._C.DisableTorchFunction():
        return [x._version for x in args if isinstance(x, Tensor)]


def _fake(arg: Any) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    made = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)
    return made.requires_grad_(arg.dtype.is_floating_point)


class _Deterministic(TorchDispatchMode):
    """Refuse operators that draw random numbers."""

    def __init__(self, site: str) -> None:
        super().__init__()
        self._site = site

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            fact = f"it draws random numbers ({func}), and every rank would draw its own"
            raise TraceError(self._site, fact, "draw them before apply, and pass them as an argument")
        return func(*args, **(kwargs or {}))


MUTABLE = (torch.Tensor, dict, list, set, bytearray)
TRUSTED = {
    "torch",
    "math",
    "numpy",
    "builtins",
    "functools",
    "operator",
    "typing",
    "collections",
    "logging",
    "warnings",
}
LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"}
ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
NOTHING = object()


def outside_state(function: Any, seen: set[Any] | None = None) -> str:
    """Name some mutable state that `function`, or a function that it calls, reads; "" if there is none."""
    seen = set() if seen is None else seen
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None or code in seen or _is_library(getattr(function, "__module__", "")):
        return ""
    seen.add(code)
    for name, value, owner in _reads(function, code):
        if isinstance(value, types.FunctionType | types.MethodType | staticmethod | classmethod):
            found = outside_state(value, seen)
            if found:
                return found
        elif _may_change(name, value, owner):
            return name
    return ""


def _reads(function: Any, code: types.CodeType) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, value, owner) of every global and closed-over name that `code` loads."""
    names = _outside_names(function, code)
    chain: tuple[str, Any, Any] | None = None
    for step in dis.get_instructions(code):
        if chain is not None and step.opname in ATTRIBUTES:
            name, value, _ = chain
            chain = (f"{name}.{step.argval}", getattr(value, step.argval, NOTHING), value)
        elif step.opname in LOADS and step.argval in names:
            chain = (step.argval, names[step.argval], function)
        else:
            chain = None
        if chain is not None:
            yield chain
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _reads(function, inner)


def _outside_names(function: Any, code: types.CodeType) -> dict[str, Any]:
    found = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        # The cell is still unassigned.
        except ValueError:
            found[name] = NOTHING
    return found


def _may_change(name: str, value: Any, owner: Any) -> bool:
    """Tell whether a program may change the value of a name between two steps."""
    if value is NOTHING or callable(value) or isinstance(value, (types.ModuleType, enum.Enum)):
        return False
    # Library objects, such as loggers, are trusted.
    if not isinstance(value, (*PLAIN, *MUTABLE)) and _is_library(type(value).__module__):
        return False
    if isinstance(owner, types.ModuleType):
        return not _is_library(owner.__name__)
    # The name belongs to the function's file or to its enclosing function.
    if isinstance(owner, types.FunctionType):
        rebinds = name in _rebound(owner.__globals__)
        return rebinds or not isinstance(value, (*PLAIN, tuple, frozenset))
    return not _is_library(getattr(owner, "__module__", None) or type(owner).__module__)


def _rebound(names: dict[str, Any]) -> set[str]:
    """Return the globals that a function or method of the same module assigns."""
    found: set[str] = set()
    pending = [
        value for value in names.values() if getattr(value, "__module__", None) == names.get("__name__")
    ]
    for value in pending:
        methods = list(vars(value).values()) if isinstance(value, type) else [value]
        for method in methods:
            code = getattr(getattr(method, "__func__", method), "__code__", None)
            if code is not None:
                found |= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
    return found


def _is_library(module: str | None) -> bool:
    return (module or "").split(".")[0] in TRUSTED
