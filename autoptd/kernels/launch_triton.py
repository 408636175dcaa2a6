"""Launch Triton kernels with less host overhead, through a cache of compiled kernels.

Triton specializes a kernel on its arguments: dtypes, whether addresses and integers are multiples of 16,
whether an integer is 1, and the width of integers. It recomputes this at every launch, which is most of the
launch's host time, and host time limits small models. Here the specialization is the key of a cache, at least
as fine as Triton's, and a cached kernel is launched directly.

    launched(_forward, (rows,), x)(x, y, width, EPS=eps, BLOCK=1024, num_warps=4)

Imported only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton.runtime import JITFunction, driver

Tensor = torch.Tensor
Grid = tuple[int, ...]

# (kernel, device, kinds of arguments, constants) -> the compiled kernel and its trailing constants.
_known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launched(kernel: Any, grid: Grid, x: Tensor) -> Callable[..., Any]:
    """Return a launcher of `kernel` for tensors like `x`; on the meta device it does nothing.

    The launcher takes the arguments by position, then constants by name in the order of the signature, and
    Triton's options.
    """
    if _has_no_values(x):
        return _nothing
    # Triton's interpreter wraps kernels in another class than JITFunction.
    return partial(_launch, kernel, grid) if isinstance(kernel, JITFunction) else kernel[grid]  # type: ignore[no-any-return]


def _has_no_values(x: Tensor) -> bool:
    return x.is_meta


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _launch(kernel: Any, grid: Grid, *arguments: Any, **constants: Any) -> None:
    device = driver.active.get_current_device()
    key = (id(kernel), device, *map(kind, arguments), *constants.items())
    found = _known.get(key)
    if found is not None:
        compiled, rest = found
        compiled[(*grid, 1, 1)](*arguments, *rest, stream=driver.active.get_current_stream(device))
        return
    compiled = kernel[grid](*arguments, **constants)
    names = kernel.arg_names[len(arguments) :]
    if compiled is not None and all(name in constants for name in names):
        _known[key] = compiled, tuple(constants[name] for name in names)


def kind(x: Any) -> Any:
    """Return the specialization key of an argument: arguments of one kind share a compiled kernel."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if type(x) is int:
        # Triton picks the type by magnitude, specializes on multiples of 16, and makes 1 a constant.
        return -(2**31) <= x < 2**31, x < 2**63, x % 16 == 0, x == 1
    # All floats share a kind; None and bools are their own.
    return float if isinstance(x, float) else x
