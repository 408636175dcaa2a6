"""Write the casts of torch.autocast into a trace.

In: an operator that a forward calls while it is traced, and its operands. Out: the operands as autocast would
pass them. Thread state becomes casts in the graph: every rank computes them, and Python code of the model that
reads a dtype sees them during tracing.

    autocast = Autocast("cpu", torch.bfloat16)
    with autocast.ambient():
        Casting(autocast).call(record, F.linear, (x, w), {})    # records F.linear(x.to(bfloat16), w.to(bfloat16))

There is no list of operators and dtypes here. An operator is run on fake tensors under autocast, and the dtypes
of the operators that it calls are compared with those under each of the three casts that autocast supports. So
the policy is that of the installed torch, and CUDA's is available on a machine without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph
from torch.utils.weak import WeakTensorKeyDictionary

from autoptd.compat import (
    DATA_DEPENDENT,
    FakeTensorMode,
    PreDispatchMode,
    TorchDispatchMode,
    enable_python_dispatcher,
    quiet_fakes,
    tree_flatten,
    tree_map,
    tree_unflatten,
    without_modes,
)
from autoptd.errors import TraceError
from autoptd.ir.notes import placeholders, value

aten = torch.ops.aten
# Calls that compute nothing, or are the casts themselves.
NO_WORK = (aten._to_copy.default, aten.to.dtype, aten.detach.default, torch.ops.prim.device.default)
# Operators whose third argument requests a float32 result.
SOFTMAXES = (aten._softmax.default, aten._log_softmax.default)
NARROW = (torch.float16, torch.bfloat16)
REMEDY = "write it with plain operators, or inside torch.autocast(..., enabled=False)"
Target = Callable[..., Any]


@dataclass(frozen=True)
class Autocast:
    """Describe the requested autocast: `dtype` for the whole forward or None, on the ranks' `device_type`.

    `traced_on` is the device of the model while it is traced: the model's code reads and sets its autocast state.
    """

    device_type: str = "cpu"
    dtype: torch.dtype | None = None
    traced_on: str = "cpu"

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.device_type, self.traced_on)))

    @contextmanager
    def ambient(self) -> Iterator[None]:
        """Enter autocast around the forward, as a user's training loop does."""
        with _state(self.devices, self.dtype):
            yield

    @contextmanager
    def around(self) -> Iterator[None]:
        """Make a model that is called here match its trace.

        Uses torch's autocast if the ranks are on the model's device type, else inserts the casts of theirs.
        """
        if self.dtype is None:
            yield
        elif self.device_type == self.traced_on:
            with torch.autocast(self.device_type, self.dtype):
                yield
        else:
            with self.ambient(), enable_python_dispatcher(), CastingMode(Casting(self)):
                yield

    @property
    def dtype_now(self) -> torch.dtype | None:
        """Return the dtype of autocast at this point of the forward, None if off; inner regions override."""
        for device in self.devices:
            # torch.autocast("cuda") in a model that is traced on the CPU is meant for the ranks.
            if torch.is_autocast_enabled(device) == (self.dtype is None):
                return torch.get_autocast_dtype(device) if self.dtype is None else None
        return None if self.dtype is None else torch.get_autocast_dtype(self.traced_on)


OFF = Autocast()


