"""Launch a kernel as Triton does, and find what it was compiled to by a shorter way.

Triton compiles a kernel once for each kind of arguments: their dtypes; whether addresses and integers are multiples of
16, or integers 1; how wide these are. At each launch it finds the kind of every argument again, which takes most of a
launch's time on the host, where small models are slow. Here the kinds are a key that is at least as fine, and a kernel
that was compiled for them is launched at once.

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

# By kernel, device, kinds of arguments and constants: the compiled kernel, and the constants that its signature ends with.
_known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launched(kernel: Any, grid: Grid, x: Tensor) -> Callable[..., Any]:
    """Return what launches a kernel on tensors like `x`: nothing on the meta device, where its results have no values.

    It takes the arguments by position, then constants by name, in the order of the signature, with Triton's options.
    """
    if _has_no_values(x):
        return _nothing
    # In Triton's interpreter it is no JITFunction.
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
    """Return what Triton may compile for: two arguments of one kind have one specialization."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if type(x) is int:
        # Its type goes by its size, a multiple of 16 is told from others, and 1 is a constant.
        return -(2**31) <= x < 2**31, x < 2**63, x % 16 == 0, x == 1
    # Numbers with a fraction are alike, None and bools are what they are.
    return float if isinstance(x, float) else x