class Casting:
    """Cast operands as autocast would; a parameter is cast once, and all its readers share the cast."""

    def __init__(self, autocast: Autocast) -> None:
        self.autocast = autocast
        self._cast_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def operands(self, call: Callable[..., Any], func: Target, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the operands that autocast passes to `func`; `call(func, args, kwargs)` makes the casts."""
        dtype = self.autocast.dtype_now
        if dtype is None:
            return args, kwargs
        leaves, tree = tree_flatten((args, kwargs))
        if not any(_is_eligible(leaf) for leaf in leaves):
            return args, kwargs
        described = tuple(_Like.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        chosen = _choose(func, described, tree, self.autocast.device_type, dtype)
        wanted = [_dtype_under(chosen, leaf, leaves, dtype) for leaf in leaves]
        made = []
        for leaf, to in zip(leaves, wanted, strict=True):
            made.append(leaf if to is None else self._cast(leaf, to, call))
        return tree_unflatten(made, tree)  # type: ignore[return-value]

    def call(self, call: Callable[..., Any], func: Target, args: Any, kwargs: Any) -> Any:
        """Call an operator with the operands that autocast passes to it."""
        return call(func, *self.operands(call, func, args, kwargs))

    def _cast(self, x: Tensor, dtype: torch.dtype, call: Callable[..., Any]) -> Tensor:
        # Autocast caches these casts. Their gradients add up in `dtype`, so sharing affects the result.
        is_cached = x.is_leaf and x.requires_grad and dtype in NARROW and torch.is_grad_enabled()
        known = self._cast_of.get(x) if is_cached else None
        if known is not None and known.dtype == dtype:
            return known  # type: ignore[no-any-return]
        made: Tensor = call(aten.to.dtype, (x, dtype), {})
        if is_cached:
            self._cast_of[x] = made
        return made


class CastingMode(PreDispatchMode):
    """Cast the operands of all operators that are called inside this mode, outside of a trace."""

    def __init__(self, casting: Casting) -> None:
        super().__init__()
        self._casting = casting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._casting.call(_call, func, args, kwargs or {})


def _call(func: Target, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def cast_once(graph: Graph, dtype: torch.dtype) -> None:
    """Make a parameter that is only read as `dtype` one of that dtype: ranks cast it once per step."""
    for node in placeholders(graph, "param"):
        casts = [user for user in node.users if user.target is aten.to.dtype and user.args[1] == dtype]
        if not casts or len(casts) < len(node.users):
            continue
        node.meta["val"] = value(casts[0])
        for cast in casts:
            cast.replace_all_uses_with(node)
            graph.erase_node(cast)


@dataclass(frozen=True)
class _Like:
    """Describe a tensor without data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> _Like:
        return cls(tuple(x.shape), x.stride(), x.dtype)


def _is_eligible(leaf: Any) -> bool:
    """Tell whether autocast may cast an operand: 64-bit dtypes are left alone."""
    is_tensor = isinstance(leaf, (Tensor, _Like))
    return is_tensor and leaf.dtype.is_floating_point and leaf.dtype != torch.float64


def _dtype_under(name: str, leaf: Any, leaves: Any, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype to which a choice casts an operand, None if it leaves it unchanged."""
    if name == "none" or not _is_eligible(leaf):
        return None
    if name == "narrow":
        to = dtype
    elif name == "float32":
        to = torch.float32
    else:
        dtypes = [other.dtype for other in leaves if _is_eligible(other)]
        to = torch.float32 if torch.float32 in dtypes else dtypes[0]
    return None if leaf.dtype == to else to


@cache
def _choose(func: Target, leaves: tuple[Any, ...], tree: Any, device_type: str, dtype: torch.dtype) -> str:
    """Return the name of the cast that autocast applies to the operands of an operator.

    Where autocast casts between the steps of an operator, or picks another kernel, which casts of operands
    cannot express, the choice is float32 or narrow, by the dtype of the result. TraceError if it cannot be
    determined: a CUDA-only operator on a machine without CUDA.
    """
    try:
        wanted = _calls_of(func, leaves, tree, device_type, dtype)
    # The forward fails by itself, where its line is known.
    except DATA_DEPENDENT:
        return "none"
    except (RuntimeError, AssertionError) as error:
        line = str(error).strip().splitlines()[0]
        raise TraceError(
            str(func), f"cannot be run under autocast on {device_type}: {line}", REMEDY
        ) from error
    found = {}
    for name in ("none", "narrow", "float32", "widest"):
        cast = []
        for leaf in leaves:
            to = _dtype_under(name, leaf, leaves, dtype)
            cast.append(leaf if to is None else _Like(leaf.shape, leaf.stride, to))
        # The operator may reject operands of two dtypes.
        with suppress(RuntimeError):
            found[name] = _calls_of(func, tuple(cast), tree, device_type, None)
        if found.get(name) == wanted:
            return name
    # On CUDA torch computes the log-probabilities of a cross entropy in 16 bits, and the rest in float32.
    for name in ("float32", "narrow"):
        if name in found and found[name].results == wanted.results:
            return name
    raise TraceError(
        str(func),
        f"under autocast it returns {wanted.results}, which no cast of its operands reproduces",
        REMEDY,
    )


def _calls_of(
    func: Target, leaves: tuple[Any, ...], tree: Any, device_type: str, dtype: torch.dtype | None
) -> _Run:
    """Run an operator under autocast to `dtype`; return its calls and the dtypes of its results."""
    calls = _Calls()
    state = _state((device_type, "cpu"), dtype, device_type)
    with without_modes(), quiet_fakes(), FakeTensorMode(), torch.no_grad(), state:
        args, kwargs = tree_unflatten([_make(leaf, device_type) for leaf in leaves], tree)
        with calls:
            results = func(*args, **kwargs)
    return _Run(tuple(calls.met), tree_map(lambda x: x.dtype if isinstance(x, Tensor) else None, results))


def _make(leaf: Any, device_type: str) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device(device_type)
    if not isinstance(leaf, _Like):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=device_type)


class _Run(NamedTuple):
    """Hold the computing operators of a run with their operands' dtypes, and the dtypes of the results."""

    calls: tuple[Any, ...]
    results: Any


class _Calls(TorchDispatchMode):
    """Record the operators that compute something, and the dtypes of their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in NO_WORK and not func.is_view:
            leaves = tree_flatten((args, kwargs))[0]
            # An operator with a dtype argument computes in that dtype: it casts its operands itself.
            told = [leaf for leaf in leaves if isinstance(leaf, torch.dtype)]
            if func in SOFTMAXES and args[2]:
                told = [torch.float32]
            dtypes = [leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)]
            met = [told[0] if told and dtype in NARROW else dtype for dtype in dtypes]
            self.met.append((func.overloadpacket, *met))
        return func(*args, **(kwargs or {}))


@contextmanager
def _state(devices: tuple[str, ...], dtype: torch.dtype | None, only: str = "") -> Iterator[None]:
    """Set autocast of some devices, on for `only` one of them; `torch.autocast` rejects an absent device."""
    with ExitStack() as stack:
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        for device in dict.fromkeys(devices):
            stack.callback(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device))
            stack.callback(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device))
            torch.set_autocast_enabled(device, dtype is not None and only in ("", device))
            torch.set_autocast_dtype(device, dtype or torch.bfloat16)
        yield
